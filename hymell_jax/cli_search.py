"""The commands `sweep`, `search` and `explain`; registered by `cli`. JAX is imported inside."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import click


def _numbers(options: Iterable[str], what: str) -> dict[str, float]:
    """{name: number} from texts `name=number`, several also separated by commas."""
    found: dict[str, float] = {}
    for text in (part for option in options for part in option.split(",")):
        name, sign, value = text.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            sign = ""
        if not sign:
            raise ValueError(f"{what} takes name=number; got {text!r}.")
    return found


def _ranges(options: Iterable[str]) -> dict[str, tuple[float, float]]:
    """{name: (least, greatest)} from texts `name=least:greatest`."""
    found = {}
    for text in options:
        name, _, value = text.partition("=")
        low, colon, high = value.partition(":")
        try:
            found[name.strip()] = (float(low), float(high))
        except ValueError:
            colon = ""
        if not colon:
            raise ValueError(f"--range takes name=least:greatest; got {text!r}.")
    return found


_WORK = {"batch": "batch_size", "prompt": "prompt_tokens", "output": "output_tokens"}


def workload_options(options: Iterable[str]) -> dict[str, Any]:
    """Arguments of `types.workload` from texts `batch=8,prompt=1024,kv_dtype=fp8`."""
    found: dict[str, Any] = {}
    for text in (part for option in options for part in option.split(",")):
        name, sign, value = (x.strip() for x in text.partition("="))
        name = _WORK.get(name, name)
        if name in ("dtype", "kv_dtype"):
            found[name] = value
            continue
        (number,) = _numbers([f"{name}{sign}{value}"], "--workload").values()
        found[name] = number
    allowed = {
        "batch_size", "prompt_tokens", "output_tokens", "context_tokens", "dtype", "kv_dtype",
        "tensor_parallel", "expert_parallel",
    }  # fmt: skip
    unknown = sorted(set(found) - allowed)
    if unknown:
        raise ValueError(
            f"--workload has no {unknown[0]!r}; it takes {', '.join(sorted(allowed))}."
        )
    return found


def _print_json(content: Any) -> None:
    click.echo(json.dumps(content, indent=1, allow_nan=False))


def _shared(command: Callable) -> Callable:
    """Options that say what runs where."""
    for option in (
        click.option("--device", required=True, help="Exact name or a JSON file."),
        click.option("--runtime", help="Serving engine and version; by default the newest."),
        click.option("--dtype", type=click.Choice(["bf16", "fp8"]), help="By default the model's."),
        click.option("--workload", multiple=True, metavar="NAME=VALUE",
                     help="batch=8,prompt=1024,output=128,tensor_parallel=1,kv_dtype=bf16"),
        click.option("--json", "as_json", is_flag=True, help="Print JSON, all in SI units."),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command()
@click.argument("model_or_space")
@_shared
@click.option(
    "--minimise",
    default="energy",
    show_default=True,
    help="energy, latency, energy_delay, or any quantity.",
)
@click.option("--at-most", multiple=True, metavar="QUANTITY=VALUE", help="May be given often.")
@click.option("--at-least", multiple=True, metavar="QUANTITY=VALUE")
@click.option("--equal", multiple=True, metavar="QUANTITY=VALUE", help="Within --tolerance.")
@click.option("--tolerance", default=0.01, show_default=True, help="Of --equal, relative.")
@click.option("--free", multiple=True, metavar="FIELD", help="Instead of the usual ones.")
@click.option("--fix", multiple=True, metavar="FIELD", help="Out of the usual ones.")
@click.option(
    "--range",
    "ranges",
    multiple=True,
    metavar="FIELD=LEAST:GREATEST",
    help="By default half to twice the start.",
)
@click.option("--multiple", multiple=True, metavar="FIELD=STEP", help="Step of a width.")
@click.option("--untied", is_flag=True, help="Let heads x head_dim leave their share of d_model.")
@click.option("--ignore-memory", is_flag=True, help="Search also what does not fit.")
@click.option("--ignore-domain", is_flag=True, help="Search also beyond the measured sizes.")
@click.option("--pareto", metavar="QUANTITY", help="The front against this quantity.")
@click.option("--points", default=8, show_default=True, help="Weights of the front.")
@click.option("--starts", default=32, show_default=True)
@click.option("--seed", default=0, show_default=True)
def search(
    model_or_space, device, runtime, dtype, workload, as_json, minimise, at_most, at_least, equal,
    tolerance, free, fix, ranges, multiple, untied, ignore_memory, ignore_domain, pareto, points,
    starts, seed,
) -> None:  # fmt: skip
    """The architecture near MODEL_OR_SPACE that minimises energy or latency within budgets.

    MODEL_OR_SPACE is a preset, a config.json, or a JSON file with `base` and `free`.
    """
    question = dict(
        minimise=minimise,
        at_most=_numbers(at_most, "--at-most"),
        at_least=_numbers(at_least, "--at-least"),
        equal=_numbers(equal, "--equal"),
        tolerance=tolerance,
        free=free or None,
        fix=fix,
        ranges=_ranges(ranges),
        multiples=_numbers(multiple, "--multiple"),
        tie=None if untied else "auto",
        work=workload_options(workload),
        memory=not ignore_memory,
        domain=not ignore_domain,
        dtype=dtype,
        runtime=runtime,
        starts=starts,
        seed=seed,
    )
    if pareto:
        from hymell_jax.pareto import front

        content = front(model_or_space, device, against=pareto, points=points, **question)
    else:
        from hymell_jax.optimise import search as run

        content = run(model_or_space, device, **question)
    if as_json:
        _print_json(content)
    elif pareto:
        _show_front(content)
    else:
        _show_search(content)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1e4 or value % 1 == 0 else f"{value:.5g}"


def _show_search(c: dict[str, Any]) -> None:
    from hymell_jax.cli import _table

    stages = ("start", "relaxed", "concrete")
    rows = [
        [name, *(_number(c[s]["variables"][name]) for s in stages)]
        for name in c["concrete"]["variables"]
    ]
    rows += [
        [name, *(f"{c[s]['quantities'][name]:.5g}" for s in stages)]
        for name in c["concrete"]["quantities"]
    ]
    rows.append(["within all limits", *("yes" if c[s]["feasible"] else "no" for s in stages)])
    title = f"{c['model']} on {c['device']}: least {c['minimise']['quantity']}, {c['status']}"
    _table(title, ["", *stages], rows)
    change = c["objective"] / c["start"]["objective"] - 1.0
    click.echo(
        f"\n{c['minimise']['quantity']} {100 * change:+.2f} % against the start; rounding cost "
        f"{100 * c['gap']:.2f} %; {c['evaluations']} designs, {c['time_s']:.1f} s"
    )
    for b in c["blocking"]:
        click.echo(
            f"Blocked by {b['quantity']} {b['kind'].replace('_', ' ')} {b['limit']:g}: the nearest "
            f"design has {b['value']:g}.",
            err=True,
        )


def _show_front(c: dict[str, Any]) -> None:
    from hymell_jax.cli import _table

    shown = (c["minimise"], c["against"])
    names = list(c["start"]["variables"])
    rows = [
        [
            *(f"{d['quantities'][n]:.5g}" for n in shown),
            *(_number(d["variables"][n]) for n in names),
        ]
        for d in c["front"]
    ]
    title = f"{c['model']} on {c['device']}: {len(rows)} of {c['front_size']} designs of the front"
    _table(title, [*shown, *names], rows, left=0)


@click.command()
@click.argument("spec")
@click.option("--out", required=True, help="Parquet file; a killed sweep goes on where it stopped.")
@click.option("--coordinator", help="host:port of process 0, to share the work between processes.")
@click.option("--processes", default=1, show_default=True, help="With --coordinator: how many.")
@click.option("--process", default=0, show_default=True, help="Which of them this is, from 0.")
@click.option("--json", "as_json", is_flag=True)
def sweep(spec, out, coordinator, processes, process, as_json) -> None:
    """Every row of the design in SPEC, a JSON file, into a Parquet file with its Pareto front."""
    from hymell_jax.cli import _progress
    from hymell_jax.sweep import run_sweep

    if (coordinator is None) != (processes == 1):
        raise ValueError("--coordinator and --processes go together.")
    joined = (coordinator, processes, process) if coordinator else None
    with _progress() as report:
        content = run_sweep(spec, out, report, joined)
    if as_json:
        _print_json(content)
        return
    click.echo(
        f"{content['rows']} rows in {content['out']}, {content['computed']} computed now in "
        f"{content['time_s']:.1f} s: first part {content['first_part_s']:.1f} s with compiling, "
        f"then {content['rows_per_s']:.0f} rows/s"
    )


@click.command()
@click.argument("model")
@_shared
@click.option("--target", metavar="QUANTITY=VALUE", help="What single change reaches it?")
def explain(model, device, runtime, dtype, workload, as_json, target) -> None:
    """What the cost of MODEL hangs on: elasticities, parts, and what would reach a target."""
    goal = _numbers([target] if target else [], "--target")
    if len(goal) > 1:
        raise ValueError("--target takes one quantity.")
    from hymell_jax import checkpoint, models, sensitivity, types

    hf = models.resolve_model(model)
    chosen = dtype or hf.dtype
    work = types.workload(**({"dtype": chosen} | workload_options(workload)))
    fitted = checkpoint.load(device, runtime, chosen)
    name, limit = next(iter(goal.items()), (None, None))
    content = sensitivity.explain(fitted, hf, work, name, limit)
    if as_json:
        _print_json(content)
    else:
        _show_explanation(content)


def _show_explanation(c: dict[str, Any]) -> None:
    from hymell_jax.cli import _joules, _seconds, _table

    names = list(next(iter(c["elasticities"].values())))
    rows = [
        [field, *(f"{slopes[name]:+.3f}" for name in names)]
        for field, slopes in c["elasticities"].items()
        if max(map(abs, slopes.values())) >= 5e-4
    ]
    _table(f"{c['model']} on {c['device']}: percent per percent of", ["", *names], rows)
    for phase in ("prefill", "decode"):
        rows = [
            [name, _seconds(p["time_s"]), _joules(p["energy_j"]), f"{100 * p['share']:.1f} %",
             max(p["regimes"], key=p["regimes"].get), p["bound"]]
            for name, p in c["parts"][phase].items() if p["share"] >= 0.002
        ]  # fmt: skip
        click.echo()
        _table(f"{phase} by part", ["", "time", "energy", "share", "regime", "bound"], rows)
    if "target" in c:
        goal = c["target"]
        rows = [
            [change["field"], change["kind"], _number(change["from"]), _number(change["to"]),
             f"{100 * change['change']:+.1f} %", f"{change['loss_increase']:+.4f}",
             f"{change['quantities'][goal['quantity']]:.4g}"]
            for change in goal["changes"]
        ]  # fmt: skip
        click.echo()
        heads = ["field", "of", "from", "to", "change", "loss", goal["quantity"]]
        title = f"single changes to {goal['quantity']} {goal['limit']:g}, cheapest first"
        _table(title if rows else f"No {title[:-16]}", heads, rows, left=2)


COMMANDS = (sweep, search, explain)
