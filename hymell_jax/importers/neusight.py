"""Softmax and LayerNorm times on seven GPUs from NeuSight (MIT, sitar-lab/NeuSight).

A checkout holds `scripts/asplos/data/dataset/{train,test}/{softmax,ln}.csv` with the columns
Latency (milliseconds), Device (the driver's name), B (rows), H (columns of the normalised axis) and
more, all in float32 under PyTorch 2.1.0. Its own test set is kept as ours: larger shapes, and GPUs
that its training set lacks.
"""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd

from .tables import existing_folder, finish, read_table, require_columns, seconds, whole_numbers

GPUS: dict[str, str] = {
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA L4": "l4-24gb",
    "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
    "Tesla P4": "p4-8gb",
    "Tesla T4": "t4-16gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
}
"""The driver's names, and our device names; rows of other GPUs are left out."""

TABLES: dict[str, str] = {"operators/softmax": "softmax", "operators/layernorm": "ln"}

_MS = 1e-3


def import_neusight(path: str | os.PathLike[str]) -> dict[str, pd.DataFrame]:
    """Tidy tables "operators/softmax" and "operators/layernorm".

    Args:
        path: a checkout of the repository, or a folder inside it down to `dataset`.

    Raises:
        ValueError: no data set at `path`, a damaged file, missing columns, a time that is not
            positive.
    """
    root = _dataset(existing_folder(path, "The NeuSight checkout"))
    tables = {}
    for table, name in TABLES.items():
        files = [(split, root / split / f"{name}.csv") for split in ("train", "test")]
        frames = [_rows(file, split) for split, file in files if file.is_file()]
        if frames:
            rows = pd.concat(frames, ignore_index=True)
            tables[table] = finish(rows, table, rows["upstream_split"].to_numpy())
    return tables


def _dataset(base: Path) -> Path:
    for place in ("scripts/asplos/data/dataset", "data/dataset", "dataset", "."):
        root = base / place
        names = [f"{split}/{name}.csv" for split in ("train", "test") for name in TABLES.values()]
        if any((root / name).is_file() for name in names):
            return root
    raise ValueError(
        f"{str(base)!r} holds no NeuSight data set "
        "(scripts/asplos/data/dataset/{train,test}/{softmax,ln}.csv)."
    )


def _rows(file: Path, split: str) -> pd.DataFrame:
    source = read_table(file)
    require_columns(source, ("Latency", "Device", "B", "H"), file)
    source = source[source["Device"].isin(GPUS)].reset_index(drop=True)
    frame = pd.DataFrame({"rows": source["B"], "cols": source["H"]})
    whole_numbers(frame, ("rows", "cols"), file)
    frame["time_s"] = seconds(source["Latency"], _MS, file)
    # A shape that was measured more than once gives one row, the median.
    frame = frame.assign(device=source["Device"].map(GPUS))
    frame = frame.groupby(["device", "rows", "cols"], as_index=False)["time_s"].median()
    return frame.assign(runtime="pytorch-2.1.0", dtype="float32", upstream_split=split)
