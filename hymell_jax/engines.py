"""Level 3 of a device: which engine's terms it takes, from which machine, and how far to trust it.

Reads the plain dict that `system_recipes.fit_level3` makes and a checkpoint stores. A device that
no engine was measured on takes the terms of the most alike machine of the engine: host seconds as
they are, times relative to the data sheet, energy in joules an operation from a board of the same
chip and in shares of the board's range from any other, and an interval as wide as whole devices
left out needed it to be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from hymell_jax import devices, power, serving
from hymell_jax.mlp import Normalizer
from hymell_jax.types import near_names

DEFAULT_ENGINE = "vllm-0.11.1"


@dataclasses.dataclass(frozen=True)
class EngineTerms:
    """What `serving.serve` and `serving.error_scale` need of one engine on one device."""

    engine: str
    machine: str  # whose terms they are
    transferred: bool  # the device itself was not measured
    coefficients: dict[str, np.float32]
    quantiles: np.ndarray  # [2, 2], ln(time, energy) in (prefill, decode)


def engine_names(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Engines that the fit knows, sorted."""
    return tuple(sorted(content["engines"]))


def terms_for(
    content: Mapping[str, Any],
    device: Any,
    engine: str = DEFAULT_ENGINE,
    quantised: bool = False,
) -> EngineTerms:
    """Terms of an engine on a device.

    Args:
        content: of `system_recipes.fit_level3`.
        device: anything that `devices.get_device` takes.
        engine: one of `engine_names`.
        quantised: whether weights have fewer than 16 bits; intervals differ.

    Raises:
        ValueError: an engine that was never measured, or an unknown device.
    """
    spec = devices.get_device(device)
    if engine not in content["engines"]:
        near = near_names(engine, engine_names(content)) or engine_names(content)
        raise ValueError(f"No engine {engine!r} was measured; there are {', '.join(near)}.")
    entry = content["engines"][engine]
    machines = entry["machines"]
    measured = spec.name in machines
    machine = spec.name if measured else devices.nearest_measured(spec, sorted(machines))
    quantiles = entry["quantiles"][machine] if measured else content["transferred"]
    names = serving.ENGINE_COEFFICIENTS | serving.ENERGY_COEFFICIENTS
    terms = serving.ABSENT | machines[machine]
    if not measured:
        terms = carried_energy(terms, devices.get_device(machine), spec)
    width = quantiles["quantised" if quantised else "16 bits"]
    pair = [width["time"], width["energy"]]
    return EngineTerms(
        engine=engine,
        machine=machine,
        transferred=not measured,
        coefficients={name: np.float32(terms[name]) for name in names},
        quantiles=np.array([pair, pair], np.float32),
    )


def carried_energy(
    terms: Mapping[str, Any], source: devices.DeviceSpec, target: devices.DeviceSpec
) -> dict[str, Any]:
    """Terms of one device for another: boards of one chip move energy as `power.carried`."""
    if not devices.same_chip(source, target):
        return dict(terms)
    return power.carried(terms, source.device, target.device)


def networks_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The networks of time and energy as `serving.serve` takes them, float32 arrays."""
    found = {}
    for target in ("time", "energy"):
        entry = content["network"][target]
        given = entry["normalizer"].items()
        columns: dict[str, Any] = {name: np.asarray(v, np.float32) for name, v in given}
        found[target] = {
            "params": _arrays(entry["params"]),
            "normalizer": Normalizer(**columns),
        }
    return found


def _arrays(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _arrays(value) for name, value in tree.items()}
    return np.asarray(tree, np.float32)
