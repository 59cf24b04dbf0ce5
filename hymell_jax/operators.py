"""What one forward pass consists of: shapes, FLOPs and bytes of every operator. No hardware.

A pass runs `tokens` rows through every layer: batch x prompt rows in prefill, batch rows in a
decode step. Counts are for one GPU of a tensor-parallel group; a tensor-parallel size of one is a
single GPU. All functions are pure, take leaves of shape () and may be vmapped over a batch.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.types import Architecture, Value, Workload

MATRIX_PARTS = (
    "qkv_projection",
    "out_projection",
    "ffn_up",
    "ffn_down",
    "lm_head",
    "router",
    "shared_expert_up",
    "shared_expert_down",
    "latent_q_down",
    "latent_q_up",
    "latent_kv_down",
    "latent_kv_up",
    "linear_in",
    "linear_out",
)
"""Matrix products, in the order of the arrays of `matrix_products`."""

STREAM_PARTS = ("embedding", "norms", "qk_norm", "rope", "kv_write", "activation", "residual_add")
"""Row-wise operators, in the order of the arrays of `stream_operators`."""

OTHER_PARTS = ("attention", "window_attention", "linear_attention", "experts", "collectives")
"""Operators with equations of their own."""

PARTS = MATRIX_PARTS + STREAM_PARTS + OTHER_PARTS
"""Axis order of every per-part array of a prediction."""

STRUCTURES = ("experts", "latent", "linear", "window", "parallel")
"""Optional blocks: those that a model lacks are left out of the compiled program."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixProducts:
    """Products (m x k) @ (k x n), arrays [n_matrix_parts]; `count` times each in one pass."""

    m: jax.Array
    n: jax.Array
    k: jax.Array
    count: jax.Array
    weight_bytes: jax.Array  # per element of the (k x n) operand, as stored
    input_bytes: jax.Array  # per element of the (m x k) operand, the format computed with


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamOperators:
    """Row-wise operators, arrays [n_stream_parts]: rows of `cols` elements, moved and counted."""

    rows: jax.Array
    cols: jax.Array
    bytes_per_element: jax.Array  # read and written, summed over the operands
    count: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertProducts:
    """Routed experts of one mixture layer: grouped products over the experts that are touched."""

    tokens: jax.Array  # rows entering the layer, on this GPU
    touched: jax.Array  # experts read, expected value
    rows_per_expert: jax.Array
    d_model: jax.Array
    d_expert: jax.Array
    n_matrices: jax.Array
    weight_bytes: jax.Array
    input_bytes: jax.Array
    count: jax.Array  # mixture layers


def layer_counts(arch: Architecture) -> dict[str, jax.Array]:
    """Layers of each kind: full, window and linear attention; dense and mixture feed-forward."""
    window = arch.n_layers * arch.window_fraction
    linear = arch.n_layers * arch.linear_fraction
    mixture = arch.n_layers * arch.moe_fraction
    return {
        "attention": arch.n_layers - linear,
        "full": arch.n_layers - linear - window,
        "window": window,
        "linear": linear,
        "dense": arch.n_layers - mixture,
        "mixture": mixture,
    }


def weight_element_bytes(arch: Architecture, work: Workload) -> jax.Array:
    """Bytes per weight of a linear layer: as stored, but no more than the format computed with.

    A model that computes in 32 bits holds all weights in 32 bits.
    """
    return _element_bytes(arch.weight_bits, work)


def expert_element_bytes(arch: Architecture, work: Workload) -> jax.Array:
    """Bytes per weight of a routed expert."""
    return _element_bytes(arch.expert_weight_bits, work)


def _element_bytes(bits: jax.Array, work: Workload) -> jax.Array:
    stored = jnp.minimum(bits / 8.0, work.weight_bytes)
    return jnp.where(work.weight_bytes > 2.0, work.weight_bytes, stored)


def touched_experts(n_experts: Value, experts_per_token: Value, tokens: Value) -> jax.Array:
    """Expected number of distinct experts that `tokens` uniformly routed tokens touch.

    E (1 - (1 - k/E)^tokens) (coverage of arXiv 2605.15051). Limits: k at one token, E at many.
    """
    n = jnp.maximum(n_experts, 1.0)
    share = jnp.clip(experts_per_token / n, 0.0, 1.0 - 1e-7)
    return n * -jnp.expm1(tokens * jnp.log1p(-share))


def matrix_products(arch: Architecture, work: Workload, rows: jax.Array) -> MatrixProducts:
    """Every matrix product of a pass over `rows` token rows, arrays [n_matrix_parts].

    Queries, keys and values are one product, as are gate and up projections, the way serving
    engines run them. The LM head sees one row per sequence.
    """
    tp = work.tensor_parallel
    layers = layer_counts(arch)
    kv_heads = jnp.maximum(arch.n_kv_heads / tp, jnp.minimum(arch.n_kv_heads, 1.0))
    q_width = arch.n_heads * arch.head_dim / tp
    out_width = arch.n_heads * arch.value_head_dim / tp
    plain = layers["attention"] * (1.0 - arch.latent_attention)
    latent = layers["attention"] * arch.latent_attention
    compressed_q = latent * jnp.clip(arch.q_lora_rank, 0.0, 1.0)
    up = arch.n_ff_matrices - 1.0
    nope = jnp.maximum(arch.head_dim - arch.rope_head_dim, 0.0)
    linear_k = arch.linear_k_heads * arch.linear_head_dim / tp
    linear_v = arch.linear_v_heads * arch.linear_head_dim / tp
    shared = layers["mixture"] * jnp.clip(arch.d_shared_expert, 0.0, 1.0)
    d = arch.d_model
    q_input = jnp.where(arch.q_lora_rank > 0, arch.q_lora_rank, d)
    qkv = q_width * (1.0 + arch.attention_gate) + kv_heads * (arch.head_dim + arch.value_head_dim)
    table = {  # part: (m, n, k, count)
        "qkv_projection": (rows, qkv, d, plain),
        "out_projection": (rows, d, out_width, layers["attention"]),
        "ffn_up": (rows, up * arch.d_ff / tp, d, layers["dense"]),
        "ffn_down": (rows, d, arch.d_ff / tp, layers["dense"]),
        "lm_head": (work.batch_size, arch.vocab_size / tp, d, 1.0),
        "router": (rows, arch.n_experts, d, layers["mixture"]),
        "shared_expert_up": (rows, up * arch.d_shared_expert / tp, d, shared),
        "shared_expert_down": (rows, d, arch.d_shared_expert / tp, shared),
        "latent_q_down": (rows, arch.q_lora_rank, d, compressed_q),
        "latent_q_up": (rows, q_width, q_input, latent),
        "latent_kv_down": (rows, arch.kv_lora_rank + arch.rope_head_dim, d, latent),
        "latent_kv_up": (
            rows,
            arch.n_heads * (nope + arch.value_head_dim) / tp,
            arch.kv_lora_rank,
            latent,
        ),
        "linear_in": (rows, 2.0 * linear_k + 2.0 * linear_v, d, layers["linear"]),
        "linear_out": (rows, d, linear_v, layers["linear"]),
    }
    one = jnp.ones_like(rows * d)
    m, n, k, count = (
        jnp.stack([jnp.asarray(table[part][i]) * one for part in MATRIX_PARTS]) for i in range(4)
    )
    weight = weight_element_bytes(arch, work) * jnp.ones_like(m)
    return MatrixProducts(
        m=jnp.maximum(m, 1.0),
        n=jnp.maximum(n, 1.0),
        k=jnp.maximum(k, 1.0),
        count=count,
        weight_bytes=weight,
        input_bytes=work.weight_bytes * jnp.ones_like(m),
    )


def stream_operators(arch: Architecture, work: Workload, rows: jax.Array) -> StreamOperators:
    """Every row-wise operator of a pass over `rows` token rows, arrays [n_stream_parts]."""
    tp = work.tensor_parallel
    layers = layer_counts(arch)
    element = work.activation_bytes
    q_heads, kv_heads = arch.n_heads / tp, jnp.maximum(arch.n_kv_heads / tp, 1.0)
    heads = q_heads + kv_heads
    rotary = jnp.where(arch.position_rows > 0, 0.0, 1.0)
    qk_norms = jnp.clip(arch.qk_norm_per_head + arch.qk_norm_full, 0.0, 1.0)
    cached = jnp.where(
        arch.latent_attention > 0,
        arch.kv_lora_rank + arch.rope_head_dim,
        kv_heads * (arch.head_dim + arch.value_head_dim),
    )
    gated = arch.n_ff_matrices - 2.0
    width = jnp.maximum(arch.d_ff, 1.0) / tp
    norms = arch.norms_per_layer * arch.n_layers + 1.0 + arch.embedding_norm
    attention = layers["attention"]
    table = {  # part: (rows, cols, bytes per element, count)
        "embedding": (rows, arch.d_model, 2.0 * element, 1.0),
        "norms": (rows, arch.d_model, 2.0 * element, norms),
        "qk_norm": (rows * heads, arch.head_dim, 2.0 * element, qk_norms * attention),
        "rope": (rows, heads * arch.head_dim, 2.0 * element, rotary * attention),
        "kv_write": (rows, cached, element + work.kv_bytes, attention),
        "activation": (rows, width, (2.0 + gated) * element, layers["dense"]),
        "residual_add": (rows, arch.d_model, 3.0 * element, 2.0 * arch.n_layers),
    }
    one = jnp.ones_like(rows * arch.d_model)
    columns = [
        jnp.stack([jnp.asarray(table[part][i]) * one for part in STREAM_PARTS]) for i in range(4)
    ]
    return StreamOperators(
        rows=columns[0], cols=columns[1], bytes_per_element=columns[2], count=columns[3]
    )


def attention_shape(
    arch: Architecture, work: Workload, absorbed: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Heads, KV heads and widths of keys and values of the attention core on one GPU.

    Latent attention runs as ordinary heads in prefill, and in decode as one shared KV head of
    kv_lora_rank + rope_head_dim whose values are the first kv_lora_rank elements of its keys
    (DeepSeek-V2, arXiv 2405.04434).

    Args:
        absorbed: whether latent attention, where there is any, is that of decode.
    """
    heads = arch.n_heads / work.tensor_parallel
    kv_heads = jnp.maximum(arch.n_kv_heads / work.tensor_parallel, 1.0)
    if not absorbed:
        return heads, kv_heads, arch.head_dim, arch.value_head_dim
    latent = arch.latent_attention
    plain = 1.0 - latent
    return (
        heads,
        kv_heads * plain + latent,
        arch.head_dim * plain + (arch.kv_lora_rank + arch.rope_head_dim) * latent,
        arch.value_head_dim * plain + arch.kv_lora_rank * latent,
    )


def expert_products(arch: Architecture, work: Workload, rows: jax.Array) -> ExpertProducts:
    """Routed experts of one mixture layer over `rows` token rows.

    With tensor parallelism every GPU holds a slice of every expert; with expert parallelism it
    holds whole experts and sees the tokens that are routed to them.
    """
    ep = work.expert_parallel
    n_local = jnp.maximum(arch.n_experts / ep, jnp.minimum(arch.n_experts, 1.0))
    per_token = arch.experts_per_token * n_local / jnp.maximum(arch.n_experts, 1.0)
    touched = touched_experts(n_local, per_token, rows)
    slices = jnp.maximum(work.tensor_parallel / ep, 1.0)
    return ExpertProducts(
        tokens=rows,
        touched=touched,
        rows_per_expert=rows * per_token / jnp.maximum(touched, 1e-6),
        d_model=arch.d_model,
        d_expert=jnp.maximum(arch.d_expert / slices, 1.0),
        n_matrices=arch.n_ff_matrices,
        weight_bytes=expert_element_bytes(arch, work),
        input_bytes=work.weight_bytes,
        count=arch.n_layers * arch.moe_fraction,
    )


def structure_of(arch: Architecture, work: Workload) -> frozenset[str] | None:
    """Which optional blocks a concrete architecture or batch has; None where leaves are traced."""
    leaves = (
        arch.n_experts,
        arch.latent_attention,
        arch.linear_fraction,
        arch.window_fraction,
        work.tensor_parallel,
    )
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return None
    values = [np.asarray(leaf) for leaf in leaves]
    present = (*(bool((v > 0).any()) for v in values[:4]), bool((values[4] > 1).any()))
    return frozenset(name for name, here in zip(STRUCTURES, present, strict=True) if here)
