"""What a notebook shows of a prediction or an answer, and the same as a pandas DataFrame.

pandas is imported only where a frame is asked for.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hymell_jax.operators import PARTS
from hymell_jax.readable import energy_text, figure_text, time_text

if TYPE_CHECKING:
    import pandas as pd

SHOWN_ROWS = 20
"""Rows of a long table that a notebook shows."""


def html_table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A plain table; everything is escaped."""

    def cells(kind: str, values: Iterable[Any]) -> str:
        return "".join(f"<{kind}>{html.escape(str(value))}</{kind}>" for value in values)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{cells('th', headings)}</tr>"
        f"</thead><tbody>{body}</tbody></table>"
    )


# Predictions -------------------------------------------------------------------------------------


def prediction_columns(prediction: Any) -> dict[str, np.ndarray]:
    """Every number of a prediction by name, arrays [batch] or [1], SI units.

    Bounds of the 90 % intervals end in `_low` and `_high`; they are there where a level with
    intervals answered.
    """
    p = prediction
    plain = {
        "prefill_time_s": p.prefill.time_s,
        "prefill_energy_j": p.prefill.energy_j,
        "time_per_token_s": p.decode.time_s,
        "energy_per_token_j": p.decode_energy_per_token_j,
        "total_time_s": p.total_time_s,
        "total_energy_j": p.total_energy_j,
        "output_tokens_per_s": p.output_tokens_per_s,
        "steady_time_per_token_s": p.steady_time_per_token_s,
        "steady_energy_per_token_j": p.steady_energy_per_token_j,
        "memory_bytes": p.memory.total_bytes,
        "capacity_bytes": p.memory.capacity_bytes,
        "fits": p.memory.fits,
        "domain_distance": p.domain_distance,
        "in_domain": p.in_domain,
    }
    found = {name: np.atleast_1d(np.asarray(value)) for name, value in plain.items()}
    for phase, names in (
        (p.prefill, ("prefill_time_s", "prefill_energy_j")),
        (p.decode, ("time_per_token_s", "energy_per_token_j")),
    ):
        widths = np.atleast_2d(np.asarray(phase.log_half_widths, np.float64))
        for place, name in enumerate(names):
            if (widths[:, place] > 0).all():
                factor = np.exp(widths[:, place])
                found |= {f"{name}_low": found[name] / factor, f"{name}_high": found[name] * factor}
    return found


def prediction_frame(prediction: Any) -> pd.DataFrame:
    """One row for each workload, columns of `prediction_columns`."""
    import pandas as pd

    return pd.DataFrame(prediction_columns(prediction))


def prediction_html(prediction: Any) -> str:
    """A prediction as tables: of one workload with its parts, of a batch its first rows."""
    columns = prediction_columns(prediction)
    count = len(columns["prefill_time_s"])
    if np.ndim(prediction.total_time_s):
        names = list(columns)
        rows = [
            [figure_text(float(columns[name][row])) for name in names]
            for row in range(min(count, SHOWN_ROWS))
        ]
        return html_table(f"{count} predictions, SI units", names, rows)
    one = {name: value[0] for name, value in columns.items()}

    def within(name: str, show: Callable[[float], str]) -> list[str]:
        bounds: list[Any] = [one.get(f"{name}_{end}") for end in ("low", "high")]
        return [show(float(one[name])), "" if bounds[0] is None else " to ".join(map(show, bounds))]

    inside = "inside" if one["in_domain"] else "outside"
    rows = [
        ["time to first token", *within("prefill_time_s", time_text)],
        ["time per token", *within("time_per_token_s", time_text)],
        ["energy of the prefill", *within("prefill_energy_j", energy_text)],
        ["energy per token", *within("energy_per_token_j", energy_text)],
        ["output tokens/s", figure_text(float(one["output_tokens_per_s"])), ""],
        ["whole batch", f"{time_text(float(one['total_time_s']))}, "
         f"{energy_text(float(one['total_energy_j']))}", ""],
        ["memory", f"{one['memory_bytes'] / 1e9:.1f} of {one['capacity_bytes'] / 1e9:.1f} GB",
         "fits" if one["fits"] else "does not fit"],
        ["measured range", f"distance {one['domain_distance']:.2f}", inside],
    ]  # fmt: skip
    phases = {"prefill": prediction.prefill.parts, "decode": prediction.decode.parts}
    return html_table("Prediction", ["", "value", "90 % interval"], rows) + "".join(
        html_table(f"{name}: biggest parts", ["part", "time", "energy"], _parts(parts))
        for name, parts in phases.items()
    )


def _parts(parts: Any) -> list[list[str]]:
    time_s, energy_j = (np.asarray(getattr(parts, n), float) for n in ("time_s", "energy_j"))
    return [
        [PARTS[i], time_text(time_s[i]), energy_text(energy_j[i])]
        for i in np.argsort(-time_s)[:6]
        if time_s[i] > 0
    ]


# Answers -----------------------------------------------------------------------------------------


class Answer(dict):
    """A plain dictionary of an answer that a notebook shows as a table."""

    def __init__(self, kind: str, content: Mapping[str, Any]) -> None:
        """Args: kind: one of `KINDS`; content: the answer."""
        super().__init__(content)
        self.kind = kind

    def __reduce__(self) -> Any:
        return (Answer, (self.kind, dict(self)))

    def to_frame(self) -> pd.DataFrame:
        """The answer as a table; its rows depend on what was asked, see `KINDS`."""
        import pandas as pd

        if self.kind == "sweep":
            return pd.read_parquet(self["out"])
        return pd.DataFrame(KINDS[self.kind](self))

    def _repr_html_(self) -> str:
        rows = KINDS[self.kind](self)
        names = list(dict.fromkeys(name for row in rows for name in row))
        shown = [[_shown(row.get(name, "")) for name in names] for row in rows[:SHOWN_ROWS]]
        where = " on ".join(self[key] for key in ("model", "device") if key in self)
        more = f", {len(rows) - SHOWN_ROWS} more rows" if len(rows) > SHOWN_ROWS else ""
        return html_table(f"{self.kind} {where}{more}".strip(), names, shown)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    plain = isinstance(value, float | int | np.number) and not isinstance(value, bool | np.bool_)
    return figure_text(float(value), 4) if plain else str(value)


def _prediction(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parts of both passes."""
    kept = ("time_s", "energy_j", "share", "flops", "memory_bytes", "bound")
    return [
        {"phase": phase, "part": name} | {key: part[key] for key in kept}
        for phase in ("prefill", "decode")
        for name, part in answer["parts"][phase].items()
    ]


def _design(name: str, design: Mapping[str, Any]) -> dict[str, Any]:
    return {"design": name, **design["variables"], **design["quantities"]} | {
        "feasible": design["feasible"]
    }


def _search(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Start, relaxed and concrete design."""
    return [_design(name, answer[name]) for name in ("start", "relaxed", "concrete")]


def _front(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The start, then the designs of the front."""
    named = [("start", answer["start"]), *((str(i), d) for i, d in enumerate(answer["front"]))]
    return [_design(name, design) for name, design in named]


def _explanation(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Elasticities of every size."""
    return [{"field": field, **slopes} for field, slopes in answer["elasticities"].items()]


def _sweep(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was done; a frame holds all rows of the file that the sweep wrote."""
    return [dict(answer)]


def _ranking(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each device."""
    return [
        {key: ", ".join(v) if isinstance(v, list) else v for key, v in entry.items()}
        for entry in answer["devices"]
    ]


KINDS: dict[str, Callable[[Mapping[str, Any]], list[dict[str, Any]]]] = {
    "prediction": _prediction,
    "search": _search,
    "front": _front,
    "explanation": _explanation,
    "sweep": _sweep,
    "ranking": _ranking,
}
"""What was asked, and the rows of its table."""
