"""A prediction as a plain dictionary: what `--json` prints and tables are made from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hymell_jax import parameters
from hymell_jax.analytical import BOUNDS
from hymell_jax.coverage import uncovered
from hymell_jax.gemm import REGIMES
from hymell_jax.hf import HFModel
from hymell_jax.model import CostModel, Phase, Prediction, kv_shards, predict, predict_best
from hymell_jax.notebook import Answer
from hymell_jax.operators import PARTS
from hymell_jax.types import Architecture, Workload

EXCLUDED = "scheduling, sampling, tokenising, host work between kernels and model loading"
"""What a sum of kernels leaves out."""

EXCLUDED_SERVED = "queueing, tokenising, network and model loading"
"""What a served model (level 3) leaves out."""

COVERAGE = 0.9
"""Of the intervals, on models that the fit had not seen."""


def _number(leaf: Any) -> float:
    value = float(np.asarray(leaf))
    if not math.isfinite(value):
        raise ValueError("The prediction is not finite: the sizes are beyond float32. Reduce them.")
    return value + 0.0  # no -0


def parts_of(phase: Phase) -> dict[str, dict[str, Any]]:
    """Every part that takes time: seconds, joules, share, FLOPs, bytes, regimes and bounds."""
    costs = {
        name: np.asarray(getattr(phase.parts, name), np.float64)
        for name in ("time_s", "energy_j", "flops", "memory_bytes", "bounds", "regimes")
    }
    total = costs["time_s"].sum()
    found = {}
    for index in np.argsort(-costs["time_s"], kind="stable"):
        time_s = float(costs["time_s"][index])
        if time_s <= 0:
            continue
        bounds, regimes = costs["bounds"][index], costs["regimes"][index]
        found[PARTS[index]] = {
            "time_s": time_s,
            "energy_j": float(costs["energy_j"][index]),
            "share": time_s / total,
            "flops": float(costs["flops"][index]),
            "memory_bytes": float(costs["memory_bytes"][index]),
            "regimes": dict(zip(REGIMES, map(float, regimes), strict=True)),
            "bound": BOUNDS[int(bounds.argmax())],
            "bound_shares": {
                name: float(share) for name, share in zip(BOUNDS, bounds, strict=True) if share > 0
            },
        }
    return found


_OUTSIDE = (
    "A matrix is far larger than any measured one (ln {:.1f}): the answer is an extrapolation.",
    "Half of the time or more is spent in blocks unlike any measured one: there the answer rests "
    "on the level-1 equations.",
    "No model of this kind and size was measured as a whole: the serving terms are an "
    "extrapolation.",
)


def knows_power(model: CostModel) -> bool:
    """Whether joules and watts mean something: not where the power limit is a placeholder."""
    return not model.card.provenance.get("placeholder_power", False)


def check_power(model: CostModel, what: str) -> None:
    """Refuse a question about energy where nobody knows the power of the device.

    Raises:
        ValueError: the power limit is a placeholder.
    """
    if not knows_power(model):
        raise ValueError(
            f"{what} needs energies, and the power limit of {model.card.device} is a placeholder "
            "in its device file: give power_limit_w and idle_power_w there, or ask for times."
        )


_WITH_ENERGY = ("prefill", "decode", "total", "steady", "interval", "parts")


def without_energy(content: Any) -> Any:
    """The same plain content with None for every number or interval of joules, Wh and watts."""
    if not isinstance(content, Mapping):
        return content
    return {
        key: None if key.endswith(("_j", "_w", "_wh")) else without_energy(value)
        for key, value in content.items()
    }


def warnings_of(model: CostModel, hf: HFModel, prediction: Prediction, level: int = 1) -> list[str]:
    """Plain sentences on what a reader should know before believing the numbers."""
    found = list(hf.notes)
    provenance = model.card.provenance
    source = provenance.get("transferred_from")
    if provenance.get("time") == "transferred":
        found.append(
            f"No {model.card.dtype} measurements of {model.card.device}: coefficients carried "
            f"over from {source} by data-sheet ratios."
        )
    elif not provenance.get("metered", True) and knows_power(model):
        found.append(provenance["energy_note"])
    elif provenance.get("energy") == "transferred" and level < 3:
        found.append(
            f"Power of {model.card.device} was not measured: energy carried over from "
            f"{provenance.get('energy_from')} by data-sheet ratios."
        )
    if not knows_power(model):
        found.append(
            f"Energies and powers of {model.card.device} are left out: its power limit is not "
            "known, a placeholder stands in its device file."
        )
    if provenance.get("no_bf16_units"):
        found.append(
            f"{model.card.device} has no bf16 matrix units: the numbers are those of fp16, which "
            "takes the same bytes."
        )
    if level == 3 and provenance.get("engine_terms") == "transferred":
        found.append(
            f"No served model was measured on {model.card.device}: what an engine adds, and its "
            f"energy, are carried over from {provenance.get('engine_terms_from')}."
        )
    distance = _number(prediction.domain_distance)
    if distance > math.log(2.0):
        found.append(_OUTSIDE[int(np.argmax(prediction.domain_distances))].format(distance))
    if not bool(prediction.memory.fits):
        needed = _number(prediction.memory.total_bytes) / 1e9
        capacity = _number(prediction.memory.capacity_bytes) / 1e9
        found.append(f"It does not fit: {needed:.1f} GB needed, {capacity:.1f} GB there.")
    return found


def _beyond_positions(hf: HFModel, work: Workload) -> list[str]:
    """The note that a context is longer than the learned positions; none with rotary ones."""
    rows, longest = _number(hf.architecture.position_rows), _number(work.context_end_tokens)
    if not 0 < rows < longest:
        return []
    return [
        f"{hf.name} has learned positions for {rows:.0f} tokens and cannot run {longest:.0f}; the "
        "numbers are those of a model that could."
    ]


def check_parallel(hf: HFModel, work: Workload) -> None:
    """Refuse a tensor-parallel size that engines cannot run: each GPU holds whole heads and equal
    shares of every feed-forward width; a KV head may be copied to several GPUs.

    Raises:
        ValueError: a size that is not whole, or that does not divide the model; names what.
    """
    arch, size = hf.architecture, _number(work.tensor_parallel)
    experts = max(size / _number(work.expert_parallel), 1.0)  # GPUs that slice one expert
    heads, kv = _number(arch.n_heads), _number(arch.n_kv_heads)
    routed = _number(arch.n_experts) > 0
    widths = [] if _number(arch.moe_fraction) == 1 else [("d_ff", _number(arch.d_ff), size)]
    if routed:
        widths += [
            ("d_expert", _number(arch.d_expert), experts),
            ("d_shared_expert", _number(arch.d_shared_expert), size),
        ]
    wrong = [f"{heads:g} heads"] if size % 1 or heads % size else []
    if not wrong and kv % size and size % kv:
        wrong.append(f"{kv:g} KV heads (or be a multiple of them)")
    wrong += [f"{name} {width:g}" for name, width, parts in widths if width % parts]
    if wrong:
        raise ValueError(
            f"tensor_parallel must be a whole number that divides the {' and the '.join(wrong)} "
            f"of {hf.name}; got {size:g}."
        )


def check_fits(prediction: Prediction, model: CostModel, name: str) -> None:
    """Refuse a workload that does not fit on the device.

    Raises:
        ValueError: more memory is needed than there is; says how much and what would help.
    """
    memory = prediction.memory
    if bool(memory.fits):
        return
    gigabytes = {
        part: _number(getattr(memory, f"{part}_bytes")) / 1e9
        for part in ("weights", "kv_cache", "activations", "capacity")
    }
    raise ValueError(
        f"{name} does not fit on {model.card.device}: weights {gigabytes['weights']:.1f} GB, KV "
        f"cache {gigabytes['kv_cache']:.1f} GB and activations {gigabytes['activations']:.1f} GB "
        f"against {gigabytes['capacity']:.1f} GB. Take a smaller batch, prompt or output, fp8, "
        "more GPUs (--tensor-parallel), or --ignore-memory."
    )


def _interval(value: Any, log_half_width: Any) -> list[float]:
    """[low, high] around a value."""
    centre, factor = _number(value), math.exp(_number(log_half_width))
    return [centre / factor, centre * factor]


def _intervals(prediction: Prediction) -> dict[str, Any] | None:
    """The 90 % intervals of both passes; None where no level with intervals answered."""
    prefill, decode = prediction.prefill, prediction.decode
    if not bool(prefill.log_half_widths[0] > 0):
        return None
    energy = prediction.decode_energy_per_token_j
    return {
        "coverage": COVERAGE,
        "prefill": {
            "time_s": _interval(prefill.time_s, prefill.log_half_widths[0]),
            "energy_j": _interval(prefill.energy_j, prefill.log_half_widths[1]),
        },
        "decode": {
            "time_per_token_s": _interval(decode.time_s, decode.log_half_widths[0]),
            "energy_per_token_j": _interval(energy, decode.log_half_widths[1]),
        },
    }


def missing_level(
    model: CostModel, arch: Architecture, work: Workload, highest: Prediction, level: int
) -> list[str]:
    """The note that a lower level answers than the model's own third; none where it has no third.

    Arguments as in `coverage.uncovered`; `highest` is of the highest level of the model.
    """
    return [uncovered(model, arch, work, highest, level)] if model.level == 3 else []


def summarise(
    model: CostModel,
    hf: HFModel,
    work: Workload,
    level: str | int = "best",
    check_memory: bool = True,
) -> dict[str, Any]:
    """Predict one workload and lay everything out; all numbers finite Python floats, SI units.

    Energies and powers are None on a device whose power limit is a placeholder.

    Args:
        model: of the device.
        hf: the model to run.
        work: the workload.
        level: 1, 2, 3, or "best": the highest whose domain covers the request.
        check_memory: refuse what does not fit.

    Raises:
        ValueError: it does not fit, the model lacks the level, or the numbers leave float32.
    """
    check_parallel(hf, work)
    arch, notes = hf.architecture, []
    if level == "best":
        level, prediction = predict_best(model, arch, work)
        if level < model.level:
            notes = missing_level(model, arch, work, predict(model, arch, work), level)
    else:
        level = int(level)
        prediction = predict(model.at_level(level), arch, work)
    prediction = jax.device_get(prediction)  # what follows compiles nothing
    if check_memory:
        check_fits(prediction, model, hf.name)
    return describe(model, hf, work, level, prediction, notes)


def describe(
    model: CostModel,
    hf: HFModel,
    work: Workload,
    level: int,
    prediction: Prediction,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """A prediction of one workload, leaves of shape (), as `summarise` lays it out.

    The notes come before its own warnings.

    Raises:
        ValueError: the numbers leave float32.
    """
    total, active = parameters.exact_parameters(hf.architecture)
    cache = parameters.kv_cache_elements_per_token(hf.architecture)
    provenance = dict(model.card.provenance)
    provenance.setdefault("time", "fitted")
    content = {
        "model": hf.name,
        "device": model.card.device,
        "runtime": model.card.runtime,
        "dtype": model.card.dtype,
        "level": level,
        "workload": {
            name: _number(getattr(work, name))
            for name in (
                "batch_size",
                "prompt_tokens",
                "output_tokens",
                "kv_bytes",
                "tensor_parallel",
                "expert_parallel",
            )
        },
        "parameters": {"total": total, "active": active},
        "prefill": {
            "time_s": _number(prediction.prefill.time_s),
            "energy_j": _number(prediction.prefill.energy_j),
            "power_w": _number(prediction.prefill.power_w),
        },
        "decode": {
            "time_per_token_s": _number(prediction.decode.time_s),
            "energy_per_token_j": _number(prediction.decode_energy_per_token_j),
            "energy_per_step_j": _number(prediction.decode.energy_j),
            "power_w": _number(prediction.decode.power_w),
        },
        "total": {
            "time_s": _number(prediction.total_time_s),
            "energy_j": _number(prediction.total_energy_j),
            "energy_wh": _number(prediction.total_energy_j) / 3600.0,
            "output_tokens_per_s": _number(prediction.output_tokens_per_s),
        },
        "memory": {
            "weights_bytes": _number(prediction.memory.weights_bytes),
            "kv_cache_bytes": _number(prediction.memory.kv_cache_bytes),
            "kv_cache_bytes_per_token": _number(
                (cache.full_layers + cache.windowed_layers)
                * np.asarray(work.kv_bytes)
                / kv_shards(jax.device_get(hf.architecture), jax.device_get(work), np)
            ),
            "activations_bytes": _number(prediction.memory.activations_bytes),
            "capacity_bytes": _number(prediction.memory.capacity_bytes),
            "fits": bool(prediction.memory.fits),
        },
        "steady": {
            "time_per_token_s": _number(prediction.steady_time_per_token_s),
            "energy_per_token_j": _number(prediction.steady_energy_per_token_j),
        },
        "interval": _intervals(prediction),
        "parts": {"prefill": parts_of(prediction.prefill), "decode": parts_of(prediction.decode)},
        "in_domain": bool(prediction.in_domain),
        "domain_distance": _number(prediction.domain_distance),
        "domain_distances": [
            _number(x) for x in np.asarray(prediction.domain_distances)[: model.level]
        ],
        "excluded": EXCLUDED_SERVED if level == 3 else EXCLUDED,
        "warnings": [
            *notes,
            *warnings_of(model, hf, prediction, level),
            *_beyond_positions(hf, work),
        ],
        "provenance": provenance,
    }
    if not knows_power(model):
        content |= {name: without_energy(content[name]) for name in _WITH_ENERGY}
    return Answer("prediction", content)
