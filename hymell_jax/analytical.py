"""Level 1: seconds and joules of every operator of a pass, from counts, data sheet and fits.

`pass_costs` adds nothing up and corrects nothing: it returns one number per part, so that a reader
sees what dominates and the higher levels have something to correct. Times are of one pass over all
layers; energies are of all GPUs of a tensor-parallel group.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax import attention, collectives, gemm, operators, power, rowwise
from hymell_jax.operators import MATRIX_PARTS, PARTS, STREAM_PARTS
from hymell_jax.types import Architecture, Device, Workload

BOUNDS = ("launch", "compute", "cache", "latency", "memory", "split", "network")
"""What holds an operator up; axis order of `PassCosts.bounds`."""

GATE_TEMPERATURE = 0.1  # of the reported regimes, in natural-log units

_GEMM_BOUNDS = np.eye(len(gemm.BOUNDS), len(BOUNDS), dtype=np.float32)
_ATTENTION_BOUNDS = np.zeros((len(attention.ATTENTION_REGIMES), len(BOUNDS)), np.float32)
for _row, _name in enumerate(attention.ATTENTION_REGIMES):
    _column = {"tensor": "compute", "exp": "compute", "tiles": "latency", "chain": "latency"}
    _ATTENTION_BOUNDS[_row, BOUNDS.index(_column.get(_name, _name))] = 1.0

_OPTIONAL_MATRICES = {
    "router": "experts",
    "shared_expert_up": "experts",
    "shared_expert_down": "experts",
    "latent_q_down": "latent",
    "latent_q_up": "latent",
    "latent_kv_down": "latent",
    "latent_kv_up": "latent",
    "linear_in": "linear",
    "linear_out": "linear",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PassCosts:
    """One pass through the model; arrays [n_parts, ...] in the order of `operators.PARTS`."""

    time_s: jax.Array  # [n_parts], on each GPU
    energy_j: jax.Array  # [n_parts], of all GPUs
    flops: jax.Array  # [n_parts], on each GPU
    memory_bytes: jax.Array  # [n_parts], operands and results, on each GPU
    bounds: jax.Array  # [n_parts, n_bounds], shares of what holds the part up, sum one
    regimes: jax.Array  # [n_parts, 5], weights of `gemm.REGIMES`, sum one


class _Table:
    """Collects scalars per part, then stacks them in the order of `PARTS`."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, part, *, time, count, flops, moved, cached, fp8, bounds) -> None:
        self.rows[part] = dict(
            time=time, count=count, flops=flops, moved=moved, cached=cached, fp8=fp8, bounds=bounds
        )

    def column(self, name: str, empty) -> jax.Array:
        values = [self.rows[p][name] if p in self.rows else empty for p in PARTS]
        shape = jnp.broadcast_shapes(*(jnp.shape(v) for v in values))
        return jnp.stack([jnp.broadcast_to(jnp.asarray(v), shape) for v in values])


def _has(structure: frozenset[str] | None, block: str) -> bool:
    return structure is None or block in structure


def _add_matrices(table, coefficients, device, arch, work, rows, structure) -> None:
    products = operators.matrix_products(arch, work, rows)
    keep = [
        i
        for i, part in enumerate(MATRIX_PARTS)
        if _has(structure, _OPTIONAL_MATRICES.get(part, "")) or part not in _OPTIONAL_MATRICES
    ]
    shapes = jax.tree.map(lambda leaf: leaf[np.array(keep)], products)

    def one(m, n, k, weight_bytes, input_bytes):
        return gemm.gemm_time(
            coefficients, device, m, n, k, weight_bytes, input_bytes, streaming_weights=1.0
        )

    time_s, shares = jax.vmap(one)(
        shapes.m, shapes.n, shapes.k, shapes.weight_bytes, shapes.input_bytes
    )
    bounds = shares @ _GEMM_BOUNDS
    flops = gemm.floating_operations(shapes.m, shapes.n, shapes.k)
    moved = (
        shapes.n * shapes.k * shapes.weight_bytes
        + shapes.m * shapes.k * shapes.input_bytes
        + shapes.m * shapes.n * work.activation_bytes
    )
    cached = flops * 0.5 * (shapes.input_bytes / 256.0 + shapes.weight_bytes / 128.0)
    for row, index in enumerate(keep):
        table.add(
            MATRIX_PARTS[index],
            time=time_s[row],
            count=shapes.count[row],
            flops=flops[row],
            moved=moved[row],
            cached=cached[row],
            fp8=_fp8_share(shapes.input_bytes[row]),
            bounds=bounds[row],
        )


def _fp8_share(element_bytes: jax.Array) -> jax.Array:
    return jnp.clip(2.0 - element_bytes, 0.0, 1.0)


def _add_streams(table, coefficients, device, arch, work, rows) -> None:
    streams = operators.stream_operators(arch, work, rows)
    fused = coefficients["residual_fused"]
    for index, part in enumerate(STREAM_PARTS):
        element_bytes = streams.bytes_per_element[index]
        count = streams.count[index]
        if part == "norms":
            element_bytes = element_bytes * (1.0 + fused)
        if part == "residual_add":
            count = count * (1.0 - fused)
        time_s, shares = rowwise.rowwise_time_s(
            coefficients[part], device, streams.rows[index], streams.cols[index], element_bytes
        )
        elements = streams.rows[index] * streams.cols[index]
        table.add(
            part,
            time=time_s,
            count=count,
            flops=elements * jnp.where(part == "embedding", 0.0, 2.0),
            moved=elements * element_bytes,
            cached=0.0,
            fp8=0.0,
            bounds=_two_bounds(shares[0]),
        )


def _two_bounds(launch_share) -> jax.Array:
    """Bounds of an operator that is launch or memory bound."""
    launch, memory = BOUNDS.index("launch"), BOUNDS.index("memory")
    columns = [0.0 * launch_share] * len(BOUNDS)
    columns[launch], columns[memory] = launch_share, 1.0 - launch_share
    return jnp.stack(columns)


def _attention_shape(arch: Architecture, work: Workload, absorbed: bool):
    """Heads, KV heads and widths of the attention core on one GPU.

    Latent attention runs as ordinary heads in prefill, and in decode as one shared KV head of
    kv_lora_rank + rope_head_dim whose values are the first kv_lora_rank elements of its keys.
    """
    tp = work.tensor_parallel
    heads = arch.n_heads / tp
    kv_heads = jnp.maximum(arch.n_kv_heads / tp, 1.0)
    if not absorbed:
        return heads, kv_heads, arch.head_dim, arch.value_head_dim
    latent = arch.latent_attention
    plain = 1.0 - latent
    return (
        heads,
        kv_heads * plain + latent,
        arch.head_dim * plain + (arch.kv_lora_rank + arch.rope_head_dim) * latent,
        arch.value_head_dim * plain + arch.kv_lora_rank * latent,
    )


def _add_attention(table, coefficients, device, arch, work, phase, structure) -> None:
    layers = operators.layer_counts(arch)
    decode = phase == "decode"
    heads, kv_heads, key_width, value_width = _attention_shape(
        arch, work, absorbed=decode and _has(structure, "latent")
    )
    kinds = [("attention", 0.0, layers["full"])]
    if _has(structure, "window"):
        window = jnp.maximum(arch.window_tokens, 1.0)
        kinds.append(("window_attention", window, layers["window"]))
    for part, window, count in kinds:
        if decode:
            points, weights = np.polynomial.legendre.leggauss(3)
            middle = 0.5 * (work.context_start_tokens + work.context_end_tokens)
            half = 0.5 * (work.context_end_tokens - work.context_start_tokens)
            tokens = middle + half * np.float32(points)
            shares_of_steps = np.float32(weights / 2.0)
            run = attention.attention_decode_time_s
        else:
            tokens, shares_of_steps = work.prompt_tokens[None], np.ones(1, np.float32)
            run = attention.attention_prefill_time_s

        def at(
            tokens,
            window=window,
            run=run,
        ):
            time_s, regime = run(
                coefficients,
                device,
                work.batch_size,
                tokens,
                heads,
                kv_heads,
                key_width,
                value_width,
                window_tokens=window,
                kv_bytes=work.kv_bytes,
                l2_residency=0.0,
            )
            pairs = (
                attention.attended_keys(tokens, window)
                if decode
                else attention.causal_pairs(tokens, window)
            )
            flops = 2.0 * work.batch_size * heads * (key_width + value_width) * pairs
            cached = attention.attended_keys(tokens, window) if decode else tokens
            moved = (
                work.batch_size * cached * kv_heads * (key_width + value_width) * work.kv_bytes
                + work.batch_size
                * (1.0 if decode else tokens)
                * heads
                * (key_width + value_width)
                * work.activation_bytes
            )
            return time_s, regime, flops, moved

        time_s, regime, flops, moved = jax.vmap(at)(tokens)
        average = lambda x, w=shares_of_steps: jnp.tensordot(w, x, axes=1)  # noqa: E731
        table.add(
            part,
            time=average(time_s),
            count=count,
            flops=average(flops),
            moved=average(moved),
            cached=0.0,
            fp8=0.0,
            bounds=average(regime) @ _ATTENTION_BOUNDS,
        )


def _add_experts(table, coefficients, device, arch, work, rows) -> None:
    e = operators.expert_products(arch, work, rows)
    routed = e.rows_per_expert
    up = (e.n_matrices - 1.0) * e.d_expert

    def product(n, k):
        return gemm.gemm_time(
            coefficients,
            device,
            jnp.maximum(routed, 1.0),
            n,
            k,
            e.weight_bytes,
            e.input_bytes,
            groups=jnp.maximum(e.touched, 1e-3),
            streaming_weights=1.0,
        )

    (up_s, up_shares), (down_s, down_shares) = (
        product(up, e.d_model),
        product(e.d_model, e.d_expert),
    )
    time_s = up_s + down_s
    width = e.n_matrices * e.d_model * e.d_expert
    flops = 2.0 * routed * e.touched * width
    moved = e.touched * (
        width * e.weight_bytes
        + routed * (2.0 * e.d_model + (e.n_matrices + 1.0) * e.d_expert) * work.activation_bytes
    )
    table.add(
        "experts",
        time=time_s,
        count=e.count,
        flops=flops,
        moved=moved,
        cached=flops * 0.5 * (e.input_bytes / 256.0 + e.weight_bytes / 128.0),
        fp8=_fp8_share(e.input_bytes),
        bounds=((up_shares * up_s + down_shares * down_s) / time_s) @ _GEMM_BOUNDS,
    )


def _add_linear(table, coefficients, device, arch, work, rows, phase) -> None:
    """Gated delta net: a recurrent state per value head, read and written by every step.

    Prefill works through chunks of 64 tokens: about 6 head_dim^2 multiply-adds a token and head
    (Gated DeltaNet, arXiv 2412.06464); decode moves the float32 state twice.
    """
    c = coefficients
    heads = arch.linear_v_heads / work.tensor_parallel
    state = heads * arch.linear_head_dim * arch.linear_head_dim
    flops = rows * state * 12.0
    states = work.batch_size if phase == "decode" else rows / 64.0 + work.batch_size
    width = (2.0 * arch.linear_k_heads + 2.0 * arch.linear_v_heads) * arch.linear_head_dim
    moved = states * state * 8.0 + rows * width / work.tensor_parallel * work.activation_bytes * 2.0
    launch = jnp.exp(c["log_launch_s"]) * jnp.ones_like(flops)
    compute = flops / device.peak_flops_per_s * (1.0 + jnp.exp(c["log_compute_excess"]))
    memory = moved / device.memory_bytes_per_s * (1.0 + jnp.exp(c["log_memory_excess"]))
    time_s = launch + compute + memory
    columns = [0.0 * time_s] * len(BOUNDS)
    for name, term in (("launch", launch), ("compute", compute), ("memory", memory)):
        columns[BOUNDS.index(name)] = term / time_s
    table.add(
        "linear_attention",
        time=time_s,
        count=operators.layer_counts(arch)["linear"],
        flops=flops,
        moved=moved,
        cached=0.0,
        fp8=0.0,
        bounds=jnp.stack(columns),
    )


def _add_collectives(table, coefficients, device, arch, work, rows) -> None:
    """Two all-reduces of the hidden state a layer between tensor-parallel GPUs."""
    message = rows * arch.d_model * work.activation_bytes
    time_s = collectives.all_reduce_time_s(coefficients, device, message, work.tensor_parallel)
    columns = [0.0 * time_s] * len(BOUNDS)
    columns[BOUNDS.index("network")] = jnp.ones_like(time_s)
    table.add(
        "collectives",
        time=time_s,
        count=2.0 * arch.n_layers,
        flops=0.0 * time_s,
        moved=2.0 * message,
        cached=0.0,
        fp8=0.0,
        bounds=jnp.stack(columns),
    )


def pass_costs(
    coefficients: dict[str, Any],
    device: Device,
    arch: Architecture,
    work: Workload,
    phase: str,
    structure: frozenset[str] | None = None,
) -> PassCosts:
    """Cost of every part of one prefill pass, or of the average decode step; leaves of shape ().

    Args:
        coefficients: of every operator, as a checkpoint holds them.
        device: data sheet.
        arch, work: what runs; relaxed or concrete.
        phase: "prefill" (all prompt tokens of all sequences in one pass) or "decode" (one token of
            each sequence, averaged over the contexts of the workload with three Gauss points).
        structure: optional blocks that the model has (`operators.structure_of`); None for all.
    """
    rows = work.batch_size * (work.prompt_tokens if phase == "prefill" else 1.0)
    table = _Table()
    _add_matrices(table, coefficients["gemm"], device, arch, work, rows, structure)
    _add_streams(table, coefficients["stream"], device, arch, work, rows)
    _add_attention(table, coefficients["attention"], device, arch, work, phase, structure)
    if _has(structure, "experts"):
        _add_experts(table, coefficients["gemm"], device, arch, work, rows)
    if _has(structure, "linear"):
        _add_linear(table, coefficients["linear"], device, arch, work, rows, phase)
    if _has(structure, "parallel"):
        _add_collectives(table, coefficients["collectives"], device, arch, work, rows)
    return _finish(table, coefficients["power"], device, work)


def _finish(table: _Table, coefficients, device: Device, work: Workload) -> PassCosts:
    one_time, count = table.column("time", 0.0), table.column("count", 0.0)
    flops, moved = table.column("flops", 0.0), table.column("moved", 0.0)
    cached = table.column("cached", 0.0)
    safe = jnp.maximum(one_time, 1e-12)
    watts = jax.vmap(power.board_power_w, in_axes=(None, None, 0, 0, 0, 0))(
        coefficients, device, flops / safe, moved / safe, cached / safe, table.column("fp8", 0.0)
    )
    time_s = one_time * count
    no_bound = np.eye(len(BOUNDS), dtype=np.float32)[0]
    peak = gemm.peak_rate(device, 2.0 - table.column("fp8", 0.0))
    ratio = jnp.log(jnp.maximum(flops, 1.0) / peak) - jnp.log(
        jnp.maximum(moved, 1.0) / device.memory_bytes_per_s
    )
    return PassCosts(
        time_s=time_s,
        energy_j=time_s * watts * work.tensor_parallel,
        flops=flops * count,
        memory_bytes=moved * count,
        bounds=table.column("bounds", no_bound),
        regimes=gemm.regime_gates(ratio, flops, GATE_TEMPERATURE),
    )
