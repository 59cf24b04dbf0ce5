"""Which GPUs meet a service target, and which of them wastes least energy.

Every device is asked the same workload. A pick is the device that needs least energy per output
token, prefill included, among those where the model fits and every target is met. A device without
measurements takes the coefficients of the most alike measured one, relative to the data sheet
(`checkpoint.load`); the answer says for each whether its time and its energy were measured there.
All devices answer at one level, the highest whose domain covers the request on each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hymell_jax import checkpoint, devices
from hymell_jax.hf import HFModel
from hymell_jax.model import CostModel, Prediction, predict, predict_best
from hymell_jax.notebook import Answer
from hymell_jax.summary import EXCLUDED, EXCLUDED_SERVED, check_parallel, check_power
from hymell_jax.types import Workload, near_names

TARGETS: dict[str, str] = {
    "time_per_token_s": "seconds between two tokens of a sequence: the average decode step",
    "ttft_s": "seconds to the first token: the prefill of the whole batch",
    "total_time_s": "seconds of the whole batch, prefill and all output tokens",
}
"""What a target may bound from above."""


ORIGINS = ("time", "energy", "serving")
"""What may have been measured on a device: kernels, their power, and an engine that serves."""


def checked_targets(slo: Mapping[str, float]) -> dict[str, float]:
    """The targets as floats.

    Raises:
        ValueError: none at all, an unknown name, or a limit that is not a positive number.
    """
    if not slo:
        raise ValueError(f"Give at least one target: {', '.join(TARGETS)}.")
    found = {}
    for name, limit in slo.items():
        if name not in TARGETS:
            near = near_names(str(name), list(TARGETS))
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(TARGETS)}."
            raise ValueError(f"There is no target {name!r}; {hint}")
        try:
            value = float(limit)
        except (TypeError, ValueError):
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"The target {name} must be a positive number of seconds; got {limit}."
            )
        found[name] = value
    return found


def chosen_devices(names: str | Iterable[Any]) -> list[devices.DeviceSpec]:
    """The devices of "all", of names separated by commas, or of a list of names and descriptions.

    Raises:
        ValueError: an unknown device, one given twice, or none.
    """
    if isinstance(names, str):
        names = devices.device_names() if names.strip() == "all" else names.split(",")
    given = [name.strip() if isinstance(name, str) else name for name in names]
    specs = [devices.get_device(name) for name in given if name != ""]
    found = [spec.name for spec in specs]
    twice = sorted({name for name in found if found.count(name) > 1})
    if twice:
        raise ValueError(f"The device {twice[0]} is given twice.")
    if not specs:
        raise ValueError("Give at least one device, or all.")
    return specs


def rank(
    hf: HFModel, work: Workload, slo: Mapping[str, float], names: Any = "all", dtype: str = "bf16"
) -> dict[str, Any]:
    """Devices by energy per output token, those that meet the targets first.

    Args:
        hf: the model.
        work: of the compute format `dtype`.
        slo: target of `TARGETS`: its upper limit, in seconds.
        names: "all" for every device known by name, or what `chosen_devices` takes.
        dtype: "bf16" or "fp8"; devices without that format, or without a known
            power limit, are named in `left_out`.

    Returns:
        `pick` and `pick_measured` (the same among devices where everything was measured; names or
        None), `level`, `slo`, `devices`: one entry each with `meets`, `misses`, `fits`, times,
        energy per output token and mean power of all its GPUs, and its `origins`; `left_out`,
        `excluded`. Numbers are None where the model does not fit.

    Raises:
        ValueError: bad targets or devices, no device of that format, or a tensor-parallel size
            that the heads do not divide by.
    """
    limits = checked_targets(slo)
    check_parallel(hf, work)
    answers, left_out = [], []
    for spec in chosen_devices(names):
        try:
            model = checkpoint.load(spec, dtype=dtype)
            check_power(model, "A ranking")
        except ValueError as error:
            left_out.append({"device": spec.name, "reason": str(error)})
            continue
        answers.append((spec, model, *predict_best(model, hf.architecture, work)))
    if not answers:
        raise ValueError(f"None of the devices can be asked: {left_out[0]['reason']}")
    levels = [level for _, _, level, answer in answers if bool(answer.memory.fits)]
    common = min(levels or [level for _, _, level, _ in answers])
    found = []
    for spec, model, level, answer in answers:
        if level > common:
            answer = predict(model.at_level(common), hf.architecture, work)
        found.append(_entry(spec, model, answer, work, limits, common))
    found.sort(key=_order)
    best = found[0] if found[0]["meets"] else None
    for entry in found:
        energy = entry["energy_per_output_token_j"]
        entry["energy_over_pick"] = (
            None if best is None or energy is None else energy / best["energy_per_output_token_j"]
        )
    content = {
        "model": hf.name,
        "dtype": dtype,
        "level": common,
        "slo": limits,
        "pick": best["device"] if best else None,
        "pick_measured": next((d["device"] for d in found if d["meets"] and _measured(d)), None),
        "devices": found,
        "left_out": left_out,
        "excluded": EXCLUDED_SERVED if common == 3 else EXCLUDED,
    }
    return Answer("ranking", content)


def _measured(entry: dict[str, Any]) -> bool:
    return all(entry[what] in ("fitted", None) for what in ORIGINS)


def _order(entry: dict[str, Any]) -> tuple:
    energy = entry["energy_per_output_token_j"]
    return (not entry["meets"], not entry["fits"], math.inf if energy is None else energy)


def _entry(
    spec: devices.DeviceSpec,
    model: CostModel,
    p: Prediction,
    work: Workload,
    limits: Mapping[str, float],
    level: int,
) -> dict[str, Any]:
    fits = bool(p.memory.fits)
    values: dict[str, Any] = dict.fromkeys((*TARGETS, "energy_per_output_token_j", "power_w"))
    misses = ["memory"]
    if fits:
        total_s, total_j = float(p.total_time_s), float(p.total_energy_j)
        values = {
            "time_per_token_s": float(p.decode_time_per_token_s),
            "ttft_s": float(p.prefill.time_s),
            "total_time_s": total_s,
            "energy_per_output_token_j": total_j / float(work.batch_size * work.output_tokens),
            "power_w": total_j / total_s,
        }
        if not np.isfinite(list(values.values())).all():
            raise ValueError("The prediction is not finite: sizes are beyond float32; reduce them.")
        misses = [name for name, limit in limits.items() if values[name] > limit]
    return {
        "device": spec.name,
        "title": spec.title,
        "meets": not misses,
        "misses": misses,
        "fits": fits,
        "memory_bytes": float(p.memory.total_bytes),
        "capacity_bytes": float(p.memory.capacity_bytes),
        **values,
        **origins(spec.name, model.card.provenance, level),
        "in_domain": bool(p.in_domain),
    }


def origins(name: str, card: Mapping[str, Any], level: int) -> dict[str, Any]:
    """Whether time, energy and serving terms of a device were `fitted` there or `transferred`.

    At level 3 energy belongs to the serving terms; below it there are none, and `serving` is None.

    Returns:
        Each of `ORIGINS`, and with `_from` appended the device or campaign that it comes from.
    """
    source = card.get("transferred_from")
    found = {
        "time": card.get("time", "fitted"),
        "time_from": source or name,
        "energy": card.get("energy", "fitted"),
        "energy_from": card.get("energy_from") or source or name,
        "serving": None,
        "serving_from": None,
    }
    if level == 3:
        terms, machine = card["engine_terms"], card["engine_terms_from"]
        found |= {"energy": terms, "energy_from": machine}
        found |= {"serving": terms, "serving_from": f"{card['engine']} on {machine}"}
    return found
