"""Figures of one model on one device: parts, roofline, regime map, sensitivities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hymell_jax.readable import (
    HELD_BY_NAMES,
    count_text,
    energy_text,
    figure_text,
    file_stem,
    tick_text,
    time_text,
)
from hymell_jax.report_labels import log_ticks
from hymell_jax.report_style import (
    FONT,
    PALETTE,
    SMALL,
    Plot,
    label_placer,
    log_axis,
    new_axes,
    series,
    write_label,
    x_label,
)


def part_rows(pair: Mapping[str, Any], phase: str) -> list[dict[str, Any]]:
    """Parts of a pass with shares of its time and energy; at level 3 the engine is one of them.

    Shares are of the pass, or of its kernels where an engine hides some of them.
    """
    answer = pair["answer"]
    parts, whole = answer["parts"][phase], answer[phase]
    time_s = whole["time_s"] if phase == "prefill" else whole["time_per_token_s"]
    energy_j = whole["energy_j"] if phase == "prefill" else whole["energy_per_step_j"]
    rows = [
        {"part": name, "time_s": p["time_s"], "energy_j": p["energy_j"], "bound": p["bound"]}
        for name, p in parts.items()
    ]
    sums = [sum(r[key] for r in rows) for key in ("time_s", "energy_j")]
    rest = [max(total - own, 0.0) for total, own in zip((time_s, energy_j), sums, strict=True)]
    if max(rest[0] / time_s, rest[1] / energy_j) > 1e-4:
        rows.append(
            {"part": "serving engine", "time_s": rest[0], "energy_j": rest[1], "bound": "engine"}
        )
    totals = [sum(r[key] for r in rows) for key in ("time_s", "energy_j")]
    for row in rows:
        row["time_share"] = row["time_s"] / totals[0]
        row["energy_share"] = row["energy_j"] / totals[1]
    return sorted(rows, key=lambda r: -r["time_share"])


def _room(names: Iterable[str]) -> float:
    """Inches left of the axes for these names."""
    return 0.2 + 0.088 * max(map(len, names))


def parts_plot(pair: Mapping[str, Any], phase: str) -> Plot:
    """Shares of time and energy of the parts of a pass, as bars."""
    rows = part_rows(pair, phase)
    kept = [r for r in rows if max(r["time_share"], r["energy_share"]) >= 0.02][:10]
    rest = [r for r in rows if r not in kept]
    if rest:
        kept.append({"part": f"{len(rest)} others"} | {
            key: sum(r[key] for r in rest)
            for key in ("time_s", "energy_j", "time_share", "energy_share")
        })  # fmt: skip
    work = pair["answer"]["workload"]
    what = "one decode step" if phase == "decode" else "prefill"
    left = _room(r["part"] for r in kept)
    figure, axes = new_axes(
        1.5 + 0.44 * len(kept), left, 0.75, f"Time and energy of {what} by part",
        f"{pair['model'][:28]} on {pair['device'][:20]}, batch {work['batch_size']:g}",
        ("time", "energy"),
    )  # fmt: skip
    for place, row in enumerate(kept):
        texts = (time_text(row["time_s"]), energy_text(row["energy_j"]))
        for side, (key, text) in enumerate(zip(("time", "energy"), texts, strict=True)):
            y, share = place - 0.2 + 0.4 * side, 100 * row[f"{key}_share"]
            axes.barh(y, share, height=0.36, color=series(side))
            text = text if share else "none"
            axes.annotate(
                text, (share, y), xytext=(4, 0), va="center", size=SMALL,
                textcoords="offset points", color=series(side), annotation_clip=False,
            )  # fmt: skip
    axes.set_ylim(len(kept) - 0.4, -0.6)
    axes.set_yticks(range(len(kept)), [r["part"].replace("_", " ") for r in kept])
    axes.tick_params(axis="y", length=0, labelcolor=PALETTE["ink"])
    axes.grid(False, axis="y")
    axes.set_xlim(0, None)
    x_label(axes, "percent of the pass")
    said = "; ".join(
        f"{r['part'].replace('_', ' ')} {100 * r['time_share']:.0f} % of time, "
        f"{100 * r['energy_share']:.0f} % of energy"
        for r in kept[:4]
    )
    name = file_stem(pair["model"], pair["device"], "parts", phase)
    return Plot(name, f"{phase.capitalize()} by part", f"{said}.", figure)


def roofline_plot(pair: Mapping[str, Any]) -> Plot:
    """The roofs of one GPU and the operators under them, in both phases."""
    roof = pair["roofline"]
    peak, bandwidth = roof["peak_flops_per_s"] / 1e12, roof["memory_bytes_per_s"] / 1e12
    points = [
        (p["flops_per_byte"], p["flops_per_s"] / 1e12, phase, name, p["share"])
        for phase in ("decode", "prefill") for name, p in roof[phase].items()
        if p["share"] >= 0.01
    ]  # fmt: skip
    figure, axes = new_axes(
        4.2, 0.62, 0.25, "Roofline: TFLOP/s over FLOP per byte",
        f"{pair['model'][:30]} on {pair['device'][:24]}, one GPU", ("decode", "prefill"),
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low_x, high_x = min(xs) / 2, max(*xs, roof["ridge_flops_per_byte"]) * 4
    low_y = min(min(ys) / 2, bandwidth * low_x)
    axes.set_xlim(low_x, high_x)
    axes.set_ylim(low_y, peak * 5)
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        ticks = log_ticks(*limits)
        log_axis(axis, ticks, [tick_text(t) for t in ticks])
    corner = [(low_x, bandwidth * low_x), (peak / bandwidth, peak), (high_x, peak)]
    axes.plot(*zip(*corner, strict=True), color=PALETTE["ink"], linewidth=1.4)
    placer = label_placer(axes)
    placer.block_line([tuple(axes.transData.transform(point)) for point in corner])
    colors = {"decode": series(0), "prefill": series(1)}
    for x, y, phase, _, share in points:
        axes.plot([x], [y], "o" if phase == "decode" else "s", color=colors[phase],
                  markersize=3.5 + 6 * share**0.5, alpha=0.85, markeredgewidth=0)  # fmt: skip
        px, py = axes.transData.transform((x, y))
        placer.block([(px - 4, py - 4, px + 4, py + 4)])
    axes.annotate(f"{figure_text(peak)} TFLOP/s", (high_x, peak), xytext=(-2, 4), ha="right",
                  textcoords="offset points", size=FONT - 1, color=PALETTE["ink"])  # fmt: skip
    px, py = axes.transData.transform((high_x, peak))
    placer.block([(px - 8 * FONT, py, px, py + 1.6 * FONT)])
    middle = (low_x * low_x * peak / bandwidth) ** (1 / 3)
    write_label(axes, placer, middle, bandwidth * middle, f"{figure_text(bandwidth)} TB/s",
                 PALETTE["ink"])  # fmt: skip
    for x, y, phase, name, share in sorted(points, key=lambda p: -p[4]):
        if share >= 0.03:
            write_label(axes, placer, x, y, name.replace("_", " "), colors[phase])
    x_label(axes, "FLOP per byte of memory traffic")
    said = "; ".join(
        f"{phase} {name.replace('_', ' ')} {figure_text(y)} TFLOP/s at {figure_text(x)} FLOP/byte"
        for x, y, phase, name, _ in sorted(points, key=lambda p: -p[4])[:4]
    )
    description = (
        f"One GPU reaches at most {figure_text(peak)} TFLOP/s and {figure_text(bandwidth)} TB/s, "
        f"which meet at {figure_text(peak / bandwidth)} FLOP per byte; points above the slope work "
        f"from the cache. {said}."
    )
    return Plot(file_stem(pair["model"], pair["device"], "roofline"), "Roofline", description,
                figure)  # fmt: skip


def map_plot(pair: Mapping[str, Any], phase: str) -> Plot:
    """What takes most of a pass's time over batch and tokens."""
    from matplotlib.patches import Rectangle

    m = pair["map"]
    cells, batches, tokens = m[phase]["held_by"], m["batch_sizes"], m["tokens"]
    of = "context" if phase == "decode" else "prompt"
    figure, axes = new_axes(
        3.5, 0.62, 0.15, f"What holds the {phase} up",
        f"{pair['model'][:30]} on {pair['device'][:24]}",
    )  # fmt: skip
    axes.grid(False)
    for row, line in enumerate(cells):
        for column, held in enumerate(line):
            fits, known = m["fits"][row][column], m["in_domain"][row][column]
            axes.add_patch(
                Rectangle(
                    (column, row), 1, 1, facecolor=PALETTE[f"fill-{held}"],
                    edgecolor=PALETTE["surface"], linewidth=1.0,
                )
            )  # fmt: skip
            if not fits:
                axes.plot([column + 0.25, column + 0.75], [row + 0.25, row + 0.75],
                          color=PALETTE["muted"], linewidth=1.0)  # fmt: skip
            if not known:
                axes.plot([column + 0.5], [row + 0.5], ".", color=PALETTE["ink"], markersize=3.5)
    axes.set_xlim(0, len(batches))
    axes.set_ylim(0, len(tokens))
    shown = range(0, len(batches), 1 if len(batches) <= 10 else 2)
    axes.set_xticks([i + 0.5 for i in shown], [count_text(batches[i]) for i in shown])
    axes.set_yticks([i + 0.5 for i in range(len(tokens))], [count_text(t) for t in tokens])
    axes.tick_params(length=0)
    x_label(axes, f"batch (across), {of} tokens (up)")
    kinds = [held for line in cells for held in line]
    common = sorted(set(kinds), key=lambda k: -kinds.count(k))
    marked = [
        [not fits or not known for fits, known in zip(*lines, strict=True)]
        for lines in zip(m["fits"], m["in_domain"], strict=True)
    ]
    for held in common:
        for plain in (True, False):
            region = [
                [here == held and not (plain and mark) for here, mark in zip(*lines, strict=True)]
                for lines in zip(cells, marked, strict=True)
            ]
            if _region_label(axes, region, held):
                break
    share = ", ".join(f"{HELD_BY_NAMES[k]} in {kinds.count(k)}" for k in common)
    unfit = sum(not fits for line in m["fits"] for fits in line)
    description = (
        f"Of {len(kinds)} combinations of batch and {of}, most time goes to: {share}. "
        f"Stroked cells ({unfit}) do not fit in memory; dotted ones are extrapolated."
    )
    return Plot(
        file_stem(pair["model"], pair["device"], "regimes", phase), f"Regime map, {phase}",
        description, figure,
    )  # fmt: skip


def _region_label(axes, region: Sequence[Sequence[bool]], held: str) -> bool:
    """Write the name of a region into its widest row; False where it is too narrow."""
    best = (0, 0.0, 0, 0)
    for row, line in enumerate(region):
        start = 0
        while start < len(line):
            stop = start
            while stop < len(line) and line[stop]:
                stop += 1
            best = max(best, (stop - start, -abs(row + 0.5 - len(region) / 2), row, start))
            start = max(stop, start + 1)
    width, _, row, start = best
    text = HELD_BY_NAMES[held]
    if axes.bbox.width / len(region[0]) * width < 0.62 * FONT * len(text):
        return False
    axes.text(
        start + width / 2, row + 0.5, text, ha="center", va="center", size=FONT,
        color=PALETTE["ink"],
        bbox={"facecolor": PALETTE[f"fill-{held}"], "edgecolor": "none", "pad": 1.0},
    )  # fmt: skip
    return True


def slopes_plot(pair: Mapping[str, Any]) -> Plot:
    """Percent of energy and time per percent of a size, the largest first."""
    quantities = ("latency_per_token_s", "energy_per_token_j")
    slopes = pair["elasticities"]
    fields = sorted(slopes, key=lambda f: -max(abs(slopes[f][q]) for q in quantities))[:9]
    figure, axes = new_axes(
        1.5 + 0.42 * len(fields), _room(fields), 0.35, "Percent more per percent more of a size",
        f"{pair['model'][:30]} on {pair['device'][:24]}", ("time per token", "energy per token"),
    )  # fmt: skip
    for place, field in enumerate(fields):
        for side, quantity in enumerate(quantities):
            value, y = slopes[field][quantity], place - 0.2 + 0.4 * side
            axes.barh(y, value, height=0.36, color=series(side))
            axes.annotate(
                f"{value:+.2f}", (value, y), xytext=(4 if value >= 0 else -4, 0), va="center",
                textcoords="offset points", ha="left" if value >= 0 else "right", size=SMALL,
                color=series(side), annotation_clip=False,
            )  # fmt: skip
    values = [slopes[f][q] for f in fields for q in quantities]
    low, high = min(0.0, *values), max(0.0, *values)
    room = 0.22 * (high - low)
    axes.set_xlim(low - (room if low < 0 else 0), high + room)
    axes.axvline(0, color=PALETTE["muted"], linewidth=0.8)
    axes.set_ylim(len(fields) - 0.4, -0.6)
    axes.set_yticks(range(len(fields)), [f.replace("_", " ") for f in fields])
    axes.tick_params(axis="y", length=0, labelcolor=PALETTE["ink"])
    axes.grid(False, axis="y")
    x_label(axes, "elasticity: % per %")
    said = "; ".join(
        f"1 % more {f.replace('_', ' ')}: {slopes[f][quantities[0]]:+.2f} % time per token, "
        f"{slopes[f][quantities[1]]:+.2f} % energy"
        for f in fields[:3]
    )
    return Plot(
        file_stem(pair["model"], pair["device"], "sensitivities"), "Sensitivities", f"{said}.",
        figure,
    )  # fmt: skip
