"""The `hymell` command. Results go to stdout, everything else to stderr; errors exit with 2.

Modules that need JAX or pandas are imported inside the commands, so that `--help` is instant.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import click

from hymell_jax import cli_rank, cli_search, compile_cache
from hymell_jax.version import __version__

LEVELS = ["1", "2", "3", "best"]


class _Group(click.Group):
    """Turns the package's ValueErrors into one sentence and exit status 2."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        compile_cache.configure(name)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            raise click.UsageError(" ".join(str(error).split())) from error
        except BrokenPipeError:
            raise
        except OSError as error:
            raise click.UsageError(f"Output cannot be written: {error.strerror}.") from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hymell")
def main() -> None:
    """Latency, energy and memory of LLM inference, from a model's configuration and a GPU."""


def _print_json(content: Any) -> None:
    click.echo(json.dumps(content, indent=1, allow_nan=False))


def _table(title: str, headings: list[str], rows: list[list[str]], left: int = 1) -> None:
    """An aligned table on stdout; the first `left` columns are text."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if title:
        click.echo(title)
    table = Table(box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    width = None if sys.stdout.isatty() else 200
    Console(width=width, highlight=False).print(table)


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """A callback (what, done, total) that draws bars on stderr with rate and remaining time."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[tuple[str, int], Any] = {}

        def report(what: str, done: int, total: int) -> None:
            key = (what, total)
            if key not in tasks:
                tasks[key] = bars.add_task(what, total=total)
            bars.update(tasks[key], completed=done)

        yield report


def _seconds(value: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if value * factor >= 1 or unit == "us":
            return f"{value * factor:.4g} {unit}"
    raise AssertionError("unreachable")


def _joules(value: float) -> str:
    if value >= 3600:
        return f"{value / 3600:.4g} Wh"
    return f"{value:.4g} J" if value >= 1 else f"{value * 1e3:.4g} mJ"


def _bytes(value: float) -> str:
    return f"{value / 1e9:.4g} GB" if value >= 1e9 else f"{value / 1e6:.4g} MB"


@main.command()
@click.argument("model")
@click.option("--device", required=True, help="Exact name (see `hymell devices`) or a JSON file.")
@click.option("--runtime", help="Serving engine and version; by default the newest measured.")
@click.option("--dtype", type=click.Choice(["bf16", "fp8"]), help="By default the model's own.")
@click.option("--kv-dtype", type=click.Choice(["bf16", "fp8"]), default="bf16", show_default=True)
@click.option("--batch", default=1.0, show_default=True, help="Sequences that run together.")
@click.option("--prompt", default=1024.0, show_default=True, help="Prompt tokens a sequence.")
@click.option("--output", default=128.0, show_default=True, help="Tokens each one generates.")
@click.option("--tensor-parallel", default=1.0, show_default=True, help="GPUs that share a layer.")
@click.option("--level", type=click.Choice(LEVELS), default="best", show_default=True)
@click.option("--engine", help="Serving engine of level 3; by default vLLM.")
@click.option("--ignore-memory", is_flag=True, help="Predict even what does not fit.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, all numbers in SI units.")
def predict(
    model, device, runtime, dtype, kv_dtype, batch, prompt, output, tensor_parallel, level,
    engine, ignore_memory, as_json,
) -> None:  # fmt: skip
    """Latency, energy and memory of MODEL: a preset, a config.json, or a folder that holds one."""
    from hymell_jax import checkpoint, models, summary, types

    hf = models.resolve_model(model)
    chosen = dtype or hf.dtype
    work = types.workload(
        batch_size=batch,
        prompt_tokens=prompt,
        output_tokens=output,
        dtype=chosen,
        kv_dtype=kv_dtype,
        tensor_parallel=tensor_parallel,
    )
    fitted = checkpoint.load(device, runtime, chosen, engine=engine)
    content = summary.summarise(fitted, hf, work, level, check_memory=not ignore_memory)
    if as_json:
        _print_json(content)
    else:
        _show_prediction(content)


def _show_prediction(c: dict[str, Any]) -> None:
    work, memory = c["workload"], c["memory"]
    title = (
        f"{c['model']} on {c['device']} ({c['runtime']}, {c['dtype']}), batch "
        f"{work['batch_size']:g}, prompt {work['prompt_tokens']:g}, output "
        f"{work['output_tokens']:g}, level {c['level']}"
    )
    tokens = work["batch_size"] * work["output_tokens"]
    rows = [
        ["prefill", _seconds(c["prefill"]["time_s"]), _joules(c["prefill"]["energy_j"]),
         f"{c['prefill']['power_w']:.0f} W"],
        ["decode, a token", _seconds(c["decode"]["time_per_token_s"]),
         _joules(c["decode"]["energy_per_token_j"]), f"{c['decode']['power_w']:.0f} W"],
        ["total", _seconds(c["total"]["time_s"]), _joules(c["total"]["energy_j"]),
         f"{c['total']['energy_j'] / c['total']['time_s']:.0f} W"],
    ]  # fmt: skip
    headings = ["", "time", "energy", "power"]
    if c["interval"]:
        headings += [f"{100 * c['interval']['coverage']:.0f} % of time", "of energy"]
        for row, phase in zip(rows, ("prefill", "decode"), strict=False):
            for show, bounds in zip(
                (_seconds, _joules), c["interval"][phase].values(), strict=True
            ):
                row.append(" to ".join(map(show, bounds)))
        rows[2] += ["", ""]
    _table(title, headings, rows)
    click.echo(
        f"\n{c['total']['output_tokens_per_s']:.4g} output tokens/s, prefill included; "
        f"{c['total']['energy_j'] / tokens * 1e3:.4g} J per 1000 output tokens, "
        f"{c['total']['energy_wh']:.4g} Wh"
    )
    needed = memory["weights_bytes"] + memory["kv_cache_bytes"] + memory["activations_bytes"]
    each = " on each GPU" if work["tensor_parallel"] > 1 else ""
    click.echo(
        f"memory{each} {_bytes(needed)} of {_bytes(memory['capacity_bytes'])}: weights "
        f"{_bytes(memory['weights_bytes'])}, KV cache {_bytes(memory['kv_cache_bytes'])} "
        f"({memory['kv_cache_bytes_per_token']:.0f} bytes a token), activations "
        f"{_bytes(memory['activations_bytes'])}\n"
    )
    for phase in ("prefill", "decode"):
        parts = c["parts"][phase]
        rows = [
            [name, _seconds(p["time_s"]), _joules(p["energy_j"]), f"{100 * p['share']:.1f} %",
             max(p["regimes"], key=p["regimes"].get), p["bound"]]
            for name, p in parts.items() if p["share"] >= 0.002
        ]  # fmt: skip
        _table(f"{phase} by part", ["", "time", "energy", "share", "regime", "bound"], rows)
        click.echo()
    click.echo(f"Left out: {c['excluded']}.")
    for warning in c["warnings"]:
        click.echo(f"Note: {warning}", err=True)


@main.command()
@click.argument("model")
@click.option("--device", required=True, help="Exact name (see `hymell devices`) or a JSON file.")
@click.option("--batch", default=1.0, show_default=True, help="Sequences that run together.")
@click.option("--prompt", default=1024.0, show_default=True, help="Prompt tokens a sequence.")
@click.option("--output", default=128.0, show_default=True, help="Tokens each one generates.")
@click.option("--json", "as_json", is_flag=True)
def compare(model, device, batch, prompt, output, as_json) -> None:
    """MODEL in bf16 by every method side by side, with what each assumes and leaves out."""
    from hymell_jax import comparison, models, types

    hf = models.resolve_model(model)
    work = types.workload(batch_size=batch, prompt_tokens=prompt, output_tokens=output)
    content = comparison.compare(hf, device, work)
    if as_json:
        _print_json(content)
        return

    def cell(value: float | None, show: Any) -> str:
        return "-" if value is None else show(value)

    shows = (_seconds, _joules, _seconds, _joules)
    rows = [
        [m["method"], *(cell(m[q], f) for q, f in zip(comparison.SHOWN, shows, strict=True))]
        for m in content["methods"]
    ]
    title = f"{content['model']} on {content['device']}, bf16, batch {batch:g}"
    headings = ["", "prefill", "energy", "decode, a token", "energy"]
    _table(f"{title}, prompt {prompt:g}, output {output:g}", headings, rows)
    for m in content["methods"]:
        click.echo(f"\n{m['method']}: assumes {'; '.join(m['assumes'])}.")
        click.echo(f"  Leaves out {'; '.join(m['leaves_out'])}. {m['coefficients']}")


@main.command()
@click.option("--device", required=True, help="Exact name (see `hymell devices`).")
@click.option("--data", "folder", help="Folder of measured tables; default $HYMELL_DATA.")
@click.option("--level", type=click.Choice(["1", "2", "all"]), default="all", show_default=True)
@click.option("--split", default="test", show_default=True, help="train, test, or all.")
@click.option("--form", type=click.Choice(["refined", "published"]), default="refined")
@click.option("--reference", help="CSV with the errors of a black box on the same rows.")
@click.option("--checkpoints", help="Folder of checkpoints; by default those shipped.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of rows.")
def evaluate(device, folder, level, split, form, reference, checkpoints, as_json) -> None:
    """Errors of the fitted model on measured rows, by table, regime and target."""
    from hymell_jax import block_evaluate, data
    from hymell_jax import evaluate as operators

    root = data.data_folder(folder)
    options = dict(split=split, reference=reference, checkpoints=checkpoints)
    rows = []
    if level in ("1", "all"):
        rows += operators.evaluate(device, root, form=form, **options)
    if level in ("2", "all"):
        rows += block_evaluate.evaluate_blocks(device, root, required=level == "2", **options)
    if as_json:
        _print_json(rows)
    else:
        _show_errors(rows, device, split, form)


@main.command()
@click.option("--level", type=click.Choice(["1", "2"]), default="2", show_default=True)
@click.option("--device", required=True, help="Exact name, or `all` that the tables hold.")
@click.option("--runtime", help="As in the tables; by default every one of the device.")
@click.option("--dtype", type=click.Choice(["bf16", "fp8"]), help="By default both.")
@click.option("--data", "folder", help="Folder of measured tables; default $HYMELL_DATA.")
@click.option("--out", required=True, help="Folder of checkpoints to write into.")
@click.option("--seeds", default=1, show_default=True, help="Fits per matrix product, best kept.")
@click.option("--operators", is_flag=True, help="Fit the row-wise operators again.")
@click.option("--resume", is_flag=True, help="Keep what the folder already holds.")
def fit(level, device, runtime, dtype, folder, out, seeds, operators, resume) -> None:
    """Fit a device's coefficients and networks to measured tables; write its checkpoints."""
    from hymell_jax import block_recipes, checkpoint, data, files, recipes

    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1; got {seeds}.")
    root = data.data_folder(folder)
    chosen = recipes.fittable(root, device, runtime, dtype)
    files.writable_folder(out)
    done = set(checkpoint.available(out)) if resume else set()
    with _progress() as report:
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
            if level == "2":
                block_recipes.add_blocks(content, root, out, progress=report)
            click.echo(f"{'/'.join(entry)}", err=True)


@main.command(name="import")
@click.argument(
    "source", type=click.Choice(["aiconfigurator", "vidur", "llmservingsim", "neusight"])
)
@click.option("--from", "path", help="Checkout of the source; aiconfigurator-core needs none.")
@click.option("--out", required=True, help="Folder of measured tables to write.")
def import_tables(source, path, out) -> None:
    """Rebuild measured tables from a public source."""
    from hymell_jax import files, importers

    if path is None and source != "aiconfigurator":
        raise ValueError(f"Importing {source} needs --from, the path of its checkout.")
    files.writable_folder(out)
    run = getattr(importers, f"import_{source}")
    for table, written in importers.write_tables(run(path), out).items():
        click.echo(f"{table}: {written}", err=True)


def _show_errors(rows: list[dict[str, Any]], device: str, split: str, form: str) -> None:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    cells = [
        [r["table"], r["runtime"], r["dtype"], r["target"], r["regime"], str(r["n"]),
         percent(r["mape"]), percent(r["mdape"]), f"{r['r2']:.4f}",
         percent(r["published_mape"]), percent(r["reference_mape"])]
        for r in rows
    ]  # fmt: skip
    headings = ["table", "runtime", "dtype", "target", "regime", "n", "MAPE %", "MdAPE %", "R2",
                "HYMELL paper %", "black box %"]  # fmt: skip
    _table(f"{device}, {split} rows, {form} form", headings, cells, left=5)


@main.command()
@click.option("--json", "as_json", is_flag=True)
def devices(as_json) -> None:
    """The devices known by name, their data sheets, and what was measured on them."""
    import numpy as np

    from hymell_jax import checkpoint
    from hymell_jax.devices import device_names, get_device

    measured: dict[str, list[str]] = {}
    for name, runtime, dtype in checkpoint.available():
        measured.setdefault(name, []).append(f"{runtime} {dtype}")
    content = []
    for name in device_names():
        spec = get_device(name)
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
        _print_json(content)
        return
    rows = [
        [d["name"], d["architecture"], f"{d['peak_flops_per_s'] / 1e12:.0f}",
         f"{d['memory_bytes_per_s'] / 1e9:.0f}", f"{d['memory_bytes'] / 1e9:.0f}",
         f"{d['n_sm']:.0f}", f"{d['power_limit_w']:.0f}",
         ", ".join(d["checkpoints"]) or "transferred"]
        for d in content
    ]  # fmt: skip
    headings = ["device", "architecture", "TFLOP/s", "GB/s", "GB", "SMs", "W", "measured"]
    _table("dense bf16 rate, DRAM bandwidth, capacity, power limit", headings, rows, left=2)


@main.command()
@click.option("--json", "as_json", is_flag=True)
def models(as_json) -> None:
    """The models known by name, with their parameter counts."""
    from hymell_jax import parameters
    from hymell_jax.models import model_names, preset, preset_source

    content = []
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
        _print_json(content)
        return
    rows = [
        [m["name"], m["family"], f"{m['parameters'] / 1e9:.3f}",
         f"{m['active_parameters'] / 1e9:.3f}", m["dtype"]]
        for m in content
    ]  # fmt: skip
    _table("", ["model", "family", "10^9 parameters", "active", "dtype"], rows, left=2)


for _command in (*cli_search.COMMANDS, *cli_rank.COMMANDS):
    main.add_command(_command)


if __name__ == "__main__":
    main()
