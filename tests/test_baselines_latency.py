"""Roofline, LIMINAL, LIFE and AMALI-lite: published figures and hand arithmetic."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hymell_jax import get_device
from hymell_jax.baselines import amali, life, liminal, roofline
from hymell_jax.baselines.counting import pass_counts, peak_flops_per_s
from hymell_jax.models import preset
from hymell_jax.types import workload

LLAMA = preset("llama-3.1-8b").architecture
LLAMA2 = preset("llama-2-7b").architecture
H100 = get_device("h100-sxm-80gb").device
A100 = get_device("a100-sxm-80gb").device
V100 = get_device("v100-sxm-32gb").device


# --- Roofline and LIMINAL ---


def test_a_decode_step_takes_the_bytes_over_the_bandwidth():
    work = workload(context_tokens=1024)
    counts = pass_counts(LLAMA, work, "decode")
    expected = float(jnp.sum(counts.memory_bytes)) / 3.35e12
    found = roofline.predict(LLAMA, work, H100, roofline.plain_coefficients())
    assert float(found.decode_time_per_token_s) == pytest.approx(expected, rel=1e-4)


def test_a_long_prefill_takes_at_least_its_flops_over_the_peak():
    work = workload(prompt_tokens=8192, batch_size=4)
    counts = pass_counts(LLAMA, work, "prefill")
    least = float(jnp.sum(counts.flops)) / float(H100.peak_flops_per_s)
    found = roofline.predict(LLAMA, work, H100, roofline.plain_coefficients())
    assert least <= float(found.prefill_time_s) < 1.3 * least


def test_efficiencies_scale_the_bounds():
    half = {name: np.float32(np.log(0.5)) for name in roofline.plain_coefficients()}
    work = workload()
    plain, slow = (
        roofline.predict(LLAMA, work, H100, c) for c in (roofline.plain_coefficients(), half)
    )
    for name in ("prefill_time_s", "decode_time_per_token_s"):
        assert float(getattr(slow, name)) == pytest.approx(
            2 * float(getattr(plain, name)), rel=1e-5
        )


def test_fp8_uses_the_fp8_rate():
    assert float(peak_flops_per_s(H100, workload())) == pytest.approx(
        float(H100.peak_flops_per_s), rel=1e-6
    )
    assert float(peak_flops_per_s(H100, workload(dtype="fp8"))) == pytest.approx(
        float(H100.peak_fp8_flops_per_s), rel=1e-5
    )


def test_liminal_is_the_larger_total_plus_latency_per_layer():
    work = workload(context_tokens=512)
    counts = pass_counts(LLAMA, work, "decode")
    coefficients = liminal.default_coefficients() | {"log_exposed_s": np.float32(np.log(7e-6))}
    found = liminal.predict(LLAMA, work, H100, coefficients)
    bounds = (
        float(jnp.sum(counts.flops)) / float(H100.peak_flops_per_s),
        float(jnp.sum(counts.memory_bytes)) / float(H100.memory_bytes_per_s),
    )
    assert float(found.decode_time_per_token_s) == pytest.approx(max(bounds) + 32 * 7e-6, rel=1e-5)


def test_liminal_without_latency_is_never_above_the_roofline():
    nothing = liminal.default_coefficients() | {"log_exposed_s": np.float32(-60.0)}
    for work in (workload(), workload(batch_size=64, prompt_tokens=64)):
        low = liminal.predict(LLAMA, work, H100, nothing)
        high = roofline.predict(LLAMA, work, H100, roofline.plain_coefficients())
        for name in ("prefill_time_s", "decode_time_per_token_s"):
            assert float(getattr(low, name)) <= 1.0001 * float(getattr(high, name))


# --- LIFE ---


@pytest.mark.parametrize("layers,printed", [(26, 497), (32, 611), (64, 1219)])
def test_the_dispatch_law_meets_the_three_printed_counts(layers, printed):
    assert life.dispatches(layers) == printed


def test_the_operation_table_by_hand():
    assert life.linear_operations(2, 3, 5) == 2 * 2 * 3 * 5
    assert life.linear_elements(2, 3, 5) == (2 * 3 + 3 * 5 + 5) + 2 * 5
    assert life.batched_operations(7, 2, 3, 5) == 2 * 7 * 2 * 3 * 5 - 7 * 2 * 5


def test_a_step_is_memory_and_dispatches_and_a_prefill_the_larger_of_two():
    work = workload(prompt_tokens=1000, context_tokens=1000)
    c = life.default_coefficients()
    found = life.predict(LLAMA2, work, V100, c)
    for phase, time_s in (
        ("prefill", found.prefill_time_s),
        ("decode", found.decode_time_per_token_s),
    ):
        operations, moved = (float(x) for x in life.totals(LLAMA2, work, phase))
        waiting = 611 * 5e-6
        memory = moved / (0.5 * 900e9) + waiting
        compute = operations / (0.5 * float(V100.peak_flops_per_s)) + waiting
        expected = memory if phase == "decode" else max(memory, compute)
        assert float(time_s) == pytest.approx(expected, rel=1e-4)


def test_llama2_on_v100_at_half_the_bandwidth_is_near_the_first_published_row():
    # Published: 32.6 tokens/s at em = 50 %. Its context is not stated; at 1024 tokens the step
    # reads 32 x (4 x 4096^2 + 3 x 4096 x 11008) + 32000 x 4096 weights of 2 bytes and
    # 1024 x 2 x 32 x 4096 x 2 bytes of cache: 13.21 + 0.54 GB, 32.7 tokens/s at 450 GB/s.
    weights = 2 * (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096)
    cache = 1024 * 2 * 32 * 4096 * 2
    by_hand = 450e9 / (weights + cache)
    no_dispatch = life.default_coefficients() | {"log_dispatch_s": np.float32(-40.0)}
    found = life.predict(LLAMA2, workload(context_tokens=1024), V100, no_dispatch)
    assert 1 / float(found.decode_time_per_token_s) == pytest.approx(by_hand, rel=2e-3)
    assert by_hand == pytest.approx(32.6, rel=0.01)


def test_unfused_attention_moves_more_and_batched_products_subtract_their_results():
    work = workload(prompt_tokens=2048)
    fused, plain = (life.totals(LLAMA2, work, "prefill", f) for f in (1.0, 0.0))
    assert float(plain[1]) > float(fused[1])
    whole = float(jnp.sum(pass_counts(LLAMA2, work, "prefill").flops))
    results = 32 * 32 * 2048 * (1024.5 + 128)
    assert whole - float(fused[0]) == pytest.approx(results, rel=0.05)


# --- AMALI-lite ---


def test_the_tensor_core_anchors():
    # 108 SMs x 4 sub-cores x 256 FMA x 2 FLOPs x 1.41 GHz = 312 TFLOP/s; 2048 / 256 = 8 cycles
    assert 108 * 4 * 256 * 2 * 1.41e9 == pytest.approx(312e12, rel=1e-3)
    assert amali.HMMA_16816_FMA == 2048
    assert float(amali.fma_per_clock_sub_core(A100)) == pytest.approx(256, rel=1e-3)
    assert float(amali.initiation_interval(256)) == 8
    assert float(amali.initiation_interval(amali.fma_per_clock_sub_core(A100))) == pytest.approx(
        8, rel=1e-3
    )
    assert float(amali.fma_per_clock_sub_core(H100)) == pytest.approx(512, rel=2e-3)


def test_the_launch_latency_formula():
    assert amali.launch_cycles_per_block(0.0) == pytest.approx(1.1891)
    assert amali.launch_cycles_per_block(8.0) == pytest.approx(0.2304 + 0.2928 + 1.1891)
    assert amali.launch_cycles_per_block(32.0) == pytest.approx(3.6864 + 1.1712 + 1.1891)
    assert amali.kernel_launch_latency(1000.0, 8.0, 500.0) == pytest.approx(1712.3 + 500)


def test_a_large_square_product_runs_near_the_tensor_core_rate():
    n = 8192.0
    c = amali.default_coefficients()
    moved = 3 * n * n * 2
    cycles = float(amali.kernel_cycles(n, n, n, 1.0, moved, A100, c))
    ideal = n**3 / (108 * 1024)
    assert ideal < cycles < 1.5 * ideal


def test_a_thin_product_is_bound_by_its_bytes():
    c = amali.default_coefficients() | {"log_launch_s": np.float32(-60.0)}
    moved = 8192.0 * 8192 * 2
    cycles = float(amali.kernel_cycles(1.0, 8192.0, 8192.0, 1.0, moved, A100, c))
    assert cycles >= moved / 2.039e12 * 1.41e9
    assert cycles < 2.5 * moved / 2.039e12 * 1.41e9


def test_tiles_are_whole_but_keep_a_gradient():
    assert float(amali.whole(jnp.float32(2.1))) == 3
    assert float(amali.whole(jnp.float32(0.2))) == 1
    assert float(jax.grad(amali.whole)(2.1)) == 1


def test_a_wave_that_is_barely_started_costs_a_whole_wave():
    # A100 has 108 SMs: 108 tiles fill one wave, 109 need two
    c = amali.default_coefficients() | {"log_launch_s": np.float32(-60.0)}
    one, two = (
        float(amali.kernel_cycles(128.0, 128.0 * tiles, 4096.0, 1.0, 1.0, A100, c))
        for tiles in (108, 109)
    )
    assert two / one == pytest.approx(2.0, rel=0.05)


def test_amali_lite_is_never_below_the_plain_roofline_of_matrices():
    for name in ("llama-3.1-8b", "mixtral-8x7b", "gpt-oss-20b"):
        arch = preset(name).architecture
        for work in (workload(), workload(batch_size=32, prompt_tokens=512)):
            found = amali.predict(arch, work, A100, amali.default_coefficients())
            bound = roofline.predict(arch, work, A100, roofline.plain_coefficients())
            for quantity in ("prefill_time_s", "decode_time_per_token_s"):
                assert float(getattr(found, quantity)) > 0.9 * float(getattr(bound, quantity))


def test_more_sms_never_hurt_amali_lite():
    fewer = dataclasses.replace(A100, n_sm=np.float32(54), peak_flops_per_s=np.float32(156e12))
    work = workload(prompt_tokens=4096)
    slow, fast = (
        amali.predict(LLAMA, work, d, amali.default_coefficients()) for d in (fewer, A100)
    )
    assert float(slow.prefill_time_s) > 1.5 * float(fast.prefill_time_s)
