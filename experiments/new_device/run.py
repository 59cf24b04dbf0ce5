"""How good is the model on a machine that nobody published? Measure, fit, predict, validate.

Takes the profile of a machine (`hymell profile`), by default the committed one of a small CPU, fits
a checkpoint for it, predicts with it, and compares with shapes that were held out and with whole
models, each left out of the fit. A roofline with fitted peak and bandwidth stands beside every row.
With --measure the machine at hand is profiled first. Prints the table and writes results.json,
README.md, plots and the checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hymell_jax import (
    checkpoint,
    devices,
    experiment,
    hf,
    profile_evaluate,
    profile_fit,
    profile_rows,
    summary,
    system_store,
    types,
)
from hymell_jax.attention import ATTENTION_PHASES

HERE = Path(__file__).parent
LEVELS = {1: "operators, held-out shapes", 2: "blocks, held-out shapes", 3: "whole models left out"}
REQUIRED_MAPE, REQUIRED_TIMES = 12.0, 2.0


def measure(config: dict[str, Any], folder: Path) -> None:
    """Profile the machine at hand into a folder; what is there already is kept."""
    from hymell_jax.profiler import run

    run.profile(
        str(folder), device=config["device"], plan=config["plan"], levels=(1, 2, 3),
        report=experiment.report, note=print,
    )  # fmt: skip


def example(config: dict[str, Any], profile: profile_rows.Profile, out: Path) -> dict[str, Any]:
    """One prediction by the new checkpoint, as `hymell predict --json` gives it, in short."""
    asked = config["example"]
    path = profile.folder / "models" / f"{asked['model']}.json"
    work = types.workload(
        batch_size=asked["batch"], prompt_tokens=asked["prompt"], output_tokens=asked["output"],
        dtype=profile.dtype,
    )  # fmt: skip
    model = checkpoint.load(profile.name, dtype=profile.dtype, folder=out)
    answer = summary.summarise(model, hf.read_hf(path), work, check_memory=False)
    return {
        **asked, "level": answer["level"], "prefill_s": answer["prefill"]["time_s"],
        "decode_s": answer["decode"]["time_per_token_s"],
        "energy": answer["provenance"]["energy"], "warnings": answer["warnings"],
    }  # fmt: skip


def by_model(profile: profile_rows.Profile, out: Path) -> list[dict[str, Any]]:
    """Mean absolute relative errors of every model left out, by phase, in percent."""
    content = system_store.load(out, checkpoint.device_folder(profile.name, out).name)
    if content is None:
        return []
    rows, found = content["card"]["left_out"], []
    for model in sorted({r["model"] for r in rows}):
        entry: dict[str, Any] = {"model": model}
        for phase in ATTENTION_PHASES:
            here = [r for r in rows if (r["model"], r["phase"]) == (model, phase)]
            entry[f"n_{phase}"] = len(here)
            for form, name in (("level 3", phase), ("physics", f"{phase}_physics"),
                               ("blocks", f"{phase}_blocks")):  # fmt: skip
                errors = [abs(r[form] / r["measured_s"] - 1.0) for r in here]
                entry[name] = round(100.0 * float(np.mean(errors)), 2) if errors else None
        found.append(entry)
    return found


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """What was asked for and whether it is so, one sentence each."""
    found = []
    for level in sorted({r["level"] for r in rows}):
        here = [r for r in rows if r["level"] == level]
        whole = next((r for r in here if r["table"] == "all"), here[0])
        met = "yes" if whole["times_better"] >= REQUIRED_TIMES else "no"
        found.append(
            f"Level {level} ({LEVELS[level]}): {whole['mape']} % against {whole['roofline_mape']} "
            f"% of the roofline, {whole['times_better']} times better; twice was asked for: {met}."
        )
    for row in rows:
        if row["table"] == "systems":
            met = "yes" if row["mape"] <= REQUIRED_MAPE else "no"
            found.append(
                f"{row['kernel']}: {row['mape']} %; {REQUIRED_MAPE:g} % was asked for: {met}."
            )
    return found


def readme(results: dict[str, Any]) -> list[str]:
    """README.md, from the results alone, so that it cannot differ from them."""
    keys = list(profile_evaluate.ERROR_FIELDS)
    device = results["device"]
    models = list(results["models"][0]) if results["models"] else []
    ex = results["example"]
    return [
        "# How good is the model on a machine that nobody published?", "",
        f"The machine: {device['title']}, {device['name']}, {device['runtime']}, "
        f"{device['dtype']}; {device['rows']} measured rows. Written by the command below, with "
        "`results.json`, plots and the checkpoint:", "",
        "```sh", "python experiments/new_device/run.py            # from the committed profile",
        "python experiments/new_device/run.py --measure --profile DIR   # this machine", "```", "",
        "Errors of time in percent. `n` rows of shapes held out by whole groups ((n, k) of a",
        "product, head layout, expert shape); at level 3 every model is predicted by fits that",
        "never saw it. `roofline_mape` is a roofline whose peak and bandwidth are fitted to the",
        "train rows of that table and kernel (at level 3 to the other models); `times_better` is",
        "its error over ours. Times of whole models are those at the machine's median speed: the",
        "measured time over the ratio of an anchor product measured around it;",
        "`uncorrected_mape` is our error against the times as measured.", "",
        *experiment.markdown(keys, experiment.values(results["errors"], keys), 2), "",
        "## What was asked for", "", *(f"- {text}" for text in results["verdicts"]), "",
        "## Whole models, each left out", "",
        "Percent. `_physics` is without the networks of level 3, `_blocks` the blocks added up.",
        "", *experiment.markdown(models, experiment.values(results["models"], models), 1), "",
        "## A prediction", "",
        f"{ex['model']}, batch {ex['batch']}, prompt {ex['prompt']}, level {ex['level']}: prefill "
        f"{ex['prefill_s']:.4g} s, {ex['decode_s']:.4g} s a token. Energy: {ex['energy']}.",
        "", *(f"- {text}" for text in ex["warnings"]), "",
        "## The device", "", *experiment.markdown(
            ["fact", "value", "unit", "source"],
            [[n, f["value"], f["unit"], f["source"]] for n, f in device["fields"].items()]), "",
        "![predicted against measured](predicted.png)", "",
    ]  # fmt: skip


def plot(every: list[profile_evaluate.Comparison], out_dir: Path) -> None:
    """Predicted against measured, a panel a level, the roofline behind."""
    levels = sorted({one.level for one in every})
    with experiment.figure(out_dir / "predicted.png", (4.5, 4.2), len(levels), 3) as (_, axes):
        for axis, level in zip(axes, levels, strict=True):
            here = [one for one in every if one.level == level]
            for one in here:
                axis.loglog(one.measured, one.roofline, "x", ms=3, color="lightgrey", zorder=0)
            for one in here:
                label = f"{one.table} {one.kernel}".replace(", models left out", "")
                axis.loglog(one.measured, one.predicted, ".", ms=4, label=label)
            ends = np.array(axis.get_xlim())
            axis.plot(ends, ends, color="black", linewidth=0.8)
            axis.set_title(f"level {level}: {LEVELS[level]}", fontsize=9)
            axis.set_xlabel("measured, s")
            axis.set_ylabel("predicted, s (grey: roofline)")
            axis.legend(fontsize=6)


def describe(profile: profile_rows.Profile, out: Path) -> dict[str, Any]:
    """The machine and how much of it was measured."""
    spec = checkpoint.device_spec(profile.name, out)
    fields = {
        name: {"value": float(getattr(spec.device, name)), "unit": unit,
               "source": spec.sources[name]}
        for name, (unit, _, _) in devices.UNITS.items()
    }  # fmt: skip
    rows = sum(len(profile.rows(table)) for table in profile_rows.TABLES)
    return {"name": profile.name, "title": spec.title, "runtime": profile.runtime,
            "dtype": profile.dtype, "rows": rows, "fields": fields}  # fmt: skip


def main(config: dict[str, Any], folder: Path, out_dir: Path) -> dict[str, Any]:
    """Fit, predict, validate; returns and writes the results."""
    out = out_dir / "checkpoints"
    errors = profile_fit.fit_profile(folder, out, experiment.report)
    profile = profile_rows.read_profile(folder)
    keys = list(profile_evaluate.ERROR_FIELDS)
    print("\n".join(experiment.aligned(keys, experiment.values(errors, keys))))
    results = {
        "errors": errors,
        "verdicts": verdicts(errors),
        "models": by_model(profile, out),
        "example": example(config, profile, out),
        "device": describe(profile, out),
    }
    print("\n".join(results["verdicts"]))
    experiment.write_results(out_dir, results, readme(results))
    plot(profile_evaluate.compare_profile(folder, out), out_dir)
    return results


if __name__ == "__main__":
    given = experiment.command(
        __doc__, HERE,
        measure={"action": "store_true", "help": "profile this machine first"},
        profile={"type": Path, "help": "folder of the profile; by default the committed one"},
    )  # fmt: skip
    place = given.profile or HERE / given.config["profile"]
    if given.measure:
        measure(given.config, place)
    main(given.config, place, given.out)
