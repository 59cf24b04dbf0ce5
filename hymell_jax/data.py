"""Measured tables: reading, checking and selecting rows. The only module that knows their columns.

The folder is given by the caller (`--data DIR`, or the environment variable `HYMELL_DATA`); it
holds `operators/*.parquet`, `blocks/*.parquet` and `systems/*.parquet` in SI units, as the
importers write them.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd

DATA_VARIABLE = "HYMELL_DATA"

DTYPE_NAMES = {"bf16": ("bfloat16",), "fp8": ("fp8", "fp8_block"), "fp32": ("float32",)}
"""Names of a compute format in the tables, the preferred one first."""

TABLES: dict[str, tuple[str, ...]] = {  # table: columns that every row must have
    "operators/gemm": ("device", "runtime", "dtype", "m", "n", "k", "time_s", "split"),
    "operators/rmsnorm": ("device", "runtime", "dtype", "num_tokens", "d_model", "time_s", "split"),
    "operators/softmax": ("device", "runtime", "dtype", "rows", "cols", "time_s", "split"),
    "operators/layernorm": ("device", "runtime", "dtype", "rows", "cols", "time_s", "split"),
    "operators/collectives": (
        "device", "runtime", "kernel", "collective", "dtype", "num_gpus", "message_bytes", "time_s",
        "split",
    ),
    "blocks/attention_prefill": (
        "device", "runtime", "dtype", "kv_dtype", "batch", "seq_len", "n_heads", "n_kv_heads",
        "head_dim", "window_size", "time_s", "split",
    ),
    "blocks/attention_decode": (
        "device", "runtime", "dtype", "kv_dtype", "batch", "context_len", "n_heads", "n_kv_heads",
        "head_dim", "window_size", "time_s", "split",
    ),
    "blocks/layer_parts_vidur": ("device", "runtime", "model", "num_tokens", "d_model", "split"),
}  # fmt: skip

SIZES = {
    "m", "n", "k", "rows", "cols", "num_tokens", "d_model", "batch", "seq_len", "context_len",
    "n_heads", "n_kv_heads", "head_dim", "num_gpus", "message_bytes",
}  # fmt: skip
"""Columns that must be positive wherever they stand."""

SOURCES: dict[str, tuple[str, str]] = {  # runtime prefix: (source, licence)
    "vllm": ("NVIDIA aiconfigurator, ai-dynamo/aiconfigurator 095f58a5", "Apache-2.0"),
    "nccl": ("NVIDIA aiconfigurator, ai-dynamo/aiconfigurator 095f58a5", "Apache-2.0"),
    "vidur": ("Microsoft Vidur, microsoft/vidur 7d475133", "MIT"),
    "transformers-eager": ("LLMServingSim, casys-kaist/LLMServingSim 5daddb21", "MIT"),
    "pytorch": ("NeuSight, sitar-lab/NeuSight 6945927d", "MIT"),
}


def data_folder(given: str | os.PathLike[str] | None) -> Path:
    """The folder of measured tables: the argument, else the environment variable.

    Raises:
        ValueError: neither is given, or it is not a folder.
    """
    chosen = given or os.environ.get(DATA_VARIABLE)
    if not chosen:
        raise ValueError(
            f"No folder of measured tables: give --data DIR or set {DATA_VARIABLE}. "
            "`hymell import` makes one from public sources."
        )
    folder = Path(chosen)
    if not folder.is_dir():
        raise ValueError(f"The data folder {str(chosen)!r} is not a folder.")
    return folder


def has_table(folder: Path, table: str) -> bool:
    """Whether the folder holds a table."""
    return (folder / f"{table}.parquet").is_file()


def read_table(
    folder: str | os.PathLike[str],
    table: str,
    *,
    device: str | None = None,
    runtime: str | None = None,
    dtype: str | None = None,
) -> pd.DataFrame:
    """Rows of one table, checked; columns in SI units.

    Args:
        folder: of measured tables.
        table: "operators/gemm" and so on.
        device, runtime, dtype: keep these rows only; `dtype` as in the table.

    Raises:
        ValueError: the file is missing or not Parquet, a column is missing, or a time is not a
            positive finite number.
    """
    path = Path(folder) / f"{table}.parquet"
    if not path.is_file():
        raise ValueError(f"The data folder {str(folder)!r} has no table {table}.parquet.")
    filters = [
        (column, "==", value)
        for column, value in (("device", device), ("runtime", runtime), ("dtype", dtype))
        if value is not None
    ]
    try:
        frame = pd.read_parquet(path, filters=filters or None)
    except ImportError as error:
        raise ValueError(
            "Reading Parquet needs pyarrow: install the extra, `pip install hymell-jax[data]`."
        ) from error
    except Exception as error:
        raise ValueError(f"{path.name} cannot be read as a table: {_short(error)}") from error
    missing = [column for column in TABLES.get(table, ()) if column not in frame]
    if missing:
        raise ValueError(f"{path.name} lacks the columns {', '.join(missing)}.")
    if "time_s" in frame:
        times = pd.to_numeric(frame["time_s"], errors="coerce")
        bad = int((~(np.isfinite(times) & (times > 0))).sum())
        if bad:
            raise ValueError(f"{path.name}: time_s must be positive seconds; {bad} rows are not.")
    for column in SIZES & set(frame.columns):
        sizes = pd.to_numeric(frame[column], errors="coerce")
        if table.startswith("systems/"):  # a pass has a prompt or a context, not both
            sizes = sizes[frame[column].notna()]
        bad = int((~(np.isfinite(sizes) & (sizes > 0))).sum())
        if bad:
            raise ValueError(f"{path.name}: {column} must be positive; {bad} rows are not.")
    for column in frame.select_dtypes("category"):
        frame[column] = frame[column].astype(str)
    return frame


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def table_dtype(frame: pd.DataFrame, dtype: str) -> str | None:
    """The preferred name of a compute format among the rows, None if it has none."""
    present = set(frame["dtype"].unique())
    return next((name for name in DTYPE_NAMES[dtype] if name in present), None)


def gemm_rows(folder: Path, device: str, runtime: str, dtype: str) -> pd.DataFrame:
    """Rows of operators/gemm of one device, runtime and compute format.

    Raises:
        ValueError: there are none; the message lists what there is.
    """
    frame = read_table(folder, "operators/gemm", device=device, runtime=runtime)
    name = table_dtype(frame, dtype) if len(frame) else None
    if name is None:
        every = read_table(folder, "operators/gemm")
        known = every[["device", "runtime", "dtype"]].drop_duplicates().sort_values("device")
        shown = "; ".join(" ".join(row) for row in known.itertuples(index=False))
        raise ValueError(f"No gemm rows for {device}, {runtime}, {dtype}. There are: {shown}.")
    return frame[frame["dtype"] == name].reset_index(drop=True)


def columns(frame: pd.DataFrame, *names: str) -> tuple[np.ndarray, ...]:
    """Columns as float32 arrays [n_rows]."""
    return tuple(frame[name].to_numpy(np.float32) for name in names)


def source_of(runtime: str) -> tuple[str, str]:
    """(source, licence) of the rows of a runtime; the user's own where it is not a public one."""
    for prefix, source in SOURCES.items():
        if runtime.startswith(prefix):
            return source
    return ("measured by the user", "unspecified")
