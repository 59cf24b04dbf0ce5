"""The machine: what it is, which processors are ours, and what else runs on them."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def processors() -> list[int]:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextlib.contextmanager
def pinned(own: list[int]) -> Iterator[str]:
    """Hold this process, and the threads it starts, on `own`; yields how, for the manifest.

    OpenMP reads its variables when PyTorch is first imported; they are left alone where the user
    has set them. It then binds the calling thread to one processor, which gets all of them back in
    the end, as the environment does.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield "not pinned: this system cannot"
        return
    wanted = {"OMP_PROC_BIND": "close", "OMP_PLACES": "threads"}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, own)
    try:
        yield (
            f"affinity {own}, OMP_PROC_BIND={os.environ['OMP_PROC_BIND']}, "
            f"OMP_PLACES={os.environ['OMP_PLACES']}"
        )
    finally:
        os.sched_setaffinity(0, before)
        for name in added:
            os.environ.pop(name, None)


class Load:
    """Processor time that others took between `start` and `stop`, from /proc/stat."""

    def __init__(self, own: list[int], stat: str = "/proc/stat"):
        self._own, self._stat = {f"cpu{index}" for index in own}, stat
        self._tick = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
        self._begin: tuple[float, float, float] | None = None

    def _now(self) -> tuple[float, float, float] | None:
        """(seconds busy on our processors, seconds of this process, time)."""
        try:
            lines = Path(self._stat).read_text().splitlines()
        except OSError:
            return None
        busy = 0
        for line in lines:
            name, *fields = line.split()
            if name in self._own:
                user, nice, system, _, _, irq, soft, steal = map(int, fields[:8])
                busy += user + nice + system + irq + soft + steal
        used = os.times()
        return busy / self._tick, used.user + used.system, time.monotonic()

    def start(self) -> None:
        """Begin to watch."""
        self._begin = self._now()

    def stop(self) -> float | None:
        """Share of our processors that others took, None where it cannot be seen.

        The counter has a grain of about 10 ms a processor, which is subtracted: a short case is
        given the benefit of the doubt.
        """
        end = self._now()
        if self._begin is None or end is None:
            return None
        busy, used, wall = (b - a for a, b in zip(self._begin, end, strict=True))
        grain = len(self._own) / self._tick
        capacity = max(wall, 1e-9) * max(len(self._own), 1)
        return max(0.0, busy - used - grain) / capacity


def available_bytes() -> float:
    """Memory that can be had without swapping; infinite where the system does not say."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.M)
    return float(found.group(1)) * 1024 if found else float("inf")


def total_bytes() -> float:
    """Main memory; 0 where the system does not say."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", _read("/proc/meminfo"), re.M)
    return float(found.group(1)) * 1024 if found else 0.0


def last_cache_bytes(root: str = "/sys/devices/system/cpu") -> float:
    """The largest cache of the first processor; 32 MiB where the system does not say."""
    sizes = []
    for path in Path(root).glob("cpu0/cache/index*/size"):
        found = re.match(r"(\d+)([KMG]?)", _read(str(path)).strip())
        if found:
            sizes.append(int(found.group(1)) * 1024 ** " KMG".index(found.group(2) or " "))
    return float(max(sizes, default=32 * 2**20))


def cpu_model() -> str:
    """As the system names it."""
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.M)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def clock_hz() -> float:
    """The highest clock that the system states, 0 where it states none."""
    limit = _read("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    if limit.isdigit():
        return float(limit) * 1e3
    rates = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", _read("/proc/cpuinfo"), re.M)
    return max(map(float, rates), default=0.0) * 1e6


def slug(text: str) -> str:
    """Lower case, words joined by hyphens: how devices are named."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def facts(own: list[int]) -> dict[str, Any]:
    """What a manifest says about the machine."""
    return {
        "cpu": cpu_model(),
        "processors_used": own,
        "processors": os.cpu_count(),
        "memory_bytes": total_bytes(),
        "last_cache_bytes": last_cache_bytes(),
        "clock_hz": clock_hz(),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip() or None,
        "hypervisor": "hypervisor" in _read("/proc/cpuinfo"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "clock_resolution_s": time.get_clock_info("perf_counter").resolution,
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
