"""Figures of one model on several devices: curves over its sizes, and the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hymell_jax.readable import count_text, figure_text, file_stem, tick_text
from hymell_jax.report_labels import log_ticks, short_names
from hymell_jax.report_style import (
    FONT,
    MANY_LINES,
    PALETTE,
    Plot,
    count_axis,
    end_labels,
    label_placer,
    log_axis,
    new_axes,
    series,
    unit_of,
    write_label,
    x_label,
)

CURVES = (
    ("batch", "time_per_token_s", "Time per token over batch", "time"),
    ("batch", "energy_per_token_j", "Energy per 1k output tokens over batch", "energy"),
    ("prompt", "prefill_time_s", "Time to first token over prompt", "time"),
    ("prompt", "prefill_energy_j", "Energy of the prefill over prompt", "prefill"),
    ("context", "time_per_token_s", "Time per token over context", "time"),
    ("context", "energy_per_token_j", "Energy per 1k output tokens over context", "energy"),
)
"""Curve, quantity, title, kind of unit."""

_SIZES = {
    "batch": "sequences in the batch",
    "prompt": "prompt tokens of each sequence",
    "context": "tokens of context of each sequence",
}


def curve_plot(content, pairs, curve: str, quantity: str, title: str, kind: str) -> Plot:
    """A quantity along a size, one line a device with its interval as a band."""
    everything = [v for p in pairs for v in p["curves"][curve][quantity]["value"]]
    factor, unit = unit_of(kind, everything)
    model = pairs[0]["model"]
    names = short_names([p["device"] for p in pairs])
    right = 0.2 + 0.092 * max(map(len, names.values()))
    height = 3.3 + 0.19 * max(len(pairs) - 7, 0)  # room for a label a line
    below = _context_line(content, model, curve)
    figure, axes = new_axes(height, 0.62, right, f"{title}, {unit}", below)
    axes.set_yscale("log")
    said, ends, limits = [], [], []
    places = [content["devices"].index(p["device"]) for p in pairs]
    for index, p in zip(places, pairs, strict=True):
        c = p["curves"][curve]
        sizes, band = c["at"], c[quantity]
        shown = {k: [v * factor for v in band[k]] for k in band if band[k] is not None}
        _line(axes, index, sizes, shown["value"], c["fits"], c["in_domain"])
        if "low" in shown:
            axes.fill_between(
                sizes, shown["low"], shown["high"], color=series(index), alpha=0.14, linewidth=0
            )
        limits += [v for values in shown.values() for v in values]
        ends.append(shown["value"][-1])
        first, last = (
            f"{figure_text(shown['value'][i])} {unit} at {count_text(sizes[i])}" for i in (0, -1)
        )
        said.append(f"{p['device']}: {first}, {last}")
    low, high = min(limits) * 0.9, max(limits) * 1.1
    axes.set_ylim(low, high)
    ticks = log_ticks(low, high)
    log_axis(axes.yaxis, ticks, [tick_text(t) for t in ticks])
    count_axis(axes, sizes)
    x_label(axes, _SIZES[curve])
    end_labels(axes, ends, list(names.values()), places)
    return Plot(
        file_stem(model, quantity.rpartition("_")[0], "over", curve),
        title, f"{'; '.join(said)}.", figure,
    )  # fmt: skip


def _line(axes, index: int, sizes, values, fits, in_domain) -> None:
    """Solid where the model fits, dotted beyond; points hollow where sizes are extrapolated."""
    color = series(index)
    style = "-" if index < MANY_LINES else (0, (5, 2))
    held = sum(fits)
    if held:
        axes.plot(sizes[:held], values[:held], linestyle=style, color=color, linewidth=1.8)
    if held < len(sizes):
        start = max(held - 1, 0)
        axes.plot(sizes[start:], values[start:], linestyle=":", color=color, linewidth=1.6)
    for known, face in ((True, color), (False, PALETTE["surface"])):
        at = [i for i, inside in enumerate(in_domain) if inside == known]
        axes.plot(
            [sizes[i] for i in at], [values[i] for i in at], "o", markersize=4.2,
            markerfacecolor=face, markeredgecolor=color, markeredgewidth=1.1,
        )  # fmt: skip


def _context_line(content: Mapping[str, Any], model: str, moving: str) -> str:
    work = content["workload"]
    fixed = {
        "batch": f"batch {work['batch_size']:g}",
        "prompt": f"prompt {count_text(work['prompt_tokens'])}",
        "output": f"output {count_text(work['output_tokens'])}",
    }
    fixed.pop(moving, None)
    if moving == "context":
        fixed = {"batch": fixed["batch"]}
    if work["tensor_parallel"] > 1:
        fixed["gpus"] = f"{work['tensor_parallel']:g} GPUs"
    return f"{model[:36]}, {', '.join(fixed.values())}"


def front_plot(content, model: str) -> Plot:
    """Time against energy of a token: a line a device through its batch sizes, and the front."""
    front = content["fronts"][model]
    names = short_names(content["devices"])
    figure, axes = new_axes(
        3.6, 0.62, 0.2, "J per 1000 output tokens against ms per token",
        _context_line(content, model, "batch"),
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    rows = [
        (p["time_per_token_s"] * 1e3, p["energy_per_token_j"] * 1e3, p) for p in front["points"]
    ]
    best = [(p["time_per_token_s"] * 1e3, p["energy_per_token_j"] * 1e3, p) for p in front["best"]]
    if not rows:
        axes.text(0.5, 0.5, "fits on none of the devices", transform=axes.transAxes,
                  ha="center", size=FONT, color=PALETTE["ink"])  # fmt: skip
        return Plot(
            file_stem(model, "pareto"), "Pareto front", f"{model} fits on no device.", figure
        )
    xs, ys = [r[0] for r in rows], [r[1] for r in rows]
    axes.set_xlim(min(xs) / 1.25, max(xs) * 1.25)
    axes.set_ylim(min(ys) / 1.3, max(ys) * 1.3)
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        ticks = log_ticks(low, high)
        log_axis(axis, ticks, [tick_text(t) for t in ticks])
    axes.plot([b[0] for b in best], [b[1] for b in best], color=PALETTE["ink"], linewidth=0.9,
              linestyle="--")  # fmt: skip
    placer = label_placer(axes)
    lines = {}
    for index, device in enumerate(content["devices"]):
        line = [(x, y) for x, y, p in rows if p["device"] == device]
        if not line:
            continue
        lines[device] = (index, line)
        axes.plot(*zip(*line, strict=True), "o-", color=series(index), linewidth=1.4,
                  markersize=3.6, markerfacecolor=PALETTE["surface"])  # fmt: skip
        placer.block_line([tuple(axes.transData.transform(point)) for point in line])
    for x, y, p in best:
        axes.plot([x], [y], "o", color=series(content["devices"].index(p["device"])), markersize=6)
    for device, (index, line) in lines.items():
        write_label(axes, placer, *line[0], names[device], series(index))
    for x, y, p in best[:: max(len(best) // 5, 1)]:
        write_label(axes, placer, x, y, f"batch {p['batch_size']:g}", PALETTE["ink"])
    x_label(axes, "ms per token, decode")
    said = [
        f"{p['device']} with batch {p['batch_size']:g}: {figure_text(x)} ms per token, "
        f"{figure_text(y)} J per 1000 tokens"
        for x, y, p in (best[0], best[-1])
    ]
    description = f"Of {len(rows)} points {len(best)} are on the front, from {said[0]} to {said[1]}"
    description += ", energy of the prefill included."
    return Plot(file_stem(model, "pareto"), "Pareto front over devices", description, figure)
