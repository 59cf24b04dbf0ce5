"""From Tokens to Watt-hours, SweetSpot and rated power: published anchors, fits, closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hymell_jax import get_device
from hymell_jax.baselines import METHODS, roofline, sweetspot, tdp
from hymell_jax.baselines import tokens_to_watt_hours as t2w
from hymell_jax.model import stack
from hymell_jax.models import preset
from hymell_jax.parameters import active_parameters
from hymell_jax.types import workload

LLAMA = preset("llama-3.1-8b").architecture
H100 = get_device("h100-sxm-80gb").device
TOKENS = np.float32(500)


def watt_hours(row, coefficients):
    n, layers, width = np.float32(row[:3])
    parts = t2w.request_energy_j(n, layers, width, TOKENS, TOKENS, coefficients)
    return float(sum(parts.values())) / 3600.0


# --- From Tokens to Watt-hours ---


@pytest.mark.parametrize("n,millijoules", [(70e9, 218.40), (120e9, 374.40)])
def test_the_simplified_estimator_meets_the_published_anchors(n, millijoules):
    out, _ = t2w.simplified_j_per_token(np.float32(n), TOKENS, t2w.simplified_coefficients())
    assert 1e3 * float(out) == pytest.approx(millijoules, rel=1e-5)


@pytest.mark.parametrize("row", t2w.TABLE3)
def test_the_simplified_estimator_meets_every_row_of_table_3(row):
    # printed to a few digits: half a unit of the last, and 2.53 x 3.12 printed as 7.894
    out, prompt = t2w.simplified_j_per_token(
        np.float32(row[0]), TOKENS, t2w.simplified_coefficients(), width=0
    )
    assert 1e3 * float(out) == pytest.approx(row[3], rel=6e-4)
    assert 1e3 * float(prompt) == pytest.approx(row[4], rel=6e-4)


@pytest.mark.parametrize(
    "tokens,expected",
    [(1, 1.2), (2048, 1.2), (2049, 1.8), (5120, 1.8), (5121, 3), (10240, 3), (10241, 4), (1e7, 4)],
)
def test_the_prompt_multiplier_is_the_published_step(tokens, expected):
    assert float(t2w.prompt_multiplier(tokens, width=0)) == pytest.approx(expected, rel=1e-6)
    assert float(t2w.prompt_multiplier(tokens, width=2e-6)) == pytest.approx(expected, rel=1e-4)


def test_the_smooth_multiplier_rises_and_has_a_gradient():
    tokens = jnp.geomspace(10.0, 1e6, 200)
    smooth = t2w.prompt_multiplier(tokens)
    assert (np.diff(np.asarray(smooth)) >= -1e-6).all()
    assert float(jax.grad(t2w.prompt_multiplier)(2100.0)) > 0
    far = jnp.asarray([500.0, 3300.0, 7300.0, 1e5])
    np.testing.assert_allclose(t2w.prompt_multiplier(far), [1.2, 1.8, 3.0, 4.0], rtol=0.03)


@pytest.mark.parametrize("row", t2w.TABLE3)
def test_the_refit_meets_table_3(row):
    # 0.1 %: the smallest rows are printed to three digits, 0.000599
    assert watt_hours(row, t2w.table3_coefficients()) == pytest.approx(row[5], rel=1e-3)


def test_the_literal_form_overshoots_table_3_by_20_to_149_percent():
    excess = [watt_hours(row, t2w.literal_coefficients()) / row[5] - 1 for row in t2w.TABLE3]
    assert min(excess) == pytest.approx(0.200, abs=0.002)
    assert max(excess) == pytest.approx(1.495, abs=0.002)
    by_size = dict(zip((row[0] for row in t2w.TABLE3), excess, strict=True))
    assert 0.170747 * (1 + by_size[70e9]) == pytest.approx(0.426, abs=5e-4)
    assert 0.155204 * (1 + by_size[120e9]) == pytest.approx(0.229, abs=5e-4)
    assert len(t2w.TABLE3_DEPARTURES) == 4


def test_the_literal_parts_are_the_equations_by_hand():
    # N = 24e9, where gamma = 0.1, s = 2.5 and eta = 1.8; 10 layers of 100; 3 tokens in, 2 out
    parts = t2w.request_energy_j(
        np.float32(24e9), 10.0, 100.0, 3.0, 2.0, t2w.literal_coefficients()
    )
    reads = 2 * 3 + 2 * 1 / 2
    per_flop, per_bit = 0.52e-12, 11.68e-12 * 1.8
    expected = {
        "compute_prefill": per_flop * (6 * 24e9 * 3 + 2 * 10 * 100 * 9),
        "compute_decode": per_flop * (6 * 24e9 * 2 + 4 * 10 * 100 * reads),
        "parameters": per_bit * 16 * 24e9 * 0.1,
        "kv_write": per_bit * 2 * 16 * 100 * 10 * 2,
        "attention_read": per_bit * 2 * 16 * 100 * 10 * reads * 2.5,
    }
    assert set(parts) == set(expected)
    for name, value in expected.items():
        assert float(parts[name]) == pytest.approx(value, rel=1e-5), name


def test_phases_and_token_energies_add_up_to_the_request():
    parts = t2w.request_energy_j(
        np.float32(8e9), 32.0, 4096.0, 700.0, 300.0, t2w.literal_coefficients("a100")
    )
    whole = float(sum(parts.values()))
    tokens = t2w.token_energy_j(parts, 700.0, 300.0)
    assert float(tokens["prefill_j"] + tokens["decode_j"]) == pytest.approx(whole, rel=1e-5)
    per_token = 700 * tokens["per_input_token_j"] + 300 * tokens["per_output_token_j"]
    assert float(per_token) == pytest.approx(whole, rel=1e-5)
    assert float(tokens["per_token_j"]) * 1000 == pytest.approx(whole, rel=1e-5)


def test_published_constants_of_other_gpus_are_refused():
    assert float(t2w.literal_coefficients("a100")["log_j_per_bit"]) == pytest.approx(
        np.log(13.11e-12), rel=1e-6
    )
    with pytest.raises(ValueError, match="h100, a100"):
        t2w.literal_coefficients("b200")


def test_predicted_energies_follow_the_parts_and_the_batch():
    predict, coefficients = METHODS["tokens-to-watt-hours"].form("table3_refit")
    one, four = (
        predict(LLAMA, workload(batch_size=b, prompt_tokens=500, output_tokens=500), H100,
                coefficients())
        for b in (1, 4)
    )  # fmt: skip
    assert float(four.prefill_energy_j) == pytest.approx(4 * float(one.prefill_energy_j), rel=1e-6)
    assert float(four.decode_energy_per_token_j) == pytest.approx(
        float(one.decode_energy_per_token_j), rel=1e-6
    )
    total = one.prefill_energy_j + 500 * one.decode_energy_per_token_j
    assert float(total) / 3600 == pytest.approx(0.0114, rel=0.05)  # 8B of Table 3 has 36 layers


def test_the_calibrated_form_is_linear_below_the_power_limit_and_power_times_time_above():
    c = t2w.calibrated_coefficients()
    idle, limit = float(H100.idle_power_w), float(H100.power_limit_w)
    easy = float(t2w.calibrated_energy_j(1e12, 1e11, 1.0, H100, c))
    assert easy == pytest.approx(0.52 + 1.168 + idle, rel=1e-3)
    # both units flat out for a second would need more than the limit
    flops, bits = 989e12, 8 * 3.35e12
    dynamic = 0.52e-12 * flops + 11.68e-12 * bits
    assert dynamic + idle > limit
    hard = float(t2w.calibrated_energy_j(flops, bits, 1.0, H100, c))
    stretched = dynamic / (limit - idle)
    assert stretched > 1
    assert hard == pytest.approx(dynamic + idle * stretched, rel=0.01)


def test_calibrated_flops_are_two_per_active_parameter_and_token():
    c = t2w.calibrated_coefficients()
    work = workload(batch_size=4, prompt_tokens=128, output_tokens=1, context_tokens=1)
    flops, bits, seconds = t2w.calibrated_features(LLAMA, work, H100, c, "decode")
    embedding = 128256 * 4096
    matmul = float(active_parameters(LLAMA)) - embedding
    assert float(flops) == pytest.approx(2 * 4 * matmul, rel=2e-3)
    assert float(bits) == pytest.approx(16 * matmul, rel=0.01)
    # weights are read once for the whole batch
    _, more, _ = t2w.calibrated_features(
        LLAMA, workload(batch_size=8, prompt_tokens=128, context_tokens=1), H100, c, "decode"
    )
    assert float(more) == pytest.approx(float(bits), rel=0.01)
    assert float(seconds) > 0


def test_the_calibrated_fit_recovers_known_coefficients():
    rng = np.random.default_rng(0)
    flops, bits = 10 ** rng.uniform(9, 14, 40), 10 ** rng.uniform(8, 12.5, 40)
    seconds = 10 ** rng.uniform(-5, -1, 40)
    energy = 0.6e-12 * flops + 9e-12 * bits + 85.0 * seconds
    fitted = t2w.fit_calibrated(flops, bits, seconds, energy, idle_power_w=70.0)
    assert np.exp(fitted["log_j_per_flop"]) == pytest.approx(0.6e-12, rel=1e-4)
    assert np.exp(fitted["log_j_per_bit"]) == pytest.approx(9e-12, rel=1e-4)
    assert np.exp(fitted["log_idle_share"]) == pytest.approx(85 / 70, rel=1e-4)
    assert set(fitted) == set(t2w.CALIBRATED)


def test_the_calibrated_fit_refuses_bad_rows():
    with pytest.raises(ValueError, match="at least 3 rows"):
        t2w.fit_calibrated([1.0], [1.0], [1.0], [1.0], 70.0)
    with pytest.raises(ValueError, match="bits must hold 3"):
        t2w.fit_calibrated([1.0] * 3, [-1.0] * 3, [1.0] * 3, [1.0] * 3, 70.0)
    with pytest.raises(ValueError, match="energy_j must hold finite"):
        t2w.fit_calibrated([1.0] * 3, [1.0] * 3, [1.0] * 3, [0.0] * 3, 70.0)


# --- SweetSpot ---

THETA = np.array([0.3, 2e-7, 4e-5, 8e-3, 2e-5, 1.5])


def test_the_optimum_is_where_the_derivative_is_zero():
    theta = jnp.asarray(THETA, jnp.float32)
    for n in (64.0, 1024.0, 4096.0):
        best = float(sweetspot.optimal_output_tokens(theta, n))
        assert best == pytest.approx(
            np.sqrt((THETA[1] * n * n + THETA[3] * n + THETA[5]) / THETA[4]), rel=1e-5
        )
        slope = jax.grad(lambda m, n=n: sweetspot.energy_per_output_token_j(theta, n, m))
        scale = float(sweetspot.energy_per_output_token_j(theta, n, best)) / best
        assert abs(float(slope(best))) < 1e-4 * scale
        assert float(slope(0.5 * best)) < 0 < float(slope(2 * best))


def grid():
    lengths = np.array([64, 128, 256, 512, 1024, 2048, 4096], float)
    n_in, n_out = np.meshgrid(lengths, lengths)
    return n_in.ravel(), n_out.ravel()


def test_the_fit_recovers_known_coefficients_and_zeros():
    n_in, n_out = grid()
    for theta in (THETA, THETA * [1, 0, 1, 1, 1, 0]):
        energy = sweetspot.terms(n_in, n_out) @ theta
        found = sweetspot.fit_theta(n_in, n_out, energy)
        np.testing.assert_allclose(found, theta, rtol=1e-6, atol=1e-12)


def test_the_fit_has_a_relative_loss_and_stays_non_negative():
    n_in, n_out = grid()
    rng = np.random.default_rng(0)
    energy = sweetspot.terms(n_in, n_out) @ THETA * np.exp(rng.normal(0, 0.02, len(n_in)))
    found = sweetspot.fit_theta(n_in, n_out, energy)
    assert (found >= 0).all()
    error = np.abs(sweetspot.terms(n_in, n_out) @ found / energy - 1)
    assert error.mean() < 0.02
    with pytest.raises(ValueError, match="at least 6"):
        sweetspot.fit_theta([1.0], [1.0], [1.0])
    with pytest.raises(ValueError, match="n_in must have the shape"):
        sweetspot.fit_theta([1.0], np.ones(6), np.ones(6))


def test_total_energy_is_prefill_plus_decode():
    predict, _ = METHODS["sweetspot"].form("one-model")
    work = workload(batch_size=2, prompt_tokens=300, output_tokens=200)
    found = predict(LLAMA, work, H100, {"theta": np.float32(THETA)})
    per_token = float(sweetspot.terms(300, 200) @ THETA)
    total = found.prefill_energy_j / 2 + 200 * found.decode_energy_per_token_j
    assert float(total) == pytest.approx(200 * per_token, rel=1e-5)


def test_the_cross_model_fit_recovers_a_law_and_interpolates():
    names = ("llama-3.2-1b", "gemma-2-2b", "qwen2.5-3b", "opt-6.7b", "llama-3.1-8b", "falcon-7b")
    archs = [preset(name).architecture for name in names]
    sizes = np.stack([np.asarray(sweetspot.log_sizes(a)) for a in archs])
    truth = sweetspot.default_coefficients()
    truth["log_theta"] = truth["log_theta"] + np.float32([0.5, -0.3, 0.7, 0.2, 0.7, 0.4])
    truth["slopes"] = truth["slopes"] * np.float32(0.9)
    thetas = np.stack([np.asarray(sweetspot.theta_of(a, truth), np.float64) for a in archs])
    n_in, n_out = grid()
    phi = sweetspot.terms(n_in, n_out)
    held_out = 3
    rows = [(sizes[i], phi @ thetas[i]) for i in range(len(names)) if i != held_out]
    x = np.concatenate([np.tile(s, (len(n_in), 1)) for s, _ in rows])
    energy = np.concatenate([e for _, e in rows])
    repeat = len(rows)
    fitted = sweetspot.fit_across_models(
        x, np.tile(n_in, repeat), np.tile(n_out, repeat), energy, pull=1e-3
    )
    predicted = phi @ np.asarray(sweetspot.theta_of(archs[held_out], fitted), np.float64)
    assert np.abs(predicted / (phi @ thetas[held_out]) - 1).max() < 0.05
    with pytest.raises(ValueError, match="sizes_log"):
        sweetspot.fit_across_models(np.ones((7, 2)), np.ones(7), np.ones(7), np.ones(7))


def test_theta_is_positive_smooth_and_works_on_batches():
    coefficients = sweetspot.default_coefficients()
    batch = stack([LLAMA, preset("mixtral-8x7b").architecture])
    theta = np.asarray(sweetspot.theta_of(batch, coefficients))
    assert theta.shape == (2, 6) and (theta > 0).all()
    np.testing.assert_allclose(theta[0], sweetspot.theta_of(LLAMA, coefficients), rtol=1e-5)
    # grouped-query attention caches less than multi-head attention of the same size
    gqa, mha = (preset(name).architecture for name in ("llama-3.1-8b", "llama-2-7b"))
    assert float(sweetspot.theta_of(gqa, coefficients)[2]) < float(
        sweetspot.theta_of(mha, coefficients)[2]
    )


# --- Rated power ---


def test_rated_power_times_time():
    method = METHODS["tdp"]
    work = workload(batch_size=4, tensor_parallel=2)
    found = method.predict(LLAMA, work, H100, method.default_coefficients())
    times = roofline.predict(LLAMA, work, H100, roofline.efficient_coefficients())
    assert float(found.prefill_energy_j) == pytest.approx(
        2 * 700 * float(times.prefill_time_s), rel=1e-5
    )
    assert float(found.decode_energy_per_token_j) == pytest.approx(
        2 * 700 * float(times.decode_time_per_token_s) / 4, rel=1e-5
    )
    assert float(tdp.energy_j(2.0, H100)) == pytest.approx(1400)


@pytest.mark.parametrize("scenario,rho", [("offline", 0.9), ("server_low", 0.2),
                                          ("server_high", 0.6)])  # fmt: skip
def test_load_factors_are_the_published_ones(scenario, rho):
    predict, coefficients = METHODS["load-scaled-tdp"].form(scenario)
    full = METHODS["tdp"]
    a = predict(LLAMA, workload(), H100, coefficients())
    b = full.predict(LLAMA, workload(), H100, full.default_coefficients())
    ratio = a.decode_energy_per_token_j / b.decode_energy_per_token_j
    assert float(ratio) == pytest.approx(rho, rel=1e-5)
    with pytest.raises(ValueError, match="offline, server_low"):
        tdp.load_factor("peak")
