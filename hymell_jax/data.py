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

from hymell_jax.types import printable, reason

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

LARGEST_SIZE = 1e12
"""Of such a column: products of three stay within float32."""

TEXTS = {
    "device", "runtime", "dtype", "kv_dtype", "kernel", "collective", "model", "split",
}  # fmt: skip
"""Columns that hold texts."""

LONGEST_S, MOST_W = 1e3, 1e4
"""Of a kernel and of a board: more means that the table is in other units."""

ENERGY_TOLERANCE = 0.02  # of joules against watts times seconds

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
        raise ValueError("Reading Parquet needs pyarrow: install the extra `data`.") from error
    except Exception as error:
        raise ValueError(f"{path.name} cannot be read as a table: {reason(error)}.") from error
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise ValueError(f"{path.name} has the column {printable(str(twice[0]))!r} twice.")
    missing = [column for column in TABLES.get(table, ()) if column not in frame]
    if missing:
        raise ValueError(f"{path.name} lacks the columns {', '.join(missing)}.")
    whole_models = table.startswith("systems/")
    for column in TEXTS & set(TABLES.get(table, ())):
        _check_texts(frame[column], path.name)
        if column == "split" and not frame[column].isin(["train", "test"]).all():
            raise ValueError(f"{path.name}: split must be train or test in every row.")
    if "time_s" in frame:
        times = numbers(frame["time_s"])
        bad = int((~((times > 0) & (times < (np.inf if whole_models else LONGEST_S)))).sum())
        if bad:
            raise ValueError(f"{path.name}: time_s must be positive seconds; {bad} rows are not.")
    for column in SIZES & set(frame.columns):
        sizes = numbers(frame[column])
        if whole_models:  # a pass has a prompt or a context, not both
            sizes = sizes[frame[column].notna()]
        bad = int((~(np.isfinite(sizes) & (sizes > 0))).sum())
        if bad:
            raise ValueError(f"{path.name}: {column} must be positive; {bad} rows are not.")
        bad = int((sizes > LARGEST_SIZE).sum())
        if bad:
            raise ValueError(
                f"{path.name}: {column} must be at most {LARGEST_SIZE:g}; {bad} rows are not."
            )
    if not whole_models and {"time_s", "power_w", "energy_j"} <= set(frame.columns):
        time_s, power_w, energy_j = (numbers(frame[x]) for x in ("time_s", "power_w", "energy_j"))
        _check_energy(time_s, power_w, energy_j, path)
    for column in frame.select_dtypes("category"):
        frame[column] = frame[column].astype(str)
    return frame


def numbers(column: pd.Series, texts: bool = False) -> np.ndarray:
    """A column as float64 [n], NaN where it holds no number; truth values and dates are none.

    Args:
        column: of single values.
        texts: whether a text such as "0.5" is a number, as in files of texts.
    """
    kind = column.dtype
    if texts and (pd.api.types.is_object_dtype(kind) or pd.api.types.is_string_dtype(kind)):
        return pd.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    if pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind):
        return column.to_numpy(np.float64, na_value=np.nan)
    return np.full(len(column), np.nan)


def _check_texts(column: pd.Series, name: str) -> None:
    categorical = isinstance(column.dtype, pd.CategoricalDtype)
    values = column.cat.categories if categorical else column
    sound = pd.api.types.infer_dtype(values, skipna=False) in ("string", "empty")
    if not sound or column.isna().any():
        raise ValueError(f"{name}: {column.name} must be a text in every row.")


def _check_energy(
    time_s: np.ndarray, power_w: np.ndarray, energy_j: np.ndarray, path: Path
) -> None:
    """Refuse watts and joules that cannot be of these seconds; NaN where they were not measured."""
    bad = int(((power_w <= 0) | (power_w > MOST_W)).sum())
    off = np.abs(energy_j - power_w * time_s) > ENERGY_TOLERANCE * np.abs(energy_j)
    if bad or off.any():
        raise ValueError(
            f"{path.name}: power_w must be positive watts, and energy_j joules, watts times "
            f"seconds; {bad + int(off.sum())} rows are not."
        )


def table_dtype(frame: pd.DataFrame, dtype: str) -> str | None:
    """The preferred name of a compute format among the rows, None if it has none."""
    present = set(frame["dtype"].unique())
    return next((name for name in DTYPE_NAMES[dtype] if name in present), None)


class NoRows(ValueError):
    """A table holds no rows of a device, runtime and compute format."""


def gemm_rows(folder: Path, device: str, runtime: str, dtype: str) -> pd.DataFrame:
    """Rows of operators/gemm of one device, runtime and compute format.

    Raises:
        NoRows: there are none; the message lists what there is.
    """
    frame = read_table(folder, "operators/gemm", device=device, runtime=runtime)
    name = table_dtype(frame, dtype) if len(frame) else None
    if name is None:
        every = read_table(folder, "operators/gemm")
        known = every[["device", "runtime", "dtype"]].drop_duplicates().sort_values("device")
        shown = "; ".join(" ".join(row) for row in known.itertuples(index=False)) or "none at all"
        raise NoRows(f"No gemm rows for {device}, {runtime}, {dtype}. There are: {shown}.")
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
