"""Goes through a plan: what to measure next, until when, and what to write about it.

It knows nothing of PyTorch: `measure` and `anchor` are given, so that tests can give cheap ones.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any

from hymell_jax.profiler.cases import Case
from hymell_jax.profiler.plans import Plan
from hymell_jax.profiler.store import Journal, Record

ANCHOR_EVERY_S = 15.0

Report = Callable[[str, int, int], None]
"""Called with (what, cases done, cases in all)."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a session did and left."""

    measured: int
    failed: int
    left: int  # cases never measured
    disturbed: int  # cases whose only row is disturbed
    given_up: dict[str, str]  # key: reason


class Session:
    """One run of a plan into a journal.

    Args:
        journal: open for writing.
        plan: its cases are measured in their order, level by level, each level within its share of
            the time; what time is left goes to what is left, then to disturbed cases.
        measure: the columns of a row, or an exception that fails the case.
        anchor: seconds of two fixed pieces of work, by the names of `steadiness.ANCHORS`.
        now: a monotonic clock, seconds.
    """

    def __init__(
        self,
        journal: Journal,
        plan: Plan,
        measure: Callable[[Case], Record],
        anchor: Callable[[], Record],
        now: Callable[[], float] = time.monotonic,
    ):
        self._journal, self._plan = journal, plan
        self._measure, self._anchor, self._now = measure, anchor, now
        self._last_anchor = -float("inf")
        self._counts = {"row": 0, "failed": 0}

    def run(self, hours: float | None = None, report: Report | None = None) -> Outcome:
        """Measure until the plan is done or the time is up.

        Args:
            hours: instead of the plan's own time.
            report: progress.

        Raises:
            ValueError: the journal cannot be written any more.
        """
        seconds = 3600 * (self._plan.hours if hours is None else hours)
        began = self._now()
        end = began + seconds
        levels = sorted({case.level for case in self._plan.cases})
        shares = [self._plan.shares[level - 1] for level in levels]
        for index, level in enumerate(levels):
            until = began + seconds * sum(shares[: index + 1]) / sum(shares)
            self._work(f"level {level}", self._open(level), until, report)
        if self._now() < end:
            self._work("left over", self._open(None), end, report)
        if self._now() < end:
            self._work("disturbed, again", self._disturbed(), end, report)
        self._take_anchor()
        return self._outcome()

    def _open(self, level: int | None) -> list[Case]:
        """Cases without a row; those that a kill interrupted come last."""
        done = self._journal.progress()
        closed = done.measured | done.disturbed | set(done.given_up)
        cases = [
            case
            for case in self._plan.cases
            if (level is None or case.level == level) and case.key not in closed
        ]
        return sorted(cases, key=lambda case: case.key in done.interrupted)

    def _disturbed(self) -> list[Case]:
        again = self._journal.progress().disturbed
        return [case for case in self._plan.cases if case.key in again]

    def _work(self, what: str, cases: Sequence[Case], until: float, report: Report | None) -> None:
        for index, case in enumerate(cases):
            if self._now() >= until:
                return
            if self._now() - self._last_anchor >= ANCHOR_EVERY_S:
                self._take_anchor()
            self._one(case)
            if report is not None:
                report(what, index + 1, len(cases))

    def _one(self, case: Case) -> None:
        self._journal.append({"kind": "start", "key": case.key}, durable=False)
        try:
            row = self._measure(case)
        except Exception as error:  # whatever a library raises fails this case only
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            record: Record = {"kind": "failed", "key": case.key, "reason": reason}
        else:
            record = {"kind": "row", "table": case.table, **case.sizes, **row}
            record |= {"split": case.split, "plan": self._plan.name}
        record |= {"order": self._journal.next_order(), "measured_at": utc_now()}
        self._journal.append(record)
        self._counts[record["kind"]] += 1

    def _take_anchor(self) -> None:
        found = self._anchor()
        self._journal.append(
            {"kind": "anchor", **found, "order": self._journal.next_order(),
             "measured_at": utc_now()}
        )  # fmt: skip
        self._last_anchor = self._now()

    def _outcome(self) -> Outcome:
        done = self._journal.progress()
        keys = {case.key for case in self._plan.cases}
        closed = done.measured | done.disturbed | set(done.given_up)
        from_plan = {key: reason for key, reason in done.given_up.items() if key in keys}
        return Outcome(
            measured=self._counts["row"], failed=self._counts["failed"], left=len(keys - closed),
            disturbed=len(keys & done.disturbed), given_up=from_plan,
        )  # fmt: skip


def utc_now() -> str:
    """This moment, ISO 8601 with seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def describe(plan: Plan) -> list[dict[str, Any]]:
    """What a plan will do: table, level, cases, and how many of them are held out."""
    found: dict[str, dict[str, Any]] = {}
    for case in plan.cases:
        row = found.setdefault(
            case.table, {"table": case.table, "level": case.level, "cases": 0, "test": 0}
        )
        row["cases"] += 1
        row["test"] += case.split == "test"
    return list(found.values())
