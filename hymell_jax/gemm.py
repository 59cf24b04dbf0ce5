"""Level 1: seconds of one matrix product (m x k) @ (k x n), published and refined equations.

Published (HYMELL, arXiv 2608.06723, equations 5 and 6): a linear form in eleven terms, one set of
coefficients in each of five regimes, launch, memory, two balanced, compute. Here the regimes are
soft gates whose hard limit is the published piecewise form.

Refined: what a library does on the device. It picks the cheapest of a catalogue of kernels, each a
thread-block tile and a split of the k loop; a kernel costs

    t_kernel = (t_compute^8 + t_cache^8 + t_latency^8 + t_memory^8 + t_power^8)^(1/8) + t_split
    t        = t_launch + softmin over the kernels of t_kernel + t_convert

    compute   waves of tiles over the SMs x (FLOPs of a tile / (peak / SMs) x cost + prologue),
              slowed when a long kernel lowers the clock, and where m is large
    cache     bytes that tiles read through L2, shared by the SMs
    latency   one thread block alone walks its share of k
    memory    operands and result over the DRAM bandwidth, less what stays in L2; weights lose
              bandwidth while their tiles fill the SMs unevenly
    power     joules of the FLOPs and of the DRAM bytes together, over the board's limit
    split     partial sums of a split k loop, written and added up
    convert   fp8 only: a kernel of its own writes the activations in fp8 first

Every term is positive and non-decreasing in m, n and k, and so are the p-norm and the soft
minimum: time is monotone by construction, and it is never let below FLOPs over peak, nor, with
`streaming_weights=1`, below the weights over the bandwidth. Grouped products (experts) are the same
with `groups` times the tiles and operands.

The regimes of the refined form are the five ordered gates on ln(t_compute / t_memory) at the
published edges over the ridge point of the published device, plus the launch gate.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.smooth import (
    below_gate,
    ordered_gates,
    partial_ceil,
    power_of_two,
    safe_log,
    smooth_maximum,
    smooth_minimum,
)
from hymell_jax.types import Device, Value

Coefficients = dict[str, Any]

REGIMES = ("launch", "memory", "balanced_memory", "balanced_compute", "compute")
OVERLAPPING = ("compute", "cache", "latency", "memory", "power")
BOUNDS = ("launch", "compute", "cache", "latency", "memory", "split")

LAUNCH_EDGE_FLOPS = 2.0**23
INTENSITY_EDGES = (81.92, 166.05, 288.91)  # FLOP/byte, bf16, H100 NVL (arXiv 2608.06723)
PUBLISHED_RIDGE = 835e12 / 3.94e12  # FLOP/byte of the H100 NVL those edges were found on

_TILES = (
    (64, 32), (128, 32), (64, 64), (128, 64), (64, 128), (128, 128), (64, 256), (256, 64),
    (128, 256), (256, 128), (256, 256), (32, 64), (16, 64), (1, 8),
)  # fmt: skip
_SPLITS = (1, 2, 3, 4, 6, 8, 16, 32)
_SMALL_TILE = 128 * 128  # larger tiles split k by two at most

KERNELS = tuple(
    (rows, cols, split)
    for rows, cols in _TILES
    for split in _SPLITS
    if rows * cols <= _SMALL_TILE or split <= 2
)
"""The catalogue: (rows of m, columns of n, splits of k); (1, 8) is the matrix-vector kernel."""

OVERLAP = 8  # p-norm of what overlaps inside a kernel
CHOICE = 128  # sharpness of the soft minimum over kernels
ROW_STEP = 32.0  # steepness in ln(m) of the slowdown of many rows
ROW_FADE = 3.0  # and of its end in ln(n k)

_ROWS, _COLS, _SPLIT = (np.array(column, np.float32) for column in zip(*KERNELS, strict=True))

KERNEL_COEFFICIENTS = (
    "log_compute_cost",  # of the tile's FLOPs, relative to an SM's share of the peak
    "log_prologue_s",  # fill and drain of one tile
    "log_latency_s_per_k",  # one thread block alone, seconds per step of k
    "row_quantisation",  # logit: how much of a partly filled row of tiles is paid for
    "wave_quantisation",  # logit: how much of a partly filled wave is paid for
    "weight_quantisation",  # logit: bandwidth lost while weight tiles fill the SMs unevenly
)
SCALAR_COEFFICIENTS = (
    "log_launch_s",
    "log_cache_cost",  # L2 traffic of tiles, relative to DRAM bandwidth
    "log_input_excess",  # DRAM time of operands over the data sheet, above one
    "log_output_excess",
    "log_convert_s",  # of the kernel that converts activations to fp8
    "log_convert_cost",  # its traffic, relative to DRAM bandwidth
    "log_split_cost",  # bytes of partial sums, relative to DRAM bandwidth
    "log_split_s",
    "log_throttle",  # greatest slowdown of long compute-bound kernels
    "log_throttle_s",  # duration at which half of it has come
    "log_long_throttle",  # the same again for milliseconds, where the power limit acts
    "log_long_throttle_s",
    "log_row_slowdown",  # added where m is large, relative to FLOPs over peak
    "log_rows",  # of m, from which on
    "log_row_weights",  # elements of weights beyond which it grows no more
    "log_power_flops",  # power-limited seconds of the FLOPs, relative to FLOPs over peak
    "log_power_bytes",  # and of DRAM traffic, relative to its own seconds
    "log_working_set",  # bytes that compete for L2, relative to the operands
    "residency_sharpness",  # logit: exponent between one and eight
    "log_activation_reuse",  # L2 speed-up of each operand, minus one
    "log_weight_reuse",
    "log_output_reuse",
)


def default_coefficients() -> Coefficients:
    """Starting point of a fit: plausible for any data-centre GPU, float32."""
    n, vector = len(KERNELS), _ROWS == 1
    size = (_ROWS * _COLS).astype(np.float64)
    compute = np.where(vector, 4.0, 0.2 + 0.125 * np.log(128 * 256 / size))
    latency = np.where(vector, -3.0, -0.7) + np.log(1e-9)
    values = {
        "log_compute_cost": compute,
        "log_prologue_s": np.full(n, 1.5 + np.log(1e-7)),
        "log_latency_s_per_k": latency,
        "row_quantisation": np.full(n, 0.5),
        "wave_quantisation": np.full(n, 1.5),
        "weight_quantisation": np.full(n, -1.0),
        "log_launch_s": 0.7 + np.log(1e-6),
        "log_cache_cost": -1.2,
        "log_input_excess": -1.5,
        "log_output_excess": -1.0,
        "log_convert_s": np.log(2e-6),
        "log_convert_cost": 0.0,
        "log_split_cost": -1.0,
        "log_split_s": 0.7 + np.log(1e-6),
        "log_throttle": -3.0,
        "log_throttle_s": np.log(1e-4),
        "log_long_throttle": -3.0,
        "log_long_throttle_s": np.log(3e-3),
        "log_row_slowdown": -3.0,
        "log_rows": 8.0,
        "log_row_weights": 20.5,
        "log_power_flops": -0.5,
        "log_power_bytes": -1.0,
        "log_working_set": 1.0,
        "residency_sharpness": -1.0,
        "log_activation_reuse": -1.0,
        "log_weight_reuse": -2.0,
        "log_output_reuse": -1.0,
    }
    return {name: np.asarray(value, np.float32) for name, value in values.items()}


def carried(c: Coefficients, source: Device, target: Device) -> Coefficients:
    """Coefficients of one board for another of the same chip: L2 moves equal bytes a cycle.

    The catalogue's cache cost is relative to the DRAM, which differs between boards of a chip; the
    rate of L2 goes with the number of SMs and the clock.
    """
    cycles = [d.n_sm * d.boost_clock_hz for d in (source, target)]
    moved = np.log(target.memory_bytes_per_s / source.memory_bytes_per_s)
    moved = moved + np.log(cycles[0] / cycles[1])
    return c | {"log_cache_cost": np.asarray(c["log_cache_cost"] + moved, np.float32)}


def floating_operations(m: Value, n: Value, k: Value) -> Value:
    """2 m n k."""
    return 2.0 * m * n * k


def cached_bytes_per_flop(weight_bytes, input_bytes):
    """Bytes through L2 for a FLOP of a product in tiles of 128 rows by 256 columns.

    A tile takes 2 x 128 x 256 FLOPs from 128 elements of the input and 256 weights for every step
    along k.
    """
    return 0.5 * (input_bytes / 256.0 + weight_bytes / 128.0)


def peak_rate(device: Device, element_bytes: Value) -> jax.Array:
    """FLOP/s of the matrix units: the bf16 rate at two bytes an element, the fp8 rate at one.

    In between it is interpolated in ln(bytes), and held outside.
    """
    share = jnp.clip(2.0 - jnp.log2(2.0 * element_bytes), 0.0, 1.0)
    ratio = jnp.log(device.peak_fp8_flops_per_s / device.peak_flops_per_s)
    return device.peak_flops_per_s * jnp.exp(share * ratio)


def _residency(reuse: Value, filled: jax.Array) -> Value:
    """(1 + x) / (1 + reuse + x): 1 / (1 + reuse) while operands fit in L2, one when they do not.

    bytes x residency(bytes^q) is non-decreasing in bytes for every reuse >= 0 and q >= 0.
    """
    return (1.0 + filled) / (1.0 + reuse + filled)


def _many_rows(c: Coefficients, m: Value, n: Value, k: Value, peak_s: Value) -> jax.Array:
    """Seconds lost to many rows. Observed on B200: from some 2,700 on, but for huge weights, the
    library's kernels reach a fifth less. x / (1 + x^3)^(1/3) of weights rises with n and k."""
    many = jax.nn.sigmoid(ROW_STEP * (jnp.log(m) - c["log_rows"]))
    huge = ROW_FADE * (jnp.log(n * k) - c["log_row_weights"])
    small = jnp.exp(-jax.nn.softplus(huge) / ROW_FADE)
    return jnp.exp(c["log_row_slowdown"]) * peak_s * many * small


_EXPONENTIALS = ("throttle", "throttle_s", "long_throttle", "long_throttle_s", "power_bytes")


def _kernel_rows(c: Coefficients) -> dict[str, Any]:
    """What depends on the kernel alone, arrays [n_kernels]."""
    several = (_SPLIT > 1).astype(np.float32)
    rows = {
        "rows": _ROWS,
        "cols": _COLS,
        "split": _SPLIT,
        "rows_read": _ROWS / _SPLIT,
        "cols_read": _COLS / _SPLIT,
        "partial_sums": several * _SPLIT,
    }
    return rows | {
        "compute": 2.0 * _ROWS * _COLS / _SPLIT * jnp.exp(c["log_compute_cost"]),
        "prologue_s": jnp.exp(c["log_prologue_s"]),
        "latency_s": jnp.exp(c["log_latency_s_per_k"]) / _SPLIT,
        "row_quantisation": jax.nn.sigmoid(c["row_quantisation"]),
        "wave_quantisation": jax.nn.sigmoid(c["wave_quantisation"]),
        "weight_quantisation": jax.nn.sigmoid(c["weight_quantisation"]),
        "split_s": several * jnp.exp(c["log_split_s"]),
    }


def _product_terms(
    c: Coefficients,
    device: Device,
    m: Value,
    n: Value,
    k: Value,
    weight_bytes: Value,
    activation_bytes: Value,
    groups: Value,
    streaming_weights: Value,
) -> dict[str, Any]:
    """What depends on the product alone, arrays []: seconds, or factors of `_kernel_rows`."""
    peak = peak_rate(device, jnp.maximum(weight_bytes, activation_bytes))
    peak_s = groups * floating_operations(m, n, k) / peak
    bandwidth, n_sm = device.memory_bytes_per_s, device.n_sm
    activations = groups * m * k * activation_bytes
    weights = groups * n * k * weight_bytes
    results = groups * m * n * 2.0
    sharpness = 1.0 + 7.0 * jax.nn.sigmoid(c["residency_sharpness"])
    log_filled = sharpness * (
        jnp.log((activations + weights + results) / device.l2_bytes) + c["log_working_set"]
    )
    filled = jnp.exp(jnp.minimum(log_filled, 60.0))
    weight_reuse = jnp.exp(c["log_weight_reuse"]) * (1.0 - streaming_weights)
    input_cost = (1.0 + jnp.exp(c["log_input_excess"])) / bandwidth
    output_cost = (1.0 + jnp.exp(c["log_output_excess"])) / bandwidth
    reading = input_cost * _residency(weight_reuse, filled)
    cached = k * (n_sm / bandwidth * jnp.exp(c["log_cache_cost"]))
    return {
        "m": 1.0 * jnp.asarray(m),
        "n": 1.0 * jnp.asarray(n),
        "k": 1.0 * jnp.asarray(k),
        "groups": groups,
        "peak_s": peak_s,
        "k_s": k * n_sm / peak,
        "many_rows": _many_rows(c, m, n, k, peak_s),
        "row_s": activation_bytes * cached,
        "col_s": weight_bytes * cached,
        "operands": (
            activations * input_cost * _residency(jnp.exp(c["log_activation_reuse"]), filled)
            + results * output_cost * _residency(jnp.exp(c["log_output_reuse"]), filled)
        ),
        "weights": weights * reading,
        "wave_of_weights": k * weight_bytes * n_sm * reading,
        "partial_sums": results / bandwidth * 2.0 * jnp.exp(c["log_split_cost"]),
        "power": peak_s * jnp.exp(c["log_power_flops"]),
        "streamed": streaming_weights * weights / bandwidth,
        "n_sm": n_sm,
    } | {name: jnp.exp(c[f"log_{name}"]) for name in _EXPONENTIALS}


def _kernel_terms(row: dict[str, Any], p: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each term of a product by one kernel [], or by each of them [n_kernels].

    Args:
        row: of `_kernel_rows`, one of them or all.
        p: of `_product_terms`.
    """
    grid_rows = partial_ceil(p["m"] / row["rows"], row["row_quantisation"])
    grid_cols = jnp.ceil(p["n"] / row["cols"])
    waves = p["groups"] * grid_rows * grid_cols * row["split"] / p["n_sm"]

    hard = row["wave_quantisation"]
    paid_waves = hard * jnp.ceil(waves) + (1.0 - hard) * jnp.sqrt(1.0 + waves * waves)
    compute = paid_waves * (p["k_s"] * row["compute"] + row["prologue_s"])
    for name in ("throttle", "long_throttle"):
        slow = p[name] * compute / (compute + p[f"{name}_s"])
        compute = compute * (1.0 + slow)
    compute = compute + p["many_rows"]

    cache = waves * (row["rows_read"] * p["row_s"] + row["cols_read"] * p["col_s"])
    weight_waves = jnp.ceil(p["groups"] * p["n"] / row["cols"] * row["split"] / p["n_sm"])
    uneven = row["weight_quantisation"]
    memory = p["operands"] + (1.0 - uneven) * p["weights"]
    memory = memory + (uneven * row["cols_read"]) * (weight_waves * p["wave_of_weights"])
    terms = {
        "compute": compute,
        "cache": cache,
        "latency": p["k"] * row["latency_s"],
        "memory": memory,
        "power": p["power"] + p["power_bytes"] * memory,
        "split": p["partial_sums"] * row["partial_sums"] + row["split_s"],
    }
    body = smooth_maximum(*(terms[name] for name in OVERLAPPING), sharpness=OVERLAP)
    return terms | {"body": body, "total": body + terms["split"]}


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _soft_choice(
    total: jax.Array, product: dict[str, Any], rows: dict[str, Any], sharpness: int
) -> jax.Array:
    """Seconds [] of the soft choice among kernels that take `total` [n_kernels].

    Its slope, sum over kernels of (choice / t)^(sharpness + 1) dt, is added up kernel by kernel:
    with all of them at once, a batch of products would not stay in cache.

    Args:
        total: seconds of each kernel, without their slopes.
        product: of `_product_terms`; with the next, what the totals come from.
        rows: of `_kernel_rows`.
        sharpness: of the soft minimum.
    """
    return smooth_minimum(total, sharpness)


@functools.partial(_soft_choice.defjvp, symbolic_zeros=True)
def _soft_choice_slope(sharpness, primals, tangents):
    total, product, rows = primals
    product_moves, row_moves = (
        {name: move for name, move in moves.items() if not _stands(move)} for moves in tangents[1:]
    )
    chosen = smooth_minimum(total, sharpness)

    def step(slope, kernel):
        time_s, row, row_move = kernel

        def seconds(moved_row, moved_product):
            return _kernel_terms(row | moved_row, product | moved_product)["total"]

        at = {name: row[name] for name in row_move}, {n: product[n] for n in product_moves}
        change = jax.jvp(seconds, at, (row_move, product_moves))[1]
        share = chosen / time_s
        return slope + power_of_two(share, sharpness) * share * change, None

    run = jax.checkpoint(step, prevent_cse=False)
    return chosen, jax.lax.scan(run, jnp.zeros_like(chosen), (total, rows, row_moves))[0]


def _stands(move: Any) -> bool:
    """Whether a tangent is a zero of `symbolic_zeros`: nobody asks for that slope."""
    return isinstance(move, jax.custom_derivatives.SymbolicZero)


def gemm_time(
    coefficients: Coefficients,
    device: Device,
    m: Value,
    n: Value,
    k: Value,
    weight_bytes: Value = 2.0,
    activation_bytes: Value = 2.0,
    groups: Value = 1.0,
    streaming_weights: Value = 0.0,
    sharpness: int = CHOICE,
) -> tuple[jax.Array, jax.Array]:
    """Refined seconds of one product, and the share of each of `BOUNDS`; scalar inputs.

    Args:
        coefficients: as named in `KERNEL_COEFFICIENTS` [n_kernels] and `SCALAR_COEFFICIENTS` [].
        device: data sheet.
        m, n, k: shape of the product, at least one, whole or relaxed.
        weight_bytes: per element of the (k x n) operand.
        activation_bytes: per element of the (m x k) operand; results take two bytes.
        groups: products of this shape in one launch.
        streaming_weights: 1 where weights cannot have stayed in L2 (a whole model), 0 as measured
            with warm operands.
        sharpness: of the soft minimum over choices.

    Returns:
        (time_s [], shares [n_bounds]); shares are non-negative and sum to one. What the power
        limit costs counts as compute and as memory, as its joules do.
    """
    c = coefficients
    p = _product_terms(
        c, device, m, n, k, weight_bytes, activation_bytes, groups, streaming_weights
    )
    rows = jax.tree.map(jnp.asarray, _kernel_rows(c))
    terms = _kernel_terms(rows, p)
    total, body = terms["total"], terms["body"]
    chosen_s = _soft_choice(jax.lax.stop_gradient(total), p, rows, sharpness)
    best = jnp.maximum(chosen_s, jnp.maximum(p["peak_s"], p["streamed"]))
    launch = jnp.exp(c["log_launch_s"])
    eight_bit = jnp.clip(2.0 - activation_bytes, 0.0, 1.0)
    convert_bytes = groups * m * k * (2.0 + activation_bytes) / device.memory_bytes_per_s
    convert = jnp.exp(c["log_convert_s"]) + convert_bytes * jnp.exp(c["log_convert_cost"])
    convert = convert * eight_bit
    time_s = launch + best + convert

    chosen = power_of_two(jnp.min(total) / total, sharpness)
    chosen = chosen / jnp.sum(chosen) * best / (total * time_s)
    held = [chosen * body * power_of_two(terms[name] / body, OVERLAP) for name in OVERLAPPING]
    shares = [jnp.sum(share) for share in held[:-1]]
    flops_share = p["power"] / jnp.maximum(terms["power"], 1e-30)
    shares[0] = shares[0] + jnp.sum(held[-1] * flops_share)
    shares[-1] = shares[-1] + jnp.sum(held[-1] * (1.0 - flops_share)) + convert / time_s
    split = jnp.sum(chosen * terms["split"])
    return time_s, jnp.stack([launch / time_s, *shares, split])


def regime_gates(time_ratio: Value, flops: Value, temperature: Value) -> jax.Array:
    """Weights of `REGIMES` [..., 5] on ln(compute time / memory time) and the FLOPs of a product.

    The edges are the published intensities over the published ridge point, so on the published
    device they are the published regimes. Hard limit: one regime has weight one.
    """
    edges = jnp.log(jnp.asarray(INTENSITY_EDGES) / PUBLISHED_RIDGE)
    launch = below_gate(safe_log(flops), jnp.log(LAUNCH_EDGE_FLOPS), temperature)
    rest = ordered_gates(time_ratio, edges, temperature) * (1.0 - launch)[..., None]
    return jnp.concatenate([launch[..., None], rest], -1)


PUBLISHED_TERMS = (
    "pf_times_flops", "pf_times_input_bytes", "ai_times_input_bytes", "flops", "pf", "ai",
    "output_bytes", "input_bytes", "log10_flops", "inverse_pf", "constant",
)  # fmt: skip


def published_terms(m: Value, n: Value, k: Value, element_bytes: Value = 2.0) -> jax.Array:
    """The eleven terms of equation 5 of arXiv 2608.06723, [..., 11]; PF = m n / k."""
    flops = floating_operations(m, n, k)
    inputs = (m + n) * k * element_bytes
    outputs = m * n * element_bytes
    intensity = flops / (inputs + outputs)
    pf = m * n / k
    one = 0.0 * m + 1.0
    return jnp.stack(
        [
            pf * flops, pf * inputs, intensity * inputs, flops, pf, intensity,
            outputs, inputs, jnp.log(flops) / np.log(10.0), 1.0 / pf, one,
        ],
        -1,
    )  # fmt: skip


def published_gates(
    m: Value,
    n: Value,
    k: Value,
    temperature: Value,
    element_bytes: Value = 2.0,
) -> jax.Array:
    """Weights of `REGIMES` [..., 5] on ln(FLOP/byte). Hard limit: equation 6, one-hot."""
    flops = floating_operations(m, n, k)
    intensity = flops / (((m + n) * k + m * n) * element_bytes)
    edges = jnp.log(jnp.asarray(INTENSITY_EDGES))
    launch = below_gate(jnp.log(flops), jnp.log(LAUNCH_EDGE_FLOPS), temperature)
    rest = ordered_gates(jnp.log(intensity), edges, temperature) * (1.0 - launch)[..., None]
    return jnp.concatenate([launch[..., None], rest], -1)


def published_gemm(
    coefficients: jax.Array,
    m: Value,
    n: Value,
    k: Value,
    temperature: Value = 0.02,
    element_bytes: Value = 2.0,
) -> jax.Array:
    """Equation 5 of arXiv 2608.06723 with soft regimes: seconds or joules, as the fit was.

    Args:
        coefficients: [5, 11], rows in the order of `REGIMES`, columns of `PUBLISHED_TERMS`.
        m, n, k: shape of the product, shape [...].
        temperature: width of the gates in ln(FLOP/byte) and ln(FLOP); to zero for the hard form.

    The linear form may be negative or far off outside the shapes that it was fitted on.
    """
    terms = published_terms(m, n, k, element_bytes)
    shape = (1,) * (terms.ndim - 1) + jnp.shape(coefficients)
    per_regime = jnp.sum(terms[..., None, :] * jnp.reshape(coefficients, shape), -1)
    return jnp.sum(published_gates(m, n, k, temperature, element_bytes) * per_regime, -1)


def published_regime(m: np.ndarray, n: np.ndarray, k: np.ndarray, element_bytes: float = 2.0):
    """Index into `REGIMES` of the hard published regimes, numpy float64."""
    m, n, k = (np.asarray(x, np.float64) for x in (m, n, k))
    flops = 2.0 * m * n * k
    intensity = flops / (((m + n) * k + m * n) * element_bytes)
    inner = 1 + np.searchsorted(np.array(INTENSITY_EDGES), intensity, side="right")
    return np.where(flops < LAUNCH_EDGE_FLOPS, 0, inner)
