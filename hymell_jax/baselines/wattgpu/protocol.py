"""WattGPU's protocol: folds, parameter-free baselines, metrics, and its published tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hymell_jax.baselines.tdp import LOAD_FACTORS, SCENARIOS
from hymell_jax.baselines.wattgpu.trees import (
    checked_target,
    predict_rows,
    train_trees,
    usable_rows,
)

if TYPE_CHECKING:
    import pandas as pd

PROTOCOLS = ("cv", "logo", "lolo")
"""Five folds by (model, GPU), leave one GPU out, leave one LLM out."""

BASELINES = {"power": ("tdp", "load-scaled-tdp"), "itl": ("roofline",)}
OFFLINE_BATCH = 256.0  # vLLM's max-num-seqs, in the roofline of ITL

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
    checked_target(target)
    rows = usable_rows(table, target, extra)
    predicted = np.zeros(len(rows))
    for train, test in folds(rows, protocol):
        pipeline = train_trees(rows.iloc[train], target, extra)
        predicted[test] = predict_rows(pipeline, rows.iloc[test], target, extra)
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
    column = checked_target(target)[0]
    rows = usable_rows(table, target)
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
