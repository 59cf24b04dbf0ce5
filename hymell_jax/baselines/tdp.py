"""Rated power times time, plain and scaled by load: the estimates that every paper compares with.

    E = rho P_limit T n_GPU

with rho = 1, or the load factors of WattGPU's baseline: 0.9 offline, 0.2 at low and 0.6 at high
server load. T comes from the roofline with efficiencies, or from the caller (`energy_j`).

Sources: WattGPU, arXiv 2607.02391, for the load factors. Power limit times time overestimates
decode energy by up to 60 % (arXiv 2605.14249).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.baselines import roofline
from hymell_jax.baselines.interface import Method, MethodPrediction, prediction
from hymell_jax.types import Architecture, Device, Workload

SCENARIOS = ("offline", "server_low", "server_high")
LOAD_FACTORS = {"offline": 0.9, "server_low": 0.2, "server_high": 0.6}


def default_coefficients() -> dict[str, Any]:
    """Load factor 1, efficient roofline times."""
    return {"load_factor": np.float32(1.0)} | roofline.efficient_coefficients()


def load_scaled_coefficients(scenario: str = "offline") -> dict[str, Any]:
    """The load factor of a scenario of WattGPU, efficient roofline times.

    Raises:
        ValueError: not one of `SCENARIOS`.
    """
    return {"load_factor": np.float32(load_factor(scenario))} | roofline.efficient_coefficients()


def load_factor(scenario: str) -> float:
    """rho of a scenario.

    Raises:
        ValueError: not one of `SCENARIOS`.
    """
    if scenario not in LOAD_FACTORS:
        raise ValueError(f"scenario must be one of {', '.join(SCENARIOS)}; got {scenario!r}.")
    return LOAD_FACTORS[scenario]


def energy_j(time_s, device: Device, load_factor=1.0, n_gpus=1.0) -> jax.Array:
    """Joules of a given time: rho P_limit T n_GPU."""
    return jnp.asarray(load_factor) * device.power_limit_w * time_s * n_gpus


def predict(
    arch: Architecture, work: Workload, device: Device, coefficients: dict[str, Any]
) -> MethodPrediction:
    """Roofline times [s] and rated power times these times [J]."""
    times = roofline.predict(arch, work, device, coefficients)
    rho = coefficients["load_factor"]
    prefill, step = (
        energy_j(time_s, device, rho, work.tensor_parallel)
        for time_s in (times.prefill_time_s, times.decode_time_per_token_s)
    )
    return prediction(
        work,
        prefill_time_s=times.prefill_time_s,
        decode_time_per_token_s=times.decode_time_per_token_s,
        prefill_energy_j=prefill,
        decode_energy_per_token_j=step / work.batch_size,
    )


_COMMON: dict[str, Any] = dict(
    inputs=("power limit", "a time: here the roofline's with efficiencies"),
    leaves_out=("what the GPU does", "idle power", "CPU, network and cooling"),
    gives=(
        "prefill_time_s",
        "decode_time_per_token_s",
        "prefill_energy_j",
        "decode_energy_per_token_j",
    ),
)

METHOD = Method(
    name="tdp",
    title="Power limit times time",
    source="common practice; as a baseline in WattGPU, arXiv 2607.02391",
    assumes=("the GPU always draws its limit",),
    published_accuracy=(
        "WattGPU: median power error 4.4 % offline, 190.1 % of servers; arXiv 2605.14249: decode "
        "energy up to 60 % too high"
    ),
    forms={"default": (predict, default_coefficients)},
    default_note="no fit; times from a roofline at 60 % of peak and 80 % of bandwidth",
    **_COMMON,
)

LOAD_SCALED = Method(
    name="load-scaled-tdp",
    title="Load-scaled power limit times time",
    source="WattGPU, arXiv 2607.02391",
    assumes=("a fixed share of the limit per scenario, the same on every GPU and model",),
    published_accuracy="WattGPU: median power error 7.2 % offline, 26.0 % of servers",
    forms={
        name: (predict, functools.partial(load_scaled_coefficients, name)) for name in SCENARIOS
    },
    default_note="offline, 0.9 of the limit; times from a roofline at 60 % and 80 %",
    **_COMMON,
)
