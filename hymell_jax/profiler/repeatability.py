"""How well a machine repeats itself: two profiles of it, row by row."""

from __future__ import annotations

import os
import statistics
from typing import Any

from hymell_jax.profiler import store

TOLERANCE = 0.05


def repeatability(
    first: str | os.PathLike[str], second: str | os.PathLike[str]
) -> list[dict[str, Any]]:
    """Agreement of the medians of two profiles, a row for each table and one for all.

    Args:
        first, second: folders of profiles of the same device.

    Returns:
        Rows of table, n (cases in both), within_5_percent (share whose times differ by at most
        5 % of the lesser), median_difference, and the same of the n_undisturbed cases that neither
        run flagged. Shares are None where there are no cases.

    Raises:
        ValueError: a folder has no journal, or the profiles have no case in common.
    """
    runs = [
        {store.row_key(row): row for row in store.best_rows(store.read_journal(folder))}
        for folder in (first, second)
    ]
    pairs = [(a, runs[1][key]) for key, a in runs[0].items() if key in runs[1]]
    if not pairs:
        raise ValueError(f"{str(first)!r} and {str(second)!r} have no case in common.")
    tables = sorted({a["table"] for a, _ in pairs})
    return [
        _summary(name, [pair for pair in pairs if name in ("all", pair[0]["table"])])
        for name in (*tables, "all")
    ]


def _summary(name: str, pairs: list[tuple[dict, dict]]) -> dict[str, Any]:
    calm = [(a, b) for a, b in pairs if not (a["disturbed"] or b["disturbed"])]
    found: dict[str, Any] = {"table": name}
    for suffix, chosen in (("", pairs), ("_undisturbed", calm)):
        off = [abs(a["time_s"] - b["time_s"]) / min(a["time_s"], b["time_s"]) for a, b in chosen]
        found[f"n{suffix}"] = len(off)
        found[f"within_5_percent{suffix}"] = (
            sum(value <= TOLERANCE for value in off) / len(off) if off else None
        )
        found[f"median_difference{suffix}"] = statistics.median(off) if off else None
    return found
