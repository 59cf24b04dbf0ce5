"""WattGPU's trees on measured whole models, one model or one GPU left out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from hymell_jax.baseline_fits import Measured, scenarios
from hymell_jax.baselines import wattgpu
from hymell_jax.parameters import exact_parameters
from hymell_jax.system_fit import TARGETS
from hymell_jax.systems import group_architecture

EXTENDED = (
    "log_batch", "log_prompt", "log_output", "log_gpus", "log_active_b_params", "weight_bytes",
    "continuous", "eager",
)  # fmt: skip
"""What the published features lack and the rows have; `table(..., extended=True)`."""


def table(every: Sequence[Measured], extended: bool = False) -> pd.DataFrame:
    """Measured rows as WattGPU's table: `power_w` of one GPU, `itl_s`, features, scenario.

    Inter-token latency is, as published, seconds over all generated tokens offline and the time
    between two tokens of a request of servers (the median step, else the mean one). Covered are
    dense 16-bit models on one GPU, except with `extended`, which takes every row but whole passes
    without output tokens and adds `EXTENDED`.

    Returns:
        One row for each measured row that is covered, with `engine_index` and `row_index` of where
        it stood. What a data sheet lacks (some base clocks) is NaN.
    """
    parts = []
    for number, rows in enumerate(every):
        f = rows.frame
        tokens = f["batch"] * f["output"]
        served = f["decode_median_s"].fillna(f["decode_time_s"])
        whole = f["total_time_s"] / tokens
        if not extended:
            itl = np.where(f["continuous"] > 0, served, whole)
        else:
            itl = served.fillna(f["total_time_s"] / f["output"])
        keep = f["table"] != "energaizer_prefill"
        if not extended:
            sixteen = ~f["quantised"].astype(bool)
            keep = keep & ~f["moe"].astype(bool) & (f["tensor_parallel"] == 1) & sixteen
        found = pd.DataFrame(
            dict(
                model=f["group"], gpu=f["device"], scenario=scenarios(f), itl_s=itl,
                power_w=f["power_w"] / f["tensor_parallel"], engine_index=number,
                row_index=np.arange(len(f)), batch=f["batch"],
                log_batch=np.log(f["batch"]), log_prompt=np.log(rows.work.prompt_tokens),
                log_output=np.log(f["output"]), log_gpus=np.log(f["tensor_parallel"]),
                weight_bytes=f["weight_bytes"], continuous=f["continuous"],
                eager=(f["engine"] == "transformers-eager").astype(float),
            )
        )  # fmt: skip
        parts.append(found[keep])
    found = pd.concat(parts, ignore_index=True)
    sheets = {g: wattgpu.gpu_features(g, complete=False) for g in found["gpu"].unique()}
    models = {g: _model_features(g) for g in found["model"].unique()}
    columns = pd.DataFrame([sheets[g] | models[m] for g, m in
                            zip(found["gpu"], found["model"], strict=True)])  # fmt: skip
    found = pd.concat([found, columns.drop(columns="device")], axis=1)
    return wattgpu.add_features(found)


@functools.cache
def _model_features(group: str) -> dict[str, Any]:
    arch = group_architecture(group)
    _, active = exact_parameters(arch)
    return wattgpu.architecture_features(arch) | {
        "model_type": group.partition("-")[0],
        "log_active_b_params": float(np.log(active / 1e9)),
    }


def left_out(
    every: Sequence[Measured], protocol: str = "lolo", extended: bool = False
) -> list[np.ndarray]:
    """Rows by WattGPU's trees, trained without their model ("lolo") or GPU ("logo").

    Power and latency make energy: watts of all GPUs times the time of the step or run.

    Returns:
        As `baseline_fits.left_out`; rows that the trees do not cover are NaN.
    """
    features = table(every, extended)
    extra = EXTENDED if extended else ()
    found = [np.full((len(rows.frame), len(TARGETS)), np.nan) for rows in every]
    values = {}
    for target in ("itl", "power"):
        rows = wattgpu.cross_validate(features, target, protocol, extra)
        for number, row, x in rows[["engine_index", "row_index", "predicted"]].itertuples(
            index=False
        ):
            values[number, row, target] = x
    for (number, row, target), itl in values.items():
        if target != "itl":
            continue
        f = every[number].frame.iloc[row]
        run = np.isfinite(f["total_time_s"])
        scale = f["output"] * (1.0 if extended else f["batch"]) if run else 1.0
        out = found[number][row]
        for name in ("total",) if run else ("decode", "steady", "median"):
            out[TARGETS.index(name)] = itl * scale
        watts = values.get((number, row, "power"))
        if watts is not None:
            out[TARGETS.index("energy")] = watts * f["tensor_parallel"] * itl * scale
    return found
