"""Operators and attention cores on a GPU that was left out: ours beside rooflines and trees.

Every method predicts the test rows of one GPU from the train rows of the others and the data sheet
of the one left out; "measured there" is that GPU's own fit, for comparison.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from hymell_jax import attention, checkpoint, data, devices, fit
from hymell_jax.baselines import wattgpu

TABLES = {
    "gemm": ("operators/gemm", ("m", "n", "k")),
    "attention prefill": (
        "blocks/attention_prefill", ("batch", "seq_len", "n_heads", "n_kv_heads", "head_dim"),
    ),
    "attention decode": (
        "blocks/attention_decode", ("batch", "context_len", "n_heads", "n_kv_heads", "head_dim"),
    ),
}  # fmt: skip
RATES = ("peak_flops_per_s", "memory_bytes_per_s", "n_sm", "l2_bytes", "boost_clock_hz")
TREES = dict(n_estimators=200, max_depth=8, learning_rate=0.1, n_jobs=1, random_state=0)
METHODS = ("ours", "measured there", "roofline", "roofline, fitted", "trees")


@contextlib.contextmanager
def without(device: str, folder: str | None = None) -> Iterator[str]:
    """A folder of checkpoints that never heard of a device."""
    root = checkpoint.root_folder(folder)
    with tempfile.TemporaryDirectory() as place:
        for path in root.iterdir():
            if path.name != device:
                (Path(place) / path.name).symlink_to(path.resolve())
        yield place


def kernel_rows(folder: Path, name: str, each: int, seed: int = 0) -> pd.DataFrame:
    """bf16 test rows of one table, one runtime a device, shapes that most devices share first."""
    table, sizes = TABLES[name]
    frame = data.read_table(folder, table)
    known = {d for d, _, t in checkpoint.available() if t == "bf16"}
    frame = frame[(frame["dtype"] == "bfloat16") & frame["device"].isin(known)]
    if "kv_dtype" in frame:
        frame = frame[(frame["kv_dtype"] == "bfloat16") & (frame["window_size"] == 0)]
    newest = {
        d: max(set(rows["runtime"]), key=checkpoint.version_key)
        for d, rows in frame.groupby("device")
    }
    frame = frame[frame["runtime"] == frame["device"].map(newest)]
    frame = frame.drop_duplicates(["device", *sizes])
    frame["shared"] = frame.groupby(list(sizes))["device"].transform("size")
    generator = np.random.default_rng(seed)
    order = frame[list(sizes)].drop_duplicates()
    order = order.assign(order=generator.permutation(len(order)))
    frame = frame.merge(order, on=list(sizes)).sort_values(["shared", "order"],
                                                           ascending=[False, True])  # fmt: skip
    return frame.groupby(["device", "split"]).head(each).reset_index(drop=True)


@functools.partial(jax.jit, static_argnames="name")
def _ours(name, coefficients, device, sizes):
    if name == "gemm":
        m, n, k = sizes
        return jnp.exp(fit.gemm_log_time(coefficients["gemm"], device, m, n, k, 2.0))
    batch, tokens, heads, kv_heads, head_dim = sizes
    run = attention.ATTENTION_TIME_S[name.partition(" ")[2]]
    found = run(coefficients["attention"], device, batch, tokens, heads, kv_heads, head_dim,
                head_dim)  # fmt: skip
    return found[0]


def _counts(name: str, sizes: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """FLOPs and bytes, float64."""
    if name == "gemm":
        m, n, k = sizes
        return 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n)
    batch, tokens, heads, kv_heads, width = sizes
    prefill = name.endswith("prefill")
    pairs = tokens * (tokens + 1.0) / 2.0 if prefill else tokens
    queries = tokens if prefill else np.ones_like(tokens)
    flops = 4.0 * batch * heads * width * pairs
    return flops, 4.0 * batch * width * (kv_heads * tokens + heads * queries)


def _sheets(frame: pd.DataFrame) -> dict[str, np.ndarray]:
    specs = {d: devices.get_device(d).device for d in frame["device"].unique()}
    return {f: np.array([float(getattr(specs[d], f)) for d in frame["device"]]) for f in RATES}


def _fitted_roofline(times, bounds, train, test) -> np.ndarray:
    """launch + max(compute / e_c, memory / e_m), three numbers fitted on the other devices."""
    from scipy.optimize import least_squares

    def logs(x, rows):
        larger = np.maximum(bounds[0][rows] * np.exp(x[0]), bounds[1][rows] * np.exp(x[1]))
        return np.log(larger + np.exp(x[2]))

    first = np.array([np.log(1 / 0.6), np.log(1 / 0.8), np.log(5e-6)])
    found = least_squares(lambda x: logs(x, train) - np.log(times[train]), first, loss="soft_l1",
                          f_scale=0.3).x  # fmt: skip
    return np.exp(logs(found, test))


def _trees(inputs, times, train, test) -> np.ndarray:
    import xgboost

    trees = xgboost.XGBRegressor(**TREES).fit(inputs[train], np.log(times[train]))
    return np.exp(trees.predict(inputs[test]))


def kernel_predictions(frame: pd.DataFrame, name: str, folder: str | None) -> pd.DataFrame:
    """Test rows of every device with a column for each method, fitted on the other devices."""
    sizes = [frame[s].to_numpy(np.float64) for s in TABLES[name][1]]
    sheets, times = _sheets(frame), frame["time_s"].to_numpy(np.float64)
    flops, moved = _counts(name, sizes)
    bounds = flops / sheets["peak_flops_per_s"], moved / sheets["memory_bytes_per_s"]
    inputs = np.log(np.stack([*sizes, flops, moved, *bounds, *sheets.values()], 1))
    found = frame.assign(**{m: np.nan for m in METHODS}, origin="")
    train = (frame["split"] == "train").to_numpy()
    for device in sorted(frame["device"].unique()):
        here = (frame["device"] == device).to_numpy()
        test, others = np.flatnonzero(here & ~train), np.flatnonzero(~here & train)
        if not len(test) or not len(others):
            continue
        own = checkpoint.load(device, frame["runtime"].to_numpy()[test[0]], folder=folder)
        with without(device, folder) as place:
            moved_here = checkpoint.load(device, folder=place)
        shapes = [s[test].astype(np.float32) for s in sizes]
        values = {
            "ours": _ours(name, moved_here.coefficients, moved_here.device, shapes),
            "measured there": _ours(name, own.coefficients, own.device, shapes),
            "roofline": np.maximum(*bounds)[test],
            "roofline, fitted": _fitted_roofline(times, bounds, others, test),
            "trees": _trees(inputs, times, others, test),
        }
        for method, value in values.items():
            found.loc[test, method] = np.asarray(value, np.float64)
        found.loc[test, "origin"] = moved_here.card.provenance["transferred_from"]
    return found[~train & (found["origin"] != "")]


def kendall(frame: pd.DataFrame, keys: list[str], measured: str, predicted: str) -> float | None:
    """Mean Kendall tau-b of the ranks of devices within cells that hold everything else fixed."""
    from scipy.stats import kendalltau

    known = frame[np.isfinite(frame[measured]) & np.isfinite(frame[predicted])]
    cells = known.groupby([*keys, "device"], dropna=False)[[measured, predicted]].mean()
    found = []
    for _, cell in cells.groupby(level=list(range(len(keys))), dropna=False):
        a, b = cell[measured].to_numpy(), cell[predicted].to_numpy()
        if len(a) > 1 and np.ptp(a) > 0 and np.ptp(b) > 0:
            found.append(kendalltau(a, b).statistic)
    return round(float(np.mean(found)), 3) if found else None


def errors(predicted, measured) -> dict[str, Any] | None:
    """n, MAPE, MdAPE in percent and Pearson's r of the rows that a method answers for."""
    predicted, measured = np.asarray(predicted, float), np.asarray(measured, float)
    known = np.isfinite(predicted) & np.isfinite(measured)
    if not known.any():
        return None
    error = np.abs(predicted[known] / measured[known] - 1.0) * 100.0
    r = wattgpu.pearson(measured[known], predicted[known])
    return dict(
        n=int(known.sum()), mape=round(float(error.mean()), 2),
        mdape=round(float(np.median(error)), 2), pearson=None if np.isnan(r) else round(r, 3),
    )  # fmt: skip
