"""The commands `predict` and `compare`; registered by `cli`. JAX is imported inside."""

from __future__ import annotations

from typing import Any

import click

from hymell_jax.cli_options import (
    DTYPES,
    LEVELS,
    batch_options,
    device_option,
    dtype_option,
    json_option,
    runtime_option,
    tensor_parallel_option,
)
from hymell_jax.cli_output import cell, joules, parts_table, print_json, seconds, size, table


@click.command()
@click.argument("model")
@device_option
@runtime_option
@dtype_option
@click.option("--kv-dtype", type=click.Choice(DTYPES), default="bf16", show_default=True)
@batch_options
@tensor_parallel_option
@click.option("--level", type=click.Choice(LEVELS), default="best", show_default=True)
@click.option("--engine", help="Serving engine of level 3; by default vLLM.")
@click.option("--ignore-memory", is_flag=True, help="Predict even what does not fit.")
@json_option
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
        print_json(content)
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
        ["prefill", seconds(c["prefill"]["time_s"]), joules(c["prefill"]["energy_j"]),
         f"{c['prefill']['power_w']:.0f} W"],
        ["decode, a token", seconds(c["decode"]["time_per_token_s"]),
         joules(c["decode"]["energy_per_token_j"]), f"{c['decode']['power_w']:.0f} W"],
        ["total", seconds(c["total"]["time_s"]), joules(c["total"]["energy_j"]),
         f"{c['total']['energy_j'] / c['total']['time_s']:.0f} W"],
    ]  # fmt: skip
    headings = ["", "time", "energy", "power"]
    if c["interval"]:
        headings += [f"{100 * c['interval']['coverage']:.0f} % of time", "of energy"]
        for row, phase in zip(rows, ("prefill", "decode"), strict=False):
            for show, bounds in zip((seconds, joules), c["interval"][phase].values(), strict=True):
                row.append(" to ".join(map(show, bounds)))
        rows[2] += ["", ""]
    table(title, headings, rows)
    click.echo(
        f"\n{c['total']['output_tokens_per_s']:.4g} output tokens/s, prefill included; "
        f"{c['total']['energy_j'] / tokens * 1e3:.4g} J per 1000 output tokens, "
        f"{c['total']['energy_wh']:.4g} Wh"
    )
    needed = memory["weights_bytes"] + memory["kv_cache_bytes"] + memory["activations_bytes"]
    each = " on each GPU" if work["tensor_parallel"] > 1 else ""
    click.echo(
        f"memory{each} {size(needed)} of {size(memory['capacity_bytes'])}: weights "
        f"{size(memory['weights_bytes'])}, KV cache {size(memory['kv_cache_bytes'])} "
        f"({memory['kv_cache_bytes_per_token']:.0f} bytes a token), activations "
        f"{size(memory['activations_bytes'])}\n"
    )
    for phase in ("prefill", "decode"):
        parts_table(phase, c["parts"][phase])
        click.echo()
    click.echo(f"Left out: {c['excluded']}.")
    for warning in c["warnings"]:
        click.echo(f"Note: {warning}", err=True)


@click.command()
@click.argument("model")
@device_option
@batch_options
@json_option
def compare(model, device, batch, prompt, output, as_json) -> None:
    """MODEL in bf16 by every method side by side, with what each assumes and leaves out."""
    from hymell_jax import comparison, models, types

    hf = models.resolve_model(model)
    work = types.workload(batch_size=batch, prompt_tokens=prompt, output_tokens=output)
    content = comparison.compare(hf, device, work)
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


COMMANDS = (predict, compare)
