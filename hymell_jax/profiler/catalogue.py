"""Shapes of published decoder models, as their configuration files give them.

A name that ends in -mini is no published model: a small one of a family whose published members are
too large for a CPU. `HELD_OUT` are the test models of a profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def _gpt2(width: int, layers: int, heads: int) -> Config:
    return dict(model_type="gpt2", n_embd=width, n_layer=layers, n_head=heads)


def _neox(width: int, layers: int, heads: int) -> Config:
    return dict(
        model_type="gpt_neox", hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=heads, intermediate_size=4 * width, vocab_size=50304,
    )  # fmt: skip


def _llama_like(
    kind: str, width: int, layers: int, heads: int, kv_heads: int, d_ff: int, vocab: int,
    **more: Any,
) -> Config:  # fmt: skip
    return dict(
        model_type=kind, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=d_ff, vocab_size=vocab,
        **{"max_position_embeddings": 8192, **more},
    )  # fmt: skip


MODELS: dict[str, Config] = {
    "gpt2": _gpt2(768, 12, 12),
    "distilgpt2": _gpt2(768, 6, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "opt-125m": dict(
        model_type="opt", hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
        ffn_dim=3072, vocab_size=50272, word_embed_proj_dim=768, max_position_embeddings=2048,
    ),
    "pythia-70m": _neox(512, 6, 8),
    "pythia-160m": _neox(768, 12, 12),
    "pythia-410m": _neox(1024, 24, 16),
    "llama-68m": _llama_like("llama", 768, 2, 12, 12, 3072, 32000),
    "llama-160m": _llama_like("llama", 768, 12, 12, 12, 3072, 32000),
    "smollm2-135m": _llama_like(
        "llama", 576, 30, 9, 3, 1536, 49152, tie_word_embeddings=True
    ),
    "smollm2-360m": _llama_like(
        "llama", 960, 32, 15, 5, 2560, 49152, tie_word_embeddings=True
    ),
    "qwen2.5-0.5b": _llama_like(
        "qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True
    ),
    "qwen3-0.6b": _llama_like(
        "qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True
    ),
    "gemma-3-270m": _llama_like(
        "gemma3_text", 640, 18, 4, 1, 2048, 262144, head_dim=256, sliding_window=512,
        query_pre_attn_scalar=256,
    ),
    "mistral-mini": _llama_like("mistral", 1024, 12, 16, 4, 3584, 32000, sliding_window=None),
    "mixtral-mini": _llama_like(
        "mixtral", 512, 8, 8, 2, 1024, 32000, num_local_experts=8, num_experts_per_tok=2,
        sliding_window=None,
    ),
    "qwen3-moe-mini": _llama_like(
        "qwen3_moe", 512, 10, 8, 2, 1536, 32000, head_dim=64, num_experts=16,
        num_experts_per_tok=4, moe_intermediate_size=384, tie_word_embeddings=True,
    ),
    "tinyllama-1.1b": _llama_like("llama", 2048, 22, 32, 4, 5632, 32000),
    "llama-3.2-1b": _llama_like(
        "llama", 2048, 16, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True
    ),
    "llama-3.2-3b": _llama_like(
        "llama", 3072, 28, 24, 8, 8192, 128256, head_dim=128, tie_word_embeddings=True
    ),
    "llama-3.1-8b": _llama_like("llama", 4096, 32, 32, 8, 14336, 128256),
    "llama-2-7b": _llama_like("llama", 4096, 32, 32, 32, 11008, 32000),
    "qwen2.5-1.5b": _llama_like(
        "qwen2", 1536, 28, 12, 2, 8960, 151936, tie_word_embeddings=True
    ),
    "qwen2.5-7b": _llama_like("qwen2", 3584, 28, 28, 4, 18944, 152064),
    "qwen3-1.7b": _llama_like(
        "qwen3", 2048, 28, 16, 8, 6144, 151936, head_dim=128, tie_word_embeddings=True
    ),
    "qwen3-4b": _llama_like(
        "qwen3", 2560, 36, 32, 8, 9728, 151936, head_dim=128, tie_word_embeddings=True
    ),
    "mistral-7b": _llama_like("mistral", 4096, 32, 32, 8, 14336, 32768, sliding_window=None),
    "opt-6.7b": dict(
        model_type="opt", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        ffn_dim=16384, vocab_size=50272, word_embed_proj_dim=4096, max_position_embeddings=2048,
    ),
    "olmoe-1b-7b": _llama_like(
        "olmoe", 2048, 16, 16, 16, 1024, 50304, num_experts=64, num_experts_per_tok=8
    ),
}  # fmt: skip
"""Name: keys of the configuration, those of the library's class for `model_type`."""

SMALL = (
    "gpt2", "distilgpt2", "opt-125m", "pythia-70m", "pythia-160m", "llama-68m", "llama-160m",
    "smollm2-135m", "smollm2-360m", "qwen2.5-0.5b", "qwen3-0.6b", "gemma-3-270m", "mistral-mini",
    "mixtral-mini", "qwen3-moe-mini", "tinyllama-1.1b",
)  # fmt: skip
"""Models for a CPU: 43 million to 1.1 billion parameters."""

LARGE = (
    "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-2-7b", "qwen2.5-1.5b", "qwen2.5-7b",
    "qwen3-1.7b", "qwen3-4b", "mistral-7b", "opt-6.7b", "olmoe-1b-7b",
)  # fmt: skip
"""Models for one GPU: 1 to 8 billion parameters."""

HELD_OUT = ("pythia-160m", "smollm2-360m", "qwen2.5-0.5b", "llama-3.2-3b", "qwen2.5-7b", "qwen3-4b")

_NAMES = {  # column: keys of the families
    "n_layers": ("num_hidden_layers", "n_layer"),
    "d_model": ("hidden_size", "n_embd"),
    "n_heads": ("num_attention_heads", "n_head"),
    "n_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "d_ff": ("intermediate_size", "ffn_dim"),
    "vocab_size": ("vocab_size",),
    "n_experts": ("num_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok",),
}


def columns(name: str) -> dict[str, int]:
    """The columns of `systems/transformers` that say what a model is."""
    config = MODELS[name]

    def find(column: str, default: int) -> int:
        return next((int(config[key]) for key in _NAMES[column] if key in config), default)

    width, heads = find("d_model", 0), find("n_heads", 0)
    found = dict(
        n_layers=find("n_layers", 0), d_model=width, n_heads=heads,
        n_kv_heads=find("n_kv_heads", heads), head_dim=find("head_dim", width // heads),
        d_ff=find("d_ff", 4 * width), vocab_size=find("vocab_size", 50257),
        n_experts=find("n_experts", 0), top_k=find("top_k", 0),
    )  # fmt: skip
    return found | {"n_parameters": _parameters(name, found)}


def _matrices(name: str) -> int:
    return 2 if MODELS[name]["model_type"] in ("gpt2", "gpt_neox", "opt") else 3


def _expert_width(name: str, sizes: Mapping[str, int]) -> int:
    return int(MODELS[name].get("moe_intermediate_size", sizes["d_ff"]))


def _parameters(name: str, c: Mapping[str, int]) -> int:
    """Parameters of the matrices; norms and biases are left out."""
    attention = c["d_model"] * c["head_dim"] * 2 * (c["n_heads"] + c["n_kv_heads"])
    width = _expert_width(name, c) * c["n_experts"] if c["n_experts"] else c["d_ff"]
    layer = attention + _matrices(name) * c["d_model"] * width
    tied = tied_embeddings(name)
    return c["n_layers"] * layer + (1 if tied else 2) * c["vocab_size"] * c["d_model"]


def active_parameters(name: str) -> int:
    """Parameters that one token is multiplied with, the head included, the embedding not."""
    c = columns(name)
    attention = c["d_model"] * c["head_dim"] * 2 * (c["n_heads"] + c["n_kv_heads"])
    width = _expert_width(name, c) * c["top_k"] if c["n_experts"] else c["d_ff"]
    layer = attention + _matrices(name) * c["d_model"] * width
    return c["n_layers"] * layer + c["vocab_size"] * c["d_model"]


def tied_embeddings(name: str) -> bool:
    """Whether the head is the embedding matrix, by the file or the family's default."""
    config = MODELS[name]
    default = config["model_type"] in ("gpt2", "opt", "gemma3_text")
    return bool(config.get("tie_word_embeddings", default))


def longest(name: str) -> int:
    """Tokens that a sequence may have."""
    config = MODELS[name]
    default = 1024 if config["model_type"] == "gpt2" else 2048
    return int(config.get("max_position_embeddings", default))


def products(name: str) -> set[tuple[int, int]]:
    """(n, k) of the matrix products of a dense layer and of the head."""
    c = columns(name)
    queries, keys = c["n_heads"] * c["head_dim"], c["n_kv_heads"] * c["head_dim"]
    width = _expert_width(name, c) if c["n_experts"] else c["d_ff"]
    return {
        (queries, c["d_model"]), (keys, c["d_model"]), (c["d_model"], queries),
        (width, c["d_model"]), (c["d_model"], width), (c["vocab_size"], c["d_model"]),
    }  # fmt: skip
