"""Claims about hymell_jax.ffn; expected values from arithmetic and the equations of its parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
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
    run = lambda t: ffn.ffn_features(C, PRODUCT, DEVICE, t, 4096.0, 14336.0)  # noqa: E731
    for tokens in (1.0, 500.0, 1e6):
        features, slopes = run(tokens), jax.jacfwd(run)(tokens)
        assert features.shape == (len(ffn.FFN_FEATURES),)
        assert np.isfinite(features).all() and np.isfinite(slopes).all()
