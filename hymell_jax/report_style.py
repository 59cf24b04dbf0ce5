"""How the figures of a report look: colours, letters, axes, labels; narrow enough for a phone.

Every figure is 5 inches wide with 12 point letters, so that at the width of a phone a letter is
about 11 pixels high. Colours come from `PALETTE` alone: a page exchanges them for its own, light or
dark. matplotlib is imported inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hymell_jax.readable import count_text
from hymell_jax.report_labels import LabelPlacer, spread

PALETTE = {
    "ink": "#1b1d21", "muted": "#5a5e66", "grid": "#d9dce1", "surface": "#fdfdfe",
    "series-1": "#0b61b6", "series-2": "#b34700", "series-3": "#00755a", "series-4": "#9a2d7a",
    "series-5": "#6a5a00", "series-6": "#54565a",
    "fill-memory": "#a8cdf1", "fill-compute": "#f8c898", "fill-launch": "#d6d0ea",
    "fill-cache": "#b9e4ce", "fill-latency": "#f3e59c", "fill-split": "#ecc3e0",
    "fill-network": "#cfd2d6", "fill-engine": "#f2b8b1",
}  # fmt: skip
"""Name: colour on white; every colour stands for one name."""

WIDTH_IN, FONT, SMALL = 5.0, 12.0, 10.5
MANY_LINES = 6  # beyond so many, colours repeat with dashes
LINE_GAP = 13.5

UNITS = {
    "time": ((1e3, "ms", 500.0), (1.0, "s", float("inf"))),
    "energy": ((1e3, "J", 2000.0), (1.0, "kJ", float("inf"))),
    "prefill": ((1.0, "J", 2000.0), (1e-3, "kJ", float("inf"))),
}
"""Kind: factor to, name of, and largest usual number in a unit; energy is per 1000 tokens."""


@dataclasses.dataclass(frozen=True)
class Plot:
    """One figure and what it shows in words."""

    name: str  # of a file, unique within a report
    title: str
    description: str
    figure: Any


def unit_of(kind: str, values: Sequence[float]) -> tuple[float, str]:
    """(factor, name) of the unit that suits these values in s, J a token, or J."""
    middle = (min(values) * max(values)) ** 0.5
    return next((f, name) for f, name, most in UNITS[kind] if middle * f <= most)


def new_axes(height_in: float, left: float, right: float, title: str, below: str, legend=()):
    """A figure and its axes; margins in inches, `legend` the names of the first series."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=72, facecolor=PALETTE["surface"])
    FigureCanvasAgg(figure)
    bottom, top = 0.55, 0.86 if legend else 0.62
    box = (
        left / WIDTH_IN, bottom / height_in, 1 - (left + right) / WIDTH_IN,
        1 - (bottom + top) / height_in,
    )  # fmt: skip
    axes = figure.add_axes(box, facecolor=PALETTE["surface"])
    at = 0.08 / WIDTH_IN
    figure.text(at, 1 - 0.22 / height_in, title, size=FONT, weight="bold", color=PALETTE["ink"])
    figure.text(at, 1 - 0.42 / height_in, below[:56], size=SMALL, color=PALETTE["muted"])
    for index, name in enumerate(legend):
        place = (at + 0.36 * index, 1 - 0.66 / height_in)
        figure.text(*place, name, size=FONT, weight="bold", color=series(index))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(PALETTE["muted"])
    axes.tick_params(colors=PALETTE["muted"], labelsize=FONT - 1, length=3, which="both")
    axes.minorticks_off()
    axes.grid(True, color=PALETTE["grid"], linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def x_label(axes, text: str) -> None:
    """Name the x axis."""
    axes.set_xlabel(text, size=FONT, color=PALETTE["muted"])


def log_axis(axis, ticks: Sequence[float], texts: Sequence[str]) -> None:
    """Ticks of one axis, none between them."""
    axis.set_ticks(list(ticks), labels=list(texts))
    axis.set_ticks([], minor=True)


def series(index: int) -> str:
    """Colour of the series at a place."""
    return PALETTE[f"series-{index % MANY_LINES + 1}"]


def count_axis(axes, sizes: Sequence[float]) -> None:
    """A log2 axis of sizes; every second one is named where they are many."""
    axes.set_xscale("log", base=2)
    shown = sizes if len(sizes) <= 6 else sizes[::2]
    log_axis(axes.xaxis, shown, [count_text(s) for s in shown])


def end_labels(axes, ends: Sequence[float], names: Sequence[str], places: Sequence[int]) -> None:
    """Names of series right of the axes, at the heights of their last values but apart."""
    height = axes.bbox.height
    wanted = [axes.transAxes.inverted().transform(axes.transData.transform((1, v)))[1]
              for v in ends]  # fmt: skip
    gap = LINE_GAP / height
    heights = spread(wanted, gap, 0.02, 0.98)
    for index, name, y in zip(places, names, heights, strict=True):
        axes.annotate(
            name, (1.0, y), xycoords="axes fraction", xytext=(7, 0), textcoords="offset points",
            va="center", size=FONT, color=series(index), annotation_clip=False,
        )  # fmt: skip


def label_placer(axes) -> LabelPlacer:
    """For labels inside these axes."""
    box = axes.bbox
    return LabelPlacer((box.x0 + 2, box.y0 + 2, box.x1 + 2, box.y1 - 1), FONT - 1)


def write_label(axes, placer: LabelPlacer, x: float, y: float, text: str, color: str) -> None:
    """A label near a data point, with a hair line where it lies apart; none where none fits."""
    px, py = axes.transData.transform((x, y))
    place = placer.place(px, py, text)
    if place is None:
        return
    if place.apart:
        axes.annotate(
            "", (px, py), xytext=place.near, xycoords="figure points",
            textcoords="figure points", arrowprops={"arrowstyle": "-", "color": PALETTE["muted"],
                                                    "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
        )  # fmt: skip
    axes.annotate(
        text, (place.left, place.bottom + 0.25 * placer.font), xycoords="figure points",
        size=placer.font, color=color,
    )  # fmt: skip
