"""Level 3 from the public tables and a folder of checkpoints: `hymell fit --level 3`.

The blocks of every measured model take longest. They are kept by device inside the folder, named by
what they were made from, so that a run that was interrupted goes on where it stopped; the file of
level 3 is written at the end, whole, and then they are removed.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from hymell_jax import checkpoint, data, system_recipes, system_rows, system_store, systems
from hymell_jax.attention import ATTENTION_PHASES
from hymell_jax.files import write_whole
from hymell_jax.fit import Progress
from hymell_jax.serving import Blocks

ENGINES = ("vllm-0.11.1", "transformers-eager", "tensorrt-llm-2024", "vllm-2024", "vllm-2023")
"""Engines with models enough to leave one out."""

PARTS = "parts"
FIELDS = tuple(Blocks.__dataclass_fields__)


def fit_systems(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    engines: tuple[str, ...] = ENGINES,
    seeds: tuple[int, ...] = system_recipes.SEEDS,
    progress: Progress | None = None,
) -> Path:
    """Fit level 3 to every measured system, on the lower levels in `out`; returns its path.

    Args:
        folder: of measured tables.
        out: folder of checkpoints; holds those of every device with measured products.
        engines: which to fit.
        seeds: one a network of the ensemble.
        progress: called with (what, done, total).

    Raises:
        ValueError: no measured systems, or a device without its checkpoints.
    """
    root = data.data_folder(folder)
    rows, unmapped = systems.read_systems(root)
    rows = rows[rows["engine"].isin(engines)].reset_index(drop=True)
    if rows.empty:
        raise ValueError(f"No measured systems of {', '.join(engines)} in {str(folder)!r}.")
    _require_checkpoints(root, out)
    costs = _block_costs(rows, Path(out), progress)
    problems = [
        system_rows.problem(engine, rows, costs)
        for engine in engines
        if (rows["engine"] == engine).any()
    ]
    content, _ = system_recipes.fit_level3(problems, unmapped, seeds=seeds, progress=progress)
    path = system_store.save(content, out)
    shutil.rmtree(path.parent / PARTS)
    return path


def _require_checkpoints(folder: Path, out: str | os.PathLike[str]) -> None:
    if not data.has_table(folder, "operators/gemm"):
        return
    measured = set(data.read_table(folder, "operators/gemm")["device"].unique())
    missing = sorted(measured - {device for device, _, _ in checkpoint.available(out)})
    if missing:
        raise ValueError(
            f"Level 3 rests on the checkpoints of all devices; {str(out)!r} lacks "
            f"{', '.join(missing)}: fit them first with --device all."
        )


def _block_costs(rows: pd.DataFrame, out: Path, progress: Progress | None):
    """`system_rows.block_costs` of all rows, made and kept device by device."""
    models = system_rows.shipped_models(str(out))
    places, found = [], []
    for device, part in rows.groupby("device"):
        path = out / system_store.FOLDER / PARTS / f"{device}-{_digest(part, out)[:16]}.npz"
        if path.is_file():
            with np.load(path, allow_pickle=False) as kept:
                costs = tuple(
                    Blocks(**{n: kept[f"{phase} {n}"] for n in FIELDS})
                    for phase in ATTENTION_PHASES
                )
        else:
            costs = system_rows.block_costs(part.reset_index(drop=True), models, progress)
            path.parent.mkdir(parents=True, exist_ok=True)
            leaves: dict[str, Any] = {
                f"{phase} {n}": np.asarray(getattr(one, n))
                for phase, one in zip(ATTENTION_PHASES, costs, strict=True)
                for n in FIELDS
            }
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **leaves)
            write_whole(path, buffer.getvalue())
        places.append(part.index.to_numpy())
        found.append(costs)
    order = np.argsort(np.concatenate(places))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[order], *found)


def _digest(rows: pd.DataFrame, out: Path) -> str:
    """SHA-256 of the rows and of every checkpoint that their blocks may come from."""
    found: Any = hashlib.sha256(rows.to_csv().encode())
    for entry in checkpoint.available(out):
        found.update((out / checkpoint.file_name(*entry)).read_bytes())
    return found.hexdigest()
