"""Is a new kind of attention only a new block? Counterpart of table 9 of HYMELL.

Takes the checkpoints without linear attention (gated delta net), adds its four kernels as blocks,
and checks that nothing below and beside them changes: not one number of level 1 or of another
block, not one part of a model that has none, and of a hybrid model its linear attention alone. Then
the errors on shapes never fitted. Prints the tables and writes results.json, README.md and a plot
beside itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from hymell_jax import (
    analytical,
    block_evaluate,
    block_recipes,
    blocks,
    checkpoint,
    evaluate,
    experiment,
    models,
    operators,
    types,
)

HERE = Path(__file__).parent
LIMIT_PCT = 5.2  # of the black box on the same rows, H100 and H200
KEYS = ("device", "runtime", "regime", "target", "n", "level1_mape", "mape", "mdape", "r2",
        "black_box_mape", "paper_mape")  # fmt: skip
CHECK_KEYS = ("device", "runtime", "origin", "numbers_below", "same_below", "same_models",
              "changed_parts", "trained_numbers")  # fmt: skip
SHAPE = ("batch", "seq_len", "k_heads", "v_heads", "k_dim", "v_dim")


def digest(tree: Any) -> str:
    """SHA-256 over every number of a tree."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.ascontiguousarray(np.asarray(leaf, np.float32)).tobytes())
    return found.hexdigest()


def stripped(entry: tuple[str, str, str], checkpoints, out: str) -> dict[str, Any]:
    """Write the checkpoint as it was before linear attention was added; returns its content."""
    content = checkpoint.read(*entry, checkpoints)
    held = {n: b for n, b in content.get("blocks", {}).items() if n not in blocks.LINEAR_BLOCKS}
    content = {**content, "blocks": held}
    if not held:
        del content["blocks"], content["arrays"]
    checkpoint.save(content, out)
    return content


def changed_parts(one, two, name: str) -> list[str]:
    """Parts of a model whose seconds differ between two cost models in either phase."""
    preset = models.preset(name)
    work = types.workload(batch_size=4, prompt_tokens=2048, output_tokens=256)
    structure = operators.structure_of(preset.architecture, work)
    costs = [
        analytical.model_costs(
            m.coefficients, m.device, preset.architecture, work, structure, m.blocks
        )
        for m in (one, two)
    ]
    differs = np.zeros(len(operators.PARTS), bool)
    for before, after in zip(*costs, strict=True):
        differs |= np.asarray(before.time_s) != np.asarray(after.time_s)
    return [part for part, here in zip(operators.PARTS, differs, strict=True) if here]


def check(base, model, origin: str, config) -> dict[str, Any]:
    """That linear attention leaves everything else as it was.

    Args:
        base: the model without it, read from its own checkpoint.
        model: the model with it.
        origin: where its blocks come from.
        config: of the experiment.

    Raises:
        AssertionError: something else differs.
    """
    beside = {n: b for n, b in model.blocks.items() if n not in blocks.LINEAR_BLOCKS}
    same = digest([base.coefficients, base.blocks]) == digest([model.coefficients, beside])
    others = {name: changed_parts(base, model, name) for name in config["others"]}
    hybrid = changed_parts(base, model, config["hybrid"])
    assert same and not any(others.values()), (same, others)
    assert hybrid == ["linear_attention"], hybrid
    count = sum(np.size(leaf) for leaf in jax.tree.leaves([base.coefficients, base.blocks]))
    added = [model.blocks[n] for n in blocks.LINEAR_BLOCKS]
    return {
        "device": model.card.device, "runtime": model.card.runtime, "origin": origin,
        "numbers_below": int(count), "same_below": same, "same_models": len(others),
        "changed_parts": ", ".join(hybrid),
        "trained_numbers": int(sum(np.size(leaf) for leaf in jax.tree.leaves(added))),
    }  # fmt: skip


def checks(entry, model, folder: Path, config) -> list[dict[str, Any]]:
    """The checks of one checkpoint: its own blocks, and blocks fitted anew where asked for."""
    with tempfile.TemporaryDirectory() as out:
        content = stripped(entry, config["checkpoints"], out)
        base = checkpoint.load(*entry, out)
        found = [check(base, model, "shipped", config)]
        if list(entry[:2]) in config["refit"]:
            block_recipes.add_blocks(content, folder, out)
            found.append(check(base, checkpoint.load(*entry, out), "fitted anew", config))
    return found


def layer_rows(rows: dict[str, pd.DataFrame], phase: str) -> pd.DataFrame:
    """Both kernels of a layer as one row, for shapes of which both were measured."""
    parts = [rows.get(f"linear_{kernel}_{phase}") for kernel in ("conv", "rule")]
    if any(part is None for part in parts):
        return pd.DataFrame()
    numbers = ["time_s", "level1_s", "level2_s"]
    one, two = (part.drop_duplicates([*SHAPE])[[*SHAPE, *numbers]] for part in parts)
    both = one.merge(two, on=list(SHAPE), suffixes=("_conv", "_rule"))
    return pd.DataFrame({n: both[f"{n}_conv"] + both[f"{n}_rule"] for n in numbers})


def error_rows(model, folder: Path, split: str, reference) -> list[dict[str, Any]]:
    """Errors by kernel, by phase, of whole layers, and of all rows."""
    kept = {n: b for n, b in model.blocks.items() if n in blocks.LINEAR_BLOCKS}
    rows = block_evaluate.predicted_rows(dataclasses.replace(model, blocks=kept), folder, split)
    one = block_evaluate.block_errors(model, rows, level=1)
    two = block_evaluate.block_errors(model, rows, level=2)
    two = block_evaluate.with_references(two, reference)
    names = {"black_box_mape": "reference_mape", "paper_mape": "published_mape"}
    found = []
    for plain, row in zip(one, two, strict=True):
        values = {**row, "level1_mape": plain["mape"], **{k: row[v] for k, v in names.items()}}
        found.append({key: values[key] for key in KEYS})
    for phase in ("prefill", "decode"):
        whole = layer_rows(rows, phase)
        if len(whole):
            measured = whole["time_s"].to_numpy()
            values = {
                **evaluate.errors(whole["level2_s"].to_numpy(), measured),
                "level1_mape": evaluate.errors(whole["level1_s"].to_numpy(), measured)["mape"],
                "device": model.card.device, "runtime": model.card.runtime, "target": "time",
                "regime": f"{phase} layer", "black_box_mape": None,
                "paper_mape": block_evaluate.PUBLISHED_MAPE["linear_attention", phase, "time"],
            }  # fmt: skip
            found.append({key: values[key] for key in KEYS})
    return found


def markdown(rows: list[dict[str, Any]], keys: tuple[str, ...]) -> list[str]:
    """Lines of a table; numbers with two digits."""
    return experiment.markdown(keys, experiment.values(rows, keys), digits=2)


def plot(rows: list[dict[str, Any]], out_dir: Path) -> None:
    """Bars of the time error by kernel, one panel a device and runtime."""
    chosen = [r for r in rows if r["target"] == "time"]
    fits = list(dict.fromkeys((r["device"], r["runtime"]) for r in chosen))
    path = out_dir / "linear_attention.png"
    count = len(fits)
    with experiment.figure(path, (3.2, 3.4), count, count, sharey=True) as (figure, axes):
        for axis, key in zip(axes, fits, strict=True):
            here = [r for r in chosen if (r["device"], r["runtime"]) == key]
            at = np.arange(len(here))
            axis.bar(at - 0.2, [r["level1_mape"] for r in here], 0.4, label="level 1")
            axis.bar(at + 0.2, [r["mape"] for r in here], 0.4, label="level 2")
            axis.axhline(LIMIT_PCT, color="black", linewidth=1, label=f"{LIMIT_PCT} %")
            axis.set_xticks(at, [r["regime"] for r in here], rotation=60, ha="right", fontsize=7)
            axis.set_title(" ".join(key), fontsize=8)
        axes[0].set_ylabel("time MAPE, %", fontsize=8)
        axes[0].legend(fontsize=7)
        figure.suptitle("Linear attention on shapes never fitted")


def readme(found: dict[str, list], config: dict[str, Any]) -> list[str]:
    """Lines of README.md with the rows of the results, so that it cannot differ from them."""
    return [
        "# Is a new kind of attention only a new block?",
        "",
        "Counterpart of table 9 of HYMELL (arXiv 2608.06723). Linear attention (gated delta net)",
        "is four blocks on top of a checkpoint. Written by the command below, with `results.json`",
        "and the plot; it stops where anything but linear attention changes:",
        "",
        "```sh",
        "python experiments/linear_attention/run.py --data DIR",
        "```",
        "",
        "## What adding it changes",
        "",
        "`numbers_below` are the coefficients of level 1 and the weights of all other blocks,",
        "identical bit by bit with and without it; `same_models` architectures without linear",
        f"attention ({', '.join(config['others'])}) keep every part identical;",
        f"`changed_parts` are those of {config['hybrid']} that change. `fitted anew` trained the",
        "blocks here, on top of a checkpoint without them; `shipped` compares the shipped",
        "checkpoint with itself without them.",
        "",
        *markdown(found["checks"], CHECK_KEYS),
        "",
        "## Errors",
        "",
        f"Percent on {config['split']} rows. `level1_mape` is the physics alone; `layer` sums the",
        "two kernels of a layer; `black_box_mape` are boosted trees on the same rows;",
        "`paper_mape` what HYMELL reports for a whole block on its own H100 NVL. Energy labels are",
        "lower bounds.",
        "",
        *markdown(found["errors"], KEYS),
        "",
        "![errors by kernel](linear_attention.png)",
        "",
    ]


def main(
    config: dict[str, Any], folder: Path, out_dir: Path, reference: str | None = None
) -> dict[str, list]:
    """Run the experiment; returns and writes its rows.

    Raises:
        ValueError: no checkpoint has linear attention.
        AssertionError: adding it changes anything else.
    """
    checkpoints, wanted = config["checkpoints"], config["devices"]
    black_box = evaluate.reference_frame(folder, reference)
    found: dict[str, list] = {"checks": [], "errors": []}
    for entry in checkpoint.available(checkpoints):
        if entry[2] != "bf16" or (wanted and entry[0] not in wanted):
            continue
        model = checkpoint.load(*entry, checkpoints)
        if set(blocks.LINEAR_BLOCKS) <= set(model.blocks):
            found["checks"] += checks(entry, model, folder, config)
        found["errors"] += error_rows(model, folder, config["split"], black_box)
    if not found["errors"]:
        raise ValueError("No checkpoint has blocks of linear attention with rows to compare.")
    for name, keys in (("checks", CHECK_KEYS), ("errors", KEYS)):
        print("\n".join(experiment.aligned(keys, experiment.values(found[name], keys))) + "\n")
    experiment.write_results(out_dir, found, readme(found, config))
    plot(found["errors"], out_dir)
    return found


if __name__ == "__main__":
    given = experiment.command(
        __doc__,
        HERE,
        reads_data=True,
        reference=dict(help="CSV with the errors of a black box on the same rows"),
    )
    main(given.config, given.data, given.out, given.reference)
