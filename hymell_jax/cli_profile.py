"""The command `profile`; registered by `cli`. PyTorch and JAX are imported inside."""

from __future__ import annotations

import os
import shlex
from typing import Any

import click

from hymell_jax.cli_data import show_fitted, show_profile_errors
from hymell_jax.cli_options import json_option
from hymell_jax.cli_output import print_json, progress, seconds, table
from hymell_jax.profiler.plans import PLANS


@click.command()
@click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda[:i]",
              help="What PyTorch measures.")  # fmt: skip
@click.option("--plan", type=click.Choice(PLANS), default="quick", show_default=True)
@click.option("--levels", default="1,2,3", show_default=True,
              help="1 operators, 2 blocks, 3 whole models.")  # fmt: skip
@click.option(
    "--hours", type=float, help="Time to measure, instead of the plan's own; a fit comes on top."
)
@click.option("--out", required=True, metavar="DIR", help="Folder of the profile; resumed if any.")
@click.option("--name", help="Name of the device in the tables; by default from the hardware.")
@click.option("--fit", "fit_too", is_flag=True, help="Fit a checkpoint, print its errors.")
@click.option("--dry-run", is_flag=True, help="Only list what the plan measures.")
@json_option
def profile(device, plan, levels, hours, out, name, fit_too, dry_run, as_json) -> None:
    """Measure operators, blocks and whole models on this machine, into a folder of tables.

    Run it again on the same folder to resume, to measure what is left, and what was disturbed.
    """
    chosen = _levels(levels)
    if dry_run:
        _list_plan(plan, device, chosen, as_json)
        return
    try:
        _profile(device, plan, chosen, hours, out, name, fit_too, as_json)
    except KeyboardInterrupt:
        click.echo(
            f"Interrupted. What was measured and fitted is kept in {out}; the same command goes on "
            "from there.",
            err=True,
        )
        raise click.exceptions.Exit(130) from None


def _profile(device, plan, chosen, hours, out, name, fit_too, as_json) -> None:
    from hymell_jax.profiler import run

    with progress() as report:
        content = run.profile(
            out, device=device, plan=plan, levels=chosen, hours=hours, name=name, report=report,
            note=lambda text: click.echo(text, err=True),
        )  # fmt: skip
    if not as_json:
        _show(content)
        if not fit_too:
            where, to = map(shlex.quote, (out, os.path.join(out, "checkpoints")))
            click.echo(
                f"next: hymell fit --device {content['device']} --data {where} --level "
                f"{max(chosen)} --out {to}"
            )
    if fit_too:
        from hymell_jax import profile_fit

        folder = os.path.join(out, "checkpoints")
        with progress() as report:
            errors = profile_fit.fit_profile(out, folder, report, chosen)
        content = content | {"errors": errors, "checkpoints": folder}
        if not as_json:
            click.echo()
            show_profile_errors(errors)
            show_fitted(content["device"], errors, chosen, out, folder)
    if as_json:
        print_json(content)


COMMANDS = (profile,)


def _levels(text: str) -> tuple[int, ...]:
    found = [part.strip() for part in text.split(",")]
    if not found or any(part not in ("1", "2", "3") for part in found):
        raise ValueError(f"--levels takes numbers from 1 to 3 like 1,2; got {text!r}.")
    return tuple(sorted({int(part) for part in found}))


def _list_plan(plan: str, device: str, levels: tuple[int, ...], as_json: bool) -> None:
    from hymell_jax.profiler import plans, session

    made = plans.make_plan(plan, "cuda" if device.startswith("cuda") else "cpu", levels)
    rows = session.describe(made)
    if as_json:
        print_json({"plan": plan, "hours": made.hours, "tables": rows})
        return
    title = f"plan {plan}: {len(made.cases)} cases, at most {made.hours * 60:.0f} minutes"
    shown = [[r["table"], str(r["level"]), str(r["cases"]), str(r["test"])] for r in rows]
    table(title, ["table", "level", "cases", "held out"], shown)


def _show(c: dict[str, Any]) -> None:
    outcome = c["outcome"]
    title = f"{c['device']} ({c['runtime']}, {c['dtype']}, {c['threads']} threads)"
    table(title, ["table", "rows"], [[name, str(count)] for name, count in c["rows"].items()])
    click.echo(
        f"\nthis run {outcome['measured']} measured, {outcome['failed']} failed; "
        f"{outcome['left']} left for the next run of the same command"
    )
    _show_disturbed(c)
    click.echo(f"energy: {c['energy_source']}")


def _show_disturbed(c: dict[str, Any]) -> None:
    """How many rows something spoiled, what was seen, and what helps."""
    from hymell_jax.profiler.steadiness import KINDS

    drift = c["anchors"].get("compute_s")
    steady = ""
    if drift:
        steady = f"; anchor {seconds(drift['median_s'])}, range {100 * drift['spread']:.0f} %"
    click.echo(f"{c['disturbed']} of {sum(c['rows'].values())} rows disturbed{steady}")
    if not c["disturbed"]:
        return
    for kind, count in c["disturbed_by"].items():
        seen = ""
        if kind == "other load" and c["other_load"] is not None:
            seen = f" (median of all rows {100 * c['other_load']:.0f} %)"
        click.echo(f"  {count}: {KINDS[kind]}{seen}")
    again = c["outcome"]["disturbed"]
    if again:
        click.echo(
            "  Stop other work and run the same command again: after what is left it measures "
            f"{again} of them once more and keeps the better rows."
        )
    else:
        click.echo("  They were measured twice; on a calm machine begin again in another --out.")
