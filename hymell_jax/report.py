"""What a report says, as plain numbers: models on devices over batch, prompt and context.

All workloads of a pair of model and device go through `predict_batch` in one call of one size, so
that a program is compiled once for each combination of optional blocks and level. Numbers are SI
and JSON-ready; `report_plots` draws them, `report_page` lays them out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hymell_jax import checkpoint, devices, models, report_card, sensitivity, summary
from hymell_jax import model as cost_model
from hymell_jax.analytical import BOUNDS
from hymell_jax.gemm import peak_rate
from hymell_jax.hf import HFModel
from hymell_jax.model import CostModel, Prediction
from hymell_jax.pareto import non_dominated
from hymell_jax.readable import file_stem
from hymell_jax.types import Architecture, Workload, workload
from hymell_jax.version import __version__

Progress = Callable[[str, int, int], None]

BATCHES = tuple(2.0**i for i in range(10))
PROMPTS = tuple(2.0**i for i in range(7, 17))
CONTEXTS = tuple(2.0**i for i in range(7, 18))
MAP_TOKENS = tuple(2.0**i for i in range(8, 16))
ROWS = 192
"""Rows of one call: whatever the model, so that one program serves all of a structure."""
LARGEST_PAIRS = 24
HELD_BY = (*BOUNDS, "engine")
"""What may hold a pass up: bounds of its kernels, and what a serving engine adds around them."""


@dataclasses.dataclass(frozen=True)
class _Grid:
    """Rows [n] of one pair: the asked one, then curves, map and steps, by position."""

    archs: Architecture
    works: Workload
    fields: list[str]  # of the steps
    batch: slice
    prompt: slice
    context: slice
    map: slice
    steps: slice


def report(
    model_names: Iterable[Any],
    device_names: Iterable[Any],
    *,
    batch_size: float = 8,
    prompt_tokens: float = 1024,
    output_tokens: float = 256,
    tensor_parallel: float = 1,
    dtype: str | None = None,
    level: str | int = "best",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Everything that a page about models on devices shows.

    Args:
        model_names: presets, configurations, or `HFModel`s.
        device_names: what `devices.get_device` takes.
        batch_size, prompt_tokens, output_tokens, tensor_parallel: of the workload that the curves
            go through.
        dtype: "bf16" or "fp8"; by default each model's own.
        level: 1, 2, 3 or "best", as in `summary.summarise`.
        progress: called with ("predictions", pairs done, all pairs).

    Returns:
        `models`, `devices`, `workload`, `pairs` (one entry each, see `_pair`), `fronts` by model,
        and `left_out`: pairs that cannot be asked, and why.

    Raises:
        ValueError: unknown names, a name given twice, more than `LARGEST_PAIRS` pairs, or no pair
            that can be asked.
    """
    hfs = [m if isinstance(m, HFModel) else models.resolve_model(m) for m in model_names]
    specs = [devices.get_device(name) for name in device_names]
    _check_names([hf.name for hf in hfs], [spec.name for spec in specs])
    asked = dict(
        batch_size=batch_size,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tensor_parallel=tensor_parallel,
    )
    pairs, left_out, total = [], [], len(hfs) * len(specs)
    for hf in hfs:
        for spec in specs:
            try:
                pairs.append(_pair(hf, spec, asked, dtype, level))
            except ValueError as error:
                if total == 1:
                    raise
                left_out.append({"model": hf.name, "device": spec.name, "reason": str(error)})
            if progress is not None:
                progress("predictions", len(pairs) + len(left_out), total)
    if not pairs:
        raise ValueError(f"None of the pairs can be predicted: {left_out[0]['reason']}")
    kept = [name for name in (hf.name for hf in hfs) if any(p["model"] == name for p in pairs)]
    return {
        "version": __version__,
        "models": kept,
        "devices": [s.name for s in specs if any(p["device"] == s.name for p in pairs)],
        "workload": {name: float(value) for name, value in asked.items()},
        "pairs": pairs,
        "fronts": {name: _front([p for p in pairs if p["model"] == name]) for name in kept},
        "left_out": left_out,
    }


def _check_names(hfs: Sequence[str], specs: Sequence[str]) -> None:
    if not hfs or not specs:
        raise ValueError("A report needs at least one model and one device.")
    for what, names in (("model", hfs), ("device", specs)):
        stems = [file_stem(name) for name in names]  # files and links are named after them
        twice = [name for name, stem in zip(names, stems, strict=True) if stems.count(stem) > 1]
        if twice:
            raise ValueError(f"The {what} {twice[-1]} is given twice.")
    if len(hfs) * len(specs) > LARGEST_PAIRS:
        raise ValueError(
            f"A report holds at most {LARGEST_PAIRS} pairs of model and device; got {len(hfs)} "
            f"models on {len(specs)} devices. Write several reports."
        )


def _pair(
    hf: HFModel, spec: devices.DeviceSpec, asked: Mapping[str, float], dtype, level
) -> dict[str, Any]:
    """One model on one device: answer, curves, map, roofline, elasticities, card."""
    chosen = dtype or hf.dtype
    fitted = checkpoint.load(spec, dtype=chosen)
    summary.check_power(fitted, "A report")
    grid = _grid(hf.architecture, asked, chosen)
    work = _rows(grid.works, 0)
    summary.check_parallel(hf, work)
    level, rows, notes = _predictions(fitted, grid, level)
    first = _rows(rows, 0)
    asked_model = fitted.at_level(level)
    answer = summary.describe(fitted, hf, work, level, first, notes)
    return {
        "model": hf.name,
        "device": spec.name,
        "answer": answer,
        "curves": {
            "batch": _curve(rows, grid.works, grid.batch, "batch_size"),
            "prompt": _curve(rows, grid.works, grid.prompt, "prompt_tokens"),
            "context": _curve(rows, grid.works, grid.context, "context_start_tokens"),
        },
        "map": _map(rows, grid.map),
        "roofline": _roofline(asked_model, work, first),
        "elasticities": _elasticities(
            grid.fields, _rows(rows, grid.steps), _rows(grid.works, grid.steps)
        ),
        "card": report_card.card_of(fitted, level),
    }


def _elasticities(fields: list[str], rows: Prediction, works: Workload) -> dict[str, Any]:
    """Percent of each quantity per percent of each size."""
    tokens = works.batch_size * works.output_tokens
    values = {
        "energy_per_token_j": rows.total_energy_j / tokens,
        "latency_s": rows.total_time_s,
        "latency_per_token_s": rows.decode.time_s,
        "prefill_time_s": rows.prefill.time_s,
        "decode_energy_per_token_j": rows.decode_energy_per_token_j,
    }
    return sensitivity.slopes_of_steps(fields, values)


def _grid(arch: Architecture, asked: Mapping[str, Any], dtype: str) -> _Grid:
    first = workload(**asked, dtype=dtype)
    rows, places = [(arch, first)], {}

    def add(name: str, more: list[tuple[Architecture, Workload]]) -> None:
        places[name] = slice(len(rows), len(rows) + len(more))
        rows.extend(more)

    def at(**changed: Any) -> tuple[Architecture, Workload]:
        return arch, workload(**{**asked, **changed}, dtype=dtype)

    add("batch", [at(batch_size=b) for b in BATCHES])
    add("prompt", [at(prompt_tokens=p) for p in PROMPTS])
    # a step at one context, whatever the prompt: prompt and output only set what is reserved
    add("context", [at(prompt_tokens=c, output_tokens=1, context_tokens=c) for c in CONTEXTS])
    add("map", [at(batch_size=b, prompt_tokens=p) for p in MAP_TOKENS for b in BATCHES])
    fields, pairs = sensitivity.stepped(arch, first)
    add("steps", pairs)
    # fields differ between models, the number of rows need not: one program serves them all
    rows.extend([(arch, first)] * (ROWS - len(rows)))
    archs, works = (
        jax.tree.map(lambda *leaves: np.stack(leaves), *column)
        for column in zip(*rows, strict=True)
    )
    return _Grid(archs, works, fields, **places)


def _predictions(
    model: CostModel, grid: _Grid, level: str | int
) -> tuple[int, Prediction, list[str]]:
    """(level, its predictions of all rows as NumPy, notes); "best" is chosen by the first row."""
    asked = model if level == "best" else model.at_level(int(level))
    rows = cost_model.predict_batch(asked, grid.archs, grid.works, once=True)
    found, notes = asked.level, []
    if level == "best":
        found = cost_model.covering_level(np.asarray(rows.domain_distances)[0, : model.level])
        if found < model.level:
            arch, work, first = (_rows(tree, 0) for tree in (grid.archs, grid.works, rows))
            notes = summary.missing_level(model, arch, work, first, found)
            asked = model.at_level(found)
            rows = cost_model.predict_batch(asked, grid.archs, grid.works, once=True)
    return found, jax.tree.map(np.asarray, rows), notes


def _rows(tree: Any, part: int | slice) -> Any:
    return jax.tree.map(lambda leaf: leaf[part], tree)


def _floats(values: Any) -> list[float]:
    found = np.asarray(values, np.float64)
    if not np.isfinite(found).all():
        raise ValueError("The prediction is not finite: the sizes are beyond float32. Reduce them.")
    return found.tolist()


def _band(centre: np.ndarray, log_half_width: np.ndarray) -> dict[str, Any]:
    """A quantity over a curve, and its interval where a level with intervals answered."""
    band = {"value": _floats(centre), "low": None, "high": None}
    if (log_half_width > 0).all():
        factor = np.exp(np.asarray(log_half_width, np.float64))
        band |= {"low": _floats(centre / factor), "high": _floats(centre * factor)}
    return band


def _curve(rows: Prediction, works: Workload, part: slice, size: str) -> dict[str, Any]:
    """Quantities along one size, with where they fit and where they extrapolate."""
    r, w = _rows(rows, part), _rows(works, part)
    widths = {"prefill": r.prefill.log_half_widths, "decode": r.decode.log_half_widths}
    per_token = r.total_energy_j / (w.batch_size * w.output_tokens)
    return {
        "size": size,
        "at": _floats(getattr(w, size)),
        "prefill_time_s": _band(r.prefill.time_s, widths["prefill"][:, 0]),
        "prefill_energy_j": _band(r.prefill.energy_j, widths["prefill"][:, 1]),
        "time_per_token_s": _band(r.decode.time_s, widths["decode"][:, 0]),
        "energy_per_token_j": _band(r.decode_energy_per_token_j, widths["decode"][:, 1]),
        "request_energy_per_token_j": _floats(per_token),
        "output_tokens_per_s": _floats(r.output_tokens_per_s),
        "fits": r.memory.fits.tolist(),
        "in_domain": np.asarray(r.in_domain).tolist(),
        "domain_distance": _floats(r.domain_distance),
    }


def _held_by(phase: Any) -> np.ndarray:
    """Seconds of `HELD_BY` of passes, [n, n_held_by]."""
    kernels = np.einsum("np,npb->nb", phase.parts.time_s, phase.parts.bounds)
    engine = np.maximum(phase.time_s - kernels.sum(1), 0.0)
    return np.concatenate([kernels, engine[:, None]], 1)


def _map(rows: Prediction, part: slice) -> dict[str, Any]:
    """What takes most of a pass's time over batch and tokens; lists [tokens][batches]."""
    r = _rows(rows, part)
    shape = (len(MAP_TOKENS), len(BATCHES))
    found = {
        "batch_sizes": list(BATCHES),
        "tokens": list(MAP_TOKENS),
        "fits": r.memory.fits.reshape(shape).tolist(),
        "in_domain": np.asarray(r.in_domain).reshape(shape).tolist(),
    }
    for name in ("prefill", "decode"):
        held = _held_by(getattr(r, name))
        most = held.argmax(1)
        share = held.max(1) / held.sum(1)
        found[name] = {
            "held_by": np.array(HELD_BY)[most].reshape(shape).tolist(),
            "share": share.astype(np.float64).reshape(shape).tolist(),
        }
    return found


def _roofline(model: CostModel, work: Workload, prediction: Prediction) -> dict[str, Any]:
    """Roofs of one GPU and where its operators stand under them."""
    device = jax.tree.map(np.asarray, model.device)
    peak = float(np.asarray(peak_rate(model.device, work.weight_bytes)))
    found: dict[str, Any] = {
        "peak_flops_per_s": peak,
        "memory_bytes_per_s": float(device.memory_bytes_per_s),
        "ridge_flops_per_byte": peak / float(device.memory_bytes_per_s),
    }
    for name in ("prefill", "decode"):
        parts = summary.parts_of(getattr(prediction, name))
        found[name] = {
            part: {
                "flops_per_byte": p["flops"] / p["memory_bytes"],
                "flops_per_s": p["flops"] / p["time_s"],
                "share": p["share"],
            }
            for part, p in parts.items()
            if p["flops"] > 0 and p["memory_bytes"] > 0
        }
    return found


def _front(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Devices and batch sizes by time and energy of a token; `best` beats all others in one."""
    points = []
    for p in pairs:
        curve = p["curves"]["batch"]
        columns = (
            curve["at"], curve["time_per_token_s"]["value"], curve["request_energy_per_token_j"],
            curve["output_tokens_per_s"], curve["fits"],
        )  # fmt: skip
        for batch, time_s, energy_j, rate, fits in zip(*columns, strict=True):
            if fits:
                points.append(
                    {
                        "device": p["device"],
                        "batch_size": batch,
                        "time_per_token_s": time_s,
                        "energy_per_token_j": energy_j,
                        "output_tokens_per_s": rate,
                    }
                )
    costs = [[p["time_per_token_s"], p["energy_per_token_j"]] for p in points]
    best = non_dominated(np.array(costs).reshape(-1, 2)).tolist() if points else []
    return {"points": points, "best": [points[i] for i in best]}
