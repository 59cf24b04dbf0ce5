"""Options that commands share, and how their texts are read. Needs no JAX."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Callable, Iterable
from typing import Any

import click

LEVELS = ("1", "2", "3", "best")
DTYPES = ("bf16", "fp8", "fp32")  # `types.DTYPES`, without JAX


@functools.cache
def device_names() -> tuple[str, ...]:
    """Names of the shipped devices, read without JAX."""
    folder = importlib.resources.files("hymell_jax") / "device_data"
    return tuple(
        sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))
    )


@functools.cache
def model_names() -> tuple[str, ...]:
    """Names of the presets, read without JAX."""
    file = importlib.resources.files("hymell_jax") / "model_data" / "models.json"
    return tuple(sorted(json.loads(file.read_text(encoding="utf-8"))))


def complete(*lists: Callable[[], Iterable[str]]) -> Callable:
    """Shell completion by the names of these lists, and by files."""

    def found(ctx: Any, param: Any, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        names = (name for names in lists for name in names() if name.startswith(incomplete))
        return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]

    return found


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, all in SI units.")
model_argument = click.argument("model", shell_complete=complete(model_names))
models_argument = click.argument(
    "words", metavar="MODEL...", nargs=-1, required=True,
    shell_complete=complete(model_names, device_names),
)  # fmt: skip
device_option = click.option(
    "--device", required=True, shell_complete=complete(device_names),
    help="Exact name (see `hymell devices`) or a JSON file.",
)  # fmt: skip
devices_option = click.option(
    "--device", multiple=True, metavar="D...", shell_complete=complete(device_names),
    help="Exact name (see `hymell devices`) or a JSON file; several may follow.",
)  # fmt: skip
runtime_option = click.option(
    "--runtime", help="Serving engine and version; by default the newest measured."
)
dtype_option = click.option(
    "--dtype", type=click.Choice(DTYPES), help="By default the model's own."
)
tensor_parallel_option = click.option(
    "--tensor-parallel", default=1.0, show_default=True, help="GPUs that share a layer."
)


def together(*options: Callable) -> Callable:
    """One decorator of several options, shown in this order."""

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


batch_options = together(
    click.option("--batch", default=1.0, show_default=True, help="Sequences that run together."),
    click.option("--prompt", default=1024.0, show_default=True, help="Prompt tokens a sequence."),
    click.option("--output", default=128.0, show_default=True, help="Tokens each one generates."),
)
placement_options = together(
    device_option,
    runtime_option,
    dtype_option,
    click.option("--workload", multiple=True, metavar="NAME=VALUE",
                 help="batch=8,prompt=1024,output=128,tensor_parallel=1,kv_dtype=bf16"),
    json_option,
)  # fmt: skip


def numbers(options: Iterable[str], what: str) -> dict[str, float]:
    """{name: number} from texts `name=number`, several also separated by commas."""
    found: dict[str, float] = {}
    for text in (part for option in options for part in option.split(",")):
        name, sign, value = text.partition("=")
        if sign and name.strip() in found:
            raise ValueError(f"{what} gives {name.strip()[:80]!r} twice.")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            sign = ""
        if not sign:
            raise ValueError(f"{what} takes name=number; got {text[:80]!r}.")
    return found


def number_ranges(options: Iterable[str]) -> dict[str, tuple[float, float]]:
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
            raise ValueError(f"--range takes name=least:greatest; got {text[:80]!r}.")
    return found


def subjects(words: Iterable[str], given: Iterable[str]) -> tuple[list[str], list[str]]:
    """(models, devices) of plain words and of the values of --device, each name once.

    A plain word is a device where it is the name of a shipped one, else a model; so
    `MODEL... --device D...` may be written as it reads.

    Raises:
        ValueError: no model or no device.
    """
    known = set(device_names())
    plain = [word.strip() for word in words]
    models = [word for word in plain if word.lower() not in known]
    devices = [part.strip() for value in given for part in value.split(",") if part.strip()]
    devices += [word for word in plain if word.lower() in known]
    for what, found in (("model", models), ("device", devices)):
        if not found:
            raise ValueError(f"Give at least one {what}; `hymell {what}s` lists the known ones.")
    return list(dict.fromkeys(models)), list(dict.fromkeys(devices))


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
        (number,) = numbers([f"{name}{sign}{value}"], "--workload").values()
        found[name] = number
    allowed = {
        "batch_size", "prompt_tokens", "output_tokens", "context_tokens", "dtype", "kv_dtype",
        "tensor_parallel", "expert_parallel",
    }  # fmt: skip
    unknown = sorted(set(found) - allowed)
    if unknown:
        raise ValueError(
            f"--workload has no {unknown[0][:80]!r}; it takes {', '.join(sorted(allowed))}."
        )
    return found
