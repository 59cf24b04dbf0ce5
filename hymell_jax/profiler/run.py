"""`hymell profile`: measure this machine into a folder of tables."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hymell_jax import files
from hymell_jax.profiler import blocks, machine, meters, operators, plans, steadiness, store
from hymell_jax.profiler.bench import Bench
from hymell_jax.profiler.cases import Case
from hymell_jax.profiler.devicefile import device_description, device_name
from hymell_jax.profiler.models import Models, config_json
from hymell_jax.profiler.session import Outcome, Report, Session, utc_now
from hymell_jax.version import __version__

SPARE_MEMORY = 0.9  # of what is free may be used
MOST_NOTES = 5  # the manifest has them all
ANCHOR_GEMM = (512, 1024, 1024)
ANCHOR_COPY_BYTES = 96e6
_MINIMAL = {
    "m": 1, "n": 8, "k": 8, "num_tokens": 1, "d_model": 8, "rows": 1, "cols": 8, "width": 128,
    "batch": 1, "seq_len": 2, "context_len": 2, "head_dim": 8, "d_ff": 8, "d_expert": 8,
}  # fmt: skip
"""Sizes at which a call is all launch."""
_NO_LAUNCH = ("blocks/mla", "blocks/linear_attention", "systems/transformers")


def profile(
    out: str | os.PathLike[str],
    device: str = "cpu",
    plan: str = "quick",
    levels: Sequence[int] = (1, 2, 3),
    hours: float | None = None,
    name: str | None = None,
    report: Report | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure, resume or complete a profile.

    Args:
        out: the folder; an earlier profile of the same device in it is gone on with.
        device: "cpu", "cuda" or "cuda:<index>".
        plan: one of `plans.PLANS`.
        levels: 1 operators, 2 blocks, 3 whole models.
        hours: instead of the plan's own time; what is left is measured by the next run.
        name: of the device in the tables; by default from the hardware.
        report: called with (what, cases done, cases in all).
        note: called with sentences for the user.

    Returns:
        The manifest, as written.

    Raises:
        ValueError: PyTorch, transformers, pyarrow or the device is missing, the folder cannot be
            used, or a value is out of range.
    """
    if hours is not None and not 0 < hours < 1e4:
        raise ValueError(f"Hours must be a positive number; got {hours:g}.")
    chosen = plans.make_plan(plan, "cuda" if device.startswith("cuda") else "cpu", levels)
    folder = files.writable_folder(out)
    store.check_arrow()
    own = machine.processors()
    with machine.pinned(own) as pinning:
        bench = Bench(device, own)
        profiler = Profiler(bench, chosen, name or device_name(bench))
        identity = profiler.identity | {"torch": bench.torch.__version__, "threads": len(own)}
        journal = store.Journal(folder, identity)
        try:
            return _run(profiler, journal, folder, hours, report, note, pinning)
        finally:
            journal.close()


def _run(
    profiler: Profiler, journal: store.Journal, folder: Path, hours: float | None,
    report: Report | None, note: Callable[[str], None], pinning: str,
) -> dict[str, Any]:  # fmt: skip
    bench, plan = profiler.bench, profiler.plan
    software = profiler.software()
    opening = {"kind": "session", **journal.identity, "software": software, "pinning": pinning}
    opening |= {"plan": plan.name, "cases": len(plan.cases), "started_at": utc_now()}
    opening |= {"machine": machine.facts(bench.own), "meter": profiler.energy_source}
    journal.append(opening | {"idle_power_w": profiler.idle_power_w()})
    if profiler.meter is None:
        note("No energy meter can be read here: energy stays empty, times only.")
    session = Session(journal, plan, profiler.measure, profiler.anchor)
    outcome: Outcome | None = None
    try:
        with bench.torch.inference_mode():
            outcome = session.run(hours, report)
    finally:
        closing = {"kind": "end", "ended_at": utc_now(), "idle_power_w": profiler.idle_power_w()}
        journal.append(closing)
        manifest = finish(folder, journal.records, profiler)
    titles = {case.key: case.title() for case in plan.cases}
    for key, reason in list(outcome.given_up.items())[:MOST_NOTES]:
        note(f"Not measured: {titles[key]}: {reason}")
    return manifest | {"outcome": dataclasses.asdict(outcome)}


def finish(folder: Path, records: Sequence[store.Record], profiler: Profiler) -> dict[str, Any]:
    """Write tables, configurations, device and manifest from a journal; returns the manifest."""
    counts = store.write_tables(folder, records)
    best = store.best_rows(records)
    names = sorted({row["model"] for row in best if row["table"] == "systems/transformers"})
    for name in names:
        files.writable_folder(folder / "models")
        files.write_whole(folder / "models" / f"{name}.json", config_json(profiler.bench, name))
    description = device_description(profiler.bench, profiler.identity["device"], records)
    if description is not None:
        files.write_whole(folder / "device.json", json.dumps(description, indent=1) + "\n")
    sessions = [r for r in records if r["kind"] == "session"]
    anchors = [r for r in records if r["kind"] == "anchor"]
    loads = [row["other_load"] for row in best if row.get("other_load") is not None]
    manifest = {
        **profiler.identity,
        "threads": sessions[-1]["threads"],
        "energy_source": sessions[-1]["meter"],
        "machine": sessions[-1]["machine"],
        "software": sessions[-1]["software"],
        "pinning": sessions[-1]["pinning"],
        "sessions": [
            {k: s[k] for k in ("plan", "cases", "started_at", "idle_power_w")} for s in sessions
        ],
        "rows": counts,
        "disturbed": sum(row["disturbed"] for row in best),
        "disturbed_by": steadiness.counts(best),
        "other_load": statistics.median(loads) if loads else None,
        "anchors": {
            name: {"median_s": statistics.median(values), "spread": _spread(values),
                   "count": len(values)}
            for name in ("compute_s", "memory_s")
            if (values := [a[name] for a in anchors])
        },
        "not_measured": store.progress(records).given_up,
    }  # fmt: skip
    files.write_whole(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    return manifest


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


class Profiler:
    """Measures single cases on a bench."""

    def __init__(self, bench: Bench, plan: plans.Plan, name: str):
        self.bench, self.plan = bench, plan
        self.models = Models(bench)
        self.meter = meters.find_meter(bench.kind, bench.device.index or 0, bench.uuid())
        self.energy_source = self.meter.source if self.meter else meters.NO_METER
        self.identity = {
            "device": name,
            "runtime": f"transformers-{bench.transformers.__version__}",
            "dtype": bench.dtype_name,
        }
        self._load = machine.Load(bench.own)
        self._launches: dict[str, float | None] = {}
        self._anchors: list[Any] = []

    def software(self) -> dict[str, Any]:
        """Versions and how PyTorch was set."""
        torch = self.bench.torch
        found = {
            "hymell": __version__,
            "torch": torch.__version__,
            "transformers": self.bench.transformers.__version__,
            "threads": torch.get_num_threads(),
            "experts": blocks.experts_implementation(self.bench),
        }
        if self.bench.kind == "cuda":
            found |= {"cuda": torch.version.cuda, "gpu": torch.cuda.get_device_name()}
        return found

    def idle_power_w(self) -> float | None:
        """Of the metered device, None without a meter."""
        return meters.idle_power_w(self.meter) if self.meter else None

    def measure(self, case: Case) -> store.Record:
        """The columns of a case's row.

        Raises:
            MemoryError: it would not fit into the memory that is free.
            Exception: whatever the libraries raise.
        """
        self._check_memory(case)
        whole = case.level == 3
        if not whole:
            self.models.drop()
        launch = None if self.bench.kind == "cuda" else self._launch_s(case)
        try:
            call = self._prepare(case)
            seconds = self.plan.pass_s if whole else self.plan.sample_s
            self._load.start()
            timing = self.bench.clock.time(call, seconds, least=4 if whole else 7, whole=whole)
            other = self._load.stop()
            energy = self._energy(case, call, timing.time_s)
        except BaseException:
            self.bench.release()
            raise
        row = self.identity | dataclasses.asdict(timing) | {"other_load": other} | energy
        if launch is not None:
            row["launch_s"] = min(launch, row["time_s"])
        return row

    def _check_memory(self, case: Case) -> None:
        free = self.bench.available_bytes()
        if case.sizes.get("model") and self.models.holds(case.sizes["model"]):
            return
        if case.bytes_held > SPARE_MEMORY * free:
            raise MemoryError(
                f"it needs about {case.bytes_held / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
            )

    def _prepare(self, case: Case) -> Any:
        if case.level == 3:
            return self.models.prepare(case)
        return (operators if case.level == 1 else blocks).prepare(self.bench, case)

    def _launch_s(self, case: Case) -> float | None:
        """Seconds of the same call on next to no data, once a kernel and session."""
        if case.table in _NO_LAUNCH:
            return None
        sizes = dict(case.sizes) | {k: v for k, v in _MINIMAL.items() if k in case.sizes}
        if "n_heads" in sizes:
            sizes["n_heads"], sizes["n_kv_heads"] = (
                2, 2 if case.sizes["n_heads"] == case.sizes["n_kv_heads"] else 1,
            )  # fmt: skip
        tiny = dataclasses.replace(case, sizes=sizes)
        if tiny.key not in self._launches:
            call = self._prepare(tiny)
            hot = self.bench.clock.time(lambda index: call(0), 0.02)
            self._launches[tiny.key] = hot.time_s
        return self._launches[tiny.key]

    def _energy(self, case: Case, call: Any, time_s: float) -> dict[str, Any]:
        """Energy columns; null where there is no meter or the plan does not ask."""
        if self.meter is None or not (case.metered or self.meter.window_s < 1):
            source = self.energy_source if self.meter is None else "none: not asked by the plan"
            return {"energy_j": None, "power_w": None, "energy_source": source}
        found = meters.metered(self.meter, call, time_s, self.bench.synchronise)
        source = self.energy_source + (f"; {found.note}" if found.note else "")
        return {
            "energy_j": found.energy_j, "power_w": found.power_w, "energy_source": source,
            "energy_window_s": found.window_s, "energy_ticks": found.ticks,
            "energy_integrated_j": found.integrated_j, "meter_state": self.meter.state(),
        }  # fmt: skip

    def anchor(self) -> store.Record:
        """Seconds of a fixed product and a fixed copy."""
        if not self._anchors:
            torch, bench = self.bench.torch, self.bench
            m, n, k = ANCHOR_GEMM
            count = int(ANCHOR_COPY_BYTES / bench.value_bytes)
            make = {"dtype": bench.dtype, "device": bench.device}
            x, w = torch.randn(m, k, **make), torch.randn(n, k, **make)
            source, target = torch.randn(count, **make), torch.empty(count, **make)
            self._anchors = [
                lambda index: torch.nn.functional.linear(x, w),
                lambda index: target.copy_(source),
            ]
        compute, memory = (self.bench.clock.time(c, 0.05).time_s for c in self._anchors)
        return {
            "compute_s": compute, "compute_flops": 2.0 * math.prod(ANCHOR_GEMM),
            "memory_s": memory, "memory_bytes": 2.0 * ANCHOR_COPY_BYTES,
        }  # fmt: skip
