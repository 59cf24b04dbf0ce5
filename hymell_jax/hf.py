"""Reads a Hugging Face `config.json` into an `Architecture`, as plain JSON.

What a file leaves out is filled from what the family's model code fixes (gated or plain
feed-forward, biases, norms, tied embeddings), never from a guessed size. The few sizes that
published files do leave out to the family's library default (`Family.library_sizes`) are filled
with a note. Whatever is read but not modelled becomes a note, a plain sentence.
"""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

from hymell_jax.hf_families import Family, find_family
from hymell_jax.hf_file import FIELD_KEYS, Config, load, published_name, shown, text_part
from hymell_jax.hf_quantization import read_quantization
from hymell_jax.types import Architecture, architecture


@dataclasses.dataclass(frozen=True)
class HFModel:
    """What a configuration file says about a model."""

    name: str
    family: str  # a key of `FAMILIES`, or "llama-like"
    architecture: Architecture
    dtype: str  # suggested compute format of the linear layers, "bf16" or "fp8"
    quantization: str | None  # method of quantization_config
    notes: tuple[str, ...]  # what is not modelled, one sentence each


def read_hf(source: Mapping[str, Any] | str | os.PathLike) -> HFModel:
    """The model that a configuration describes.

    Args:
        source: the parsed configuration, the path of a `config.json`, or a folder that holds one.

    Raises:
        ValueError: unreadable source, a size missing or out of range, a kind of model that is not
            a decoder-only transformer, an unknown quantization method. One sentence says which.
    """
    config, name = load(source)
    where = f"The configuration {name!r}" if name else "The configuration"
    text, notes = text_part(config, where)
    cfg = Config(text, where, list(notes))
    family_name, family = find_family(cfg)
    fields = _fields(cfg, family)
    quantization = read_quantization(cfg, mixture="n_experts" in fields)
    fields.update(quantization.fields)
    if fields.get("n_experts") or family_name == "llama-like":
        cfg.note_unread_sizes()
    if not name:
        name = published_name(config) or family_name
    try:
        arch = architecture(**fields)
    except ValueError as error:
        raise ValueError(f"{where} does not describe a valid model: {error}") from None
    return HFModel(
        name=name,
        family=family_name,
        architecture=arch,
        dtype=quantization.dtype,
        quantization=quantization.method,
        notes=tuple(cfg.notes),
    )


def architecture_from_hf(source: Mapping[str, Any] | str | os.PathLike) -> Architecture:
    """The architecture that a configuration describes; each note is issued as a warning.

    Raises:
        ValueError: as `read_hf`.
    """
    model = read_hf(source)
    for note in model.notes:
        warnings.warn(note, stacklevel=2)
    return model.architecture


def _fields(cfg: Config, family: Family) -> dict[str, Any]:
    """All architecture fields but the stored bits."""
    fields: dict[str, Any] = dict(family.fields)
    for key, targets in family.switches.items():
        if cfg.get(key) is not None:
            fields.update(dict.fromkeys(targets, int(cfg.flag(key))))
    for name in ("n_layers", "d_model", "n_heads", "vocab_size"):
        fields[name] = cfg.required_field(name)
    fields["n_kv_heads"] = cfg.field("n_kv_heads") or fields["n_heads"]
    fields["head_dim"] = cfg.field("head_dim")
    fields["tied_embeddings"] = int(cfg.flag("tie_word_embeddings", family.tied))
    if family.positions:
        fields["position_rows"] = cfg.required(family.positions)
    fields.update(_latent_attention(cfg, required=family.latent))
    fields.update(_layer_kinds(cfg, family, fields["n_layers"]))
    fields.update(_linear_attention(cfg) if fields["linear_fraction"] else {})
    fields.update(_experts(cfg, family, fields["n_layers"]))
    fields["d_ff"] = _dense_width(cfg, family, fields)
    if family.adjust:
        family.adjust(cfg, fields)
    if not fields.get("d_shared_expert"):
        fields["shared_expert_gate"] = 0
    if cfg.get("num_nextn_predict_layers"):
        cfg.notes.append("The key num_nextn_predict_layers is not modelled: no extra layers.")
    return fields


def _dense_width(cfg: Config, family: Family, fields: dict[str, Any]) -> float:
    width = cfg.field("d_ff")
    if width is None and family.ff_ratio:
        return int(family.ff_ratio * fields["d_model"])
    if width is None and fields.get("moe_fraction") == 1:
        return 0
    return cfg.required_field("d_ff") if width is None else width


def _latent_attention(cfg: Config, required: bool) -> dict[str, Any]:
    """Fields of latent attention: in families that always have it (`required`), and elsewhere
    where the file gives both its rank and its rotary size.

    A `kv_lora_rank` that is null, or that stands alone, leaves grouped-query attention.
    """
    rank, rotary = (cfg.size(key, least=0) for key in ("kv_lora_rank", "qk_rope_head_dim"))
    if required:
        rank, rotary = cfg.required("kv_lora_rank"), cfg.required("qk_rope_head_dim")
    if not rank or not rotary:
        if rank:
            cfg.notes.append(
                "The key kv_lora_rank is not modelled without qk_rope_head_dim: attention is read "
                "as grouped-query."
            )
        return {}
    return {
        "latent_attention": 1,
        "kv_lora_rank": rank,
        "q_lora_rank": cfg.size("q_lora_rank", least=0) or 0,
        "rope_head_dim": rotary,
        "head_dim": cfg.required("qk_nope_head_dim") + rotary,
        "value_head_dim": cfg.required("v_head_dim"),
        "n_kv_heads": cfg.required_field("n_heads"),
    }


def _linear_attention(cfg: Config) -> dict[str, Any]:
    """Fields of gated delta net layers."""
    key_dim, value_dim = cfg.required("linear_key_head_dim"), cfg.required("linear_value_head_dim")
    if key_dim != value_dim:
        raise ValueError(
            f"{cfg.where} gives linear_key_head_dim={key_dim} and linear_value_head_dim="
            f"{value_dim}; only equal ones are modelled."
        )
    return {
        "linear_head_dim": key_dim,
        "linear_k_heads": cfg.required("linear_num_key_heads"),
        "linear_v_heads": cfg.required("linear_num_value_heads"),
        "linear_conv_width": cfg.required("linear_conv_kernel_dim", greatest=1e4),
    }


_LAYER_TYPES = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "window",
    "linear_attention": "linear",
    "global": "full",
    "local": "window",
}


def _layer_kinds(cfg: Config, family: Family, n_layers: int) -> dict[str, Any]:
    """Shares of windowed and linear layers, and the window."""
    window = cfg.size(family.window_key, least=0, greatest=1e9)
    kinds = _listed_kinds(cfg, n_layers) or _derived_kinds(cfg, family, n_layers)
    if not cfg.flag("use_sliding_window", family.window != "late"):
        window = None
    if not window and "window" in kinds and family.window_key not in cfg.values:
        if isinstance(family.window, int):
            cfg.notes.append(f"There is no {family.window_key}; all layers are read as full.")
    windowed = kinds.count("window") if window else 0
    return {
        "window_fraction": windowed / n_layers,
        "window_tokens": window if windowed else 0,
        "linear_fraction": kinds.count("linear") / n_layers,
    }


def _listed_kinds(cfg: Config, n_layers: int) -> list[str] | None:
    """Kind of each layer where the file lists them."""
    listed, key = cfg.get("layer_types"), "layer_types"
    if listed is None and cfg.get("attention_layers") is not None:
        listed, key = cfg.get("attention_layers"), "attention_layers"
    if listed is None and cfg.get("attention_types") is not None:
        listed, key = _expanded(cfg), "attention_types"
    if listed is None:
        return None
    known = isinstance(listed, (list, tuple)) and all(isinstance(i, str) for i in listed)
    strange = [i for i in listed if i not in _LAYER_TYPES] if known else [listed]
    if strange:
        raise ValueError(
            f"{cfg.where} has {key} {shown(strange[0])}; modelled are {', '.join(_LAYER_TYPES)}."
        )
    if len(listed) != n_layers:
        raise ValueError(
            f"{cfg.where} lists {len(listed)} {key} for {n_layers} layers; give one a layer."
        )
    return [_LAYER_TYPES[i] for i in listed]


def _expanded(cfg: Config) -> list[Any]:
    """GPT-Neo's [[kinds, repeats], ...] as one list."""
    try:
        groups = [(list(kinds), int(repeats)) for kinds, repeats in cfg.get("attention_types")]
        if sum(len(kinds) * max(repeats, 0) for kinds, repeats in groups) > 1e5:
            raise ValueError
        return [kind for kinds, repeats in groups for kind in kinds * repeats]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{cfg.where} has attention_types that are not pairs of kinds and repeats, like "
            "[[['global', 'local'], 12]]."
        ) from None


def _derived_kinds(cfg: Config, family: Family, n_layers: int) -> list[str]:
    """Kind of each layer by the family's rule."""
    if family.window == "linear":
        interval = cfg.size("full_attention_interval") or 4
        return ["linear" if (i + 1) % interval else "full" for i in range(n_layers)]
    pattern = cfg.get("sliding_window_pattern", cfg.get("_sliding_window_pattern"))
    if isinstance(pattern, str) and re.fullmatch("[LG]+", pattern):
        return ["window" if pattern[i % len(pattern)] == "L" else "full" for i in range(n_layers)]
    if pattern is not None:
        key = "sliding_window_pattern"
        every: Any = cfg.size(key if cfg.get(key) is not None else "_sliding_window_pattern")
    elif isinstance(family.window, int):
        every = family.window
    elif family.window == "late":
        first = cfg.size("max_window_layers", least=0) if "max_window_layers" in cfg.values else 28
        return ["window" if i >= (first or 0) else "full" for i in range(n_layers)]
    else:
        return ["window" if family.window == "all" else "full"] * n_layers
    return ["window" if (i + 1) % every else "full" for i in range(n_layers)]


def _experts(cfg: Config, family: Family, n_layers: int) -> dict[str, Any]:
    """Fields of the routed and shared experts; none in a dense model."""
    n_experts = cfg.size(*FIELD_KEYS["n_experts"], least=0, greatest=1e6)
    moe_layers = _moe_layers(cfg, n_layers)
    routed = cfg.size(*FIELD_KEYS["experts_per_token"], least=0, greatest=1e6)
    if routed and not n_experts:
        raise ValueError(
            f"{cfg.where} routes tokens to {routed:g} experts and does not say of how many; give "
            f"one of {', '.join(FIELD_KEYS['n_experts'])}."
        )
    if not n_experts or not moe_layers:
        return {}
    width = cfg.size("moe_intermediate_size", greatest=1e8)
    if width is None:
        width = cfg.required(family.expert_width)
    shared = cfg.size("shared_expert_intermediate_size", "shared_intermediate_size", least=0)
    if shared is None:
        shared = width * (cfg.size("n_shared_experts", "num_shared_experts", least=0) or 0)
    return {
        "n_experts": n_experts,
        "experts_per_token": cfg.required_field("experts_per_token"),
        "d_expert": width,
        "d_shared_expert": shared,
        "moe_fraction": moe_layers / n_layers,
    }


def _moe_layers(cfg: Config, n_layers: int) -> int:
    """How many layers hold experts, by every key that says so."""
    dense = {i for i in cfg.whole_list("mlp_only_layers") if 0 <= i < n_layers}
    dense |= set(range(min(cfg.size("first_k_dense_replace", least=0) or 0, n_layers)))
    if isinstance(cfg.get("moe_layer_freq"), (list, tuple)):
        listed = cfg.whole_list("moe_layer_freq")
        if len(listed) != n_layers:
            raise ValueError(
                f"{cfg.where} lists {len(listed)} moe_layer_freq for {n_layers} layers; give one "
                "a layer."
            )
        dense |= {i for i, holds in enumerate(listed) if not holds}
    else:
        every = cfg.size("moe_layer_freq") or 1
        dense |= {i for i in range(n_layers) if i % every}
    if cfg.get("moe_layers") is not None:
        dense |= set(range(n_layers)) - set(cfg.whole_list("moe_layers"))
    else:
        step = cfg.size("decoder_sparse_step", "interleave_moe_layer_step") or 1
        dense |= {i for i in range(n_layers) if (i + 1) % step}
    return n_layers - len(dense)
