"""Ticks of an axis, names cut short, and labels that do not lie on each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

CHARACTER = 0.6  # of the font size, the mean width of a letter
LINE = 1.25  # of the font size, the height of a line

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, right, top


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from low to high, evenly dense on a log axis, at most so many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [s * 10.0**e for e in range(first, last + 1) for s in steps]
        inside = [t for t in ticks if low * 0.999 <= t <= high * 1.001]
        if len(inside) <= most:
            return inside
    stride = -(-len(inside) // most)
    return inside[::stride]


def short_names(names: Sequence[str]) -> dict[str, str]:
    """{name: its first words, as many as tell it from the others}; words end at dashes."""
    found = {}
    for name in names:
        words = name.split("-")
        others = [other.split("-") for other in names if other != name]
        count = next(
            (n for n in range(1, len(words)) if all(o[:n] != words[:n] for o in others)),
            len(words),
        )
        found[name] = "-".join(words[:count])
    return found


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, at least `gap` apart, within [low, high] if they fit."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    for rank, i in enumerate(order):
        floor = placed[order[rank - 1]] + gap if rank else low
        placed[i] = max(wanted[i], floor)
    ceiling = high
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed


def _on_line(start: Point, end: Point, step: float = 3.0) -> list[Point]:
    """Points from start to end, `step` apart."""
    (x0, y0), (x1, y1) = start, end
    count = max(int(math.hypot(x1 - x0, y1 - y0) / step), 1)
    return [(x0 + (x1 - x0) * k / count, y0 + (y1 - y0) * k / count) for k in range(count + 1)]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a label goes, and the nearest point of it that a hair line can end at."""

    left: float
    bottom: float
    near: Point
    apart: bool  # so far from its point that it needs the line


@dataclasses.dataclass
class LabelPlacer:
    """Finds free places for labels around points; all lengths in points of the figure."""

    area: Box
    font: float
    taken: list[Box] = dataclasses.field(default_factory=list)
    labels: list[Box] = dataclasses.field(default_factory=list)

    def block(self, boxes: Iterable[Box]) -> None:
        """Keep labels off these boxes."""
        self.taken.extend(boxes)

    def block_line(self, points: Sequence[Point]) -> None:
        """Keep labels off a line through these points."""
        for start, end in zip(points, points[1:], strict=False):
            self.taken.extend((x - 1, y - 1, x + 1, y + 1) for x, y in _on_line(start, end))

    def place(self, x: float, y: float, text: str) -> Place | None:
        """A free place near (x, y), which is then taken; None if there is none."""
        width, height = CHARACTER * self.font * len(text), LINE * self.font
        for distance in (6.0, 12.0, 20.0, 30.0, 42.0, 56.0):
            for angle in (0, 180, 40, -40, 140, -140, 90, -90, 65, -65, 115, -115):
                dx, dy = (f(math.radians(angle)) * distance for f in (math.cos, math.sin))
                left = x + dx - (width if dx < -1 else 0.0 if dx > 1 else width / 2)
                bottom = y + dy - height / 2
                box = (left, bottom, left + width, bottom + height)
                near = (min(max(x, left), left + width), min(max(y, bottom), bottom + height))
                line = _on_line((x, y), near)
                if self._free(box) and not any(map(self._in_label, line)):
                    apart = distance > 12.0
                    self.taken.append(box)
                    self.labels.append(box)
                    if apart:
                        self.block_line([(x, y), near])
                    return Place(left, bottom, near, apart)
        return None

    def _in_label(self, point: Point) -> bool:
        x, y = point
        return any(a < x < c and b < y < d for a, b, c, d in self.labels)

    def _free(self, box: Box) -> bool:
        left, bottom, right, top = box
        a = self.area
        if left < a[0] or bottom < a[1] or right > a[2] or top > a[3]:
            return False
        return not any(
            left < r and right > x and bottom < t and top > y for x, y, r, t in self.taken
        )
