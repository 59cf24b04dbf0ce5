"""Claims about hymell_jax.rowwise; expected values from arithmetic or plain NumPy."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hymell_jax import rowwise, types
from hymell_jax.operators import STREAM_PARTS
from hymell_jax.robust_fit import fit_piecewise

DEVICE = types.device(
    peak_flops_per_s=300e12,
    peak_fp8_flops_per_s=300e12,
    peak_vector_flops_per_s=20e12,
    memory_bytes_per_s=2e12,
    memory_bytes=40e9,
    l2_bytes=40e6,
    n_sm=100,
    boost_clock_hz=1.4e9,
    power_limit_w=400,
    idle_power_w=50,
    link_bytes_per_s=300e9,
)
OPERATORS = {
    "plain": rowwise.default_coefficients(),
    "softmax": rowwise.default_coefficients(**rowwise.KERNELS["softmax"]),
    "layernorm": rowwise.default_coefficients(**rowwise.KERNELS["layernorm"]),
}
SIZES = np.array([1.0, 2.0, 7.0, 63.0, 1000.0, 1024.0, 1100.0, 4096.0, 1e5, 1e7, 1e9])


def corners(seed: int, switch_cols: float, reread: float) -> dict[str, float]:
    """Coefficients drawn anywhere inside their bounds."""
    generator = np.random.default_rng(seed)
    values = {n: generator.uniform(lo, hi) for n, (lo, hi) in rowwise.BOUNDS.items()}
    return values | {"log_reread": math.log(reread), "log_switch_cols": math.log(switch_cols)}


CORNERS = [corners(seed, s, r) for seed, (s, r) in enumerate([(1e30, 1e-6), (1024, 0.5)] * 4)]


def seconds(coefficients, rows, cols, element=4.0):
    return np.asarray(rowwise.rowwise_time_s(coefficients, DEVICE, rows, cols, element)[0])


def grid():
    rows, cols = np.meshgrid(SIZES, SIZES, indexing="ij")
    return jnp.asarray(rows, jnp.float32), jnp.asarray(cols, jnp.float32)


@pytest.mark.parametrize("operator", OPERATORS)
def test_time_never_falls_when_rows_or_columns_grow(operator):
    fine = np.geomspace(1, 1e6, 600)
    # Rounding of float32 logarithms near -10 is about 1e-6 of the time.
    for coefficients in [OPERATORS[operator], *CORNERS]:
        for other in (1.0, 700.0, 5000.0):
            along_rows = seconds(coefficients, fine, other + 0 * fine)
            along_cols = seconds(coefficients, other + 0 * fine, fine)
            assert np.all(np.diff(along_rows) >= -1e-5 * along_rows[1:])
            assert np.all(np.diff(along_cols) >= -1e-5 * along_cols[1:])


@pytest.mark.parametrize("operator", OPERATORS)
def test_time_and_gradients_are_finite_from_one_element_to_1e18(operator):
    rows, cols = (a.ravel() for a in grid())
    coefficients = {k: jnp.float32(v) for k, v in OPERATORS[operator].items()}

    def log_time(c, r, k):
        return rowwise.rowwise_log_time(c, DEVICE, r, k, 4.0)[0]

    value, gradients = jax.vmap(jax.value_and_grad(log_time, (0, 1, 2)), (None, 0, 0))(
        coefficients, rows, cols
    )
    assert np.all(np.isfinite(value))
    for leaf in jax.tree.leaves(gradients):
        assert np.all(np.isfinite(leaf))
    assert np.all(np.asarray(gradients[1]) >= 0) and np.all(np.asarray(gradients[2]) >= 0)


def test_far_out_time_is_bytes_over_a_constant_bandwidth():
    """From 4e12 to 4e13 bytes time grows tenfold; the rate stays below the data sheet."""
    c = OPERATORS["plain"]
    small, large = seconds(c, 1e8, 1e4), seconds(c, 1e9, 1e4)
    assert large / small == pytest.approx(10.0, rel=1e-3)
    memory_s = 4e13 / (0.7 * 2e12)
    on_chip_s = memory_s / 3 + 1e9 / 400 * 1e-6  # three times as fast, and 2.5e6 waves of 1 us
    assert large == pytest.approx((memory_s**3 + on_chip_s**3) ** (1 / 3), rel=1e-3)


@pytest.mark.parametrize("coefficients", [*OPERATORS.values(), *CORNERS])
def test_time_is_at_least_the_bytes_that_l2_cannot_hold(coefficients):
    rows = np.geomspace(1, 1e9, 200)
    moved = rows * 4096 * 4.0
    time_s = seconds(coefficients, rows, 4096.0 + 0 * rows)
    assert np.all(time_s * (1 + 1e-4) >= (moved - 2 * 40e6) / 2e12)
    beyond = moved > 8 * 40e6
    assert beyond.sum() > 50
    assert np.all(time_s[beyond] * (1 + 1e-4) >= moved[beyond] / 2e12)


def test_one_element_costs_launch_and_fixed_part():
    c = OPERATORS["plain"] | {"log_small_grid_discount": -30.0, "log_wave_s": -40.0}
    # (4^3 + 3^3)^(1/3) us; a wave of 400 one-element rows in L2 adds nothing that counts
    assert seconds(c, 1.0, 1.0) == pytest.approx(1e-6 * 91 ** (1 / 3), rel=1e-3)


def test_waves_approach_the_ceiling_as_the_width_goes_to_zero():
    x = np.array([0.01, 0.5, 0.99, 1.01, 1.7, 2.2, 3.5, 6.9, 7.1, 8.2, 20.0, 1000.0])
    hard = np.where(x <= 8, np.ceil(x), 9 + np.maximum(x - 8.5, 0))
    soft = rowwise.soft_waves(jnp.asarray(x, jnp.float32), 1e-4)
    np.testing.assert_allclose(soft, hard, rtol=1e-4)


def test_waves_out_of_step_come_in_two_steps_from_the_third_on():
    """A third of each wave half a load later; staircase kept up to the sixteenth wave."""
    x = np.array([0.9, 1.2, 1.9, 2.2, 2.6, 3.2, 3.7, 8.4, 8.6, 12.3, 12.7])
    third = 1.0 / 3.0
    hard = np.array([1, 2, 2, 3 - third, 3, 4 - third, 4, 9 - third, 9, 13 - third, 13])
    soft = rowwise.soft_waves(jnp.asarray(x, jnp.float32), 1e-4, 1.0, third, 1.0)
    np.testing.assert_allclose(soft, hard, rtol=1e-4)
    far = rowwise.soft_waves(jnp.asarray([1000.0], jnp.float32), 1e-4, 1.0, third, 1.0)
    np.testing.assert_allclose(far, [1000.5 - third / 2], rtol=1e-5)


def test_a_kernel_without_staggered_waves_keeps_its_neutral_coefficients():
    rows = np.geomspace(1, 1e4, 40)
    time_s = seconds(OPERATORS["plain"], rows, 4096.0 + 0 * rows)
    found = rowwise.fit_refined(rows, 4096.0 + 0 * rows, time_s, DEVICE, 4.0, starts=1, steps=50)
    assert {name: found[name] for name in rowwise.NEUTRAL} == rowwise.NEUTRAL
    time_s = seconds(OPERATORS["plain"] | {"log_half_wave": math.log(0.3)}, rows, 4096.0 + 0 * rows)
    found = rowwise.fit_refined(
        rows, 4096.0 + 0 * rows, time_s, DEVICE, 4.0, staggered=True, starts=1, steps=50
    )
    assert all(found[name] > rowwise.NEUTRAL[name] for name in rowwise.NEUTRAL)


def test_a_row_more_than_a_full_wave_starts_another():
    sharp = OPERATORS["plain"] | {
        "log_rows_per_sm": math.log(2.0),
        "log_step_width": math.log(1e-4),
        "log_wave_s": math.log(1e-5),
        "log_first_wave": 0.0,
        "log_wave_quantisation": math.log(0.999),
    }
    full, over = seconds(sharp, 200.0, 64.0), seconds(sharp, 201.0, 64.0)
    assert seconds(sharp, 1.0, 64.0) == pytest.approx(full, rel=2e-2)
    assert over - full == pytest.approx(1e-5, rel=0.1)


def test_doubling_bandwidth_and_bytes_keeps_the_memory_time():
    fast = types.Device(**{**vars(DEVICE), "memory_bytes_per_s": np.float32(4e12)})
    once = rowwise.rowwise_time_s(OPERATORS["plain"], DEVICE, 1e8, 4096.0, 4.0)[0]
    twice = rowwise.rowwise_time_s(OPERATORS["plain"], fast, 1e8, 4096.0, 8.0)[0]
    assert float(twice) == pytest.approx(float(once), rel=1e-4)


def test_no_operator_of_a_shipped_checkpoint_has_a_second_kernel_and_the_short_form_is_the_same():
    rows, cols = np.float32([1, 7, 300, 1e5]), np.float32([64, 4096, 1e4, 1e6])
    for path in (Path(__file__).parent.parent / "checkpoints").glob("*-*/*.json"):
        parts = json.loads(path.read_text())["coefficients"]["stream"]
        for name in STREAM_PARTS:
            assert parts[name]["log_switch_cols"] == pytest.approx(math.log(rowwise.NO_SWITCH_COLS))
    both, one = (
        rowwise.rowwise_time_s(OPERATORS["plain"], DEVICE, rows, cols, 4.0, one_kernel=one)
        for one in (False, True)
    )
    for a, b in zip(both, one, strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-6, atol=1e-6)


def test_shares_sum_to_one_and_turn_from_launch_to_memory():
    rows, cols = (a.ravel() for a in grid())
    _, shares = rowwise.rowwise_time_s(OPERATORS["softmax"], DEVICE, rows, cols, 4.0)
    np.testing.assert_allclose(shares.sum(0), 1.0, atol=1e-6)
    assert shares.min() >= 0
    assert shares[0, 0] > 0.9 and shares[1, -1] > 0.999


def test_rereading_costs_half_as_much_again_only_when_rows_in_flight_overflow_l2():
    """400 rows in flight: of 1 kB they fit in 40 MB, of 4 MB they do not."""
    base, again = OPERATORS["plain"], OPERATORS["layernorm"]
    base = base | {"log_cache_speedup": math.log(20.0)}
    again = again | {"log_cache_speedup": math.log(20.0)}
    narrow = seconds(again, 1e7, 256.0) / seconds(base, 1e7, 256.0)
    long = seconds(again, 1e5, 1e6) / seconds(base, 1e5, 1e6)
    assert narrow == pytest.approx(1.0, abs=1e-3)
    assert long == pytest.approx(1.5, abs=1e-2)


def test_the_wide_kernel_takes_over_above_the_switch():
    c = OPERATORS["softmax"]
    slow = c | {"log_wide_wave_s": math.log(1e-3)}
    below, above = np.array([64.0, 1000.0, 1024.0]), np.array([1200.0, 4096.0])
    rows = 1000.0
    np.testing.assert_allclose(seconds(slow, rows, below), seconds(c, rows, below), rtol=1e-3)
    assert np.all(seconds(slow, rows, above) > 1e-3)


def test_batched_compiled_and_single_calls_agree():
    rows, cols = (a.ravel() for a in grid())
    coefficients = OPERATORS["softmax"]

    def one(r, k):
        return rowwise.rowwise_time_s(coefficients, DEVICE, r, k, 4.0)[0]

    together = seconds(coefficients, rows, cols)
    np.testing.assert_allclose(jax.jit(jax.vmap(one))(rows, cols), together, rtol=1e-5)
    singles = [float(one(r, k)) for r, k in zip(rows[::9], cols[::9], strict=True)]
    np.testing.assert_allclose(singles, together[::9], rtol=1e-5)


def test_fit_recovers_a_synthetic_device_from_its_own_times():
    generator = np.random.default_rng(1)
    rows = np.rint(np.exp(generator.uniform(0, np.log(3e4), 400)))
    cols = generator.choice([1024.0, 4096.0, 8192.0], 400)
    truth = OPERATORS["plain"] | {
        "log_bandwidth_efficiency": math.log(0.85),
        "log_launch_s": math.log(6e-6),
        "log_rows_per_sm": math.log(2.0),
    }
    measured = seconds(truth, rows, cols).astype(np.float64)
    settings = dict(starts=2, steps=400, prior_weight=0.0)
    found = rowwise.fit_refined(rows, cols, measured, DEVICE, 4.0, **settings)
    assert set(found) == set(rowwise.COEFFICIENTS)
    for name, (low, high) in rowwise.BOUNDS.items():
        assert low <= found[name] <= high
    error = np.abs(seconds(found, rows, cols) / measured - 1)
    assert error.mean() < 0.01  # 400 steps of 1000; the form itself is exact
    # 30 times beyond the largest row count
    assert seconds(found, 1e6, 8192.0) == pytest.approx(seconds(truth, 1e6, 8192.0), rel=0.03)
    again = rowwise.fit_refined(rows, cols, measured, DEVICE, 4.0, **settings)
    assert again == found


def test_fit_takes_bytes_and_devices_by_row_and_fits_a_subset():
    rows = np.geomspace(1, 1e5, 60)
    element = np.where(np.arange(60) % 2, 4.0, 6.0)
    fast = types.Device(**{**vars(DEVICE), "memory_bytes_per_s": np.full(60, 4e12, np.float32)})
    time_s = np.asarray(
        rowwise.rowwise_time_s(OPERATORS["plain"], fast, rows, 4096.0 + 0 * rows, element)[0]
    )
    found = rowwise.fit_refined(
        rows, np.full(60, 4096.0), time_s, fast, element, starts=1, steps=200, max_rows=40
    )
    fitted_s = rowwise.rowwise_time_s(found, fast, rows, 4096.0 + 0 * rows, element)[0]
    assert np.mean(np.abs(np.asarray(fitted_s) / time_s - 1)) < 0.05  # 200 steps from one start


def test_rows_of_the_narrow_kernel_stay_in_registers():
    once = OPERATORS["softmax"] | {"log_reread": math.log(rowwise.NO_REREAD)}
    cols = np.array([64.0, 1000.0])
    np.testing.assert_allclose(
        seconds(OPERATORS["softmax"], 1e9, cols), seconds(once, 1e9, cols), rtol=1e-4
    )
    # 400 long rows of 4 MB in flight miss 40 MB: 4 passes instead of 2
    fast = {"log_wide_cache_speedup": math.log(20.0)}
    four = seconds(OPERATORS["softmax"] | fast, 1e5, 1e6) / seconds(once | fast, 1e5, 1e6)
    assert four == pytest.approx(2.0, abs=1e-2)


def test_fit_refuses_times_that_are_not_positive():
    with pytest.raises(ValueError, match="positive times"):
        rowwise.fit_refined(np.ones(2), np.ones(2), np.array([1.0, 0.0]), DEVICE, 4.0)


# Published forms


def piecewise_rmsnorm(a, rows, cols):
    """Equations 1 and 2, plain NumPy float64."""
    n, d, log2_d = rows, cols, np.log2(cols)
    terms = [n * d, n * log2_d, d, n, log2_d, 1.0]
    values = [sum(w * t for w, t in zip(row, terms, strict=True)) for row in a]
    return np.where(n * d < 2.5e6, values[0], values[1])


def piecewise_softmax(b, rows, cols):
    """Equations 3 and 4 with rows x cols for N^2, plain NumPy float64."""
    terms = [rows * cols, rows, np.log2(rows), 1.0]
    values = [sum(w * t for w, t in zip(row, terms, strict=True)) for row in b]
    return np.where(rows < 1024, values[0], values[1])


RMSNORM_ROWS = np.array([1.0, 17.0, 300.0, 600.0, 620.0, 5000.0])
A = np.array([[1e-12, 1e-9, 2e-10, 3e-9, 1e-7, 4e-6], [3e-12, 2e-10, 1e-10, 1e-9, 2e-7, 5e-6]])
B = np.array([[2e-12, 3e-9, 1e-7, 3e-5], [5e-12, 1e-9, 3e-7, 2e-5]])


def test_published_rmsnorm_is_the_piecewise_equation_as_the_gate_narrows():
    cols = np.full_like(RMSNORM_ROWS, 4096.0)  # edge at 2.5e6 / 4096 = 610.4 rows
    soft = rowwise.published_rmsnorm(jnp.asarray(A), RMSNORM_ROWS, cols, 1e-4)
    np.testing.assert_allclose(soft, piecewise_rmsnorm(A, RMSNORM_ROWS, cols), rtol=1e-5)


def test_published_softmax_is_the_piecewise_equation_as_the_gate_narrows():
    rows = np.array([1.0, 100.0, 1020.0, 1024.5, 9000.0])
    cols = np.array([7.0, 2048.0, 512.0, 512.0, 4096.0])
    soft = rowwise.published_softmax(jnp.asarray(B), rows, cols, 1e-5)
    np.testing.assert_allclose(soft, piecewise_softmax(B, rows, cols), rtol=1e-5)


def test_published_regimes_meet_half_way_at_the_edge():
    gates = rowwise.published_rmsnorm_gates(jnp.float32(2.5e6), jnp.float32(1.0), 0.1)
    np.testing.assert_allclose(gates, [0.5, 0.5], atol=1e-4)
    gates = rowwise.published_softmax_gates(jnp.float32(1024.0), 0.1)
    np.testing.assert_allclose(gates, [0.5, 0.5], atol=1e-4)


def test_published_fit_returns_the_coefficients_that_made_the_times():
    generator = np.random.default_rng(0)
    rows = np.rint(np.exp(generator.uniform(0, np.log(3e4), 500)))
    cols = generator.choice([1024.0, 4096.0, 5120.0, 8192.0], 500)
    regime = rowwise.published_rmsnorm_regime(rows, cols)
    with jax.enable_x64(True):
        features = np.asarray(rowwise.published_rmsnorm_terms(jnp.asarray(rows), jnp.asarray(cols)))
    fitted = fit_piecewise(features, piecewise_rmsnorm(A, rows, cols), regime, 2)
    np.testing.assert_allclose(fitted, A, rtol=1e-5)


def test_published_fit_minimises_relative_error():
    """One constant for y = 1 and 3: 1/y weights give c = (1 + 1/3) / (1 + 1/9) = 1.2, not 2."""
    fitted = fit_piecewise(np.ones((2, 1)), np.array([1.0, 3.0]), np.zeros(2, int), 2)
    np.testing.assert_allclose(fitted, [[1.2], [0.0]])
