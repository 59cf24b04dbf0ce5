"""A measured machine as the folder of its profile holds it: facts, rows, work of every row.

`hymell_jax.profiler.schema` says what the folder holds. Rows that were disturbed while they were
measured are left out where enough others are there.

A machine drifts (its clock, its neighbours on the same host). Operators and blocks are measured in
random order, so that drift is noise that averages out; the passes of a model follow one another, so
that it would be an error of the whole model. Times of whole models are therefore those at the
median speed: `time_s` is the measured time, `raw_s`, over the ratio of the anchor around it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hymell_jax import data, devices
from hymell_jax.files import read_json
from hymell_jax.types import DTYPES

MANIFEST = "manifest.json"
DEVICE = "device.json"
ENOUGH = 0.6  # share of a table's rows that must be undisturbed for the others to be left out

TABLES = (
    "operators/gemm", "operators/rmsnorm", "operators/softmax", "operators/layernorm",
    "operators/elementwise", "blocks/attention_prefill", "blocks/attention_decode", "blocks/ffn",
    "blocks/moe", "blocks/mla", "systems/transformers",
)  # fmt: skip
"""What is fitted of a profile."""

SEVERAL_KERNELS = ("operators/rmsnorm", "operators/elementwise")
"""Row-wise tables whose kernels are fitted apart."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """One measured machine."""

    folder: Path
    description: Mapping[str, Any] | str  # content of device.json, or the name of a known device
    manifest: Mapping[str, Any]
    runtime: str
    dtype: str  # a key of `types.DTYPES`

    @property
    def name(self) -> str:
        """Exact name of the device."""
        return devices.get_device(self.description).name

    @property
    def element_bytes(self) -> float:
        """Bytes of a number in the format that was measured."""
        return DTYPES[self.dtype]

    def rows(self, table: str) -> pd.DataFrame:
        """Rows of a table; empty where it was not measured."""
        return _rows(self.folder, table, self.runtime, data.DTYPE_NAMES[self.dtype][0])

    def digest(self, *tables: str) -> str:
        """SHA-256 of tables, those missing counted as empty: has anything new been measured?"""
        found = hashlib.sha256()
        for table in tables:
            path = self.folder / f"{table}.parquet"
            found.update(table.encode() + (path.read_bytes() if path.is_file() else b""))
        return found.hexdigest()


def is_profile(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder of tables is the profile of a machine."""
    return (Path(folder) / MANIFEST).is_file()


def read_profile(folder: str | os.PathLike[str]) -> Profile:
    """The profile in a folder.

    Raises:
        ValueError: no profile, a description that cannot be used, no matrix products, or rows of
            several runtimes or formats.
    """
    root = Path(folder)
    if not is_profile(root):
        raise ValueError(
            f"{str(folder)!r} is no profile: it lacks {MANIFEST}. `hymell profile` makes one."
        )
    manifest = read_json(root / MANIFEST, "manifest")
    own = root / DEVICE
    description = read_json(own, "device file") if own.is_file() else str(manifest.get("device"))
    name = devices.get_device(description).name
    frame = data.read_table(root, "operators/gemm", device=name)
    kinds = frame[["runtime", "dtype"]].drop_duplicates()
    formats = [d for d in DTYPES if data.table_dtype(frame, d)] if len(frame) else []
    if len(kinds) != 1 or len(formats) != 1:
        shown = "; ".join(" ".join(row) for row in kinds.itertuples(index=False)) or "none"
        raise ValueError(
            f"A profile holds matrix products of {name} in one runtime and one of the formats "
            f"{', '.join(v[0] for v in data.DTYPE_NAMES.values())}; got {shown}."
        )
    return Profile(root, description, manifest, str(kinds["runtime"].iloc[0]), formats[0])


@functools.lru_cache(maxsize=32)
def _rows(folder: Path, table: str, runtime: str, dtype: str) -> pd.DataFrame:
    if not data.has_table(folder, table):
        return pd.DataFrame()
    frame = data.read_table(folder, table, runtime=runtime, dtype=dtype)
    drifts = table.startswith("systems/") and "anchor_ratio" in frame
    ratio = frame["anchor_ratio"].fillna(1.0) if drifts else 1.0
    frame = frame.assign(raw_s=frame["time_s"], time_s=frame["time_s"] / ratio)
    calm = ~frame["disturbed"].astype(bool)
    if calm.mean() >= ENOUGH:
        frame = frame[calm]
    return frame.reset_index(drop=True)


def groups(table: str, frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(kernel, rows) of what is fitted together in a row-wise table."""
    if frame.empty:
        return []
    if table not in SEVERAL_KERNELS:
        return [("", frame)]
    return [(str(kernel), rows) for kernel, rows in frame.groupby("kernel")]


def work(table: str, frame: pd.DataFrame, element: float) -> tuple[np.ndarray, np.ndarray]:
    """(FLOPs [n_rows], least bytes moved [n_rows]) of measured operators and blocks.

    Weights and inputs are read once and results written once; scores of attention stay on the
    chip. What a routed layer reads is what its tokens touch.

    Raises:
        ValueError: a table without such a count.
    """
    c = {name: frame[name].to_numpy(np.float64) for name in frame.select_dtypes("number")}
    if table not in _WORK:
        raise ValueError(f"There is no count of work for {table}; known: {', '.join(_WORK)}.")
    flops, values = _WORK[table](c)
    return flops, values * element


def _gemm(c):
    m, n, k = c["m"], c["n"], c["k"]
    return 2.0 * m * n * k, m * k + n * k + m * n


def _rowwise(rows: str, cols: str, flops: float):
    def count(c):
        elements = c[rows] * c[cols]
        moved = c.get("tensors_read", 1.0) + c.get("tensors_written", 1.0)
        return flops * elements, moved * elements

    return count


def _attention(tokens: str, prefill: bool):
    def count(c):
        pairs = c[tokens] * (c[tokens] + 1.0) / 2.0 if prefill else c[tokens]
        queries = c[tokens] if prefill else 1.0
        heads, width = c["n_heads"], c["head_dim"]
        values = 2.0 * c["batch"] * width * (queries * heads + c[tokens] * c["n_kv_heads"])
        return 4.0 * c["batch"] * heads * width * pairs, values

    return count


def _ffn(c):
    m, d, width, n = c["num_tokens"], c["d_model"], c["d_ff"], c["n_ff_matrices"]
    return 2.0 * m * n * d * width, n * d * width + m * (2.0 * d + 2.0 * n * width)


def _moe(c):
    m, d, width = c["num_tokens"], c["d_model"], c["d_expert"]
    experts, top_k = c["n_experts"], c["top_k"]
    touched = experts * -np.expm1(m * np.log1p(-np.minimum(top_k / experts, 1.0 - 1e-7)))
    rows = m * top_k
    return 6.0 * rows * d * width, touched * 3.0 * d * width + rows * (2.0 * d + 6.0 * width)


def _mla(c):
    """Keys and values are expanded for every token of the context, as the library runs it."""
    rows, heads = c["batch"] * c["seq_len"], c["n_heads"]
    plain = c["head_dim"] - c["rope_head_dim"]
    up = heads * c["kv_lora_rank"] * (plain + c["value_head_dim"])
    weights = (
        c["q_lora_rank"] * (c["d_model"] + heads * c["head_dim"])
        + c["d_model"] * (c["kv_lora_rank"] + c["rope_head_dim"])
        + heads * c["value_head_dim"] * c["d_model"]
    )
    context = c["batch"] * c["context_len"]
    prefill = c["seq_len"] > 1
    pairs = np.where(prefill, rows * (c["seq_len"] + 1.0) / 2.0, context)
    width = c["head_dim"] + c["value_head_dim"]
    flops = 2.0 * (rows * weights + rows * up + pairs * heads * width)
    return flops, weights + up + context * heads * width + 2.0 * rows * c["d_model"]


_WORK = {
    "operators/gemm": _gemm,
    "operators/rmsnorm": _rowwise("num_tokens", "d_model", 4.0),
    "operators/softmax": _rowwise("rows", "cols", 5.0),
    "operators/layernorm": _rowwise("rows", "cols", 6.0),
    "operators/elementwise": _rowwise("num_tokens", "width", 4.0),
    "blocks/attention_prefill": _attention("seq_len", True),
    "blocks/attention_decode": _attention("context_len", False),
    "blocks/ffn": _ffn,
    "blocks/moe": _moe,
    "blocks/mla": _mla,
}
"""Table: (FLOPs, numbers moved) of its columns."""
