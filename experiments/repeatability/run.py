"""How well does a machine repeat itself? Two profiles of it, case by case.

Takes two folders of `hymell profile` with their journals, measured one after the other on the same
machine. Prints the share of cases whose medians agree within 5 % and writes results.json and
README.md; the anchors, a fixed product and a fixed copy measured all along, say how steady
the machine itself was.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from hymell_jax import experiment
from hymell_jax.profiler import repeatability, store

HERE = Path(__file__).parent
KEYS = ("table", "n", "within_5_percent", "median_difference", "n_undisturbed",
        "within_5_percent_undisturbed", "median_difference_undisturbed")  # fmt: skip
ANCHOR_KEYS = ("profile", "anchor", "n", "median_s", "within_5_percent")


def anchors(name: str, folder: Path) -> list[dict[str, Any]]:
    """How often a fixed piece of work took within 5 % of its median in one profile."""
    records = [r for r in store.read_journal(folder) if r["kind"] == "anchor"]
    found = []
    for anchor in ("compute_s", "memory_s"):
        values = [r[anchor] for r in records]
        median = statistics.median(values)
        near = sum(abs(v / median - 1.0) <= repeatability.TOLERANCE for v in values)
        found.append({"profile": name, "anchor": anchor, "n": len(values), "median_s": median,
                      "within_5_percent": near / len(values)})  # fmt: skip
    return found


def readme(content: dict[str, Any]) -> list[str]:
    """Lines of README.md with the rows of the results."""
    return [
        "# How well does the machine repeat itself?", "",
        "`python experiments/repeatability/run.py --first DIR --second DIR` compares two profiles",
        "of one machine, measured one after the other, case by case: the share of cases whose",
        "medians differ by at most 5 % of the lesser, and the median difference; `undisturbed` are",
        "cases that neither profile flagged.", "",
        *experiment.markdown(KEYS, experiment.values(content["cases"], KEYS), 3), "",
        "The anchors are one fixed matrix product and one fixed copy, measured all along: how",
        "often each took within 5 % of its own median is how often the machine repeats itself.",
        "",
        *experiment.markdown(ANCHOR_KEYS, experiment.values(content["anchors"], ANCHOR_KEYS), 4),
        "",
    ]  # fmt: skip


def main(first: Path, second: Path, out: Path) -> dict[str, Any]:
    """Compare two profiles, print and write the results."""
    content = {
        "cases": repeatability.repeatability(first, second),
        "anchors": anchors("first", first) + anchors("second", second),
    }
    for name, keys in (("cases", KEYS), ("anchors", ANCHOR_KEYS)):
        print("\n".join(experiment.aligned(keys, experiment.values(content[name], keys))))
    experiment.write_results(out, content, readme(content))
    return content


if __name__ == "__main__":
    given = experiment.command(
        __doc__,
        HERE,
        first=dict(type=Path, required=True, help="folder of a profile"),
        second=dict(type=Path, required=True, help="folder of another of the same machine"),
    )
    main(given.first, given.second, given.out)
