"""Board power of measured blocks, and power coefficients that their labels bound from below.

Products of 300 us and longer have sound power labels, but all of them are bound by the tensor cores
or by L2: what DRAM traffic draws they hardly tell. The experts of a mixture layer and attention do
tell, only that their labels carry what ran before and so are lower bounds. `fit_power` takes both:
products by their relative error, blocks by an upper quantile of their labels.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from hymell_jax import (
    attention,
    block_recipes,
    blocks,
    data,
    devices,
    fit,
    gemm,
    linear,
    moe,
    power,
)
from hymell_jax.fit import Progress
from hymell_jax.types import DTYPES, Device

QUANTILE = 0.9
"""Share of a block's train rows whose power label the fitted power shall reach."""

BLOCK_WEIGHT = 0.3
"""Weight of each kind of block beside the products."""

MAX_ROWS = 6000  # of each block

POWER_BLOCKS = (*blocks.ATTENTION_BLOCKS, "experts", *blocks.LINEAR_BLOCKS)
"""Blocks whose work `block_work` counts."""


def block_work(name: str, frame: pd.DataFrame) -> tuple[np.ndarray, ...]:
    """(FLOPs, DRAM bytes, cache bytes, fp8 share) of measured rows, [n_rows] each.

    As `analytical` counts them for the power of a part: attention by its (query, key) pairs, the
    experts by the rows and experts of the busiest GPU, a kernel of linear attention by its traffic
    and 12 FLOPs per token and element of the state.

    Raises:
        ValueError: a block of which no power was measured apart from its projections.
    """
    sizes = [np.float32(column) for column in block_recipes.block_sizes(name, frame)]
    if name in blocks.ATTENTION_BLOCKS:
        work = (*attention.core_work(name.removeprefix("attention_"), *sizes), 0.0, 0.0)
    elif name == "experts":
        work = _expert_work(*sizes)
    elif name in blocks.LINEAR_BLOCKS:
        work = _linear_work(name.removeprefix("linear_"), *sizes)
    else:
        raise ValueError(f"The work of {name!r} is that of its module's parts; ask for those.")
    return tuple(np.broadcast_to(np.asarray(x, np.float32), len(frame)) for x in work)


def _expert_work(
    tokens, d_model, d_expert, n_experts, top_k, slices, ranks, exponent, weight_bytes, n_matrices
):
    load = moe.expert_load(tokens, n_experts, top_k, ranks, exponent)
    width = d_expert / slices
    flops = 2.0 * load.rows * n_matrices * d_model * width
    weights = load.touched * n_matrices * d_model * width * weight_bytes
    inputs = load.rows * (d_model + width) * weight_bytes
    outputs = load.rows * ((n_matrices - 1.0) * width + d_model) * moe.ACTIVATION_BYTES
    cached = flops * gemm.cached_bytes_per_flop(weight_bytes, weight_bytes)
    return flops, weights + inputs + outputs, cached, 2.0 - weight_bytes


def _linear_work(kernel, batch, seq_len, k_heads, v_heads, k_dim, v_dim):
    tokens = batch * seq_len
    _, _, moved = linear.kernel_work(kernel, batch, seq_len, k_heads, v_heads, k_dim, v_dim)
    channels = 2.0 * k_heads * k_dim + v_heads * v_dim
    taps = 2.0 * linear.CONV_WIDTH * tokens * channels
    rule = 12.0 * tokens * v_heads * k_dim * v_dim
    return (taps if kernel.startswith("conv") else rule), moved, 0.0, 0.0


@jax.jit
def _watts(coefficients, device, work, time_s):
    flops, moved, cached, fp8 = work
    return power.board_power_w(
        coefficients, device, flops / time_s, moved / time_s, cached / time_s, fp8
    )


def block_watts(coefficients, device: Device, work, time_s) -> np.ndarray:
    """Watts [n_rows] of work (`block_work`) that takes `time_s` [n_rows]."""
    time_s = np.asarray(time_s, np.float32)
    return np.asarray(_watts(coefficients, device, work, time_s), np.float64)


def _rates(work, time_s) -> tuple[np.ndarray, ...]:
    flops, moved, cached, fp8 = (np.asarray(x, np.float64) for x in work)
    return flops / time_s, moved / time_s, cached / time_s, fp8


def _product_work(frame: pd.DataFrame, element: float):
    m, n, k = (frame[name].to_numpy(np.float64) for name in "mnk")
    flops = 2.0 * m * n * k
    moved = (n * k + m * k) * element + m * n * 2.0
    cached = flops * gemm.cached_bytes_per_flop(element, element)
    return flops, moved, cached, np.full(len(frame), 2.0 - element)


def power_rows(
    folder: str | os.PathLike[str], device: str, runtime: str, dtype: str, seed: int = 0
) -> dict[str, tuple[np.ndarray, ...]]:
    """Train rows with measured power: FLOPs/s, DRAM and cache bytes/s, fp8 share, ln watts.

    By kind: "gemm", of sound rows, and the blocks of `POWER_BLOCKS` that were measured.
    """
    products = data.gemm_rows(Path(folder), device, runtime, dtype)
    products = products[products["time_s"] >= fit.SOUND_POWER_S]
    frames = {"gemm": products}
    for name in POWER_BLOCKS:
        frames[name] = block_recipes.block_rows(name, folder, device, runtime, dtype)
    found = {}
    for name, frame in frames.items():
        if frame.empty or "power_w" not in frame:
            continue
        frame = frame[(frame["split"] == "train") & frame["power_w"].notna()]
        if len(frame) > MAX_ROWS:
            frame = frame.sample(MAX_ROWS, random_state=seed)
        if frame.empty:
            continue
        gemm = name == "gemm"
        work = _product_work(frame, DTYPES[dtype]) if gemm else block_work(name, frame)
        rates = _rates(work, frame["time_s"].to_numpy(np.float64))
        found[name] = (*rates, np.log(frame["power_w"].to_numpy(np.float64)))
    return found


def fit_power(
    folder: str | os.PathLike[str],
    device: str,
    runtime: str,
    dtype: str,
    *,
    quantile: float = QUANTILE,
    block_weight: float = BLOCK_WEIGHT,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Power coefficients from sound products and from the upper labels of blocks.

    Minimises the mean |P / label - 1| of the products plus, for each kind of block, a weight times
    the pinball loss of ln(label / P): P is drawn to the given quantile of the labels of alike rows.

    Args:
        folder: of measured tables.
        device, runtime, dtype: what was measured.
        quantile: of the labels of blocks.
        block_weight: of attention, experts and linear attention, each, beside the products.
        seed: of the choice of rows.
        progress: called with (what, done, total).

    Returns:
        Coefficients (`power.POWER_COEFFICIENTS`) and the rows of each kind.

    Raises:
        ValueError: no products with measured power.
    """
    rows = power_rows(folder, device, runtime, dtype, seed)
    if "gemm" not in rows:
        raise ValueError(f"No products of {device}, {runtime}, {dtype} have a sound power label.")
    kinds: dict[str, int] = {}
    for name, columns in rows.items():
        kind = name.partition("_")[0]
        kinds[kind] = kinds.get(kind, 0) + len(columns[0])
    total = sum(kinds.values())
    stacked = [np.concatenate([r[i] for r in rows.values()]) for i in range(5)]
    weights = np.concatenate([
        np.full(len(r[0]), (1.0 if name == "gemm" else block_weight) * total
                / kinds[name.partition("_")[0]])
        for name, r in rows.items()
    ])  # fmt: skip
    is_block = np.concatenate([np.full(len(r[0]), float(n != "gemm")) for n, r in rows.items()])
    sheet = devices.get_device(device).device

    def loss(c, flops, moved, cached, fp8, log_label, weight, block):
        watts = jax.vmap(lambda *row: power.board_power_w(c, sheet, *row))(
            flops, moved, cached, fp8
        )
        above = jnp.log(watts) - log_label
        pinball = jnp.maximum((1.0 - quantile) * above, -quantile * above)
        product = jnp.abs(jnp.expm1(jnp.minimum(above, 3.0)))
        return jnp.mean(weight * (block * pinball + (1.0 - block) * product))

    start = power.default_coefficients()
    fitted, _ = fit.minimise(
        loss, start, tuple(np.asarray(x, np.float32) for x in (*stacked, weights, is_block)),
        steps=1500, batch=4096, learning_rate=0.03, seed=seed, what="power", progress=progress,
    )  # fmt: skip
    return fitted, {name: len(r[0]) for name, r in rows.items()}
