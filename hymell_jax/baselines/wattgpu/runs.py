"""WattGPU's measured runs, GPU table and features: what its trees are trained on."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from hymell_jax.baselines.tdp import SCENARIOS
from hymell_jax.data import numbers
from hymell_jax.devices import DeviceSpec, get_device
from hymell_jax.files import check_regular
from hymell_jax.types import reason, shown

if TYPE_CHECKING:
    import pandas as pd

RUN_COLUMNS = {
    "model": "repository id of the model",
    "gpu_type": "GPU as the driver names it, a key of `GPUS`",
    "lambda_qps": "requests a second of a server run, empty offline",
    "measurement_duration": "seconds",
    "generation_tokens_total": "generated tokens of the run",
    "gpu_0_power_draw_watts_mean": "mean power of the GPU [W]",
    "time_to_first_token_seconds_events": "list, seconds of each request",
    "e2e_request_latency_seconds_events": "list, seconds of each request",
    "request_generation_tokens": "list, tokens of each request",
}
"""Columns of the runs (`watt_counts_subset.csv`, separated by commas)."""

MODEL_COLUMNS = {
    "model_name": "repository id",
    "model_type": "family, as in config.json",
    "total_b_params": "billions",
    "active_b_params": "billions, equal to the total in a dense model",
    "hidden_size": "width",
    "num_attention_heads": "query heads",
    "num_key_value_heads": "KV heads",
    "num_layers": "layers",
}
"""Columns of the model table (`model_features.csv`, separated by semicolons)."""

_LISTS = tuple(name for name, meaning in RUN_COLUMNS.items() if meaning.startswith("list"))

GPU_FIELDS = (
    "device", "tdp_w", "memory_bandwidth_gb_s", "tflops_16b", "base_clock_mhz", "boost_clock_mhz",
    "transistor_count_m", "memory_size_gb", "memory_type", "release_year",
)  # fmt: skip
_GPU_ROWS = {  # name in the runs: values in the order of GPU_FIELDS
    "NVIDIA A30": ("a30-24gb", 165, 933.1, 165, 930, 1440, 54200, 24, "HBM2e", 2021),
    "NVIDIA H200": ("h200-sxm-141gb", 700, 4890, 835, 1365, 1785, 80000, 141, "HBM3e", 2024),
    "NVIDIA A100-SXM4-40GB": (
        "a100-sxm-40gb", 400, 1560, 312, 1095, 1410, 54200, 40, "HBM2e", 2020,
    ),
    "NVIDIA L40S": ("l40s-48gb", 350, 864, 362, 1110, 2520, 76300, 48, "GDDR6", 2022),
    "NVIDIA H100 NVL": ("h100-nvl-94gb", 400, 3940, 835, 1080, 1785, 80000, 94, "HBM3", 2023),
    "Tesla V100-SXM2-32GB": (
        "v100-sxm-32gb", 300, 898, 125, 1290, 1530, 21100, 32, "HBM2", 2018,
    ),
    "NVIDIA L4": ("l4-24gb", 72, 300.1, 121, 795, 2040, 35800, 24, "GDDR6", 2023),
    "Tesla T4": ("t4-16gb", 70, 320, 65, 585, 1590, 13600, 16, "GDDR6", 2018),
}  # fmt: skip
GPUS: dict[str, dict[str, Any]] = {
    name: dict(zip(GPU_FIELDS, row, strict=True)) for name, row in _GPU_ROWS.items()
}
"""The eight GPUs as the published models saw them; `device` is the nearest shipped device.

Source: WattGPU's GPU table (TechPowerUp GPU database) with the TDPs that its notebook corrected
(L40S 350 W, H200 700 W) and its 16-bit rates (NVIDIA data sheets). H200 mixes the NVL card's clocks
and rate with the SXM module's TDP, as published. Numbers differ a little from the shipped devices'.
"""

EXTRA_CLOCKS = {  # device: (base clock, boost clock) [MHz] where the shipped device has no base
    "h100-pcie-80gb": (1095.0, 1755.0),
}
"""Source: WattGPU's GPU table (TechPowerUp GPU database)."""

PROMPT_AND_OUTPUT = 512.0 + 128.0  # of `kv_cache_size_bytes`


def _read_csv(path: str | os.PathLike[str], separator: str, columns, what: str) -> pd.DataFrame:
    import pandas as pd

    check_regular(path, f"{what} {str(path)!r}")
    try:
        frame = pd.read_csv(path, sep=separator)
    except Exception as error:  # readers of files raise errors of many libraries
        raise ValueError(f"The {what} {str(path)!r} cannot be read: {reason(error)}.") from None
    missing = [name for name in columns if name not in frame]
    if missing:
        raise ValueError(
            f"The {what} {str(path)!r} lacks the columns {', '.join(missing)}; it needs "
            f"{', '.join(columns)}, separated by {separator!r}."
        )
    return frame[list(columns)]


def _numbers(frame: pd.DataFrame, names, what: str, positive=()) -> None:
    import pandas as pd

    for name in names:
        converted = pd.Series(numbers(frame[name], texts=True), index=frame.index)
        above = converted > 0 if name in positive else converted >= 0
        bad = frame[name].notna() & ~(np.isfinite(converted) & above)
        if bad.any():
            kind = "positive " if name in positive else ""
            first = shown(frame.loc[bad, name].iloc[0])
            raise ValueError(f"Column {name} of the {what} must hold {kind}numbers; got {first}.")
        frame[name] = converted


def read_runs(path: str | os.PathLike[str]) -> pd.DataFrame:
    """The measured runs, one a row, `RUN_COLUMNS`; list columns become arrays.

    Raises:
        ValueError: unreadable, a column missing, or a value of the wrong kind.
    """
    frame = _read_csv(path, ",", RUN_COLUMNS, "table of runs").copy()
    for name in _LISTS:
        frame[name] = [_list(text, name, row) for row, text in enumerate(frame[name])]
    scalars = [name for name in RUN_COLUMNS if name not in (*_LISTS, "model", "gpu_type")]
    positive = ("measurement_duration", "gpu_0_power_draw_watts_mean")
    _numbers(frame, scalars, "table of runs", positive)
    return frame


def _list(text: Any, name: str, row: int) -> np.ndarray:
    """An array from a list as text; empty where there is none."""
    if text is None or (isinstance(text, float) and np.isnan(text)):
        return np.zeros(0)
    try:
        values = np.asarray(json.loads(str(text)), np.float64).reshape(-1)
    except (ValueError, TypeError, RecursionError, OverflowError):
        values = np.array([np.nan])
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(
            f"Column {name}, row {row}: not a list of numbers, none negative; got {shown(text)}."
        )
    return values


def read_models(path: str | os.PathLike[str]) -> pd.DataFrame:
    """The model table, one model a row, `MODEL_COLUMNS`.

    Raises:
        ValueError: unreadable, a column missing, or a value that is not a number.
    """
    frame = _read_csv(path, ";", MODEL_COLUMNS, "table of models").copy()
    sizes = [name for name in MODEL_COLUMNS if name not in ("model_name", "model_type")]
    _numbers(frame, sizes, "table of models", sizes)
    return frame


def request_itl_s(e2e_s, first_token_s, tokens) -> float:
    """Mean over requests with at least two tokens of (e2e - ttft) / (tokens - 1); NaN if none.

    Raises:
        ValueError: lists of different length.
    """
    e2e, first, count = (np.asarray(x, np.float64) for x in (e2e_s, first_token_s, tokens))
    if not e2e.shape == first.shape == count.shape:
        raise ValueError(
            f"Request lists differ in length: {e2e.size}, {first.size} and {count.size}."
        )
    valid = count >= 2
    if not valid.any():
        return float("nan")
    return float(np.mean((e2e - first)[valid] / (count[valid] - 1.0)))


def build_table(runs: pd.DataFrame, models: pd.DataFrame) -> pd.DataFrame:
    """One row per run with features and targets, `power_w` [W] and `itl_s` [s].

    Left out, with their number in `attrs["dropped"]`: runs without tokens, mixtures (total and
    active parameters differ), runs whose rate is exactly 0.2, which belongs to no scenario.

    Raises:
        ValueError: a GPU that is not in `GPUS`, or a model that is not in the table of models.
    """
    import pandas as pd

    unknown = sorted(set(runs["gpu_type"]) - set(GPUS))
    if unknown:
        raise ValueError(f"No data sheet of {', '.join(unknown)}; known are {', '.join(GPUS)}.")
    unknown = sorted(set(runs["model"]) - set(models["model_name"]))
    if unknown:
        raise ValueError(f"The table of models lacks {', '.join(unknown[:5])}.")
    if models["model_name"].duplicated().any():
        raise ValueError("The table of models names a model twice.")
    frame = runs.merge(models, left_on="model", right_on="model_name", how="left")
    sheet = pd.DataFrame.from_dict(GPUS, orient="index").drop(columns="device")
    frame = frame.merge(sheet, left_on="gpu_type", right_index=True, how="left")
    rate = frame["lambda_qps"]
    frame["scenario"] = np.select([rate.isna(), rate < 0.2, rate > 0.2], SCENARIOS, default="none")
    dropped = {
        "no tokens": ~(frame["generation_tokens_total"] > 0),
        "mixture": frame["total_b_params"] != frame["active_b_params"],
        "no scenario": frame["scenario"] == "none",
    }
    keep = ~np.logical_or.reduce(list(dropped.values()))
    frame = frame[keep].reset_index(drop=True)
    offline = frame["scenario"] == "offline"
    whole = frame["measurement_duration"] / frame["generation_tokens_total"]
    served = [request_itl_s(*row) for row in zip(*(frame[n] for n in (
        "e2e_request_latency_seconds_events", "time_to_first_token_seconds_events",
        "request_generation_tokens")), strict=True)]  # fmt: skip
    frame["itl_s"] = np.where(offline, whole, served)
    frame = frame.rename(columns={"gpu_type": "gpu", "gpu_0_power_draw_watts_mean": "power_w"})
    frame = add_features(frame.drop(columns=[*_LISTS, "model_name"]))
    frame.attrs["dropped"] = {name: int(mask.sum()) for name, mask in dropped.items()}
    return frame


def add_features(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the derived features of the paper; P is billions of parameters.

    boost_percentage = boost / base clock; bandwidth_latency = 2 P / (GB/s) [s]; compute_latency_s =
    2 P / (1000 TFLOP/s); KV bytes of 512 + 128 tokens; free memory, memory at 90 % and the
    requests of 1256 tokens that fit in it, GB and counts as published (without grouped queries).
    """
    out = frame.copy()
    params, hidden = out["total_b_params"], out["hidden_size"]
    out["boost_percentage"] = out["boost_clock_mhz"] / out["base_clock_mhz"]
    out["log_total_b_params"] = np.log(params)
    out["bandwidth_latency"] = 2.0 * params / out["memory_bandwidth_gb_s"]
    out["compute_latency_s"] = 2.0 * params / (1e3 * out["tflops_16b"])
    per_token = 2.0 * out["num_key_value_heads"] * (hidden / out["num_attention_heads"]) * 2.0
    out["kv_cache_size_bytes"] = per_token * out["num_layers"] * PROMPT_AND_OUTPUT
    out["estimated_free_memory"] = out["memory_size_gb"] - 2.0 * params
    out["estimated_available_memory"] = 0.9 * out["memory_size_gb"] - 2.0 * params
    out["mb_per_token"] = 2.0 * out["num_layers"] * hidden * 2.0 / 2.0**20
    out["max_concurrent_requests"] = (
        out["estimated_available_memory"] * 1024.0 / out["mb_per_token"] / 1256.0
    )
    return out


def gpu_features(spec: str | DeviceSpec, complete: bool = True) -> dict[str, Any]:
    """What the models need of a GPU, keys `GPU_FIELDS`: a row of `GPUS`, or the device's own.

    Args:
        spec: name in the runs, or anything that `get_device` takes.
        complete: refuse a device that lacks any; otherwise NaN, which training and prediction fill
            with the mean of the training rows.

    Raises:
        ValueError: an unknown device, or one without transistor count, base clock, release year
            or memory type.
    """
    if isinstance(spec, str) and spec in GPUS:
        return dict(GPUS[spec])
    spec = get_device(spec)
    for row in GPUS.values():
        if row["device"] == spec.name:
            return dict(row)
    extras, device = spec.extras, spec.device
    base, boost = EXTRA_CLOCKS.get(
        spec.name,
        (
            extras.get("base_clock_hz", 0.0) / 1e6,
            extras.get("max_clock_hz", float(device.boost_clock_hz)) / 1e6,
        ),
    )
    values = {
        "device": spec.name,
        "tdp_w": float(device.power_limit_w),
        "memory_bandwidth_gb_s": float(device.memory_bytes_per_s) / 1e9,
        "tflops_16b": float(device.peak_flops_per_s) / 1e12,
        "base_clock_mhz": base,
        "boost_clock_mhz": boost,
        "transistor_count_m": extras.get("transistor_count", 0.0) / 1e6,
        "memory_size_gb": round(float(device.memory_bytes) / 2.0**30),
        "memory_type": extras.get("memory_type"),
        "release_year": extras.get("release_year"),
    }
    missing = [name for name, value in values.items() if not value]
    if not complete:
        return {name: np.nan if name in missing else value for name, value in values.items()}
    if missing:
        raise ValueError(
            f"WattGPU needs {', '.join(missing)} of {spec.name}, which its description lacks."
        )
    return values
