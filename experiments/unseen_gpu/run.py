"""How far off is everything on a GPU that was never measured?

One GPU is left out at a time: operators, attention blocks and whole systems are predicted from the
other GPUs' measurements and the data sheet, beside trees, rooflines and power limits on the same
folds. Prints the tables and writes results.json, README.md and a plot beside itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hymell_jax import (
    baseline_fits,
    checkpoint,
    data,
    devices,
    experiment,
    system_fit,
    system_recipes,
    system_rows,
    systems,
    unseen,
    wattgpu_fits,
)  # fmt: skip
from hymell_jax.baselines import tdp, wattgpu

HERE = Path(__file__).parent
PUBLISHED = {"power": 13.5, "time": 8.5}  # WattGPU, arXiv 2607.02391: servers on unseen GPUs, MdAPE
COLOURS = {"ours": "black", "measured there": "tab:grey"}
SYSTEM_METHODS = {
    "time": ("ours", "roofline, plain", "roofline", "life", "liminal", "amali-lite", "wattgpu",
             "wattgpu+"),
    "power": ("ours", "tdp", "load-scaled-tdp", "wattgpu", "wattgpu+"),
    "energy": ("ours", "tokens-to-watt-hours", "sweetspot", "tdp", "load-scaled-tdp", "wattgpu+"),
}  # fmt: skip


def kernels(config: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Error rows of operators and attention blocks, by device and for all of them."""
    rows = []
    for name, (table, sizes) in unseen.TABLES.items():
        if not data.has_table(folder, table):
            continue
        frame = unseen.kernel_rows(folder, name, config["rows_each"])
        frame = unseen.kernel_predictions(frame, name, config.get("checkpoints"))
        groups = [*frame.groupby("device"), ("all", frame)]
        for device, here in groups:
            entry = {"table": name, "device": device, "n": len(here), "methods": {}}
            entry["from"] = here["origin"].iloc[0] if device != "all" else None
            for method in unseen.METHODS:
                entry["methods"][method] = unseen.errors(here[method], here["time_s"])
                if device == "all":
                    tau = unseen.kendall(here, list(sizes), "time_s", method)
                    entry["methods"][method]["gpu_tau"] = tau
            rows.append(entry)
        experiment.report(name, len(frame), len(frame))
    return rows


def _moved_models(folder: str | None) -> system_rows.Models:
    """Level 1 of every device as if it had never been measured."""

    @functools.cache
    def find(device: str, engine: str, dtype: str):
        with unseen.without(device, folder) as place:
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
    costs = system_rows.block_costs(
        rows, _moved_models(config.get("checkpoints")), experiment.report
    )
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
        found[name] = np.concatenate(wattgpu_fits.left_out(every, "logo", extended))
    tables = {t: wattgpu.evaluate(wattgpu_fits.table(every), t) for t in wattgpu.TARGETS}
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
                    found = unseen.errors(here[f"{target} {method}"], measured)
                    if found and device == "all":
                        found["gpu_tau"] = unseen.kendall(
                            here, CELL, f"{target}_measured", f"{target} {method}"
                        )
                    entry["methods"][method] = found
                rows.append(entry)
    return rows


def _lines(rows, keys: list[str], methods, number: str) -> list[str]:
    """A Markdown table of one number of every method."""
    lines = []
    for row in rows:
        cells = [row[key] for key in keys]
        for method in methods:
            value = row["methods"].get(method)
            if value is None or value.get(number) is None:
                cells.append("-")
                continue
            x = value[number]
            text = f"{x:.2f}" if number == "gpu_tau" else f"{x:.1f}" if x < 1000 else "> 1000"
            cells.append(text + (f" (n {value['n']})" if value["n"] != row["n"] else ""))
        lines.append(cells)
    return experiment.markdown([*keys, *methods], lines)


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


def readme(results: dict[str, Any]) -> list[str]:
    """Lines of README.md, from the results alone."""
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
        *_lines(results["kernels"], ["table", "device", "from", "n"], unseen.METHODS, "mdape"),
        "",
        "Mean absolute relative error:",
        "",
        *_lines(results["kernels"], ["table", "device", "from", "n"], unseen.METHODS, "mape"),
        "",
        "Kendall tau of the ranks of GPUs at one shape:",
        "",
        *_lines(whole, ["table", "n"], unseen.METHODS, "gpu_tau"),
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
        ]
        cells = [
            [*(row[k] for k in keys),
             ", ".join("-" if x is None else f"{x:g}" for x in row["published"])]
            for row in results["wattgpu"]
        ]  # fmt: skip
        lines += [*experiment.markdown([*keys, "published"], cells, digits=2), ""]
    return [*lines, "![errors on GPUs left out](errors.png)", ""]


def plot(results: dict[str, Any], out_dir: Path) -> None:
    """Median errors of every method, one panel for each thing that is predicted."""
    panels = [(f"{r['table']}, time", r) for r in results["kernels"] if r["device"] == "all"]
    panels += [(f"{r['load']}, {r['target']}", r) for r in results["systems"]
               if r["device"] == "all"]  # fmt: skip
    plan = ((13 / 3, 2.6), len(panels), 3)
    with experiment.figure(out_dir / "errors.png", *plan) as (_, axes):
        for axis, (title, row) in zip(axes, panels, strict=True):
            known = {m: v["mdape"] for m, v in row["methods"].items() if v}
            colours = [COLOURS.get(method, "tab:orange") for method in known]
            axis.barh(range(len(known)), [min(x, 150.0) for x in known.values()], color=colours)
            axis.set_yticks(range(len(known)), list(known), fontsize=7)
            axis.invert_yaxis()
            axis.set_title(f"{title} (n {row['n']})", fontsize=9)
            axis.set_xlabel("median error on a GPU left out, %", fontsize=8)
            target = PUBLISHED.get(row.get("target", ""))
            if target and row["load"] == COVERED:
                axis.axvline(target, color="tab:blue", linewidth=1)


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
    shown = _lines(results["kernels"], ["table", "device", "from", "n"], unseen.METHODS, "mdape")
    print("\n".join(shown))
    for target, methods in SYSTEM_METHODS.items():
        rows = [r for r in results["systems"] if r["target"] == target]
        print("\n".join([f"\n{target}", *_lines(rows, ["load", "device", "n"], methods, "mdape")]))
    print("\n".join(verdict(results)))
    experiment.write_results(out_dir, results, readme(results))
    plot(results, out_dir)
    return results


if __name__ == "__main__":
    given = experiment.command(__doc__, HERE, reads_data=True)
    main(given.config, given.data, given.out)
