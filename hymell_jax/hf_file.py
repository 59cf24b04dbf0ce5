"""Reads a configuration file safely and gives checked access to its keys.

Plain JSON, no other library. Whatever is wrong with a file ends as a ValueError of one sentence:
what was given, what is allowed, what to do.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from hymell_jax.files import read_json
from hymell_jax.types import ARCHITECTURE_FIELDS, printable, shown

NESTED_TEXT_KEYS = ("text_config", "language_config", "llm_config", "thinker_config")


def load(source: Any) -> tuple[Mapping[str, Any], str]:
    """The configuration as a mapping and the name that its place suggests, "" for a mapping."""
    if isinstance(source, Mapping):
        strange = [key for key in source if not isinstance(key, str)]
        if strange:
            raise ValueError(
                f"Configuration keys must be strings; got {shown(strange[0])}. "
                "Pass the dict that json.load returns."
            )
        return source, ""
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(
            "A configuration must be a dict, the path of a config.json, or a folder that holds "
            f"one; got {type(source).__name__}."
        )
    path = os.fsdecode(source)
    with contextlib.suppress(ValueError):  # a NUL in the path: `read_json` says so
        if os.path.isdir(path):
            path = os.path.join(path, "config.json")
    config = read_json(path, "model configuration")
    if not isinstance(config, dict):
        raise ValueError(
            f"{path!r} holds a JSON {type(config).__name__}, not an object with named sizes. Give "
            "the model's config.json."
        )
    folder, base = os.path.split(os.path.abspath(path))
    stem = os.path.splitext(base)[0]
    return config, printable(os.path.basename(folder) if stem == "config" else stem)


def published_name(config: Mapping[str, Any]) -> str:
    """The repository name that transformers writes into a file, without local folders."""
    name = config.get("_name_or_path")
    if not isinstance(name, str) or not name.strip():
        return ""
    parts = [printable(part) for part in re.split(r"[/\\]", name) if part.strip()]
    if len(parts) == 2 and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return printable(name)
    return parts[-1] if parts else ""


_INHERITED = ("model_type", "quantization_config", "torch_dtype", "dtype", "tie_word_embeddings")


_TOWER = re.compile(r"(vision|audio|speech|image)(_tower|_encoder)?_config|visual")
"""Keys of the encoders of a multimodal model."""


def text_part(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The innermost text configuration, with what it inherits from the outer ones, and notes."""
    current = dict(config)
    path: list[str] = []
    while True:
        _refuse_other_kinds(current, where)
        inner = [key for key in NESTED_TEXT_KEYS if current.get(key)]
        if not inner or len(path) == len(NESTED_TEXT_KEYS):
            break
        key = inner[0]
        if not isinstance(current[key], Mapping):
            raise ValueError(f"{where} gives {key}={shown(current[key])}; it must be an object.")
        inherited = {k: current[k] for k in _INHERITED if current.get(k) is not None}
        own = {k: v for k, v in current[key].items() if isinstance(k, str)}
        if any(own.get(k) is not None for k in ("torch_dtype", "dtype")):
            inherited.pop("torch_dtype", None)
            inherited.pop("dtype", None)
        current = inherited | {k: v for k, v in own.items() if not (k in inherited and v is None)}
        path.append(key)
    if not path:
        towers = [key for key in current if _TOWER.fullmatch(key) and current[key]]
        return current, tuple(
            f"The key {printable(key)} is not modelled: the text model alone is read, not the "
            "encoders around it."
            for key in towers[:MOST_NOTES]
        )
    note = f"Only the text model in {'.'.join(path)} is modelled, not the encoders around it."
    return current, (note,)


_OTHER_KINDS = {
    "an encoder or encoder-decoder": (
        "albert bart bert big_bird bigbird camembert deberta distilbert electra ernie funnel led "
        "longformer m2m marian mbart modernbert mpnet mt5 nomic_bert pegasus prophetnet roberta "
        "squeezebert t5 t5gemma umt5 xlm xlm_roberta xlnet xmod"
    ),
    "a state-space or hybrid recurrent model": (
        "bamba falcon_h1 falcon_mamba granitemoehybrid jamba lfm2 lfm2_moe mamba mamba2 nemotron_h "
        "nemotronh plamo2 recurrent_gemma rwkv rwkv5 rwkv6 rwkv7 xlstm zamba zamba2"
    ),
    "a vision or audio model": (
        "align audio_spectrogram beit blip clip clip_text_model clip_vision_model clipseg convnext "
        "convnextv2 deit detr dinov2 dinov3_vit hubert sam segformer siglip siglip2 "
        "siglip_vision_model speech_to_text swin vit vit_mae wav2vec2 whisper"
    ),
    "a model whose layers are not modelled": "dbrx gemma3n gemma3n_text phi3small reformer",
}
_KIND_OF_TYPE = {name: kind for kind, names in _OTHER_KINDS.items() for name in names.split()}
_RECURRENT_KEY = re.compile(
    r"(mamba|ssm|rwkv|lru)_(?!.*dtype)|hybrid_override_pattern$|state_size$|d_state$"
)


def _refuse_other_kinds(config: Mapping[str, Any], where: str) -> None:
    allowed = "Only decoder-only transformer language models are modelled; give one of those."
    model_type = config.get("model_type")
    if isinstance(model_type, str):
        kind = _KIND_OF_TYPE.get(model_type.lower().replace("-", "_"))
        if kind:
            raise ValueError(f"{where} has model_type {model_type!r}, {kind}. {allowed}")
    if config.get("is_encoder_decoder") is True:
        raise ValueError(f"{where} has is_encoder_decoder true. {allowed}")
    set_keys = [key for key, value in config.items() if value is not None and value is not False]
    recurrent = [key for key in set_keys if _RECURRENT_KEY.match(key)]
    if recurrent:
        raise ValueError(
            f"{where} has the key {recurrent[0]!r}, which belongs to a state-space or hybrid "
            f"recurrent model. {allowed}"
        )
    named = config.get("architectures")
    if isinstance(named, (list, tuple)) and named and isinstance(named[0], str):
        if re.search(r"MaskedLM|SequenceClassification|TokenClassification|PreTraining$", named[0]):
            raise ValueError(f"{where} has architectures {shown(named)}. {allowed}")


FIELD_KEYS = {
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "d_model": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "n_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "n_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim",),
    "d_ff": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "n_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k"),
}
"""Architecture field: the spellings of its key, the same in every family."""

MOST_NOTES = 40
"""Of keys that are not modelled; the others are counted."""

_SIZE_LIKE = re.compile(r"size|dim$|_dim|width|rank|experts|heads|layers|latent|inner")
_NOT_SIZES = re.compile(
    r"max_|chunk_size_feed|ngram|rotary_dim|qk_head_dim|^head_dim$|sliding_window|batch_size|"
    r"^(ep|tp)_size|num_nextn|n_group|_id$|_ids$|_coef|pretraining|image_|video_|vision_|audio_|"
    r"^router_|per_group"
)


class Config:
    """A configuration with checked access; remembers which keys were read."""

    def __init__(self, values: Mapping[str, Any], where: str, notes: list[str]):
        self.values, self.where, self.notes = values, where, notes
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value, or the default where the key is absent or null."""
        self.read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def size(self, *keys: str, least: float = 1, greatest: float = 1e8) -> int | None:
        """The whole number under the first spelling present, None where all are absent or null."""
        present = [key for key in keys if self.get(key) is not None]
        found = {key: self._whole(key, least, greatest) for key in present}
        if len(set(found.values())) > 1:
            seen = ", ".join(f"{key}={value}" for key, value in found.items())
            raise ValueError(f"{self.where} gives one size twice, differently: {seen}. Keep one.")
        return next(iter(found.values()), None)

    def required(self, *keys: str, least: float = 1, greatest: float = 1e8) -> int:
        """As `size`, but absent is an error."""
        value = self.size(*keys, least=least, greatest=greatest)
        if value is None:
            raise ValueError(
                f"{self.where} has no {' or '.join(keys)}; sizes are never guessed, so add it. "
                f"Keys seen: {self.keys_seen()}."
            )
        return value

    def keys_seen(self) -> str:
        keys = sorted(map(str, self.values))[:40]
        return ", ".join(printable(key, 40) for key in keys) or "none"

    def field(self, name: str) -> int | None:
        """The size of an architecture field, by any of its spellings."""
        _, least, greatest = ARCHITECTURE_FIELDS[name]
        return self.size(*FIELD_KEYS[name], least=least, greatest=greatest)

    def required_field(self, name: str) -> int:
        _, least, greatest = ARCHITECTURE_FIELDS[name]
        return self.required(*FIELD_KEYS[name], least=least, greatest=greatest)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where} gives {key}={shown(value)}; it must be true or false.")
        return value

    def whole_list(self, key: str) -> list[int]:
        value = self.get(key, [])
        good = isinstance(value, (list, tuple)) and all(type(i) is int for i in value)
        if not good:
            raise ValueError(
                f"{self.where} gives {key}={shown(value)}; it must be a list of layer numbers."
            )
        return list(value)

    def sub(self, key: str) -> Config:
        """The object under a key, empty where absent."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.where} gives {key}={shown(value)}; it must be an object.")
        return Config(value, self.where, self.notes)

    def with_sizes(self, sizes: Mapping[str, int], family: str) -> None:
        """Fill sizes that the file leaves to the family's library default, with a note."""
        absent = {key: size for key, size in sizes.items() if self.values.get(key) is None}
        self.values = dict(self.values) | absent
        for key, value in absent.items():
            self.notes.append(
                f"There is no {key}; the library default of {family}, {value}, is used."
            )

    def note_unread_sizes(self) -> None:
        found = []
        for key, value in self.values.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 1
            if number and key not in self.read and _SIZE_LIKE.search(key):
                if not _NOT_SIZES.search(key):
                    found.append(f"The key {printable(key)} is not modelled.")
        self.notes += found[:MOST_NOTES]
        if len(found) > MOST_NOTES:
            self.notes.append(f"So are {len(found) - MOST_NOTES} more keys.")

    def _whole(self, key: str, least: float, greatest: float) -> int:
        value = self.values[key]
        whole = isinstance(value, int) and not isinstance(value, bool)
        whole = whole or (isinstance(value, float) and math.isfinite(value) and value.is_integer())
        if not whole or not least <= value <= greatest:
            raise ValueError(
                f"{self.where} gives {key}={shown(value)}; it must be a whole number from "
                f"{least:g} to {greatest:g}."
            )
        return int(value)
