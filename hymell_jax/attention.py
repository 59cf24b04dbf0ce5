"""Level 1 of the fused attention core (scores, softmax, values): seconds in one layer.

The time is a launch floor plus a smooth maximum of what can hold the kernel up,

    t = t_launch + (sum_i t_i^p)^(1/p),    p >= 1,

where each t_i is made of positive powers of the workload's sizes over a data-sheet rate:

    tensor     padded matrix products over the tensor-core peak
    exp        softmax exponentials over the special-function units (16 a clock and SM)
    tiles      a number of cycles a thread block and a query row, dealt out over the SMs
    chain      the longest thread block alone: its key blocks follow one another
    memory     bytes from DRAM, less what stays in L2, plus what passes through L2

The p-norm is at least each of its terms, and the tensor and memory terms are at least the
data-sheet bounds of `attention_bound_s`, so the time is too. Products of sizes exist only as
logs, so float32 holds to 1e8 tokens. Every term is non-decreasing in batch, tokens, window,
heads, KV heads and head dimensions, so the time is too (a window of 0 stands for all tokens).

A thread block works on a tile of query rows, and the query heads of one KV head share tiles
(packed GQA in FlashAttention-2/3, Dao 2023, Shah et al. 2024): in decode 8 query heads a KV head
are 8 rows of one tile, and the KV cache is read once.

Sizes may be relaxed (not whole). All functions broadcast over arrays of one shape and scalars.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from hymell_jax.smooth import floating
from hymell_jax.types import Device, Value

ATTENTION_REGIMES = ("launch", "tensor", "exp", "tiles", "chain", "memory")
"""Order of the regime weights: each term's share of d log(time)."""

ATTENTION_PHASES = ("prefill", "decode")

QUERY_TILE_ROWS = 128.0  # rows of a full tile in prefill
DECODE_TILE_ROWS = 64.0  # rows that one matrix instruction of a decode tile is padded to
KEY_BLOCK_TOKENS = 128.0
EXP_PER_CLOCK_AND_SM = 16.0  # CUDA C++ programming guide, arithmetic throughput, capability 8 to 10
ACTIVATION_BYTES = 2.0
FALLBACK_HEAD_DIM = 362.0  # 256 sqrt(2): wider heads than 256 leave FlashAttention
FALLBACK_WIDTH = 0.05  # of that switch, in log head_dim

_START = {
    "log_launch_s": -11.7,
    "log_tensor_excess": -1.0,
    "log_tensor_excess_wide": -2.0,
    "log_tensor_fp8": 0.0,
    "log_exp": 0.0,
    "log_tile_cycles": 7.0,
    "log_tile_cycles_wide": 6.0,
    "log_tile_fp8": 0.0,
    "log_row_cycles": 7.0,
    "log_fallback_tiles": -1.0,
    "log_fallback_tensor": -1.0,
    "log_chain_cycles": 6.5,
    "chain_power": 2.0,
    "log_dram_excess": -1.0,
    "log_l2_excess": -0.5,
    "log_l2_capacity": -1.0,
    "log_l2_sharpness": 1.0,
    "log_pnorm": 0.0,
}
_DECODE_START = {"log_tile_cycles": 8.0, "log_chain_cycles": 6.0, "chain_power": 0.0}

TILING: dict[str, float] = {
    "prefill_log_tile_rows": 3.5,
    "prefill_log_key_block": 3.5,
    "decode_log_tile_rows": 0.0,
}
"""Where a fit starts for a library that tiles otherwise than `QUERY_TILE_ROWS`, `DECODE_TILE_ROWS`
and `KEY_BLOCK_TOKENS` say, as one for a CPU does: each query head has tiles of its own, and a tile
that is not full costs no more than its rows. Natural logs; coefficients may leave them out.
"""

DEFAULT_COEFFICIENTS: dict[str, float] = {
    **{f"prefill_{name}": value for name, value in _START.items()},
    **{f"decode_{name}": value for name, value in (_START | _DECODE_START).items()},
}
"""Where a fit starts, names as fitted: `prefill_` or `decode_` and, natural logs throughout,

log_launch_s             floor in seconds
log_tensor_excess        e:      tensor time over that at peak, 1 + e + e_wide d/128
log_tensor_excess_wide   e_wide: its part that grows with the head dimension d
log_tensor_fp8           added to log e where the cache holds fp8
log_exp                  cycles an exponential unit spends on a score, over the ideal
log_tile_cycles(_wide)   cycles to set up and finish one thread block: a + b d/128
log_row_cycles           cycles for 128 query rows at d = 128
log_tile_fp8             added to the log of all these cycles where the cache holds fp8
log_fallback_tiles, _tensor  excess of heads wider than 256: factor 1 + e
log_chain_cycles         cycles that one thread block spends on a key block at d = 128
chain_power              logit of the power of the key blocks (1: one block walks all of them)
log_dram_excess          DRAM time over that at full bandwidth: 1 + e
log_l2_excess            time of a byte through L2 over that of one from DRAM
log_l2_capacity          usable L2 is l2_bytes / (1 + e)
log_l2_sharpness         exponent of the residency curve: 2 + e
log_pnorm                p = 1 + e; 1 adds the terms up, infinity overlaps them perfectly
"""


def check_phase(phase: str) -> None:
    """Refuse any phase but those of `ATTENTION_PHASES` with a ValueError."""
    if phase not in ATTENTION_PHASES:
        raise ValueError(f"phase must be one of {', '.join(ATTENTION_PHASES)}; got {phase!r}.")


def _log(x) -> jax.Array:
    """Natural log of a positive size, in float32."""
    return jnp.log(floating(x))


def _log_at_least_one(log_x: jax.Array) -> jax.Array:
    """log (x^4 + 1)^(1/4): one tile at the least. Hard limit max(x, 1); at x = 1 it is 1.19."""
    return jax.nn.softplus(4.0 * log_x) / 4.0


def _log_width(head_dim, value_head_dim) -> jax.Array:
    """log (d_k + d_v)."""
    return _log(floating(head_dim) + value_head_dim)


def attended_keys(tokens, window_tokens=0.0) -> jax.Array:
    """Keys that the last query sees: min(tokens, window), all tokens where the window is 0."""
    tokens = floating(tokens)
    window = floating(window_tokens)
    return jnp.where(window > 0, jnp.minimum(window, tokens), tokens)


def causal_pairs(tokens, window_tokens=0.0) -> jax.Array:
    """(query, key) pairs of one causal sequence: sum_{i=1..s} min(i, w) = w (2 s - w + 1) / 2.

    Without a window w = s, which gives s (s + 1) / 2.
    """
    tokens = floating(tokens)
    keys = attended_keys(tokens, window_tokens)
    return keys * (0.5 * (2.0 * tokens - keys + 1.0))


def log_attention_flops(batch, pairs, n_heads, head_dim, value_head_dim) -> jax.Array:
    """log FLOPs of scores and values: 2 batch heads (d_k + d_v) pairs.

    That is 2 products x 2 FLOPs x batch x heads x head_dim x pairs where d_k = d_v. `pairs` of one
    sequence: `causal_pairs` in prefill, `attended_keys` in decode.
    """
    width = _log_width(head_dim, value_head_dim)
    return _log(2.0) + _log(batch) + _log(n_heads) + width + _log(pairs)


def log_kv_bytes(batch, tokens, n_kv_heads, head_dim, value_head_dim, kv_bytes) -> jax.Array:
    """log bytes of keys and values: batch tokens kv_heads (d_k + d_v) kv_bytes."""
    width = _log_width(head_dim, value_head_dim)
    return _log(batch) + _log(tokens) + _log(n_kv_heads) + width + _log(kv_bytes)


def core_work(
    phase: str,
    batch,
    tokens,
    n_heads,
    n_kv_heads,
    head_dim,
    value_head_dim,
    window_tokens=0.0,
    kv_bytes=2.0,
    activation_bytes=ACTIVATION_BYTES,
) -> tuple[jax.Array, jax.Array]:
    """FLOPs of the core in one layer, and bytes of its queries, keys and values; shapes [...].

    2 batch heads (d_k + d_v) pairs, and batch (d_k + d_v) (kv_heads cached kv_bytes + heads
    queries activation_bytes): all prompt tokens are queries in prefill, one token in decode.

    Args:
        phase: "prefill" (`tokens` = prompt) or "decode" (`tokens` = context).
        activation_bytes: bytes of an element of the queries and of the output.

    The others are as in `attention_prefill_time_s`.

    Raises:
        ValueError: an unknown phase.
    """
    check_phase(phase)
    keys = attended_keys(tokens, window_tokens)
    if phase == "prefill":
        queries, cached, pairs = tokens, tokens, causal_pairs(tokens, window_tokens)
    else:
        queries, cached, pairs = 1.0, keys, keys
    width = head_dim + value_head_dim
    moved = n_kv_heads * cached * kv_bytes + n_heads * queries * activation_bytes
    return 2.0 * batch * n_heads * width * pairs, batch * width * moved


def attention_bound_s(
    device: Device, log_flops: jax.Array, log_kv: jax.Array, l2_residency=1.0
) -> jax.Array:
    """Least seconds by the data sheet: max(FLOPs / peak, bytes that L2 cannot hold / bandwidth).

    Args:
        log_flops: `log_attention_flops`; math is 16 bits wide, also on an fp8 cache.
        log_kv: `log_kv_bytes`.
        l2_residency: 1: as many KV bytes as L2 has may have stayed there; 0: none did.
    """
    log_compute = log_flops - _log(device.peak_flops_per_s)
    kept = l2_residency * jnp.exp(jnp.minimum(_log(device.l2_bytes) - log_kv, 0.0))
    memory = (1.0 - kept) * jnp.exp(log_kv - _log(device.memory_bytes_per_s))
    return jnp.maximum(jnp.exp(log_compute), memory)


def _fp8_share(kv_bytes) -> jax.Array:
    """0 at 2 bytes an element, 1 at 1 byte."""
    return jnp.clip(1.0 - jnp.log2(floating(kv_bytes)), 0.0, 1.0)


def _log_fallback(log_excess, log_width) -> jax.Array:
    """log (1 + e gate), gate = sigmoid over log head_dim: heads wider than 256 pay 1 + e."""
    log_gate = jax.nn.log_sigmoid((log_width - _log(2.0 * FALLBACK_HEAD_DIM)) / FALLBACK_WIDTH)
    return jax.nn.softplus(log_excess + log_gate)


def _log_tensor_s(c, device: Device, log_flops, log_width, fp8) -> jax.Array:
    """log seconds of the padded products: FLOPs / peak (1 + e + e_wide width/256) fallback."""
    excess = jax.nn.softplus(c["log_tensor_excess"] + fp8 * c["log_tensor_fp8"])
    slowdown = jnp.logaddexp(excess, c["log_tensor_excess_wide"] + log_width - _log(256.0))
    slowdown = slowdown + _log_fallback(c["log_fallback_tensor"], log_width)
    return log_flops + slowdown - _log(device.peak_flops_per_s)


def _log_exp_s(c, device: Device, log_pairs) -> jax.Array:
    """log seconds of the exponentials, one a score."""
    log_rate = _log(device.n_sm) + _log(device.boost_clock_hz) + _log(EXP_PER_CLOCK_AND_SM)
    return log_pairs + c["log_exp"] - log_rate


def _log_tiles_s(c, device: Device, log_tiles, log_rows, log_width, fp8) -> jax.Array:
    """log seconds of the thread blocks: (tiles (a + b width/256) + rows/128 width/256 r) / SMs."""
    log_relative_width = log_width - _log(256.0)
    per_tile = jnp.logaddexp(c["log_tile_cycles"], c["log_tile_cycles_wide"] + log_relative_width)
    per_row = c["log_row_cycles"] + log_relative_width - _log(QUERY_TILE_ROWS)
    cycles = jnp.logaddexp(log_tiles + per_tile, log_rows + per_row) + fp8 * c["log_tile_fp8"]
    cycles = cycles + _log_fallback(c["log_fallback_tiles"], log_width)
    return cycles - _log(device.n_sm) - _log(device.boost_clock_hz)


def _log_chain_s(c, device: Device, log_keys, log_width) -> jax.Array:
    """log seconds of one thread block alone: (key blocks)^power width/256 cycles.

    power = sigmoid(chain_power) is below 1 where the keys are split over thread blocks.
    """
    log_blocks = _log_at_least_one(log_keys - _log(KEY_BLOCK_TOKENS))
    cycles = c["log_chain_cycles"] + jax.nn.sigmoid(c["chain_power"]) * log_blocks
    return cycles + log_width - _log(256.0) - _log(device.boost_clock_hz)


def _log_memory_s(c, device: Device, log_bytes, l2_residency) -> jax.Array:
    """log seconds of B bytes: B (miss (1 + e_dram) + e_l2) / bandwidth, increasing in B.

    miss = B^k / (B^k + L^k), k >= 2, L <= l2_bytes, hence B miss >= B - l2_bytes.
    """
    log_capacity = _log(device.l2_bytes) - jax.nn.softplus(c["log_l2_capacity"])
    sharpness = 2.0 + jnp.exp(c["log_l2_sharpness"])
    cold = jax.nn.sigmoid(sharpness * (log_bytes - log_capacity))
    miss = (1.0 - l2_residency) + l2_residency * cold
    log_dram = _log(jnp.maximum(miss, 1e-30)) + jax.nn.softplus(c["log_dram_excess"])
    log_per_byte = jnp.logaddexp(log_dram, c["log_l2_excess"])
    return log_bytes + log_per_byte - _log(device.memory_bytes_per_s)


def _combine(c, logs: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Seconds [...] and regime weights [..., 6] from the log terms, the launch floor first."""
    launch, *work = jnp.broadcast_arrays(*logs)
    p = 1.0 + jnp.exp(c["log_pnorm"])
    scaled = p * jnp.stack(work)
    log_work = jax.nn.logsumexp(scaled, axis=0) / p
    launch_share = jax.nn.sigmoid(launch - log_work)[None]
    work_shares = (1.0 - launch_share) * jax.nn.softmax(scaled, axis=0)
    weights = jnp.concatenate([launch_share, work_shares])
    return jnp.exp(jnp.logaddexp(launch, log_work)), jnp.moveaxis(weights, 0, -1)


def _log_terms(
    phase: str,
    c,
    device: Device,
    batch,
    tokens,
    n_heads,
    n_kv_heads,
    head_dim,
    value_head_dim,
    window_tokens,
    kv_bytes,
    *,
    l2_residency,
) -> list[jax.Array]:
    """log seconds of each of `ATTENTION_REGIMES`; `c` without the prefix of the phase."""
    last_keys = attended_keys(tokens, window_tokens)
    if phase == "prefill":
        queries, cached, log_tile = tokens, tokens, _log(QUERY_TILE_ROWS)
        block: Value = KEY_BLOCK_TOKENS
        if "log_key_block" in c:
            block = jnp.minimum(jnp.exp(c["log_key_block"]), tokens)
        mean_keys = causal_pairs(tokens, window_tokens) / tokens + 0.5 * block
    else:
        queries, cached, log_tile = 1.0, last_keys, _log(DECODE_TILE_ROWS)
        mean_keys = last_keys
    log_width = _log_width(head_dim, value_head_dim)
    fp8 = _fp8_share(kv_bytes)
    log_rows = _log(batch) + _log(queries) + _log(n_heads)
    if "log_tile_rows" in c:  # as `TILING` says
        each = _log_at_least_one(_log(queries) - c["log_tile_rows"])
        log_tiles, log_padded = _log(batch) + _log(n_heads) + each, log_rows
    else:
        log_rows_each = _log(queries) + _log(n_heads) - _log(n_kv_heads)
        log_sequences = _log(batch) + _log(n_kv_heads)
        log_tiles = log_sequences + _log_at_least_one(log_rows_each - log_tile)
        log_padded = log_tiles + log_tile
    log_pairs = log_padded + _log(mean_keys)
    log_kv = log_kv_bytes(batch, cached, n_kv_heads, head_dim, value_head_dim, kv_bytes)
    log_bytes = jnp.logaddexp(log_kv, log_rows + log_width + _log(ACTIVATION_BYTES))
    return [
        c["log_launch_s"],
        _log_tensor_s(c, device, _log(2.0) + log_width + log_pairs, log_width, fp8),
        _log_exp_s(c, device, log_pairs),
        _log_tiles_s(c, device, log_tiles, log_rows, log_width, fp8),
        _log_chain_s(c, device, _log(last_keys), log_width),
        _log_memory_s(c, device, log_bytes, l2_residency),
    ]


def attention_log_terms(
    phase: str, coefficients: Mapping[str, float], device: Device, *sizes, l2_residency=1.0
) -> tuple[list[jax.Array], jax.Array]:
    """log seconds of each of `ATTENTION_REGIMES`, and of all together; shapes [...].

    Args:
        phase: "prefill" or "decode".
        coefficients: names of `DEFAULT_COEFFICIENTS`.
        device: data-sheet facts.
        sizes: batch to kv_bytes, as `attention_prefill_time_s` and `attention_decode_time_s`
            take them.
        l2_residency: as there.
    """
    c = _phase(coefficients, phase)
    terms = _log_terms(phase, c, device, *sizes, l2_residency=l2_residency)
    return terms, jnp.log(_combine(c, terms)[0])


def _phase(coefficients: Mapping[str, float], phase: str) -> dict[str, jax.Array]:
    """The coefficients of one phase without its prefix."""
    tiling = (n.removeprefix(f"{phase}_") for n in TILING if n in coefficients)
    names = [*_START, *(n for n in tiling if f"{phase}_{n}" in TILING)]
    return {name: floating(coefficients[f"{phase}_{name}"]) for name in names}


def attention_prefill_time_s(
    coefficients: Mapping[str, float],
    device: Device,
    batch,
    seq_len,
    n_heads,
    n_kv_heads,
    head_dim,
    value_head_dim,
    window_tokens=0.0,
    kv_bytes=2.0,
    l2_residency=1.0,
) -> tuple[jax.Array, jax.Array]:
    """Seconds of causal attention over a prompt, in one layer, and what the time is made of.

    rows = batch seq_len heads, tiles = batch kv_heads max~(seq_len heads / kv_heads / 128, 1);
    a tile meets pairs / seq_len + 64 keys on average (half a key block on the diagonal).

    Args:
        coefficients: the `prefill_` names of `DEFAULT_COEFFICIENTS`.
        device: data-sheet facts.
        batch: sequences.
        seq_len: prompt tokens of each.
        n_heads: query heads on this device.
        n_kv_heads: KV heads on this device.
        head_dim: width of queries and keys.
        value_head_dim: width of values.
        window_tokens: sliding window, 0 for full causal attention.
        kv_bytes: bytes of a cached element, 2 or 1.
        l2_residency: 1: what fits stays in L2 between runs, as in a kernel benchmark; 0: nothing
            does, as between the layers of a model.

    Returns:
        time_s [...] and the regime weights [..., 6] in the order of `ATTENTION_REGIMES`, sum 1.
    """
    c = _phase(coefficients, "prefill")
    sizes = (batch, seq_len, n_heads, n_kv_heads, head_dim, value_head_dim, window_tokens, kv_bytes)
    return _combine(c, _log_terms("prefill", c, device, *sizes, l2_residency=l2_residency))


def attention_decode_time_s(
    coefficients: Mapping[str, float],
    device: Device,
    batch,
    context_len,
    n_heads,
    n_kv_heads,
    head_dim,
    value_head_dim,
    window_tokens=0.0,
    kv_bytes=2.0,
    l2_residency=1.0,
) -> tuple[jax.Array, jax.Array]:
    """Seconds of one decode step's attention, in one layer, and what the time is made of.

    rows = batch heads, tiles = batch kv_heads max~(heads / kv_heads / 64, 1); the KV cache is read
    once for all query heads of a KV head.

    Args:
        context_len: cached tokens that the one query of each sequence may attend to.
        coefficients, device, batch, n_heads, n_kv_heads, head_dim, value_head_dim, window_tokens,
            kv_bytes, l2_residency: as in `attention_prefill_time_s`, with the `decode_` names.

    Returns:
        time_s [...] and the regime weights [..., 6] in the order of `ATTENTION_REGIMES`, sum 1.
    """
    c = _phase(coefficients, "decode")
    cache = (context_len, n_heads, n_kv_heads, head_dim, value_head_dim, window_tokens, kv_bytes)
    return _combine(c, _log_terms("decode", c, device, batch, *cache, l2_residency=l2_residency))


ATTENTION_TIME_S = {"prefill": attention_prefill_time_s, "decode": attention_decode_time_s}
"""The two phases by name; `seq_len` and `context_len` are the fourth argument of both."""
