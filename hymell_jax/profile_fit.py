"""From a profile to a checkpoint and its error table: all levels, resumable.

`fit_profile` writes `<device>/` inside a folder of checkpoints: the device's facts, levels 1 and 2,
the fits of its row-wise operators, and level 3. What a run finds there already, made from the same
rows, it keeps.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hymell_jax import (
    arrays,
    checkpoint,
    devices,
    profile_device,
    profile_level1,
    profile_level2,
    profile_level3,
    recipes,
    system_store,
)
from hymell_jax.attention import ATTENTION_PHASES
from hymell_jax.data import columns
from hymell_jax.devices import DeviceSpec
from hymell_jax.files import read_json
from hymell_jax.fit import Progress, fit_power
from hymell_jax.profile_evaluate import evaluate_profile, open_profile
from hymell_jax.profile_rows import Profile

LEVELS = (1, 2, 3)


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
    profile = open_profile(folder, device)
    description = profile_device.describe(profile)
    spec = profile_device.spec_of(profile)
    fits = _rowwise(profile, spec, out, progress)
    content = _level1(profile, spec, description, fits, out, progress)
    if 2 in levels:
        _level2(profile, spec, content, out, progress)
    if 3 in levels:
        _level3(profile, spec, out, progress)
    return evaluate_profile(folder, out)


def _rowwise(profile: Profile, spec: DeviceSpec, out, progress) -> dict[str, list[dict[str, Any]]]:
    """Fits of the row-wise tables, those at hand where their rows have not changed."""
    found = {}
    place = checkpoint.device_folder(profile.name, out)
    for table in profile_level1.ROWWISE:
        if profile.rows(table).empty:
            continue
        operator = table.partition("/")[2]
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
        "operators/gemm",
        *profile_level1.ROWWISE,
        *(f"blocks/attention_{p}" for p in ATTENTION_PHASES),
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
            "metered": False,
            "energy_from": content["energy_from"],
            "energy_note": (
                f"Nothing metered {profile.name}: its energy is not a measurement. Shares of the "
                "range between idle and limit are those of another device, and idle and limit are "
                f"{spec.sources['power_limit_w']!r}."
            ),
        },
    }


def _level2(profile: Profile, spec: DeviceSpec, content, out, progress) -> None:
    """Fit the blocks that the checkpoint lacks, and write it anew after each."""
    measured = profile.digest("blocks/ffn", "blocks/moe", "blocks/mla")
    recipe, coefficients = content["recipe"], content["coefficients"]
    if recipe.get("blocks_measured") == measured:
        return
    if recipe.get("blocks_begun") != measured:
        recipe["blocks_begun"], content["blocks"], content["level"] = measured, {}, 1
        content["experts"] = profile_level2.fit_experts(profile, spec, coefficients)
        content["ffn"] = profile_level2.fit_ffn(profile, spec, coefficients)
        checkpoint.save(content, out)
    held = content.setdefault("blocks", {})
    for name in profile_level2.FITTED:
        if name in held or (name == "experts" and content["experts"]):
            continue
        fitted = profile_level2.fit_block(
            profile, spec, name, coefficients["attention"], progress=progress
        )
        if fitted is not None:
            held[name] = fitted
            content["level"] = 2
            checkpoint.save(content, out)
    recipe["blocks_measured"] = measured
    checkpoint.save(content, out)


def _level3(profile: Profile, spec: DeviceSpec, out, progress) -> None:
    own = checkpoint.device_folder(profile.name, out).name
    entry = profile.name, profile.runtime, profile.dtype
    written = (Path(out) / checkpoint.file_name(*entry)).read_bytes()
    measured = profile.digest(profile_level3.TABLE) + arrays.digest(written)
    path = system_store.file_of(out, own)
    if path.is_file() and read_json(path, "level 3")["card"].get("measured") == measured:
        return
    model = checkpoint.load_file(Path(out) / checkpoint.file_name(*entry))
    content = profile_level3.fit_level3(profile, model, spec, progress=progress)
    if content is not None:
        content["card"]["measured"] = measured
        system_store.save(content, out, own)
