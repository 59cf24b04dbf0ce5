"""WattGPU: mean power and inter-token latency of a serving GPU by gradient-boosted trees.

    power = W / TDP,  XGBoost(max_depth 6, reg_lambda 150, n_estimators 200)
    ln ITL,           XGBoost(max_depth 5, reg_lambda 100, n_estimators 100)

on features of the model, the GPU's data sheet and the scenario: offline, or a server at low (under
0.2 requests a second) or high load. Inter-token latency is seconds over generated tokens offline,
the mean over requests of (end to end - first token) / (tokens - 1) of servers.

Trees have no gradient, so this is the one method here that is not differentiable; it is also the
only one without numbers before a fit: neither trees nor the training runs come with it. `read_runs`
and `build_table` import the runs, `cross_validate` follows the published protocol, `fit_models`
makes what `predict` needs. Its parameter-free baselines are in `baseline`.

XGBoost and scikit-learn are the optional extra `baselines`.

Source: WattGPU, arXiv 2607.02391, and its public notebook (maufadel/wattgpu, Apache-2.0): features,
settings, protocol and metrics, written anew. Settings not listed are the libraries' defaults.
"""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hymell_jax import parameters
from hymell_jax.baselines.interface import Method, MethodPrediction, prediction
from hymell_jax.baselines.tdp import LOAD_FACTORS, SCENARIOS
from hymell_jax.devices import DeviceSpec, get_device
from hymell_jax.types import Architecture, Workload

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

POWER_FEATURES = (
    "scenario", "log_total_b_params", "model_type", "num_key_value_heads", "num_layers",
    "memory_bandwidth_gb_s", "boost_percentage", "transistor_count_m", "base_clock_mhz",
    "release_year", "bandwidth_latency",
)  # fmt: skip
ITL_FEATURES = (
    "scenario", "model_type", "total_b_params", "hidden_size", "num_attention_heads",
    "num_key_value_heads", "num_layers", "memory_bandwidth_gb_s", "memory_size_gb", "memory_type",
    "tflops_16b", "release_year", "bandwidth_latency", "compute_latency_s",
)  # fmt: skip
CATEGORICAL = ("scenario", "model_type", "memory_type")

TARGETS = {  # target: (column, features, settings of the trees)
    "power": ("power_w", POWER_FEATURES, dict(max_depth=6, reg_lambda=150, n_estimators=200)),
    "itl": ("itl_s", ITL_FEATURES, dict(max_depth=5, reg_lambda=100, n_estimators=100)),
}
PROTOCOLS = ("cv", "logo", "lolo")
"""Five folds by (model, GPU), leave one GPU out, leave one LLM out."""

BASELINES = {"power": ("tdp", "load-scaled-tdp"), "itl": ("roofline",)}
OFFLINE_BATCH = 256.0  # vLLM's max-num-seqs, in the roofline of ITL
PROMPT_AND_OUTPUT = 512.0 + 128.0  # of `kv_cache_size_bytes`

PUBLISHED = {  # (target, load, protocol or baseline): MdAPE %, Pearson r, GPU tau, LLM tau
    ("power", "offline", "cv"): (1.6, 0.992, 0.96, 0.44),
    ("power", "offline", "logo"): (3.4, 0.988, 0.95, 0.40),
    ("power", "offline", "lolo"): (2.0, 0.979, 0.97, 0.33),
    ("power", "offline", "load-scaled-tdp"): (7.2, 0.916, 0.96, None),
    ("power", "offline", "tdp"): (4.4, 0.916, 0.96, None),
    ("power", "server", "cv"): (5.5, 0.981, 0.86, 0.68),
    ("power", "server", "logo"): (13.5, 0.965, 0.76, 0.72),
    ("power", "server", "lolo"): (6.7, 0.955, 0.85, 0.54),
    ("power", "server", "load-scaled-tdp"): (26.0, 0.779, 0.60, None),
    ("power", "server", "tdp"): (190.1, 0.590, 0.60, None),
    ("itl", "offline", "cv"): (12.8, 0.813, 0.86, 0.81),
    ("itl", "offline", "logo"): (24.9, 0.727, 0.72, 0.83),
    ("itl", "offline", "lolo"): (15.6, 0.808, 0.97, 0.66),
    ("itl", "offline", "roofline"): (80.2, 0.545, 0.82, 0.61),
    ("itl", "server", "cv"): (4.9, 0.991, 0.94, 0.89),
    ("itl", "server", "logo"): (8.5, 0.972, 0.78, 0.88),
    ("itl", "server", "lolo"): (5.6, 0.990, 0.97, 0.88),
    ("itl", "server", "roofline"): (29.6, 0.991, 0.88, 0.91),
}
"""Tables of the paper; None where predictions do not rank models."""


# --- Tables -----------------------------------------------------------------------------------


def _read_csv(path: str | os.PathLike[str], separator: str, columns, what: str) -> pd.DataFrame:
    import pandas as pd

    try:
        frame = pd.read_csv(path, sep=separator)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"The {what} {str(path)!r} cannot be read: {reason}") from None
    missing = [name for name in columns if name not in frame]
    if missing:
        raise ValueError(
            f"The {what} {str(path)!r} lacks the columns {', '.join(missing)}; it needs "
            f"{', '.join(columns)}, separated by {separator!r}."
        )
    return frame[list(columns)]


def _numbers(frame: pd.DataFrame, names, what: str) -> None:
    import pandas as pd

    for name in names:
        converted = pd.to_numeric(frame[name], errors="coerce")
        bad = converted.isna() & frame[name].notna()
        if bad.any():
            first = frame.loc[bad, name].iloc[0]
            raise ValueError(f"Column {name} of the {what} must hold numbers; got {first!r}.")
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
    _numbers(frame, scalars, "table of runs")
    return frame


def _list(text: Any, name: str, row: int) -> np.ndarray:
    """An array from a list as text; empty where there is none."""
    if text is None or (isinstance(text, float) and np.isnan(text)):
        return np.zeros(0)
    try:
        return np.asarray(ast.literal_eval(str(text)), np.float64).reshape(-1)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError(
            f"Column {name}, row {row}: not a list of numbers; got {str(text)[:60]!r}."
        ) from None


def read_models(path: str | os.PathLike[str]) -> pd.DataFrame:
    """The model table, one model a row, `MODEL_COLUMNS`.

    Raises:
        ValueError: unreadable, a column missing, or a value that is not a number.
    """
    frame = _read_csv(path, ";", MODEL_COLUMNS, "table of models").copy()
    _numbers(frame, [n for n in MODEL_COLUMNS if n not in ("model_name", "model_type")], "models")
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


# --- Models and protocol ----------------------------------------------------------------------


def _checked_target(target: str) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}; got {target!r}.")
    return TARGETS[target]


def make_pipeline(target: str, extra: Sequence[str] = ()) -> Any:
    """Imputation, scaling or ordinal codes, and the boosted trees of "power" or "itl".

    Numbers: mean imputed, standardised. Categories: most frequent, codes, -1 for unknown ones.
    `extra` names numbers beyond the published features.

    Raises:
        ValueError: another target, or the extra `baselines` is not installed.
    """
    _, features, settings = _checked_target(target)
    try:
        from sklearn.compose import ColumnTransformer
        from sklearn.impute import SimpleImputer
        from sklearn.pipeline import Pipeline
        from sklearn.preprocessing import OrdinalEncoder, StandardScaler
        from xgboost import XGBRegressor
    except ImportError as error:
        raise ValueError(
            "WattGPU needs xgboost and scikit-learn: install the extra, "
            "`pip install hymell-jax[baselines]`."
        ) from error
    numbers = [name for name in (*features, *extra) if name not in CATEGORICAL]
    names = [name for name in features if name in CATEGORICAL]
    codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    fill = SimpleImputer(keep_empty_features=True)
    steps = [
        ("numbers", Pipeline([("fill", fill), ("scale", StandardScaler())]), numbers),
        (
            "names",
            Pipeline([("fill", SimpleImputer(strategy="most_frequent")), ("code", codes)]),
            names,
        ),
    ]
    return Pipeline(
        [("prepare", ColumnTransformer(steps)), ("trees", XGBRegressor(n_jobs=1, **settings))]
    )


def _inputs(table: pd.DataFrame, features) -> pd.DataFrame:
    frame = table[list(features)].copy()
    for name in CATEGORICAL:
        if name in frame:
            frame[name] = frame[name].astype(object)
    return frame


def _rows(table: pd.DataFrame, target: str, extra: Sequence[str] = ()) -> pd.DataFrame:
    """Rows with a target and, as published for ITL, with every feature."""
    column, features, _ = TARGETS[target]
    features = (*features, *extra)
    needed = [column, *features] if target == "itl" else [column]
    every = ("model", "gpu", "scenario", "tdp_w", column, *features)
    missing = [name for name in every if name not in table]
    if missing:
        raise ValueError(f"The table lacks the columns {', '.join(missing)}.")
    rows = table.dropna(subset=needed)
    if not (rows[column] > 0).all():
        raise ValueError(f"Column {column} must be positive.")
    return rows.reset_index(drop=True)


def _train(rows: pd.DataFrame, target: str, extra: Sequence[str] = ()) -> Any:
    column, features, _ = TARGETS[target]
    goal = np.log(rows[column]) if target == "itl" else rows[column] / rows["tdp_w"]
    inputs = _inputs(rows, (*features, *extra))
    return make_pipeline(target, extra).fit(inputs, goal.to_numpy(np.float64))


def _apply(pipeline: Any, rows: pd.DataFrame, target: str, extra: Sequence[str] = ()) -> np.ndarray:
    inputs = _inputs(rows, (*TARGETS[target][1], *extra))
    found = np.asarray(pipeline.predict(inputs), np.float64)
    return np.exp(found) if target == "itl" else found * rows["tdp_w"].to_numpy(np.float64)


def folds(table: pd.DataFrame, protocol: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(train, test) row indices: grouped 5-fold, leave-one-GPU-out or leave-one-LLM-out.

    The five folds keep all runs of a model on a GPU together, largest groups dealt out first to
    the smallest fold, as scikit-learn's GroupKFold does.

    Raises:
        ValueError: another protocol, or fewer than two groups.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}; got {protocol!r}.")
    if protocol == "cv":
        names = (table["model"].astype(str) + "|" + table["gpu"].astype(str)).to_numpy()
    else:
        names = table["gpu" if protocol == "logo" else "model"].astype(str).to_numpy()
    groups, member, sizes = np.unique(names, return_inverse=True, return_counts=True)
    if len(groups) < 2:
        raise ValueError(f"{protocol} needs at least two groups; the table has {len(groups)}.")
    fold_of = np.arange(len(groups))
    if protocol == "cv":
        load = np.zeros(min(5, len(groups)))
        for group in np.argsort(sizes)[::-1]:
            fold_of[group] = int(np.argmin(load))
            load[fold_of[group]] += sizes[group]
    for fold in np.unique(fold_of):
        test = fold_of[member] == fold
        yield np.flatnonzero(~test), np.flatnonzero(test)


def cross_validate(
    table: pd.DataFrame, target: str, protocol: str, extra: Sequence[str] = ()
) -> pd.DataFrame:
    """The rows used, with `predicted` in W or s from models that did not see their group.

    Args:
        table: as `build_table` makes it; all scenarios train one model.
        target: "power" or "itl".
        protocol: one of `PROTOCOLS`.
        extra: numeric columns to use beside the published features.

    Raises:
        ValueError: unknown target or protocol, too few groups, missing columns or packages.
    """
    _checked_target(target)
    rows = _rows(table, target, extra)
    predicted = np.zeros(len(rows))
    for train, test in folds(rows, protocol):
        pipeline = _train(rows.iloc[train], target, extra)
        predicted[test] = _apply(pipeline, rows.iloc[test], target, extra)
    return rows.assign(predicted=predicted)


def baseline(table: pd.DataFrame, name: str) -> np.ndarray:
    """Predictions [W or s] of a parameter-free baseline, one a row.

    "tdp": TDP. "load-scaled-tdp": rho TDP, rho 0.9 offline, 0.2 and 0.6 of servers at low and high
    load. "roofline": 2 P / BW / B [s], B = 256 offline and 1 of servers.

    Raises:
        ValueError: another name, or an unknown scenario.
    """
    scenario = table["scenario"]
    unknown = sorted(set(scenario) - set(SCENARIOS))
    if unknown:
        raise ValueError(f"scenario must be one of {', '.join(SCENARIOS)}; got {unknown[0]!r}.")
    if name == "tdp":
        return table["tdp_w"].to_numpy(np.float64)
    if name == "load-scaled-tdp":
        return (scenario.map(LOAD_FACTORS) * table["tdp_w"]).to_numpy(np.float64)
    if name == "roofline":
        batch = np.where(scenario == "offline", OFFLINE_BATCH, 1.0)
        seconds = 2.0 * table["total_b_params"] / table["memory_bandwidth_gb_s"]
        return seconds.to_numpy(np.float64) / batch
    raise ValueError(f"baseline must be tdp, load-scaled-tdp or roofline; got {name!r}.")


def mdape(measured, predicted) -> float:
    """Median of |predicted / measured - 1|, percent."""
    measured, predicted = np.asarray(measured, np.float64), np.asarray(predicted, np.float64)
    return float(100.0 * np.median(np.abs(predicted / measured - 1.0)))


def pearson(measured, predicted) -> float:
    """Pearson's r; NaN where either is constant."""
    measured, predicted = np.asarray(measured, np.float64), np.asarray(predicted, np.float64)
    if len(measured) < 2 or np.ptp(measured) == 0 or np.ptp(predicted) == 0:
        return float("nan")
    return float(np.corrcoef(measured, predicted)[0, 1])


def grouped_tau(table: pd.DataFrame, measured, predicted, ranked: str) -> float:
    """Mean Kendall tau-b of the ranks of GPUs or models, over the groups that hold the rest fixed.

    Runs of one cell are averaged first. GPUs are ranked within (model, scenario), models within
    (gpu, scenario). Groups of one, and those constant in either column, are skipped: NaN if none
    is left.

    Args:
        ranked: "gpu" or "model".

    Raises:
        ValueError: another `ranked`.
    """
    from scipy.stats import kendalltau

    fixed = {"gpu": ["model", "scenario"], "model": ["gpu", "scenario"]}
    if ranked not in fixed:
        raise ValueError(f"ranked must be gpu or model; got {ranked!r}.")
    keys = [*fixed[ranked], ranked]
    frame = table[keys].assign(
        measured=np.asarray(measured, np.float64), predicted=np.asarray(predicted, np.float64)
    )
    cells = frame.groupby(keys)[["measured", "predicted"]].mean().reset_index()
    found = []
    for _, group in cells.groupby(fixed[ranked]):
        a, b = group["measured"].to_numpy(), group["predicted"].to_numpy()
        if len(a) > 1 and np.ptp(a) > 0 and np.ptp(b) > 0:
            found.append(float(kendalltau(a, b).statistic))
    return float(np.mean(found)) if found else float("nan")


def metrics(table: pd.DataFrame, measured, predicted) -> dict[str, dict[str, float]]:
    """Published metrics of offline rows and of servers' rows, those that the table has.

    Returns:
        {"offline": {"n", "mdape", "pearson", "gpu_tau", "llm_tau"}, "server": {...}}.
    """
    measured, predicted = np.asarray(measured, np.float64), np.asarray(predicted, np.float64)
    offline = (table["scenario"] == "offline").to_numpy()
    found = {}
    for load, mask in (("offline", offline), ("server", ~offline)):
        if mask.any():
            rows, a, b = table[mask], measured[mask], predicted[mask]
            found[load] = {
                "n": int(mask.sum()),
                "mdape": mdape(a, b),
                "pearson": pearson(a, b),
                "gpu_tau": grouped_tau(rows, a, b, "gpu"),
                "llm_tau": grouped_tau(rows, a, b, "model"),
            }
    return found


def evaluate(table: pd.DataFrame, target: str) -> list[dict[str, Any]]:
    """Metrics of every protocol and baseline for one target, beside the published ones.

    Raises:
        ValueError: as `cross_validate`.
    """
    column = _checked_target(target)[0]
    rows = _rows(table, target)
    predicted = {name: cross_validate(rows, target, name)["predicted"] for name in PROTOCOLS}
    predicted |= {name: baseline(rows, name) for name in BASELINES[target]}
    return [
        {
            "target": target,
            "load": load,
            "method": name,
            **values,
            "published": PUBLISHED[target, load, name],
        }
        for name, found in predicted.items()
        for load, values in metrics(rows, rows[column], found).items()
    ]


# --- Prediction -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class WattModels:
    """Fitted trees and the setting to predict for; `dataclasses.replace` changes the setting."""

    power: Any
    itl: Any
    scenario: str = "offline"
    model_type: str = "llama"  # family as in config.json; unknown ones are allowed

    def __post_init__(self) -> None:
        if self.scenario not in SCENARIOS:
            raise ValueError(
                f"scenario must be one of {', '.join(SCENARIOS)}; got {self.scenario!r}."
            )


def fit_models(table: pd.DataFrame, scenario: str = "offline") -> WattModels:
    """Both models trained on all rows of a table of `build_table`.

    Raises:
        ValueError: missing columns or packages, or an unknown scenario.
    """
    trained = {target: _train(_rows(table, target), target) for target in TARGETS}
    return WattModels(**trained, scenario=scenario)


def architecture_features(arch: Architecture) -> dict[str, float]:
    """What the models need of an architecture, from one concrete architecture."""
    total, _ = parameters.exact_parameters(arch)
    return {
        "total_b_params": total / 1e9,
        "hidden_size": float(arch.d_model),
        "num_attention_heads": float(arch.n_heads),
        "num_key_value_heads": float(arch.n_kv_heads),
        "num_layers": float(arch.n_layers),
    }


def default_coefficients() -> None:
    """None: there is nothing before a fit."""
    return None


def predict(
    arch: Architecture, work: Workload, device: str | DeviceSpec, coefficients: WattModels | None
) -> MethodPrediction:
    """What the trees give for one concrete model on one GPU; the workload's lengths do not enter.

    Offline, ITL is seconds over tokens of the whole batch, so power x ITL is joules per generated
    token, prefill included, but no step time: energy alone is available. Of servers ITL is the
    time between two tokens of a request, while power is shared with the other requests: time
    alone is available.

    Args:
        device: a `DeviceSpec` or the name of a device, not a bare `Device`: clocks, transistors
            and the year are needed.
        coefficients: of `fit_models`.

    Raises:
        ValueError: no fitted models, a bare device, metadata missing, several GPUs, a mixture.
    """
    import pandas as pd

    if coefficients is None:
        raise ValueError(
            "WattGPU has no published trees: fit them with wattgpu.fit_models(table) first."
        )
    if not isinstance(device, str | DeviceSpec):
        raise ValueError(
            "WattGPU needs a DeviceSpec or a device name, not a bare Device: it uses clocks, "
            "transistor count and release year."
        )
    if float(work.tensor_parallel) != 1 or float(work.expert_parallel) != 1:
        raise ValueError("WattGPU covers a single GPU.")
    if float(arch.n_experts) > 0:
        raise ValueError("WattGPU covers dense models; this one has experts.")
    sheet = gpu_features(device)
    row = architecture_features(arch) | sheet
    row |= {"scenario": coefficients.scenario, "model_type": coefficients.model_type}
    frame = add_features(pd.DataFrame([row]))
    watts = float(_apply(coefficients.power, frame, "power")[0])
    itl_s = float(_apply(coefficients.itl, frame, "itl")[0])
    if coefficients.scenario == "offline":
        return prediction(work, decode_energy_per_token_j=np.float32(watts * itl_s))
    return prediction(work, decode_time_per_token_s=np.float32(itl_s))


METHOD = Method(
    name="wattgpu",
    title="WattGPU",
    source="arXiv 2607.02391 (CEUR Vol-4275, paper 7), notebook maufadel/wattgpu",
    inputs=("model metadata", "GPU data sheet with clocks, transistors and year", "scenario"),
    assumes=("vLLM, one GPU, 16-bit dense models of 0.1B to 27B", "the benchmark's lengths"),
    leaves_out=("prompt and output lengths", "batch", "mixtures", "prefill", "gradients"),
    published_accuracy=(
        "median error on unseen GPUs: power 3.4 % offline, 13.5 % of servers; inter-token latency "
        "24.9 % offline, 8.5 % of servers"
    ),
    gives=("decode_time_per_token_s", "decode_energy_per_token_j"),
    forms={"default": (predict, default_coefficients)},
    differentiable=False,
    needs_fit=True,
    default_note="none: the trees must be fitted to measured runs",
)
