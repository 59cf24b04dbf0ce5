"""One workload by every method side by side: ours and the systems that it is judged against."""

from __future__ import annotations

from typing import Any

import numpy as np

from hymell_jax import checkpoint, devices
from hymell_jax.baselines import METHODS, QUANTITIES
from hymell_jax.hf import HFModel
from hymell_jax.model import predict
from hymell_jax.summary import EXCLUDED, check_fits
from hymell_jax.types import Workload

SHOWN = (
    "prefill_time_s",
    "prefill_energy_j",
    "decode_time_per_token_s",
    "decode_energy_per_token_j",
)
"""The quantities in the order of a table."""


def _ours(hf: HFModel, model, work: Workload) -> dict[str, Any]:
    p = predict(model, hf.architecture, work)
    check_fits(p, model, hf.name)
    return {
        "method": "hymell_jax",
        "prefill_time_s": float(p.prefill.time_s),
        "prefill_energy_j": float(p.prefill.energy_j),
        "decode_time_per_token_s": float(p.decode.time_s),
        "decode_energy_per_token_j": float(p.decode_energy_per_token_j),
        "source": "level 1 of HYMELL, arXiv 2608.06723, in its refined form",
        "assumes": ["one sequence of kernels per pass", "power between idle and the limit"],
        "leaves_out": [EXCLUDED],
        "coefficients": f"Fitted, {model.card.runtime}.",
    }


def compare(hf: HFModel, device: Any, work: Workload) -> dict[str, Any]:
    """Every method's answer, with what it assumes and leaves out; numbers in SI units or None.

    The other methods answer in their first form with their default coefficients, which are
    published or labelled choices; one that predicts nothing before a fit gives None throughout.

    Raises:
        ValueError: an unknown device, or a workload that does not fit on it.
    """
    model = checkpoint.load(device)
    spec = devices.get_device(device)
    found = [_ours(hf, model, work)]
    for name, method in METHODS.items():
        values: dict[str, float | None] = dict.fromkeys(QUANTITIES)
        if not method.needs_fit:
            answer = method.predict(
                hf.architecture, work, spec.device, method.default_coefficients()
            )
            for place, quantity in enumerate(QUANTITIES):
                if float(np.asarray(answer.available)[place]) > 0:
                    values[quantity] = float(np.asarray(getattr(answer, quantity)))
        note = "Predicts nothing before a fit." if method.needs_fit else method.default_note
        found.append(
            {
                "method": name,
                **values,
                "source": method.source,
                "assumes": list(method.assumes),
                "leaves_out": list(method.leaves_out),
                "coefficients": note,
            }
        )
    return {"model": hf.name, "device": spec.name, "dtype": "bf16", "methods": found}
