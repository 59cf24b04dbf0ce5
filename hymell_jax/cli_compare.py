"""The command `compare`; registered by `cli`. JAX is imported inside."""

from __future__ import annotations

import click

from hymell_jax.cli_options import batch_options, device_option, json_option, model_argument
from hymell_jax.cli_output import cell, joules, print_json, seconds, table


@click.command()
@model_argument
@device_option
@batch_options
@click.option(
    "--wattgpu",
    nargs=2,
    metavar="RUNS MODELS",
    help="WattGPU's tables of runs and of models, CSV, to train its trees on.",
)
@json_option
def compare(model, device, batch, prompt, output, wattgpu, as_json) -> None:
    """MODEL in bf16 by every method side by side, with what each assumes and leaves out."""
    from hymell_jax import comparison, models, types

    hf = models.resolve_model(model)
    work = types.workload(batch_size=batch, prompt_tokens=prompt, output_tokens=output)
    fits = comparison.wattgpu_fit(*wattgpu) if wattgpu else None
    content = comparison.compare(hf, device, work, fits)
    if as_json:
        print_json(content)
        return

    shows = (seconds, joules, seconds, joules)
    rows = [
        [m["method"], *(cell(m[q], f) for q, f in zip(comparison.SHOWN, shows, strict=True))]
        for m in content["methods"]
    ]
    title = f"{content['model']} on {content['device']}, bf16, batch {batch:g}"
    headings = ["", "prefill", "energy", "decode, a token", "energy"]
    table(f"{title}, prompt {prompt:g}, output {output:g}", headings, rows)
    for m in content["methods"]:
        click.echo(f"\n{m['method']}: assumes {'; '.join(m['assumes'])}.")
        click.echo(f"  Leaves out {'; '.join(m['leaves_out'])}. {m['coefficients']}")


COMMANDS = (compare,)
