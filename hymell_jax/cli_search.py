"""The commands `sweep`, `search` and `explain`; registered by `cli`. JAX is imported inside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from hymell_jax.cli_options import (
    complete,
    json_option,
    model_argument,
    model_names,
    number_ranges,
    numbers,
    placement_options,
    workload_options,
)
from hymell_jax.cli_output import parts_table, print_json, progress, table


@click.command()
@click.argument("model_or_space", shell_complete=complete(model_names))
@placement_options
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
        at_most=numbers(at_most, "--at-most"),
        at_least=numbers(at_least, "--at-least"),
        equal=numbers(equal, "--equal"),
        tolerance=tolerance,
        free=free or None,
        fix=fix,
        ranges=number_ranges(ranges),
        multiples=numbers(multiple, "--multiple"),
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

        run: Callable[..., dict[str, Any]] = functools.partial(front, against=pareto, points=points)
    else:
        from hymell_jax.optimise import search

        run = search
    with progress() as report:
        content = run(model_or_space, device, progress=report, **question)
    if as_json:
        print_json(content)
    elif pareto:
        _show_front(content)
    else:
        _show_search(content)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1e4 or value % 1 == 0 else f"{value:.5g}"


def _followers(start: dict[str, Any], designs: list[dict[str, Any]]) -> list[str]:
    """Fields that are not free and yet differ from the start: they follow one that is."""
    return [
        name
        for name, value in start["architecture"].items()
        if name not in start["variables"] and any(d["architecture"][name] != value for d in designs)
    ]


def _show_search(c: dict[str, Any]) -> None:
    stages = ("start", "relaxed", "concrete")
    infeasible = c["status"] == "infeasible"
    if infeasible:
        _show_blocking(c["blocking"])
    rows = [
        [name, *(_number(c[s]["variables"][name]) for s in stages)]
        for name in c["concrete"]["variables"]
    ]
    rows += [
        [f"{name} (follows)", *(_number(c[s]["architecture"][name]) for s in stages)]
        for name in _followers(c["start"], [c["concrete"]])
    ]
    rows += [
        [name, *(f"{c[s]['quantities'][name]:.5g}" for s in stages)]
        for name in c["concrete"]["quantities"]
    ]
    rows.append(["within all limits", *("yes" if c[s]["feasible"] else "no" for s in stages)])
    title = f"{c['model']} on {c['device']}: least {c['minimise']['quantity']}, {c['status']}"
    heads = ("start", "relaxed", "nearest, no answer") if infeasible else stages
    table(title, ["", *heads], rows)
    effort = f"{c['evaluations']} designs, {c['time_s']:.1f} s"
    if infeasible:
        click.echo(f"\n{effort}")
        return
    change = c["objective"] / c["start"]["objective"] - 1.0
    click.echo(
        f"\n{c['minimise']['quantity']} {100 * change:+.2f} % against the start; rounding cost "
        f"{100 * c['gap']:.2f} %; {effort}"
    )
    _warn_of_active_parameters(c)


def _show_blocking(blocking: list[dict[str, Any]]) -> None:
    """That there is no answer, and by how much the nearest design breaks which limits."""
    click.echo("NO DESIGN MEETS EVERY LIMIT. The nearest one, which is no answer, breaks")
    for b in blocking:
        by = f"{100 * (b['value'] / b['limit'] - 1.0):+.1f} %"
        if b["quantity"] == "domain_distance":  # a logarithm
            by = f"{b['value'] - b['limit']:+.3g}"
        click.echo(
            f"  {b['quantity']} {b['kind'].replace('_', ' ')} {b['limit']:.6g}: it has "
            f"{b['value']:.6g}, {by}"
        )
    click.echo("Loosen these limits, free more fields (--free) or widen them (--range).\n")


def _warn_of_active_parameters(c: dict[str, Any]) -> None:
    """A hint where all parameters of a mixture were held, but not those that a token visits."""
    limited = {b["quantity"] for b in c["concrete"]["constraints"]}
    start, found = (c[stage]["architecture"] for stage in ("start", "concrete"))
    held = limited & {"active_parameters", "loss"}
    if "parameters" not in limited or held or not start["n_experts"] > 0:
        return
    from hymell_jax.parameters import active_parameters
    from hymell_jax.types import architecture

    before, after = (float(active_parameters(architecture(**a))) for a in (start, found))
    if after < 0.99 * before:
        click.echo(
            f"Note: active parameters, those that one token visits, fell by "
            f"{100 * (1 - after / before):.0f} %, and quality may with them; to hold them add "
            f"--equal active_parameters={before:.4g}",
            err=True,
        )


def _show_front(c: dict[str, Any]) -> None:
    shown = (c["minimise"], c["against"])
    names = [*c["start"]["variables"], *_followers(c["start"], c["front"])]
    rows = [
        [
            *(f"{d['quantities'][n]:.5g}" for n in shown),
            *(_number(d["architecture"][n]) for n in names),
        ]
        for d in c["front"]
    ]
    title = f"{c['model']} on {c['device']}: {len(rows)} of {c['front_size']} designs of the front"
    table(title, [*shown, *names], rows, left=0)


@click.command()
@click.argument("spec", type=click.Path())
@click.option("--out", required=True, help="Parquet file; a killed sweep goes on where it stopped.")
@click.option("--coordinator", help="host:port of process 0, to share the work between processes.")
@click.option("--processes", default=1, show_default=True, help="With --coordinator: how many.")
@click.option("--process", default=0, show_default=True, help="Which of them this is, from 0.")
@json_option
def sweep(spec, out, coordinator, processes, process, as_json) -> None:
    """Every row of the design in SPEC, a JSON file, into a Parquet file with its Pareto front.

    The least SPEC is {"device": "h100-sxm-80gb", "base": "llama-3.1-8b", "design": "grid",
    "fields": {"n_layers": [24, 32]}}; docs/sweep.md tells every key and every column.

    Beside --out x.parquet stand x.front.parquet, the Pareto front of the rows that can be built and
    fit, and x.png, a plot of it where matplotlib is installed; until it is done, the folder
    x.parquet.parts. Needs pyarrow, the extra `data`.
    """
    from hymell_jax.sweep import front_path, run_sweep

    if (coordinator is None) != (processes == 1):
        raise ValueError("--coordinator and --processes go together.")
    joined = (coordinator, processes, process) if coordinator else None
    with progress() as report:
        content = run_sweep(spec, out, report, joined)
    if as_json:
        print_json(content)
        return
    click.echo(f"{content['rows']} rows in {out}, their front in {front_path(out)}")
    if content["computed"]:
        pace = f", then {content['rows_per_s']:.0f} rows/s" if content["rows_per_s"] else ""
        click.echo(
            f"{content['computed']} computed now in {content['time_s']:.1f} s: first part "
            f"{content['first_part_s']:.1f} s with compiling{pace}"
        )
    else:
        click.echo("All of them were there: nothing was computed now.")


@click.command()
@model_argument
@placement_options
@click.option("--target", metavar="QUANTITY=VALUE", help="What single change reaches it?")
def explain(model, device, runtime, dtype, workload, as_json, target) -> None:
    """What the cost of MODEL hangs on: elasticities, parts, and what would reach a target."""
    goal = numbers([target] if target else [], "--target")
    if len(goal) > 1:
        raise ValueError("--target takes one quantity.")
    from hymell_jax import checkpoint, models, sensitivity, types

    hf = models.resolve_model(model)
    chosen = dtype or hf.dtype
    work = types.workload(**(dict[str, Any](dtype=chosen) | workload_options(workload)))
    fitted = checkpoint.load(device, runtime, chosen)
    name, limit = next(iter(goal.items()), (None, None))
    content = sensitivity.explain(fitted, hf, work, name, limit)
    if as_json:
        print_json(content)
    else:
        _show_explanation(content)


PARTS_LEGEND = """\
regime: where one call stands on the data sheet's roofline by its FLOPs and bytes (launch: few
FLOPs); bound: what takes most of the time predicted for it. Where they differ, bound says what to
change."""


def _show_explanation(c: dict[str, Any]) -> None:
    names = list(next(iter(c["elasticities"].values())))
    rows = [
        [field, *(f"{slopes[name]:+.3f}" for name in names)]
        for field, slopes in c["elasticities"].items()
        if max(map(abs, slopes.values())) >= 5e-4
    ]
    table(f"{c['model']} on {c['device']}: percent per percent of", ["", *names], rows)
    for phase in ("prefill", "decode"):
        click.echo()
        parts_table(phase, c["parts"][phase])
    click.echo(f"\n{PARTS_LEGEND}")
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
        table(title if rows else f"No {title[:-16]}", heads, rows, left=2)


COMMANDS = (sweep, search, explain)
