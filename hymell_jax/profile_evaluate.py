"""Errors of a fitted profile: held-out shapes, models left out, and a fitted roofline beside both.

Levels 1 and 2 are predicted by what the checkpoint holds. Errors of whole models are those of fits
that never saw the model, which level 3 stores with its terms. The roofline's peak and bandwidth are
fitted to the train rows of each table and kernel, at level 3 to the other models: the strongest
reference of its kind.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hymell_jax import (
    blocks,
    checkpoint,
    devices,
    mlp,
    profile_level1,
    profile_level2,
    profile_level3,
    profile_roofline,
    profile_rows,
    recipes,
    rowwise,
    system_store,
)
from hymell_jax.attention import ATTENTION_PHASES
from hymell_jax.data import columns
from hymell_jax.devices import DeviceSpec
from hymell_jax.evaluate import errors
from hymell_jax.files import read_json
from hymell_jax.profile_rows import Profile

ERROR_FIELDS = (
    "level", "table", "kernel", "target", "n", "mape", "mdape", "roofline_mape", "times_better",
    "uncorrected_mape",
)  # fmt: skip
BLOCK_TABLES = {
    "attention_prefill": "blocks/attention_prefill", "attention_decode": "blocks/attention_decode",
    "experts": "blocks/moe", "latent_prefill": "blocks/mla", "latent_decode": "blocks/mla",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Measured rows of one table and kernel beside two predictions, arrays [n_rows], seconds."""

    level: int
    table: str
    kernel: str
    predicted: np.ndarray
    roofline: np.ndarray
    measured: np.ndarray  # whole models: at the machine's median speed
    raw: np.ndarray  # as measured

    def row(self) -> dict[str, Any]:
        """Its errors, `ERROR_FIELDS`, percent."""
        ours = errors(self.predicted, self.measured)
        other = errors(self.roofline, self.measured)["mape"]
        better = round(other / max(ours["mape"], 1e-3), 2)
        raw = errors(self.predicted, self.raw)["mape"]
        values = (self.level, self.table, self.kernel, "time", ours["n"], ours["mape"],
                  ours["mdape"], other, better, raw)  # fmt: skip
        return dict(zip(ERROR_FIELDS, values, strict=True))


def open_profile(folder: str | os.PathLike[str], device: str | None = None) -> Profile:
    """The profile in a folder.

    Raises:
        ValueError: no profile, or that of another device than was asked for by its name or by
            the path of its file.
    """
    profile = profile_rows.read_profile(folder)
    if device in (None, "all", profile.name):
        return profile
    if str(device).endswith(".json"):
        named = devices.get_device(device).name
        if named == profile.name:
            return profile
        device = f"{named} ({device})"
    raise ValueError(f"The profile in {str(folder)!r} is of {profile.name}, not of {device}.")


def checkpoints_of(
    folder: str | os.PathLike[str],
    profile: Profile,
    checkpoints: str | os.PathLike[str] | None,
) -> Path:
    """The folder of checkpoints: the one given, else `checkpoints` in the profile, else shipped.

    Raises:
        ValueError: it holds none of the profile's device, library and format.
    """
    file = checkpoint.file_name(profile.name, profile.runtime, profile.dtype)
    beside = Path(folder) / "checkpoints"
    places = [Path(checkpoints)] if checkpoints else [beside, checkpoint.shipped_folder()]
    found = next((place for place in places if (place / file).is_file()), None)
    if found is None:
        looked = repr(str(places[0] / file))
        raise ValueError(
            f"There is no checkpoint {looked}: give the folder that `hymell fit` or "
            "`hymell profile --fit` wrote by --checkpoints."
        )
    return found


def compare_profile(
    folder: str | os.PathLike[str],
    checkpoints: str | os.PathLike[str] | None = None,
    split: str = "test",
    device: str | None = None,
) -> list[Comparison]:
    """Every table and kernel that was fitted, and the phases of whole models.

    Args:
        folder: of the profile.
        checkpoints: folder that `profile_fit.fit_profile` wrote into; by default `checkpoints` in
            the profile's, else the package's.
        split: "test" or "train"; whole models are all there, each left out.
        device: name or file; refuse the profile of another one; None takes any.

    Raises:
        ValueError: no profile, or no checkpoint of it.
    """
    if split not in ("train", "test"):
        raise ValueError(f"The rows of a profile are train or test; got {split!r}.")
    profile = open_profile(folder, device)
    checkpoints = checkpoints_of(folder, profile, checkpoints)
    content = checkpoint.read(profile.name, profile.runtime, profile.dtype, folder=checkpoints)
    spec = checkpoint.device_spec(profile.name, checkpoints)
    operators = _operators(profile, spec, content, checkpoints)
    parts = [(1, part) for part in operators]
    parts += [(2, part) for part in _blocks(profile, spec, content)]
    every = [_compared(profile, level, part, split) for level, part in parts]
    found = [one for one in every if one is not None]
    return found + _systems(profile, spec, checkpoints)


def evaluate_profile(
    folder: str | os.PathLike[str],
    checkpoints: str | os.PathLike[str] | None = None,
    split: str = "test",
    device: str | None = None,
) -> list[dict[str, Any]]:
    """Rows of `ERROR_FIELDS`, in percent: every `Comparison`, then a level's rows together.

    Arguments and errors as in `compare_profile`.
    """
    every, found = compare_profile(folder, checkpoints, split, device), []
    for level in sorted({one.level for one in every}):
        here = [one for one in every if one.level == level]
        found += [one.row() for one in here]
        if len(here) > 1:
            found.append(together(here).row())
    return found


def together(parts: list[Comparison]) -> Comparison:
    """The rows of several comparisons of one level."""
    joined = (
        np.concatenate([getattr(one, name) for one in parts])
        for name in ("predicted", "roofline", "measured", "raw")
    )
    return Comparison(parts[0].level, "all", "", *joined)


Part = tuple[str, str, pd.DataFrame, Any]
"""Table, kernel, its rows, and predicted seconds [n_rows]."""


def _compared(profile: Profile, level: int, part: Part, split: str) -> Comparison | None:
    """The rows of a split; None without any, or without rows to fit the reference to."""
    table, kernel, frame, predicted = part
    flops, moved = profile_rows.work(table, frame, profile.element_bytes)
    time_s = frame["time_s"].to_numpy()
    train, here = ((frame["split"] == s).to_numpy() for s in ("train", split))
    if not train.any() or not here.any():
        return None
    rates = profile_roofline.fit_roofline(flops[train], moved[train], time_s[train])
    reference = profile_roofline.roofline_time_s(rates, flops, moved)
    raw_s = frame["raw_s"].to_numpy()
    parts = (np.asarray(predicted)[here], reference[here], time_s[here], raw_s[here])
    return Comparison(level, table.partition("/")[2], kernel, *parts)


def _operators(profile: Profile, spec: DeviceSpec, content, checkpoints) -> list[Part]:
    """What level 1 predicts."""
    frame = profile.rows("operators/gemm")
    m, n, k = columns(frame, "m", "n", "k")
    predicted = profile_level1.gemm_time_s(
        content["coefficients"]["gemm"], spec.device, m, n, k, np.float32(profile.element_bytes)
    )
    found: list[Part] = [("operators/gemm", "", frame, predicted)]
    place = checkpoint.device_folder(profile.name, checkpoints)
    for table in profile_level1.ROWWISE:
        path = recipes.operator_file(place, table.partition("/")[2])
        fits = read_json(path, "operator fits")["fits"] if path.is_file() else []
        known = {f["kernel"]: f for f in fits}
        for kernel, rows in profile_rows.groups(table, profile.rows(table)):
            if kernel in known:
                n_rows, n_cols = columns(rows, *profile_level1.sizes_of(table))
                fitted = known[kernel]
                time_s, _ = rowwise.rowwise_time_s(
                    fitted["refined"], spec.device, n_rows, n_cols, fitted["element_bytes"]
                )
                found.append((table, kernel, rows, time_s))
    return found


def _blocks(profile: Profile, spec: DeviceSpec, content) -> list[Part]:
    """What level 2 predicts."""
    found: list[Part] = []
    attention = content["coefficients"]["attention"]
    for name in blocks.BLOCKS:
        block = content.get("blocks", {}).get(name)
        frame = profile_level2.block_rows(profile, name) if block else pd.DataFrame()
        if frame.empty:
            continue
        own = block["coefficients"] or attention
        base, features = profile_level2.level1(name, own, spec.device, frame)
        mean, _ = mlp.correction(block["params"], block["spec"], block["normalizer"], features)
        kind = frame["kernel"].iloc[0] if "kernel" in frame else name.partition("_")[2]
        found.append((BLOCK_TABLES[name], kind, frame, np.exp(base + np.asarray(mean))))
    frame = profile_level2.block_rows(profile, "experts")
    if content.get("experts") and not frame.empty:
        products = profile_level2.expert_products_s(
            content["coefficients"], profile, spec.device, frame
        )
        time_s = np.asarray(profile_level2.expert_time_s(content["experts"], products))
        found.append(("blocks/moe", frame["kernel"].iloc[0], frame, time_s))
    frame = profile.rows("blocks/ffn")
    if content.get("ffn") and not frame.empty:
        parts = profile_level2.ffn_parts_s(content["coefficients"], profile, spec.device, frame)
        time_s = np.asarray(profile_level2.ffn_time_s(content["ffn"], *parts))
        found.append(("blocks/ffn", "", frame, time_s))
    return found


def _systems(profile: Profile, spec: DeviceSpec, checkpoints) -> list[Comparison]:
    """Both phases of whole models, each left out."""
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
    for phase in ATTENTION_PHASES:
        here = (left["phase"] == phase).to_numpy()
        if here.any():
            kernel, predicted = f"{phase}, models left out", left["level 3"].to_numpy()
            raw = left["raw_s"].to_numpy()
            parts = (predicted[here], reference[here], measured[here], raw[here])
            found.append(Comparison(3, "systems", kernel, *parts))
    return found
