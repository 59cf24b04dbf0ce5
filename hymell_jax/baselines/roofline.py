"""The roofline: seconds of a pass from data-sheet rates. No energy.

    T = sum over operators of max(FLOPs / (peak e_c), bytes / (bandwidth e_m))

The plain form has e_c = e_m = 1, a lower bound of the time of a sum of kernels. The efficient form
has one efficiency for compute and one for memory per device, as in GenZ (arXiv 2406.01698).

Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009, doi 10.1145/1498765.1498785.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.baselines.counting import PassCounts, pass_counts, peak_flops_per_s
from hymell_jax.baselines.interface import TIMES, Method, exp, predict_from_passes
from hymell_jax.types import Architecture, Device, Workload


def plain_coefficients() -> dict[str, Any]:
    """Efficiencies of one: the data sheet as it is."""
    return {
        "log_compute_efficiency": np.float32(0.0),
        "log_memory_efficiency": np.float32(0.0),
    }


def efficient_coefficients() -> dict[str, Any]:
    """A choice of this project before any fit: 60 % of the peak, 80 % of the bandwidth."""
    return {
        "log_compute_efficiency": np.float32(np.log(0.6)),
        "log_memory_efficiency": np.float32(np.log(0.8)),
    }


def operator_times_s(
    counts: PassCounts, work: Workload, device: Device, coefficients: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """Compute and memory seconds of every operator, two arrays [n_parts]."""
    compute = counts.flops / peak_flops_per_s(device, work)
    memory = counts.memory_bytes / device.memory_bytes_per_s
    return (
        compute / exp(coefficients, "log_compute_efficiency"),
        memory / exp(coefficients, "log_memory_efficiency"),
    )


def pass_time_s(
    arch: Architecture, work: Workload, device: Device, coefficients: dict[str, Any], phase: str
) -> jax.Array:
    """Seconds of one pass, "prefill" or "decode": the sum of each operator's larger bound."""
    counts = pass_counts(arch, work, phase)
    return jnp.sum(jnp.maximum(*operator_times_s(counts, work, device, coefficients)))


predict = predict_from_passes(pass_time_s)
"""Times of prefill and of the average decode step [s]."""


METHOD = Method(
    name="roofline",
    title="Roofline",
    source="doi 10.1145/1498765.1498785; with efficiencies GenZ, arXiv 2406.01698",
    inputs=("architecture", "workload", "peak FLOP/s", "memory bandwidth", "two efficiencies"),
    assumes=(
        "compute and memory of an operator overlap fully, operators not at all",
        "weights and cache are read once a pass, scores of attention never",
    ),
    leaves_out=("launches", "collectives", "tile and wave quantisation", "energy"),
    published_accuracy=(
        "GenZ: 1.43 % geometric mean on its own runs, 5.82 % on third-party ones, with "
        "efficiencies per platform; the plain form is a lower bound"
    ),
    gives=TIMES,
    forms={
        "plain": (predict, plain_coefficients),
        "efficient": (predict, efficient_coefficients),
    },
    default_note="plain: none to fit; efficient: a choice before a fit",
)
