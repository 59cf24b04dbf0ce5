"""How far off is every method on whole models that it never saw?

Every measured system is predicted by the baselines and by our levels, each fitted without the
architecture of the row wherever it has coefficients to fit. Prints the tables and writes
results.json, README.md and a plot beside itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hymell_jax import (
    baseline_fits,
    experiment,
    system_recipes,
    system_rows,
    systems,
    wattgpu_fits,
)

HERE = Path(__file__).parent
OURS = ("level 1", "levels 1+2", "level 3")
TIME = ("roofline, plain", "roofline", "life", "liminal", "amali-lite", "wattgpu", "wattgpu+")
ENERGY = (
    "tokens-to-watt-hours, literal", "tokens-to-watt-hours, table3_refit",
    "tokens-to-watt-hours, simplified", "tokens-to-watt-hours", "sweetspot", "tdp",
    "load-scaled-tdp", "wattgpu", "wattgpu+",
)  # fmt: skip
SHORT = {
    "tokens-to-watt-hours, literal": "t2wh literal",
    "tokens-to-watt-hours, table3_refit": "t2wh table 3",
    "tokens-to-watt-hours, simplified": "t2wh simplified",
    "tokens-to-watt-hours": "t2wh calibrated",
}
SOURCES = {
    "mlenergy_v3": "mlenergy_v3", "argonne_latency": "argonne", "argonne_power": "argonne",
    "energaizer_prefill": "energaizer", "splitwise": "splitwise",
}  # fmt: skip
KEYS = ("source", "device", "width", "phase", "target")


def our_folds(config: dict[str, Any], folder: Path):
    """Level 3 with architectures left out, and the same rows with level-1 blocks (or None)."""
    rows, _ = systems.read_systems(folder, tuple(SOURCES))
    rows = rows[rows["engine"].isin(config["engines"])].reset_index(drop=True)
    full, bare = (
        system_rows.shipped_models(config.get("checkpoints"), with_blocks)
        for with_blocks in (True, False)
    )
    blocks = False

    def best(device, engine, dtype):
        nonlocal blocks
        model = full(device, engine, dtype)
        blocks = blocks or bool(model.blocks)
        return model

    engines = sorted(rows["engine"].unique())
    costs = system_rows.block_costs(rows, best, experiment.report)
    problems = [system_rows.problem(e, rows, costs) for e in engines]
    lower = None
    if blocks:
        costs = system_rows.block_costs(rows, bare, experiment.report)
        lower = [system_rows.problem(e, rows, costs) for e in engines]
    return system_recipes.fit_folds(problems, config["seeds"], experiment.report), lower


def _targets(frames: pd.DataFrame) -> np.ndarray:
    return frames[list(system_recipes.TARGETS)].to_numpy(float)


def predictions(fitted, lower) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
    """The rows with what was measured, and by method what it says of each, [n_rows, n_targets]."""
    full = system_recipes.predict_left_out(fitted)
    found = {"level 3": _targets(full)}
    blocks = _targets(system_recipes.predict_bare(fitted))
    if lower is None:
        found["level 1"] = blocks
    else:
        found["level 1"] = _targets(system_recipes.predict_bare(fitted, lower))
        found["levels 1+2"] = blocks
    every = baseline_fits.left_out_rows(fitted)
    jobs = {name: baseline_fits.left_out for name in baseline_fits.FITTED}
    jobs |= {name: baseline_fits.given for name in baseline_fits.GIVEN}
    for number, (name, run) in enumerate(jobs.items()):
        found[name] = np.concatenate(run(name, every))
        experiment.report("methods", number + 1, len(jobs) + 3)
    found["load-scaled-tdp"] = baseline_fits.load_scaled(full, found["tdp"])
    found["sweetspot"] = np.concatenate(baseline_fits.sweetspot_left_out(every))
    for name, extended in (("wattgpu", False), ("wattgpu+", True)):
        found[name] = np.concatenate(wattgpu_fits.left_out(every, "lolo", extended))
    experiment.report("methods", len(jobs) + 3, len(jobs) + 3)
    return full, found


def long_table(full: pd.DataFrame, found: dict[str, np.ndarray]) -> pd.DataFrame:
    """One line for each row, target and method: relative error in percent."""
    whole = full["table"].isin(["argonne_latency", "argonne_power"])
    energy_phase = np.where(full["table"] == "energaizer_prefill", "prefill", "decode, mean step")
    energy_phase = np.where(whole, "whole run", energy_phase)
    width = np.where(full["quantised"].astype(bool), "quantised", "16 bits")
    parts = []
    for column, target in enumerate(system_recipes.TARGETS):
        measured = full[f"{target}_measured"].to_numpy(float)
        known = np.isfinite(measured)
        phase = (
            energy_phase
            if target == "energy"
            else np.full(len(full), system_recipes.PHASES[target])
        )
        for name, values in found.items():
            error = np.abs(values[:, column] / measured - 1.0) * 100.0
            keep = known & np.isfinite(error)
            parts.append(
                pd.DataFrame(
                    dict(
                        row=np.flatnonzero(keep), source=full["table"].map(SOURCES)[keep],
                        device=full["device"][keep], group=full["group"][keep],
                        width=width[keep],
                        phase=phase[keep], target="energy" if target == "energy" else "time",
                        method=name, error=error[keep],
                    )
                )
            )  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def by_cell(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Errors of every method for each source, device, width, phase and target.

    `best_other` is the baseline with the least mean error among those that answer for all rows.
    """
    found = []
    for key, cell in table.groupby(list(KEYS)):
        ours = cell[cell["method"] == "level 3"]
        entry = dict(zip(KEYS, key, strict=True)) | dict(
            n=len(ours), models=int(ours["group"].nunique()), methods={}
        )
        for name, rows in cell.groupby("method"):
            entry["methods"][name] = dict(
                n=len(rows), mape=round(float(rows["error"].mean()), 2),
                mdape=round(float(rows["error"].median()), 2),
            )  # fmt: skip
        others = {
            n: m["mape"]
            for n, m in entry["methods"].items()
            if n not in OURS and m["n"] == len(ours)
        }
        entry["best_other"] = min(others, key=others.get) if others else None
        entry["ratio"] = round(
            others[entry["best_other"]] / max(entry["methods"]["level 3"]["mape"], 1e-9), 2
        ) if others else None  # fmt: skip
        found.append(entry)
    return found


def head_to_head(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Every method against level 3 on the rows that it answers for, by width of the weights.

    Mean steps are left out of the times: they say again what median steps say.
    """
    table = table[(table["phase"] != "decode, mean step") | (table["target"] == "energy")]
    found = []
    for (target, width), here in table.groupby(["target", "width"]):
        ours = here[here["method"] == "level 3"].set_index(["row", "phase"])["error"]
        shown = TIME if target == "time" else ENERGY
        for name in (*OURS[:2], *shown):
            rows = here[here["method"] == name]
            if rows.empty:
                continue
            theirs = rows.set_index(["row", "phase"])["error"]
            same = ours.loc[theirs.index]
            found.append(
                dict(
                    target=target, width=width, method=name, n=len(theirs),
                    models=int(rows["group"].nunique()),
                    mape=round(float(theirs.mean()), 2), mdape=round(float(theirs.median()), 2),
                    ours_mape=round(float(same.mean()), 2),
                    ours_mdape=round(float(same.median()), 2),
                    ours_nearer_pct=round(100.0 * float((same < theirs).mean()), 1),
                )
            )  # fmt: skip
    return found


def cell_lines(cells: list[dict[str, Any]], target: str, methods: tuple[str, ...]) -> list[str]:
    """A Markdown table: one line a cell, one column a method; the least error in bold."""
    chosen = [c for c in cells if c["target"] == target]
    shown = [m for m in (*OURS, *methods) if any(m in c["methods"] for c in chosen)]
    heads = ["source", "device", "width", "phase", "n", "models", *(SHORT.get(m, m) for m in shown)]
    lines = []
    for c in chosen:
        complete = [v["mape"] for v in c["methods"].values() if v["n"] == c["n"]]
        texts = []
        for m in shown:
            value = c["methods"].get(m)
            if value is None:
                texts.append("-")
                continue
            text = f"{value['mape']:.1f}" if value["mape"] < 1000 else "> 1000"
            if value["n"] != c["n"]:
                text += f" (n {value['n']})"
            texts.append(f"**{text}**" if value["mape"] == min(complete) else text)
        lines.append([*(c[key] for key in heads[:6]), *texts])
    return experiment.markdown(heads, lines)


def verdict(cells: list[dict[str, Any]]) -> list[str]:
    """Where level 3 has the least error, where not, and by how much."""
    lines = []
    for target in ("time", "energy"):
        here = [c for c in cells if c["target"] == target and c["best_other"]]
        lost = [c for c in here if c["ratio"] < 1.0]
        twice = sum(c["ratio"] >= 2.0 for c in here)
        lines.append(
            f"- {target}: level 3 has the least error in {len(here) - len(lost)} of {len(here)} "
            f"cells; in {twice} the best other method's error is at least twice as large."
        )
        for c in lost:
            name = c["best_other"]
            lines.append(
                f"  - not in {c['source']}, {c['device']}, {c['width']}, {c['phase']} "
                f"(n {c['n']}): {SHORT.get(name, name)} {c['methods'][name]['mape']:.1f} %, "
                f"level 3 {c['methods']['level 3']['mape']:.1f} %."
            )
    return lines


def readme(results: dict[str, Any]) -> list[str]:
    """Lines of README.md, from the results alone."""
    cells = results["cells"]
    heads = ["target", "width", "method", "n", "models", "MAPE", "MdAPE", "ours MAPE", "ours MdAPE",
             "ours nearer, % of rows"]  # fmt: skip
    lines = [
        "# How far off is every method on whole models that it never saw?",
        "",
        "Every row of the sources is predicted by every method that covers it. Written by",
        "",
        "```sh",
        "python experiments/method_comparison/run.py --data DIR",
        "```",
        "",
        "Mean absolute relative error in percent, the least in bold. A method with coefficients",
        "is fitted without the row's architecture, for each engine and device: `roofline` (two",
        "efficiencies), `life`, `liminal`, `amali-lite`, the times of `tdp`, `t2wh calibrated` and",
        "`sweetspot` (across models, by batch size); our levels by the folds of level 3.",
        "`roofline, plain` and the other forms of t2wh (From Tokens to Watt-hours) have published",
        "constants. `wattgpu` are the published trees on their own coverage (dense, 16 bits, one",
        "GPU), without the row's model; `wattgpu+` the same with batch, lengths, GPUs and active",
        "parameters added. `t2wh` and `sweetspot` give no time. Prompt lengths that a source hides",
        "are those that level 3 found without the row's architecture, for every method. `level 1`",
        "and `levels 1+2` are blocks added up. `(n ...)` says that a method covers fewer rows.",
        "",
        "## Verdict",
        "",
        *verdict(cells),
        "",
        "## Time",
        "",
        *cell_lines(cells, "time", TIME),
        "",
        "## Energy",
        "",
        *cell_lines(cells, "energy", ENERGY),
        "",
        "## Head to head",
        "",
        "Each method against level 3 on the rows that it answers for, all sources together; times",
        "without mean steps, which say again what median steps say.",
        "",
        *experiment.markdown(heads, (row.values() for row in results["head_to_head"])),
        "",
        "![errors by source, device and method](errors.png)",
        "",
    ]
    if results["sweetspot_per_model"]:
        heads = ["engine", "device", "model", "GPUs", "batch", "n", "in sample", "length left out"]
        lines += [
            "## SweetSpot on models that it was fitted to",
            "",
            "Its own protocol: six coefficients for each model and batch (`all`: batches mixed).",
            "The paper reports 1.79 %, fitted and judged on the same models.",
            "",
        ]
        cells = []
        for r in results["sweetspot_per_model"]:
            batch = "all" if r["batch"] is None else f"{r['batch']:g}"
            outside = "-" if r["left_length_out"] is None else f"{r['left_length_out']:.1f}"
            keys = [r["engine"], r["device"], r["group"], f"{r['tensor_parallel']:g}", batch]
            cells.append([*keys, r["n"], f"{r['in_sample']:.1f}", outside])
        lines += [*experiment.markdown(heads, cells), ""]
    return lines


def plot(cells: list[dict[str, Any]], out_dir: Path) -> None:
    """One line a cell, one mark a method, time beside energy."""
    from matplotlib import colormaps

    colours = colormaps["tab20"].colors
    with experiment.figure(out_dir / "errors.png", (7.5, 8), 2, 2) as (_, axes):
        for axis, target, methods in zip(axes, ("time", "energy"), (TIME, ENERGY), strict=True):
            _marks(axis, [c for c in cells if c["target"] == target][::-1], methods, colours)
            axis.set_title(target)


def _marks(axis, chosen: list[dict[str, Any]], methods: tuple[str, ...], colours) -> None:
    """Errors of every method, one line a cell."""
    for index, name in enumerate(methods):
        points = [
            (c["methods"][name]["mape"], place)
            for place, c in enumerate(chosen)
            if name in c["methods"]
        ]
        if points:
            axis.plot(*zip(*points, strict=True), "o", ms=5, color=colours[2 * index % 20 + 1],
                      mec="grey", mew=0.4, label=SHORT.get(name, name))  # fmt: skip
    mine = [(c["methods"]["level 3"]["mape"], place) for place, c in enumerate(chosen)]
    axis.plot(*zip(*mine, strict=True), "D", ms=7, color="black", label="ours, level 3")
    axis.set_xscale("log")
    labels = [
        f"{c['source']}, {c['device']}\n{c['phase']}, {c['width']}, n {c['n']}" for c in chosen
    ]
    axis.set_yticks(range(len(chosen)), labels, fontsize=7)
    axis.set_xlabel("mean absolute error on models left out, %")
    axis.grid(axis="both", alpha=0.3)
    axis.legend(fontsize=7)


def main(config: dict[str, Any], folder: Path, out_dir: Path, folds=None) -> dict[str, Any]:
    """Run the experiment; returns and writes its results.

    Args:
        config: as config.json.
        folder: of measured tables.
        out_dir: where to write.
        folds: of `our_folds`, where they are at hand.
    """
    fitted, lower = folds if folds is not None else our_folds(config, folder)
    full, found = predictions(fitted, lower)
    table = long_table(full, found)
    cells = by_cell(table)
    per_model = baseline_fits.sweetspot_per_model(baseline_fits.left_out_rows(fitted))
    results = {
        "cells": cells,
        "head_to_head": head_to_head(table),
        "sweetspot_per_model": json.loads(per_model.to_json(orient="records")),
    }
    for target, methods in (("time", TIME), ("energy", ENERGY)):
        print(f"\n{target}")
        print("\n".join(cell_lines(cells, target, methods)))
    print("\n".join(verdict(cells)))
    experiment.write_results(out_dir, results, readme(results))
    plot(cells, out_dir)
    return results


if __name__ == "__main__":
    given = experiment.command(__doc__, HERE, reads_data=True)
    main(given.config, given.data, given.out)
