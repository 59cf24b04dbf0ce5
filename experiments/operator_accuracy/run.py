"""How far off is level 1 on shapes never fitted? Counterparts of tables 1 to 3 of HYMELL.

Evaluates every shipped fit on the test rows of the measured tables, in the refined and in the
published form, prints one table for each operator and writes results.json and plots beside itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hymell_jax import checkpoint, experiment
from hymell_jax.evaluate import ROWWISE_TABLES, evaluate, operator_fits

HERE = Path(__file__).parent
COLUMNS = ("table", "device", "runtime", "dtype", "target", "regime", "n")


def fitted_devices(checkpoints: str | None = None) -> list[str]:
    """Every device with a checkpoint or a fit of a row-wise operator."""
    names = {device for device, _, _ in checkpoint.available(checkpoints)}
    for operator in ROWWISE_TABLES:
        names |= {fit["device"] for fit in operator_fits(operator, checkpoints)}
    return sorted(names)


def compare(folder: Path, devices: list[str], split: str, checkpoints: str | None) -> list[dict]:
    """One row per table, device, regime and target: refined beside published and black box."""
    rows = []
    for device in devices:
        forms: dict[str, dict[tuple, dict]] = {}
        for form in ("refined", "published"):
            try:
                found = evaluate(device, folder, split=split, form=form, checkpoints=checkpoints)
            except ValueError:
                found = []  # no published equation for anything measured on this device
            forms[form] = {tuple(row[c] for c in COLUMNS): row for row in found}
        for key, row in forms["refined"].items():
            other = forms["published"].get(key)
            rows.append(
                {
                    **dict(zip(COLUMNS, key, strict=True)),
                    "mape": row["mape"],
                    "mdape": row["mdape"],
                    "r2": row["r2"],
                    "published_form_mape": other["mape"] if other else None,
                    "black_box_mape": row["reference_mape"],
                    "paper_mape": row["published_mape"],
                }
            )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    heads = [*COLUMNS, "MAPE", "MdAPE", "R2", "equation", "black box", "paper"]
    keys = [*COLUMNS, "mape", "mdape", "r2", "published_form_mape", "black_box_mape", "paper_mape"]
    lines = experiment.aligned(heads, experiment.values(rows, keys))
    print("\n".join(lines))


def plot(rows: list[dict[str, Any]], out_dir: Path) -> None:
    """Bars of the time error of the matrix product by regime, one panel for each fit."""
    chosen = [r for r in rows if r["table"] == "gemm" and r["target"] == "time"]
    fits = sorted({(r["device"], r["runtime"], r["dtype"]) for r in chosen})
    if not fits:
        return
    plan = ((4, 3), len(fits), min(4, len(fits)))
    with experiment.figure(out_dir / "gemm_time.png", *plan) as (figure, axes):
        for axis, fit in zip(axes, fits, strict=True):
            _bars(axis, fit, chosen)
        axes[0].legend(fontsize=7)
        figure.suptitle("Matrix products on shapes never fitted")


def _bars(axis, fit: tuple, chosen: list[dict[str, Any]]) -> None:
    """Errors of one fit by regime, refined beside published."""
    here = [r for r in chosen if (r["device"], r["runtime"], r["dtype"]) == fit]
    at = range(len(here))
    axis.bar([i - 0.2 for i in at], [r["mape"] for r in here], 0.4, label="refined")
    heights = [r["published_form_mape"] or 0.0 for r in here]
    axis.bar([i + 0.2 for i in at], heights, 0.4, label="published equation")
    black = [r["black_box_mape"] for r in here if r["regime"] == "all"]
    if black and black[0] is not None:
        axis.axhline(black[0], color="black", linewidth=1, label="black box, all rows")
    axis.set_xticks(list(at), [r["regime"] for r in here], rotation=35, ha="right", fontsize=7)
    axis.set_title(" ".join(fit), fontsize=9)
    axis.set_ylabel("time MAPE, %", fontsize=8)
    axis.set_ylim(0, 40)


def readme(rows: list[dict[str, Any]], split: str) -> list[str]:
    """Lines of README.md with the rows of whole tables, so that it cannot differ from them."""
    heads = [*COLUMNS[:-2], "rows", "n", "refined", "equation", "black box", "paper"]
    cells = []
    for row in rows:
        if row["regime"] not in ("all", "sound"):
            continue
        numbers = [row[k] for k in ("mape", "published_form_mape", "black_box_mape", "paper_mape")]
        shown = ["-" if x is None else f"{x:.2f}" if x < 1000 else "> 1000" for x in numbers]
        cells.append([*(row[c] for c in COLUMNS), *shown])
    return [
        "# How far off is level 1 on shapes never fitted?",
        "",
        "Counterparts of tables 1 to 3 of HYMELL (arXiv 2608.06723), for every device with",
        "measurements. Written by the command below, with `results.json` (all regimes) and plots:",
        "",
        "```sh",
        "python experiments/operator_accuracy/run.py --data DIR",
        "```",
        "",
        f"Mean absolute relative error in percent on {split} rows; `equation` is the published",
        "form fitted on the same train rows, `black box` a boosted-tree model on the same rows,",
        "`paper` what HYMELL reports on its own H100 NVL. `sound` are energy labels of rows of",
        "300 us or longer; shorter ones are lower bounds, so that errors against them say little.",
        "",
        *experiment.markdown(heads, cells),
        "",
        "![errors of the matrix product by regime](gemm_time.png)",
        "",
    ]


def main(config: dict[str, Any], folder: Path, out_dir: Path) -> list[dict[str, Any]]:
    """Run the experiment; returns and writes its rows."""
    checkpoints = config.get("checkpoints")
    devices = config.get("devices") or fitted_devices(checkpoints)
    rows = compare(folder, devices, config["split"], checkpoints)
    show(rows)
    experiment.write_results(out_dir, rows, readme(rows, config["split"]))
    plot(rows, out_dir)
    return rows


if __name__ == "__main__":
    given = experiment.command(__doc__, HERE, reads_data=True)
    main(given.config, given.data, given.out)
