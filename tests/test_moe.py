"""Claims about hymell_jax.moe; expected values from arithmetic or plain NumPy draws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from level1_checks import assert_gradient_is_the_finite_difference, assert_no_correction
from round_numbers import DEVICE

from hymell_jax import moe

C = moe.DEFAULT_COEFFICIENTS
LAYER = dict(d_model=2048.0, d_expert=768.0, n_experts=128.0, top_k=8.0)
TOKENS = np.unique(np.round(np.geomspace(1, 60000, 200))).astype(np.float32)


def ideal(**values: float) -> dict[str, float]:
    """Coefficients of a device without any excess: all extras vanish, terms overlap perfectly."""
    return {**dict.fromkeys(C, -40.0), "log_pnorm": 5.0, **values}


def test_loads_have_mean_one_and_an_even_spread_is_flat():
    for exponent in (0.0, 0.5, 1.0, 1.01, 1.2):
        loads = [float(x) for x in moe.relative_loads(4096.0, exponent)]
        np.testing.assert_allclose(np.dot(moe._WEIGHTS, loads), 1.0, rtol=1e-5)
        assert (np.diff(loads) >= -1e-6).all()
    np.testing.assert_allclose(moe.relative_loads(4096.0, 0.0), 1.0, rtol=1e-5)


def test_even_spread_by_hand():
    few = moe.expert_load(4.0, 128.0, 8.0)  # 32 rows on 32 of 128 experts, one each
    np.testing.assert_allclose([few.rows, few.touched, few.padded], [32, 32, 32 * 16], rtol=1e-5)
    many = moe.expert_load(1024.0, 128.0, 8.0)  # 8192 rows, 64 an expert
    np.testing.assert_allclose([many.rows, many.touched, many.padded], [8192, 128, 8192], 1e-4)
    shared = moe.expert_load(1024.0, 128.0, 8.0, expert_parallel=8.0)
    np.testing.assert_allclose([shared.rows, shared.touched], [1024, 16], rtol=2e-3)
    np.testing.assert_allclose([shared.local_experts, shared.imbalance], [16, 1], rtol=2e-3)


@pytest.mark.parametrize("exponent", [0.0, 1.01, 1.2])
def test_one_token_touches_top_k_experts(exponent):
    load = moe.expert_load(1.0, 128.0, 8.0, exponent=exponent)
    np.testing.assert_allclose([load.touched, load.rows], [8, 8], rtol=1e-4)


@pytest.mark.parametrize("experts, ep, exponent", [(128, 8, 1.01), (128, 32, 1.2), (64, 4, 1.2)])
def test_the_busiest_gpu_carries_what_draws_of_the_law_say(experts, ep, exponent):
    tokens, top_k, gap = 16384, 4, 1.0 - exponent
    u = np.random.default_rng(0).random((500, experts))
    x = (1.0 + u * ((0.8 * tokens) ** gap - 1.0)) ** (1.0 / gap)
    groups = (x / x.sum(1, keepdims=True)).reshape(500, ep, -1).sum(2)
    expected = groups.max(1).mean() * ep
    found = moe.expert_load(float(tokens), float(experts), float(top_k), float(ep), exponent)
    np.testing.assert_allclose(found.imbalance, expected, rtol=0.1)


def test_expected_maximum_of_normal_numbers():
    known = {2: 0.564, 4: 1.029, 8: 1.424, 32: 2.070, 100: 2.508}  # order statistics, tables
    for n, value in known.items():
        np.testing.assert_allclose(moe._expected_maximum(float(n)), value, atol=0.06)
    assert float(moe._expected_maximum(1.0)) == 0.0


def test_misalignment_is_zero_at_multiples_of_sixteen():
    found = moe.misalignment(jnp.asarray([16.0, 768.0, 88.0, 24.0, 20.0]))
    np.testing.assert_allclose(found, [0.0, 0.0, 1.0, 1.0, 0.5], atol=1e-4)


def test_compute_bound_time_by_hand():
    # 2 x 3 x 2048 x 768 FLOPs on each of 65536 x 8 rows at 1e15 FLOP/s
    expected = 6.0 * 2048 * 768 * 65536 * 8 / 1e15
    found, shares = moe.moe_time_s(ideal(), DEVICE, 65536.0, **LAYER)
    np.testing.assert_allclose(found, expected, rtol=5e-3)
    assert float(shares[moe.MOE_TERMS.index("compute")]) > 0.99


def test_memory_bound_time_by_hand():
    # 8 tokens touch 64 of 128 experts of 3 x 2048 x 768 weights of two bytes, at 4e12 B/s
    weights = 64 * 3 * 2048 * 768 * 2 / 4e12
    rows = 64 * (2 * 2048 + 4 * 768) * 2 / 4e12
    found, shares = moe.moe_time_s(ideal(), DEVICE, 8.0, **LAYER)
    np.testing.assert_allclose(found, weights + rows, rtol=2e-3)
    assert float(shares[moe.MOE_TERMS.index("memory")]) > 0.99


def test_launch_and_row_terms_add_up():
    base, _ = moe.moe_time_s(ideal(), DEVICE, 512.0, **LAYER)
    launched, _ = moe.moe_time_s(ideal(log_launch_s=np.log(1e-5)), DEVICE, 512.0, **LAYER)
    np.testing.assert_allclose(launched - base, 1e-5, rtol=1e-3)
    passed, _ = moe.moe_time_s(ideal(log_row_model=np.log(3.0)), DEVICE, 512.0, **LAYER)
    np.testing.assert_allclose(passed - base, 512 * 8 * 3 * 2048 * 2 / 4e12, rtol=1e-2)


def test_expert_parallelism_adds_launches():
    c = ideal(log_launch_s=np.log(1e-5), log_parallel_launch=np.log(0.5))
    one, shares = moe.moe_time_s(c, DEVICE, 1.0, **LAYER, expert_parallel=1.0)
    two, more = moe.moe_time_s(c, DEVICE, 1.0, **LAYER, expert_parallel=2.0)
    np.testing.assert_allclose([one * shares[0], two * more[0]], [1e-5, 1.5e-5], rtol=1e-4)


def test_tensor_parallelism_narrows_the_experts():
    split, _ = moe.moe_time_s(C, DEVICE, 300.0, **LAYER, tensor_parallel=4.0)
    narrow, _ = moe.moe_time_s(C, DEVICE, 300.0, **{**LAYER, "d_expert": 192.0})
    np.testing.assert_allclose(split, narrow, rtol=1e-6)


def test_fp8_halves_what_is_ideal():
    work = moe.moe_time_s(ideal(), DEVICE, 65536.0, **LAYER)[0]
    half = moe.moe_time_s(ideal(), DEVICE, 65536.0, **LAYER, weight_bytes=1.0)[0]
    np.testing.assert_allclose(half / work, 0.5, rtol=2e-2)


@pytest.mark.parametrize("exponent", [0.0, 1.01, 1.2])
@pytest.mark.parametrize("ep", [1.0, 16.0, 128.0])
def test_time_does_not_decrease_with_tokens(exponent, ep):
    shape = {n: np.full(len(TOKENS), v, np.float32) for n, v in LAYER.items()}
    time_s, _ = moe.moe_time_s(C, DEVICE, TOKENS, **shape, expert_parallel=ep, exponent=exponent)
    assert (np.diff(time_s) >= -2e-6 * np.asarray(time_s)[1:]).all()


def test_time_is_at_least_the_roofline_bound():
    generator = np.random.default_rng(1)
    draw = lambda *choices: generator.choice(choices, 300).astype(np.float32)  # noqa: E731
    tokens, d, f = draw(*TOKENS), draw(1024, 2048, 7168), draw(64, 704, 768, 14336)
    experts, k, ep = draw(8, 64, 256), draw(1, 2, 8), draw(1, 2, 8)
    load = moe.expert_load(tokens, experts, k, ep, 1.01)
    for c in (C, ideal()):
        time_s, shares = moe.moe_time_s(
            c, DEVICE, tokens, d, f, experts, k, expert_parallel=ep, exponent=1.01
        )
        assert (time_s >= 0.999 * load.rows * 6.0 * d * f / 1e15).all()
        assert (time_s >= 0.999 * load.touched * 6.0 * d * f / 4e12).all()
        np.testing.assert_allclose(jnp.sum(shares, -1), 1.0, rtol=1e-5)
        assert (shares >= 0).all()


def test_jit_vmap_and_batches_agree():
    run = lambda t: moe.moe_time_s(C, DEVICE, t, **LAYER, exponent=1.01)[0]  # noqa: E731
    tokens = jnp.asarray(TOKENS)
    one_by_one = np.array([run(t) for t in TOKENS[::40]])
    np.testing.assert_allclose(run(tokens)[::40], one_by_one, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(run)(tokens), run(tokens), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(run)(tokens), run(tokens), rtol=1e-5)


def test_the_gradient_is_the_finite_difference_in_every_size():
    sizes = dict(tokens=700.0, **LAYER, tensor_parallel=2.0, expert_parallel=4.0, exponent=1.15)
    names = ("tokens", "d_model", "d_expert", "n_experts", "top_k", "tensor_parallel", "exponent")
    assert_gradient_is_the_finite_difference(
        lambda **values: moe.moe_time_s(C, DEVICE, **values)[0], sizes, names, rtol=1e-4, atol=1e-8
    )


def test_gradients_are_finite_at_the_corners():
    for tokens, experts, ep, exponent in ((1.0, 8.0, 1.0, 0.0), (1e6, 512.0, 256.0, 1.2)):
        shape = {**LAYER, "n_experts": experts}
        slope = jax.grad(
            lambda t, e, shape=shape, ep=ep: moe.moe_time_s(
                C, DEVICE, t, **shape, expert_parallel=ep, exponent=e
            )[0],
            (0, 1),
        )(tokens, exponent)
        assert np.isfinite(slope).all()


def test_features_are_named_finite_and_leave_level_one_alone_before_training():
    shape = {n: np.full(len(TOKENS), v, np.float32) for n, v in LAYER.items()}
    shape |= dict(tokens=TOKENS, tensor_parallel=1.0, expert_parallel=2.0, exponent=1.01)
    shape |= dict(weight_bytes=2.0, n_matrices=3.0)
    features = moe.moe_features(C, DEVICE, *(shape[name] for name in moe.MOE_SIZES))
    assert features.shape == (len(TOKENS), len(moe.MOE_FEATURES))
    assert np.isfinite(features).all()
    column = features[:, moe.MOE_FEATURES.index("log2_tokens")]
    np.testing.assert_allclose(column, np.log2(TOKENS), atol=1e-5)
    assert_no_correction(features, len(moe.MOE_MONOTONE))


def test_a_fit_recovers_a_known_device():
    generator = np.random.default_rng(2)
    sizes = {
        "tokens": 2.0 ** generator.uniform(0, 14, 400),
        "d_model": generator.choice([2048.0, 4096.0], 400),
        "d_expert": generator.choice([512.0, 768.0, 2048.0], 400),
        "n_experts": generator.choice([8.0, 64.0, 128.0], 400),
        "top_k": generator.choice([1.0, 2.0, 8.0], 400),
        "expert_parallel": generator.choice([1.0, 8.0], 400),
    }
    constants = dict(tensor_parallel=1.0, exponent=1.01, weight_bytes=2.0, n_matrices=3.0)
    sizes |= {name: np.full(400, value) for name, value in constants.items()}
    truth = {name: value + generator.choice([-1.0, 1.0]) for name, value in C.items()}
    rows = [jnp.asarray(sizes[name], jnp.float32) for name in moe.MOE_SIZES]
    time_s = np.asarray(moe.moe_time_s(truth, DEVICE, *rows)[0])
    fitted = moe.fit_moe(DEVICE, sizes, time_s, steps=600)
    found = np.asarray(moe.moe_time_s(fitted, DEVICE, *rows)[0])
    start = np.asarray(moe.moe_time_s(C, DEVICE, *rows)[0])
    assert np.abs(start / time_s - 1).mean() > 0.1
    assert np.abs(found / time_s - 1).mean() < 0.03


def test_a_fit_refuses_bad_rows():
    sizes = {name: np.ones(3) for name in moe.MOE_SIZES}
    with pytest.raises(ValueError, match="one length"):
        moe.fit_moe(DEVICE, sizes, np.ones(2))
    with pytest.raises(ValueError, match="positive"):
        moe.fit_moe(DEVICE, sizes, np.zeros(3))
