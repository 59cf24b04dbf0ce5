"""AMALI-lite: a reduction of AMALI to what a data sheet and shapes can say. No energy.

AMALI traces the machine code of a kernel and replays it; that cannot be done from an architecture,
so this is not AMALI, and AMALI's accuracy is not this method's. What is kept, per kernel:

    cycles = smoothmax(tile work, DRAM bytes, L2 bytes) + KLL + imbalance
    tile work  = waves x (MMA instructions of a tile per sub-core x II + latency)
    II         = FMAs of an instruction / FMA rate of a sub-core; HMMA.16816 has 2048: 8 cycles on
                 A100 (256 a clock), 4 on H100 (512)
    KLL        = s(BS) grid + k, kernel launch latency, s = 0.0036 BS^2 + 0.0366 BS + 1.1891 [cycles
                 a thread block], BS warps a block (published fit on A100)
    imbalance  = (whole waves - waves) x tile work of a wave, the idle tail

AMALI counts instructions of the busiest sub-core for the imbalance; the tail of the grid stands in
for it here. Seconds are cycles over the boost clock, kernels run one after another. Wave and tile
counts are whole, with the gradient of the count before rounding (straight-through).

Source: AMALI, ISCA'25; its equations for A100. Reduced by this project.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax import operators
from hymell_jax.baselines.counting import (
    COUNT_PARTS,
    mean_context_tokens,
    pass_counts,
    peak_flops_per_s,
    rows,
)
from hymell_jax.baselines.interface import TIMES, Method, exp, predict_from_passes
from hymell_jax.smooth import smooth_maximum
from hymell_jax.types import Architecture, Device, Workload

HMMA_16816_FMA = 16.0 * 8.0 * 16.0
SUB_CORES = 4.0
TILE = 128.0
LEAST_TILE = 16.0
MEMORY_LATENCY_CYCLES = 290.0 + 224.0  # DRAM and L2 of A100, once a tile
SHARPNESS = 8


def default_coefficients() -> dict[str, Any]:
    """Full rates, 8 warps a block; the launch constant is not printed and is set to 2 us here.

    The L2 rate is 5120 bytes a clock and 108 SMs, that of the A100 white paper.
    """
    return {
        "log_launch_s": np.float32(np.log(2e-6)),  # k of the launch latency
        "log_memory_excess": np.float32(np.log(1.0)),  # f of DRAM time
        "log_l2_bytes_per_clock_sm": np.float32(np.log(5120.0 / 108.0)),
        "warps_per_block": np.float32(8.0),
    }


def initiation_interval(fma_per_clock_sub_core, fma=HMMA_16816_FMA):
    """Cycles between two matrix instructions of a sub-core, FMA count / throughput."""
    return fma / fma_per_clock_sub_core


def fma_per_clock_sub_core(device: Device, peak: jax.Array | None = None) -> jax.Array:
    """FMAs a clock of one sub-core: peak / (2 FLOPs, SMs, 4 sub-cores, clock)."""
    rate = device.peak_flops_per_s if peak is None else peak
    return rate / (2.0 * device.n_sm * SUB_CORES) / device.boost_clock_hz


def launch_cycles_per_block(warps):
    """s(BS) of the kernel launch latency [cycles a thread block], BS in warps."""
    return 0.0036 * warps * warps + 0.0366 * warps + 1.1891


def kernel_launch_latency(grid, warps, k):
    """KLL = s(BS) grid + k [cycles]."""
    return launch_cycles_per_block(warps) * grid + k


def whole(x: jax.Array) -> jax.Array:
    """ceil(x), at least 1, with the gradient of x."""
    return x + jax.lax.stop_gradient(jnp.maximum(jnp.ceil(x), 1.0) - x)


def kernel_cycles(
    m, n, k, groups, memory_bytes, device: Device, coefficients: dict[str, Any], peak=None
) -> jax.Array:
    """Cycles of one kernel of `groups` products (m x k) (k x n).

    A block computes a tile of 128 columns and 16 to 128 rows, as many as there are.

    Args:
        memory_bytes: DRAM traffic of the kernel.
        peak: FLOP/s of the format; by default the 16-bit rate.
    """
    tile_rows = jnp.clip(m, LEAST_TILE, TILE)
    grid = whole(m / tile_rows) * whole(n / TILE) * groups
    waves = grid / device.n_sm
    rate = fma_per_clock_sub_core(device, peak)
    instructions = tile_rows * TILE * k / (HMMA_16816_FMA * SUB_CORES)
    per_tile = instructions * initiation_interval(rate) + MEMORY_LATENCY_CYCLES
    dram = (
        memory_bytes
        / device.memory_bytes_per_s
        * device.boost_clock_hz
        * exp(coefficients, "log_memory_excess")
    )
    tile_bytes = 2.0 * (tile_rows + TILE) * k * grid
    l2 = tile_bytes / (exp(coefficients, "log_l2_bytes_per_clock_sm") * device.n_sm)
    busy = jnp.maximum(waves, 1.0) * per_tile
    tail = (whole(waves) - jnp.maximum(waves, 1.0)) * per_tile
    launch = exp(coefficients, "log_launch_s") * device.boost_clock_hz
    latency = kernel_launch_latency(grid, coefficients["warps_per_block"], launch)
    return smooth_maximum(busy, dram, l2, sharpness=SHARPNESS) + latency + tail


def _stream_cycles(memory_bytes, device: Device, coefficients: dict[str, Any]) -> jax.Array:
    """Cycles of a row-wise kernel: its DRAM traffic and a launch, one block per 16 KiB moved."""
    dram = memory_bytes / device.memory_bytes_per_s * device.boost_clock_hz
    launch = exp(coefficients, "log_launch_s") * device.boost_clock_hz
    grid = jnp.maximum(memory_bytes / 16384.0, 1.0)
    return dram * exp(coefficients, "log_memory_excess") + kernel_launch_latency(
        grid, coefficients["warps_per_block"], launch
    )


def pass_time_s(
    arch: Architecture, work: Workload, device: Device, coefficients: dict[str, Any], phase: str
) -> jax.Array:
    """Seconds of one pass: all kernels in sequence, over the boost clock."""
    counts = pass_counts(arch, work, phase)
    n_rows = rows(work, phase)
    per_kernel = counts.memory_bytes / jnp.maximum(counts.kernels, 1e-3)
    peak = peak_flops_per_s(device, work)
    p = operators.matrix_products(arch, work, n_rows)
    n_matrices = len(operators.MATRIX_PARTS)
    cycles = jnp.sum(
        p.count
        * kernel_cycles(p.m, p.n, p.k, 1.0, per_kernel[:n_matrices], device, coefficients, peak)
    )
    streams = slice(n_matrices, n_matrices + len(operators.STREAM_PARTS))
    cycles = cycles + jnp.sum(
        counts.kernels[streams] * _stream_cycles(per_kernel[streams], device, coefficients)
    )
    heads, kv_heads, key_width, value_width = operators.attention_shape(
        arch, work, phase == "decode"
    )
    for part in ("attention", "window_attention"):
        i = COUNT_PARTS.index(part)
        # one product of the same FLOPs: queries x width, reduced over the keys they attend to
        if phase == "prefill":
            m, groups = work.prompt_tokens, work.batch_size * heads
        else:  # query heads of one KV head share a tile, the context is split over blocks
            m, groups = heads / kv_heads, work.batch_size * kv_heads
        flops = counts.flops[i] / jnp.maximum(counts.kernels[i], 1e-3)
        keys = flops / (2.0 * groups * m * (key_width + value_width))
        splits = 1.0 if phase == "prefill" else jnp.maximum(mean_context_tokens(work) / 512.0, 1.0)
        core = kernel_cycles(
            m,
            key_width + value_width,
            keys / splits,
            groups * splits,
            per_kernel[i],
            device,
            coefficients,
        )
        cycles = cycles + counts.kernels[i] * core
    linear = COUNT_PARTS.index("linear_attention")
    cycles = cycles + counts.kernels[linear] * _stream_cycles(
        per_kernel[linear], device, coefficients
    )
    e = operators.expert_products(arch, work, n_rows)
    up = (e.n_matrices - 1.0) * e.d_expert
    routed, touched = jnp.maximum(e.rows_per_expert, 1.0), jnp.maximum(e.touched, 1e-3)
    moved = per_kernel[COUNT_PARTS.index("experts")]
    for n, k in ((up, e.d_model), (e.d_model, e.d_expert)):
        grouped = kernel_cycles(routed, n, k, touched, moved, device, coefficients, peak)
        cycles = cycles + e.count * grouped
    return cycles / device.boost_clock_hz


predict = predict_from_passes(pass_time_s)
"""Times of prefill and of the average decode step [s]."""


METHOD = Method(
    name="amali-lite",
    title="AMALI-lite, a reduction of AMALI",
    source="AMALI, ISCA'25; reduced by this project",
    inputs=("architecture", "workload", "SMs", "clock", "peak FLOP/s", "bandwidth", "L2 rate"),
    assumes=(
        "128-column tiles, one block per SM at a time, kernels in sequence",
        "one launch cost for all kernels",
    ),
    leaves_out=(
        "machine code, warp scheduling, scoreboards and cache simulation of AMALI itself",
        "collectives",
        "energy",
    ),
    published_accuracy=(
        "of AMALI, not of this reduction, on A100: kernels 23.59 %, GEMM 17.84 %, Llama3-8B "
        "prefill 15.56 % and decode 34.90 %"
    ),
    gives=TIMES,
    forms={"default": (predict, default_coefficients)},
    default_note="published launch slope of A100; launch constant and L2 rate chosen here",
)
