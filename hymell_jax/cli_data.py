"""The commands `evaluate`, `fit`, `import`, `devices` and `models`; registered by `cli`.

JAX and pandas are imported inside.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from hymell_jax.cli_options import DTYPES, json_option
from hymell_jax.cli_output import cell, print_json, progress, table


@click.command()
@click.option(
    "--device", required=True, help="Exact name (see `hymell devices`), or a profile's device.json."
)
@click.option("--data", "folder", help="Folder of measured tables; default $HYMELL_DATA.")
@click.option(
    "--level",
    type=click.Choice(["1", "2", "3", "all"]),
    default="all",
    show_default=True,
    help="3: whole models, each left out of its fit.",
)
@click.option("--split", default="test", show_default=True, help="train, test, or all.")
@click.option("--form", type=click.Choice(["refined", "published"]), default="refined",
              help="published: the equations of HYMELL, of level 1 alone.")  # fmt: skip
@click.option("--reference", help="CSV with the errors of a black box on the same rows.")
@click.option("--checkpoints", help="Folder of checkpoints; by default those shipped.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of rows.")
def evaluate(device, folder, level, split, form, reference, checkpoints, as_json) -> None:
    """Errors of the fitted model on measured rows, by table, regime and target."""
    from hymell_jax import block_evaluate, data, profile_evaluate, profile_rows, system_evaluate
    from hymell_jax import evaluate as operators

    root = data.data_folder(folder)
    if profile_rows.is_profile(root):
        found = profile_evaluate.evaluate_profile(root, checkpoints, split, device=device)
        found = [r for r in found if level in ("all", str(r["level"]))]
        print_json(found) if as_json else show_profile_errors(found)
        return
    if form == "published":
        if level not in ("1", "all"):
            raise ValueError(f"The published form is of level 1; got --level {level}.")
        level = "1"
    _check_tables(root, level)
    options = dict(split=split, reference=reference, checkpoints=checkpoints)
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    if level in ("1", "all"):
        rows += operators.evaluate(device, root, form=form, skipped=skipped, **options)
    if level in ("2", "all"):
        rows += block_evaluate.evaluate_blocks(device, root, required=level == "2", **options)
    if level == "3" or (level == "all" and (root / "systems").is_dir()):
        rows += system_evaluate.evaluate_systems(device, checkpoints, required=level == "3")
    for reason in skipped:
        click.echo(f"Left out: {reason}", err=True)
    if as_json:
        print_json(rows)
    else:
        _show_errors(rows, device, split, form)


def _check_tables(root: Any, level: str) -> None:
    """Refuse a folder without any table that a level's evaluation reads."""
    from hymell_jax import block_evaluate, data, evaluate

    tables = []
    if level in ("1", "all"):
        tables += [f"operators/{name}" for name in ("gemm", *evaluate.ROWWISE_TABLES)]
    if level in ("2", "all"):
        tables += [f"blocks/{name}" for name in dict.fromkeys(block_evaluate.TABLE_OF.values())]
    if tables and not any(data.has_table(root, table) for table in tables):
        names = ", ".join(f"{table}.parquet" for table in tables)
        raise ValueError(f"The data folder {str(root)!r} has none of the tables {names}.")


@click.command()
@click.option(
    "--level",
    type=click.Choice(["1", "2", "3"]),
    default="2",
    show_default=True,
    help="3 also fits whole models on all devices whose checkpoints the folder holds.",
)
@click.option("--device", required=True, help="Exact name, or `all` that the tables hold.")
@click.option("--runtime", help="As in the tables; by default every one of the device.")
@click.option("--dtype", type=click.Choice(DTYPES), help="By default all.")
@click.option("--data", "folder", help="Folder of measured tables; default $HYMELL_DATA.")
@click.option("--out", required=True, help="Folder of checkpoints to write into.")
@click.option("--seeds", default=1, show_default=True, help="Fits per matrix product, best kept.")
@click.option("--operators", is_flag=True, help="Fit the row-wise operators again.")
@click.option("--resume", is_flag=True, help="Keep what the folder already holds.")
@json_option
def fit(level, device, runtime, dtype, folder, out, seeds, operators, resume, as_json) -> None:
    """Fit a device's coefficients and networks to measured tables; write its checkpoints."""
    from hymell_jax import block_recipes, checkpoint, data, files, profile_rows, recipes

    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1; got {seeds}.")
    root = data.data_folder(folder)
    if profile_rows.is_profile(root):
        _fit_profile(device, root, out, level, as_json)
        return
    chosen = recipes.fittable(root, device, runtime, dtype)
    files.writable_folder(out)
    done = set(checkpoint.available(out)) if resume else set()
    written = []
    with progress() as report:
        for operator in recipes.operators_in(root):
            if operators or not recipes.operator_file(out, operator).is_file():
                fitted = recipes.fit_operator(root, operator, progress=report)
                recipes.save_operator(fitted, out)
        for entry in chosen:
            if entry in done:
                content = checkpoint.read(*entry, folder=out)
            else:
                content = recipes.fit_level1(
                    *entry, root, out, seeds=tuple(range(seeds)), progress=report
                )
                checkpoint.save(content, out)
            if level != "1":
                block_recipes.add_blocks(content, root, out, progress=report)
            click.echo(f"{'/'.join(entry)}", err=True)
            name = checkpoint.file_name(*entry)
            written.append(dict(zip(("device", "runtime", "dtype"), entry, strict=True)) | {
                "file": name, "resumed": entry in done,
            })  # fmt: skip
        if level == "3":
            from hymell_jax import system_job

            system_job.fit_systems(root, out, progress=report)
    if as_json:
        print_json({"out": out, "level": int(level), "checkpoints": written})


def _fit_profile(device: str, folder: Any, out: str, level: str, as_json: bool) -> None:
    """Fit the profile of one machine, all that it holds up to a level, and show its errors."""
    from hymell_jax import files, profile_evaluate, profile_fit

    files.writable_folder(out)
    levels = tuple(range(1, int(level) + 1))
    with progress() as report:
        rows = profile_fit.fit_profile(folder, out, report, levels, device=device)
    if as_json:
        print_json({"out": out, "errors": rows})
        return
    show_profile_errors(rows)
    name = profile_evaluate.open_profile(folder).name
    show_fitted(name, rows, levels, str(folder), out)


def show_fitted(
    device: str, rows: list[dict[str, Any]], levels: tuple[int, ...], folder: str, out: str
) -> None:
    """Why whole models have no errors, where the checkpoints lie, and what to do with them.

    Args:
        device: its name.
        rows: errors of the fit.
        levels: that were asked for.
        folder: of the profile.
        out: of the checkpoints.
    """
    from hymell_jax import checkpoint
    from hymell_jax.profile_level3 import LEAST_MODELS

    if 3 in levels and not any(row["level"] == 3 for row in rows):
        count = len(list(Path(folder, "models").glob("*.json")))
        click.echo(
            f"\nNo level 3: whole models measured: {count}. Each is left out of the fit of the "
            f"others, which takes at least {LEAST_MODELS}; `hymell profile` again measures more."
        )
    where = shlex.quote(out)
    click.echo(f"\ncheckpoints of {device}: {checkpoint.device_folder(device, out)}")
    click.echo(f"  hymell predict MODEL --device {device} --checkpoints {where}")
    click.echo(
        f"  hymell evaluate --device {device} --data {shlex.quote(folder)} --checkpoints {where}"
    )


def show_profile_errors(rows: list[dict[str, Any]]) -> None:
    """Errors of a profile's fit beside a roofline with fitted rates."""
    cells = [
        [str(r["level"]), r["table"], r["kernel"], str(r["n"]), f"{r['mape']:.2f}",
         f"{r['mdape']:.2f}", f"{r['roofline_mape']:.2f}", f"{r['times_better']:.2f}",
         f"{r['uncorrected_mape']:.2f}"]
        for r in rows
    ]  # fmt: skip
    headings = ["level", "table", "kernel", "n", "MAPE %", "MdAPE %", "roofline %", "times better",
                "before drift %"]  # fmt: skip
    table("time of held-out shapes, and of whole models left out", headings, cells, left=3)


@click.command(name="import")
@click.argument(
    "source", type=click.Choice(["aiconfigurator", "vidur", "llmservingsim", "neusight"])
)
@click.option("--from", "path", help="Checkout of the source; aiconfigurator-core needs none.")
@click.option("--out", required=True, help="Folder of measured tables to write.")
@json_option
def import_tables(source, path, out, as_json) -> None:
    """Rebuild measured tables from a public source."""
    from hymell_jax import files, importers

    if path is None and source != "aiconfigurator":
        raise ValueError(f"Importing {source} needs --from, the path of its checkout.")
    tables = getattr(importers, f"import_{source}")(path)
    files.writable_folder(out)
    written = importers.write_tables(tables, out)
    if as_json:
        paths = {name: str(path) for name, path in written.items()}
        print_json({"source": source, "out": out, "tables": paths})
        return
    for name, path in written.items():
        click.echo(f"{name}: {path}", err=True)


def _show_errors(rows: list[dict[str, Any]], device: str, split: str, form: str) -> None:
    def percent(value: float | None) -> str:
        return cell(value, "{:.2f}".format)

    cells = [
        [r["table"], r["runtime"], r["dtype"], r["target"], r["regime"], str(r["n"]),
         percent(r["mape"]), percent(r["mdape"]), cell(r["r2"], "{:.4f}".format),
         percent(r["published_mape"]), percent(r["reference_mape"])]
        for r in rows
    ]  # fmt: skip
    headings = ["table", "runtime", "dtype", "target", "regime", "n", "MAPE %", "MdAPE %", "R2",
                "HYMELL paper %", "black box %"]  # fmt: skip
    table(f"{device}, {split} rows, {form} form", headings, cells, left=5)


@click.command()
@json_option
def devices(as_json) -> None:
    """The devices known by name, their data sheets, and what was measured on them."""
    import numpy as np

    from hymell_jax import checkpoint
    from hymell_jax.devices import device_names

    measured: dict[str, list[str]] = {}
    for name, runtime, dtype in checkpoint.available():
        measured.setdefault(name, []).append(f"{runtime} {dtype}")
    content: list[dict[str, Any]] = []
    for name in sorted({*device_names(), *measured}):
        spec = checkpoint.device_spec(name)
        fields = {
            field: float(np.asarray(getattr(spec.device, field)))
            for field in spec.device.__dataclass_fields__
        }
        content.append(
            {
                "name": name,
                "title": spec.title,
                "architecture": spec.architecture,
                **fields,
                "sources": spec.sources,
                "checkpoints": measured.get(name, []),
            }
        )
    if as_json:
        print_json(content)
        return
    rows = [
        [d["name"], d["architecture"], f"{d['peak_flops_per_s'] / 1e12:.0f}",
         f"{d['memory_bytes_per_s'] / 1e9:.0f}", f"{d['memory_bytes'] / 1e9:.0f}",
         f"{d['n_sm']:.0f}", f"{d['power_limit_w']:.0f}",
         ", ".join(d["checkpoints"]) or "transferred"]
        for d in content
    ]  # fmt: skip
    headings = ["device", "architecture", "TFLOP/s", "GB/s", "GB", "SMs", "W", "measured"]
    table("dense bf16 rate, DRAM bandwidth, capacity, power limit", headings, rows, left=2)


@click.command()
@json_option
def models(as_json) -> None:
    """The models known by name, with their parameter counts."""
    from hymell_jax import parameters
    from hymell_jax.models import model_names, preset, preset_source

    content: list[dict[str, Any]] = []
    for name in model_names():
        hf = preset(name)
        total, active = parameters.exact_parameters(hf.architecture)
        content.append(
            {
                "name": name,
                "family": hf.family,
                "parameters": total,
                "active_parameters": active,
                "dtype": hf.dtype,
                "source": preset_source(name),
            }
        )
    if as_json:
        print_json(content)
        return
    rows = [
        [m["name"], m["family"], f"{m['parameters'] / 1e9:.3f}",
         f"{m['active_parameters'] / 1e9:.3f}", m["dtype"]]
        for m in content
    ]  # fmt: skip
    table("", ["model", "family", "10^9 parameters", "active", "dtype"], rows, left=2)


@click.command()
@click.argument("command", required=False)
def schema(command) -> None:
    """The JSON Schema of what COMMAND prints under --json, or of all commands."""
    from hymell_jax.output_schema import output_schema

    print_json(output_schema(command))


COMMANDS = (evaluate, fit, import_tables, devices, models, schema)
