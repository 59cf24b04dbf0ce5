"""Facts of a device that nobody published: a data sheet from its own measurements.

A machine of unknown name is described by the best rates that its train rows reached: of matrix
products, and of bytes where no cache can hold them. What was neither measured nor reported stays as
the profiler assumed it, and its source says so. A device that the package knows keeps its data
sheet.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from hymell_jax import devices, profile_rows
from hymell_jax.devices import DeviceSpec
from hymell_jax.profile_rows import Profile

BEYOND_CACHE = 2.0  # bytes of a call over those of the last cache, from which it streams
STREAMING = ("operators/gemm", "operators/elementwise", "blocks/attention_decode", "blocks/ffn")
COMPUTING = ("operators/gemm", "blocks/ffn")


def describe(profile: Profile) -> dict[str, Any] | None:
    """A description as `devices.get_device` takes it; None for a device that has a data sheet.

    Raises:
        ValueError: the profile's own description cannot be used.
    """
    spec = devices.get_device(profile.description)
    if spec.name in devices.device_names():
        return None
    flops, moved = _best_rates(profile, float(spec.device.l2_bytes))
    best = f"best rate of the {profile.dtype} train rows of {profile.runtime}"
    measured = dict.fromkeys(
        ("peak_flops_per_s", "peak_fp8_flops_per_s"), (flops, f"{best}, matrix products")
    )
    measured["memory_bytes_per_s"] = (moved, f"{best}, bytes beyond the last cache")
    fields = {}
    for name, (unit, least, greatest) in devices.UNITS.items():
        value, source = float(getattr(spec.device, name)), spec.sources[name]
        if name in measured:
            value, source = measured[name]
        value = float(f"{np.clip(value, least, greatest):.6g}")
        fields[name] = {"value": value, "unit": unit, "source": source}
    extras = {k: v for k, v in spec.extras.items() if k not in ("vendor", "release_year", "notes")}
    given: dict[str, Any] = {
        k: spec.extras[k] for k in ("vendor", "release_year", "notes") if k in spec.extras
    }
    named = {"name": spec.name, "title": spec.title, "architecture": spec.architecture}
    return {**named, **given, "fields": fields, "extras": extras}


def spec_of(profile: Profile) -> DeviceSpec:
    """The device of a profile: its data sheet where it has one, else what was measured."""
    described = describe(profile)
    return devices.get_device(profile.name if described is None else described)


def _train(profile: Profile, table: str) -> pd.DataFrame:
    frame = profile.rows(table)
    return frame if frame.empty else frame[frame["split"] == "train"].reset_index(drop=True)


def _best_rates(profile: Profile, cache_bytes: float) -> tuple[float, float]:
    """(FLOP/s, B/s) that train rows reached."""
    flops_per_s, bytes_per_s, cached = [1.0], [], [1.0]
    for table in STREAMING:
        frame = _train(profile, table)
        if frame.empty:
            continue
        flops, moved = profile_rows.work(table, frame, profile.element_bytes)
        rates = moved / frame["time_s"].to_numpy()
        bytes_per_s += list(rates[moved >= BEYOND_CACHE * cache_bytes])
        cached += list(rates)
        if table in COMPUTING:
            flops_per_s += list(flops / frame["time_s"].to_numpy())
    return max(flops_per_s), max(bytes_per_s or cached)
