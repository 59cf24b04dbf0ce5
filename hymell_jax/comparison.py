"""One workload by every method side by side: ours and the systems that it is judged against."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from hymell_jax import checkpoint, devices
from hymell_jax.baselines import METHODS, QUANTITIES, wattgpu
from hymell_jax.devices import DeviceSpec
from hymell_jax.hf import HFModel
from hymell_jax.model import CostModel, predict
from hymell_jax.summary import EXCLUDED, EXCLUDED_SERVED, check_fits, knows_power, without_energy
from hymell_jax.types import Workload

SHOWN = (
    "prefill_time_s",
    "prefill_energy_j",
    "decode_time_per_token_s",
    "decode_energy_per_token_j",
)
"""The quantities in the order of a table."""


LEVELS = {
    1: ("operators", EXCLUDED),
    2: ("operators and blocks", EXCLUDED),
    3: ("operators, blocks and the engine around them", EXCLUDED_SERVED),
}
"""What each of our levels adds up, and what it leaves out."""


def _ours(hf: HFModel, model: CostModel, level: int, work: Workload) -> dict[str, Any]:
    p = predict(model.at_level(level), hf.architecture, work)
    check_fits(p, model, hf.name)
    what, left_out = LEVELS[level]
    card = model.card.provenance
    fitted = [model.card.runtime] + ([card["engine"]] if level == 3 else [])
    source = card.get("transferred_from")
    origin = f"Carried over from {source}" if source else "Fitted"
    return {
        "method": f"hymell_jax, level {level}",
        "prefill_time_s": float(p.prefill.time_s),
        "prefill_energy_j": float(p.prefill.energy_j),
        "decode_time_per_token_s": float(p.decode.time_s),
        "decode_energy_per_token_j": float(p.decode_energy_per_token_j),
        "source": "HYMELL, arXiv 2608.06723, in its refined form",
        "assumes": [f"a pass is the sum of its {what}", "power between idle and the limit"],
        "leaves_out": [left_out],
        "coefficients": f"{', '.join([origin, *fitted])}.",
    }


def _theirs(name: str, hf: HFModel, spec: DeviceSpec, work: Workload, fits: Mapping[str, Any]):
    """One method's answer: fitted coefficients where there are any, else its own."""
    method = METHODS[name]
    values: dict[str, float | None] = dict.fromkeys(QUANTITIES)
    if method.needs_fit and name not in fits:
        note = "Predicts nothing before a fit."
    else:
        note = "Fitted to the given runs." if name in fits else method.default_note
        coefficients = fits[name] if name in fits else method.default_coefficients()
        sheet = spec if method.needs_fit else spec.device
        try:
            answer = method.predict(hf.architecture, work, sheet, coefficients)
        except ValueError as error:
            note = f"Does not answer: {error}"
        else:
            for place, quantity in enumerate(QUANTITIES):
                if float(np.asarray(answer.available)[place]) > 0:
                    values[quantity] = float(np.asarray(getattr(answer, quantity)))
    return {
        "method": name,
        **values,
        "source": method.source,
        "assumes": list(method.assumes),
        "leaves_out": list(method.leaves_out),
        "coefficients": note,
    }


def wattgpu_fit(runs: str | os.PathLike[str], models: str | os.PathLike[str]) -> dict[str, Any]:
    """WattGPU's trees trained on its own tables, as `compare` takes them.

    Raises:
        ValueError: a table that cannot be read, or the extra `baselines` is missing.
    """
    table = wattgpu.build_table(wattgpu.read_runs(runs), wattgpu.read_models(models))
    return {"wattgpu": wattgpu.fit_models(table)}


def compare(
    hf: HFModel, device: Any, work: Workload, fits: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Every method's answer, with what it assumes and leaves out; numbers in SI units or None.

    Ours comes once for each level, the highest first. The other methods answer in their first form
    with their default coefficients, which are published or labelled choices; one that predicts
    nothing before a fit, or does not cover the question, gives None throughout and says why. On a
    device whose power limit is a placeholder every energy is None.

    Args:
        hf: the model.
        device: anything that `devices.get_device` takes.
        work: of bf16.
        fits: fitted coefficients by method, such as `wattgpu_fit`.

    Raises:
        ValueError: an unknown device, or a workload that does not fit on it.
    """
    model = checkpoint.load(device)
    spec = devices.get_device(device)
    found = [_ours(hf, model, level, work) for level in range(model.level, 0, -1)]
    found += [_theirs(name, hf, spec, work, fits or {}) for name in METHODS]
    if not knows_power(model):
        found = [without_energy(one) for one in found]
    return {"model": hf.name, "device": spec.name, "dtype": "bf16", "methods": found}
