"""Does each level earn its place? Whole models left out of every fit, with levels taken away.

Fits level 3 once on blocks with their networks and once on bare operators, with and without its own
network, beside the sums of the lower levels and a black box on the same folds. Prints the table and
writes results.json, README.md and a plot beside itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hymell_jax import experiment, system_recipes, system_rows, system_tables, systems

HERE = Path(__file__).parent
FORMS = ("1", "1+2", "1+3, no network", "1+3", "1+2+3, no network", "1+2+3", "black box")


def predictions(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Left-out predictions of the same rows by every form of `FORMS`."""
    rows, _ = systems.read_systems(folder)
    rows = rows[rows["engine"].isin(config["engines"])].reset_index(drop=True)
    engines = sorted(rows["engine"].unique())
    forms: dict[str, Any] = {}
    for lower, with_blocks in (("1", False), ("1+2", True)):
        models = system_rows.shipped_models(config.get("checkpoints"), with_blocks)
        costs = system_rows.block_costs(rows, models, experiment.report)
        problems = [system_rows.problem(engine, rows, costs) for engine in engines]
        fitted = system_recipes.fit_folds(problems, config["seeds"], experiment.report)
        forms[lower] = system_recipes.predict_bare(fitted)
        forms[f"{lower}+3, no network"] = system_recipes.predict_left_out(
            fitted, with_network=False
        )
        forms[f"{lower}+3"] = system_recipes.predict_left_out(fitted)
    forms["black box"] = system_tables.black_box(forms["1+2+3"], config["black_box"])
    return {name: forms[name] for name in FORMS}


def in_all(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean over all rows of each phase and target."""
    found = []
    for phase, target in sorted({(r["phase"], r["target"]) for r in rows}):
        here = [r for r in rows if (r["phase"], r["target"]) == (phase, target)]
        weights = np.array([r["n"] for r in here], float)
        entry = {"phase": phase, "target": target, "n": int(weights.sum())}
        for form in FORMS:
            errors = [r.get(form) for r in here]
            if all(error is not None for error in errors):
                entry[form] = round(float(np.average(np.array(errors, float), weights=weights)), 2)
        found.append(entry)
    return found


def _table(rows: list[dict[str, Any]], *keys: str) -> list[str]:
    return experiment.markdown(keys, experiment.values(rows, keys), digits=1)


def readme(results: dict[str, Any]) -> list[str]:
    """Lines of README.md, from the results alone."""
    return [
        "# Does each level earn its place?",
        "",
        "Mean absolute error in percent on 16-bit rows of whole models, each architecture left out",
        "of every fit. Level 3 is fitted anew on what lies below it: `1+3` on bare operators,",
        "`1+2+3` on blocks with their networks; `no network` is its physics alone. `1` and `1+2`",
        "are the parts added up. `black box` are boosted trees on sizes of model, workload and",
        "device with the same models left out. Written by",
        "",
        "```sh",
        "python experiments/level_ablation/run.py --data DIR",
        "```",
        "",
        *_table(results["in_all"], "phase", "target", "n", *FORMS),
        "",
        "## By device",
        "",
        *_table(results["by_device"], "device", "phase", "kind", "target", "n", "models", *FORMS),
        "",
        "![error of each form](ablation.png)",
        "",
    ]


def plot(rows: list[dict[str, Any]], out_dir: Path) -> None:
    """Error of each form by phase and target."""
    with experiment.figure(out_dir / "ablation.png", (11, 4)) as (_, (axis,)):
        for index, form in enumerate(FORMS):
            heights = [min(r.get(form) or 0.0, 80.0) for r in rows]
            bars = axis.bar(np.arange(len(rows)) + 0.12 * (index - 3), heights, 0.12, label=form)
            cut = ["> 80" if (r.get(form) or 0.0) > 80 else "" for r in rows]
            axis.bar_label(bars, cut, fontsize=6)
        axis.set_xticks(np.arange(len(rows)), [f"{r['phase']}, {r['target']}" for r in rows])
        axis.set_ylabel("mean absolute error, %, models left out")
        axis.legend(fontsize=7, ncols=2)


def main(config: dict[str, Any], folder: Path, out_dir: Path) -> dict[str, Any]:
    """Run the experiment; returns and writes its results."""
    rows = system_tables.by_device(predictions(config, folder))
    results = {"in_all": in_all(rows), "by_device": rows}
    print("\n".join(_table(results["in_all"], "phase", "target", "n", *FORMS)))
    experiment.write_results(out_dir, results, readme(results))
    plot(results["in_all"], out_dir)
    return results


if __name__ == "__main__":
    given = experiment.command(__doc__, HERE, reads_data=True)
    main(given.config, given.data, given.out)
