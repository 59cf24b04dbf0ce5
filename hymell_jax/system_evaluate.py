"""Errors of level 3 on whole models, as its card holds them: every model left out of its fit.

They cannot be computed from the final terms, which have seen every model.
"""

from __future__ import annotations

import os
from typing import Any

from hymell_jax import checkpoint, system_store
from hymell_jax.evaluate import ROW_FIELDS


def evaluate_systems(
    device: str, checkpoints: str | os.PathLike[str] | None = None, required: bool = True
) -> list[dict[str, Any]]:
    """Error rows (`evaluate.ROW_FIELDS`) of whole models on a device, in percent.

    Args:
        device: exact name.
        checkpoints: folder of checkpoints; by default those shipped.
        required: whether a device without measured models is an error.

    Raises:
        ValueError: a damaged level 3, or no measured models where some are required.
    """
    root = checkpoints or checkpoint.shipped_folder()
    found = []
    for place in (system_store.FOLDER, checkpoint.device_folder(device, root).name):
        content = system_store.load(root, place)
        for row in content["card"]["errors"] if content is not None else ():
            if row["device"] == device:
                found.append(_row(row))
    if not found and required:
        raise ValueError(f"No whole model of {device!r} was measured in {str(root)!r}.")
    return found


def _row(row: dict[str, Any]) -> dict[str, Any]:
    energy = row["target"] == "energy"
    known = {
        "level": 3, "form": "refined", "table": row["table"], "device": row["device"],
        "runtime": row["engine"], "dtype": row["width"],
        "regime": f"{row['kind']}, {row['gpus']}, {row['target']}",
        "target": "energy" if energy else "time",
        **{name: row[name] for name in ("n", "mape", "mdape")},
    }  # fmt: skip
    return {name: known.get(name) for name in ROW_FIELDS}
