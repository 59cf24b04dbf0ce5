"""The values that travel through the package: a model, what it is asked to do, what it runs on.

Every number is a float32 leaf of shape () or [batch]: integer leaves would wrap silently inside
traced code and would not be differentiable. A concrete architecture is one whose leaves happen to
be whole numbers; a relaxed one is the same class. Checks belong to the factories below, which run
in plain Python before anything is traced; the dataclasses themselves accept whatever JAX puts into
them (tracers, shapes, axis specifications).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import reprlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

Value = jax.Array | np.ndarray | np.floating | float
"""What a numeric parameter takes: traced or not, a number or an array that broadcasts."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder-only transformer, dense or mixture of experts. Leaves float32, shape () or [batch].

    Fractions say which share of the layers is of a kind, so that a change of `n_layers` scales all
    kinds alike. Flags are numbers in [0, 1], so that they batch.
    """

    n_layers: jax.Array
    d_model: jax.Array
    n_heads: jax.Array  # query heads
    n_kv_heads: jax.Array
    head_dim: jax.Array  # of queries and keys
    value_head_dim: jax.Array  # of values; head_dim except in latent attention
    d_ff: jax.Array  # width of a dense feed-forward layer
    n_ff_matrices: jax.Array  # 3 gated (gate, up, down), 2 plain (up, down)
    vocab_size: jax.Array
    tied_embeddings: jax.Array  # 1: the LM head is the embedding matrix
    position_rows: jax.Array  # rows of a learned position embedding, 0 with rotary positions

    n_experts: jax.Array  # routed experts in a mixture layer, 0 in a dense model
    experts_per_token: jax.Array
    d_expert: jax.Array  # width of one routed expert
    d_shared_expert: jax.Array  # summed width of the experts that every token visits
    moe_fraction: jax.Array  # share of the layers that hold experts; the others are dense

    window_fraction: jax.Array  # share of the layers with sliding-window attention
    window_tokens: jax.Array

    latent_attention: jax.Array  # 1: multi-head latent attention (DeepSeek)
    q_lora_rank: jax.Array  # 0: queries are not compressed
    kv_lora_rank: jax.Array
    rope_head_dim: jax.Array  # rotary part of head_dim in latent attention

    linear_fraction: jax.Array  # share of the layers with linear attention (gated delta net)
    linear_k_heads: jax.Array
    linear_v_heads: jax.Array
    linear_head_dim: jax.Array
    linear_conv_width: jax.Array

    norms_per_layer: jax.Array  # over d_model: 2 usual, 1 parallel blocks, 4 sandwich norms
    layer_norm: jax.Array  # 1: LayerNorm, 0: RMSNorm
    norm_bias: jax.Array
    embedding_norm: jax.Array  # 1: a norm right after the embedding (BLOOM)
    qk_norm_per_head: jax.Array  # 1: norms of head_dim on queries and keys
    qk_norm_full: jax.Array  # 1: norms of the full projection width on queries and keys
    attention_gate: jax.Array  # 1: an output gate as wide as the queries
    attention_sinks: jax.Array  # 1: a learned sink logit per head
    qkv_bias: jax.Array
    out_bias: jax.Array
    ff_bias: jax.Array
    expert_bias: jax.Array
    router_bias: jax.Array
    shared_expert_gate: jax.Array
    head_bias: jax.Array

    weight_bits: jax.Array  # as stored, per parameter of the linear layers
    expert_weight_bits: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A batch of requests: a prompt, then `output_tokens` steps. Leaves float32, () or [batch].

    Decode steps run at contexts from `context_start_tokens` to `context_end_tokens`; by default
    from the prompt to prompt plus output, and both equal for a step at one exact context.
    """

    batch_size: jax.Array
    prompt_tokens: jax.Array  # per sequence
    output_tokens: jax.Array  # per sequence
    context_start_tokens: jax.Array
    context_end_tokens: jax.Array
    weight_bytes: jax.Array  # per parameter of a linear layer, as computed with
    activation_bytes: jax.Array
    kv_bytes: jax.Array  # per cached element
    tensor_parallel: jax.Array  # GPUs that share every layer
    expert_parallel: jax.Array  # GPUs that share the routed experts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """Data-sheet facts of one accelerator; dense rates, no sparsity. Leaves float32, shape ()."""

    peak_flops_per_s: jax.Array  # bf16/fp16 matrix units, dense; fp32 products on a CPU
    peak_fp8_flops_per_s: jax.Array  # the bf16 rate where fp8 is not supported
    peak_vector_flops_per_s: jax.Array  # fp32, no matrix units
    memory_bytes_per_s: jax.Array
    memory_bytes: jax.Array
    l2_bytes: jax.Array
    n_sm: jax.Array
    boost_clock_hz: jax.Array
    power_limit_w: jax.Array
    idle_power_w: jax.Array  # with a context created, no work
    link_bytes_per_s: jax.Array  # to the other GPUs of the node, one direction


# field: (default, least, greatest); a default of None means that the caller must give the value.
_ANY = (0.0, 1e9)
_FLAG = (0.0, 1.0)
ARCHITECTURE_FIELDS: dict[str, tuple[Any, float, float]] = {
    "n_layers": (None, 1, 1e5),
    "d_model": (None, 1, 1e7),
    "n_heads": (None, 1, 1e6),
    "n_kv_heads": ("n_heads", 1, 1e6),
    "head_dim": ("d_model / n_heads", 1, 1e5),
    "value_head_dim": ("head_dim", 1, 1e5),
    "d_ff": (None, 0, 1e8),
    "n_ff_matrices": (3, 2, 3),
    "vocab_size": (None, 1, 1e8),
    "tied_embeddings": (0, *_FLAG),
    "position_rows": (0, 0, 1e8),
    "n_experts": (0, 0, 1e6),
    "experts_per_token": (0, 0, 1e6),
    "d_expert": (0, 0, 1e8),
    "d_shared_expert": (0, 0, 1e8),
    "moe_fraction": (None, *_FLAG),
    "window_fraction": (0, *_FLAG),
    "window_tokens": (0, 0, 1e9),
    "latent_attention": (0, *_FLAG),
    "q_lora_rank": (0, 0, 1e7),
    "kv_lora_rank": (0, 0, 1e7),
    "rope_head_dim": (0, 0, 1e5),
    "linear_fraction": (0, *_FLAG),
    "linear_k_heads": (0, 0, 1e6),
    "linear_v_heads": (0, 0, 1e6),
    "linear_head_dim": (0, 0, 1e5),
    "linear_conv_width": (0, 0, 1e4),
    "norms_per_layer": (2, 0, 16),
    "layer_norm": (0, *_FLAG),
    "norm_bias": ("layer_norm", *_FLAG),
    "embedding_norm": (0, *_FLAG),
    "qk_norm_per_head": (0, *_FLAG),
    "qk_norm_full": (0, *_FLAG),
    "attention_gate": (0, *_FLAG),
    "attention_sinks": (0, *_FLAG),
    "qkv_bias": (0, *_FLAG),
    "out_bias": (0, *_FLAG),
    "ff_bias": (0, *_FLAG),
    "expert_bias": (0, *_FLAG),
    "router_bias": (0, *_FLAG),
    "shared_expert_gate": (0, *_FLAG),
    "head_bias": (0, *_FLAG),
    "weight_bits": (16, 1, 64),
    "expert_weight_bits": ("weight_bits", 1, 64),
}

DTYPES = {"bf16": 2.0, "fp8": 1.0, "fp32": 4.0}
"""Compute formats a checkpoint can be for, and the bytes of one element."""


def checked_number(name: str, value: Any, least: float, greatest: float) -> float:
    """A finite Python float within [least, greatest].

    Raises:
        ValueError: not a number, not finite, or outside the range.
    """
    try:
        if isinstance(value, str | bytes | bool | np.bool_):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{name} must be a number between {least:g} and {greatest:g}; got {shown(value)}."
        ) from None
    if not math.isfinite(number) or not least <= number <= greatest:
        raise ValueError(f"{name} must lie between {least:g} and {greatest:g}; got {shown(value)}.")
    return number


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: Any) -> str:
    """A short text of any value, for messages: one line, nothing that a terminal would obey."""
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to show"


def printable(text: str, limit: int = 120) -> str:
    """The text itself, cut, with a question mark for each letter that cannot be shown."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:limit])


def reason(error: Exception) -> str:
    """What a library said of a file, in one line without a full stop."""
    said = printable(" ".join(str(error).split()) or type(error).__name__, 200)
    return said.rstrip(".? ")


def near_names(name: str, known) -> list[str]:
    """The known names closest to `name`: those that contain it first, then by spelling."""
    lowered = str(name)[:200].lower()
    inside = [k for k in known if lowered and lowered in k.lower()]
    close = difflib.get_close_matches(lowered, [k for k in known if k not in inside], 5, 0.5)
    return sorted(inside) + close


def _leaves(values: Mapping[str, float]) -> dict[str, Any]:
    """Leaves as they are outside traced code: NumPy numbers, which stand for JAX arrays."""
    return {name: np.float32(value) for name, value in values.items()}


def architecture(**fields: Any) -> Architecture:
    """A checked `Architecture` from keyword numbers; those not given take the usual values.

    Required: n_layers, d_model, n_heads, d_ff, vocab_size. By default attention is multi-head with
    head_dim = d_model / n_heads, the feed-forward gated, the model dense, 16 bits a weight.

    Raises:
        ValueError: an unknown or missing field, a value out of range, KV heads that do not divide
            the heads, an incomplete description of experts, windows, latent or linear attention.
    """
    unknown = [name for name in fields if name not in ARCHITECTURE_FIELDS]
    if unknown:
        near = near_names(unknown[0], ARCHITECTURE_FIELDS)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ValueError(f"Unknown architecture field {shown(unknown[0])}.{hint}")
    missing = [
        name
        for name in ("n_layers", "d_model", "n_heads", "d_ff", "vocab_size")
        if fields.get(name) is None
    ]
    if missing:
        raise ValueError(f"Missing architecture fields: {', '.join(missing)}.")
    values: dict[str, float] = {}
    for name, (default, least, greatest) in ARCHITECTURE_FIELDS.items():
        given = fields.get(name)
        if given is None:
            if default == "d_model / n_heads":
                given = values["d_model"] / values["n_heads"]
            elif isinstance(default, str):
                given = values[default]
            elif name == "moe_fraction":
                given = 1.0 if values["n_experts"] > 0 else 0.0
            else:
                given = default
        values[name] = checked_number(name, given, least, greatest)
    _check_structure(values, head_dim_given=fields.get("head_dim") is not None)
    return Architecture(**_leaves(values))


def _check_structure(v: dict[str, float], head_dim_given: bool) -> None:
    whole = v["n_heads"].is_integer() and v["n_kv_heads"].is_integer()
    if v["n_kv_heads"] > v["n_heads"] or (whole and v["n_heads"] % v["n_kv_heads"]):
        heads, kv = int(v["n_heads"]), v["n_kv_heads"]
        divisors = [d for d in range(1, min(heads, 4096) + 1) if heads % d == 0]
        nearest = min(divisors, key=lambda d: abs(d - kv))
        raise ValueError(
            f"n_kv_heads must divide n_heads; got n_heads={v['n_heads']:g}, "
            f"n_kv_heads={kv:g}. Try n_kv_heads={nearest}."
        )
    if not head_dim_given and whole and v["d_model"].is_integer() and v["d_model"] % v["n_heads"]:
        raise ValueError(
            f"d_model={v['d_model']:g} is not a multiple of n_heads={v['n_heads']:g}; "
            "give head_dim as well."
        )
    if v["n_experts"] > 0:
        if not 0 < v["experts_per_token"] <= v["n_experts"]:
            raise ValueError(
                "experts_per_token must lie between 1 and n_experts; got "
                f"experts_per_token={v['experts_per_token']:g}, n_experts={v['n_experts']:g}."
            )
        if v["d_expert"] <= 0:
            raise ValueError(f"d_expert must be positive with {v['n_experts']:g} experts.")
    if (v["n_experts"] > 0) != (v["moe_fraction"] > 0):
        raise ValueError(
            f"moe_fraction={v['moe_fraction']:g} does not go with n_experts={v['n_experts']:g}."
        )
    if v["moe_fraction"] < 1 and v["d_ff"] <= 0:
        raise ValueError("d_ff must be positive where layers are dense.")
    if v["window_fraction"] > 0 and v["window_tokens"] < 1:
        raise ValueError("window_tokens must be at least 1 where window_fraction is positive.")
    if v["latent_attention"] > 0 and not (
        v["kv_lora_rank"] > 0 and 0 < v["rope_head_dim"] < v["head_dim"]
    ):
        raise ValueError(
            "Latent attention needs kv_lora_rank > 0 and 0 < rope_head_dim < head_dim; got "
            f"kv_lora_rank={v['kv_lora_rank']:g}, rope_head_dim={v['rope_head_dim']:g}, "
            f"head_dim={v['head_dim']:g}."
        )
    if v["linear_fraction"] > 0 and not (
        v["linear_k_heads"] > 0 and v["linear_v_heads"] > 0 and v["linear_head_dim"] > 0
    ):
        raise ValueError(
            "Linear attention needs linear_k_heads, linear_v_heads and linear_head_dim."
        )
    if v["window_fraction"] + v["linear_fraction"] > 1:
        raise ValueError("window_fraction and linear_fraction must not exceed 1 together.")


def dtype_bytes(name: str, what: str = "dtype") -> float:
    """Bytes of one element of a compute format.

    Raises:
        ValueError: not one of `DTYPES`.
    """
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"{what} must be one of {', '.join(DTYPES)}; got {shown(name)}.")
    return DTYPES[name]


def workload(
    *,
    batch_size: float = 1,
    prompt_tokens: float = 1024,
    output_tokens: float = 128,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    context_tokens: float | None = None,
    tensor_parallel: float = 1,
    expert_parallel: float = 1,
) -> Workload:
    """A checked `Workload`.

    Args:
        batch_size: sequences that run together.
        prompt_tokens: prompt tokens of each sequence.
        output_tokens: tokens that each sequence generates.
        dtype: format of the linear layers, one of `DTYPES`; with "fp32" activations are 32 bits
            wide too, else 16.
        kv_dtype: format of the KV cache; by default that of the activations.
        context_tokens: evaluate decode steps at this one context instead of over the growing one.
        tensor_parallel: GPUs that share every layer.
        expert_parallel: GPUs that share the routed experts.

    Raises:
        ValueError: a value out of range or an unknown format.
    """
    batch = checked_number("batch_size", batch_size, 1, 1e7)
    prompt = checked_number("prompt_tokens", prompt_tokens, 1, 1e8)
    output = checked_number("output_tokens", output_tokens, 1, 1e8)
    if context_tokens is None:
        start, end = prompt, prompt + output
    else:
        start = end = checked_number("context_tokens", context_tokens, 1, 2e8)
    element = dtype_bytes(dtype)
    activation = max(element, DTYPES["bf16"])
    values = dict(
        batch_size=batch,
        prompt_tokens=prompt,
        output_tokens=output,
        context_start_tokens=start,
        context_end_tokens=end,
        weight_bytes=element,
        activation_bytes=activation,
        kv_bytes=activation if kv_dtype is None else dtype_bytes(kv_dtype, "kv_dtype"),
        tensor_parallel=checked_number("tensor_parallel", tensor_parallel, 1, 1024),
        expert_parallel=checked_number("expert_parallel", expert_parallel, 1, 4096),
    )
    return Workload(**_leaves(values))


def device(**fields: Any) -> Device:
    """A checked `Device` from keyword numbers; every field is required and positive.

    Raises:
        ValueError: an unknown, missing or non-positive field.
    """
    names = [f.name for f in dataclasses.fields(Device)]
    unknown = [name for name in fields if name not in names]
    if unknown:
        near = near_names(unknown[0], names)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ValueError(f"Unknown device field {shown(unknown[0])}.{hint}")
    missing = [name for name in names if fields.get(name) is None]
    if missing:
        raise ValueError(f"Missing device fields: {', '.join(missing)}.")
    values = {name: checked_number(name, fields[name], 1e-3, 1e19) for name in names}
    if values["idle_power_w"] >= values["power_limit_w"]:
        raise ValueError(
            f"idle_power_w={values['idle_power_w']:g} must be below "
            f"power_limit_w={values['power_limit_w']:g}."
        )
    return Device(**_leaves(values))
