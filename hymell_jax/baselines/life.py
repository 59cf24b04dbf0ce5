"""LIFE: times from operation counts, memory traffic and dispatches. No energy.

    t_c = sum ops / (ec TOPS) + dispatches t_dispatch
    t_m = sum bytes / (em BW) + dispatches t_dispatch
    TTFT = max(t_c, t_m),   TPOT = t_m,   TPS = 1 / TPOT

Operations of a linear layer m x k x n with bias: 2 m k n; of a batched product 2 b m k n - b m n.
Elements moved by a linear layer: (m k + k n + n) + m n. Fusion removes traffic in between:
`fused_attention` = 1 keeps attention scores on the chip.

Source: Patwari, Sirasao, Das, "Forecasting LLM Inference Performance via Hardware-Agnostic
Analytical Modeling", arXiv 2508.00904. Experts, windows and latent attention are additions of
this project, with the counts that all methods of this folder share.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax import operators
from hymell_jax.baselines.counting import (
    COUNT_PARTS,
    mean_context_tokens,
    pass_counts,
    peak_flops_per_s,
)
from hymell_jax.baselines.interface import TIMES, Method, MethodPrediction, exp, prediction
from hymell_jax.types import Architecture, Device, Value, Workload

DISPATCHES_PER_LAYER = 19.0
DISPATCHES_PER_PASS = 3.0


def default_coefficients() -> dict[str, Any]:
    """Half of both rates, the share that the paper applies to its V100, and 5 us a dispatch.

    The paper takes all three from unit tests or sweeps of a device; it prints no dispatch time,
    5 us is a choice of this project.
    """
    return {
        "log_compute_efficiency": np.float32(np.log(0.5)),
        "log_memory_efficiency": np.float32(np.log(0.5)),
        "log_dispatch_s": np.float32(np.log(5e-6)),
        "fused_attention": np.float32(1.0),
    }


def dispatches(n_layers: jax.Array) -> jax.Array:
    """Dispatches of one pass, 19 n_layers + 3.

    Read off the three counts that the paper prints for a decode step, which it meets exactly:
    497 at 26 layers (Gemma2-2B), 611 at 32 (Llama2-7B), 1219 at 64 (Qwen3-32B).
    """
    return DISPATCHES_PER_LAYER * n_layers + DISPATCHES_PER_PASS


def linear_operations(m, k, n):
    """Operations of a linear layer, 2 m k n."""
    return 2.0 * m * k * n


def linear_elements(m, k, n):
    """Elements moved by a linear layer with bias, (m k + k n + n) + m n."""
    return m * k + k * n + n + m * n


def batched_operations(b, m, k, n):
    """Operations of b products (m x k) (k x n), 2 b m k n - b m n."""
    return 2.0 * b * m * k * n - b * m * n


def totals(
    arch: Architecture, work: Workload, phase: str, fused_attention: jax.Array | float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Operations and bytes of one pass on one GPU."""
    counts = pass_counts(arch, work, phase, fused_attention)
    # LIFE subtracts one operation per element that a batched product returns
    heads, _, _, value_width = operators.attention_shape(arch, work, phase == "decode")
    layers = operators.layer_counts(arch)
    if phase == "prefill":
        queries: Value = work.prompt_tokens
        keys = 0.5 * (work.prompt_tokens + 1.0)
    else:
        queries, keys = 1.0, mean_context_tokens(work)
    results = work.batch_size * heads * queries * (keys + value_width) * layers["full"]
    attention = counts.flops[COUNT_PARTS.index("attention")]
    operations = jnp.sum(counts.flops) - jnp.minimum(results, 0.5 * attention)
    return operations, jnp.sum(counts.memory_bytes)


def pass_times_s(
    arch: Architecture, work: Workload, device: Device, coefficients: dict[str, Any], phase: str
) -> tuple[jax.Array, jax.Array]:
    """(t_c, t_m) of one pass [s], dispatches included in both."""
    operations, moved = totals(arch, work, phase, coefficients["fused_attention"])
    waiting = dispatches(arch.n_layers) * exp(coefficients, "log_dispatch_s")
    peak = peak_flops_per_s(device, work) * exp(coefficients, "log_compute_efficiency")
    bandwidth = device.memory_bytes_per_s * exp(coefficients, "log_memory_efficiency")
    return operations / peak + waiting, moved / bandwidth + waiting


def predict(
    arch: Architecture, work: Workload, device: Device, coefficients: dict[str, Any]
) -> MethodPrediction:
    """TTFT = max(t_c, t_m) of the prefill, TPOT = t_m of the average decode step [s]."""
    prefill = pass_times_s(arch, work, device, coefficients, "prefill")
    _, decode = pass_times_s(arch, work, device, coefficients, "decode")
    return prediction(work, prefill_time_s=jnp.maximum(*prefill), decode_time_per_token_s=decode)


METHOD = Method(
    name="life",
    title="LIFE",
    source="arXiv 2508.00904",
    inputs=("architecture", "workload", "TOPS", "memory bandwidth", "ec, em, dispatch time"),
    assumes=(
        "prefill is bound by compute or by memory as a whole, decode by memory alone",
        "one efficiency for all operators",
        "every operator is a dispatch of the same cost",
    ),
    leaves_out=("compute in large-batch decode", "capacity", "collectives", "energy"),
    published_accuracy=(
        "V100 decode 32.6/30.3/26.7 tokens/s at em = 50 % against 40.0/36.9/32.1 measured; CPU "
        "decode off by up to 3.6 times; no mean error is stated"
    ),
    gives=TIMES,
    forms={"default": (predict, default_coefficients)},
    default_note="ec = em = 50 % as the paper's V100 row, 5 us a dispatch: a choice before a fit",
)
