"""Data-sheet facts of accelerators: the shipped ones by exact name, others from a JSON file.

Every number is SI and carries its source. Rates are dense, without sparsity. `memory_bytes` is what
the driver lists (nvidia-smi, MiB x 2^20), `l2_bytes` is MiB x 2^20. `boost_clock_hz` is the clock
at which the data sheet's matrix rate holds, so that peak = SMs x FLOPs per clock and SM x clock;
where the GPU can clock higher, the extra `max_clock_hz` says so.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import math
import numbers
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import types
from .files import parse_json, read_json

UNITS: dict[str, tuple[str, float, float]] = {
    "peak_flops_per_s": ("FLOP/s", 1e9, 1e18),
    "peak_fp8_flops_per_s": ("FLOP/s", 1e9, 1e18),
    "peak_vector_flops_per_s": ("FLOP/s", 1e9, 1e18),
    "memory_bytes_per_s": ("B/s", 1e9, 1e15),
    "memory_bytes": ("B", 1e8, 1e14),
    "l2_bytes": ("B", 1e4, 1e12),
    "n_sm": ("1", 1, 1e5),
    "boost_clock_hz": ("Hz", 1e7, 1e11),
    "power_limit_w": ("W", 1, 1e5),
    "idle_power_w": ("W", 0.1, 1e5),
    "link_bytes_per_s": ("B/s", 1e6, 1e15),
}
"""Device field: (unit, least, greatest plausible value)."""

_KEYS = ("name", "title", "architecture", "vendor", "release_year", "fields", "extras", "notes")
_ALIKE = ("peak_flops_per_s", "memory_bytes_per_s", "n_sm", "power_limit_w")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """A device and where its numbers come from.

    Plain Python; `device` is the pytree to compute with. `sources` maps every field and extra to
    its source. `extras` holds what no equation uses: the chip (which boards spend like joules),
    vendor, release_year, memory_type, max_clock_hz and the like.
    """

    name: str
    architecture: str  # "hopper", "ampere", ..., "unknown"
    title: str
    device: types.Device
    sources: dict[str, str]
    extras: dict[str, Any]


def device_names() -> list[str]:
    """The exact names of the shipped devices, sorted."""
    return sorted(_shipped_files())


def get_device(source: str | os.PathLike[str] | Mapping[str, Any] | DeviceSpec) -> DeviceSpec:
    """A device by exact name, from a JSON file, or from the content of one.

    A file describes a device in either form::

        {"name": "mine", "peak_flops_per_s": 1e15, ..., "link_bytes_per_s": 4.5e11}
        {"name": "mine", "fields": {"peak_flops_per_s": {"value": 1e15, "unit": "FLOP/s",
                                                         "source": "data sheet"}, ...}}

    with every field of `types.Device` in SI units, and optionally title, architecture, vendor,
    release_year, extras and notes.

    Raises:
        ValueError: an unknown or ambiguous name, an unreadable file, or a description with a
            missing, unknown, badly typed or implausible value, or of another device under the name
            of a shipped one.
    """
    if isinstance(source, DeviceSpec):
        return source
    if isinstance(source, Mapping):
        return _own(source, "device description")
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            "A device is given by name, by the path of a JSON file, or as a dict; got "
            f"{type(source).__name__}."
        )
    text = os.fsdecode(source)
    name = text.strip().lower()
    if isinstance(source, str) and name in _shipped_files():
        return _shipped(name)
    if _is_path(source, text):
        return _own(read_json(text, "device file"), f"device file {text!r}")
    near = types.near_names(name, device_names())
    if near:
        raise ValueError(
            f"Unknown device {types.shown(text)}; did you mean {', '.join(near)}? "
            "The path of a JSON file that describes a device works too."
        )
    raise ValueError(
        f"Unknown device {types.shown(text)}; there are {', '.join(device_names())}, and the path "
        "of a JSON file that describes a device works too."
    )


def nearest_measured(
    spec: str | os.PathLike[str] | Mapping[str, Any] | DeviceSpec,
    candidates: Iterable[str | DeviceSpec],
) -> str:
    """The candidate device most like `spec`: of its architecture if any is, else of all.

    Among those the least distance wins: the root mean square of the log ratios of peak rate,
    memory bandwidth, number of SMs and power limit. Equal distances go to the first name.

    Args:
        spec: a `DeviceSpec`, or anything that `get_device` takes.
        candidates: exact device names, or specs.

    Raises:
        ValueError: no candidate, or one that is not a shipped device.
    """
    spec = get_device(spec)
    others = _specs(candidates)
    kin = [item for item in others if item[1].architecture == spec.architecture]
    return min(kin or others, key=lambda item: _distance(spec.device, item[1].device))[0]


def nearest_linked(
    spec: str | os.PathLike[str] | Mapping[str, Any] | DeviceSpec,
    candidates: Iterable[str | DeviceSpec],
) -> str:
    """The candidate whose link between GPUs is most like that of `spec`: NVLink or PCIe.

    The least log ratio of link bandwidths wins; among equal ones, the one most alike otherwise.

    Args:
        spec: a `DeviceSpec`, or anything that `get_device` takes.
        candidates: exact device names, or specs.

    Raises:
        ValueError: no candidate, or one that is not a shipped device.
    """
    spec = get_device(spec)
    link = math.log(float(spec.device.link_bytes_per_s))
    gaps = [
        (abs(math.log(float(other.device.link_bytes_per_s)) - link), other)
        for _, other in _specs(candidates)
    ]
    least = min(gap for gap, _ in gaps)
    return nearest_measured(spec, [other for gap, other in gaps if gap <= least + 1e-6])


def same_chip(one: DeviceSpec, other: DeviceSpec) -> bool:
    """Whether two boards carry one chip (`extras["chip"]`), so that an operation costs alike."""
    chip = one.extras.get("chip")
    return chip is not None and chip == other.extras.get("chip")


def _specs(names: Iterable[str | DeviceSpec]) -> list[tuple[str, DeviceSpec]]:
    found = sorted({spec.name: spec for spec in map(get_device, names)}.items())
    if not found:
        raise ValueError("Give at least one candidate device.")
    return found


def _distance(a: types.Device, b: types.Device) -> float:
    ratios = [math.log(float(getattr(a, f)) / float(getattr(b, f))) for f in _ALIKE]
    return math.sqrt(sum(r * r for r in ratios) / len(ratios))


@functools.cache
def _shipped_files() -> dict[str, Any]:
    folder = importlib.resources.files(__package__).joinpath("device_data")
    return {f.name.removesuffix(".json"): f for f in folder.iterdir() if f.name.endswith(".json")}


@functools.cache
def _shipped(name: str) -> DeviceSpec:
    what = f"shipped device file {name!r}"
    return _spec(parse_json(_shipped_files()[name].read_text(encoding="utf-8"), what), what)


def _own(content: Any, what: str) -> DeviceSpec:
    """A user's description; under a shipped name it must hold the shipped facts."""
    spec = _spec(content, what)
    if spec.name in _shipped_files():
        shipped = _shipped(spec.name).device
        other = [f for f in UNITS if getattr(spec.device, f) != getattr(shipped, f)]
        if other:
            raise ValueError(
                f"The {what} gives {', '.join(other)} of {spec.name} otherwise than the device "
                "known by that name, whose measurements it would take; give it a name of its own."
            )
    return spec


def _is_path(source: Any, text: str) -> bool:
    if not isinstance(source, str) or text.lower().endswith(".json"):
        return True
    if os.sep in text or (os.altsep and os.altsep in text):
        return True
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _spec(content: Any, what: str) -> DeviceSpec:
    """The checked description; `what` opens the messages."""
    if not isinstance(content, Mapping):
        raise ValueError(f"The {what} must be an object; got {type(content).__name__}.")
    name = _text(content, "name", what)
    rich = "fields" in content
    unknown = [key for key in content if key not in _KEYS and (rich or key not in UNITS)]
    if unknown:
        near = types.near_names(str(unknown[0]), [*_KEYS, *UNITS])
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        place = " Device fields go inside 'fields'." if rich and unknown[0] in UNITS else hint
        raise ValueError(f"The {what} has the unknown key {types.shown(unknown[0])}.{place}")
    given = content["fields"] if rich else {k: v for k, v in content.items() if k in UNITS}
    if not isinstance(given, Mapping):
        raise ValueError(f"The {what} must hold an object under 'fields'.")
    values, sources = {}, {}
    for field, entry in given.items():
        values[field], sources[field] = _value(str(field), entry, what)
    try:
        device = types.device(**{str(field): value for field, value in values.items()})
    except ValueError as error:
        raise ValueError(f"The {what} cannot be used: {error}") from None
    extras = {key: content[key] for key in ("vendor", "release_year", "notes") if key in content}
    for key, entry in _object(content, "extras", what).items():
        if isinstance(entry, Mapping):
            extras[key] = entry.get("value")
            sources[key] = str(entry.get("source", "not given"))
        else:
            extras[key] = entry
    return DeviceSpec(
        name=name,
        architecture=_text(content, "architecture", what, "unknown").lower(),
        title=_text(content, "title", what, name),
        device=device,
        sources=sources,
        extras=extras,
    )


def _value(field: str, entry: Any, what: str) -> tuple[float, str]:
    """(value, source) of one field in either form."""
    unit, least, greatest = UNITS.get(field, ("", -math.inf, math.inf))
    source = "given by the user"
    if isinstance(entry, Mapping):
        if "value" not in entry:
            raise ValueError(f"The {what} gives no value for {field}.")
        given = entry.get("unit", unit)
        if unit and given != unit:
            raise ValueError(f"The {what} must give {field} in {unit!r}; got {types.shown(given)}.")
        source = str(entry.get("source", source))
        entry = entry["value"]
    if isinstance(entry, bool) or not isinstance(entry, numbers.Real):
        raise ValueError(f"The {what} must give a number for {field}; got {type(entry).__name__}.")
    try:
        value = float(entry)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value) or not least <= value <= greatest:
        raise ValueError(
            f"The {what} must give {field} in {unit} between {least:g} and {greatest:g}; "
            f"got {value:g}."
        )
    return value, source


def _object(content: Mapping[str, Any], key: str, what: str) -> Mapping[str, Any]:
    value = content.get(key, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"The {what} must hold an object under {key!r}.")
    return value


def _text(content: Mapping[str, Any], key: str, what: str, default: str | None = None) -> str:
    value = content.get(key, default)
    if not isinstance(value, str) or not 0 < len(value.strip()) <= 200:
        raise ValueError(f"The {what} must give {key!r} as a text of 1 to 200 characters.")
    if not value.strip().isprintable():
        raise ValueError(f"The {what} gives {key!r} letters that cannot be shown.")
    return value.strip()
