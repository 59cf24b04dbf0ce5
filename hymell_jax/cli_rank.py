"""The command `rank`; registered by `cli`. JAX is imported inside."""

from __future__ import annotations

from typing import Any

import click

from hymell_jax.cli_options import (
    batch_options,
    complete,
    device_names,
    dtype_option,
    json_option,
    model_argument,
    numbers,
    tensor_parallel_option,
)
from hymell_jax.cli_output import cell, joules, print_json, seconds, size, table


@click.command()
@model_argument
@click.option("--devices", "names", default="all", show_default=True, metavar="all|A,B,...",
              shell_complete=complete(device_names),
              help="Exact names (see `hymell devices`) or JSON files.")  # fmt: skip
@click.option("--slo", multiple=True, required=True, metavar="TARGET=SECONDS",
              help="time_per_token_s, ttft_s, total_time_s; may be given often.")  # fmt: skip
@batch_options
@dtype_option
@tensor_parallel_option
@json_option
def rank(model, names, slo, batch, prompt, output, dtype, tensor_parallel, as_json) -> None:
    """The GPUs that serve MODEL within a target, the one that wastes least energy first."""
    limits = numbers(slo, "--slo")
    from hymell_jax import models, ranking, types

    ranking.checked_targets(limits)
    hf = models.resolve_model(model)
    chosen = dtype or hf.dtype
    work = types.workload(
        batch_size=batch,
        prompt_tokens=prompt,
        output_tokens=output,
        dtype=chosen,
        tensor_parallel=tensor_parallel,
    )
    content = ranking.rank(hf, work, limits, names, chosen)
    content["workload"] = {
        "batch_size": batch,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "tensor_parallel": tensor_parallel,
    }
    if as_json:
        print_json(content)
    else:
        _show(content)


def _show(c: dict[str, Any]) -> None:
    def origin(d: dict[str, Any], what: str) -> str:
        return "measured" if d[what] == "fitted" else f"from {d[f'{what}_from']}"

    shown = ("time", "energy", "serving") if c["level"] == 3 else ("time", "energy")
    rows = [
        [d["device"], "yes" if d["meets"] else f"no: {', '.join(d['misses'])}",
         cell(d["time_per_token_s"], seconds), cell(d["ttft_s"], seconds),
         cell(d["energy_per_output_token_j"], joules),
         cell(d["energy_over_pick"], lambda x: f"{100 * (x - 1):+.0f} %"),
         cell(d["power_w"], lambda x: f"{x:.0f} W"),
         f"{size(d['memory_bytes'])} of {size(d['capacity_bytes'])}",
         *(origin(d, what) for what in shown)]
        for d in c["devices"]
    ]  # fmt: skip
    work = c["workload"]
    several = work["tensor_parallel"]
    target = ", ".join(f"{name} at most {limit:g}" for name, limit in c["slo"].items())
    title = (
        f"{c['model']}, {c['dtype']}, batch {work['batch_size']:g}, prompt "
        f"{work['prompt_tokens']:g}, output {work['output_tokens']:g}"
        f"{f', {several:g} GPUs' if several > 1 else ''}, level {c['level']}: {target}"
    )
    heads = ["device", "meets", "a token", "first token", "energy a token", "over pick", "power",
             "memory", *shown]  # fmt: skip
    table(title, heads, rows, left=2)
    if c["pick"] is None:
        click.echo("\nNone of the devices meets the target.")
    picks = {
        "Least energy within the target": c["pick"],
        "and of those measured": c["pick_measured"],
    }
    for what, name in picks.items():
        for d in (d for d in c["devices"] if d["device"] == name):
            click.echo(
                f"{what}: {name}, {joules(d['energy_per_output_token_j'])} per output token, "
                f"prefill included, at {d['power_w']:.0f} W (time {origin(d, 'time')}, energy "
                f"{origin(d, 'energy')})"
            )
    for entry in c["left_out"]:
        click.echo(f"Note: {entry['device']} left out: {entry['reason']}", err=True)
    click.echo(f"Left out of all times: {c['excluded']}.")


COMMANDS = (rank,)
