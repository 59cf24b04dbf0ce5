"""Tables of errors on whole models left out, by device and phase; a black box beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from hymell_jax import devices, system_recipes, systems

SIZES = (
    "n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "n_experts",
    "experts_per_token", "d_expert",
)  # fmt: skip
RATES = ("peak_flops_per_s", "memory_bytes_per_s", "power_limit_w", "n_sm")
"""What the black box knows of a model, and of a device."""


def black_box(frame: pd.DataFrame, settings: Mapping[str, Any]) -> pd.DataFrame:
    """Boosted trees on sizes of model, workload and device, one architecture left out at a time.

    Args:
        frame: left-out predictions of `system_recipes`, for their rows and measurements.
        settings: of `xgboost.XGBRegressor`.

    Returns:
        The frame with the predictions of the trees; NaN where nothing else was measured.
    """
    import xgboost

    archs = {g: systems.group_architecture(g) for g in frame["group"].unique()}
    specs = {d: devices.get_device(d).device for d in frame["device"].unique()}
    inputs = {n: np.log1p([float(getattr(archs[g], n)) for g in frame["group"]]) for n in SIZES}
    inputs |= {n: np.log([float(getattr(specs[d], n)) for d in frame["device"]]) for n in RATES}
    for name in ("batch", "prompt", "output", "tensor_parallel", "expert_parallel", "clock_share"):
        inputs[name] = np.log(frame[name].to_numpy(float))
    inputs["weight_bytes"] = frame["weight_bytes"].to_numpy(float)
    for name in ("engine", "task"):
        for value in frame[name].unique():
            inputs[f"{name} {value}"] = (frame[name] == value).to_numpy(float)
    table, found = np.stack(list(inputs.values()), 1), frame.copy()
    for target in system_recipes.TARGETS:
        measured = frame[f"{target}_measured"].to_numpy(float)
        known, predicted = np.isfinite(measured), np.full(len(frame), np.nan)
        for group in frame["group"].unique():
            here = (frame["group"] == group).to_numpy()
            if not (known & here).any() or not (known & ~here).any():
                continue
            trees = xgboost.XGBRegressor(**settings, n_jobs=1, random_state=0)
            trees.fit(table[known & ~here], np.log(measured[known & ~here]))
            predicted[known & here] = np.exp(trees.predict(table[known & here]))
        found[target] = predicted
    return found


def by_device(forms: Mapping[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """Mean absolute errors in percent of 16-bit rows, all engines together.

    Args:
        forms: left-out predictions of the same rows, by what made them.

    Returns:
        One entry for each device, phase, kind and target, with n, models, and an error a form.
    """
    found: list[Any] = []
    for target in system_recipes.TARGETS:
        for name, frame in forms.items():
            plain = frame[~frame["quantised"].astype(bool)]
            plain = plain[plain[f"{target}_measured"].notna()]
            error = (plain[target] / plain[f"{target}_measured"] - 1.0).abs() * 100.0
            phase = system_recipes.PHASES.get(target)
            where: Any = np.where(plain["table"] == "energaizer_prefill", "prefill", "decode")
            whole = plain["table"].isin(["argonne_latency", "argonne_power"])
            where = np.where(whole, "whole run", where) if phase is None else phase
            kind = np.where(plain["moe"], "moe", "dense")
            keyed = pd.DataFrame(
                dict(device=plain["device"], phase=where, kind=kind, error=error,
                     group=plain["group"])
            )  # fmt: skip
            for key, rows in keyed.groupby(["device", "phase", "kind"]):
                match = [r for r in found if (*key, target) == r["key"]]
                entry = match[0] if match else {"key": (*key, target)}
                if not match:
                    found.append(entry)
                entry |= dict(
                    zip(("device", "phase", "kind"), key, strict=True),
                    target="energy" if target == "energy" else "time",
                    n=len(rows),
                    models=int(rows["group"].nunique()),
                )
                entry[name] = round(float(rows["error"].mean()), 2)
    for entry in found:
        del entry["key"]
    return sorted(found, key=lambda r: (r["target"], r["phase"], r["kind"], r["device"]))
