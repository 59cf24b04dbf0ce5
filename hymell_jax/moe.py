"""Level 1 of the routed experts of one mixture layer: seconds on the busiest GPU.

Two grouped products over the experts that are touched, and what surrounds them,

    t = t_launch + t_rows + (t_memory^p + t_compute^p + t_chain^p)^(1/p),    p >= 1

    launch    a floor for the chain of small kernels; more of them with expert parallelism
    rows      permutation, activation and sum over all tokens x top_k rows, and the routing
    memory    weights of the touched experts, and their rows, over the DRAM bandwidth
    compute   rows, padded to whole tiles for every touched expert, over the tensor peak
    chain     one thread block alone walks the two reduction dimensions

How the tokens spread over the experts decides the first three. Loads follow a power law, as in the
benchmarks of NVIDIA aiconfigurator (collector/helper.py): x = [1 + u (R^(1-a) - 1)]^(1/(1-a)) with
u uniform and R = 0.8 tokens, normalised to mean one. Experts are touched with the coverage
1 - (1 - share)^tokens (arXiv 2605.15051). With expert parallelism the busiest of `ep` GPUs counts:
its load is 1 + y + 0.19 y^2 times the mean, y = cv sqrt(ep / E) z(ep) with z the expected maximum
of ep normal numbers and cv the coefficient of variation of x.

Every term is a sum of positive powers of quantities that do not decrease with tokens, so neither
does the time. All functions broadcast over arrays of one shape and scalars; sizes may be relaxed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.gemm import peak_rate
from hymell_jax.robust_fit import fit_coefficients
from hymell_jax.smooth import added_and_overlapped, floating, log2_whole_waves
from hymell_jax.types import Device, Value

MOE_TERMS = ("launch", "rows", "memory", "compute", "chain")
"""Order of the shares: each term's part of d log(time)."""

POWER_LAWS = {"balanced": 0.0, "power_law_1.01": 1.01, "power_law_1.2": 1.2}
"""Exponents of the measured distributions; 0 spreads tokens evenly, by turns."""

ACTIVATION_BYTES = 2.0
TILE_ROWS = 16.0  # least rows of a tensor-core tile
TAIL = 0.19  # of the busiest GPU's load; fits draws of the law at 8 to 128 experts within 10 %
_NODES, _WEIGHTS = (
    a.astype(np.float64) for a in np.polynomial.legendre.leggauss(8)
)  # quantiles of the load, and how many experts each stands for
_NODES, _WEIGHTS = 0.5 + 0.5 * _NODES, 0.5 * _WEIGHTS

DEFAULT_COEFFICIENTS: dict[str, float] = {
    "log_launch_s": -10.5,
    "log_parallel_launch": -1.5,
    "log_row_expert": 0.0,
    "log_row_model": 0.0,
    "log_token_model": 0.0,
    "log_route_s": -20.5,
    "log_memory_excess": -1.5,
    "log_memory_fill": -2.0,
    "log_compute_excess": -0.5,
    "log_tile_pad": 0.0,
    "log_chain_s": -20.5,
    "log_misaligned": -1.0,
    "log_least_width": 3.5,
    "log_pnorm": 0.5,
}
"""Where a fit starts; natural logs of

log_launch_s          floor in seconds
log_parallel_launch   its excess with expert parallelism: factor 1 + e
log_row_expert        passes over the expert width of all routed rows, in DRAM time
log_row_model         passes over the model width of all routed rows, in DRAM time
log_token_model       passes over the model width of all tokens, in DRAM time
log_route_s           seconds to sort one routed row
log_memory_excess     e: DRAM time over the data sheet, 1 + e
log_memory_fill       its part while few thread blocks stream: + e_fill sqrt(SMs / tiles)
log_compute_excess    e: time of padded rows over that at peak, 1 + e
log_tile_pad          rows that each touched expert adds, in units of `TILE_ROWS`
log_chain_s           seconds of one step of the reduction in one thread block
log_misaligned        excess where the local expert width is 8 off a multiple of 16: 1 + e
log_least_width       the local expert width w counts as (w^2 + e^2)^(1/2)
log_pnorm             p = 1 + e
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """What the busiest GPU does, arrays [...]."""

    rows: jax.Array  # routed rows that it computes
    touched: jax.Array  # experts whose weights it reads
    padded: jax.Array  # rows with every touched expert padded to a whole tile
    local_experts: jax.Array  # experts that it holds
    imbalance: jax.Array  # its rows over the mean of all GPUs


def relative_loads(tokens, exponent) -> list[jax.Array]:
    """Load of an expert over the mean at each quantile node; their weighted mean is one.

    Hard limit at exponent 0: all one.
    """
    log_range = jnp.log(0.8 * floating(tokens) + 20.0)
    gap = 1.0 - floating(exponent)
    gap = jnp.where(jnp.abs(gap) < 1e-3, -1e-3, gap)
    skewed = jnp.clip(floating(exponent), 0.0, 1.0)
    loads = [
        jnp.exp(skewed * jnp.log1p(float(u) * jnp.expm1(gap * log_range)) / gap) for u in _NODES
    ]
    mean = sum(float(w) * load for w, load in zip(_WEIGHTS, loads, strict=True))
    return [load / mean for load in loads]


def _expected_maximum(n) -> jax.Array:
    """Expected maximum of n standard normal numbers: 0.8 ln(n)^(3/4), within 0.05 up to 256."""
    log_n = jnp.log(jnp.maximum(floating(n), 1.0))
    return 0.8 * log_n / (log_n + 0.01) ** 0.25


def expert_load(tokens, n_experts, top_k, expert_parallel=1.0, exponent=0.0) -> ExpertLoad:
    """Rows and experts of the busiest of `expert_parallel` GPUs.

    Args:
        tokens: rows that enter the layer, over all GPUs of the group.
        n_experts: routed experts, over all GPUs.
        top_k: experts a token.
        expert_parallel: GPUs that share the experts.
        exponent: of the power law of the loads, 0 for an even spread.
    """
    tokens, ep = floating(tokens), floating(expert_parallel)
    experts = jnp.maximum(floating(n_experts), 1.0)
    local = jnp.maximum(experts / ep, 1.0)
    share = jnp.clip(top_k / experts, 1e-6, 1.0)
    loads = relative_loads(tokens, exponent)
    pairs = list(zip(_WEIGHTS.tolist(), loads, strict=True))
    variance = sum(w * jnp.square(load) for w, load in pairs) - 1.0
    spread = jnp.sqrt(jnp.maximum(variance, 1e-12) / local)
    excess = spread * _expected_maximum(ep)
    imbalance = 1.0 + excess + TAIL * jnp.square(excess)
    imbalance = jnp.minimum(jnp.minimum(imbalance, ep), 1.0 / share)
    skewed = jnp.clip(floating(exponent), 0.0, 1.0)
    touched: Value = 0.0
    padded: Value = 0.0
    for weight, load in pairs:
        mean_rows = tokens * share * load * imbalance
        chance = jnp.minimum(share * load * imbalance, 1.0 - 1e-6)
        covered = -jnp.expm1(tokens * jnp.log1p(-chance))
        by_turns = jnp.minimum(tokens * chance, 1.0)
        here = skewed * covered + (1.0 - skewed) * by_turns
        touched = touched + weight * here
        padded = padded + weight * jnp.maximum(mean_rows, TILE_ROWS * here)
    return ExpertLoad(
        rows=jnp.maximum(tokens * share * local * imbalance, 1.0),
        touched=jnp.maximum(local * touched, 1.0),
        padded=jnp.maximum(local * padded, TILE_ROWS),
        local_experts=local,
        imbalance=imbalance,
    )


def misalignment(width) -> jax.Array:
    """sin^2(pi width / 16): 0 at multiples of 16, 1 half-way between.

    Rows whose length is no multiple of 16 elements are loaded without wide instructions.
    """
    return jnp.square(jnp.sin(jnp.pi / TILE_ROWS * width))


def moe_time_s(
    coefficients: Mapping[str, float],
    device: Device,
    tokens,
    d_model,
    d_expert,
    n_experts,
    top_k,
    tensor_parallel=1.0,
    expert_parallel=1.0,
    exponent=0.0,
    weight_bytes=2.0,
    n_matrices=3.0,
) -> tuple[jax.Array, jax.Array]:
    """Seconds of the routed experts of one layer on the busiest GPU, and what holds them up.

    Args:
        coefficients: names of `DEFAULT_COEFFICIENTS`.
        device: data sheet.
        tokens: rows that enter the layer, over all GPUs that share the experts.
        d_model: width of the model.
        d_expert: width of one routed expert, before tensor parallelism.
        n_experts: routed experts, before expert parallelism.
        top_k: experts a token.
        tensor_parallel: GPUs that share every expert.
        expert_parallel: GPUs that share the set of experts.
        exponent: of the power law of the loads (`POWER_LAWS`).
        weight_bytes: per weight; the products run in that format.
        n_matrices: 3 gated (gate, up, down), 2 plain.

    Returns:
        time_s [...] and shares [..., 5] in the order of `MOE_TERMS`, sum one.
    """
    sizes = (tokens, d_model, d_expert, n_experts, top_k, tensor_parallel, expert_parallel)
    found = _timed(coefficients, device, *sizes, exponent, weight_bytes, n_matrices)
    return found.time_s, found.shares


@dataclasses.dataclass(frozen=True)
class _Timed:
    """What the routed experts take and how much of it is done, arrays [...]."""

    time_s: jax.Array
    shares: jax.Array  # [..., 5]
    terms: list[jax.Array]  # seconds of `MOE_TERMS`, none of which decreases with tokens
    load: ExpertLoad
    width: jax.Array  # of an expert on this GPU


def _timed(
    coefficients, device: Device, tokens, d_model, d_expert, n_experts, top_k, tensor_parallel,
    expert_parallel, exponent, weight_bytes, n_matrices,
) -> _Timed:  # fmt: skip
    c = {name: floating(coefficients[name]) for name in DEFAULT_COEFFICIENTS}
    load = expert_load(tokens, n_experts, top_k, expert_parallel, exponent)
    width = local_width = jnp.maximum(floating(d_expert) / tensor_parallel, 1.0)
    d_model, bandwidth = floating(d_model), device.memory_bytes_per_s
    parallel = jnp.clip(floating(expert_parallel) - 1.0, 0.0, 1.0)
    launch = jnp.exp(c["log_launch_s"]) * (1.0 + jnp.exp(c["log_parallel_launch"]) * parallel)

    routed = floating(tokens) * top_k
    passes = jnp.exp(c["log_row_expert"]) * width + jnp.exp(c["log_row_model"]) * d_model
    rows = routed * (passes * ACTIVATION_BYTES / bandwidth + jnp.exp(c["log_route_s"]))
    hidden = floating(tokens) * d_model * jnp.exp(c["log_token_model"])
    rows = rows + hidden * ACTIVATION_BYTES / bandwidth

    slow = 1.0 + jnp.exp(c["log_misaligned"]) * misalignment(width)
    width = jnp.hypot(width, jnp.exp(c["log_least_width"]))
    weights = load.touched * n_matrices * d_model * width * weight_bytes
    tiles = load.touched * (d_model + (n_matrices - 1.0) * width) / 128.0
    fill = jnp.exp(c["log_memory_fill"]) * jnp.sqrt(device.n_sm / tiles)
    streamed = weights * (1.0 + jnp.exp(c["log_memory_excess"]) + fill)
    moved = load.rows * (2.0 * d_model + (n_matrices + 1.0) * width) * ACTIVATION_BYTES
    memory = (streamed + moved) / bandwidth * slow

    padded = load.padded + jnp.exp(c["log_tile_pad"]) * TILE_ROWS * load.touched
    flops = 2.0 * padded * n_matrices * d_model * width
    compute = flops / peak_rate(device, weight_bytes) * (1.0 + jnp.exp(c["log_compute_excess"]))
    compute = compute * slow
    chain = (d_model + width) * jnp.exp(c["log_chain_s"])
    terms = jnp.broadcast_arrays(launch, rows, memory, compute, chain)
    time_s, shares = added_and_overlapped(1.0 + jnp.exp(c["log_pnorm"]), terms, 2)
    return _Timed(time_s, shares, terms, load, local_width)


MOE_MONOTONE: tuple[str, ...] = (
    "log2_tokens",
    "log2_rows",  # on this GPU
    "log2_touched",
    "log2_touched_share",  # of the local experts
    "log2_rows_per_touched",
    "log2_padded",  # rows with every touched expert padded to a tile
    "log2_tiles_per_sm",
    "waves_tiles",  # log2 of whole waves
    "log2_weight_bytes_per_l2",
    "log2_row_bytes_per_l2",
    *(f"log2_{term}_us" for term in MOE_TERMS[1:]),
    "log2_level1_us",
)
MOE_FREE: tuple[str, ...] = (
    "log2_top_k",
    "log2_d_model",
    "log2_width",  # of an expert on this GPU
    "log2_local_experts",
    "expert_parallel",  # 1 where the experts are shared out
    "skewed",  # 0 even loads, 1 a power law
    "exponent",
    "misaligned_16",
    "misaligned_128",
)
MOE_FEATURES = MOE_MONOTONE + MOE_FREE
"""The first group does not decrease with tokens."""


def moe_features(coefficients: Mapping[str, float], device: Device, *sizes) -> jax.Array:
    """Inputs of the level-2 correction, [..., n] in the order of `MOE_FEATURES`.

    Sizes of one GPU rather than of the whole model, so that shapes that look alike to the GPU look
    alike to the network.

    Args:
        coefficients, device: as in `moe_time_s`.
        sizes: all of `MOE_SIZES`.
    """
    found = _timed(coefficients, device, *sizes)
    load, width = found.load, found.width
    given = dict(zip(MOE_SIZES, sizes, strict=True))
    names = ("tokens", "d_model", "top_k", "expert_parallel", "exponent")
    tokens, d_model, top_k, expert_parallel, exponent = (floating(given[name]) for name in names)
    n_matrices, weight_bytes, routed = given["n_matrices"], given["weight_bytes"], tokens * top_k
    tiles = load.padded / 64.0 * (d_model + (n_matrices - 1.0) * width) / 128.0 / device.n_sm
    weights = load.touched * n_matrices * d_model * width * weight_bytes
    row_bytes = routed * (2.0 * d_model + (n_matrices + 1.0) * width) * ACTIVATION_BYTES
    values = [
        jnp.log2(tokens),
        jnp.log2(load.rows),
        jnp.log2(load.touched),
        jnp.log2(load.touched / load.local_experts),
        jnp.log2(load.rows / load.touched),
        jnp.log2(load.padded),
        jnp.log2(tiles),
        log2_whole_waves(jnp.log2(tiles)),
        jnp.log2(weights / device.l2_bytes),
        jnp.log2(row_bytes / device.l2_bytes),
        *(jnp.log2(term * 1e6) for term in found.terms[1:]),
        jnp.log2(found.time_s * 1e6),
        jnp.log2(top_k),
        jnp.log2(d_model),
        jnp.log2(width),
        jnp.log2(load.local_experts),
        jnp.clip(expert_parallel - 1.0, 0.0, 1.0),
        jnp.clip(exponent, 0.0, 1.0),
        exponent,
        misalignment(width),
        misalignment(width / 8.0),
    ]
    return jnp.stack(jnp.broadcast_arrays(*values), axis=-1)


MOE_SIZES = (
    "tokens", "d_model", "d_expert", "n_experts", "top_k", "tensor_parallel", "expert_parallel",
    "exponent", "weight_bytes", "n_matrices",
)  # fmt: skip
"""Arguments of `moe_time_s` that a measured row gives, in order."""


def fit_moe(
    device: Device, sizes: Mapping[str, np.ndarray], time_s: np.ndarray, **options
) -> dict[str, float]:
    """Coefficients of one device, runtime and kernel from measured layers.

    Args:
        device: data sheet of the device that was measured.
        sizes: the names of `MOE_SIZES`, arrays [n_rows].
        time_s: [n_rows] measured seconds.
        options: steps, learning_rate, max_rows and seed of `robust_fit.fit_coefficients`.

    Raises:
        ValueError: no rows, arrays of unequal length, times not positive.
    """
    return fit_coefficients(
        lambda c, *row: moe_time_s(c, device, *row)[0],
        DEFAULT_COEFFICIENTS,
        [sizes[name] for name in MOE_SIZES],
        time_s,
        **options,
    )
