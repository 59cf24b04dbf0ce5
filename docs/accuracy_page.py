"""The page on accuracy, from the committed results of the experiments alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PAGE = "accuracy.md"

INTRODUCTION = """# How accurate it is

Every number here comes from rows that no fit has seen: shapes, head layouts or whole models held
out. The page is written from the committed results of the experiments; the command under each
table prints it again. All errors are mean absolute percentage errors; `n` counts the rows.
`paper` is what HYMELL (arXiv 2608.06723) reports on its own measurements, `black box` gradient-
boosted trees on the rows of the same tables. Where a reference is lower than ours, we lose.
"""


def _table(rows: Iterable[dict[str, Any]], columns: dict[str, str]) -> list[str]:
    """Markdown lines of some columns {key: heading}."""

    def cell(value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(cell(r.get(k)) for k in columns) + " |" for r in rows]


def _results(repository: Path, experiment: str) -> Any:
    return json.loads((repository / "experiments" / experiment / "results.json").read_text())


def _operators(repository: Path) -> list[str]:
    rows = [r for r in _results(repository, "operator_accuracy") if r["regime"] in ("all", "sound")]
    columns = {
        "table": "operator", "device": "device", "runtime": "runtime", "dtype": "format",
        "target": "target", "regime": "rows", "n": "n", "mape": "ours",
        "published_form_mape": "published equation, same rows", "black_box_mape": "black box",
        "paper_mape": "paper",
    }  # fmt: skip
    return [
        "## Level 1: operators",
        "",
        "`sound` are rows of 300 us or longer: power labels of shorter ones are biased.",
        "",
        *_table(rows, columns),
        "",
        "`python experiments/operator_accuracy/run.py --data DIR`",
    ]


def _blocks(repository: Path) -> list[str]:
    columns = {
        "table": "block", "device": "device", "runtime": "runtime", "regime": "rows",
        "target": "target", "n": "n", "level1_mape": "level 1", "mape": "level 2",
        "black_box_mape": "black box", "paper_mape": "paper",
    }  # fmt: skip
    return [
        "## Level 2: blocks",
        "",
        *_table(_results(repository, "block_accuracy")["errors"], columns),
        "",
        "`python experiments/block_accuracy/run.py --data DIR`",
    ]


def _models(repository: Path) -> list[str]:
    found = _results(repository, "end_to_end_accuracy")
    columns = {
        "device": "device", "phase": "phase", "kind": "kind", "target": "target", "n": "n",
        "models": "models", "level 1": "level 1", "levels 1+2": "levels 1+2", "level 3": "level 3",
        "black box": "black box", "paper": "paper",
    }  # fmt: skip
    coverage = {
        "device": "device", "target": "target", "width": "weights", "n": "n",
        "coverage": "inside, %", "half_width": "half width, %",
    }  # fmt: skip
    return [
        "## Level 3: whole models, each left out of the fit",
        "",
        *_table(found["by_device"], columns),
        "",
        "## Do the 90 % intervals hold?",
        "",
        "Rows of left-out models that lie inside the interval printed with their prediction.",
        "",
        *_table(found["coverage"], coverage),
        "",
        "`python experiments/end_to_end_accuracy/run.py --data DIR`",
    ]


def content(repository: Path) -> str:
    """The page as Markdown."""
    sections = [INTRODUCTION, *_operators(repository), "", *_blocks(repository), ""]
    return "\n".join([*sections, *_models(repository), ""])


def write(folder: Path) -> None:
    """Write the page into the folder of the documentation, if it differs."""
    text, page = content(folder.parent), folder / PAGE
    if not page.is_file() or page.read_text() != text:
        page.write_text(text)
