"""Level 3: what a serving system adds to the blocks of a pass, in time and in energy.

A step of an engine is its kernels, hidden behind or hiding the host that launches them, and work
that no block accounts for:

    t = max~(kernels, launches) + t_step + t_request B + sampling + t_parallel [GPUs > 1]
    kernels  = sum of blocks, each kind scaled by a fitted factor near one
    launches = layers x kernels a layer x t_launch     (an engine with CUDA graphs: nearly 0)
    sampling = passes x B x vocabulary x 4 bytes / DRAM bandwidth   (sorting logits takes many)

Continuous batching: in steady state B / L sequences end in a step and as many begin, so a step also
carries their prompts. The mean step holds lambda = B / L prompts; the median step holds fewer,
about lambda - ln 2 once lambda exceeds it (the median of a Poisson number of prompts of very
different lengths).

An eager engine writes the attention scores to memory and runs norms, rotations and activations as
chains of element-wise kernels; that traffic is added.

Energy follows level 1 (`hymell_jax.power`): board power between idle and the limit,

    E = T (P_idle + R s(U / T)),  R = P_limit - P_idle,  s(x) = x / (1 + x^8)^(1/8)
    U = f F / peak + d bytes / bandwidth + a t_busy + g (T - t_busy)

with F and bytes of all blocks, so that energy is the sum of its operators plus what the board draws
in the gaps, and saturates at the limit. All coefficients are natural logs of positive numbers.

Small networks (`hymell_jax.mlp`), one for ln T and one for ln U, shared by all devices, engines and
both phases, correct by a bounded factor under which time and energy still never fall as a size
grows, and which fades out away from the training range.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.analytical import PassCosts
from hymell_jax.gemm import peak_rate
from hymell_jax.mlp import MLPSpec, correction, familiarity
from hymell_jax.operators import PARTS, STREAM_PARTS
from hymell_jax.smooth import power_of_two, smooth_maximum
from hymell_jax.types import Architecture, Device, Workload

KINDS = ("matrix", "stream", "attention", "experts", "collectives")
"""Kinds of blocks; each has a factor of its own."""

_OTHER = {
    "attention": "attention",
    "window_attention": "attention",
    "linear_attention": "attention",
    "experts": "experts",
    "collectives": "collectives",
}
_KIND_OF = tuple("stream" if part in STREAM_PARTS else _OTHER.get(part, "matrix") for part in PARTS)
_STREAMED = np.array([kind not in ("stream", "collectives") for kind in _KIND_OF], np.float32)
_SORTER = np.array([[kind == k for k in KINDS] for kind in _KIND_OF], np.float32)

ENGINE_COEFFICIENTS: dict[str, tuple[float, float]] = {  # name: (prior mean, prior width)
    "log_matrix": (0.0, 0.1),
    "log_stream": (0.0, 0.3),
    "log_attention": (0.0, 0.1),
    "log_experts": (0.0, 0.1),
    "log_collectives": (0.0, 0.3),
    "log_prefill": (0.0, 0.3),
    "log_launch_s": (np.log(1e-6), 1.5),
    "log_step_s": (np.log(1e-3), 1.0),
    "log_request_s": (np.log(2e-5), 1.0),
    "log_sampling_passes": (np.log(50.0), 1.0),
    "log_parallel_s": (np.log(3e-4), 1.0),
    "log_fp8_layer_s": (np.log(3e-5), 1.0),
    "log_traffic": (0.0, 0.3),
    "eager": (0.0, 1e-6),
    "serial": (0.0, 1e-6),
    "unseen_prefill": (0.0, 1e-6),
}
"""Of time. Factors of kinds of blocks, seconds of the host, passes over the logits; `eager` is 1
where kernels are launched one by one and scores go through memory, else 0; `serial` is 1 where the
host itself computes, so that kernels cannot hide its work, else 0; `unseen_prefill` is 1 where no
prompt length was published, else 0. These three are not fitted.

Where prompt lengths are fitted, only their product with the speed of prefill is known, and factors
and networks learned from steps of decode say nothing of it: a prefill of known length is then that
of the blocks, with what the engine adds."""

FLAGS = ("eager", "serial", "unseen_prefill")
"""Coefficients that say what kind of engine it is, and are not fitted."""

ABSENT = {"serial": 0.0, "unseen_prefill": 0.0}
"""What a file without such a coefficient means."""

EAGER_COEFFICIENTS: dict[str, tuple[float, float]] = {
    "log_launch_s": (np.log(1.5e-5), 1.0),
    "log_step_s": (np.log(5e-4), 0.5),
    "log_request_s": (np.log(1e-6), 0.5),
    "eager": (1.0, 1e-6),
}
"""What differs where a framework launches kernels one by one from Python."""

ENERGY_COEFFICIENTS: dict[str, tuple[float, float]] = {
    "log_flops_share": (-0.3, 0.5),
    "log_fp8_flops_share": (-0.3, 0.5),
    "log_memory_share": (-0.1, 0.5),
    "log_busy_share": (-2.5, 1.0),
    "log_gap_share": (-2.5, 1.0),
}
"""Shares of the board's range between idle and limit: of compute at its peak, of DRAM at its full
rate, of running kernels whatever they do, and of waiting between them."""

MONOTONE = (
    "log2_matrix", "log2_attention", "log2_experts", "log2_layers", "log2_width", "log2_batch",
    "log2_tokens", "log2_context", "log2_physics",
)  # fmt: skip
FREE = ("prefill", "mixture", "parallel", "log2_heads_per_kv")
FEATURES = MONOTONE + FREE
"""Inputs of the networks: blocks in microseconds, sizes of model and workload, and last of the
`MONOTONE` ones, in which neither time nor energy may decrease, what the physics says of the target
in microseconds. The `FREE` ones say what kind of model and pass it is."""

NETWORK = MLPSpec(hidden=(12, 12), bound=float(np.log(1.25)), n_monotone=len(MONOTONE), embedding=8)

SCALE_FLOOR = 0.03  # of the ln of an error, however well the networks agree
SCALE_OUTSIDE = 0.15  # more of it where the sizes are nothing like those of training

NEWCOMERS = float(np.log(2.0))  # lambda below which the median step holds no prompt
NEWCOMERS_WIDTH = 0.3  # in which that sets in
OVERLAP = 8  # sharpness of the maximum of kernels and launches
LOGIT_BYTES = 4.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """A served workload. Leaves float32, shape (); energies of all GPUs."""

    prefill_time_s: jax.Array  # of all prompts of the batch
    prefill_energy_j: jax.Array
    decode_time_s: jax.Array  # the average step without newcomers
    decode_energy_j: jax.Array
    steady_time_s: jax.Array  # mean step under continuous batching
    steady_median_s: jax.Array
    steady_energy_j: jax.Array
    scale: jax.Array  # [2, 2], of errors of ln(time, energy) in (prefill, decode)
    familiarity: jax.Array  # 1 for sizes as in training, 0 far from them; the worse pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """What the lower levels say of one pass."""

    time_s: jax.Array  # [..., n_kinds]
    energy_j: jax.Array  # [...], of all GPUs, as the operators add up; level 3 counts anew
    flops: jax.Array  # [...], on each GPU
    memory_bytes: jax.Array  # [...], on each GPU
    streamed_bytes: jax.Array  # [...], of these what no cache holds between layers: weights and KV


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass before the network. Leaves float32, shape ()."""

    time_s: jax.Array
    busy_s: jax.Array  # while kernels run
    shares_s: jax.Array  # U: seconds of the board's range, on one GPU
    floor_s: jax.Array  # the roofline
    kinds_s: jax.Array  # [n_kinds], scaled


def priors(eager: bool = False) -> dict[str, tuple[float, float]]:
    """(mean, width) of every coefficient before any measurement, by kind of engine."""
    every = ENGINE_COEFFICIENTS | ENERGY_COEFFICIENTS
    return every | EAGER_COEFFICIENTS if eager else every


def default_coefficients(eager: bool = False) -> dict[str, Any]:
    """Prior means: an engine that nobody measured."""
    return {name: np.float32(mean) for name, (mean, _) in priors(eager).items()}


def eager_kernels(arch: Architecture) -> jax.Array:
    """Kernels of one decoder layer in transformers' eager mode.

    From the kernel lists of the EnergAIzer artifact and the published code of transformers'
    `modeling_gpt2` and `modeling_qwen2`: RMSNorm 5, LayerNorm 1; projections of query, key and
    value 3 with rotary positions, else 1 (fused); rotation 10, copies of the KV heads 2; scores,
    scale, mask, softmax and values 5 and two constants, or 7 with a float32 softmax; a copy, the
    output projection and two residual adds 4; the feed-forward products with 2 more where gated
    (SiLU, product), else 8 (GELU by tanh).
    """
    rotary = jnp.where(arch.position_rows > 0, 0.0, 1.0)
    gated = arch.n_ff_matrices - 2.0
    norms = arch.norms_per_layer * (arch.layer_norm + 5.0 * (1.0 - arch.layer_norm))
    norms = norms + 10.0 * arch.qk_norm_per_head
    projections = 1.0 + 14.0 * rotary
    return norms + projections + 7.0 + 4.0 + arch.n_ff_matrices + 8.0 - 6.0 * gated


def eager_traffic_bytes(arch: Architecture, tokens, pairs) -> jax.Array:
    """Bytes that one decoder layer moves in eager mode beyond fused kernels, on one GPU.

    16-bit tensors, read and written by every kernel of `eager_kernels`: scores 16 bytes each, 32
    with a float32 softmax; RMSNorm 26 an element, rotation 20, GELU by tanh 32, gated 4.

    Args:
        arch: what runs.
        tokens: rows of the pass.
        pairs: scores of one head, over all sequences; all of them, masked ones too.
    """
    rotary = jnp.where(arch.position_rows > 0, 0.0, 1.0)
    gated = arch.n_ff_matrices - 2.0
    scores = pairs * arch.n_heads * (16.0 + 16.0 * rotary)
    norms = arch.norms_per_layer * (1.0 - arch.layer_norm) * 26.0 * arch.d_model
    rotation = rotary * 20.0 * (arch.n_heads + arch.n_kv_heads) * arch.head_dim
    activation = (32.0 - 28.0 * gated) * arch.d_ff
    return scores + tokens * (norms + rotation + activation)


def blocks_of(costs: PassCosts) -> Blocks:
    """The parts of a pass, [..., n_parts], summed by kind."""
    return Blocks(
        time_s=costs.time_s @ _SORTER,
        energy_j=jnp.sum(costs.energy_j, -1),
        flops=jnp.sum(costs.flops, -1),
        memory_bytes=jnp.sum(costs.memory_bytes, -1),
        streamed_bytes=costs.memory_bytes @ _STREAMED,
    )


def _factors(c: Mapping[str, jax.Array], prefill: float) -> jax.Array:
    logs = jnp.stack([c[f"log_{kind}"] for kind in KINDS])
    return jnp.exp(_learned(c, prefill) * logs + prefill * c["log_prefill"])


def _learned(c: Mapping[str, jax.Array], prefill: float) -> jax.Array:
    """1 for a pass that factors and networks were learned from, 0 for a prefill nobody timed."""
    return 1.0 - prefill * c["unseen_prefill"]


def serve_pass(
    c: Mapping[str, jax.Array],
    device: Device,
    arch: Architecture,
    work: Workload,
    blocks: Blocks,
    prefill: bool,
) -> Pass:
    """One pass of the whole model as the engine runs it, before the network."""
    batch = work.batch_size
    if prefill:
        tokens, pairs = batch * work.prompt_tokens, batch * jnp.square(work.prompt_tokens)
    else:
        context = 0.5 * (work.context_start_tokens + work.context_end_tokens)
        tokens, pairs = batch, batch * context
    traffic = arch.n_layers * eager_traffic_bytes(arch, tokens, pairs) / work.tensor_parallel
    traffic_s = c["eager"] * jnp.exp(c["log_traffic"]) * traffic / device.memory_bytes_per_s
    kinds = blocks.time_s * _factors(c, float(prefill))
    kinds = kinds + traffic_s * np.eye(len(KINDS), dtype=np.float32)[KINDS.index("stream")]
    logits = batch * arch.vocab_size * LOGIT_BYTES / device.memory_bytes_per_s
    sampling = jnp.exp(c["log_sampling_passes"]) * logits * (1.0 - c["eager"])
    kernels = jnp.sum(kinds)
    per_layer = c["eager"] * eager_kernels(arch) + (1.0 - c["eager"]) * 8.0
    quantised = jnp.clip(2.0 - work.weight_bytes, 0.0, 1.0)
    launches = arch.n_layers * (
        per_layer * jnp.exp(c["log_launch_s"]) + quantised * jnp.exp(c["log_fp8_layer_s"])
    )
    several = jnp.clip(work.tensor_parallel - 1.0, 0.0, 1.0)
    host = jnp.exp(c["log_step_s"]) + batch * jnp.exp(c["log_request_s"])
    host = host + several * jnp.exp(c["log_parallel_s"])
    overlapped = smooth_maximum(kernels, launches, sharpness=OVERLAP)
    serial = c["serial"] * (kernels + launches)
    time_s = (1.0 - c["serial"]) * overlapped + serial + sampling + host
    flops, moved = blocks.flops, blocks.memory_bytes
    peak = peak_rate(device, work.weight_bytes)
    log_flops_share = (
        c["log_flops_share"] * (1.0 - quantised) + c["log_fp8_flops_share"] * quantised
    )
    busy = kernels + sampling
    shares = (
        jnp.exp(log_flops_share) * flops / peak
        + jnp.exp(c["log_memory_share"]) * (moved / device.memory_bytes_per_s + traffic_s)
        + jnp.exp(c["log_busy_share"]) * busy
        + jnp.exp(c["log_gap_share"]) * jnp.maximum(time_s - busy, 0.0)
    )
    return Pass(
        time_s=time_s,
        busy_s=busy,
        shares_s=shares,
        floor_s=jnp.maximum(flops / peak, blocks.streamed_bytes / device.memory_bytes_per_s),
        kinds_s=kinds,
    )


def energy_j(device: Device, time_s: jax.Array, shares_s: jax.Array) -> jax.Array:
    """Joules of one GPU: T (P_idle + R s(U / T)); non-decreasing in T and in U."""
    x = jnp.minimum(shares_s / jnp.maximum(time_s, 1e-12), 1e3)
    saturated = x / (1.0 + power_of_two(x, 8)) ** 0.125
    return time_s * (device.idle_power_w + (device.power_limit_w - device.idle_power_w) * saturated)


def newcomers(batch_size: jax.Array, output_tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Prompts in the mean and in the median step of continuous batching.

    The second is convex and zero at zero, so its share of the first never falls.
    """
    mean = batch_size / output_tokens
    width = NEWCOMERS_WIDTH
    at_zero = float(np.log1p(np.exp(-NEWCOMERS / width)))
    return mean, width * (jax.nn.softplus((mean - NEWCOMERS) / width) - at_zero)


def features(
    arch: Architecture, work: Workload, one: Pass, prefill: bool, physics_s: jax.Array
) -> jax.Array:
    """Inputs of a network for one pass, [n] in the order of `FEATURES`, not standardised.

    Args:
        arch, work: what runs.
        one: the pass before correction.
        prefill: which pass it is.
        physics_s: its T for the network of time, its U for that of energy, in seconds.
    """
    context = 0.5 * (work.context_start_tokens + work.context_end_tokens)
    tokens = work.prompt_tokens if prefill else jnp.ones_like(context)
    kinds = jnp.log2(1e6 * one.kinds_s + 1.0)
    values = [
        kinds[KINDS.index("matrix")],
        kinds[KINDS.index("attention")],
        kinds[KINDS.index("experts")],
        jnp.log2(arch.n_layers),
        jnp.log2(arch.d_model),
        jnp.log2(work.batch_size),
        jnp.log2(work.batch_size * tokens),
        jnp.log2(work.prompt_tokens if prefill else context),
        jnp.log2(1e6 * physics_s),
        float(prefill) * jnp.ones_like(context),
        jnp.clip(arch.n_experts, 0.0, 1.0) * arch.moe_fraction,
        jnp.clip(work.tensor_parallel - 1.0, 0.0, 1.0),
        jnp.log2(arch.n_heads / arch.n_kv_heads),
    ]
    return jnp.stack(jnp.broadcast_arrays(*values))


def correct(
    network: Mapping[str, Any] | None, values: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Correction of ln T or ln U, the scale of its error, and how familiar the sizes are.

    Args:
        network: "params" with an ensemble axis and "normalizer"; None corrects nothing.
        values: of `features`.
    """
    if network is None:
        zero = 0.0 * jnp.sum(values)
        return zero, zero + SCALE_FLOOR, zero + 1.0
    mean, spread = correction(
        network["params"], NETWORK, network["normalizer"], values, fade_above=False
    )
    known = familiarity(network["normalizer"], values, NETWORK.n_monotone)
    outside = SCALE_OUTSIDE * (1.0 - known)
    return mean, jnp.sqrt(SCALE_FLOOR**2 + jnp.square(spread) + jnp.square(outside)), known


def _corrected(c, network, device, arch, work, one: Pass, prefill: bool):
    """(T, U, scales [2], ln factor, familiarity) after the networks; T is at least the roofline."""
    networks = network or {"time": None, "energy": None}
    time, time_scale, known = correct(
        networks["time"], features(arch, work, one, prefill, one.time_s)
    )
    energy, energy_scale, _ = correct(
        networks["energy"], features(arch, work, one, prefill, one.shares_s)
    )
    learned = _learned(c, float(prefill))
    time, energy = learned * time, learned * energy
    time_s = jnp.maximum(one.time_s * jnp.exp(time), one.floor_s)
    scales = jnp.stack([time_scale, energy_scale])
    return time_s, one.shares_s * jnp.exp(energy), scales, time, known


def serve_blocks(
    coefficients: Mapping[str, jax.Array],
    network: Mapping[str, Any] | None,
    device: Device,
    arch: Architecture,
    work: Workload,
    prefill: Blocks,
    decode: Blocks,
) -> Served:
    """`serve` from blocks already summed by kind."""
    c, gpus, batch = coefficients, work.tensor_parallel, work.batch_size
    pre = serve_pass(c, device, arch, work, prefill, True)
    dec = serve_pass(c, device, arch, work, decode, False)
    given = c, network, device, arch, work
    pre_s, pre_u, pre_scale, pre_log, pre_known = _corrected(*given, pre, True)
    dec_s, dec_u, dec_scale, _, dec_known = _corrected(*given, dec, False)
    prompt_s = jnp.sum(pre.kinds_s) * jnp.exp(pre_log) / batch
    in_mean, in_median = newcomers(batch, work.output_tokens)
    steady_s = dec_s + in_mean * prompt_s
    return Served(
        prefill_time_s=pre_s,
        prefill_energy_j=gpus * energy_j(device, pre_s, pre_u),
        decode_time_s=dec_s,
        decode_energy_j=gpus * energy_j(device, dec_s, dec_u),
        steady_time_s=steady_s,
        steady_median_s=dec_s + in_median * prompt_s,
        steady_energy_j=gpus * energy_j(device, steady_s, dec_u + in_mean * pre_u / batch),
        scale=jnp.stack([pre_scale, dec_scale]),
        familiarity=jnp.minimum(pre_known, dec_known),
    )


def serve(
    coefficients: Mapping[str, jax.Array],
    network: Mapping[str, Any] | None,
    device: Device,
    arch: Architecture,
    work: Workload,
    prefill_costs: PassCosts,
    decode_costs: PassCosts,
) -> Served:
    """What a serving engine makes of the blocks of a workload. Inputs with leaves of shape ().

    Args:
        coefficients: of one engine on one device, the names of `ENGINE_COEFFICIENTS` and
            `ENERGY_COEFFICIENTS`.
        network: "time" and "energy", each as in `correct`; None for physics alone.
        device: data sheet.
        arch, work: what runs.
        prefill_costs, decode_costs: the two passes by `analytical.model_costs`.
    """
    blocks = blocks_of(prefill_costs), blocks_of(decode_costs)
    return serve_blocks(coefficients, network, device, arch, work, *blocks)


def error_scale(served: Served, quantile: jax.Array) -> jax.Array:
    """Half width of the interval of ln(time, energy) in (prefill, decode), [2, 2].

    Split conformal: the quantile of |ln error| / scale over left-out models, times the scale here.
    """
    return served.scale * quantile
