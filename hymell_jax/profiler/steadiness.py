"""Which rows something else spoiled: other processes, spread, drift of the anchor, a clock jump."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable
from typing import Any

MOST_SPREAD = 0.10  # interquartile range over median
MOST_OTHER_LOAD = 0.05  # of the processors used
MOST_DRIFT = 0.10  # of an anchor against its median over the folder
MOST_CLOCK_GAP_S = 0.25  # between two clocks over one case
ANCHORS = ("compute_s", "memory_s")


KINDS = {  # how a reason begins: in plain words
    "other load": f"other work took more than {100 * MOST_OTHER_LOAD:.0f} % of the processors",
    "anchor": f"the anchor, a fixed piece of work, was off by more than {100 * MOST_DRIFT:.0f} %",
    "spread": f"samples spread more than {100 * MOST_SPREAD:.0f} %",
    "clock": "two clocks disagreed",
}


def counts(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Rows by what disturbed them, keys of `KINDS`; a row may be disturbed by several."""
    texts = [row["disturbed_by"].split(", ") for row in rows]
    found = {kind: sum(any(t.startswith(kind) for t in text) for text in texts) for kind in KINDS}
    return {kind: count for kind, count in found.items() if count}


class Judge:
    """Reads the anchors of a journal once, then says what disturbed a row."""

    def __init__(self, records: Iterable[dict[str, Any]]):
        anchors = sorted((r for r in records if r["kind"] == "anchor"), key=lambda r: r["order"])
        self._places = [r["order"] for r in anchors]
        self._drift = [0.0] * len(anchors)
        seconds = [r["compute_s"] for r in anchors]
        self._ratio = [value / statistics.median(seconds) for value in seconds]
        for name in ANCHORS:
            values = [r[name] for r in anchors]
            middle = statistics.median(values) if values else 1.0
            for index, value in enumerate(values):
                self._drift[index] = max(self._drift[index], abs(value / middle - 1))

    def drift_at(self, order: int) -> float:
        """The lesser drift of the anchors before and after: both must be off."""
        after = bisect.bisect(self._places, order)
        near = self._drift[max(0, after - 1) : after + 1]
        return min(near, default=0.0)

    def ratio_at(self, order: int) -> float | None:
        """Seconds of the compute anchor around a case over its median; None without anchors."""
        after = bisect.bisect(self._places, order)
        near = self._ratio[max(0, after - 1) : after + 1]
        return sum(near) / len(near) if near else None

    def reasons(self, row: dict[str, Any]) -> list[str]:
        """Empty for a row that nothing disturbed."""
        found = []
        if row["time_spread"] > MOST_SPREAD:
            found.append(f"spread {row['time_spread']:.2f}")
        if (row.get("other_load") or 0.0) > MOST_OTHER_LOAD:
            found.append(f"other load {row['other_load']:.2f}")
        drift = self.drift_at(row["order"])
        if drift > MOST_DRIFT:
            found.append(f"anchor off by {drift:.2f}")
        if abs(row.get("clock_gap_s") or 0.0) > MOST_CLOCK_GAP_S:
            found.append(f"clock jumped by {row['clock_gap_s']:.1f} s")
        return found
