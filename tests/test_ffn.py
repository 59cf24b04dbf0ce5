"""Claims about hymell_jax.ffn; expected values from arithmetic and the equations of its parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from round_numbers import DEVICE

from hymell_jax import ffn, gemm

C = ffn.DEFAULT_COEFFICIENTS
PRODUCT = gemm.default_coefficients()


def seconds(*sizes):
    return ffn.ffn_time_s(C, PRODUCT, DEVICE, *(jnp.float32(s) for s in sizes))


def test_a_block_is_two_products_and_an_activation():
    total, (up, activation, down) = seconds(512, 4096, 14336, 2, 3)
    np.testing.assert_allclose(total, up + activation + down, rtol=1e-6)
    product = lambda n, k: gemm.gemm_time(PRODUCT, DEVICE, *map(jnp.float32, (512, n, k)))[0]  # noqa: E731
    np.testing.assert_allclose(up, product(14336, 4096), rtol=1e-6)
    np.testing.assert_allclose(down, product(4096, 7168), rtol=1e-6)
    moved = 512 * 3 * 7168 * 2 / 4e12  # gate and up in, one result out
    np.testing.assert_allclose(activation, np.exp(-12.5) + moved * (1 + np.exp(-1)), rtol=1e-5)


def test_a_plain_block_has_one_up_projection():
    gated, plain = seconds(4096, 4096, 16384, 1, 3)[1], seconds(4096, 4096, 16384, 1, 2)[1]
    assert 1.8 < float(gated[0] / plain[0]) < 2.2
    np.testing.assert_allclose(gated[2], plain[2], rtol=1e-6)


def test_time_is_at_least_the_roofline_bound():
    flops = 6.0 * 8192 * 4096 * 14336
    assert float(seconds(8192, 4096, 14336, 1, 3)[0]) >= flops / 1e15


def test_time_does_not_decrease_with_tokens():
    tokens = jnp.asarray(np.unique(np.round(np.geomspace(1, 20000, 120))), jnp.float32)
    run = jax.jit(jax.vmap(lambda t: seconds(t, 4096, 11008, 1, 3)[0]))
    time_s = np.asarray(run(tokens))
    assert (np.diff(time_s) >= -2e-6 * time_s[1:]).all()


def test_features_are_named_finite_and_differentiable():
    run = lambda t: ffn.ffn_features(C, PRODUCT, DEVICE, t, 4096.0, 14336.0, 1.0, 3.0)  # noqa: E731
    for tokens in (1.0, 500.0, 1e6):
        features, slopes = run(tokens), jax.jacfwd(run)(tokens)
        assert features.shape == (len(ffn.FFN_FEATURES),)
        assert np.isfinite(features).all() and np.isfinite(slopes).all()


def test_a_fit_comes_closer_to_times_of_a_slower_library():
    generator = np.random.default_rng(0)
    sizes = {
        "tokens": np.round(np.exp(generator.uniform(0, 8, 60))),
        "d_model": generator.choice([2048.0, 4096.0], 60),
        "d_ff": generator.choice([8192.0, 14336.0], 60),
        "tensor_parallel": generator.choice([1.0, 2.0, 4.0], 60),
        "n_matrices": np.full(60, 3.0),
    }
    rows = [jnp.asarray(sizes[name], jnp.float32) for name in ffn.FFN_SIZES]

    def parts(activation, product):
        run = lambda *row: ffn.ffn_time_s(  # noqa: E731
            activation, product, DEVICE, *row, sharpness=ffn.PRODUCT_CHOICE
        )[1]
        return np.asarray(jax.jit(jax.vmap(run))(*rows))

    slower = PRODUCT | {"log_compute_cost": PRODUCT["log_compute_cost"] + 0.3}
    measured = parts({"log_launch_s": -12.0, "log_memory_excess": -0.5}, slower)
    part_s = dict(zip(ffn.FFN_PARTS, measured.T, strict=True))
    activation, product = ffn.fit_ffn(DEVICE, sizes, part_s, PRODUCT, steps=60)
    before = np.abs(parts(C, PRODUCT) / measured - 1).mean(0)
    after = np.abs(parts(activation, product) / measured - 1).mean(0)
    assert after[1] < 0.02
    assert (after[[0, 2]] < 0.5 * before[[0, 2]]).all()
    wrong = part_s | {"up": -part_s["up"]}
    with pytest.raises(ValueError, match="positive seconds"):
        ffn.fit_ffn(DEVICE, sizes, wrong, PRODUCT, steps=1)
