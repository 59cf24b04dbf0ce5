"""All figures of a report, drawn from its numbers with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hymell_jax.report_curves import CURVES, curve_plot, front_plot
from hymell_jax.report_pair_plots import map_plot, parts_plot, roofline_plot, slopes_plot
from hymell_jax.report_style import Plot

Progress = Callable[[str, int, int], None]


def check_matplotlib() -> None:
    """Say what to install before any work is done.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("A report needs matplotlib: install the extra `plot`.") from None


def plots_of(content: Mapping[str, Any], progress: Progress | None = None) -> dict[str, list[Plot]]:
    """All figures of a report: by model name its curves and front, by "model on device" its own.

    Args:
        content: of `report.report`.
        progress: called with ("figures", groups done, all groups).

    Raises:
        ValueError: matplotlib is not installed.
    """
    check_matplotlib()
    import matplotlib

    found: dict[str, list[Plot]] = {}
    total = len(content["models"]) + len(content["pairs"])

    def add(name: str, plots: list[Plot]) -> None:
        found[name] = plots
        if progress is not None:
            progress("figures", len(found), total)

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the reader has set for figures of their own
        matplotlib.rcParams["text.parse_math"] = False  # a name may hold a dollar
        for model in content["models"]:
            pairs = [p for p in content["pairs"] if p["model"] == model]
            curves = [curve_plot(content, pairs, *c) for c in CURVES]
            add(model, [*curves, front_plot(content, model)])
        for p in content["pairs"]:
            maps = [map_plot(p, "decode"), map_plot(p, "prefill")]
            bars = [parts_plot(p, "decode"), parts_plot(p, "prefill")]
            add(f"{p['model']} on {p['device']}", [*bars, roofline_plot(p), *maps, slopes_plot(p)])
    return found
