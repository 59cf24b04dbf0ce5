"""What every experiment shares: its command line, progress, tables, result files and figures."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hymell_jax.data import data_folder
from hymell_jax.files import read_json, writable_folder, write_whole

REPORT_EVERY_S = 30.0

_last_report_s = [0.0]


def command(
    description: str, folder: Path, *, reads_data: bool = False, **options: Mapping[str, Any]
) -> argparse.Namespace:
    """The parsed command line of an experiment, and as `config` its config.json.

    Args:
        description: its first line is the help text.
        folder: of the experiment: holds config.json. Results go to `results/` and its name under
            the current directory unless --out says otherwise, so that the committed ones stay.
        reads_data: whether it takes --data; `data` is then a checked folder of measured tables.
        options: what else it takes, by name, as `argparse.ArgumentParser.add_argument` has it.

    Raises:
        ValueError: no folder of measured tables, no readable config.json, or a folder of results
            that cannot be written.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    if reads_data:
        parser.add_argument("--data", help="folder of measured tables; default $HYMELL_DATA")
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    out = Path("results") / folder.resolve().name
    parser.add_argument("--out", type=Path, default=out, help=f"of the results; default {out}")
    given = parser.parse_args()
    given.config = read_json(folder / "config.json", "configuration")
    if reads_data:
        given.data = data_folder(given.data)
    print(f"Results go to {writable_folder(given.out)}", flush=True)
    return given


def report(what: str, done: int, total: int) -> None:
    """A line of progress, at most one in `REPORT_EVERY_S`, and at the end."""
    if time.monotonic() - _last_report_s[0] > REPORT_EVERY_S or done == total:
        _last_report_s[0] = time.monotonic()
        print(f"{what}: {done} of {total}", flush=True)


def cell(value: Any, digits: int | None = None) -> str:
    """A value as tables show it: "-" for None and NaN, floats with these digits where given."""
    if value is None or value != value:
        return "-"
    return f"{value:.{digits}f}" if digits is not None and isinstance(value, float) else str(value)


def markdown(
    headings: Sequence[str], rows: Iterable[Iterable[Any]], digits: int | None = None
) -> list[str]:
    """Lines of a Markdown table; `digits` of its floats."""
    lines = [headings, *([cell(value, digits) for value in row] for row in rows)]
    first, *others = ("| " + " | ".join(line) + " |" for line in lines)
    return [first, "|" + "---|" * len(headings), *others]


def aligned(headings: Sequence[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Lines of a table in columns of equal width, for a terminal."""
    lines = [headings, *([cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)) for line in lines]


def values(rows: Iterable[Mapping[str, Any]], keys: Sequence[str]) -> list[list[Any]]:
    """The values of some keys of every row, in their order; None where a row lacks one."""
    return [[row.get(key) for key in keys] for row in rows]


def write_results(
    folder: Path, results: Any, readme: Iterable[str] | None = None, indent: int = 0
) -> None:
    """Write results.json, and README.md of these lines, whole; the folder is made.

    Raises:
        ValueError: a number of the results is not finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=indent, allow_nan=False, default=float)
    write_whole(folder / "results.json", text + "\n")
    if readme is not None:
        write_whole(folder / "README.md", "\n".join(readme))


@contextlib.contextmanager
def figure(
    path: Path, size: tuple[float, float], count: int = 1, columns: int = 1, dpi: int = 90,
    **options: Any,
) -> Iterator[tuple[Any, list[Any]]]:  # fmt: skip
    """A figure of `count` panels in rows of `columns`, and its axes; written as PNG at the end.

    Args:
        path: of the file.
        size: width and height of a panel in inches.
        count, columns: of panels; the last row may have fewer.
        dpi: dots per inch.
        options: of `matplotlib.figure.Figure.subplots`, such as sharey.
    """
    from matplotlib.figure import Figure

    rows = -(-count // columns)
    drawn = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    axes = list(drawn.subplots(rows, columns, squeeze=False, **options).flat)
    for spare in axes[count:]:
        spare.remove()
    yield drawn, axes[:count]
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=dpi)
    write_whole(path, buffer.getvalue())
