"""Joules of a call, by whatever counter the machine has; where it has none, none is invented.

The boundary to the hardware is `Meter`. What stands behind it for GPUs (Zeus, NVML) has been tested
against a fake of the libraries only, never on a GPU.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from hymell_jax.profiler.clocks import Call

LEAST_TICKS = 50
MOST_WINDOW_S = 60.0
BATCH_S = 0.02  # calls between two looks at the counter
IDLE_S = 2.0
MOST_DISAGREEMENT = 0.10  # counter against integrated power


class Meter(Protocol):
    """A counter of energy since some past moment, and what else the device tells."""

    source: str  # what a row says
    window_s: float  # that a case is repeated for, unless `LEAST_TICKS` come first

    def energy_j(self) -> float: ...

    def power_w(self) -> float | None: ...

    def state(self) -> dict[str, Any]:
        """Clocks, temperature, power limit, throttle reasons; empty where unknown."""
        ...


@dataclasses.dataclass(frozen=True)
class Energy:
    """Joules of one call and how they were metered."""

    energy_j: float
    power_w: float
    window_s: float
    ticks: int
    integrated_j: float | None  # of one call, from sampled power
    note: str  # "" or what is doubtful


class ZeusMeter:
    """One GPU through Zeus (ml-energy/zeus, Apache-2.0), which covers NVIDIA and AMD."""

    window_s = 5.0

    def __init__(self, gpus: Any, index: int, details: Callable[[], dict[str, Any]] = dict):
        self._gpus, self._index, self._details = gpus, index, details
        self.source = "zeus: the GPU's total energy counter"

    def energy_j(self) -> float:
        """Millijoules of the driver's counter, in joules."""
        return self._gpus.get_total_energy_consumption(self._index) * 1e-3

    def power_w(self) -> float | None:
        """Instant power."""
        return self._gpus.get_instant_power_usage(self._index) * 1e-3

    def state(self) -> dict[str, Any]:
        """Temperature and power limit, and what `details` adds."""
        return self._details() | {
            "temperature_c": self._gpus.get_gpu_temperature(self._index),
            "power_limit_w": self._gpus.get_power_management_limit(self._index) * 1e-3,
        }


class NvmlMeter:
    """One NVIDIA GPU through NVML's total energy counter."""

    window_s = 5.0

    def __init__(self, nvml: Any, index: int, uuid: str | None = None):
        self._nvml = nvml
        if uuid:  # the driver counts all GPUs, PyTorch the visible ones only
            self._gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        else:
            self._gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        self.source = "nvml: the GPU's total energy counter"

    def energy_j(self) -> float:
        """Millijoules of the driver's counter, in joules."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) * 1e-3

    def power_w(self) -> float | None:
        """Power as the driver averages it."""
        return self._nvml.nvmlDeviceGetPowerUsage(self._gpu) * 1e-3

    def state(self) -> dict[str, Any]:
        """Clocks, temperature, power limit and throttle reasons."""
        nvml, gpu = self._nvml, self._gpu
        return {
            "sm_mhz": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "memory_mhz": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
            "temperature_c": nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) * 1e-3,
            "throttle_reasons": nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
        }


class RaplMeter:
    """The packages of a CPU through the kernel's powercap files; counters wrap round."""

    window_s = 0.25  # the counter moves every millisecond

    def __init__(self, zones: list[Path]):
        self._zones = zones
        self._last = [self._micro(zone) for zone in zones]
        self._range = [int((zone / "max_energy_range_uj").read_text()) for zone in zones]
        self._total = 0
        self.source = "rapl: package energy of the whole CPU"

    @staticmethod
    def _micro(zone: Path) -> int:
        return int((zone / "energy_uj").read_text())

    def energy_j(self) -> float:
        """Joules since this meter was made."""
        for index, zone in enumerate(self._zones):
            now = self._micro(zone)
            self._total += (now - self._last[index]) % (self._range[index] + 1)
            self._last[index] = now
        return self._total * 1e-6

    def power_w(self) -> float | None:
        """RAPL has no power of the moment."""
        return None

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}


NO_METER = "none: no meter"


def find_meter(
    kind: str, index: int = 0, uuid: str | None = None, root: str = "/sys/class/powercap"
) -> Meter | None:
    """The best meter of a device that can be read now, None where there is none.

    Args:
        kind: "cpu" or "cuda".
        index, uuid: of the GPU, as PyTorch counts and names it.
        root: where the kernel shows RAPL.
    """
    finders: tuple[Callable[[], Meter | None], ...] = (lambda: _rapl(root),)
    if kind == "cuda":
        finders = (lambda: _zeus(index, uuid), lambda: _nvml(index, uuid))
    return next((found for find in finders if (found := _readable(find)) is not None), None)


def _readable(find: Callable[[], Meter | None]) -> Meter | None:
    try:
        meter = find()
        if meter is not None:
            meter.energy_j()
        return meter
    except Exception:  # a library of the driver may raise anything: it is no meter then
        return None


def _zeus(index: int, uuid: str | None) -> Meter | None:
    from zeus.device import get_gpus

    gpus = get_gpus()
    if not gpus.supports_get_total_energy_consumption(index):
        return None
    other = _readable(lambda: _nvml(index, uuid))
    return ZeusMeter(gpus, index, other.state if other is not None else dict)


def _nvml(index: int, uuid: str | None) -> Meter | None:
    import pynvml

    pynvml.nvmlInit()
    return NvmlMeter(pynvml, index, uuid)


def _rapl(root: str) -> Meter | None:
    zones = sorted(Path(root).glob("intel-rapl:?"))
    zones = [zone for zone in zones if (zone / "name").read_text().startswith("package")]
    return RaplMeter(zones) if zones else None


def metered(
    meter: Meter,
    call: Call,
    time_s: float,
    synchronise: Callable[[], None],
    now: Callable[[], float] = time.perf_counter,
) -> Energy:
    """Repeat a call for the meter's window or 50 ticks of its counter, from tick to tick.

    Args:
        meter: what counts.
        call: the work.
        time_s: of one call, about.
        synchronise: waits until the device has done what was issued.
        now: a clock in seconds.
    """
    batch = max(1, round(BATCH_S / time_s))
    calls, ticks, joules = 0, 0, 0.0
    synchronise()
    begin = last = _tick(meter, call, batch, synchronise, now)
    began = previous = now()
    while (elapsed := now() - began) < MOST_WINDOW_S:
        if ticks and (elapsed >= meter.window_s or ticks >= LEAST_TICKS):
            break
        for index in range(batch):
            call(calls + index)
        calls += batch
        synchronise()
        read, power, moment = meter.energy_j(), meter.power_w(), now()
        if power is not None:
            joules += power * (moment - previous)
        previous = moment
        if read > last:
            last, ticks, end, counted = read, ticks + 1, moment, calls
    if not ticks:
        raise RuntimeError("the energy counter did not move while the case was metered")
    used, window = last - begin, end - began
    integrated = joules / calls if meter.power_w() is not None else None
    each = used / counted
    off = abs(integrated / each - 1) if integrated and each > 0 else 0.0
    note = f"counter and integrated power differ by {off:.0%}" if off > MOST_DISAGREEMENT else ""
    return Energy(
        energy_j=each, power_w=used / window, window_s=window, ticks=ticks,
        integrated_j=integrated, note=note,
    )  # fmt: skip


def _tick(
    meter: Meter, call: Call, batch: int, synchronise: Callable[[], None], now: Callable[[], float]
) -> float:
    """Work until the counter moves; its reading, so that a window begins on a tick."""
    first, began = meter.energy_j(), now()
    while now() - began < 1.0:
        for index in range(batch):
            call(index)
        synchronise()
        read = meter.energy_j()
        if read > first:
            return read
    return first


def idle_power_w(
    meter: Meter, seconds: float = IDLE_S, sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.perf_counter,
) -> float:  # fmt: skip
    """Mean power of a device that does nothing."""
    begin, began = meter.energy_j(), now()
    sleep(seconds)
    return (meter.energy_j() - begin) / max(now() - began, 1e-9)
