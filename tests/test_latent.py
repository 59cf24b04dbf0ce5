"""Claims about hymell_jax.latent; expected values from arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from level1_checks import assert_gradient_is_the_finite_difference, assert_no_correction
from round_numbers import DEVICE

from hymell_jax import latent

C = latent.DEFAULT_COEFFICIENTS
PHASES = latent.LATENT_PHASES
IDEAL = {**dict.fromkeys(C, -40.0), "log_pnorm": 5.0}  # no excess, perfect overlap


def seconds(phase, coefficients, *sizes):
    return latent.latent_time_s(phase, coefficients, DEVICE, *sizes)[0]


def test_parameters_of_a_whole_deepseek_v3_layer():
    # published widths: q_a 7168 x 1536, kv_a 7168 x 576, q_b 1536 x 24576, kv_b 512 x 32768, o
    parts = [7168 * 1536, 7168 * 576, 1536 * 24576, 512 * 32768, 16384 * 7168]
    assert sum(parts) == 187_105_280
    found = latent.projection_weights(latent.LatentShape(), 128.0)
    np.testing.assert_allclose(found, 187_105_280, rtol=1e-6)


def test_long_decode_reads_the_latent_cache():
    cache = 64 * 131072 * 576 * 2 / 4e12
    weights = (7168 * 2112 + 1536 * 192 + 512 * 256 + 128 * 7168) * 2 / 4e12
    found = seconds("decode", IDEAL, 64.0, 131072.0, 1.0)
    np.testing.assert_allclose(found, cache + weights, rtol=1e-3)


def test_an_fp8_cache_halves_the_cache_bytes():
    full, half = (seconds("decode", IDEAL, 64.0, 1e7, 1.0, 2.0, b) for b in (2.0, 1.0))
    tensor = 2 * 64 * 1e7 * np.hypot(1.0, 64.0) * 1088 / 1e15
    np.testing.assert_allclose(full, 64e7 * 576 * 2 / 4e12, rtol=1e-3)
    np.testing.assert_allclose(half, max(64e7 * 576 / 4e12, tensor), rtol=2e-2)


def test_long_prefill_is_causal_attention_and_projections():
    tokens, heads = 131072.0, 128.0
    core = 2 * heads * 320 * tokens * (tokens + 1) / 2 / 1e15
    projections = 2 * tokens * 187_105_280 / 1e15
    found = seconds("prefill", IDEAL, 1.0, tokens, heads)
    np.testing.assert_allclose(found, core + projections, rtol=1e-3)


def test_decode_tiles_hold_at_least_64_heads():
    few, many = (seconds("decode", IDEAL, 64.0, 1e7, h, 2.0, 1e-6) for h in (1.0, 16.0))
    np.testing.assert_allclose(many / few, np.hypot(16, 64) / np.hypot(1, 64), rtol=1e-3)


def test_launch_is_a_floor():
    c = {**IDEAL, "log_launch_s": np.log(1e-4)}
    for phase in PHASES:
        base = seconds(phase, IDEAL, 1.0, 1.0, 8.0)
        np.testing.assert_allclose(seconds(phase, c, 1.0, 1.0, 8.0) - base, 1e-4, rtol=1e-3)


@pytest.mark.parametrize("phase", PHASES)
def test_time_does_not_decrease_with_any_size(phase):
    base = dict(batch=3.0, tokens=100.0, n_heads=16.0, weight_bytes=2.0, kv_bytes=2.0)
    for name in ("batch", "tokens", "n_heads"):
        values = np.geomspace(1, 1e5, 300).astype(np.float32)
        sizes = {n: np.full(300, v, np.float32) for n, v in base.items()} | {name: values}
        time_s = np.asarray(seconds(phase, C, *(sizes[n] for n in latent.LATENT_SIZES)))
        assert (np.diff(time_s) >= -2e-6 * time_s[1:]).all(), name


@pytest.mark.parametrize("phase", PHASES)
def test_shares_sum_to_one_and_excess_only_adds(phase):
    sizes = [jnp.asarray([1.0, 64.0]), jnp.asarray([1.0, 4096.0]), 16.0]
    time_s, shares = latent.latent_time_s(phase, C, DEVICE, *sizes)
    assert (time_s >= seconds(phase, IDEAL, *sizes)).all()
    assert shares.shape == (2, len(latent.LATENT_TERMS)) and (shares >= 0).all()
    np.testing.assert_allclose(jnp.sum(shares, -1), 1.0, rtol=1e-5)


@pytest.mark.parametrize("phase", PHASES)
def test_the_gradient_is_the_finite_difference(phase):
    base = dict(batch=5.0, tokens=300.0, n_heads=16.0)
    assert_gradient_is_the_finite_difference(
        lambda **values: seconds(phase, C, *values.values()), base, base, rtol=1e-6
    )


def test_float32_holds_at_a_million_tokens():
    for phase in PHASES:
        slope = jax.grad(lambda t, phase=phase: seconds(phase, C, 1024.0, t, 128.0))(1e6)
        assert np.isfinite(seconds(phase, C, 1024.0, 1e6, 128.0)) and np.isfinite(slope)


def test_features_are_named_and_finite_and_start_from_level_one():
    for phase in PHASES:
        features = latent.latent_features(
            phase,
            C,
            DEVICE,
            jnp.asarray([1.0, 64.0, 1e4]),
            jnp.asarray([1.0, 4096.0, 1e6]),
            8.0,
            2.0,
            2.0,
        )
        assert features.shape == (3, len(latent.LATENT_FEATURES)) and np.isfinite(features).all()
    assert_no_correction(features, len(latent.LATENT_MONOTONE))


def test_a_fit_recovers_a_known_device():
    generator = np.random.default_rng(0)
    sizes = {
        "batch": generator.choice([1.0, 16.0, 256.0], 300),
        "tokens": 2.0 ** generator.uniform(0, 14, 300),
        "n_heads": generator.choice([8.0, 32.0, 128.0], 300),
        "weight_bytes": np.full(300, 2.0),
        "kv_bytes": generator.choice([1.0, 2.0], 300),
    }
    truth = {name: value + generator.uniform(-0.5, 0.5) for name, value in C.items()}
    rows = [jnp.asarray(sizes[name], jnp.float32) for name in latent.LATENT_SIZES]
    time_s = np.asarray(seconds("decode", truth, *rows))
    fitted = latent.fit_latent("decode", DEVICE, sizes, time_s, steps=500)
    assert np.abs(np.asarray(seconds("decode", fitted, *rows)) / time_s - 1).mean() < 0.02


def test_unknown_phases_are_refused():
    with pytest.raises(ValueError, match="phase must be one of"):
        seconds("train", C, 1.0, 1.0, 1.0)
