"""Level 1 of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a whole module, seconds.

Projections, small parts and attention core of one layer,

    t = t_launch + t_rows + (t_compute^p + t_weights^p)^(1/p)
        + (t_tensor^p + t_cache^p)^(1/p) + t_chain,    p >= 1

    rows      row-wise kernels (norms, rope, cache write) over the widths of all tokens
    compute   products of the projections over the tensor peak
    weights   their weights over the DRAM bandwidth
    tensor    products of scores and values over the tensor peak
    cache     latent cache read over the DRAM bandwidth, decode; keys and values in prefill
    chain     one thread block alone walks the keys

In prefill every head has keys of nope + rope and values of its own. In decode the up-projections
are absorbed into queries and outputs: all heads share one key of kv_rank + rope per token, whose
first kv_rank elements are its value, and tiles hold at least 64 heads. Every term is a sum of
products of positive powers of the sizes, so the time does not decrease with batch, tokens or heads.
All functions broadcast over arrays of one shape and scalars; sizes may be relaxed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.gemm import peak_rate
from hymell_jax.robust_fit import fit_coefficients
from hymell_jax.smooth import floating, p_norm
from hymell_jax.types import Device, Value

LATENT_PHASES = ("prefill", "decode")
LATENT_TERMS = ("launch", "rows", "compute", "weights", "tensor", "cache", "chain")
"""Order of the shares: each term's part of d log(time)."""

TILE_HEADS = 64.0  # heads that one decode tile is padded to
ACTIVATION_BYTES = 2.0

DEFAULT_COEFFICIENTS: dict[str, float] = {
    "log_launch_s": -9.5,
    "log_row_passes": 1.5,
    "log_compute_excess": -0.5,
    "log_weight_excess": -0.5,
    "log_tensor_excess": 0.0,
    "log_tensor_pad": 4.8,
    "log_cache_excess": -1.0,
    "log_chain_s": -20.0,
    "log_pnorm": 0.5,
}
"""Where the fit of each phase starts; natural logs of

log_launch_s        floor in seconds
log_row_passes      passes over the widths of all rows, in DRAM time
log_compute_excess  e: projections over the tensor peak, 1 + e
log_weight_excess   e: weights over the DRAM bandwidth, 1 + e
log_tensor_excess   e: attention products over the tensor peak, 1 + e
log_tensor_pad      keys that each query row or sequence adds (partly filled tiles)
log_cache_excess    e: cache over the DRAM bandwidth, 1 + e
log_chain_s         seconds a key
log_pnorm           p = 1 + e
"""


@dataclasses.dataclass(frozen=True)
class LatentShape:
    """Widths of the module; the defaults are DeepSeek-V3's."""

    d_model: Value = 7168.0
    q_rank: Value = 1536.0
    kv_rank: Value = 512.0
    nope_dim: Value = 128.0
    rope_dim: Value = 64.0
    v_dim: Value = 128.0


def projection_weights(shape: LatentShape, n_heads) -> Value:
    """Parameters of the module's projections with `n_heads` heads on this GPU.

    Down to the ranks, up to queries, keys and values, and out:
    d (q + kv + rope) + h (q (nope + rope) + kv (nope + v) + v d).
    """
    s = shape
    down = s.d_model * (s.q_rank + s.kv_rank + s.rope_dim)
    per_head = s.q_rank * (s.nope_dim + s.rope_dim) + s.kv_rank * (s.nope_dim + s.v_dim)
    return down + floating(n_heads) * (per_head + s.v_dim * s.d_model)


@dataclasses.dataclass(frozen=True)
class _Work:
    """Rows, keys, FLOPs and bytes of one module, arrays [...]."""

    rows: jax.Array
    keys: jax.Array  # that one query meets at the most
    row_bytes: jax.Array
    projection_flops: jax.Array
    weight_bytes: jax.Array
    pair_flops: jax.Array  # of one (query row, key) pair, all heads
    pairs: jax.Array
    cache_bytes: jax.Array


def _work(shape: LatentShape, phase: str, batch, tokens, n_heads, weight_bytes, kv_bytes) -> _Work:
    if phase not in LATENT_PHASES:
        raise ValueError(f"phase must be one of {', '.join(LATENT_PHASES)}; got {phase!r}.")
    s, batch, tokens, heads = shape, floating(batch), floating(tokens), floating(n_heads)
    key, latent = s.nope_dim + s.rope_dim, s.kv_rank + s.rope_dim
    weights = projection_weights(s, heads)
    if phase == "prefill":
        rows = batch * tokens
        pairs = rows * 0.5 * (tokens + 1.0)
        pair_flops = 2.0 * heads * (key + s.v_dim)
        cache = rows * (heads * (key + s.v_dim) * ACTIVATION_BYTES + latent * kv_bytes)
    else:
        rows = batch
        pairs = batch * tokens
        tiled = jnp.hypot(heads, TILE_HEADS)
        pair_flops = 2.0 * tiled * (latent + s.kv_rank)
        cache = pairs * latent * kv_bytes
    widths = s.d_model + s.q_rank + latent + heads * (key + s.nope_dim + 2.0 * s.v_dim)
    return _Work(
        rows=rows,
        keys=tokens,
        row_bytes=rows * widths * ACTIVATION_BYTES,
        projection_flops=2.0 * rows * weights,
        weight_bytes=weights * weight_bytes,
        pair_flops=pair_flops,
        pairs=pairs,
        cache_bytes=cache,
    )


def latent_time_s(
    phase: str,
    coefficients: Mapping[str, float],
    device: Device,
    batch,
    tokens,
    n_heads,
    weight_bytes=2.0,
    kv_bytes=2.0,
    *,
    shape: LatentShape | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Seconds of one latent-attention module, projections included, and what holds it up.

    Args:
        phase: "prefill" (`tokens` = prompt) or "decode" (`tokens` = context, one query each).
        coefficients: of that phase, names of `DEFAULT_COEFFICIENTS`.
        device: data sheet.
        batch: sequences.
        tokens: of each sequence.
        n_heads: heads on this GPU.
        weight_bytes: per weight of the projections, which run in that format.
        kv_bytes: per cached element.
        shape: widths, by default DeepSeek-V3's.

    Returns:
        time_s [...] and shares [..., 7] in the order of `LATENT_TERMS`, sum one.

    Raises:
        ValueError: an unknown phase.
    """
    w = _work(shape or LatentShape(), phase, batch, tokens, n_heads, weight_bytes, kv_bytes)
    return _timed(coefficients, device, w, weight_bytes)[1:]


def _timed(
    coefficients, device: Device, w: _Work, weight_bytes
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Seconds of each of `LATENT_TERMS`, seconds of the module and the shares of the terms.

    No term decreases with batch or tokens.
    """
    c = {name: floating(coefficients[name]) for name in DEFAULT_COEFFICIENTS}
    bandwidth, peak = device.memory_bytes_per_s, device.peak_flops_per_s
    launch = jnp.exp(c["log_launch_s"])
    rows = w.row_bytes / bandwidth * jnp.exp(c["log_row_passes"])
    compute = w.projection_flops / peak_rate(device, weight_bytes)
    compute = compute * (1.0 + jnp.exp(c["log_compute_excess"]))
    weights = w.weight_bytes / bandwidth * (1.0 + jnp.exp(c["log_weight_excess"]))
    padded = w.pairs + w.rows * jnp.exp(c["log_tensor_pad"])
    tensor = padded * w.pair_flops / peak * (1.0 + jnp.exp(c["log_tensor_excess"]))
    cache = w.cache_bytes / bandwidth * (1.0 + jnp.exp(c["log_cache_excess"]))
    chain = w.keys * jnp.exp(c["log_chain_s"])
    terms = jnp.broadcast_arrays(launch, rows, compute, weights, tensor, cache, chain)
    launch, rows, compute, weights, tensor, cache, chain = terms
    order = 1.0 + jnp.exp(c["log_pnorm"])
    projections, projection_shares = p_norm(order, compute, weights)
    core, core_shares = p_norm(order, tensor, cache)
    time_s = launch + rows + projections + core + chain
    shares = [*(projections[None] * projection_shares), *(core[None] * core_shares)]
    parts = [launch, rows, *shares, chain]
    return terms, time_s, jnp.stack([part / time_s for part in parts], -1)


LATENT_MONOTONE: tuple[str, ...] = (
    "log2_batch",
    "log2_tokens",
    "log2_rows",
    "log2_pairs",
    "log2_tiles_per_sm",
    "log2_sequences_per_sm",
    "log2_cache_bytes_per_l2",
    "log2_row_bytes_per_l2",
    *(f"log2_{term}_us" for term in LATENT_TERMS[1:]),
    "log2_level1_us",
)
LATENT_FREE: tuple[str, ...] = (
    "log2_heads",
    "fp8_cache",
    "log2_d_model",
    "log2_q_rank",
    "log2_kv_rank",
    "log2_key_dim",
)
LATENT_FEATURES = LATENT_MONOTONE + LATENT_FREE
"""The first group does not decrease with batch or tokens."""


def latent_features(
    phase: str,
    coefficients: Mapping[str, float],
    device: Device,
    *sizes,
    shape: LatentShape | None = None,
) -> jax.Array:
    """Inputs of the level-2 correction, [..., n] in the order of `LATENT_FEATURES`.

    Args:
        sizes: all of `LATENT_SIZES`.

    The others are as in `latent_time_s`.
    """
    widths = shape or LatentShape()
    batch, tokens, n_heads, weight_bytes, kv_bytes = map(floating, sizes)
    w = _work(widths, phase, *sizes)
    terms, time_s, _ = _timed(coefficients, device, w, weight_bytes)
    heads = n_heads if phase == "prefill" else jnp.hypot(n_heads, TILE_HEADS) / 64.0
    values = [
        jnp.log2(batch),
        jnp.log2(tokens),
        jnp.log2(w.rows),
        jnp.log2(w.pairs),
        jnp.log2(w.rows * heads / 128.0 / device.n_sm),
        jnp.log2(batch * heads / device.n_sm),
        jnp.log2(w.cache_bytes / device.l2_bytes),
        jnp.log2(w.row_bytes / device.l2_bytes),
        *(jnp.log2(term * 1e6) for term in terms[1:]),
        jnp.log2(time_s * 1e6),
        jnp.log2(n_heads),
        2.0 - kv_bytes,
        jnp.log2(floating(widths.d_model)),
        jnp.log2(jnp.maximum(floating(widths.q_rank), 1.0)),
        jnp.log2(floating(widths.kv_rank)),
        jnp.log2(floating(widths.nope_dim) + widths.rope_dim),
    ]
    return jnp.stack(jnp.broadcast_arrays(*values), axis=-1)


LATENT_SIZES = ("batch", "tokens", "n_heads", "weight_bytes", "kv_bytes")
"""Arguments of `latent_time_s` that a measured row gives, in order."""


def fit_latent(
    phase: str, device: Device, sizes: Mapping[str, np.ndarray], time_s: np.ndarray, **options
) -> dict[str, float]:
    """Coefficients of one phase on one device, runtime and format from measured modules.

    Args:
        phase: "prefill" or "decode".
        device: data sheet of the device that was measured.
        sizes: the names of `LATENT_SIZES`, arrays [n_rows].
        time_s: [n_rows] measured seconds.
        options: steps, learning_rate, max_rows and seed of `robust_fit.fit_coefficients`.

    Raises:
        ValueError: an unknown phase, no rows, arrays of unequal length, times not positive.
    """
    return fit_coefficients(
        lambda c, *row: latent_time_s(phase, c, device, *row)[0],
        DEFAULT_COEFFICIENTS,
        [sizes[name] for name in LATENT_SIZES],
        time_s,
        **options,
    )
