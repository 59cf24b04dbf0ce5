"""Errors of the level-2 blocks of a checkpoint on measured rows, and how their power compares.

Time is predicted as the package predicts it, at level 1 and at level 2. Block power was measured
by a meter that averages over what ran before, so that labels are lower bounds: beside the errors
against them stands the share of rows whose predicted power reaches its label (`power_shares`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hymell_jax import block_power, block_recipes, blocks, checkpoint, evaluate
from hymell_jax.model import CostModel

TABLE_OF = {
    **{name: name for name in blocks.ATTENTION_BLOCKS},
    "experts": "moe",
    **dict.fromkeys(blocks.LINEAR_BLOCKS, "linear_attention"),
    **dict.fromkeys(blocks.LATENT_BLOCKS, "mla"),
}
"""The measured table of each block."""

PUBLISHED_MAPE: dict[tuple[str, str, str], float] = {
    ("attention_prefill", "bf16 full", "time"): 3.514,
    ("attention_prefill", "bf16 full", "energy"): 4.237,
    ("attention_decode", "bf16 full", "time"): 0.441,
    ("attention_decode", "bf16 full", "energy"): 0.599,
    ("moe", "all", "time"): 5.168,
    ("moe", "all", "energy"): 6.333,
    ("ffn", "all", "time"): 4.063,
    ("ffn", "all", "energy"): 4.612,
    ("linear_attention", "prefill", "time"): 3.360,
    ("linear_attention", "prefill", "energy"): 3.740,
    ("linear_attention", "decode", "time"): 0.460,
    ("linear_attention", "decode", "energy"): 0.815,
}
"""(table, regime, target): percent, arXiv 2608.06723, tables 4, 5 and 9; bf16 on an H100 NVL."""

LABEL_SLACK = 0.05
"""A predicted power counts as reaching its label from 5 % below it."""


def _watts(model: CostModel, name: str, frame: pd.DataFrame, time_s: np.ndarray) -> np.ndarray:
    return block_power.block_watts(
        model.coefficients["power"], model.device, block_power.block_work(name, frame), time_s
    )


def _regimes(name: str, frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """Masks [n_rows] of the rows that are shown apart, by name."""
    if name in blocks.ATTENTION_BLOCKS:
        return {"bf16 full": frame["plain"].to_numpy()}
    return {}


def predicted_rows(
    model: CostModel, folder: str | os.PathLike[str], split: str = "test"
) -> dict[str, pd.DataFrame]:
    """Measured rows of every block of a model, with `level1_s`, `level2_s` and `power_pred_w`.

    By block; power for `block_power.POWER_BLOCKS`. A model without blocks gives none, and one of
    fp8 not those of `block_recipes.ANY_FORMAT`, which are those of the bf16 model.
    """
    found = {}
    coefficients = model.coefficients["attention"]
    for name, block in model.blocks.items():
        if model.card.dtype != "bf16" and name in block_recipes.ANY_FORMAT:
            continue
        frame = block_recipes.block_rows(
            name, folder, model.card.device, model.card.runtime, model.card.dtype
        )
        frame = frame if frame.empty else evaluate.chosen_split(frame, split)
        if frame.empty:
            continue
        one, two = block_recipes.block_seconds(name, block, coefficients, model.device, frame)
        frame = frame.reset_index(drop=True).assign(level1_s=one, level2_s=two)
        if name in block_power.POWER_BLOCKS:
            frame = frame.assign(power_pred_w=_watts(model, name, frame, two))
        found[name] = frame
    return found


def _groups(rows: dict[str, pd.DataFrame]) -> list[tuple[str, str, pd.DataFrame]]:
    """(table, regime, rows): blocks by case, then all of a table."""
    found = []
    for table in dict.fromkeys(TABLE_OF[name] for name in rows):
        here = {name: frame for name, frame in rows.items() if TABLE_OF[name] == table}
        for name, frame in here.items():
            found += [(table, key, frame[mask]) for key, mask in _regimes(name, frame).items()]
            if len(here) > 1:
                found.append((table, name.partition("_")[2], frame))
        if table == "linear_attention":
            for phase in ("prefill", "decode"):
                parts = [frame for name, frame in here.items() if name.endswith(phase)]
                found += [(table, phase, pd.concat(parts))] if parts else []
        found.append((table, "all", pd.concat(list(here.values()))))
    return [(table, key, frame) for table, key, frame in found if len(frame)]


def _measured_energy(frame: pd.DataFrame) -> bool:
    return {"energy_j", "power_pred_w"} <= set(frame) and bool(frame["energy_j"].notna().all())


def block_errors(
    model: CostModel, rows: dict[str, pd.DataFrame], level: int = 2
) -> list[dict[str, Any]]:
    """Error rows of `predicted_rows`, in percent, with the fields of `evaluate.ROW_FIELDS`.

    Level 1 beside level 2 by asking for each; energy, where measured, is power times time.
    """
    found = []
    base = dict(level=level, form="refined", device=model.card.device, runtime=model.card.runtime)
    for table, regime, frame in _groups(rows):
        seconds = frame[f"level{level}_s"].to_numpy()
        here = {**base, "table": table, "dtype": model.card.dtype, "regime": regime}
        measured = frame["time_s"].to_numpy()
        found.append({**here, "target": "time", **evaluate.errors(seconds, measured)})
        if _measured_energy(frame):
            joules = frame["power_pred_w"].to_numpy() * seconds
            numbers = evaluate.errors(joules, frame["energy_j"].to_numpy())
            found.append({**here, "target": "energy", **numbers})
    return found


def power_shares(model: CostModel, rows: dict[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """How predicted power compares with the labels of blocks, which are lower bounds.

    Each row: table, device, runtime, dtype, regime, n, `reached_pct` (predicted at or above label
    minus 5 %), `above_limit_pct`, medians in watts, and `scatter_pct` and `scatter_p90_pct`, by how
    much the labels of two rows differ that are most alike (`label_scatter`).
    """
    found = []
    base = dict(device=model.card.device, runtime=model.card.runtime, dtype=model.card.dtype)
    limit = float(model.device.power_limit_w)
    for table, regime, frame in _groups(rows):
        if not _measured_energy(frame) or "power_w" not in frame:
            continue
        label, watts = frame["power_w"].to_numpy(np.float64), frame["power_pred_w"].to_numpy()
        differences = label_scatter(frame)
        found.append({
            "table": table, **base, "regime": regime, "n": len(frame),
            "reached_pct": round(100.0 * float(np.mean(watts >= (1.0 - LABEL_SLACK) * label)), 2),
            "above_limit_pct": round(100.0 * float(np.mean(watts > limit * (1.0 + 1e-6))), 2),
            "label_median_w": round(float(np.median(label)), 1),
            "predicted_median_w": round(float(np.median(watts)), 1),
            "scatter_pct": round(100.0 * float(np.median(differences)), 2),
            "scatter_p90_pct": round(100.0 * float(np.quantile(differences, 0.9)), 2),
        })  # fmt: skip
    return found


def label_scatter(frame: pd.DataFrame) -> np.ndarray:
    """|ln of the ratio| of the power labels of each row and of the row most like it, [n_rows].

    Alike in the logs of time and of every size that varies; alike rows draw alike power, so what
    is left is the scatter of the labels.
    """
    from scipy.spatial import cKDTree

    numbers = frame.select_dtypes("number").drop(
        columns=["power_w", "energy_j", "power_pred_w", "level1_s", "level2_s", "power_limit_w",
                 "weight"], errors="ignore",
    )  # fmt: skip
    table = np.log1p(numbers.to_numpy(np.float64) / numbers.to_numpy(np.float64).min(0).clip(1e-9))
    table = table[:, table.std(0) > 0]
    if len(frame) < 2 or not table.shape[1]:
        return np.zeros(len(frame))
    _, nearest = cKDTree(table).query(table, k=2)
    label = np.log(frame["power_w"].to_numpy(np.float64))
    itself = nearest[:, 1] == np.arange(len(frame))  # equal rows come in any order
    return np.abs(label - label[np.where(itself, nearest[:, 0], nearest[:, 1])])


def evaluate_blocks(
    device: str,
    folder: str | os.PathLike[str],
    *,
    level: int = 2,
    split: str = "test",
    reference: str | os.PathLike[str] | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
    required: bool = True,
) -> list[dict[str, Any]]:
    """Error rows (`evaluate.ROW_FIELDS`) of the blocks of a device's checkpoints, in percent.

    Args:
        device: exact name.
        folder: of measured tables.
        level: 2, or 1 for the level-1 form of the same blocks.
        split: a value of the split column, or "all".
        reference: CSV of a black box; "xgboost_reference.csv" in the folder where it lies there.
        checkpoints: folder of checkpoints; by default those shipped.
        required: whether a device without such rows is an error.

    Raises:
        ValueError: unreadable tables, or no checkpoint of the device with blocks and rows.
    """
    root = Path(folder)
    frame = evaluate.reference_frame(root, reference)
    found = []
    for name, runtime, dtype in checkpoint.available(checkpoints):
        if name == device:
            model = checkpoint.load(name, runtime, dtype, checkpoints)
            found += block_errors(model, predicted_rows(model, root, split), level)
    if not found and required:
        raise ValueError(f"No checkpoint of {device!r} has blocks with rows in {str(folder)!r}.")
    return with_references(found, frame)


REFERENCE_REGIMES = {"attention_prefill": "bf16 full", "attention_decode": "bf16 full"}
"""The rows that the black box saw, where they are not all: bf16 without a window."""


def with_references(
    rows: list[dict[str, Any]], reference: pd.DataFrame | None
) -> list[dict[str, Any]]:
    """Error rows with the published figure and the black box's beside them."""
    finished = []
    for row in rows:
        bf16 = row["dtype"] == "bf16"
        key = (row["table"], row["regime"], row["target"])
        row = {**row, "published_mape": PUBLISHED_MAPE.get(key) if bf16 else None}
        seen = row["regime"] == REFERENCE_REGIMES.get(row["table"], "all")
        asked = {**row, "regime": "all" if seen else "part"}
        row["reference_mape"] = evaluate.reference_error(reference, asked)
        finished.append({name: row.get(name) for name in evaluate.ROW_FIELDS})
    return finished
