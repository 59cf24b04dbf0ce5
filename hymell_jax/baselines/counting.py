"""FLOPs and bytes of one pass by operator, for the methods that sum over operators.

Counts only; per GPU of a tensor-parallel group. Prefill is the whole batch of prompts, decode one
step at the mean context, where attention, linear in the context, costs its average. Attention is
fused by default: scores never reach memory. Collectives are left out; no method here has them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from hymell_jax import operators
from hymell_jax.attention import attended_keys, causal_pairs
from hymell_jax.types import Architecture, Value, Workload

PHASES = ("prefill", "decode")
ATTENTION_PARTS = ("attention", "window_attention", "linear_attention")
COUNT_PARTS = operators.MATRIX_PARTS + operators.STREAM_PARTS + ATTENTION_PARTS + ("experts",)
"""Axis order of the arrays of `PassCounts`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PassCounts:
    """One pass, arrays [n_parts] in the order of `COUNT_PARTS`: totals over all layers."""

    flops: jax.Array
    weight_bytes: jax.Array
    cache_bytes: jax.Array  # keys, values and recurrent states
    activation_bytes: jax.Array
    kernels: jax.Array  # how often the operator runs

    @property
    def memory_bytes(self) -> jax.Array:
        """All bytes moved, [n_parts]."""
        return self.weight_bytes + self.cache_bytes + self.activation_bytes


def mean_context_tokens(work: Workload) -> jax.Array:
    """Tokens in the cache, averaged over the decode steps: start + (steps - 1) / 2.

    With context start = prompt and end = prompt + output this is A / T_out of From Tokens to
    Watt-hours, A = T_out T_in + T_out (T_out - 1) / 2. At one exact context it is that context.
    """
    steps = work.context_end_tokens - work.context_start_tokens
    return work.context_start_tokens + 0.5 * jnp.maximum(steps - 1.0, 0.0)


def rows(work: Workload, phase: str) -> jax.Array:
    """Token rows of one pass: batch x prompt in prefill, batch in a decode step.

    Raises:
        ValueError: an unknown phase.
    """
    if phase not in PHASES:
        raise ValueError(f"phase must be one of {', '.join(PHASES)}; got {phase!r}.")
    return work.batch_size * (work.prompt_tokens if phase == "prefill" else 1.0)


def _attention_rows(arch: Architecture, work: Workload, phase: str, fused) -> list[list]:
    """[flops, weight, cache, activation bytes, kernels] of full, windowed and linear attention."""
    heads, kv_heads, key_width, value_width = operators.attention_shape(
        arch, work, phase == "decode"
    )
    layers = operators.layer_counts(arch)
    batch, width = work.batch_size, key_width + value_width
    # absorbed latent attention reads its shared keys once: the values are part of them
    cached_width = kv_heads * (
        width - arch.latent_attention * (value_width if phase == "decode" else 0.0)
    )
    found = []
    for window, count in ((0.0, layers["full"]), (arch.window_tokens, layers["window"])):
        if phase == "prefill":
            pairs = causal_pairs(work.prompt_tokens, window)
            queries: Value = work.prompt_tokens
            cached = work.prompt_tokens
        else:
            pairs = cached = attended_keys(mean_context_tokens(work), window)
            queries = 1.0
        scores = (1.0 - fused) * 2.0 * batch * heads * pairs * work.activation_bytes
        found.append(
            [
                2.0 * batch * heads * width * pairs * count,
                0.0,
                batch * cached * cached_width * work.kv_bytes * count,
                (batch * queries * heads * width * work.activation_bytes + scores) * count,
                count,
            ]
        )
    n_rows = rows(work, phase)
    v_heads = arch.linear_v_heads / work.tensor_parallel
    state = v_heads * arch.linear_head_dim * arch.linear_head_dim
    states = work.batch_size if phase == "decode" else n_rows / 64.0 + work.batch_size
    inputs = (2.0 * arch.linear_k_heads + 2.0 * arch.linear_v_heads) * arch.linear_head_dim
    moved = n_rows * inputs / work.tensor_parallel * work.activation_bytes * 2.0
    count = layers["linear"]
    found.append(
        [12.0 * n_rows * state * count, 0.0, 8.0 * states * state * count, moved * count, count]
    )
    return found


def pass_counts(
    arch: Architecture, work: Workload, phase: str, fused: jax.Array | float = 1.0
) -> PassCounts:
    """FLOPs and bytes of one pass on one GPU, all layers.

    Args:
        phase: "prefill" or "decode".
        fused: 1: attention scores stay on the chip; 0: they are written and read once.

    Raises:
        ValueError: an unknown phase.
    """
    n_rows = rows(work, phase)
    p = operators.matrix_products(arch, work, n_rows)
    matrices = [
        2.0 * p.m * p.n * p.k * p.count,
        p.k * p.n * p.weight_bytes * p.count,
        0.0 * p.m,
        (p.m * p.k + p.m * p.n) * work.activation_bytes * p.count,
        p.count,
    ]
    s = operators.stream_operators(arch, work, n_rows)
    elements = s.rows * s.cols
    streams = [
        elements * s.count,  # one operation per element: an estimate, far below the bytes' time
        0.0 * elements,
        0.0 * elements,
        elements * s.bytes_per_element * s.count,
        s.count,
    ]
    e = operators.expert_products(arch, work, n_rows)
    width = e.n_matrices * e.d_model * e.d_expert
    routed = e.touched * e.rows_per_expert
    experts = [
        2.0 * routed * width * e.count,
        e.touched * width * e.weight_bytes * e.count,
        0.0 * routed,
        routed
        * (2.0 * e.d_model + (e.n_matrices + 1.0) * e.d_expert)
        * work.activation_bytes
        * e.count,
        2.0 * e.count,
    ]
    one = jnp.ones_like(n_rows * arch.d_model)
    attention = _attention_rows(arch, work, phase, fused)
    single = [*attention, experts]
    columns = [
        jnp.concatenate(
            [matrices[i], streams[i], jnp.stack([jnp.asarray(row[i]) * one for row in single])]
        )
        for i in range(5)
    ]
    return PassCounts(
        flops=columns[0],
        weight_bytes=columns[1],
        cache_bytes=columns[2],
        activation_bytes=columns[3],
        kernels=columns[4],
    )


def peak_flops_per_s(device, work: Workload) -> jax.Array:
    """Matrix rate of the format that the linear layers compute in: fp8 at one byte, else 16 bits.

    Between the two bytes counts the rate is interpolated in its log.
    """
    share = jnp.clip(2.0 - work.weight_bytes, 0.0, 1.0)
    return (
        device.peak_flops_per_s * (device.peak_fp8_flops_per_s / device.peak_flops_per_s) ** share
    )
