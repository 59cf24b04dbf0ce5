"""How far off is level 3 on whole models that it never saw? Counterparts of tables 6 and 7.

Every measured system is predicted by fits that left its architecture out: by the blocks alone, by
the physics of serving, with the networks, and by a black box on the same folds. Prints the tables
and writes results.json, README.md and plots beside itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hymell_jax import experiment, system_recipes, system_rows, system_tables, systems

HERE = Path(__file__).parent
FORMS = ("level 1", "levels 1+2", "physics", "level 3", "black box")
PAPER = {  # HYMELL (arXiv 2608.06723), table 6: time, energy
    ("prefill", "dense"): (10.179, 9.969),
    ("decode", "dense"): (8.194, 10.771),
    ("prefill", "moe"): (12.772, 13.091),
    ("decode", "moe"): (12.776, 13.305),
}
PAPER_MEAN = (10.980, 11.784)
PAPER_LLAMA = {256: (5.65, 1.64), 1024: (4.44, 1.16), 2048: (1.60, 1.79), 4096: (5.09, 1.71)}
AMALI = (15.56, 34.90)  # prefill, decode


def error_rows(forms: dict[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """Errors of every form by table, engine, device, kind, GPUs, width and target."""
    merged: dict[tuple, dict[str, Any]] = {}
    for form, frame in forms.items():
        for row in system_recipes.error_table(frame):
            key = tuple(row[k] for k in ("table", "engine", "device", "kind", "gpus", "width"))
            entry = merged.setdefault((*key, row["target"]), dict(row))
            entry.pop("mape", None), entry.pop("mdape", None)
            entry[form] = {"mape": row["mape"], "mdape": row["mdape"]}
    for entry in merged.values():
        phase, target = system_recipes.PHASES.get(entry["target"], ""), entry["target"]
        if target == "energy":
            phase = "prefill" if entry["table"] == "energaizer_prefill" else "decode"
        paper = PAPER.get((phase, entry["kind"]))
        entry["phase"] = phase
        entry["paper"] = paper[target == "energy"] if paper else None
    return list(merged.values())


def with_paper(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what HYMELL reports for the phase and kind, where it does."""
    for row in rows:
        paper = PAPER.get((row["phase"], row["kind"]))
        row["paper"] = paper[row["target"] == "energy"] if paper else None
    return rows


def llama_by_length(forms: dict[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """Table 7: whole runs of LLaMA-3 8B at batch 1 on one GPU, by prompt and output length."""
    found = []
    first = forms["level 3"]
    here = (first["group"] == "llama-3-8b") & (first["batch"] == 1) & first["total"].notna()
    here &= first["total_measured"].notna() & (first["tensor_parallel"] == 1)
    here &= first["table"] == "argonne_latency"
    for (device, length), rows in first[here].groupby(["device", "prompt"]):
        entry = {"device": device, "prompt_and_output": int(length), "n": len(rows)}
        for name, frame in forms.items():
            one = frame.loc[rows.index]
            error = (one["total"] / one["total_measured"] - 1.0).abs() * 100.0
            entry[name] = round(float(error.mean()), 2)
        entry["engines"] = sorted(rows["engine"].unique())
        paper = PAPER_LLAMA.get(int(length))
        entry["paper_prefill_decode"] = list(paper) if paper else None
        found.append(entry)
    return found


def predictions(config: dict[str, Any], folder: Path) -> tuple[dict[str, pd.DataFrame], Any]:
    """Left-out predictions in every form, and what could not be read."""
    rows, unmapped = systems.read_systems(folder)
    rows = rows[rows["engine"].isin(config["engines"])].reset_index(drop=True)
    full, bare = (
        system_rows.shipped_models(config.get("checkpoints"), blocks) for blocks in (True, False)
    )
    costs = system_rows.block_costs(rows, full, experiment.report)
    level1 = system_rows.block_costs(rows, bare, experiment.report)
    engines = sorted(rows["engine"].unique())
    problems = [system_rows.problem(e, rows, costs) for e in engines]
    lower = [system_rows.problem(e, rows, level1) for e in engines]
    fitted = system_recipes.fit_folds(problems, config["seeds"], experiment.report)
    forms = {
        "level 1": system_recipes.predict_bare(fitted, lower),
        "levels 1+2": system_recipes.predict_bare(fitted),
        "physics": system_recipes.predict_left_out(fitted, with_network=False),
        "level 3": system_recipes.predict_left_out(fitted),
    }
    forms["black box"] = system_tables.black_box(forms["level 3"], config["black_box"])
    return forms, unmapped


def _table(rows: list[dict[str, Any]], *keys: str) -> list[str]:
    return experiment.markdown(keys, experiment.values(rows, keys), digits=1)


def readme(results: dict[str, Any]) -> list[str]:
    """Lines of README.md, from the results alone, so that it cannot differ from them."""
    six = ["device", "phase", "kind", "target", "n", "models", *FORMS, "paper"]
    inside = ["device", "target", "width", "n", "groups", "coverage", "half_width"]
    seven = ["device", "prompt_and_output", "n", *FORMS]
    return [
        "# How far off is level 3 on whole models that it never saw?",
        "",
        "Counterparts of tables 6 and 7 of HYMELL (arXiv 2608.06723), on public measurements of",
        "served models. Written by the command below, with `results.json` and plots:",
        "",
        "```sh",
        "python experiments/end_to_end_accuracy/run.py --data DIR",
        "```",
        "",
        "Mean absolute relative error in percent, 16-bit rows; every row is predicted by fits that",
        "never saw its architecture, under any name, engine or device. `level 1` and `levels 1+2`",
        "are the blocks added up, `physics` is level 3 without networks, `black box` boosted trees",
        "on the sizes of model, workload and device with the same models left out, `paper` what",
        "HYMELL reports on its own H100 NVL for architectures held out of its training (mean",
        f"{PAPER_MEAN[0]} % time, {PAPER_MEAN[1]} % energy). A whole run is prefill and all steps.",
        "",
        *_table(results["by_device"], *six),
        "",
        "Rows of 8 and 4 bits, and errors by table and engine, are in `results.json`.",
        "",
        "## Intervals",
        "",
        "Share of rows inside the 90 % intervals, whose quantiles never saw their architecture,",
        "and the median half width, both in percent.",
        "",
        *_table(results["coverage"], *inside),
        "",
        "## LLaMA-3 8B by length, batch 1",
        "",
        *_table(results["llama_3_8b"], *seven),
        "",
        "HYMELL reports 5.65, 4.44, 1.60 and 5.09 % of prefill time and 1.64, 1.16, 1.79 and",
        "1.71 % of decode time at 256, 1024, 2048 and 4096 tokens; for AMALI (ISCA 2025) it has",
        f"{AMALI[0]} % of prefill and {AMALI[1]} % of decode in each row. These are not like for",
        "like: AMALI's numbers are GPU cycles on an A100 averaged over prompts of 128 to 6144",
        "tokens, of a simulator that knows the kernels; HYMELL's are passes in Hugging Face",
        "transformers on an H100 NVL, with the model's operators profiled; those above are whole",
        "runs of TensorRT-LLM and vLLM of 2024, prefill and as many output tokens, by a fit that",
        "never saw the architecture.",
        "",
        "![left-out predictions against measurements](predicted.png)",
        "![each level](levels.png)",
        "",
    ]


def plot(forms: dict[str, pd.DataFrame], table: list[dict[str, Any]], out_dir: Path) -> None:
    """Predicted against measured, and the error of each form by device."""
    frame = forms["level 3"]
    frame = frame[~frame["quantised"].astype(bool)]
    shown = (("median", "median step, s"), ("total", "whole run, s"), ("energy", "energy, J"))
    with experiment.figure(out_dir / "predicted.png", (4, 4), 3, 3) as (_, axes):
        for axis, (target, title) in zip(axes, shown, strict=True):
            for device, rows in frame[frame[f"{target}_measured"].notna()].groupby("device"):
                axis.loglog(rows[f"{target}_measured"], rows[target], ".", ms=3, label=device)
            ends = np.array(axis.get_xlim())
            axis.plot(ends, ends, color="black", linewidth=0.8)
            axis.set_xlabel(f"measured {title}")
            axis.set_ylabel("predicted, architecture left out")
            axis.legend(fontsize=6)
    chosen = [r for r in table if r["n"] >= 10]
    with experiment.figure(out_dir / "levels.png", (12, 4)) as (_, (axis,)):
        for index, form in enumerate(FORMS):
            heights = [min(r.get(form) or 0.0, 100.0) for r in chosen]
            axis.bar(np.arange(len(chosen)) + 0.16 * (index - 2), heights, 0.16, label=form)
        labels = [f"{r['device']}\n{r['phase']}, {r['kind']}, {r['target']}" for r in chosen]
        axis.set_xticks(np.arange(len(chosen)), labels, rotation=60, ha="right", fontsize=6)
        axis.set_ylabel("MAPE, %")
        axis.set_ylim(0, 100)
        axis.legend(fontsize=7)


def main(config: dict[str, Any], folder: Path, out_dir: Path) -> dict[str, Any]:
    """Run the experiment; returns and writes its results."""
    forms, unmapped = predictions(config, folder)
    scored = system_recipes.scores(forms["level 3"])
    results = {
        "by_device": with_paper(system_tables.by_device(forms)),
        "errors": error_rows(forms),
        "coverage": system_recipes.coverage(scored).to_dict("records"),
        "llama_3_8b": llama_by_length(forms),
        "rows_left_out": unmapped.to_dict("records"),
    }
    shown = _table(results["by_device"], "device", "phase", "kind", "target", "n", *FORMS, "paper")
    print("\n".join(shown))
    experiment.write_results(out_dir, results, readme(results))
    plot(forms, results["by_device"], out_dir)
    return results


if __name__ == "__main__":
    given = experiment.command(__doc__, HERE, reads_data=True)
    main(given.config, given.data, given.out)
