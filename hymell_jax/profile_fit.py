"""From a profile to a checkpoint and its error table: all levels, resumable.

`fit_profile` writes `<device>/` inside a folder of checkpoints: the device's facts, levels 1 and 2,
the fits of its row-wise operators, and level 3. What a run finds there already, made from the same
rows, it keeps. `evaluate_profile` predicts held-out shapes with what was written, reads the errors
of left-out models from level 3, and puts a fitted roofline beside both.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hymell_jax import (
    blocks,
    checkpoint,
    devices,
    profile_device,
    profile_level1,
    profile_level2,
    profile_level3,
    profile_roofline,
    profile_rows,
    recipes,
    rowwise,
    system_store,
)
from hymell_jax.data import columns
from hymell_jax.devices import DeviceSpec
from hymell_jax.evaluate import errors
from hymell_jax.files import read_json, write_whole
from hymell_jax.fit import Progress, fit_power
from hymell_jax.profile_rows import Profile

LEVELS = (1, 2, 3)
ERROR_FIELDS = (
    "level", "table", "kernel", "target", "n", "mape", "mdape", "roofline_mape", "times_better",
)  # fmt: skip
BLOCK_TABLES = {
    "attention_prefill": "blocks/attention_prefill", "attention_decode": "blocks/attention_decode",
    "experts": "blocks/moe", "latent_prefill": "blocks/mla", "latent_decode": "blocks/mla",
}  # fmt: skip


def fit_profile(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    progress: Progress | None = None,
    levels: tuple[int, ...] = LEVELS,
    device: str | None = None,
) -> list[dict[str, Any]]:
    """Fit a measured machine and evaluate it; returns the rows of `evaluate_profile`.

    Args:
        folder: of the profile.
        out: folder of checkpoints; `<device>/` is written inside.
        progress: called with (what, done, total).
        levels: which to fit; level 1 always is.
        device: refuse the profile of another one; None or "all" takes any.

    Raises:
        ValueError: no profile, too few rows, or a folder that cannot be written.
    """
    profile = _profile(folder, device)
    description = profile_device.describe(profile)
    spec = profile_device.spec_of(profile)
    fits = _rowwise(profile, spec, out, progress)
    content = _level1(profile, spec, description, fits, out, progress)
    if 2 in levels:
        _level2(profile, spec, content, out, progress)
    if 3 in levels:
        _level3(profile, spec, out, progress)
    return evaluate_profile(folder, out)


def _profile(folder, device: str | None) -> Profile:
    """The profile in a folder, of the device that was asked for."""
    profile = profile_rows.read_profile(folder)
    if device not in (None, "all", profile.name):
        raise ValueError(f"The profile in {str(folder)!r} is of {profile.name}, not of {device!r}.")
    return profile


def _rowwise(profile: Profile, spec: DeviceSpec, out, progress) -> dict[str, list[dict[str, Any]]]:
    """Fits of the row-wise tables, those at hand where their rows have not changed."""
    found = {}
    for table in profile_level1.ROWWISE:
        operator = table.partition("/")[2]
        place = checkpoint.device_folder(profile.name, out)
        path = recipes.operator_file(place, operator)
        measured = profile.digest(table, "operators/gemm")
        known = read_json(path, "operator fits") if path.is_file() else {}
        if known.get("measured") != measured:
            fits = profile_level1.fit_rowwise(profile, spec.device, table, progress=progress)
            if not fits:
                continue
            known = {
                "format_version": checkpoint.FORMAT_VERSION, "operator": operator, "fits": fits,
                "sources": [profile_level1.source(profile)], "measured": measured,
                "split": "fitted on train rows only",
            }  # fmt: skip
            recipes.save_operator(known, place)
        found[table] = known["fits"]
    return found


def _level1(profile: Profile, spec: DeviceSpec, description, fits, out, progress) -> dict[str, Any]:
    entry = profile.name, profile.runtime, profile.dtype
    path = Path(out) / checkpoint.file_name(*entry)
    measured = profile.digest(
        "operators/gemm", *profile_level1.ROWWISE, *(f"blocks/attention_{p}" for p in _PHASES)
    )
    if path.is_file():
        content = checkpoint.read(*entry, folder=out)
        if content.get("recipe", {}).get("measured") == measured:
            return content
    power = _power(profile, spec)
    content = profile_level1.fit_level1(profile, spec, description, fits, power, progress)
    content["recipe"]["measured"] = measured
    checkpoint.save(content, out)
    return content


_PHASES = ("prefill", "decode")


def _power(profile: Profile, spec: DeviceSpec) -> dict[str, Any]:
    """Coefficients of board power, from metered products or from the most alike known device."""
    frame = profile.rows("operators/gemm")
    metered = frame[frame["power_w"].notna() & (frame["split"] == "train")]
    if len(metered) >= 20:
        fitted, _ = fit_power(
            spec.device, *columns(metered, "m", "n", "k", "time_s", "power_w"),
            element_bytes=profile.element_bytes, sound_s=0.0,
        )  # fmt: skip
        return {
            "coefficients": fitted,
            "provenance": {"energy": "fitted", "energy_from": profile.name,
                           "energy_note": f"Power of {len(metered)} metered products."},
        }  # fmt: skip
    known = {e[0]: e for e in checkpoint.available() if e[2] == "bf16"}
    source = devices.nearest_measured(spec, sorted(known))
    content = checkpoint.read(*known[source])
    return {
        "coefficients": content["coefficients"]["power"],
        "provenance": {
            "energy": "transferred",
            "energy_from": f"{content['energy_from']}",
            "energy_note": (
                f"Nothing metered {profile.name}: its energy is not a measurement. Shares of the "
                "range between idle and limit are those of another device, and idle and limit are "
                f"{spec.sources['power_limit_w']!r}."
            ),
        },
    }


def _level2(profile: Profile, spec: DeviceSpec, content, out, progress) -> None:
    """Fit the blocks that the checkpoint lacks, and write it anew after each."""
    held = content.setdefault("blocks", {})
    coefficients = content["coefficients"]
    for name in profile_level2.FITTED:
        if name in held:
            continue
        fitted = profile_level2.fit_block(
            profile, spec, name, coefficients["attention"], progress=progress
        )
        if fitted is not None:
            held[name] = fitted
            content["level"] = 2
            checkpoint.save(content, out)
    if "ffn" not in content:
        content["ffn"] = profile_level2.fit_ffn(profile, spec, coefficients)
        checkpoint.save(content, out)


def _level3(profile: Profile, spec: DeviceSpec, out, progress) -> None:
    own = checkpoint.device_folder(profile.name, out).name
    entry = profile.name, profile.runtime, profile.dtype
    written = (Path(out) / checkpoint.file_name(*entry)).read_bytes()
    measured = profile.digest(profile_level3.TABLE) + _digest(written)
    path = system_store.file_of(out, own)
    if path.is_file() and read_json(path, "level 3")["card"].get("measured") == measured:
        return
    model = checkpoint.load_file(Path(out) / checkpoint.file_name(*entry))
    content = profile_level3.fit_level3(profile, model, spec, progress=progress)
    if content is not None:
        content["card"]["measured"] = measured
        system_store.save(content, out, own)


def _digest(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()


def evaluate_profile(
    folder: str | os.PathLike[str],
    checkpoints: str | os.PathLike[str] | None = None,
    split: str = "test",
    device: str | None = None,
) -> list[dict[str, Any]]:
    """Rows of `ERROR_FIELDS`, in percent: each table and kernel, then a level's rows together.

    Levels 1 and 2 are on rows of a split, level 3 on every model, predicted by fits that left it
    out. The roofline's peak and bandwidth are fitted to the train rows of each table and kernel,
    at level 3 to the other models.

    Args:
        folder: of the profile.
        checkpoints: folder that `fit_profile` wrote into; by default that of the package.
        split: "test" or "train".
        device: refuse the profile of another one; None takes any.

    Raises:
        ValueError: no profile, or no checkpoint of it.
    """
    if split not in ("train", "test"):
        raise ValueError(f"The rows of a profile are train or test; got {split!r}.")
    profile = _profile(folder, device)
    checkpoints = checkpoints or checkpoint.shipped_folder()
    content = checkpoint.read(profile.name, profile.runtime, profile.dtype, folder=checkpoints)
    spec = checkpoint.device_spec(profile.name, checkpoints)
    found = []
    for level, tables in ((1, _operators(profile, spec, content, checkpoints)),
                          (2, _blocks(profile, spec, content))):  # fmt: skip
        parts = [_compared(profile, *part, split) for part in tables]
        found += _rows(level, [part for part in parts if part is not None])
    return found + _rows(3, _systems(profile, spec, checkpoints))


def _compared(profile: Profile, table: str, kernel: str, frame: pd.DataFrame, predicted, split):
    """(table, kernel, predicted, roofline, measured) of the rows of a split; None without any."""
    flops, moved = profile_rows.work(table, frame, profile.element_bytes)
    time_s = frame["time_s"].to_numpy()
    train, here = ((frame["split"] == s).to_numpy() for s in ("train", split))
    if not train.any() or not here.any():
        return None
    rates = profile_roofline.fit_roofline(flops[train], moved[train], time_s[train])
    reference = profile_roofline.roofline_time_s(rates, flops, moved)
    name = table.partition("/")[2]
    return name, kernel, np.asarray(predicted)[here], reference[here], time_s[here]


def _rows(level: int, parts: list[tuple]) -> list[dict[str, Any]]:
    found = [_row(level, *part) for part in parts]
    if len(parts) > 1:
        together = (np.concatenate([part[i] for part in parts]) for i in (2, 3, 4))
        found.append(_row(level, "all", "", *together))
    return found


def _row(level: int, table: str, kernel: str, predicted, reference, measured) -> dict[str, Any]:
    ours, other = errors(predicted, measured), errors(reference, measured)
    better = round(other["mape"] / max(ours["mape"], 1e-3), 2)
    values = (level, table, kernel, "time", ours["n"], ours["mape"], ours["mdape"], other["mape"],
              better)  # fmt: skip
    return dict(zip(ERROR_FIELDS, values, strict=True))


def _operators(profile: Profile, spec: DeviceSpec, content, checkpoints):
    """(table, kernel, rows, predicted seconds) of level 1."""
    frame = profile.rows("operators/gemm")
    m, n, k = columns(frame, "m", "n", "k")
    predicted = profile_level1.gemm_time_s(
        content["coefficients"]["gemm"], spec.device, m, n, k, np.float32(profile.element_bytes)
    )
    found = [("operators/gemm", "", frame, predicted)]
    place = checkpoint.device_folder(profile.name, checkpoints)
    for table in profile_level1.ROWWISE:
        path = recipes.operator_file(place, table.partition("/")[2])
        fits = read_json(path, "operator fits")["fits"] if path.is_file() else []
        known = {f["kernel"]: f for f in fits}
        for kernel, rows in profile_rows.groups(table, profile.rows(table)):
            if kernel in known:
                sizes = columns(rows, *profile_level1.sizes_of(table))
                time_s, _ = rowwise.rowwise_time_s(
                    known[kernel]["refined"], spec.device, *sizes, known[kernel]["element_bytes"]
                )
                found.append((table, kernel, rows, time_s))
    return found


def _blocks(profile: Profile, spec: DeviceSpec, content):
    """(table, kernel, rows, predicted seconds) of level 2."""
    found = []
    attention = content["coefficients"]["attention"]
    for name in blocks.BLOCKS:
        block = content.get("blocks", {}).get(name)
        frame = profile_level2.block_rows(profile, name) if block else pd.DataFrame()
        if frame.empty:
            continue
        own = block["coefficients"] or attention
        base, features = profile_level2.level1(name, own, spec.device, frame)
        mean, _ = profile_level2.mlp.correction(
            block["params"], block["spec"], block["normalizer"], features
        )
        kind = frame["kernel"].iloc[0] if "kernel" in frame else name.partition("_")[2]
        found.append((BLOCK_TABLES[name], kind, frame, np.exp(base + np.asarray(mean))))
    frame = profile.rows("blocks/ffn")
    if content.get("ffn") and not frame.empty:
        parts = profile_level2.ffn_parts_s(content["coefficients"], profile, spec.device, frame)
        time_s = np.asarray(profile_level2.ffn_time_s(content["ffn"], *parts))
        found.append(("blocks/ffn", "", frame, time_s))
    return found


def _systems(profile: Profile, spec: DeviceSpec, checkpoints) -> list[tuple]:
    """(phase, "", predicted, roofline, measured) of whole models, each left out."""
    own = system_store.load(checkpoints, checkpoint.device_folder(profile.name, checkpoints).name)
    if own is None:
        return []
    left = pd.DataFrame(own["card"]["left_out"])
    rows = profile_level3.rows_of(profile, spec)
    flops, moved = profile_level3.pass_work(rows)
    measured = left["measured_s"].to_numpy()
    reference = np.empty(len(left))
    for model in left["model"].unique():
        out = (left["model"] == model).to_numpy()
        rates = profile_roofline.fit_roofline(flops[~out], moved[~out], measured[~out])
        reference[out] = profile_roofline.roofline_time_s(rates, flops[out], moved[out])
    found = []
    for phase in _PHASES:
        here = (left["phase"] == phase).to_numpy()
        if here.any():
            predicted = left["level 3"].to_numpy()
            found.append(
                ("systems", f"{phase}, models left out", predicted[here], reference[here],
                 measured[here])
            )  # fmt: skip
    return found


def save_errors(rows: list[dict[str, Any]], path: str | os.PathLike[str]) -> None:
    """Write an error table as JSON, whole or not at all."""
    write_whole(path, json.dumps(rows, indent=1) + "\n")
