"""Published models by name: `preset("llama-3.1-8b")`.

`model_data/models.json` holds, for each name, the size keys of its configuration file, the
repository that publishes the file, and the published number of parameters (without buffers such as
DeepSeek's router selection bias, and without vision towers), which the tests compare.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from hymell_jax.hf import HFModel, read_hf
from hymell_jax.types import near_names


def model_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    return tuple(sorted(_entries()))


def preset(name: str) -> HFModel:
    """The published model of that name.

    Letter case does not matter, and a repository id works as well: one that publishes a preset's
    file ("mistralai/Mistral-7B-v0.1"), or any organisation before a preset's name.

    Raises:
        ValueError: no such name; the message lists near names.
    """
    found = _find(name)
    if found is None:
        near = near_names(_last_part(name)[:80], model_names())[:8] if isinstance(name, str) else []
        known = f"Near names: {', '.join(near)}." if near else "`hymell models` lists all."
        raise ValueError(
            f"There is no model named {str(name)[:100]!r}. {known} Or give a config.json."
        )
    return _read_preset(found)


def preset_source(name: str) -> str:
    """Where the preset's configuration is published.

    Raises:
        ValueError: as `preset`.
    """
    return _entries()[preset(name).name]["source"]


def published_parameters(name: str) -> int:
    """The parameter total that the preset's publisher states.

    Raises:
        ValueError: as `preset`.
    """
    return _entries()[preset(name).name]["published_parameters"]


def resolve_model(source: str | os.PathLike | Mapping[str, Any]) -> HFModel:
    """The model of a preset name, a `config.json`, a folder that holds one, or a parsed file.

    A text is a path where it is written like one (ends in .json, starts with . or / or ~), where
    it has a separator and exists, and where it names a folder that holds a config.json. Other
    texts are preset names.

    Raises:
        ValueError: neither a preset nor a readable configuration, or as `read_hf`.
    """
    if not isinstance(source, str):
        return read_hf(source)
    if re.match(r"[./\\~]", source) or source.lower().endswith(".json"):
        return read_hf(os.path.expanduser(source))
    if "/" in source or _find(source) is None:
        is_path = os.path.exists(source)
    else:
        is_path = os.path.isfile(os.path.join(source, "config.json"))
    return read_hf(source) if is_path else preset(source)


def _find(name: Any) -> str | None:
    """The preset's own name, None where there is no such preset."""
    if not isinstance(name, str):
        return None
    wanted = name.strip().lower()
    if wanted in _repositories():
        return _repositories()[wanted]
    last = _last_part(wanted)
    return last if last in _entries() else None


def _last_part(name: str) -> str:
    return name.strip().rstrip("/").rpartition("/")[2]


@functools.cache
def _entries() -> dict[str, dict[str, Any]]:
    file = importlib.resources.files("hymell_jax") / "model_data" / "models.json"
    return json.loads(file.read_text(encoding="utf-8"))


@functools.cache
def _repositories() -> dict[str, str]:
    """Lower-case repository id: preset name; ids that publish two presets are left out."""
    ids = [
        (re.findall(r"\S+/[^\s,]+", entry["source"])[0].lower(), name)
        for name, entry in _entries().items()
    ]
    return {repo: name for repo, name in ids if sum(repo == other for other, _ in ids) == 1}


@functools.cache
def _read_preset(name: str) -> HFModel:
    return dataclasses.replace(read_hf(_entries()[name]["config"]), name=name)
