"""Operator and block tables from NVIDIA aiconfigurator (Apache-2.0, ai-dynamo/aiconfigurator).

The measurements come with the package `aiconfigurator-core` and lie in the repository under
`aic-core/src/aiconfigurator_core`, both as `systems/data/<system>/<family>/<framework>/<version>/
<operator>_perf.parquet`; older checkouts use `src/aiconfigurator/systems/data/<system>/<framework>/
<version>/<operator>_perf.txt`, comma-separated. `latency` is in milliseconds, `power` in watts.
The tables with power (vLLM 0.22.0) are mostly in the repository only.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ..data import numbers
from .tables import (
    chosen,
    concat,
    existing_folder,
    finish,
    read_table,
    require_columns,
    require_texts,
    seconds,
    whole_numbers,
)

SYSTEMS: dict[str, str] = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm-80gb",
    "h200_sxm": "h200-sxm-141gb",
    "b200_sxm": "b200-sxm-180gb",
    "l40s": "l40s-48gb",
}
"""The source's systems with vLLM measurements, and our device names."""

VLLM_VERSIONS = ("0.14.0", "0.22.0", "0.24.0")
"""vLLM versions that are imported; collectives take the newest version of each system."""

_MS = 1e-3


@dataclass(frozen=True)
class _Source:
    """How one perf file becomes rows of one table: our column names and the source's."""

    table: str
    file: str  # without suffix
    text: dict[str, str]
    whole: dict[str, str]
    constants: dict[str, str]
    framework: str = "vllm"
    newest_only: bool = False


_HEADS = {"n_heads": "num_heads", "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
_ATTENTION_TEXT = {"dtype": "attn_dtype", "kv_dtype": "kv_cache_dtype"}
_MLA_TEXT = {"model": "model", "dtype": "gemm_type", "kv_dtype": "kv_cache_dtype"}
_MLA_WHOLE = {
    "batch": "batch_size",
    "seq_len": "isl",
    "context_len": "step",
    "n_heads": "num_heads",
}
_COLLECTIVE_TEXT = {"kernel": "kernel_source", "collective": "op_name"}
_COLLECTIVE_WHOLE = {"num_gpus": "num_gpus", "message_bytes": "message_size"}
_SOURCES = (
    _Source(
        "operators/gemm", "gemm_perf", {"dtype": "gemm_dtype"}, {"m": "m", "n": "n", "k": "k"}, {}
    ),
    _Source(
        "blocks/attention_prefill",
        "context_attention_perf",
        _ATTENTION_TEXT,
        {"batch": "batch_size", "seq_len": "isl", **_HEADS, "window_size": "window_size"},
        {},
    ),
    _Source(
        "blocks/attention_decode",
        "generation_attention_perf",
        _ATTENTION_TEXT,
        {"batch": "batch_size", "context_len": "step", **_HEADS, "window_size": "window_size"},
        {},
    ),
    _Source(
        "blocks/moe",
        "moe_perf",
        {"dtype": "moe_dtype", "kernel": "kernel_source", "distribution": "distribution"},
        {
            "num_tokens": "num_tokens",
            "d_model": "hidden_size",
            "d_expert": "inter_size",
            "top_k": "topk",
            "n_experts": "num_experts",
            "moe_tp_size": "moe_tp_size",
            "moe_ep_size": "moe_ep_size",
        },
        {},
    ),
    _Source(
        "blocks/linear_attention",
        "gdn_perf",
        {"kernel": "kernel_source", "phase": "phase"},
        {
            "batch": "batch_size",
            "seq_len": "seq_len",
            "num_tokens": "num_tokens",
            "d_model": "d_model",
            "d_conv": "d_conv",
            "num_k_heads": "num_k_heads",
            "head_k_dim": "head_k_dim",
            "num_v_heads": "num_v_heads",
            "head_v_dim": "head_v_dim",
        },
        {},
    ),
    _Source("blocks/mla", "mla_context_module_perf", _MLA_TEXT, _MLA_WHOLE, {"phase": "prefill"}),
    _Source("blocks/mla", "mla_generation_module_perf", _MLA_TEXT, _MLA_WHOLE, {"phase": "decode"}),
    _Source(
        "operators/collectives",
        "nccl_perf",
        {**_COLLECTIVE_TEXT, "dtype": "nccl_dtype"},
        _COLLECTIVE_WHOLE,
        {},
        framework="nccl",
        newest_only=True,
    ),
    _Source(
        "operators/collectives",
        "custom_allreduce_perf",
        {**_COLLECTIVE_TEXT, "dtype": "allreduce_dtype"},
        _COLLECTIVE_WHOLE,
        {},
        newest_only=True,
    ),
)
TABLES = tuple(dict.fromkeys(source.table for source in _SOURCES))
"""The tables that this source can give."""

_BYTES = {"half": 2, "int8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
_DROPPED_DTYPES = ("int4_wo",)  # int4 weights with 16-bit math: no format of these tables
_PLACES = (
    ".",
    "data",
    "systems/data",
    "aiconfigurator_core/systems/data",
    "aic-core/src/aiconfigurator_core/systems/data",
    "src/aiconfigurator/systems/data",
)


def import_aiconfigurator(
    source: str | os.PathLike[str] | None = None,
    systems: Iterable[str] | str | None = None,
    tables: Iterable[str] | str | None = None,
    versions: Iterable[str] = VLLM_VERSIONS,
) -> dict[str, pd.DataFrame]:
    """Tidy tables of the vLLM (and NCCL) measurements.

    Every row of the source is kept but those in formats with int4 weights; latent attention
    measured with two softmax formats gives two rows with the same keys.

    Args:
        source: a checkout of the repository, or a folder inside it; by default the installed
            package `aiconfigurator-core`.
        systems: names in `SYSTEMS`, or our device names; all by default.
        tables: names in `TABLES`, with or without "operators/" and "blocks/"; by default all that
            the source has.
        versions: vLLM versions; for collectives the newest one counts, whichever it is.

    Returns:
        Table name to frame, with the columns of `tables.COLUMNS`.

    Raises:
        ValueError: no data at `source`, an unknown name, nothing measured for what was asked, a
            damaged file, missing columns, a time that is not positive.
    """
    root = _data_folder(source)
    asked_systems = _systems(systems)
    asked_tables = chosen(tables, TABLES, "table", short=True)
    asked_versions = tuple(versions)
    parts: dict[str, list[pd.DataFrame]] = {}
    for spec in _SOURCES:
        if spec.table not in asked_tables:
            continue
        for system in asked_systems:
            for version, path in _files(root, system, spec, asked_versions):
                frame = _rows(path, spec, SYSTEMS[system], f"{spec.framework}-{version}")
                if len(frame):
                    parts.setdefault(spec.table, []).append(frame)
    empty = [name for name in asked_tables if name not in parts]
    if empty and (tables is not None or len(empty) == len(asked_tables)):
        raise ValueError(
            f"{str(root)!r} has no measurements of {', '.join(empty)} on "
            f"{', '.join(asked_systems)} with vLLM {', '.join(asked_versions)}."
        )
    return {name: concat(parts[name]) for name in asked_tables if name in parts}


def _systems(systems: Iterable[str] | str | None) -> list[str]:
    by_device = {device: system for system, device in SYSTEMS.items()}
    if systems is not None:
        names = [systems] if isinstance(systems, str) else list(systems)
        systems = [by_device.get(name, name) for name in names]
    return chosen(systems, tuple(SYSTEMS), "system")


def _data_folder(source: str | os.PathLike[str] | None) -> Path:
    """The folder that holds one folder per system."""
    if source is None:
        spec = importlib.util.find_spec("aiconfigurator_core")
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                "The package aiconfigurator-core is not installed; install it, or give the path "
                "of a checkout of ai-dynamo/aiconfigurator."
            )
        base = Path(next(iter(spec.submodule_search_locations)))
    else:
        base = existing_folder(source, "The aiconfigurator source")
    for place in _PLACES:
        folder = base / place
        if any((folder / system).is_dir() for system in SYSTEMS):
            return folder
    raise ValueError(
        f"{str(base)!r} holds no aiconfigurator measurements (no folder systems/data with "
        f"{', '.join(SYSTEMS)})."
    )


def _files(
    root: Path, system: str, spec: _Source, versions: tuple[str, ...]
) -> list[tuple[str, Path]]:
    """(version, file) of every measured version, each once; Parquet before text."""
    found: dict[str, Path] = {}
    for suffix in (".parquet", ".txt", ".csv"):
        for path in sorted((root / system).rglob(spec.file + suffix)):
            version, framework = path.parent.name, path.parent.parent.name
            if framework == spec.framework:
                found.setdefault(version, path)
    if spec.newest_only:
        ordered = sorted(found, key=_version_key)
        return [(ordered[-1], found[ordered[-1]])] if ordered else []
    return [(version, found[version]) for version in versions if version in found]


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else -1 for part in version.split("."))


def _rows(path: Path, spec: _Source, device: str, runtime: str) -> pd.DataFrame:
    source = read_table(path)
    if spec.table.startswith("blocks/attention") and "window_size" not in source:
        source["window_size"] = 0  # before vLLM 0.22: full attention only
    needed = [*spec.text.values(), *spec.whole.values(), "latency"]
    tokens_before = "context_len" in spec.whole
    require_columns(source, needed + (["isl"] if tokens_before else []), path)
    source = source[~source[spec.text.get("dtype", "kernel_source")].isin(_DROPPED_DTYPES)]
    source = source.reset_index(drop=True)
    require_texts(source, spec.text.values(), path)
    frame = pd.DataFrame({ours: source[theirs].astype("str") for ours, theirs in spec.text.items()})
    for ours, theirs in spec.whole.items():
        frame[ours] = source[theirs]
    whole_numbers(frame, spec.whole, path)
    for name, value in spec.constants.items():
        frame[name] = value
    if tokens_before:  # cached tokens plus the new ones
        whole_numbers(source, ["isl"], path)
        frame["context_len"] += source["isl"].to_numpy()
    if spec.table == "operators/collectives":
        frame["message_bytes"] *= _element_bytes(frame["dtype"], path)
    frame["time_s"] = seconds(source["latency"], _MS, path)
    if "power" in source:
        frame["power_w"] = _watts(source["power"], path)
        if "power_limit" in source:
            frame["power_limit_w"] = _watts(source["power_limit"], path)
    return finish(frame.assign(device=device, runtime=runtime), spec.table)


def _element_bytes(dtype: pd.Series, path: Path) -> np.ndarray:
    """Bytes of an element; the source counts a message in elements."""
    unknown = sorted(set(dtype) - set(_BYTES))
    if unknown:
        raise ValueError(f"{str(path)!r}: the element size of {unknown[0]!r} is not known.")
    return dtype.map(_BYTES).to_numpy()


def _watts(values: pd.Series, path: Path) -> np.ndarray:
    """Powers as given; one that was not measured (missing or 0) is NaN."""
    watts = numbers(values, texts=True)
    watts = np.where(watts == 0, np.nan, watts)
    if np.any((watts < 0) | (watts > 1e4)):
        raise ValueError(f"{str(path)!r}: {values.name} must lie between 0 and 10000 W.")
    return watts
