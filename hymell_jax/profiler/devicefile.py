"""The device of a profile: its name, and a description where none is shipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hymell_jax.profiler import machine
from hymell_jax.profiler.bench import Bench

SHIPPED = {  # what the driver calls a GPU: its name among the shipped devices
    "NVIDIA H200": "h200-sxm-141gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA B200": "b200-sxm-180gb",
    "NVIDIA L40S": "l40s-48gb",
}
UNKNOWN = "not known: a placeholder, and energy of this device is not modelled from it"
FASTEST_PRODUCT = "fastest matrix product of this profile"
FASTEST_COPY = "fastest operator of this profile that moves more than the last cache holds"


def device_name(bench: Bench) -> str:
    """A shipped name where the hardware has one, else made from what the hardware calls itself."""
    if bench.kind == "cuda":
        shown = bench.torch.cuda.get_device_name(bench.device)
        return SHIPPED.get(shown, machine.slug(shown))
    return machine.slug(f"{machine.cpu_model()}-{len(bench.own)}t")


def device_description(
    bench: Bench, name: str, records: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """A description as `devices.get_device` reads it; None for a shipped device or without rows.

    Rates are the highest that the profile reached, since a data sheet of a CPU states none that
    a library reaches. Power is a placeholder where nothing metered it, or no driver states a limit.
    """
    flops, moved = _rates(bench, records)
    if name in SHIPPED.values() or not flops or not moved:
        return None
    memory = bench.memory_bytes()
    clock, cores = machine.clock_hz(), len(bench.own)
    if bench.kind == "cuda":
        properties = bench.torch.cuda.get_device_properties(bench.device)
        clock, cores = 0.0, properties.multi_processor_count
    system = "stated by the system"
    limit_w, idle_w, limit_from, idle_from = _power(records)
    fields = {
        "peak_flops_per_s": (flops, "FLOP/s", FASTEST_PRODUCT),
        "peak_fp8_flops_per_s": (flops, "FLOP/s", "the rate of the profiled format"),
        "peak_vector_flops_per_s": (flops, "FLOP/s", "the rate of the profiled format"),
        "memory_bytes_per_s": (moved, "B/s", FASTEST_COPY),
        "memory_bytes": (memory, "B", system),
        "l2_bytes": (bench.cache_bytes(), "B", f"last cache, {system}"),
        "n_sm": (float(cores), "1", "processors used"),
        "boost_clock_hz": (clock, "Hz", system) if clock else (1e9, "Hz", UNKNOWN),
        "power_limit_w": (limit_w, "W", limit_from),
        "idle_power_w": (idle_w, "W", idle_from),
        "link_bytes_per_s": (moved, "B/s", "one device: its memory"),
    }
    return {
        "name": name,
        "title": machine.cpu_model() if bench.kind == "cpu" else name,
        "architecture": bench.kind,
        "fields": {
            key: {"value": value, "unit": unit, "source": source}
            for key, (value, unit, source) in fields.items()
        },
    }


def _power(records: Sequence[dict[str, Any]]) -> tuple[float, float, str, str]:
    """(limit, idle power, and the source of each), watts; both are placeholders or neither is."""
    limits = [(r.get("meter_state") or {}).get("power_limit_w") for r in records]
    idles = [r.get("idle_power_w") for r in records]
    limit_w = next((x for x in reversed(limits) if x), None)
    idle_w = min((x for x in idles if x), default=None)
    if limit_w is None or idle_w is None or not 0 < idle_w < limit_w:
        return 100.0, 10.0, UNKNOWN, UNKNOWN
    return limit_w, idle_w, "stated by the driver", "metered while nothing ran"


def _rates(bench: Bench, records: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """(FLOP/s, bytes/s) of the fastest anchors and operators."""
    anchors = [r for r in records if r["kind"] == "anchor"]
    flops = [a["compute_flops"] / a["compute_s"] for a in anchors]
    moved = [a["memory_bytes"] / a["memory_s"] for a in anchors]
    for row in (r for r in records if r["kind"] == "row"):
        if row["table"] == "operators/gemm":
            flops.append(2.0 * row["m"] * row["n"] * row["k"] / row["time_s"])
        elif row["table"] == "operators/elementwise":
            arrays = row["tensors_read"] + row["tensors_written"]
            size = arrays * row["num_tokens"] * row["width"] * bench.value_bytes
            if size > bench.past_bytes:
                moved.append(size / row["time_s"])
    return max(flops, default=0.0), max(moved, default=0.0)
