"""Seconds of one call: warm-up, samples, median and spread; on the host and on a GPU."""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

Call = Callable[[int], Any]
"""Runs the work on the i-th set of inputs, counted round."""

SAMPLE_S = 1e-3  # a sample lasts at least this long, so that a clock tick is nothing
WARM_UP_S = 0.02
LONG_S = 0.2  # a call this long needs no second warm-up
MOST_SAMPLES = 400
GRAPH_CALLS = 16  # calls in one captured graph, more where there are more sets of inputs


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median seconds of a call and how they were found."""

    time_s: float
    time_spread: float  # interquartile range / median
    repeats: int  # samples
    inner: int  # calls a sample
    launch_s: float | None
    launch_included: bool
    clock_gap_s: float  # between the clock of the samples and the clock of the wall


class Clock(Protocol):
    """What measures the seconds of a call."""

    def time(self, call: Call, seconds: float, least: int = 7, whole: bool = False) -> Timing:
        """Sample for about `seconds`, at least `least` times.

        Args:
            call: the work.
            seconds: to spend on samples.
            least: samples at least.
            whole: a whole model, whose launches belong to its time.

        Raises:
            RuntimeError: the clock does not advance.
        """
        ...


def summarise(samples: list[float], inner: int, **more: Any) -> Timing:
    """Median and relative interquartile range of samples in seconds a call."""
    middle = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else (middle,) * 3
    return Timing(
        time_s=middle, time_spread=(high - low) / middle, repeats=len(samples), inner=inner, **more
    )


class HostClock:
    """perf_counter around synchronous calls, as on a CPU. Launching is inside the time."""

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ):
        self._now, self._wall = now, wall

    def time(self, call: Call, seconds: float, least: int = 7, whole: bool = False) -> Timing:
        """As `Clock.time`."""
        once, place = self._warm_up(call, min(WARM_UP_S, seconds))
        inner = max(1, math.ceil(SAMPLE_S / once))
        samples: list[float] = []
        wall, began = self._wall(), self._now()
        gc.collect(0)
        collecting = gc.isenabled()
        gc.disable()
        try:
            for _ in range(2 * MOST_SAMPLES):
                first = self._now()
                for index in range(place, place + inner):
                    call(index)
                taken = self._now() - first
                place += inner
                if taken > 0:
                    samples.append(taken / inner)
                enough = len(samples) >= least and self._now() - began >= seconds
                if enough or len(samples) >= MOST_SAMPLES:
                    break
        finally:
            if collecting:
                gc.enable()
        if len(samples) < least:
            raise RuntimeError("the clock stood still or ran backwards")
        gap = (self._wall() - wall) - (self._now() - began)
        return summarise(samples, inner, launch_s=None, launch_included=True, clock_gap_s=gap)

    def _warm_up(self, call: Call, seconds: float) -> tuple[float, int]:
        """(seconds of one warm call, calls made)."""
        began = self._now()
        call(0)
        cold = self._now() - began
        if cold > LONG_S:
            return cold, 1
        began, calls = self._now(), 0
        while calls < 1 or (self._now() - began < seconds and calls < 10_000):
            calls += 1
            call(calls)
        warm = (self._now() - began) / calls
        if warm <= 0:
            raise RuntimeError("the clock did not advance while the case was warmed up")
        return warm, calls + 1


class CudaClock:
    """CUDA events around replays of a captured graph; launching is measured apart.

    A whole model, and work that cannot be captured, runs eagerly between events, launches included.
    Written against the interface of `torch.cuda`; it has never run on a GPU.
    """

    def __init__(self, torch: Any, device: Any):
        self._torch, self._device = torch, device

    def time(self, call: Call, seconds: float, least: int = 7, whole: bool = False) -> Timing:
        """As `Clock.time`."""
        cuda = self._torch.cuda
        for index in range(3):
            call(index)
        cuda.synchronize(self._device)
        launch_s = self._launch(call)
        calls = max(GRAPH_CALLS, getattr(call, "count", 1))
        graph = None if whole else self._capture(call, calls)
        inner = 1 if graph is None else calls
        run = graph.replay if graph is not None else lambda: call(0)
        wall, began = time.time(), time.perf_counter()
        samples: list[float] = []
        while len(samples) < MOST_SAMPLES:
            first, last = (cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            run()
            last.record()
            last.synchronize()
            taken = first.elapsed_time(last) * 1e-3
            if taken > 0:
                samples.append(taken / inner)
            if len(samples) >= least and time.perf_counter() - began >= seconds:
                break
        gap = (time.time() - wall) - (time.perf_counter() - began)
        return summarise(
            samples, inner, launch_s=launch_s, launch_included=graph is None, clock_gap_s=gap
        )

    def _launch(self, call: Call, calls: int = 20) -> float:
        """Host seconds to issue one call, the queue empty at the start."""
        began = time.perf_counter()
        for index in range(calls):
            call(index)
        issued = (time.perf_counter() - began) / calls
        self._torch.cuda.synchronize(self._device)
        return issued

    def _capture(self, call: Call, calls: int) -> Any:
        """A graph of calls on successive inputs, None where capture fails."""
        cuda = self._torch.cuda
        graph = cuda.CUDAGraph()
        try:
            with cuda.graph(graph):
                for index in range(calls):
                    call(index)
        except RuntimeError:
            cuda.synchronize(self._device)
            return None
        graph.replay()
        cuda.synchronize(self._device)
        return graph
