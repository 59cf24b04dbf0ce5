"""How far off is everything on a GPU that was never measured?

One GPU is left out at a time: operators, attention blocks and whole systems are predicted from the
other GPUs' measurements and the data sheet, beside trees, rooflines and power limits on the same
folds. Prints the tables and writes results.json, README.md and a plot beside itself.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from hymell_jax import (
    attention,
    baseline_fits,
    checkpoint,
    data,
    devices,
    fit,
    system_fit,
    system_recipes,
    system_rows,
    systems,
)  # fmt: skip
from hymell_jax.baselines import tdp, wattgpu
from hymell_jax.files import write_whole

HERE = Path(__file__).parent
PUBLISHED = {"power": 13.5, "time": 8.5}  # WattGPU, arXiv 2607.02391: servers on unseen GPUs, MdAPE
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
KERNEL_METHODS = ("ours", "measured there", "roofline", "roofline, fitted", "trees")
SYSTEM_METHODS = {
    "time": ("ours", "roofline, plain", "roofline", "life", "liminal", "amali-lite", "wattgpu",
             "wattgpu+"),
    "power": ("ours", "tdp", "load-scaled-tdp", "wattgpu", "wattgpu+"),
    "energy": ("ours", "tokens-to-watt-hours", "sweetspot", "tdp", "load-scaled-tdp", "wattgpu+"),
}  # fmt: skip

_last = [0.0]


def _report(what: str, done: int, total: int) -> None:
    if time.monotonic() - _last[0] > 30.0 or done == total:
        _last[0] = time.monotonic()
        print(f"{what}: {done} of {total}", flush=True)


@contextlib.contextmanager
def without(device: str, folder: str | None = None) -> Iterator[str]:
    """A folder of checkpoints that never heard of a device."""
    root = Path(folder) if folder else checkpoint.shipped_folder()
    with tempfile.TemporaryDirectory() as place:
        for path in root.iterdir():
            if path.name != device:
                (Path(place) / path.name).symlink_to(path.resolve())
        yield place


# --- Operators and blocks ---------------------------------------------------------------------


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
        return jnp.exp(fit.gemm_log_time(coefficients["gemm"], device, *sizes, 2.0))
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
    found = frame.assign(**{m: np.nan for m in KERNEL_METHODS}, origin="")
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


def kernels(config: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Error rows of operators and attention blocks, by device and for all of them."""
    rows = []
    for name, (table, sizes) in TABLES.items():
        if not data.has_table(folder, table):
            continue
        frame = kernel_rows(folder, name, config["rows_each"])
        frame = kernel_predictions(frame, name, config.get("checkpoints"))
        groups = [*frame.groupby("device"), ("all", frame)]
        for device, here in groups:
            entry = {"table": name, "device": device, "n": len(here), "methods": {}}
            entry["from"] = here["origin"].iloc[0] if device != "all" else None
            for method in KERNEL_METHODS:
                entry["methods"][method] = errors(here[method], here["time_s"])
                if device == "all":
                    tau = kendall(here, list(sizes), "time_s", method)
                    entry["methods"][method]["gpu_tau"] = tau
            rows.append(entry)
        _report(name, len(frame), len(frame))
    return rows


# --- Systems ----------------------------------------------------------------------------------


def _moved_models(folder: str | None) -> system_rows.Models:
    """Level 1 of every device as if it had never been measured."""

    @functools.cache
    def find(device: str, engine: str, dtype: str):
        with without(device, folder) as place:
            return checkpoint.load(device, None, dtype, place).at_level(1)

    return find


def _hidden_prompts(p: system_rows.Problem) -> np.ndarray:
    """Prompt lengths [n_rows]; hidden ones by a fit to the engine's other devices."""
    known = np.asarray(p.rows.prompt_known) > 0
    given = np.asarray(p.rows.work.prompt_tokens)
    if known.all():
        return given
    base, device = system_recipes.base_weights(p.frame), p.frame["device"].to_numpy()
    weights = np.stack([base * (device != name) for name in p.machines])
    terms = system_fit.fit_engine(p.rows, p.sizes, weights, p.priors)
    fold = np.asarray(p.rows.machine)
    return np.where(known, given, np.exp(np.asarray(terms["prompt"])[fold, p.rows.task]))


def system_predictions(config: dict[str, Any], folder: Path):
    """(rows with measurements, {method: [n_rows, n_targets]}) with one device left out each."""
    rows, _ = systems.read_systems(folder, tuple(t for t in systems.SOURCES if "silicon" not in t))
    rows = rows[rows["engine"].isin(config["engines"])]
    several = rows.groupby("engine")["device"].transform("nunique") > 1
    rows = rows[several].reset_index(drop=True)
    costs = system_rows.block_costs(rows, _moved_models(config.get("checkpoints")), _report)
    problems = [system_rows.problem(e, rows, costs) for e in sorted(rows["engine"].unique())]
    ours = system_recipes.device_left_out(problems)
    targets = list(system_recipes.TARGETS)
    found = {"ours": ours[targets].to_numpy(float)}
    every = [baseline_fits.measured_rows(p, _hidden_prompts(p)) for p in problems]
    for name in baseline_fits.FITTED:
        found[name] = np.concatenate(baseline_fits.left_out(name, every, "device"))
    found["roofline, plain"] = np.concatenate(baseline_fits.given("roofline, plain", every))
    found["load-scaled-tdp"] = baseline_fits.load_scaled(ours, found["tdp"])
    found["sweetspot"] = np.concatenate(baseline_fits.sweetspot_left_out(every, "device"))
    for name, extended in (("wattgpu", False), ("wattgpu+", True)):
        found[name] = np.concatenate(baseline_fits.wattgpu_left_out(every, "logo", extended))
    tables = {t: wattgpu.evaluate(baseline_fits.wattgpu_table(every), t) for t in wattgpu.TARGETS}
    return ours, found, tables


def _primary(values: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """The time that a row is judged by: the first of `system_recipes.PRIMARY` that it measured."""
    out = np.full(len(values), np.nan)
    for name in system_recipes.PRIMARY[::-1]:
        column = system_recipes.TARGETS.index(name)
        known = np.isfinite(measured[:, column])
        out[known] = values[known, column]
    return out


def _watts(values: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Mean power of all GPUs: energy over the time of the same step, pass or run."""
    energy = values[:, system_recipes.TARGETS.index("energy")]
    out = np.full(len(values), np.nan)
    for name in ("prefill", "total", "steady"):
        column = system_recipes.TARGETS.index(name)
        known = np.isfinite(measured[:, column])
        out[known] = energy[known] / values[known, column]
    return out


def system_table(ours: pd.DataFrame, found: dict[str, np.ndarray]) -> pd.DataFrame:
    """One line a row with `<target> <method>` columns, time, power and energy."""
    names = [f"{t}_measured" for t in system_recipes.TARGETS]
    measured = ours[names].to_numpy(float)
    energy = system_recipes.TARGETS.index("energy")
    frame = ours.drop(columns=[*system_recipes.TARGETS, *names]).assign(
        bucket=np.round(np.log2(ours["batch"])),
        time_measured=_primary(measured, measured),
        power_measured=_watts(measured, measured),
        energy_measured=measured[:, energy],
        load=np.where(ours["continuous"] > 0, "served", "fixed batch"),
    )
    added = {}
    for method, values in found.items():
        added[f"time {method}"] = _primary(values, measured)
        added[f"power {method}"] = _watts(values, measured)
        added[f"energy {method}"] = values[:, energy]
    rated = frame["device"].map(
        {d: float(devices.get_device(d).device.power_limit_w) for d in frame["device"].unique()}
    )
    limit = (rated * frame["tensor_parallel"]).to_numpy(float)
    factors = np.array([tdp.LOAD_FACTORS[s] for s in baseline_fits.scenarios(frame)])
    added["power tdp"], added["power load-scaled-tdp"] = limit, limit * factors
    return pd.concat([frame, pd.DataFrame(added, index=frame.index)], axis=1)


COVERED = "served, as WattGPU"
"""Dense 16-bit models on one GPU: what the published figures are about."""

CELL = ["engine", "group", "task", "bucket", "prompt", "output_cell", "tensor_parallel",
        "weight_bytes"]  # fmt: skip


def system_errors(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Error rows by load and device, then all devices of a load, with ranks of GPUs."""
    frame = frame.assign(
        output_cell=np.where(frame["continuous"] > 0, 0.0, frame["output"].astype(float))
    )
    plain = ~frame["moe"].astype(bool) & ~frame["quantised"].astype(bool)
    covered = (frame["continuous"] > 0) & plain & (frame["tensor_parallel"] == 1)
    parts = [*frame.groupby("load"), (COVERED, frame[covered])]
    rows = []
    for load, part in (x for x in parts if len(x[1])):
        for device, here in [*part.groupby("device"), ("all", part)]:
            for target, methods in SYSTEM_METHODS.items():
                measured = here[f"{target}_measured"]
                if not np.isfinite(measured).any():
                    continue
                entry = dict(load=load, device=device, target=target,
                             n=int(np.isfinite(measured).sum()), methods={})  # fmt: skip
                for method in methods:
                    found = errors(here[f"{target} {method}"], measured)
                    if found and device == "all":
                        found["gpu_tau"] = kendall(
                            here, CELL, f"{target}_measured", f"{target} {method}"
                        )
                    entry["methods"][method] = found
                rows.append(entry)
    return rows


# --- Results ----------------------------------------------------------------------------------


def _line(values) -> str:
    return "| " + " | ".join(str(v) for v in values) + " |"


def _lines(rows, keys: list[str], methods, number: str) -> list[str]:
    """A Markdown table of one number of every method."""
    lines = [_line([*keys, *methods]), "|" + "---|" * (len(keys) + len(methods))]
    for row in rows:
        cells = []
        for method in methods:
            value = row["methods"].get(method)
            if value is None or value.get(number) is None:
                cells.append("-")
                continue
            x = value[number]
            text = f"{x:.2f}" if number == "gpu_tau" else f"{x:.1f}" if x < 1000 else "> 1000"
            cells.append(text + (f" (n {value['n']})" if value["n"] != row["n"] else ""))
        lines.append(_line([*(row[k] if row[k] is not None else "-" for k in keys), *cells]))
    return lines


def verdict(results: dict[str, Any]) -> list[str]:
    """Ours beside the published figures, and where another method is better."""
    lines = []
    for row in (r for r in results["systems"] if r["device"] == "all"):
        mine = row["methods"]["ours"]["mdape"]
        target = PUBLISHED.get(row["target"])
        others = {
            m: v["mdape"] for m, v in row["methods"].items()
            if m != "ours" and v and v["n"] == row["n"]
        }  # fmt: skip
        best = min(others, key=others.get) if others else None
        text = f"- {row['load']}, {row['target']} (n {row['n']}): ours {mine:.1f} %"
        if best:
            text += f", best other {best} {others[best]:.1f} %"
        if target and row["load"] == COVERED:
            text += (
                f"; published {target} % on other GPUs, {'met' if mine <= target else 'not met'}"
            )
        lines.append(text + ".")
    return lines


def write_readme(results: dict[str, Any], out_dir: Path) -> None:
    """README.md from the results alone."""
    whole = [r for r in results["kernels"] if r["device"] == "all"]
    lines = [
        "# How far off is everything on a GPU that was never measured?",
        "",
        "One GPU is left out at a time. Written by",
        "",
        "```sh",
        "python experiments/unseen_gpu/run.py --data DIR",
        "```",
        "",
        "`ours` takes the coefficients of the most alike other GPU (column `from`) with the data",
        "sheet of the one left out, as `hymell_jax.load` does for a GPU without measurements.",
        "",
        "## Operators and attention cores",
        "",
        "Median absolute relative error of time in percent, bf16 test rows, whole shapes held out.",
        "`measured there` is the GPU's own fit, for comparison; `roofline, fitted` has a launch",
        "time and two efficiencies from the other GPUs; `trees` are boosted trees on sizes, data",
        "sheet and roofline times of the other GPUs.",
        "",
        *_lines(results["kernels"], ["table", "device", "from", "n"], KERNEL_METHODS, "mdape"),
        "",
        "Mean absolute relative error:",
        "",
        *_lines(results["kernels"], ["table", "device", "from", "n"], KERNEL_METHODS, "mape"),
        "",
        "Kendall tau of the ranks of GPUs at one shape:",
        "",
        *_lines(whole, ["table", "n"], KERNEL_METHODS, "gpu_tau"),
        "",
        "## Whole systems",
        "",
        "Level 3 without networks, fitted on the other GPUs of the engine, on level-1 blocks of",
        "the most alike other GPU. Baselines with coefficients are fitted on the other GPUs of the",
        "engine, too; `wattgpu` on its own coverage (dense, 16 bits, one GPU), `wattgpu+` with",
        "batch, lengths, GPUs and active parameters added. Time is the median step of servers,",
        "else the pass or the run; power is of all GPUs. `served, as WattGPU` are the servers of",
        "dense 16-bit models on one GPU. Median absolute relative error in percent.",
        "",
    ]
    for target, methods in SYSTEM_METHODS.items():
        rows = [r for r in results["systems"] if r["target"] == target]
        if rows:
            lines += [f"### {target.capitalize()}", "",
                      *_lines(rows, ["load", "device", "n"], methods, "mdape"), "",
                      "Kendall tau of the ranks of GPUs, everything else fixed:", "",
                      *_lines([r for r in rows if r["device"] == "all"], ["load", "n"], methods,
                              "gpu_tau"), ""]  # fmt: skip
    lines += ["## Verdict", "", *verdict(results), ""]
    if results["wattgpu"]:
        keys = ["target", "load", "method", "n", "mdape", "pearson", "gpu_tau", "llm_tau"]
        lines += [
            "## The published protocol of WattGPU on these rows",
            "",
            "Five folds by model and GPU (`cv`), one GPU left out (`logo`), one model left out",
            "(`lolo`), and its baselines; `published` are MdAPE, Pearson's r and Kendall tau over",
            "GPUs and models on its own, larger and more uniform set of runs.",
            "",
            _line([*keys, "published"]),
            "|" + "---|" * (len(keys) + 1),
        ]
        for row in results["wattgpu"]:
            texts = ["-" if row[k] is None else f"{row[k]:.2f}" if isinstance(row[k], float)
                     else row[k] for k in keys]  # fmt: skip
            published = ", ".join("-" if x is None else f"{x:g}" for x in row["published"])
            lines.append(_line([*texts, published]))
        lines.append("")
    lines += ["![errors on GPUs left out](errors.png)", ""]
    write_whole(out_dir / "README.md", "\n".join(lines))


def plot(results: dict[str, Any], out_dir: Path) -> None:
    """Median errors of every method, one panel for each thing that is predicted."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [(f"{r['table']}, time", r) for r in results["kernels"] if r["device"] == "all"]
    panels += [(f"{r['load']}, {r['target']}", r) for r in results["systems"]
               if r["device"] == "all"]  # fmt: skip
    columns = 3
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(13, 2.6 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, row) in zip(axes.flat, panels, strict=False):
        known = {m: v["mdape"] for m, v in row["methods"].items() if v}
        colours = ["black" if m == "ours" else "tab:grey" if m == "measured there" else "tab:orange"
                   for m in known]  # fmt: skip
        axis.barh(range(len(known)), [min(x, 150.0) for x in known.values()], color=colours)
        axis.set_yticks(range(len(known)), list(known), fontsize=7)
        axis.invert_yaxis()
        axis.set_title(f"{title} (n {row['n']})", fontsize=9)
        axis.set_xlabel("median error on a GPU left out, %", fontsize=8)
        target = PUBLISHED.get(row.get("target", ""))
        if target and row["load"] == COVERED:
            axis.axvline(target, color="tab:blue", linewidth=1)
    figure.savefig(out_dir / "errors.png", dpi=90)
    plt.close(figure)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row as JSON reads it back: lists, and None for what is not a number."""
    found = {k: list(v) if isinstance(v, tuple) else v for k, v in row.items()}
    return {k: None if isinstance(v, float) and np.isnan(v) else v for k, v in found.items()}


def main(
    config: dict[str, Any],
    folder: Path,
    out_dir: Path,
    predict_systems: Callable[..., Any] = system_predictions,
) -> dict[str, Any]:
    """Run the experiment; returns and writes its results."""
    results: dict[str, Any] = {"kernels": kernels(config, folder), "systems": [], "wattgpu": []}
    if config["engines"]:
        ours, found, tables = predict_systems(config, folder)
        results["systems"] = system_errors(system_table(ours, found))
        results["wattgpu"] = [_plain(row) for table in tables.values() for row in table]
    shown = _lines(results["kernels"], ["table", "device", "from", "n"], KERNEL_METHODS, "mdape")
    print("\n".join(shown))
    for target, methods in SYSTEM_METHODS.items():
        rows = [r for r in results["systems"] if r["target"] == target]
        print("\n".join([f"\n{target}", *_lines(rows, ["load", "device", "n"], methods, "mdape")]))
    print("\n".join(verdict(results)))
    out_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=0, allow_nan=False)
    write_whole(out_dir / "results.json", text + "\n")
    write_readme(results, out_dir)
    plot(results, out_dir)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of measured tables; default $HYMELL_DATA")
    parser.add_argument("--out", type=Path, default=HERE)
    arguments = parser.parse_args()
    main(
        json.loads((HERE / "config.json").read_text()),
        data.data_folder(arguments.data),
        arguments.out,
    )
