"""The page of a report: its sections, from the numbers of `report` and the figures of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hymell_jax.readable import (
    HELD_BY_NAMES,
    count_text,
    energy_text,
    figure_text,
    file_stem,
    time_text,
)
from hymell_jax.report_curves import CURVES
from hymell_jax.report_html import (
    bullets,
    document,
    figure,
    folded,
    grid,
    section,
    table,
    text,
)
from hymell_jax.report_pair_plots import part_rows
from hymell_jax.report_style import Plot, unit_of

LEVELS = {
    1: "level 1, operator equations",
    2: "level 2, operator equations corrected by networks per block",
    3: "level 3, blocks inside a serving engine",
}
_DISTANCES = (
    "the largest matrix over the largest measured one",
    "the part of a pass outside the blocks that were measured",
    "how unlike the whole models that were measured",
)


def page_of(content: Mapping[str, Any], plots: Mapping[str, Sequence[Plot]]) -> str:
    """The report as one self-contained HTML page.

    Args:
        content: of `report.report`.
        plots: of `report_plots.plots_of`.
    """
    models, devices = content["models"], content["devices"]
    title = f"{_listed(models, 'models')} on {_listed(devices, 'GPUs')}"
    sections = {"glance": ("At a glance", _glance(content))}
    for model in models:
        sections[f"curves-{file_stem(model)}"] = (
            f"{model} over batch, prompt and context",
            _model(content, model, plots[model]),
        )
    for pair in content["pairs"]:
        name = f"{pair['model']} on {pair['device']}"
        sections[f"pair-{file_stem(pair['model'], pair['device'])}"] = (
            name, _pair(pair, plots[name]),
        )  # fmt: skip
    sections["intervals"] = ("Intervals", _intervals(content))
    sections["domain"] = ("Domain", _domain(content))
    sections["provenance"] = ("Provenance", _provenance(content))
    sections["left-out"] = ("What is left out", _left_out(content))
    main = "".join(section(i, name, body) for i, (name, body) in sections.items())
    links = {i: name for i, (name, _) in sections.items()}
    foot = (
        f"<p>hymell_jax {text(content['version'])}. Predicted from each model's configuration and "
        "the data sheet of each GPU with coefficients fitted to public measurements; nothing was "
        "run for this page.</p>"
    )
    return document(title, f"<p>{text(_workload(content))}</p>", links, main, foot)


def _listed(names: Sequence[str], what: str) -> str:
    if len(names) > 3:
        return f"{len(names)} {what}"
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _workload(content: Mapping[str, Any]) -> str:
    w = content["workload"]
    gpus = f" on {w['tensor_parallel']:g} GPUs" if w["tensor_parallel"] > 1 else ""
    return (
        f"Batch of {w['batch_size']:g} sequences, {w['prompt_tokens']:g} prompt tokens and "
        f"{w['output_tokens']:g} output tokens each{gpus}; figures vary one size at a time."
    )


def _within(value: str, interval: Sequence[float] | None, show: Any) -> str:
    """A value with its interval in small letters below it."""
    if interval is None:
        return text(value)
    low, high = map(show, interval)
    return f"{text(value)}<small>{text(low)} to {text(high)}</small>"


def _bounds(answer: Mapping[str, Any], phase: str, name: str) -> Sequence[float] | None:
    return answer["interval"][phase][name] if answer["interval"] else None


def _yes(value: bool, yes: str = "yes", no: str = "no") -> str:
    return f'<span class="{"good" if value else "warn"}">{yes if value else no}</span>'


def _names(pair: Mapping[str, Any]) -> list[str]:
    return [text(pair["model"]), text(pair["device"])]


# Sections ----------------------------------------------------------------------------------------


def _glance(content: Mapping[str, Any]) -> str:
    def timed(a: Mapping[str, Any], phase: str, name: str) -> str:
        return _within(time_text(a[phase][name]), _bounds(a, phase, name), time_text)

    def unmeasured(a: Mapping[str, Any]) -> str:
        transferred = a["provenance"].get("time") == "transferred"
        return "<small>device not measured</small>" if transferred else ""

    rows = []
    for pair in content["pairs"]:
        a = pair["answer"]
        tokens = a["workload"]["batch_size"] * a["workload"]["output_tokens"]
        memory = a["memory"]
        needed = sum(memory[f"{k}_bytes"] for k in ("weights", "kv_cache", "activations"))
        thousand = 1e3 * a["total"]["energy_j"] / tokens
        rows.append(
            [
                f"{text(pair['model'])}<small>{text(pair['device'])}</small>",
                timed(a, "prefill", "time_s"),
                timed(a, "decode", "time_per_token_s"),
                text(figure_text(a["total"]["output_tokens_per_s"])),
                f"{figure_text(thousand)} J<small>{figure_text(a['total']['energy_wh'])} Wh in all"
                "</small>",
                text(f"{a['total']['energy_j'] / a['total']['time_s']:.0f} W"),
                f"{needed / 1e9:.1f} of {memory['capacity_bytes'] / 1e9:.0f} GB"
                f"<small>{_yes(memory['fits'], 'fits', 'does not fit')}</small>",
                _yes(a["in_domain"], "inside", "outside") + unmeasured(a),
            ]
        )  # fmt: skip
    heads = ["model, GPU", "first token", "next token", "tokens/s", "energy per 1k tokens",
             "power", "memory", "measured range"]  # fmt: skip
    covered = next(
        (a["answer"]["interval"] for a in content["pairs"] if a["answer"]["interval"]), None
    )
    below = f" Small numbers are {100 * covered['coverage']:.0f} % intervals." if covered else ""
    return (
        table("The workload above on each GPU", heads, rows)
        + "<p>Tokens per second, joules per 1000 output tokens and watt-hours include the prefill; "
        f"energy is that of all GPUs, without the host.{below}</p>" + _warnings(content)
    )


def _warnings(content: Mapping[str, Any]) -> str:
    said: dict[str, list[str]] = {}
    several = len(content["devices"]) > 3
    for pair in content["pairs"]:
        for warning in pair["answer"]["warnings"]:
            if several:  # so that one sentence serves all
                warning = warning.replace(pair["device"], "this GPU")
            said.setdefault(warning, []).append(f"{pair['model']} on {pair['device']}")
    for out in content["left_out"]:
        said[out["reason"]] = [f"{out['model']} on {out['device']} (not in this report)"]
    if not said:
        return "<p>Nothing speaks against these numbers.</p>"
    items = [f"{text(w)} <small>({text('; '.join(who))})</small>" for w, who in said.items()]
    return f"<h3>Before you rely on it</h3>{bullets(items)}"


def _model(content: Mapping[str, Any], model: str, plots: Sequence[Plot]) -> str:
    pairs = [p for p in content["pairs"] if p["model"] == model]
    front = content["fronts"][model]["best"]
    rows = [
        [text(p["device"]), f"{p['batch_size']:g}", text(time_text(p["time_per_token_s"])),
         text(f"{figure_text(1e3 * p['energy_per_token_j'])} J"),
         text(figure_text(p["output_tokens_per_s"]))]
        for p in front
    ]  # fmt: skip
    return (
        "<p>Bands are 90 % intervals where a level with intervals answers. Filled points lie "
        "within what was measured, hollow ones are extrapolated; dotted lines do not fit in "
        "memory.</p>"
        f"{grid(plots[:-1])}"
        f"{folded('The same as numbers', ''.join(_curve_table(pairs, *c) for c in CURVES))}"
        f'<h3>Pareto front over GPUs</h3><div class="grid">{figure(plots[-1])}<div>'
        + table("No GPU and batch is better in both", ["GPU", "batch", "next token",
                "per 1k tokens", "tokens/s"], rows)
        + "</div></div>"
    )  # fmt: skip


def _curve_table(
    pairs: Sequence[Mapping[str, Any]], curve: str, quantity: str, title: str, kind: str
) -> str:
    factor, unit = unit_of(kind, [v for p in pairs for v in p["curves"][curve][quantity]["value"]])
    rows = []
    for place, size in enumerate(pairs[0]["curves"][curve]["at"]):
        cells = [count_text(size)]
        for p in pairs:
            c = p["curves"][curve]
            band = c[quantity]
            show = figure_text(factor * band["value"][place])
            interval = [band["low"][place], band["high"][place]] if band["low"] else None
            mark = "" if c["fits"][place] else " †"
            cells.append(_within(show + mark, interval, lambda v, f=factor: figure_text(f * v)))
        rows.append(cells)
    caption = f"{title}, {unit}; † does not fit in memory"
    return table(caption, [curve, *(p["device"] for p in pairs)], rows)


def _pair(pair: Mapping[str, Any], plots: Sequence[Plot]) -> str:
    decode, prefill, roofline, map_decode, map_prefill, slopes = plots
    answer = pair["answer"]
    return (
        f"<p>Answered by {LEVELS[answer['level']]}; {text(answer['runtime'])}, "
        f"{text(answer['dtype'])}.</p>"
        f"<h3>Time and energy by part</h3>{grid([decode, prefill])}"
        f"{folded('Every part as numbers', ''.join(_part_table(pair, n) for n in answer['parts']))}"
        f"<h3>Roofline</h3>{grid([roofline])}"
        f"<h3>Regime map</h3>{_key(pair)}{grid([map_decode, map_prefill])}"
        f"<h3>Sensitivities</h3><p>How much one percent more of a size costs or saves, taken "
        f"from a tenth less to a tenth more, since tiles make the cost climb in steps.</p>"
        f"{grid([slopes])}"
        f"{folded('Every size as numbers', _slope_table(pair))}"
    )


def _key(pair: Mapping[str, Any]) -> str:
    kinds = {k for phase in ("prefill", "decode") for line in pair["map"][phase]["held_by"]
             for k in line}  # fmt: skip
    items = "".join(
        f'<li><i style="background:var(--fill-{k})"></i>{text(HELD_BY_NAMES[k])}</li>'
        for k in sorted(kinds)
    )
    return f'<p>What most of the time of a pass goes to.</p><ul class="key">{items}</ul>'


def _part_table(pair: Mapping[str, Any], phase: str) -> str:
    parts = pair["answer"]["parts"][phase]
    rows = []
    for row in part_rows(pair, phase):
        known = parts.get(row["part"])
        rows.append(
            [
                text(row["part"].replace("_", " ")),
                text(time_text(row["time_s"])), f"{100 * row['time_share']:.1f} %",
                text(energy_text(row["energy_j"])), f"{100 * row['energy_share']:.1f} %",
                text(HELD_BY_NAMES[row["bound"]]),
                text(max(known["regimes"], key=known["regimes"].get).replace("_", " "))
                if known else "",
            ]
        )  # fmt: skip
    heads = ["part", "time", "of time", "energy", "of energy", "held up by", "regime"]
    return table(f"{phase.capitalize()} by part", heads, rows)


def _slope_table(pair: Mapping[str, Any]) -> str:
    slopes = pair["elasticities"]
    names = list(next(iter(slopes.values())))
    rows = [
        [text(field), *(f"{values[name]:+.3f}" for name in names)]
        for field, values in sorted(
            slopes.items(), key=lambda item: -max(map(abs, item[1].values()))
        )
    ]
    return table("Percent per percent", ["size", *(n.replace("_", " ") for n in names)], rows)


def _intervals(content: Mapping[str, Any]) -> str:
    rows, without = [], []
    for pair in content["pairs"]:
        a = pair["answer"]
        if a["interval"] is None:
            without.append(f"{pair['model']} on {pair['device']}")
            continue
        i = a["interval"]
        cells = [
            " to ".join(map(show, bounds))
            for phase in ("prefill", "decode")
            for show, bounds in zip((time_text, energy_text), i[phase].values(), strict=True)
        ]
        rows.append([*_names(pair), *map(text, cells)])
    heads = ["model", "GPU", "first token", "energy of prefill", "next token", "energy a token"]
    said = (
        "<p>An interval holds the truth in nine cases of ten on models that the fit had not seen, "
        "as counted on measured systems; on a GPU without measured systems it is as wide as it had "
        "to be for whole GPUs left out.</p>"
    )
    if rows:
        said += table("90 % intervals", heads, rows, left=2)
    if without:
        said += (
            f"<p>No intervals for {text('; '.join(without))}: the level that answers there has "
            "none.</p>"
        )
    return said


def _domain(content: Mapping[str, Any]) -> str:
    rows = []
    for pair in content["pairs"]:
        a = pair["answer"]
        rows.append(
            [
                *_names(pair), _yes(a["in_domain"], "inside", "outside"),
                f"{a['domain_distance']:.2f}<small>a factor of "
                f"{figure_text(math.exp(a['domain_distance']), 2)}</small>",
                *(f"{d:.2f}" for d in a["domain_distances"]),
                *([""] * (3 - len(a["domain_distances"]))),
                _reach(pair, "batch"), _reach(pair, "prompt"), _reach(pair, "context"),
            ]
        )  # fmt: skip
    heads = ["model", "GPU", "workload", "distance", "level 1", "level 2", "level 3",
             "batch up to", "prompt up to", "context up to"]  # fmt: skip
    distances = [f"level {n + 1}: {words}" for n, words in enumerate(_DISTANCES)]
    return (
        "<p>How far the question leaves what was measured: a distance of 0 is inside, one of "
        f"{math.log(2.0):.2f} (a factor of two) is the limit. Each level has its own: "
        f"{text('; '.join(distances))}. The last columns are the largest sizes of the figures that "
        "are inside and fit.</p>" + table("Inside or outside", heads, rows, left=2)
    )


def _reach(pair: Mapping[str, Any], curve: str) -> str:
    c = pair["curves"][curve]
    inside = [
        size for size, known, fits in zip(c["at"], c["in_domain"], c["fits"], strict=True)
        if known and fits
    ]  # fmt: skip
    return count_text(max(inside)) if inside else "none"


def _provenance(content: Mapping[str, Any]) -> str:
    return "".join(
        folded(f"{pair['model']} on {pair['device']}", _card(pair["card"]))
        for pair in content["pairs"]
    )


def _card(card: Mapping[str, Any]) -> str:
    origins = [f"{text(what)}: {text(where)}" for what, where in card["origins"].items()]
    sources = [
        [text(s["name"]), text(s.get("licence", "")), text(s.get("table", "")),
         text(s.get("runtime", "")), text(s.get("rows_train", s.get("rows", ""))),
         text(s.get("rows_test", ""))]
        for s in card["sources"]
    ]  # fmt: skip
    found = (
        f"<p>Checkpoint {text(card['device'])}, {text(card['runtime'])}, {text(card['dtype'])}; "
        f"{text(card['split'])}.</p>{bullets(origins)}"
    ) + table(
        "Sources", ["source", "licence", "table", "runtime", "rows fitted", "rows kept for test"],
        sources, left=4,
    )  # fmt: skip
    errors = (
        ("operator_errors", "Errors on test rows, operators",
         ("table", "target", "n", "mape", "mdape", "r2")),
        ("block_errors", "Errors on test rows, blocks", ("block", "n", "mape", "level1_mape")),
        ("system_errors", "Errors on whole models left out of the fit",
         ("table", "target", "kind", "gpus", "width", "n", "models", "mape", "mdape")),
        ("coverage", "How often an interval held, on models left out",
         ("target", "width", "n", "groups", "coverage", "half_width")),
    )  # fmt: skip
    for key, caption, columns in errors:
        if card[key]:
            found += table(
                f"{caption}; errors in percent", [c.replace("_", " ") for c in columns],
                [[text(row[c]) for c in columns] for row in card[key]],
            )  # fmt: skip
    recipes = {k: card[k] for k in ("recipe", "serving_recipe", "libraries") if card.get(k)}
    return found + folded("Recipe", f"<pre>{text(json.dumps(recipes, indent=1))}</pre>")


def _left_out(content: Mapping[str, Any]) -> str:
    excluded: Iterable[str] = dict.fromkeys(p["answer"]["excluded"] for p in content["pairs"])
    items = [f"Not in any number: {text(e)}." for e in excluded]
    items.append("Energy is that of the GPU boards: no host, no cooling, no losses of the supply.")
    items += [
        f"{text(out['model'])} on {text(out['device'])}: {text(out['reason'])}"
        for out in content["left_out"]
    ]
    return bullets(items)
