"""Predictions as tables for people: ms, J, Wh, tokens a second, J per 1000 tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import click

from hymell_jax.cli_output import cell, joules, seconds, size, table, width
from hymell_jax.readable import HELD_BY_NAMES

BIGGEST = 6  # parts of a pass that are shown
_INSIDE = math.log(2.0)


def _work_text(c: Mapping[str, Any]) -> str:
    work = c["workload"]
    gpus = f", {work['tensor_parallel']:g} GPUs" if work["tensor_parallel"] > 1 else ""
    return (
        f"batch {work['batch_size']:g}, prompt {work['prompt_tokens']:g}, output "
        f"{work['output_tokens']:g}{gpus}"
    )


def _watt_hours(joules_: float) -> str:
    value = joules_ / 3600.0
    return f"{value:.4g} Wh" if value >= 0.1 else f"{value * 1e3:.4g} mWh"


def _both_units(joules_: float) -> str:
    """Joules, and watt-hours where these are not what `joules` shows."""
    shown = joules(joules_)
    return f"{shown}, {_watt_hours(joules_)}" if joules_ < 3600 else shown


def _rows(c: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, value, 90 % interval) of everything that a reader asks first."""
    prefill, decode, total = c["prefill"], c["decode"], c["total"]
    tokens = c["workload"]["batch_size"] * c["workload"]["output_tokens"]

    def within(phase: str, name: str, show: Any, factor: float = 1.0) -> str:
        if not c["interval"] or c["interval"][phase][name] is None:
            return ""
        return " to ".join(show(factor * bound) for bound in c["interval"][phase][name])

    def thousand(value: float) -> str:
        return f"{value:.4g} J"

    def watts(phase: Mapping[str, Any]) -> str:
        return cell(phase["power_w"], "{:.0f} W".format)

    rows = [
        ("time to first token (prefill)", seconds(prefill["time_s"]),
         within("prefill", "time_s", seconds)),
        ("time per token (decode)", seconds(decode["time_per_token_s"]),
         within("decode", "time_per_token_s", seconds)),
        ("whole batch", seconds(total["time_s"]), ""),
        ("output tokens/s, prefill included", f"{total['output_tokens_per_s']:.4g}", ""),
        ("energy of the prefill", cell(prefill["energy_j"], joules),
         within("prefill", "energy_j", joules)),
        ("energy per 1k tokens (decode)",
         cell(decode["energy_per_token_j"], lambda v: thousand(1e3 * v)),
         within("decode", "energy_per_token_j", thousand, 1e3)),
        ("energy per 1k output tokens, prefill included",
         cell(total["energy_j"], lambda v: thousand(1e3 * v / tokens)), ""),
        ("energy of the whole batch", cell(total["energy_j"], _both_units), ""),
        ("power: prefill, decode", f"{watts(prefill)}, {watts(decode)}", ""),
    ]  # fmt: skip
    return rows + [(what, value, "") for what, value in _footprint_rows(c.get("footprint"))]


def _footprint_rows(costs: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if costs is None:
        return []
    rows = []
    if costs["co2_g"] is not None:
        rows.append(
            (f"CO2 at {costs['carbon_intensity_g_per_kwh']:g} g/kWh",
             f"{costs['co2_g']:.3g} g, {costs['co2_g_per_1k_tokens']:.3g} g per 1k tokens")
        )  # fmt: skip
    if costs["cost"] is not None:
        rows.append(
            ("cost at the given prices",
             f"{costs['cost']:.3g}, {costs['cost_per_million_tokens']:.3g} per million tokens")
        )  # fmt: skip
    return rows


def _unmeasured(c: Mapping[str, Any]) -> bool:
    """Whether every coefficient is another device's."""
    return c["provenance"].get("time") == "transferred"


def _range_text(c: Mapping[str, Any]) -> str:
    """In plain words how far the question leaves what was measured."""
    distance, inside = c["domain_distance"], c["in_domain"]
    of = "the measured range" if _unmeasured(c) else "what was measured"
    factor = "" if inside else f", a factor of {math.exp(min(distance, 80.0)):.3g}"
    words = f"{'inside' if inside else 'OUTSIDE'} {of}"
    limits = f"(distance {distance:.2f}{factor}; up to {_INSIDE:.2f} is inside)"
    if _unmeasured(c):
        return f"shapes {words}; device not measured {limits}"
    return f"{words} {limits}"


def _title(c: Mapping[str, Any]) -> str:
    """Model, device, and whose measurements answer at which level."""
    served = c["provenance"].get("engine") if c["level"] == 3 else None
    runtime = c["runtime"]
    if served and served != runtime:
        runtime = f"kernels of {runtime}, served by {served}"
    return f"{c['model']} on {c['device']} ({runtime}, {c['dtype']}), level {c['level']}"


def _parts_rows(parts: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    found = [
        [name, seconds(p["time_s"]), cell(p["energy_j"], joules), f"{100 * p['share']:.1f} %",
         HELD_BY_NAMES[p["bound"]]]
        for name, p in list(parts.items())[:BIGGEST]
    ]  # fmt: skip
    rest = list(parts.values())[BIGGEST:]
    if rest:
        time_s, share = (sum(p[key] for p in rest) for key in ("time_s", "share"))
        energies = [p["energy_j"] for p in rest]
        energy = "-" if None in energies else joules(sum(energies))
        found.append([f"{len(rest)} others", seconds(time_s), energy, f"{100 * share:.1f} %", ""])
    return found


def show_prediction(c: Mapping[str, Any]) -> None:
    """One model on one device."""
    rows: list[tuple[str, ...]] = [*_rows(c)]
    headings = ["", "value"]
    if c["interval"]:
        headings.append(f"{100 * c['interval']['coverage']:.0f} % interval")
    else:
        rows = [row[:2] for row in rows]
    table(f"{_title(c)}\n{_work_text(c)}\n", headings, [list(row) for row in rows])
    memory = c["memory"]
    needed = memory["weights_bytes"] + memory["kv_cache_bytes"] + memory["activations_bytes"]
    each = " on each GPU" if c["workload"]["tensor_parallel"] > 1 else ""
    click.echo(
        f"\nMemory{each}: {size(needed)} of {size(memory['capacity_bytes'])}: weights "
        f"{size(memory['weights_bytes'])}, KV cache {size(memory['kv_cache_bytes'])} "
        f"({memory['kv_cache_bytes_per_token']:.0f} bytes a token{each}), activations "
        f"{size(memory['activations_bytes'])}"
    )
    click.echo(f"Range: {_range_text(c)}\n")
    for phase in ("prefill", "decode"):
        table(
            f"biggest parts of the {phase}, kernels alone",
            ["", "time", "energy", "share", "held up by"],
            _parts_rows(c["parts"][phase]),
        )
        click.echo()
    click.echo(f"Left out: {c['excluded']}.")
    for warning in c["warnings"]:
        click.echo(f"Note: {warning}", err=True)


def show_comparison(content: Mapping[str, Any]) -> None:
    """Several models or devices side by side, one column each, as many as a line holds."""
    answers = content["predictions"]
    heads = ["", *(a["model"] for a in answers)]
    rows = [["on", *(a["device"] for a in answers)], *_columns(answers)]
    sizes = [max(len(row[i]) for row in (heads, *rows)) + 2 for i in range(len(heads))]
    click.echo(_work_text(answers[0]))
    first = 1
    while first < len(heads):
        last = first + 1
        while last < len(heads) and sizes[0] + sum(sizes[first : last + 1]) <= width():
            last += 1
        click.echo()
        kept = [row[:1] + row[first:last] for row in (heads, *rows)]
        table("", kept[0], kept[1:])
        first = last
    if any(a["interval"] for a in answers):
        click.echo("\n± is the 90 % interval: a factor up or down.")
    said: dict[str, list[str]] = {}
    for a in answers:
        for warning in a["warnings"]:
            said.setdefault(warning, []).append(f"{a['model']} on {a['device']}")
    for warning, who in said.items():
        click.echo(f"Note: {warning} ({'; '.join(who)})", err=True)
    for out in content["left_out"]:
        click.echo(f"Note: {out['model']} on {out['device']}: {out['reason']}", err=True)


def _columns(answers: list[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of the comparison, one cell an answer."""

    def factor(a: Mapping[str, Any], phase: str, name: str) -> str:
        if not a["interval"] or a["interval"][phase][name] is None:
            return ""
        low, high = a["interval"][phase][name]
        return f" ±{math.sqrt(high / low):.2f}x"

    def tokens(a: Mapping[str, Any]) -> float:
        return a["workload"]["batch_size"] * a["workload"]["output_tokens"]

    def memory(a: Mapping[str, Any]) -> str:
        m = a["memory"]
        needed = m["weights_bytes"] + m["kv_cache_bytes"] + m["activations_bytes"]
        return f"{needed / 1e9:.1f} of {m['capacity_bytes'] / 1e9:.0f} GB"

    shows = {
        "level": lambda a: f"{a['level']}, {a['dtype']}",
        "parameters": lambda a: f"{a['parameters']['total'] / 1e9:.2f}e9",
        "time to first token": lambda a: (
            seconds(a["prefill"]["time_s"]) + factor(a, "prefill", "time_s")
        ),
        "time per token": lambda a: (
            seconds(a["decode"]["time_per_token_s"]) + factor(a, "decode", "time_per_token_s")
        ),
        "output tokens/s": lambda a: f"{a['total']['output_tokens_per_s']:.4g}",
        "energy per 1k output tokens": lambda a: cell(
            a["total"]["energy_j"], lambda v: f"{1e3 * v / tokens(a):.4g} J"
        ),
        "energy of the whole batch": lambda a: cell(a["total"]["energy_j"], _watt_hours),
        "power in decode": lambda a: cell(a["decode"]["power_w"], "{:.0f} W".format),
        "memory": memory,
        "measured range": lambda a: (
            ("shapes " if _unmeasured(a) else "") + ("inside" if a["in_domain"] else "OUTSIDE")
        ),
        "device": lambda a: "not measured" if _unmeasured(a) else "measured",
        "biggest part of decode": lambda a: next(iter(a["parts"]["decode"])),
    }
    rows = [[what, *(show(a) for a in answers)] for what, show in shows.items()]
    costs = [a.get("footprint") for a in answers]
    for key, what in (
        ("co2_g_per_1k_tokens", "g CO2 per 1k output tokens"),
        ("cost_per_million_tokens", "cost per million output tokens"),
    ):
        if any(c and c[key] is not None for c in costs):
            rows.append([what, *(cell(c and c[key], lambda v: f"{v:.3g}") for c in costs)])
    return rows
