"""The command `predict`; registered by `cli`. JAX is imported inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from hymell_jax.cli_options import (
    DTYPES,
    LEVELS,
    batch_options,
    devices_option,
    dtype_option,
    json_option,
    models_argument,
    runtime_option,
    subjects,
    tensor_parallel_option,
    together,
)
from hymell_jax.cli_output import print_json
from hymell_jax.cli_show import show_comparison, show_prediction

_cost_options = together(
    click.option("--carbon-intensity", type=float, metavar="G", help="Grams of CO2 per kWh."),
    click.option("--price", type=float, metavar="P", help="Of a kWh, in any currency."),
    click.option("--gpu-price", type=float, metavar="P", help="Of an hour of one GPU."),
)


@click.command()
@models_argument
@devices_option
@click.option(
    "--compare", multiple=True, metavar="NAME...", help="More models or devices to line up."
)
@runtime_option
@dtype_option
@click.option(
    "--kv-dtype", type=click.Choice(DTYPES), help="By default 16 bits, fp32 with --dtype fp32."
)
@batch_options
@tensor_parallel_option
@click.option("--level", type=click.Choice(LEVELS), default="best", show_default=True)
@click.option("--engine", help="Serving engine of level 3; by default vLLM.")
@click.option("--checkpoints", metavar="DIR", help="Of your own fits; by default those shipped.")
@click.option("--ignore-memory", is_flag=True, help="Predict even what does not fit.")
@_cost_options
@json_option
def predict(
    words, device, compare, runtime, dtype, kv_dtype, batch, prompt, output, tensor_parallel,
    level, engine, checkpoints, ignore_memory, carbon_intensity, price, gpu_price, as_json,
) -> None:  # fmt: skip
    """Latency, energy and memory of MODEL: a preset, a config.json, or a folder that holds one.

    Several models and devices, as in `hymell predict M1 M2 --device D1 D2`, are lined up.
    """
    more = [part for text in compare for part in text.split(",") if part.strip()]
    names, places = subjects([*words, *more], device)
    from hymell_jax import checkpoint, footprint, models, summary, types

    hfs = {name: models.resolve_model(name) for name in names}
    for place in places:
        checkpoint.device_spec(place, checkpoints)

    def one(name: str, place: str) -> dict[str, Any]:
        hf = hfs[name]
        chosen = dtype or checkpoint.default_dtype(place, hf.dtype, checkpoints)
        work = types.workload(
            batch_size=batch,
            prompt_tokens=prompt,
            output_tokens=output,
            dtype=chosen,
            kv_dtype=kv_dtype,
            tensor_parallel=tensor_parallel,
        )
        fitted = checkpoint.load(place, runtime, chosen, checkpoints, engine)
        answer = summary.summarise(fitted, hf, work, level, check_memory=not ignore_memory)
        costs = footprint.footprint(answer, carbon_intensity, price, gpu_price)
        return answer | {"footprint": costs}

    if len(names) * len(places) == 1:
        content = one(names[0], places[0])
        show: Callable[[Mapping[str, Any]], None] = show_prediction
    else:
        content = _lined_up(one, names, places)
        show = show_comparison
    if as_json:
        print_json(content)
    else:
        show(content)


def _lined_up(one: Any, names: list[str], places: list[str]) -> dict[str, Any]:
    """All pairs; one that cannot be predicted is named with its reason, unless none can."""
    found, left_out = [], []
    for name in names:
        for place in places:
            try:
                found.append(one(name, place))
            except ValueError as error:
                left_out.append({"model": name, "device": place, "reason": str(error)})
    if not found:
        raise ValueError(left_out[0]["reason"])
    return {"predictions": found, "left_out": left_out}


COMMANDS = (predict,)
