"""What the model code of each Hugging Face family fixes, as a table.

Sources: the configuration and modelling files of the transformers library, one pair a family.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from hymell_jax.hf_file import Config, shown
from hymell_jax.types import near_names


@dataclasses.dataclass(frozen=True)
class Family:
    """What the model code of a family fixes, and how it reads its keys."""

    fields: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tied: bool = False  # library default of tie_word_embeddings
    switches: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    ff_ratio: float | None = None  # d_ff / d_model where the file gives none
    # which layers are not full: "none", "all", "late" (from max_window_layers), "linear" (linear
    # attention but for every full_attention_interval-th layer), or all but every n-th
    window: str | int = "none"
    window_key: str = "sliding_window"
    positions: str | None = None  # key of the rows of the learned position embedding
    # key of d_expert where there is no moe_intermediate_size
    expert_width: str = "intermediate_size"
    library_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    latent: bool = False  # always latent attention
    adjust: Callable[[Config, dict[str, Any]], None] | None = None


_LAYER_NORM = {"layer_norm": 1}
_ALL_BIASES = {"qkv_bias": 1, "out_bias": 1, "ff_bias": 1}
_ATTENTION_BIAS = {"attention_bias": ("qkv_bias", "out_bias")}
_LLAMA_BIASES = _ATTENTION_BIAS | {"mlp_bias": ("ff_bias",)}
_QKV_BIAS = {"attention_bias": ("qkv_bias",)}
_PLAIN = {"n_ff_matrices": 2}
_GPT2 = _PLAIN | _LAYER_NORM | _ALL_BIASES


def _falcon(cfg: Config, fields: dict[str, Any]) -> None:
    """KV heads and norms of the three Falcon designs (7b, 40b, rw)."""
    new, multi_query = cfg.flag("new_decoder_architecture"), cfg.flag("multi_query", True)
    if "n_head_kv" in cfg.values and "new_decoder_architecture" not in cfg.values:
        new = True  # files that predate the switch
    if not new:
        fields["n_kv_heads"] = 1 if multi_query else fields["n_heads"]
    norms = cfg.size("num_ln_in_parallel_attn", greatest=2)
    one_norm = norms == 1 or (not new and cfg.flag("parallel_attn", True))
    fields["norms_per_layer"] = 1 if one_norm else 2
    if cfg.get("ffn_hidden_size") is None and cfg.get("ff_factor") is not None:
        fields["d_ff"] = cfg.required("ff_factor") * fields["d_model"]


def _gpt_bigcode(cfg: Config, fields: dict[str, Any]) -> None:
    fields["n_kv_heads"] = 1 if cfg.flag("multi_query", True) else fields["n_heads"]


def _mpt(cfg: Config, fields: dict[str, Any]) -> None:
    attention = cfg.sub("attn_config")
    kinds = ("multihead_attention", "multiquery_attention", "grouped_query_attention")
    kind = attention.get("attn_type", kinds[0])
    if kind not in kinds:
        raise ValueError(
            f"{cfg.where} gives attn_type={shown(kind)}; it must be one of {', '.join(kinds)}."
        )
    given = attention.size("kv_n_heads", greatest=1e6)
    fields["n_kv_heads"] = 1 if kind == "multiquery_attention" else given or fields["n_heads"]
    if attention.flag("qk_ln"):
        fields["qk_norm_full"] = 1
    if not cfg.flag("no_bias", True):
        fields.update(_ALL_BIASES, norm_bias=1)
    ratio = cfg.get("expansion_ratio")
    if ratio is not None:
        valid = isinstance(ratio, (int, float)) and not isinstance(ratio, bool) and 0 < ratio < 1e4
        if not valid:
            raise ValueError(
                f"{cfg.where} gives expansion_ratio={shown(ratio)}; it must be a positive number."
            )
        fields["d_ff"] = int(ratio * fields["d_model"])
    rotary_or_alibi = attention.flag("alibi") or attention.flag("rope")
    if cfg.get("learned_pos_emb") is True and not rotary_or_alibi:
        fields["position_rows"] = cfg.required("max_seq_len")


def _opt(cfg: Config, fields: dict[str, Any]) -> None:
    fields["position_rows"] += 2  # the first two rows are never used but stored
    width = cfg.size("word_embed_proj_dim")
    if width not in (None, fields["d_model"]):
        cfg.notes.append(
            "The key word_embed_proj_dim is not modelled; embeddings are taken "
            f"{fields['d_model']} wide instead of {width} with a projection."
        )


def _phi(cfg: Config, fields: dict[str, Any]) -> None:
    fields["qk_norm_per_head"] = int(cfg.flag("qk_layernorm"))


def _stablelm(cfg: Config, fields: dict[str, Any]) -> None:
    fields["norms_per_layer"] = 1 if cfg.flag("use_parallel_residual") else 2
    fields["qk_norm_full"] = int(cfg.flag("qk_layernorm"))


def _cohere(cfg: Config, fields: dict[str, Any]) -> None:
    fields["qk_norm_full"] = int(cfg.flag("use_qk_norm"))


def _qk_norm_switch(cfg: Config, fields: dict[str, Any]) -> None:
    fields["qk_norm_per_head"] = int(cfg.flag("use_qk_norm"))


def _olmo(cfg: Config, fields: dict[str, Any]) -> None:
    cfg.notes.append("The norms of OLMo hold no weights but are counted as if each held d_model.")


def _gemma3(cfg: Config, fields: dict[str, Any]) -> None:
    if cfg.flag("use_bidirectional_attention"):
        cfg.notes.append("The key use_bidirectional_attention is not modelled; causal is assumed.")


def _llama4(cfg: Config, fields: dict[str, Any]) -> None:
    """One shared expert as wide as a routed one; dense layers have a width of their own."""
    fields["d_shared_expert"] = fields.get("d_expert", 0)
    fields["d_ff"] = cfg.size("intermediate_size_mlp") or 0
    cfg.notes.append("Chunked attention is modelled as a sliding window of the chunk size.")


def _require_shared_width(cfg: Config, fields: dict[str, Any]) -> None:
    if fields.get("n_experts") and "shared_expert_intermediate_size" not in cfg.values:
        cfg.required("shared_expert_intermediate_size")


_QWEN3 = Family(
    fields={"qk_norm_per_head": 1},
    switches=_ATTENTION_BIAS,
    window="late",
    library_sizes={"head_dim": 128},
)
_QWEN_NEXT = Family(
    fields={"qk_norm_per_head": 1, "attention_gate": 1, "shared_expert_gate": 1},
    switches=_ATTENTION_BIAS,
    window="linear",
    expert_width="moe_intermediate_size",
    library_sizes={"head_dim": 256},
    adjust=_require_shared_width,
)
_DEEPSEEK = Family(switches=_ATTENTION_BIAS, expert_width="moe_intermediate_size")
_OLMO2 = Family(fields={"qk_norm_full": 1}, switches=_ATTENTION_BIAS)

FAMILIES: dict[str, Family] = {
    "llama": Family(switches=_LLAMA_BIASES | {"bias": ("qkv_bias", "out_bias")}),
    "mistral": Family(window="all", library_sizes={"num_key_value_heads": 8}),
    "mixtral": Family(window="all", library_sizes={"num_key_value_heads": 8}),
    "qwen2": Family(fields={"qkv_bias": 1}, window="late"),
    "qwen2_moe": Family(
        fields={"qkv_bias": 1, "shared_expert_gate": 1},
        switches={"qkv_bias": ("qkv_bias",)},
        window="late",
        expert_width="moe_intermediate_size",
        adjust=_require_shared_width,
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": dataclasses.replace(
        _QWEN3, expert_width="moe_intermediate_size", library_sizes={"num_key_value_heads": 4}
    ),
    "qwen3_next": _QWEN_NEXT,
    "qwen3_5": _QWEN_NEXT,
    "gemma": Family(tied=True, switches=_ATTENTION_BIAS, library_sizes={"head_dim": 256}),
    "gemma2": Family(
        fields={"norms_per_layer": 4},
        tied=True,
        switches=_ATTENTION_BIAS,
        window=2,
        library_sizes={"head_dim": 256, "num_key_value_heads": 4},
    ),
    "gemma3": Family(
        fields={"norms_per_layer": 4, "qk_norm_per_head": 1},
        tied=True,
        switches=_ATTENTION_BIAS,
        window=6,
        library_sizes={
            "head_dim": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262_208,
        },
        adjust=_gemma3,
    ),
    "phi": Family(fields=_GPT2 | {"norms_per_layer": 1, "head_bias": 1}, ff_ratio=4, adjust=_phi),
    "phi3": Family(window="all"),
    "phimoe": Family(
        fields=_LAYER_NORM,
        window="all",
        switches=_ATTENTION_BIAS | {"lm_head_bias": ("head_bias",)},
    ),
    "gpt2": Family(fields=_GPT2, tied=True, ff_ratio=4, positions="n_positions"),
    "gpt_bigcode": Family(
        fields=_GPT2, tied=True, ff_ratio=4, positions="n_positions", adjust=_gpt_bigcode
    ),
    "gptj": Family(
        fields=_PLAIN | _LAYER_NORM | {"ff_bias": 1, "norms_per_layer": 1, "head_bias": 1},
        ff_ratio=4,
    ),
    "gpt_neo": Family(
        fields=_PLAIN | _LAYER_NORM | {"out_bias": 1, "ff_bias": 1},
        tied=True,
        ff_ratio=4,
        positions="max_position_embeddings",
        window_key="window_size",
    ),
    "gpt_neox": Family(fields=_GPT2, switches=_ATTENTION_BIAS),
    "opt": Family(
        fields=_GPT2,
        tied=True,
        switches={"enable_bias": ("qkv_bias", "out_bias", "ff_bias")},
        positions="max_position_embeddings",
        adjust=_opt,
    ),
    "falcon": Family(
        fields=_PLAIN | _LAYER_NORM,
        tied=True,
        switches={"bias": ("qkv_bias", "out_bias", "ff_bias")},
        ff_ratio=4,
        adjust=_falcon,
    ),
    "bloom": Family(fields=_GPT2 | {"embedding_norm": 1}, tied=True, ff_ratio=4),
    "mpt": Family(
        fields=_PLAIN | _LAYER_NORM | {"norm_bias": 0}, tied=True, ff_ratio=4, adjust=_mpt
    ),
    "olmo": Family(fields=_LAYER_NORM | {"norm_bias": 0}, switches=_ATTENTION_BIAS, adjust=_olmo),
    "olmo2": _OLMO2,
    "olmo3": dataclasses.replace(_OLMO2, window=4),
    "olmoe": _OLMO2,
    "glm": Family(switches=_QKV_BIAS, library_sizes={"head_dim": 128, "num_key_value_heads": 2}),
    "glm4": Family(
        fields={"norms_per_layer": 4},
        switches=_QKV_BIAS,
        library_sizes={"head_dim": 128, "num_key_value_heads": 2},
    ),
    "glm4_moe": Family(
        switches=_QKV_BIAS, expert_width="moe_intermediate_size", adjust=_qk_norm_switch
    ),
    "granite": Family(switches=_LLAMA_BIASES),
    "granitemoe": Family(switches=_ATTENTION_BIAS),
    "stablelm": Family(
        fields=_LAYER_NORM, switches={"use_qkv_bias": ("qkv_bias",)}, adjust=_stablelm
    ),
    "gpt_oss": Family(
        fields={
            "qkv_bias": 1,
            "out_bias": 1,
            "expert_bias": 1,
            "router_bias": 1,
            "attention_sinks": 1,
        },
        switches=_ATTENTION_BIAS,
        window=2,
        library_sizes={"head_dim": 64, "num_key_value_heads": 8},
    ),
    "deepseek": _DEEPSEEK,
    "deepseek_v2": dataclasses.replace(_DEEPSEEK, latent=True),
    "deepseek_v3": dataclasses.replace(_DEEPSEEK, latent=True),
    "llama4": Family(
        switches=_ATTENTION_BIAS, window=4, window_key="attention_chunk_size", adjust=_llama4
    ),
    "cohere": Family(
        fields=_LAYER_NORM | {"norm_bias": 0, "norms_per_layer": 1},
        tied=True,
        switches=_ATTENTION_BIAS,
        adjust=_cohere,
    ),
    "cohere2": Family(
        fields=_LAYER_NORM | {"norm_bias": 0, "norms_per_layer": 1},
        tied=True,
        switches=_ATTENTION_BIAS,
        window=4,
    ),
    "starcoder2": Family(
        fields=_GPT2,
        tied=True,
        window="all",
        switches={"use_bias": ("qkv_bias", "out_bias", "ff_bias")},
    ),
    "nemotron": Family(fields=_PLAIN | _LAYER_NORM, switches=_LLAMA_BIASES),
    "smollm3": Family(tied=True, switches=_LLAMA_BIASES, library_sizes={"num_key_value_heads": 4}),
}
"""model_type: what its model code fixes."""

_LLAMA_LIKE = Family(switches=_LLAMA_BIASES, window="all", adjust=_qk_norm_switch)

ALIASES = {
    "deepseek_v32": "deepseek_v3",
    "gemma3_text": "gemma3",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "granitemoeshared": "granitemoe",
    "internlm2": "llama",
    "kimi_k2": "deepseek_v3",
    "llama4_text": "llama4",
    "ministral": "mistral",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_5_moe_text": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
    "refinedweb": "falcon",
    "refinedwebmodel": "falcon",
}

_LLAMA_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
_LLAMA_MARKS = ("num_key_value_heads", "rms_norm_eps")  # one of them tells it from a GPT


def find_family(cfg: Config) -> tuple[str, Family]:
    """The family by model_type, else by architecture name, else by llama-like keys."""
    model_type = cfg.get("model_type", "")
    if not isinstance(model_type, str):
        raise ValueError(
            f"{cfg.where} gives model_type={shown(model_type)}; it must be a string like 'llama'."
        )
    kind = model_type.lower().replace("-", "_")
    kind = ALIASES.get(kind, kind)
    if kind not in FAMILIES:
        kind = _family_by_architecture(cfg)
    if kind in FAMILIES:
        if cfg.field("n_layers") and cfg.field("d_model"):
            cfg.with_sizes(FAMILIES[kind].library_sizes, kind)
        return kind, FAMILIES[kind]
    missing = [key for key in _LLAMA_KEYS if cfg.get(key) is None]
    if all(cfg.get(key) is None for key in _LLAMA_MARKS):
        missing.append(" or ".join(_LLAMA_MARKS))
    if not missing and cfg.get("type_vocab_size") is None:
        seen = f"model_type {shown(model_type)}" if model_type else "a file without model_type"
        cfg.notes.append(
            f"There are no rules for {seen}; it is read as llama-like: gated feed-forward, "
            "RMSNorm, biases only where a key says so."
        )
        if cfg.get("num_key_value_heads") is None:
            cfg.notes.append(
                "There is no num_key_value_heads; attention is read as multi-head, a KV head for "
                "each head."
            )
        return "llama-like", _LLAMA_LIKE
    near = near_names(model_type[:80], FAMILIES)[:5] if model_type else []
    hint = f" Near names: {', '.join(near)}." if near else ""
    known = f"the unknown model_type {shown(model_type)}" if model_type else "no model_type"
    lacks = f" (it lacks {', '.join(missing)})" if missing else ""
    raise ValueError(
        f"{cfg.where} has {known} and no llama-like sizes{lacks}; give a decoder-only model's "
        f"config.json.{hint} Keys seen: {cfg.keys_seen()}."
    )


def _family_by_architecture(cfg: Config) -> str:
    named = cfg.get("architectures", [])
    if not isinstance(named, (list, tuple)) or not named or not isinstance(named[0], str):
        return ""
    stem = re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel)$", "", named[0]).lower()
    return next((name for name in FAMILIES if name.replace("_", "") == stem), "")
