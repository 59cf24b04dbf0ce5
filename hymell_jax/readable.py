"""Numbers as people read them: plain notation, times and energies in the unit that suits."""

from __future__ import annotations

import math

HELD_BY_NAMES = {
    "memory": "memory traffic", "compute": "arithmetic", "launch": "kernel launches",
    "cache": "cache traffic", "latency": "latency", "split": "summing splits",
    "network": "GPU links", "engine": "serving engine",
}  # fmt: skip
"""What holds a pass up, in words."""


def figure_text(value: float, digits: int = 3) -> str:
    """A number with so many digits, in plain notation between 1e-4 and 1e6."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def count_text(value: float) -> str:
    """A count of tokens or sequences: 128, 1k for 1024, 128k."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    return f"{value:g}"


def tick_text(value: float) -> str:
    """A number of an axis: 0.05, 20, 1k, 3M."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.9999:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}"


def time_text(value: float, digits: int = 3, micro: str = "µs") -> str:
    """Seconds as s, ms or µs; `micro` is how the last is spelled."""
    factor, unit = (1.0, "s") if value >= 1 else (1e3, "ms") if value * 1e3 >= 1 else (1e6, micro)
    return f"{figure_text(value * factor, digits)} {unit}"


def energy_text(value: float, digits: int = 3) -> str:
    """Joules as Wh, J or mJ."""
    if value >= 3600:
        return f"{figure_text(value / 3600, digits)} Wh"
    factor, unit = (1.0, "J") if value >= 1 else (1e3, "mJ")
    return f"{figure_text(value * factor, digits)} {unit}"


def file_stem(*words: str) -> str:
    """Words, 60 characters of each, as a file name of letters, digits, dots and dashes."""
    text = "-".join(word[:60] for word in words).lower()
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in text).strip(".-")
