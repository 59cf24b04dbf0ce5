"""Level 1 of the fused attention core (scores, softmax, values): seconds of one layer.

The time of one kernel is a launch floor plus a smooth maximum of what can hold it up,

    t = t_launch + (sum_i t_i^p)^(1/p),    p >= 1,

with every t_i a product of positive powers of the workload's sizes over a data-sheet rate:

    tensor     padded matrix products over the tensor-core peak
    exp        softmax exponentials over the special-function units (16 a clock and SM)
    tiles      a fixed number of cycles a thread block, thread blocks dealt out over the SMs
    chain      the longest thread block alone: its key blocks follow one another
    memory     bytes from DRAM, less what stays in L2, plus what L2 itself delivers

The p-norm is at least each of its terms, and the tensor and memory terms are at least the
data-sheet bounds (`attention_bound_s`), so the time is as well. Everything is evaluated on logs:
no product of sizes is squared, and float32 holds to 1e8 tokens. Each term is non-decreasing in
batch, tokens, window, heads, KV heads and head dimensions, so the time is too.

A thread block works on a tile of query rows; the query heads that share a KV head are packed into
the same tile (Dao's FlashAttention-2/3 with packed GQA, as vLLM runs them): decode with 8 query
heads a KV head fills 8 rows of one tile and reads the KV cache once.

Sizes may be relaxed (not whole). All functions broadcast over arrays.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hymell_jax.types import Device

ATTENTION_REGIMES = ("launch", "tensor", "exp", "tiles", "chain", "memory")
"""Order of the regime weights: the share of each term in the log-derivative of the time."""

ATTENTION_PHASES = ("prefill", "decode")

QUERY_TILE_ROWS = 128.0  # rows of a prefill tile; a lone row costs a fraction, see `_tile_pad`
DECODE_TILE_ROWS = 64.0
KEY_BLOCK_TOKENS = 128.0
EXP_PER_CLOCK_AND_SM = 16.0  # NVIDIA CUDA C programming guide, throughput of ex2.approx, sm_80-100
ACTIVATION_BYTES = 2.0
FALLBACK_HEAD_DIM = 362.0  # beyond 256 FlashAttention hands over; here 256 and 512 lie an octave apart
FALLBACK_WIDTH = 0.05  # of that switch, in log head_dim

_PREFILL_START = {
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
_DECODE_START = _PREFILL_START | {"log_tile_cycles": 8.0, "log_chain_cycles": 6.0, "chain_power": 0.0}

DEFAULT_COEFFICIENTS: dict[str, float] = {
    **{f"prefill_{name}": value for name, value in _PREFILL_START.items()},
    **{f"decode_{name}": value for name, value in _DECODE_START.items()},
}
"""Starting values of the fit; `attention_prefill_time_s` says what each means."""


def _log(x) -> jax.Array:
    """Natural log of a positive size, in float32."""
    return jnp.log(jnp.asarray(x, jnp.float32))


def _log_pnorm(logs: jax.Array, p, axis: int = 0) -> jax.Array:
    """log (sum_i exp(p x_i))^(1/p) >= max_i x_i; the hard maximum as p grows."""
    return jax.nn.logsumexp(p * logs, axis=axis) / p


def _at_least(log_x: jax.Array, log_least, p: float = 4.0) -> jax.Array:
    """Smooth maximum in logs; its hard limit is max(log_x, log_least)."""
    return jnp.logaddexp(p * log_x, p * log_least) / p


def attended_keys(tokens, window_tokens) -> jax.Array:
    """Keys that the last query sees: min(tokens, window), all of them where the window is 0."""
    tokens = jnp.asarray(tokens, jnp.float32)
    window = jnp.asarray(window_tokens, jnp.float32)
    return jnp.where(window > 0, jnp.minimum(window, tokens), tokens)


def causal_pairs(tokens, window_tokens) -> jax.Array:
    """(query, key) pairs of one causal sequence and head: sum_{i=1..s} min(i, w) = w (2s - w + 1)/2.

    With w = s (no window) that is s (s + 1)/2.
    """
    tokens = jnp.asarray(tokens, jnp.float32)
    window = attended_keys(tokens, window_tokens)
    return window * (0.5 * (2.0 * tokens - window + 1.0))


def log_attention_flops(
    batch, pairs_per_head, n_heads, head_dim, value_head_dim
) -> jax.Array:
    """log FLOPs of the score and value products: 2 batch heads (head_dim + value_head_dim) pairs.

    Two products of 2 FLOPs a multiply-add; 4 batch heads head_dim pairs where both widths agree.
    `pairs_per_head`: (query, key) pairs of one sequence, e.g. `causal_pairs` or a decode context.
    """
    width = jnp.asarray(head_dim, jnp.float32) + value_head_dim
    return _log(2.0) + _log(batch) + _log(n_heads) + _log(width) + _log(pairs_per_head)


def log_kv_bytes(batch, tokens, n_kv_heads, head_dim, value_head_dim, kv_bytes) -> jax.Array:
    """log bytes of the keys and values that are read: batch tokens kv_heads (d_k + d_v) kv_bytes."""
    width = jnp.asarray(head_dim, jnp.float32) + value_head_dim
    return _log(batch) + _log(tokens) + _log(n_kv_heads) + _log(width) + _log(kv_bytes)


def _log_query_bytes(batch, tokens, n_heads, head_dim, value_head_dim) -> jax.Array:
    """log bytes of queries read and outputs written, 16 bits an element."""
    width = jnp.asarray(head_dim, jnp.float32) + value_head_dim
    return _log(batch) + _log(tokens) + _log(n_heads) + _log(width) + _log(ACTIVATION_BYTES)


def attention_bound_s(
    device: Device, log_flops: jax.Array, log_kv: jax.Array, l2_residency=1.0
) -> jax.Array:
    """Least seconds by the data sheet: max(FLOPs / peak, (KV bytes - L2 bytes) / bandwidth).

    `l2_residency` 1: up to the L2's size may have stayed there; 0: all KV bytes come from DRAM.
    """
    log_compute = log_flops - _log(device.peak_flops_per_s)
    log_l2 = _log(device.l2_bytes)
    kept = jnp.minimum(jnp.exp(jnp.minimum(log_l2 - log_kv, 0.0)) * l2_residency, 1.0)
    memory = (1.0 - kept) * jnp.exp(log_kv - _log(device.memory_bytes_per_s))
    return jnp.maximum(jnp.exp(log_compute), memory)


def _fp8_share(kv_bytes) -> jax.Array:
    """0 at 2 bytes an element, 1 at 1 byte."""
    return jnp.clip(1.0 - jnp.log2(jnp.asarray(kv_bytes, jnp.float32)), 0.0, 1.0)


def _log_memory_s(c, device: Device, log_kv, log_rest, l2_residency) -> jax.Array:
    """log seconds for B bytes: B (miss (1 + e_dram) + e_l2) / bandwidth, increasing in B.

    miss = B^4 / (B^4 + L^4) with L = l2_bytes / (1 + exp(log_l2_capacity)): at most the size of L2
    is saved, B miss >= B - l2_bytes. Every byte also costs e_l2 of the DRAM time.
    """
    log_bytes = jnp.logaddexp(log_kv, log_rest)
    log_capacity = _log(device.l2_bytes) - jax.nn.softplus(c["log_l2_capacity"])
    sharpness = 2.0 + jnp.exp(c["log_l2_sharpness"])
    cold = jax.nn.sigmoid(sharpness * (log_bytes - log_capacity))
    miss = (1.0 - l2_residency) + l2_residency * cold
    log_dram = _log(jnp.maximum(miss, 1e-30)) + jax.nn.softplus(c["log_dram_excess"])
    log_per_byte = jnp.logaddexp(log_dram, c["log_l2_excess"])
    return log_bytes + log_per_byte - _log(device.memory_bytes_per_s)


def _log_fallback(log_excess, log_width) -> jax.Array:
    """log (1 + e gate): what heads wider than 256 pay, gate = sigmoid over log head_dim."""
    log_gate = jax.nn.log_sigmoid((log_width - _log(2.0 * FALLBACK_HEAD_DIM)) / FALLBACK_WIDTH)
    return jax.nn.softplus(log_excess + log_gate)


def _log_tensor_s(c, device: Device, log_flops, log_width, fp8) -> jax.Array:
    """log seconds of the padded products: FLOPs / peak x (1 + e (fp8) + e_wide width/256)."""
    excess = c["log_tensor_excess"] + fp8 * c["log_tensor_fp8"]
    wide = c["log_tensor_excess_wide"] + log_width - _log(256.0)
    slowdown = jnp.logaddexp(jax.nn.softplus(excess), wide)
    slowdown = slowdown + _log_fallback(c["log_fallback_tensor"], log_width)
    return log_flops + slowdown - _log(device.peak_flops_per_s)


def _log_tiles_s(c, device: Device, log_tiles, log_rows, log_width, fp8) -> jax.Array:
    """log seconds to deal out the thread blocks over the SMs.

    (tiles (a + b width/256) + rows/128 width/256 r) cycles / (SMs clock), `rows` query rows.
    """
    log_relative_width = log_width - _log(256.0)
    a = jnp.logaddexp(c["log_tile_cycles"], c["log_tile_cycles_wide"] + log_relative_width)
    r = c["log_row_cycles"] + log_relative_width - _log(QUERY_TILE_ROWS)
    cycles = jnp.logaddexp(log_tiles + a, log_rows + r) + fp8 * c["log_tile_fp8"]
    cycles = cycles + _log_fallback(c["log_fallback_tiles"], log_width)
    return cycles - _log(device.n_sm) - _log(device.boost_clock_hz)


def _log_chain_s(c, device: Device, log_keys, log_width) -> jax.Array:
    """log seconds of one thread block alone: cycles x (key blocks)^power x width/256.

    power = sigmoid(chain_power): 1 where one block walks all keys, less where they are split.
    """
    log_blocks = _at_least(log_keys - _log(KEY_BLOCK_TOKENS), 0.0)
    cycles = c["log_chain_cycles"] + jax.nn.sigmoid(c["chain_power"]) * log_blocks
    return cycles + log_width - _log(256.0) - _log(device.boost_clock_hz)


def _combine(c, logs: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Seconds and regime weights [..., 6] from the log terms, the launch floor first."""
    logs = jnp.stack(jnp.broadcast_arrays(*logs))
    p = 1.0 + jnp.exp(c["log_pnorm"])
    log_work = jax.nn.logsumexp(p * logs[1:], axis=0) / p
    log_time = jnp.logaddexp(logs[0], log_work)
    launch = jax.nn.sigmoid(logs[0] - log_work)
    shares = (1.0 - launch) * jax.nn.softmax(p * logs[1:], axis=0)
    weights = jnp.concatenate([launch[None], shares])
    return jnp.exp(log_time), jnp.moveaxis(weights, 0, -1)


def _phase(coefficients: Mapping[str, float], phase: str) -> dict[str, jax.Array]:
    """The coefficients of one phase, its prefix taken off."""
    prefix = phase + "_"
    names = [name for name in DEFAULT_COEFFICIENTS if name.startswith(prefix)]
    return {n[len(prefix) :]: jnp.asarray(coefficients[n], jnp.float32) for n in names}


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
    """x"""
    c = _phase(coefficients, "prefill")
    log_width = _log(jnp.asarray(head_dim, jnp.float32) + value_head_dim)
    fp8 = _fp8_share(kv_bytes)
    keys = attended_keys(seq_len, window_tokens)
    pairs = causal_pairs(seq_len, window_tokens)
    # Query heads of one KV head share tiles: rows = seq_len x group, at least one tile each.
    log_sequences = _log(batch) + _log(n_kv_heads)
    log_rows = _log(batch) + _log(seq_len) + _log(n_heads)
    log_tiles = log_sequences + _at_least(log_rows - log_sequences - _log(QUERY_TILE_ROWS), 0.0)
    log_mean_keys = _log(pairs / seq_len + 0.5 * KEY_BLOCK_TOKENS)
    log_pairs = log_tiles + _log(QUERY_TILE_ROWS) + log_mean_keys
    log_flops = _log(2.0) + log_width + log_pairs
    log_kv = log_kv_bytes(batch, seq_len, n_kv_heads, head_dim, value_head_dim, kv_bytes)
    log_rest = _log_query_bytes(batch, seq_len, n_heads, head_dim, value_head_dim)
    log_exp_rate = _log(device.n_sm) + _log(device.boost_clock_hz) + _log(EXP_PER_CLOCK_AND_SM)
    return _combine(c, [
        c["log_launch_s"],
        _log_tensor_s(c, device, log_flops, log_width, fp8),
        log_pairs + c["log_exp"] - log_exp_rate,
        _log_tiles_s(c, device, log_tiles, log_rows, log_width, fp8),
        _log_chain_s(c, device, _log(keys), log_width),
        _log_memory_s(c, device, log_kv, log_rest, l2_residency),
    ])


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
    """x"""
    c = _phase(coefficients, "decode")
    log_width = _log(jnp.asarray(head_dim, jnp.float32) + value_head_dim)
    fp8 = _fp8_share(kv_bytes)
    keys = attended_keys(context_len, window_tokens)
    log_sequences = _log(batch) + _log(n_kv_heads)
    log_rows = _log(batch) + _log(n_heads)
    log_tiles = log_sequences + _at_least(log_rows - log_sequences - _log(DECODE_TILE_ROWS), 0.0)
    log_pairs = log_tiles + _log(DECODE_TILE_ROWS) + _log(keys)
    log_flops = _log(2.0) + log_width + log_pairs
    log_kv = log_kv_bytes(batch, keys, n_kv_heads, head_dim, value_head_dim, kv_bytes)
    log_rest = _log_query_bytes(batch, 1.0, n_heads, head_dim, value_head_dim)
    log_exp_rate = _log(device.n_sm) + _log(device.boost_clock_hz) + _log(EXP_PER_CLOCK_AND_SM)
    return _combine(c, [
        c["log_launch_s"],
        _log_tensor_s(c, device, log_flops, log_width, fp8),
        log_pairs + c["log_exp"] - log_exp_rate,
        _log_tiles_s(c, device, log_tiles, log_rows, log_width, fp8),
        _log_chain_s(c, device, _log(keys), log_width),
        _log_memory_s(c, device, log_kv, log_rest, l2_residency),
    ])
