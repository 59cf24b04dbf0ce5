"""How commands print: JSON, aligned tables, progress bars, quantities in readable units."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from hymell_jax.readable import energy_text, figure_text, time_text


def print_json(content: Any) -> None:
    """Indented JSON on stdout; a number that is not finite is an error, never printed."""
    click.echo(json.dumps(content, indent=1, allow_nan=False))


def table(title: str, headings: list[str], rows: list[list[str]], left: int = 1) -> None:
    """An aligned table on stdout; the first `left` columns are text."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if title:
        click.echo(title)
    grid = Table(box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        grid.add_column(heading, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        grid.add_row(*map(escape, row))
    Console(width=width(), highlight=False).print(grid)


@contextlib.contextmanager
def progress() -> Iterator[Any]:
    """A callback (what, done, total) that draws bars on stderr with rate and remaining time.

    Nothing is drawn before its first call, so that a refused question is one sentence on stderr.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        """How many a second, or how many seconds each."""

        def render(self, task: Any) -> Text:
            return Text(rate(task.finished_speed or task.speed))

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=Console(stderr=True))
    tasks: dict[tuple[str, int], Any] = {}

    def report(what: str, done: int, total: int) -> None:
        key = (what, total)
        if key not in tasks:
            bars.start()
            tasks[key] = bars.add_task(what, total=total)
        bars.update(tasks[key], completed=done)

    try:
        yield report
    finally:
        if tasks:
            bars.stop()


def rate(per_second: float | None) -> str:
    """Steps a second, or seconds a step where they are slow."""
    if not per_second:
        return ""
    if per_second >= 1:
        return f"{figure_text(per_second)}/s"
    return f"{figure_text(1 / per_second)} s each"


def width() -> int:
    """Characters a line: of the terminal, or enough for a file."""
    return shutil.get_terminal_size((200, 50)).columns if sys.stdout.isatty() else 200


def seconds(value: float) -> str:
    """A time in s, ms or us, four digits; no letter that a terminal might lack."""
    return time_text(value, 4, "us")


def joules(value: float) -> str:
    """An energy in mJ, J or Wh, four digits."""
    return energy_text(value, 4)


def size(value: float) -> str:
    """Bytes in MB or GB, four digits."""
    return f"{value / 1e9:.4g} GB" if value >= 1e9 else f"{value / 1e6:.4g} MB"


def cell(value: float | None, show: Callable[[float], str]) -> str:
    """A quantity as `show` writes it, a dash where there is none."""
    return "-" if value is None else show(value)


def parts_table(phase: str, parts: dict[str, dict[str, Any]]) -> None:
    """The parts of a phase that take at least 0.2 % of its time."""
    rows = [
        [name, seconds(p["time_s"]), joules(p["energy_j"]), f"{100 * p['share']:.1f} %",
         max(p["regimes"], key=p["regimes"].get), p["bound"]]
        for name, p in parts.items() if p["share"] >= 0.002
    ]  # fmt: skip
    table(f"{phase} by part", ["", "time", "energy", "share", "regime", "bound"], rows)
