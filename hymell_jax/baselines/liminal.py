"""LIMINAL: the limits of a whole pass, plus latency that nothing hides. No energy.

    T = max(FLOPs / (peak e_c), bytes / (bandwidth e_m)) + n_layers t_exposed

FLOPs and bytes are summed over the pass before the maximum, so compute of one operator may hide
memory of another; the exposed latency per layer stands for synchronisation and collectives.

Source: Davies et al., "LIMINAL: Exploring the Frontiers of LLM Decode Performance", arXiv
2507.14397. Its model also covers pipelines and memory capacity; this is its latency part.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.baselines.counting import pass_counts
from hymell_jax.baselines.interface import TIMES, Method, exp, predict_from_passes
from hymell_jax.baselines.roofline import operator_times_s
from hymell_jax.types import Architecture, Device, Workload


def default_coefficients() -> dict[str, Any]:
    """Full rates and 5 us a layer, a choice of this project: the paper fits the latency."""
    return {
        "log_compute_efficiency": np.float32(0.0),
        "log_memory_efficiency": np.float32(0.0),
        "log_exposed_s": np.float32(np.log(5e-6)),
    }


def pass_time_s(
    arch: Architecture, work: Workload, device: Device, coefficients: dict[str, Any], phase: str
) -> jax.Array:
    """Seconds of one pass: the larger of its total bounds, plus the exposed latency."""
    counts = pass_counts(arch, work, phase)
    compute, memory = operator_times_s(counts, work, device, coefficients)
    hidden = jnp.maximum(jnp.sum(compute), jnp.sum(memory))
    return hidden + arch.n_layers * exp(coefficients, "log_exposed_s")


predict = predict_from_passes(pass_time_s)
"""Times of prefill and of the average decode step [s]."""


METHOD = Method(
    name="liminal",
    title="LIMINAL",
    source="arXiv 2507.14397",
    inputs=("architecture", "workload", "peak FLOP/s", "memory bandwidth", "latency per layer"),
    assumes=(
        "compute and memory of the whole pass overlap",
        "every layer exposes the same latency, whatever its size",
    ),
    leaves_out=("kernels one by one", "pipelines", "memory capacity", "energy"),
    published_accuracy="7.6 % mean absolute error of decode, on 8 x H100 with a fitted latency",
    gives=TIMES,
    forms={"default": (predict, default_coefficients)},
    default_note="full data-sheet rates, 5 us a layer: a choice before a fit",
)
