"""What the importers share: table layouts, the train/test rule, checks, and writing Parquet.

A table is named by its place, such as "operators/gemm" or "blocks/moe". Times are seconds, powers
watts, energies joules.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ..data import SIZES, numbers
from ..files import write_whole
from ..types import reason, shown

TEST_PERCENT = 15
"""A group is for testing when the CRC-32 of its key, modulo 100, is below this."""

_ENERGY = ("time_s", "power_w", "power_limit_w", "energy_j", "split")
COLUMNS: dict[str, tuple[str, ...]] = {
    "operators/gemm": ("device", "runtime", "dtype", "m", "n", "k", *_ENERGY),
    "operators/rmsnorm": (
        *("device", "runtime", "dtype", "kernel", "d_model", "num_tokens", "time_s", "split"),
    ),
    "operators/softmax": (
        *("device", "runtime", "dtype", "rows", "cols", "upstream_split", "time_s", "split"),
    ),
    "operators/layernorm": (
        *("device", "runtime", "dtype", "rows", "cols", "upstream_split", "time_s", "split"),
    ),
    "operators/collectives": (
        *("device", "runtime", "kernel", "collective", "dtype", "num_gpus", "message_bytes"),
        *("time_s", "split"),
    ),
    "blocks/attention_prefill": (
        *("device", "runtime", "dtype", "kv_dtype", "batch", "seq_len"),
        *("n_heads", "n_kv_heads", "head_dim", "window_size", *_ENERGY),
    ),
    "blocks/attention_decode": (
        *("device", "runtime", "dtype", "kv_dtype", "batch", "context_len"),
        *("n_heads", "n_kv_heads", "head_dim", "window_size", *_ENERGY),
    ),
    "blocks/moe": (
        *("device", "runtime", "dtype", "kernel", "num_tokens", "d_model", "d_expert", "top_k"),
        *("n_experts", "moe_tp_size", "moe_ep_size", "distribution", *_ENERGY),
    ),
    "blocks/linear_attention": (
        *("device", "runtime", "kernel", "phase", "batch", "seq_len", "num_tokens", "d_model"),
        *("d_conv", "num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim", *_ENERGY),
    ),
    "blocks/mla": (
        *("device", "runtime", "phase", "model", "dtype", "kv_dtype"),
        *("batch", "seq_len", "context_len", "n_heads", *_ENERGY),
    ),
    "blocks/layer_parts_vidur": (
        *("device", "runtime", "model", "dtype", "num_tokens", "tensor_parallel", "n_heads"),
        *("n_kv_heads", "d_model", "d_ff", "vocab_size", "gated_ffn", "emb_s"),
        *("input_layernorm_s", "attn_pre_proj_s", "attn_rope_s", "attn_post_proj_s"),
        *("post_attention_layernorm_s", "mlp_up_proj_s", "mlp_act_s", "mlp_down_proj_s", "add_s"),
        "split",
    ),
    "blocks/layer_parts_transformers": (
        *("device", "runtime", "model", "dtype", "part", "num_tokens", "time_s", "d_model"),
        *("n_heads", "n_kv_heads", "d_ff", "vocab_size", "n_experts", "top_k", "split"),
    ),
}
"""The columns of every table, in order."""

GROUPS: dict[str, tuple[str, ...]] = {
    "operators/gemm": ("n", "k"),
    "operators/rmsnorm": ("d_model", "num_tokens"),
    "operators/collectives": ("message_bytes", "num_gpus"),
    "blocks/attention_prefill": ("n_heads", "n_kv_heads", "head_dim"),
    "blocks/attention_decode": ("n_heads", "n_kv_heads", "head_dim"),
    "blocks/moe": ("d_model", "d_expert", "top_k", "n_experts"),
    "blocks/linear_attention": ("d_model", "num_v_heads"),
    "blocks/mla": ("n_heads",),
}
"""The columns that make a group: rows that agree in them are all for training or all for testing.

The other tables have rules of their own, stated in their importers.
"""


def hash_split(frame: pd.DataFrame, group: Sequence[str]) -> np.ndarray:
    """ "train" or "test" for every row, by whole groups; a string array of shape [n_rows].

    A group's key is its values joined by "|", such as "4096|12288"; it is for testing when
    crc32(key) mod 100 < `TEST_PERCENT`. This depends on the shape alone, so that a shape stays on
    its side whatever the device, the runtime or the order of the rows.
    """
    unique = frame[list(group)].drop_duplicates()
    keys = ["|".join(str(value) for value in row) for row in unique.itertuples(index=False)]
    unique = unique.assign(
        split=["test" if zlib.crc32(k.encode()) % 100 < TEST_PERCENT else "train" for k in keys]
    )
    return frame[list(group)].merge(unique, on=list(group), how="left")["split"].to_numpy()


def finish(frame: pd.DataFrame, table: str, split: np.ndarray | None = None) -> pd.DataFrame:
    """The frame as a tidy table: split added, columns in order, compact types, rows numbered.

    Args:
        frame: every column of the table except "split"; power columns may be missing.
        table: a name in `COLUMNS`.
        split: "train" or "test" by row; by default `hash_split` over `GROUPS[table]`.
    """
    frame = frame.copy()
    for name in COLUMNS[table]:
        if name not in frame and name in ("power_w", "power_limit_w"):
            frame[name] = np.nan
    if "energy_j" in COLUMNS[table]:
        frame["energy_j"] = frame["power_w"] * frame["time_s"]
    frame["split"] = hash_split(frame, GROUPS[table]) if split is None else split
    frame = frame.loc[:, list(COLUMNS[table])].reset_index(drop=True)
    for name in frame.columns:
        kind = frame[name].dtype
        if pd.api.types.is_bool_dtype(kind) or isinstance(kind, pd.CategoricalDtype):
            continue
        if pd.api.types.is_integer_dtype(kind):
            fits = frame[name].abs().max() < 2**31 if len(frame) else True
            frame[name] = frame[name].astype("int32" if fits else "int64")
        elif pd.api.types.is_float_dtype(kind):
            frame[name] = frame[name].astype("float32")
        else:
            frame[name] = frame[name].astype("category")
    return frame


def finish_with_norms(
    parts: pd.DataFrame, table: str, split: np.ndarray, norms: pd.DataFrame
) -> dict[str, pd.DataFrame]:
    """Layer parts under their table's name, and RMSNorm rows split by their shape, if any."""
    tables = {table: finish(parts, table, split)}
    if len(norms):
        tables["operators/rmsnorm"] = finish(
            norms, "operators/rmsnorm", hash_split(norms, ("d_model", "num_tokens"))
        )
    return tables


def concat(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """The rows of all frames; text columns become categories over the union of their values."""
    frames = list(frames)
    if len(frames) == 1:
        return frames[0]
    names = [n for n, kind in frames[0].dtypes.items() if isinstance(kind, pd.CategoricalDtype)]
    plain = [frame.astype({name: "str" for name in names}) for frame in frames]
    return pd.concat(plain, ignore_index=True).astype({name: "category" for name in names})


def merge_tables(*sources: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The tables of several sources; those of one name ("operators/rmsnorm") are joined."""
    parts: dict[str, list[pd.DataFrame]] = {}
    for tables in sources:
        for name, frame in tables.items():
            parts.setdefault(name, []).append(frame)
    return {name: concat(frames) for name, frames in parts.items()}


def require_columns(frame: pd.DataFrame, names: Iterable[str], path: object) -> None:
    """Raises ValueError, naming the file, where a column is missing."""
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise ValueError(f"{str(path)!r} lacks the columns {', '.join(missing)}.")


def require_texts(frame: pd.DataFrame, names: Iterable[str], path: object) -> None:
    """Raises ValueError, naming the file, where a row lacks a text."""
    for name in names:
        if frame[name].isna().any():
            row = int(np.flatnonzero(frame[name].isna())[0])
            raise ValueError(f"{str(path)!r}: {name} is missing in row {row}.")


def whole_numbers(frame: pd.DataFrame, names: Iterable[str], path: object) -> None:
    """Turn columns into int64 in place.

    Raises:
        ValueError: a value that is not a whole number between 0, or 1 for a size, and 2**31 - 1.
    """
    for name in names:
        values = numbers(frame[name], texts=True)
        values = np.where(np.isfinite(values), values, -1.0)
        least = 1 if name in SIZES - {"context_len"} else 0
        bad = ~((values >= least) & (values < 2**31) & (values % 1 == 0))
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise ValueError(
                f"{str(path)!r}: {name} must hold whole numbers from {least} and below 2**31; "
                f"got {shown(frame[name].iloc[row])} in row {row}."
            )
        frame[name] = values.astype("int64")


def seconds(values: pd.Series, unit_s: float, path: object, longest_s: float = 1e3) -> np.ndarray:
    """Times in seconds, float64 of shape [n_rows].

    Args:
        values: the source's times.
        unit_s: seconds in one unit of the source, 1e-3 for milliseconds.
        path: the file, for messages.
        longest_s: a longer time means that the unit is not the expected one.

    Raises:
        ValueError: a time that is not a number, not positive, or implausibly long.
    """
    times = numbers(values, texts=True) * unit_s
    bad = ~((times > 0) & (times < longest_s))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"{str(path)!r}: {values.name} must be positive times in units of {unit_s:g} s, "
            f"below {longest_s:g} s; got {shown(values.iloc[row])} in row {row}."
        )
    return times


def existing_folder(path: str | os.PathLike[str], what: str) -> Path:
    """The path as a `Path`.

    Raises:
        ValueError: it is not a folder.
    """
    folder = Path(path).expanduser()
    try:
        present = folder.is_dir()
    except (OSError, ValueError):
        present = False
    if not present:
        raise ValueError(f"{what} must be an existing folder; got {str(path)!r}.")
    return folder


def read_table(path: Path) -> pd.DataFrame:
    """One source file, Parquet or comma-separated text with a header row.

    Raises:
        ValueError: unreadable, empty, damaged, or a Git LFS pointer instead of the data.
    """
    try:
        with open(path, "rb") as stream:
            start = stream.read(64)
        if start.startswith(b"version https://git-lfs"):
            raise ValueError(
                f"{str(path)!r} is a Git LFS pointer; run `git lfs pull` in the checkout first."
            )
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except ImportError:
        raise ValueError("Reading Parquet needs pyarrow; install pyarrow.") from None
    except OSError as error:
        said = error.strerror or reason(error)
        raise ValueError(f"{str(path)!r} cannot be read: {said}.") from None
    except Exception as error:  # readers of files raise errors of many libraries
        if "Git LFS" in str(error):
            raise
        raise ValueError(f"{str(path)!r} cannot be read: {reason(error)}.") from None
    if not len(frame):
        raise ValueError(f"{str(path)!r} holds no rows.")
    twice = frame.columns[frame.columns.duplicated()]
    objects = [] if len(twice) else [name for name in frame if frame[name].dtype == object]
    bad = [*twice, *(name for name in objects if frame[name].map(_is_nested).any())]
    if bad:
        raise ValueError(
            f"{str(path)!r}: the column {shown(str(bad[0]))} must be there once and hold single "
            "values."
        )
    return frame


def _is_nested(value: object) -> bool:
    return isinstance(value, list | dict | np.ndarray)


def chosen(
    names: Iterable[str] | str | None, known: Sequence[str], what: str, *, short: bool = False
) -> list[str]:
    """The asked names, all of `known` by default.

    Args:
        names: one name or several.
        known: what there is.
        what: "table" or "system", for messages.
        short: whether the part after "/" is enough.

    Raises:
        ValueError: a name that is not known, or none at all.
    """
    if names is None:
        return list(known)
    result = []
    for name in [names] if isinstance(names, str) else list(names):
        hits = [k for k in known if name == k or (short and name == k.split("/")[-1])]
        if not hits:
            raise ValueError(f"Unknown {what} {name!r}; there are {', '.join(known)}.")
        result += [k for k in hits if k not in result]
    if not result:
        raise ValueError(f"Name at least one {what}; there are {', '.join(known)}.")
    return result


def write_tables(
    tables: dict[str, pd.DataFrame], out_dir: str | os.PathLike[str]
) -> dict[str, Path]:
    """Write every table as `<out_dir>/<name>.parquet`, each file whole or not at all.

    Args:
        tables: name to frame, as the importers return them.
        out_dir: created where missing.

    Returns:
        name to the path written.

    Raises:
        ValueError: a name that leaves the folder, a folder that cannot be created, a file that
            cannot be written.
    """
    written = {}
    for name, frame in tables.items():
        parts = str(name).split("/")
        if not all(part.replace("_", "").replace("-", "").isalnum() for part in parts):
            raise ValueError(f"A table's name must be words joined by '/'; got {name!r}.")
        path = Path(out_dir).expanduser().joinpath(*parts[:-1], f"{parts[-1]}.parquet")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"Cannot create the folder {str(path.parent)!r}: {error.strerror}."
            ) from None
        buffer = io.BytesIO()
        try:
            frame.to_parquet(buffer, index=False, compression="zstd")
        except ImportError:
            raise ValueError("Writing Parquet needs pyarrow; install pyarrow.") from None
        write_whole(path, buffer.getvalue())
        written[name] = path
    return written
