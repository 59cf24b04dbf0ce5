"""Errors of a fitted model on measured rows, per table, regime and target, beside two references.

The references are the figures that HYMELL (arXiv 2608.06723, tables 1 to 3) reports on its own
hardware, and a black box on the same rows, given as a CSV with the columns of `REFERENCE_COLUMNS`.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from hymell_jax import checkpoint, data, devices, fit, gemm, rowwise
from hymell_jax.files import check_regular, read_json
from hymell_jax.types import DTYPES, near_names

REFERENCE_COLUMNS = ("table", "device", "runtime", "target", "mape_pct")
ROW_FIELDS = (
    "level", "form", "table", "device", "runtime", "dtype", "regime", "target", "n", "mape",
    "mdape", "r2", "published_mape", "reference_mape",
)  # fmt: skip

PUBLISHED_MAPE: dict[tuple[str, str, str], float] = {
    ("gemm", "launch", "time"): 5.587,
    ("gemm", "launch", "energy"): 6.134,
    ("gemm", "memory", "time"): 6.819,
    ("gemm", "memory", "energy"): 5.861,
    ("gemm", "balanced_memory", "time"): 5.974,
    ("gemm", "balanced_memory", "energy"): 5.189,
    ("gemm", "balanced_compute", "time"): 9.399,
    ("gemm", "balanced_compute", "energy"): 7.294,
    ("gemm", "compute", "time"): 4.141,
    ("gemm", "compute", "energy"): 4.472,
    ("gemm", "all", "time"): 6.384,
    ("gemm", "all", "energy"): 5.790,
    ("rmsnorm", "launch", "time"): 1.288,
    ("rmsnorm", "memory", "time"): 2.098,
    ("rmsnorm", "all", "time"): 1.693,
    ("softmax", "launch", "time"): 2.869,
    ("softmax", "memory", "time"): 3.661,
    ("softmax", "all", "time"): 3.265,
}
"""(table, regime, target): percent, arXiv 2608.06723, tables 1 to 3; "all" is their mean."""

PUBLISHED_ROWWISE = {  # operator: (terms, hard regime, soft form)
    "rmsnorm": (
        rowwise.published_rmsnorm_terms,
        rowwise.published_rmsnorm_regime,
        rowwise.published_rmsnorm,
    ),
    "softmax": (
        rowwise.published_softmax_terms,
        lambda rows, cols: rowwise.published_softmax_regime(rows),
        rowwise.published_softmax,
    ),
}
"""Row-wise operators with a published equation."""

ROWWISE_TABLES = ("rmsnorm", "softmax", "layernorm")

SOUND = "sound"
"""Rows of `fit.SOUND_POWER_S` or longer, whose power labels can be trusted."""


def errors(predicted: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    """n, MAPE and median APE in percent, and R^2, of positive predictions [n]."""
    predicted, measured = np.asarray(predicted, np.float64), np.asarray(measured, np.float64)
    relative = 100.0 * np.abs(predicted / measured - 1.0)
    spread = float(np.sum((measured - measured.mean()) ** 2))
    r2 = 1.0 - float(np.sum((predicted - measured) ** 2)) / spread if spread > 0 else 0.0
    return {
        "n": len(measured),
        "mape": round(float(relative.mean()), 3),
        "mdape": round(float(np.median(relative)), 3),
        "r2": round(r2, 5),
    }


def read_reference(path: str | os.PathLike[str]) -> pd.DataFrame:
    """The black-box reference.

    Raises:
        ValueError: not a CSV with `REFERENCE_COLUMNS`.
    """
    check_regular(path, f"reference {str(path)!r}")
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"The reference {str(path)!r} cannot be read: {error}") from error
    missing = [name for name in REFERENCE_COLUMNS if name not in frame]
    if missing:
        raise ValueError(f"The reference {str(path)!r} lacks the columns {', '.join(missing)}.")
    return frame


def reference_frame(folder: Path, reference: str | os.PathLike[str] | None) -> pd.DataFrame | None:
    """The black box that was given, else the one in the folder, else None."""
    default = folder / "xgboost_reference.csv"
    if reference is None and not default.is_file():
        return None
    return read_reference(reference if reference is not None else default)


def reference_error(frame: pd.DataFrame | None, row: dict[str, Any]) -> float | None:
    """MAPE in percent of a black box trained on bf16 and float32 rows only, all regimes together;
    None where there is none.
    """
    if frame is None or row["regime"] != "all" or row["dtype"] == "fp8":
        return None
    target = {"time": "time_s", "energy": "energy_j"}[row["target"]]
    same = (
        (frame["table"] == row["table"])
        & (frame["device"] == row["device"])
        & (frame["runtime"] == row["runtime"])
        & (frame["target"] == target)
    )
    return float(frame.loc[same, "mape_pct"].iloc[0]) if same.any() else None


def _rows_by_regime(base, regimes, names, predicted, measured) -> list[dict[str, Any]]:
    """Error rows for each regime that occurs, then for all."""
    rows = []
    for index, name in enumerate(names):
        here = regimes == index
        if here.any():
            rows.append({**base, "regime": name, **errors(predicted[here], measured[here])})
    rows.append({**base, "regime": "all", **errors(predicted, measured)})
    return rows


@functools.partial(jax.jit, static_argnames="element_bytes")
def _gemm_times(coefficients, device, m, n, k, element_bytes):
    return jnp.exp(fit.gemm_log_time(coefficients, device, m, n, k, element_bytes))


@functools.partial(jax.jit, static_argnames="element_bytes")
def _gemm_watts(coefficients, device, m, n, k, time_s, element_bytes):
    return jnp.exp(fit.gemm_log_power(coefficients, device, m, n, k, time_s, element_bytes))


def gemm_errors(content: dict[str, Any], frame: pd.DataFrame, form: str) -> list[dict[str, Any]]:
    """Error rows of operators/gemm for one checkpoint: time, and energy where it was measured.

    Energy is predicted whole: predicted power times predicted time. Beside all rows stand those
    whose power labels are sound.
    """
    element = DTYPES[content["dtype"]]
    m, n, k, time_s = data.columns(frame, "m", "n", "k", "time_s")
    regime = gemm.published_regime(m, n, k, element)
    base = dict(level=1, form=form, table="gemm", runtime=content["runtime"])
    base.update(device=content["device"], dtype=content["dtype"])
    device = devices.get_device(content.get("device_file") or content["device"]).device
    coefficients = content["coefficients"]
    if form == "refined":
        predicted = np.asarray(_gemm_times(coefficients["gemm"], device, m, n, k, element))
    else:
        predicted = _published_gemm(content["published"]["gemm_time_s"], m, n, k, element)
    rows = _rows_by_regime({**base, "target": "time"}, regime, gemm.REGIMES, predicted, time_s)
    if "energy_j" not in frame or not frame["energy_j"].notna().all():
        return rows
    (joules,) = data.columns(frame, "energy_j")
    if form == "refined":
        watts = _gemm_watts(coefficients["power"], device, m, n, k, predicted, element)
        energy = np.asarray(watts) * predicted
    else:
        energy = _published_gemm(content["published"]["gemm_energy_j"], m, n, k, element)
    base["target"] = "energy"
    rows += _rows_by_regime(base, regime, gemm.REGIMES, energy, joules)
    sound = time_s >= fit.SOUND_POWER_S
    if sound.any():
        rows.append({**base, "regime": SOUND, **errors(energy[sound], joules[sound])})
    return rows


def _published_gemm(coefficients, m, n, k, element_bytes) -> np.ndarray:
    """The published equation in float64 with hard regimes, as it was fitted."""
    with jax.enable_x64(True):
        m64, n64, k64 = (jnp.asarray(a, jnp.float64) for a in (m, n, k))
        terms = np.asarray(gemm.published_terms(m64, n64, k64, element_bytes))
    regime = gemm.published_regime(m, n, k, element_bytes)
    return np.sum(terms * np.asarray(coefficients, np.float64)[regime], axis=1)


def operator_fits(
    operator: str, checkpoints: str | os.PathLike[str] | None = None
) -> list[dict[str, Any]]:
    """The fits of one row-wise operator, one per device and runtime; empty where there are none."""
    root = Path(checkpoints) if checkpoints else checkpoint.shipped_folder()
    path = root / "operators" / f"{operator}.json"
    if not path.is_file():
        return []
    content = read_json(path, "operator fits")
    try:
        fits = content["fits"]
        complete = all(
            isinstance(f["device"], str) and set(f["refined"]) == set(rowwise.COEFFICIENTS)
            for f in fits
        )
    except (KeyError, TypeError):
        complete = False
    if not complete:
        raise ValueError(f"{path.name} does not hold fits of {operator}.")
    return fits


def rowwise_errors(
    operator: str,
    device: str,
    folder: Path,
    split: str,
    form: str,
    checkpoints: str | os.PathLike[str] | None = None,
) -> list[dict[str, Any]]:
    """Error rows of one row-wise table on one device, for each runtime that was fitted."""
    if form == "published" and operator not in PUBLISHED_ROWWISE:
        return []
    names = {"rmsnorm": ("num_tokens", "d_model")}.get(operator, ("rows", "cols"))
    measured: dict[tuple[str, str], list[tuple[np.ndarray, ...]]] = {}
    for fitted in operator_fits(operator, checkpoints):
        if fitted["device"] != device:
            continue
        frame = data.read_table(
            folder, f"operators/{operator}", device=device, runtime=fitted["runtime"]
        )
        if "kernel" in frame:
            frame = frame[frame["kernel"] == fitted["kernel"]]
        frame = chosen_split(frame[frame["dtype"] == fitted["dtype"]], split)
        if len(frame):
            arrays = data.columns(frame, *names, "time_s")
            key = fitted["runtime"], fitted["dtype"]
            predicted = _rowwise_seconds(operator, fitted, device, form, *arrays[:2])
            measured.setdefault(key, []).append((*arrays, predicted))
    found = []
    for (runtime, dtype), blocks in measured.items():
        rows, cols, time_s, predicted = map(np.concatenate, zip(*blocks, strict=True))
        regime = np.full(len(rows), -1)
        kinds: tuple[str, ...] = ()
        if operator in PUBLISHED_ROWWISE:
            regime, kinds = PUBLISHED_ROWWISE[operator][1](rows, cols), rowwise.REGIMES
        base = dict(level=1, form=form, table=operator, device=device, target="time")
        base.update(runtime=runtime, dtype=dtype)
        found += _rows_by_regime(base, regime, kinds, predicted, time_s)
    return found


def _rowwise_seconds(operator, fitted, device, form, rows, cols) -> np.ndarray:
    """Predicted seconds [n_rows] of one fit of a row-wise operator."""
    if form == "refined":
        moved = {"rmsnorm": 4.0}.get(operator, 8.0)
        spec = devices.get_device(device)
        return np.asarray(
            rowwise.rowwise_time_s(fitted["refined"], spec.device, rows, cols, moved)[0]
        )
    terms, regime_of, _ = PUBLISHED_ROWWISE[operator]
    matrix = np.asarray(terms(rows, cols), np.float64)
    weights = np.asarray(fitted["published"], np.float64)
    return np.sum(matrix * weights[regime_of(rows, cols)], axis=1)


def _with_references(rows, reference: pd.DataFrame | None) -> list[dict[str, Any]]:
    finished = []
    for row in rows:
        key = (row["table"], row["regime"], row["target"])
        row["published_mape"] = None if row["dtype"] == "fp8" else PUBLISHED_MAPE.get(key)
        row["reference_mape"] = reference_error(reference, row)
        finished.append({name: row.get(name) for name in ROW_FIELDS})
    return finished


def chosen_split(frame: pd.DataFrame, split: str) -> pd.DataFrame:
    """Rows of one split, or all.

    Raises:
        ValueError: a split that the rows do not have.
    """
    if split == "all":
        return frame
    known = sorted(frame["split"].unique())
    if split not in known:
        raise ValueError(f"split must be one of {', '.join([*known, 'all'])}; got {split!r}.")
    return frame[frame["split"] == split]


def evaluate(
    device: str,
    folder: str | os.PathLike[str],
    *,
    split: str = "test",
    form: str = "refined",
    reference: str | os.PathLike[str] | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
    skipped: list[str] | None = None,
) -> list[dict[str, Any]]:
    """Error rows (`ROW_FIELDS`) of every fitted table of a device, errors in percent.

    Checkpoints whose runtime or format the tables do not hold are left out, unless all are.

    Args:
        device: exact name.
        folder: of measured tables.
        split: a value of the split column, or "all".
        form: "refined" or "published" equations.
        reference: CSV of a black box on the same rows; "xgboost_reference.csv" in the folder is
            taken where it lies there.
        checkpoints: folder of checkpoints; by default those shipped.
        skipped: takes why a checkpoint was left out.

    Raises:
        ValueError: unknown device, split or form, unreadable tables, or nothing to evaluate.
    """
    if form not in ("refined", "published"):
        raise ValueError(f"form must be refined or published; got {form!r}.")
    root = Path(folder)
    frame = reference_frame(root, reference)
    rows, missing = [], []
    for name, runtime, dtype in checkpoint.available(checkpoints):
        if name == device and data.has_table(root, "operators/gemm"):
            content = checkpoint.read(name, runtime, dtype, checkpoints)
            try:
                measured = data.gemm_rows(root, name, runtime, dtype)
            except data.NoRows as error:
                missing.append(error)
                continue
            rows += gemm_errors(content, chosen_split(measured, split), form)
    for operator in ROWWISE_TABLES:
        if data.has_table(root, f"operators/{operator}"):
            rows += rowwise_errors(operator, device, root, split, form, checkpoints)
    if missing and not rows:
        raise missing[0]
    if skipped is not None:
        skipped.extend(map(str, missing))
    if not rows:
        known = sorted({d for d, _, _ in checkpoint.available(checkpoints)})
        shown = ", ".join(near_names(device, known) or known) or "none"
        raise ValueError(
            f"Nothing to evaluate for {device!r} in {str(folder)!r}: no table with rows of a "
            f"fitted device; devices with checkpoints: {shown}."
        )
    return _with_references(rows, frame)
