"""Claims about hymell_jax.linear; expected values from arithmetic."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from level1_checks import assert_gradient_is_the_finite_difference, assert_no_correction
from round_numbers import DEVICE

from hymell_jax import linear

C = linear.DEFAULT_COEFFICIENTS
KERNELS = linear.LINEAR_KERNELS
IDEAL = {**dict.fromkeys(C, -40.0), "log_pnorm": 5.0}  # no excess, perfect overlap


def seconds(kernel, coefficients, *sizes, **dims):
    return linear.linear_kernel_time_s(kernel, coefficients, DEVICE, *sizes, **dims)[0]


def test_convolution_bytes_by_hand():
    # (2 x 16 + 32) heads of 128 channels; in and out, two bytes; decode keeps a window of 3
    prefill = 4 * 65536 * 8192 * 2 * 2 / 4e12
    decode = 4096 * 8192 * 2 * (2 + 2 * 3) / 4e12
    found = [
        seconds("conv_prefill", IDEAL, 4.0, 65536.0, 16.0, 32.0),
        seconds("conv_decode", IDEAL, 4096.0, 1.0, 16.0, 32.0),
    ]
    np.testing.assert_allclose(found, [prefill, decode], rtol=1e-5)


def test_decode_reads_and_writes_every_state():
    states = 2 * 256 * 32 * 128 * 128 * 4 / 4e12
    tokens = 256 * (64 + 32) * 128 * 2 / 4e12
    found = seconds("rule_decode", IDEAL, 256.0, 1.0, 16.0, 32.0)
    np.testing.assert_allclose(found, states + tokens, rtol=1e-5)


def test_prefill_walks_the_chunks_of_every_wave():
    # 8 x 64 heads on 128 SMs are 4 waves, 4096 tokens are 64 chunks of 3 us, 5 us a wave
    c = {**IDEAL, "log_step_s": np.log(3e-6), "log_block_s": np.log(5e-6)}
    found = seconds("rule_prefill", c, 8.0, 4096.0, 16.0, 64.0)
    np.testing.assert_allclose(found, 4 * (5e-6 + 64 * 3e-6), rtol=1e-4)


def test_a_partly_filled_wave_costs_a_whole_one():
    c = {**IDEAL, "log_step_s": np.log(3e-6), "wave_quantisation": 40.0}
    few, full, one_more = (
        seconds("rule_prefill", c, b, 4096.0, 16.0, 64.0) for b in (1.0, 2.0, 2.5)
    )
    np.testing.assert_allclose([few / full, one_more / full], [1.0, 2.0], rtol=1e-4)


def test_bytes_in_l2_move_faster_and_a_model_switches_that_off():
    c = {**IDEAL, "log_l2_reuse": np.log(3.0), "log_l2_capacity": 0.0, "log_l2_sharpness": 2.0}
    for batch, heads, speed_up in ((1.0, 4.0, 4.0), (1024.0, 64.0, 1.0)):  # 0.5 MB, 8.6 GB
        warm, cold = (
            seconds("rule_decode", c, batch, 1.0, heads, heads, l2_residency=r) for r in (1.0, 0.0)
        )
        np.testing.assert_allclose(cold / warm, speed_up, rtol=1e-3)


def test_short_sequences_cost_one_chunk():
    c = {**IDEAL, "log_step_s": np.log(3e-6)}
    one, eight = (seconds("rule_prefill", c, 1.0, s, 16.0, 64.0) for s in (1.0, 8.0))
    np.testing.assert_allclose([one, eight], 3e-6, rtol=1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_time_does_not_decrease_with_any_size(kernel):
    base = dict(batch=3.0, seq_len=100.0, k_heads=4.0, v_heads=8.0, k_dim=128.0, v_dim=128.0)
    for name in base:
        values = np.geomspace(1, 1e5, 400).astype(np.float32)
        sizes = {n: np.full(400, v, np.float32) for n, v in base.items()} | {name: values}
        time_s = np.asarray(seconds(kernel, C, *(sizes[n] for n in linear.LINEAR_SIZES)))
        assert (np.diff(time_s) >= -2e-6 * time_s[1:]).all(), name


@pytest.mark.parametrize("kernel", KERNELS)
def test_time_is_at_least_the_memory_bound_and_shares_sum_to_one(kernel):
    sizes = [jnp.asarray([1.0, 64.0]), jnp.asarray([1.0, 4096.0]), 16.0, 64.0]
    time_s, shares = linear.linear_kernel_time_s(kernel, C, DEVICE, *sizes, l2_residency=0.0)
    bound = seconds(kernel, {**IDEAL, "log_launch_s": -60.0}, *sizes)
    assert (time_s >= bound).all()
    np.testing.assert_allclose(jnp.sum(shares, -1), 1.0, rtol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_gradient_is_the_finite_difference(kernel):
    c = {**C, "wave_quantisation": -40.0}  # a hard step has no slope to compare with
    base = dict(batch=50.0, seq_len=300.0, k_heads=4.0, v_heads=8.0, k_dim=128.0, v_dim=128.0)
    assert_gradient_is_the_finite_difference(
        lambda **values: seconds(kernel, c, *values.values()), base, base, rtol=1e-5, atol=1e-9
    )


def test_features_are_named_and_finite_and_start_from_level_one():
    sizes = [jnp.asarray([1.0, 64.0, 1e4]), jnp.asarray([1.0, 4096.0, 1e6])]
    sizes += [1.0, 2.0, 128.0, 128.0]
    for kernel in KERNELS:
        features = linear.linear_features(kernel, C, DEVICE, *sizes)
        assert features.shape == (3, len(linear.LINEAR_FEATURES)) and np.isfinite(features).all()
    assert_no_correction(features, len(linear.LINEAR_MONOTONE))


def test_a_fit_recovers_a_known_device():
    generator = np.random.default_rng(0)
    sizes = {
        "batch": generator.choice([1.0, 4.0, 64.0], 300),
        "seq_len": 2.0 ** generator.uniform(0, 13, 300),
        "k_heads": np.full(300, 4.0),
        "v_heads": generator.choice([4.0, 8.0, 16.0], 300),
        "k_dim": np.full(300, 128.0),
        "v_dim": np.full(300, 128.0),
    }
    truth = {name: value + 0.4 for name, value in C.items()}
    rows = [jnp.asarray(sizes[name], jnp.float32) for name in linear.LINEAR_SIZES]
    time_s = np.asarray(seconds("rule_prefill", truth, *rows))
    fitted = linear.fit_linear("rule_prefill", DEVICE, sizes, time_s, steps=500)
    found = np.asarray(seconds("rule_prefill", fitted, *rows))
    assert np.abs(found / time_s - 1).mean() < 0.02


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="kernel must be one of"):
        seconds("conv", C, 1.0, 1.0, 1.0, 1.0)
