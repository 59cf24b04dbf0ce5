"""Published methods for latency and energy of LLM inference behind one function signature.

`METHODS[name].predict(arch, work, device, coefficients)` answers with a `MethodPrediction`;
`METHODS[name].default_coefficients()` gives something to start from. One file or folder a system.
"""

from hymell_jax.baselines import (
    amali,
    life,
    liminal,
    roofline,
    sweetspot,
    tdp,
    tokens_to_watt_hours,
    wattgpu,
)
from hymell_jax.baselines.fitting import fit_logs
from hymell_jax.baselines.interface import QUANTITIES, Method, MethodPrediction
from hymell_jax.types import near_names

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        tokens_to_watt_hours.METHOD,
        sweetspot.METHOD,
        life.METHOD,
        liminal.METHOD,
        amali.METHOD,
        roofline.METHOD,
        tdp.METHOD,
        tdp.LOAD_SCALED,
        wattgpu.METHOD,
    )
}
"""Every method by name."""


def get_method(name: str) -> Method:
    """The method of that name.

    Raises:
        ValueError: no such method; the message lists near names.
    """
    if name not in METHODS:
        near = near_names(name, METHODS) or list(METHODS)
        raise ValueError(f"There is no method named {name!r}; there is {', '.join(near)}.")
    return METHODS[name]


__all__ = ["METHODS", "QUANTITIES", "Method", "MethodPrediction", "fit_logs", "get_method"]
