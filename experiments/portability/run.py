"""What does it take to move to another GPU? Counterpart of table 8 of HYMELL.

Starts from what was fitted on one GPU and predicts matrix products and the attention core on
others, with none, some and all of their train rows measured again: level 1 alone, level 1 refitted
with the networks of the first GPU frozen, the networks trained further, and everything from
scratch. Prints the table and writes results.json, README.md and a plot beside itself.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from hymell_jax import (
    attention_fit,
    block_recipes,
    blocks,
    checkpoint,
    data,
    devices,
    evaluate,
    experiment,
    fit,
    gemm,
    mlp,
)

HERE = Path(__file__).parent
KEYS = ("table", "device", "runtime", "form", "n_train", "n_test", "mape", "mdape")
FORMS = {
    "level 1": "level 1 refitted, no network",
    "frozen": "level 1 refitted, networks of the first GPU as they are",
    "tuned": "level 1 refitted, networks trained further",
    "scratch": "level 1 and networks from scratch",
}
PAPER = {"prefill dense": 9.102, "decode dense": 6.718}  # table 8, A6000, re-profiled, time
PRODUCTS = {  # part: (n, k) of a product of one layer
    "q_proj": lambda r: (r["d_model"], r["d_model"]),
    "o_proj": lambda r: (r["d_model"], r["d_model"]),
    "gate_proj": lambda r: (r["d_ff"], r["d_model"]),
    "up_proj": lambda r: (r["d_ff"], r["d_model"]),
    "down_proj": lambda r: (r["d_model"], r["d_ff"]),
}


def product_rows(folder: Path, device: str, runtime: str) -> pd.DataFrame:
    """16-bit products of one device and runtime: m, n, k, time_s, split."""
    if runtime != "transformers-eager":
        return data.gemm_rows(folder, device, runtime, "bf16")
    frame = data.read_table(folder, "blocks/layer_parts_transformers", device=device)
    dense = frame["n_experts"] == 0
    found = []
    for part, shape in PRODUCTS.items():
        rows = frame[(frame["part"] == part) & dense]
        n, k = shape(rows)
        found.append(rows.assign(m=rows["num_tokens"], n=n, k=k))
    return pd.concat(found, ignore_index=True)


def chosen(frame: pd.DataFrame, split: str, count: int | None, seed: int = 0) -> pd.DataFrame:
    """Rows of a split, at random where there are more than asked for."""
    rows = frame[frame["split"] == split]
    if count is None or len(rows) <= count:
        return rows.reset_index(drop=True)
    return rows.sample(count, random_state=seed).reset_index(drop=True)


def row(table, target, form, n_train, predicted, test) -> dict[str, Any]:
    """One row of the table."""
    found = evaluate.errors(predicted, test["time_s"].to_numpy())
    names = dict(zip(KEYS, (table, *target, form, n_train, len(test)), strict=False))
    return names | {"mape": found["mape"], "mdape": found["mdape"]}


@jax.jit
def _product_seconds(coefficients, device, m, n, k):
    return fit.gemm_log_time(coefficients, device, m, n, k, 2.0)


def product_errors(config, folder: Path, source, target) -> list[dict[str, Any]]:
    """Matrix products: coefficients of the first GPU refitted, or fitted from scratch."""
    frame = product_rows(folder, *target)
    test = chosen(frame, "test", config["test_rows"])
    sheet = devices.get_device(target[0]).device
    shape = data.columns(test, "m", "n", "k")

    def errors(form, count, coefficients):
        log_time = np.asarray(_product_seconds(coefficients, sheet, *shape))
        return row("gemm", target, form, count, np.exp(log_time), test)

    steps = config["gemm_steps"]
    stages = ((8, steps, 512, 0.05), (32, steps, 512, 0.03), (gemm.CHOICE, steps, 512, 0.02))
    begun = source.coefficients["gemm"]
    found = []
    for count in config["rows"]:
        train = chosen(frame, "train", count)
        if not len(train):
            found.append(errors("level 1", 0, begun))
            continue
        columns = data.columns(train, "m", "n", "k", "time_s")
        tuned, _ = fit.fit_gemm(
            sheet, *columns, start=begun, stages=((gemm.CHOICE, steps, 512, 0.01),)
        )
        found.append(errors("level 1", len(train), tuned))
        fresh, _ = fit.fit_gemm(sheet, *columns, stages=stages)
        found.append(errors("scratch", len(train), fresh))
    return found


@functools.partial(jax.jit, static_argnames="name")
def _level1_seconds(name, coefficients, device, sizes):
    return block_recipes.level1_form(name, coefficients, device, *sizes)[0]


@functools.partial(jax.jit, static_argnames="name")
def _block_seconds(name, block, coefficients, device, sizes):
    level1_s, features = block_recipes.level1_form(name, coefficients, device, *sizes)
    return blocks.corrected(block, level1_s, features).time_s


def _refitted(name, sheet, train, start) -> dict[str, np.float32]:
    """Level-1 coefficients of one phase from rows."""
    phase = name.partition("_")[2]
    sizes = ("batch", "tokens", "n_heads", "n_kv_heads", "head_dim", "window_tokens", "kv_bytes")
    found = attention_fit.fit_attention(
        phase, sheet, *data.columns(train, *sizes, "time_s"), start=start, max_rows=3000
    )
    return {key: np.float32(value) for key, value in found.items()}


def attention_errors(config, folder: Path, source, target, name) -> list[dict[str, Any]]:
    """The attention core of one phase, bf16 without a window."""
    frame = block_recipes.block_rows(name, folder, *target, "bf16")
    if frame.empty or name not in source.blocks:
        return []
    frame = frame[frame["plain"]]
    test = chosen(frame, "test", config["test_rows"])
    sheet = devices.get_device(target[0]).device
    sizes = tuple(block_recipes.block_sizes(name, test))
    block, begun = source.blocks[name], source.coefficients["attention"]
    names = [key for key in begun if key.startswith(name.partition("_")[2] + "_")]
    first = {key: np.float32(begun[key]) for key in names}
    steps, members = config["attention_steps"], config["members"]
    found = []

    def add(form, count, coefficients, networks):
        if networks is None:
            seconds = _level1_seconds(name, coefficients, sheet, sizes)
        else:
            seconds = _block_seconds(name, networks, coefficients, sheet, sizes)
        found.append(row(name, target, form, count, np.asarray(seconds, np.float64), test))

    for count in config["rows"]:
        train = chosen(frame, "train", count)
        if not len(train):
            add("level 1", 0, first, None)
            add("frozen", 0, first, block)
            continue
        refitted = _refitted(name, sheet, train, first)
        add("level 1", len(train), refitted, None)
        add("frozen", len(train), refitted, block)
        tuned = block_recipes.tune_block(
            name, block, refitted, sheet, train, steps=steps, members=members
        )
        add("tuned", len(train), refitted, tuned)
        fresh = _refitted(name, sheet, train, None)
        add(
            "scratch",
            len(train),
            fresh,
            _fresh_block(name, block.spec, fresh, sheet, train, config),
        )
    return found


def _fresh_block(name, spec, coefficients, sheet, train, config) -> blocks.Block:
    """Networks of the same shape, trained on the rows alone."""
    base, features = block_recipes.level1(name, coefficients, sheet, train)
    normalizer = mlp.fit_normalizer(features)
    params = mlp.fit_ensemble(
        np.asarray(mlp.normalise(normalizer, features)), base,
        np.log(train["time_s"].to_numpy()), spec, steps=config["attention_steps"],
        learning_rate=block_recipes.SETTINGS[name]["learning_rate"], weight_decay=1e-3,
        scale=float(mlp.level1_scale(spec, normalizer)), seeds=tuple(range(config["members"])),
    )  # fmt: skip
    return blocks.Block(coefficients={}, params=params, normalizer=normalizer, spec=spec)


def plot(rows: list[dict[str, Any]], out_dir: Path) -> None:
    """Error against the number of measured rows, one panel a table and device."""
    tables = list(dict.fromkeys(r["table"] for r in rows))
    names = list(dict.fromkeys(r["device"] for r in rows))
    panels = [(table, name) for table in tables for name in names]
    path = out_dir / "portability.png"
    plan = ((3, 2.6), len(panels), len(names))
    with experiment.figure(path, *plan, sharey=True) as (figure, axes):
        for axis, (table, name) in zip(axes, panels, strict=True):
            here = [r for r in rows if (r["table"], r["device"]) == (table, name)]
            _curves(axis, here)
            axis.set_title(f"{table}, {name.partition('-')[0]}", fontsize=8)
            if not here:
                axis.set_axis_off()
                axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)
        axes[-len(names)].legend(fontsize=7)
        figure.supxlabel("rows measured again (10: none)", fontsize=8)
        figure.supylabel("time MAPE on test rows, %", fontsize=8)


def _curves(axis, rows: list[dict[str, Any]]) -> None:
    """Error of every form over the rows that it was fitted to."""
    for place, form in enumerate(FORMS):
        here = [r for r in rows if r["form"] == form]
        if here:
            counts = [max(r["n_train"], 10) for r in here]
            axis.plot(counts, [r["mape"] for r in here], color=f"C{place}", marker="o",
                      markersize=3, label=form)  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.tick_params(labelsize=7)


def readme(rows: list[dict[str, Any]], config: dict[str, Any]) -> list[str]:
    """Lines of README.md with the rows of the results, so that it cannot differ from them."""
    counts = sorted({r["n_train"] for r in rows} & {c for c in config["rows"] if c is not None})
    lines = [
        "# What does it take to move to another GPU?",
        "",
        "Counterpart of table 8 of HYMELL (arXiv 2608.06723), which profiles an A6000 anew and",
        f"retrains: {PAPER['prefill dense']:.1f} % in dense prefill and "
        f"{PAPER['decode dense']:.1f} % in dense decode of whole models. Here operators and blocks",
        f"of {' '.join(config['source'])} move to other GPUs. Written by the command below, with",
        "`results.json` and the plot:",
        "",
        "```sh",
        "python experiments/portability/run.py --data DIR",
        "```",
        "",
        "Time MAPE in percent on test rows of the new GPU, by train rows of it that were measured:",
        "",
        *(f"- {form}: {meaning}" for form, meaning in FORMS.items()),
        "",
        "Products have no network: `level 1` starts at the coefficients of the first GPU,",
        "`scratch` at the defaults. Attention is the core in bf16 without a window. With no rows,",
        "only the data sheet is new.",
        f"Short fits ({config['gemm_steps']} steps a stage, {config['attention_steps']} of the "
        f"networks, {config['members']} networks),",
        "so `scratch` with all rows stays above what is shipped. On the A6000 products come from",
        "layer parts run eagerly, test rows being other token counts of the same matrices; no",
        "attention core was measured there.",
        "",
    ]
    cells = []
    for table, device in dict.fromkeys((r["table"], r["device"]) for r in rows):
        for form in FORMS:
            here = {r["n_train"]: r["mape"] for r in rows
                    if (r["table"], r["device"], r["form"]) == (table, device, form)}  # fmt: skip
            if here:
                most = max(here)
                errors = [f"{here[c]:.2f}" if c in here else "-" for c in counts]
                last = f"{here[most]:.2f} ({most})" if most not in counts else "-"
                cells.append([table, device, form, *errors, last])
    heads = ["table", "device", "form", *map(str, counts), "all (n)"]
    picture = "![error against rows measured again](portability.png)"
    return [*lines, *experiment.markdown(heads, cells), "", picture, ""]


def main(config: dict[str, Any], folder: Path, out_dir: Path) -> list[dict[str, Any]]:
    """Run the experiment for the tables of the configuration; returns and writes its rows.

    Tables that are not run keep the results that lie in `out_dir`.
    """
    source = checkpoint.load(*config["source"], "bf16", config["checkpoints"])
    held = out_dir / "results.json"
    known = json.loads(held.read_text()) if held.is_file() else []
    rows = [row for row in known if row["table"] not in config["tables"]]
    for table in config["tables"]:
        for target in config["targets"]:
            if table == "gemm":
                rows += product_errors(config, folder, source, target)
            else:
                rows += attention_errors(config, folder, source, target, table)
            experiment.write_results(out_dir, rows)
    print("\n".join(experiment.aligned(KEYS, experiment.values(rows, KEYS))))
    experiment.write_results(out_dir, rows, readme(rows, config))
    plot(rows, out_dir)
    return rows


if __name__ == "__main__":
    given = experiment.command(
        __doc__,
        HERE,
        reads_data=True,
        tables=dict(nargs="*", help="by default those of config.json"),
    )
    given.config["tables"] = given.tables or given.config["tables"]
    main(given.config, given.data, given.out)
