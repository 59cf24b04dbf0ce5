"""Ticks of an axis, names cut short, and labels that do not lie on each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

CHARACTER = 0.6  # of the font size, the mean width of a letter
LINE = 1.25  # of the font size, the height of a line

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


@dataclasses.dataclass
class LabelPlacer:
    """Finds free places for labels around points; all lengths in points of the figure."""

    area: Box
    font: float
    taken: list[Box] = dataclasses.field(default_factory=list)

    def block(self, boxes: Iterable[Box]) -> None:
        """Keep labels off these boxes."""
        self.taken.extend(boxes)

    def block_line(self, points: Sequence[tuple[float, float]], step: float = 4.0) -> None:
        """Keep labels off a line through these points."""
        for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
            count = max(int(math.hypot(x1 - x0, y1 - y0) / step), 1)
            for k in range(count + 1):
                x, y = x0 + (x1 - x0) * k / count, y0 + (y1 - y0) * k / count
                self.taken.append((x - 1, y - 1, x + 1, y + 1))

    def place(self, x: float, y: float, text: str) -> tuple[float, float] | None:
        """Lower left corner of a free place near (x, y), which is then taken; None if none is."""
        width, height = CHARACTER * self.font * len(text), LINE * self.font
        for distance in (6.0, 12.0, 20.0, 30.0, 42.0, 56.0):
            for angle in (0, 180, 40, -40, 140, -140, 90, -90, 65, -65, 115, -115):
                dx, dy = (f(math.radians(angle)) * distance for f in (math.cos, math.sin))
                left = x + dx - (width if dx < -1 else 0.0 if dx > 1 else width / 2)
                bottom = y + dy - height / 2
                box = (left, bottom, left + width, bottom + height)
                if self._free(box):
                    self.taken.append(box)
                    return left, bottom
        return None

    def _free(self, box: Box) -> bool:
        left, bottom, right, top = box
        a = self.area
        if left < a[0] or bottom < a[1] or right > a[2] or top > a[3]:
            return False
        return not any(
            left < r and right > x and bottom < t and top > y for x, y, r, t in self.taken
        )
