"""Level 1 of linear attention (gated delta net): seconds of its kernels in one layer.

A layer runs two kernels besides its projections, a short causal convolution over the packed
queries, keys and values, and the gated delta rule on a state of d_k x d_v per value head (Gated
DeltaNet, arXiv 2412.06464). Prefill walks each sequence in chunks of 64 tokens, one thread block a
sequence and head; decode reads and writes every state once. Each kernel, in each phase, is

    t = t_launch + c steps + ((bytes (1 + e) / bandwidth)^p + (waves (a + b steps))^p)^(1/p)

    kernel        thread blocks                     steps of one         bytes
    conv_prefill  tokens / 8 x channels / 256       min(sequence, 8)     in and out
    conv_decode   batch x channels / 256            1                    in, out, window
    rule_prefill  batch x value heads               chunks of 64         q, k, v, out, states
    rule_decode   batch x value heads               1                    q, k, v, out, states

with waves the thread blocks over the SMs, partly rounded up, and p >= 1. Bytes that fit in L2 move
faster, by the factor (1 + x) / (1 + r + x), x = (bytes / capacity)^q, which rises from 1 / (1 + r)
to 1; a whole model switches that off. All terms are positive and non-decreasing in batch, tokens,
heads and head dimensions, so the time is too. All functions broadcast over arrays of one shape and
scalars; sizes may be relaxed.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.robust_fit import fit_coefficients
from hymell_jax.smooth import (
    added_and_overlapped,
    floating,
    log2_whole_waves,
    partial_ceil,
)
from hymell_jax.types import Device

LINEAR_KERNELS = ("conv_prefill", "rule_prefill", "conv_decode", "rule_decode")
LINEAR_TERMS = ("launch", "chain", "memory", "waves")
"""Order of the shares: each term's part of d log(time)."""

KERNEL_NAMES = {
    "causal_conv1d_fn": "conv_prefill",
    "causal_conv1d_update": "conv_decode",
    "chunk_gated_delta_rule": "rule_prefill",
    "chunk_gated_delta_rule_flashinfer": "rule_prefill",
    "chunk_gated_delta_rule_triton": "rule_prefill",
    "fused_recurrent_gated_delta_rule_packed_decode": "rule_decode",
}
"""Names in measured tables."""

CHUNK_TOKENS = 64.0
CONV_TOKENS = 8.0  # of one thread block
CONV_CHANNELS = 256.0
CONV_WIDTH = 4.0
ACTIVATION_BYTES = 2.0
STATE_BYTES = 4.0

DEFAULT_COEFFICIENTS: dict[str, float] = {
    "log_launch_s": -13.0,
    "log_memory_excess": -1.0,
    "log_l2_reuse": -2.0,
    "log_l2_capacity": -0.7,
    "log_l2_sharpness": 0.7,
    "log_chain_s": -15.0,
    "log_block_s": -14.0,
    "log_step_s": -14.0,
    "wave_quantisation": 1.0,
    "log_pnorm": 0.5,
}
"""Where the fit of each kernel starts; natural logs of

log_launch_s       floor in seconds
log_memory_excess  e: DRAM time over the data sheet, 1 + e
log_l2_reuse       r: speed-up of bytes that stayed in L2, minus one
log_l2_capacity    usable L2 over l2_bytes
log_l2_sharpness   q
log_chain_s        c: seconds of one step, however few thread blocks there are
log_block_s        a: seconds of one wave of thread blocks
log_step_s         b: seconds of one step of a thread block
wave_quantisation  logit of how much of a partly filled wave is paid for
log_pnorm          p = 1 + e
"""


def _at_least_one(x) -> jax.Array:
    """(x^8 + 1)^(1/8). Hard limit: max(x, 1)."""
    return jnp.exp(jax.nn.softplus(8.0 * jnp.log(x)) / 8.0)


def kernel_work(kernel: str, batch, seq_len, k_heads, v_heads, k_dim, v_dim):
    """(thread blocks, steps of one, bytes) of a kernel, arrays [...]."""
    batch, seq_len = floating(batch), floating(seq_len)
    tokens = batch * seq_len
    channels = 2.0 * floating(k_heads) * k_dim + floating(v_heads) * v_dim
    out = floating(v_heads) * v_dim
    states = batch * v_heads * k_dim * v_dim * STATE_BYTES
    if kernel == "conv_prefill":
        blocks = batch * _at_least_one(seq_len / CONV_TOKENS) * channels / CONV_CHANNELS
        steps = CONV_TOKENS / _at_least_one(CONV_TOKENS / seq_len)
        return blocks, steps, 2.0 * tokens * channels * ACTIVATION_BYTES
    if kernel == "conv_decode":
        moved = (2.0 + 2.0 * (CONV_WIDTH - 1.0)) * tokens * channels * ACTIVATION_BYTES
        return tokens * channels / CONV_CHANNELS, 1.0 + 0.0 * tokens, moved
    moved = tokens * (channels + out) * ACTIVATION_BYTES + 2.0 * states
    if kernel == "rule_prefill":
        return batch * v_heads, _at_least_one(seq_len / CHUNK_TOKENS), moved
    if kernel == "rule_decode":
        return tokens * v_heads, 1.0 + 0.0 * tokens, moved
    raise ValueError(f"kernel must be one of {', '.join(LINEAR_KERNELS)}; got {kernel!r}.")


def _l2_factor(c, device: Device, moved, l2_residency) -> jax.Array:
    """(1 + x) / (1 + r + x), x = (bytes / capacity)^q: non-decreasing in bytes, at most one."""
    log_filled = jnp.log(moved / device.l2_bytes) - c["log_l2_capacity"]
    filled = jnp.exp(jnp.clip(jnp.exp(c["log_l2_sharpness"]) * log_filled, -60.0, 60.0))
    return (1.0 + filled) / (1.0 + l2_residency * jnp.exp(c["log_l2_reuse"]) + filled)


def linear_kernel_time_s(
    kernel: str,
    coefficients: Mapping[str, float],
    device: Device,
    batch,
    seq_len,
    k_heads,
    v_heads,
    k_dim=128.0,
    v_dim=128.0,
    *,
    l2_residency=1.0,
) -> tuple[jax.Array, jax.Array]:
    """Seconds of one kernel of one layer, and what holds it up.

    Args:
        kernel: one of `LINEAR_KERNELS`.
        coefficients: of that kernel, names of `DEFAULT_COEFFICIENTS`.
        device: data sheet.
        batch: sequences.
        seq_len: tokens of each, 1 in decode.
        k_heads: query and key heads on this GPU.
        v_heads: value heads on this GPU.
        k_dim, v_dim: width of a key and of a value head.
        l2_residency: 1: what fits stays in L2 between runs, as in a kernel benchmark; 0: nothing
            does, as between the layers of a model.

    Returns:
        time_s [...] and shares [..., 4] in the order of `LINEAR_TERMS`, sum one.

    Raises:
        ValueError: an unknown kernel.
    """
    shape = (batch, seq_len, k_heads, v_heads, k_dim, v_dim)
    return _timed(kernel, coefficients, device, shape, l2_residency)[1:]


def _timed(
    kernel: str, coefficients, device: Device, shape, l2_residency
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Seconds of each of `LINEAR_TERMS`, seconds of the kernel and the shares of the terms.

    No term decreases with batch or tokens.
    """
    c = {name: floating(coefficients[name]) for name in DEFAULT_COEFFICIENTS}
    blocks, steps, moved = kernel_work(kernel, *shape)
    memory = moved / device.memory_bytes_per_s * (1.0 + jnp.exp(c["log_memory_excess"]))
    memory = memory * _l2_factor(c, device, moved, l2_residency)
    waves = partial_ceil(blocks / device.n_sm, jax.nn.sigmoid(c["wave_quantisation"]))
    busy = waves * (jnp.exp(c["log_block_s"]) + jnp.exp(c["log_step_s"]) * steps)
    launch, chain = jnp.exp(c["log_launch_s"]), jnp.exp(c["log_chain_s"]) * steps
    terms = jnp.broadcast_arrays(launch, chain, memory, busy)
    return terms, *added_and_overlapped(1.0 + jnp.exp(c["log_pnorm"]), terms, 2)


LINEAR_MONOTONE: tuple[str, ...] = (
    "log2_batch",
    "log2_seq_len",
    "log2_blocks_per_sm",
    "waves_blocks",  # log2 of whole waves
    "log2_steps",
    "log2_bytes_per_l2",
    *(f"log2_{term}_us" for term in LINEAR_TERMS[1:]),
    "log2_level1_us",
)
LINEAR_FREE: tuple[str, ...] = (
    "log2_k_heads",
    "log2_v_heads",
    "log2_channels_per_head",  # of the packed input, over the values' width
)
LINEAR_FEATURES = LINEAR_MONOTONE + LINEAR_FREE
"""The first group does not decrease with batch or tokens."""


def linear_features(
    kernel: str,
    coefficients: Mapping[str, float],
    device: Device,
    *sizes,
    l2_residency=1.0,
) -> jax.Array:
    """Inputs of the level-2 correction, [..., n] in the order of `LINEAR_FEATURES`.

    Args:
        sizes: all of `LINEAR_SIZES`.

    The others are as in `linear_kernel_time_s`.
    """
    batch, seq_len, k_heads, v_heads, k_dim, v_dim = map(floating, sizes)
    terms, time_s, _ = _timed(kernel, coefficients, device, sizes, l2_residency)
    blocks, steps, moved = kernel_work(kernel, *sizes)
    waves = jnp.log2(blocks / device.n_sm)
    values = [
        jnp.log2(batch),
        jnp.log2(seq_len),
        waves,
        log2_whole_waves(waves),
        jnp.log2(steps),
        jnp.log2(moved / device.l2_bytes),
        *(jnp.log2(term * 1e6) for term in terms[1:]),
        jnp.log2(time_s * 1e6),
        jnp.log2(k_heads),
        jnp.log2(v_heads),
        jnp.log2(1.0 + 2.0 * k_heads * k_dim / (v_heads * v_dim)),
    ]
    return jnp.stack(jnp.broadcast_arrays(*values), axis=-1)


LINEAR_SIZES = ("batch", "seq_len", "k_heads", "v_heads", "k_dim", "v_dim")
"""Arguments of `linear_kernel_time_s` that a measured row gives, in order."""


def fit_linear(
    kernel: str, device: Device, sizes: Mapping[str, np.ndarray], time_s: np.ndarray, **options
) -> dict[str, float]:
    """Coefficients of one kernel on one device and runtime from measured times.

    Args:
        kernel: one of `LINEAR_KERNELS`.
        device: data sheet of the device that was measured.
        sizes: the names of `LINEAR_SIZES`, arrays [n_rows].
        time_s: [n_rows] measured seconds.
        options: steps, learning_rate, max_rows and seed of `robust_fit.fit_coefficients`.

    Raises:
        ValueError: an unknown kernel, no rows, arrays of unequal length, times not positive.
    """
    return fit_coefficients(
        lambda c, *row: linear_kernel_time_s(kernel, c, device, *row)[0],
        DEFAULT_COEFFICIENTS,
        [sizes[name] for name in LINEAR_SIZES],
        time_s,
        **options,
    )
