"""How many numbers a model stores and caches: parameters, KV-cache elements, recurrent state.

Counts only, from an `Architecture`; no hardware and no time. Every function uses plain operators,
so it traces and differentiates with JAX leaves and counts exactly with numpy float64 leaves.
Leaves may be scalars or batches; results have the leaves' shape, () or [batch].

Conventions, those of a model card's parameter total: tied embeddings count once, buffers (rotary
tables, the selection bias of DeepSeek's router) do not count, extra multi-token-prediction layers
do not count. Active parameters are what the forward pass of one token can touch: everything
except the routed experts that it is not sent to; both embedding matrices count in full.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from hymell_jax.types import Architecture

PARAMETER_PARTS = (
    "embedding",  # token embedding and learned positions
    "attention",  # projections, biases, norms inside attention; full and windowed layers
    "linear_attention",
    "dense_feed_forward",
    "router",
    "routed_experts",
    "shared_experts",
    "norms",
    "head",  # 0 where tied to the embedding, except for its bias
)
"""Names of the parts, in the order of the forward pass."""


class KvElements(NamedTuple):
    """Cached elements that one more token adds to one sequence, keys and values together."""

    per_layer: Any  # one attention layer
    full_layers: Any  # all layers with full attention; grows with every token
    windowed_layers: Any  # all windowed layers; grows only up to the window


class KvBytes(NamedTuple):
    """Cache bytes of one sequence."""

    compute: Any  # read by a decode step: windowed layers hold at most the window
    reserved: Any  # held by an engine that pages every attention layer for every token
    recurrent_state: Any  # of the linear-attention layers, whatever the number of tokens


def parameter_counts(arch: Architecture) -> dict[str, Any]:
    """Stored parameters by part: keys are `PARAMETER_PARTS`, values are [batch] or ()."""
    return _counts(arch, arch.n_experts)


def active_parameter_counts(arch: Architecture) -> dict[str, Any]:
    """Parameters that the forward pass of one token can touch, by part as `parameter_counts`."""
    return _counts(arch, arch.experts_per_token)


def total_parameters(arch: Architecture) -> Any:
    """Stored parameters of the whole model."""
    return sum(parameter_counts(arch).values())


def active_parameters(arch: Architecture) -> Any:
    """Parameters that one token's forward pass can touch: experts_per_token of n_experts count."""
    return sum(active_parameter_counts(arch).values())


def exact_parameters(arch: Architecture) -> tuple[int, int]:
    """Total and active parameters as whole numbers, of one concrete architecture.

    Counts in float64 with layer kinds rounded to whole layers, so the result is exact below 2^53.

    Raises:
        ValueError: the leaves are batched.
    """
    leaves = {f.name: np.asarray(getattr(arch, f.name)) for f in dataclasses.fields(arch)}
    batched = [name for name, leaf in leaves.items() if leaf.ndim]
    if batched:
        raise ValueError(
            f"exact_parameters takes one architecture; {batched[0]} has shape "
            f"{leaves[batched[0]].shape}. Use total_parameters for batches."
        )
    exact: dict[str, Any] = {name: np.float64(leaf) for name, leaf in leaves.items()}
    for name in ("moe_fraction", "window_fraction", "linear_fraction"):
        exact[name] = np.round(exact[name] * exact["n_layers"]) / exact["n_layers"]
    whole = Architecture(**exact)
    return round(float(total_parameters(whole))), round(float(active_parameters(whole)))


def kv_cache_elements_per_token(arch: Architecture) -> KvElements:
    """Elements cached for one token of one sequence.

    Grouped-query attention caches n_kv_heads x (head_dim + value_head_dim) per layer, latent
    attention kv_lora_rank + rope_head_dim (DeepSeek-V2, arXiv 2405.04434, table 1), linear
    attention nothing that grows.
    """
    grouped = arch.n_kv_heads * (arch.head_dim + arch.value_head_dim)
    latent = arch.kv_lora_rank + arch.rope_head_dim
    per_layer = _blend(arch.latent_attention, latent, grouped)
    windowed_layers = arch.n_layers * arch.window_fraction
    full_layers = attention_layers(arch) - windowed_layers
    return KvElements(per_layer, per_layer * full_layers, per_layer * windowed_layers)


def kv_cache_bytes(
    arch: Architecture, tokens: Any, kv_bytes: Any = 2.0, state_bytes: Any = 4.0
) -> KvBytes:
    """Cache bytes of one sequence that holds `tokens` tokens.

    Args:
        tokens: prompt and generated tokens so far, shape of the leaves or ().
        kv_bytes: bytes of one cached key or value element.
        state_bytes: bytes of one element of a linear layer's recurrent state; engines keep it in
            float32.

    Returns:
        Bytes read by a decode step, bytes reserved without window paging, and recurrent state.
    """
    elements = kv_cache_elements_per_token(arch)
    in_window = _minimum(arch.window_tokens, tokens)
    compute = elements.full_layers * tokens + elements.windowed_layers * in_window
    reserved = (elements.full_layers + elements.windowed_layers) * tokens
    state = recurrent_state_elements(arch) * state_bytes
    return KvBytes(compute * kv_bytes, reserved * kv_bytes, state)


def recurrent_state_elements(arch: Architecture) -> Any:
    """State elements of one sequence in all linear-attention layers.

    Per layer one head_dim x head_dim matrix per value head and the last conv_width - 1 inputs of
    the causal convolution over queries, keys and values (Gated DeltaNet, arXiv 2412.06464).
    """
    matrices = arch.linear_v_heads * arch.linear_head_dim * arch.linear_head_dim
    has_convolution = arch.linear_conv_width > 1
    convolution = has_convolution * (arch.linear_conv_width - 1) * _linear_qkv_width(arch)
    return arch.n_layers * arch.linear_fraction * (matrices + convolution)


def attention_layers(arch: Architecture) -> Any:
    """Layers with softmax attention, full or windowed."""
    return arch.n_layers * (1 - arch.linear_fraction)


def _counts(arch: Architecture, n_experts: Any) -> dict[str, Any]:
    moe_layers = arch.n_layers * arch.moe_fraction
    dense_layers = arch.n_layers - moe_layers
    linear_layers = arch.n_layers * arch.linear_fraction
    return {
        "embedding": (arch.vocab_size + arch.position_rows) * arch.d_model,
        "attention": attention_layers(arch) * _attention(arch),
        "linear_attention": linear_layers * _linear_attention(arch),
        "dense_feed_forward": dense_layers * _feed_forward(arch, arch.d_ff, arch.ff_bias),
        "router": moe_layers * arch.n_experts * (arch.d_model + arch.router_bias),
        "routed_experts": moe_layers
        * n_experts
        * _feed_forward(arch, arch.d_expert, arch.expert_bias),
        "shared_experts": moe_layers * _shared_experts(arch),
        "norms": _norms(arch),
        "head": (1 - arch.tied_embeddings) * arch.vocab_size * arch.d_model
        + arch.head_bias * arch.vocab_size,
    }


def _attention(arch: Architecture) -> Any:
    """One layer of softmax attention: projections, biases, sinks and inner norms."""
    projections = _blend(arch.latent_attention, _latent_inputs(arch), _grouped_inputs(arch))
    output = arch.n_heads * arch.value_head_dim * arch.d_model + arch.out_bias * arch.d_model
    return projections + output + arch.attention_sinks * arch.n_heads


def _grouped_inputs(arch: Architecture) -> Any:
    queries = arch.n_heads * arch.head_dim
    keys = arch.n_kv_heads * arch.head_dim
    values = arch.n_kv_heads * arch.value_head_dim
    outputs = queries * (1 + arch.attention_gate) + keys + values
    norms = arch.qk_norm_per_head * 2 * arch.head_dim + arch.qk_norm_full * (queries + keys)
    return outputs * (arch.d_model + arch.qkv_bias) + norms


def _latent_inputs(arch: Architecture) -> Any:
    """Down and up projections of queries and of keys with values, with their norms.

    Only the down projections have biases, and q_lora_rank = 0 means one direct projection.
    """
    queries = arch.n_heads * arch.head_dim
    down = arch.kv_lora_rank + arch.rope_head_dim
    up = arch.n_heads * (arch.head_dim - arch.rope_head_dim + arch.value_head_dim)
    compressed = 1.0 * (arch.q_lora_rank > 0)
    through_rank = arch.q_lora_rank * (arch.d_model + arch.qkv_bias + 1 + queries)
    direct = arch.d_model * queries
    keys_values = down * (arch.d_model + arch.qkv_bias) + arch.kv_lora_rank * (1 + up)
    return _blend(compressed, through_rank, direct) + keys_values


def _linear_attention(arch: Architecture) -> Any:
    """One gated delta net layer as in Qwen3-Next.

    Inputs q, k, v, z and two gates per value head; a convolution over q, k, v; a decay and a step
    bias per value head; a norm of one head; the output projection.
    """
    values = arch.linear_v_heads * arch.linear_head_dim
    qkv = _linear_qkv_width(arch)
    inputs = arch.d_model * (qkv + values + 2 * arch.linear_v_heads)
    convolution = qkv * arch.linear_conv_width
    scalars = 2 * arch.linear_v_heads + arch.linear_head_dim
    return inputs + convolution + scalars + values * arch.d_model


def _linear_qkv_width(arch: Architecture) -> Any:
    return (2 * arch.linear_k_heads + arch.linear_v_heads) * arch.linear_head_dim


def _feed_forward(arch: Architecture, width: Any, bias: Any) -> Any:
    """One feed-forward block: n_ff_matrices of d_model x width, a bias per output."""
    weights = arch.n_ff_matrices * arch.d_model * width
    return weights + bias * ((arch.n_ff_matrices - 1) * width + arch.d_model)


def _shared_experts(arch: Architecture) -> Any:
    weights = arch.n_ff_matrices * arch.d_model * arch.d_shared_expert
    return weights + arch.shared_expert_gate * arch.d_model


def _norms(arch: Architecture) -> Any:
    """Norms over d_model: of each layer, the final one, and one after the embedding if any."""
    rows = arch.n_layers * arch.norms_per_layer + 1 + arch.embedding_norm
    return rows * arch.d_model * (1 + arch.norm_bias)


def _blend(share: Any, one: Any, other: Any) -> Any:
    return share * one + (1 - share) * other


def _minimum(a: Any, b: Any) -> Any:
    """The smaller of two, exact, with plain operators."""
    return (a < b) * a + (a >= b) * b
