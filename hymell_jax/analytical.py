"""Levels 1 and 2: seconds and joules of every part of a pass, from counts, data sheet and fits.

`model_costs` adds nothing up: it returns one number per part, so that a reader sees what dominates
and level 3 has something to start from. Without `blocks` it is level 1; with them, what they cover
(`hymell_jax.blocks`) is corrected by their networks. Times are of one pass over all layers;
energies are of all GPUs of a tensor-parallel group. Both phases go through the same traced code, as
a leading axis, so that each equation is compiled once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax import attention, blocks, collectives, gemm, latent, operators, power, rowwise
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
    """Passes through the model; arrays [n_parts, ...] in the order of `operators.PARTS`."""

    time_s: jax.Array  # [n_parts], on each GPU
    energy_j: jax.Array  # [n_parts], of all GPUs
    flops: jax.Array  # [n_parts], on each GPU
    memory_bytes: jax.Array  # [n_parts], operands and results, on each GPU
    bounds: jax.Array  # [n_parts, n_bounds], shares of what holds the part up, sum one
    regimes: jax.Array  # [n_parts, 5], weights of `gemm.REGIMES`, sum one
    spread: jax.Array  # [n_parts], relative standard deviation of the time over the ensembles
    familiarity: jax.Array  # [n_parts], 1 where the networks know such sizes, 0 far from them


class _Table:
    """Collects columns [n_phases] per part, then stacks them in the order of `PARTS`."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, jax.Array]] = {}

    def add(self, part: str, **columns: Any) -> None:
        """Columns of one part; those left out are zero."""
        empty = jnp.zeros_like(columns["time"])
        full = dict.fromkeys(("cached", "fp8", "spread"), empty) | columns
        full.setdefault("familiarity", jnp.ones_like(empty))
        self.rows[part] = full

    def column(self, name: str) -> jax.Array:
        """[n_phases, n_parts] or, for bounds, [n_phases, n_parts, n_bounds]."""
        present = next(iter(self.rows.values()))[name]
        empty = jnp.ones_like(present) if name == "familiarity" else jnp.zeros_like(present)
        if name == "bounds":
            empty = empty.at[..., 0].set(1.0)
        return jnp.stack([self.rows[p][name] if p in self.rows else empty for p in PARTS], 1)

    def replace(self, part: str, found: list[blocks.BlockTime], device: Device) -> None:
        """Take the time of a part from a block, one `BlockTime` a phase, never below its bound."""
        row = self.rows[part]
        bound = _bound_s(row, device)
        row["time"] = jnp.maximum(jnp.stack([one.time_s for one in found]), bound)
        row["spread"] = jnp.stack([one.spread for one in found])
        row["familiarity"] = jnp.stack([one.familiarity for one in found])

    def rescale(
        self, parts: tuple[str, ...], found: list[blocks.BlockTime], layers, device: Device
    ) -> None:
        """Scale parts so that together they take the seconds of a block a layer."""
        rows = [self.rows[part] for part in parts if part in self.rows]
        total = sum(row["time"] * row["count"] for row in rows)
        bound = sum(_bound_s(row, device) * row["count"] for row in rows)
        target = jnp.maximum(jnp.stack([one.time_s for one in found]) * layers, bound)
        known = (layers > 0) & (total > 0)
        factor = jnp.where(known, target / jnp.where(known, total, 1.0), 1.0)
        for row in rows:
            row["time"] = row["time"] * factor
            for name in ("spread", "familiarity"):
                of_block = jnp.stack([getattr(one, name) for one in found])
                row[name] = jnp.where(known, of_block, row[name])


def _bound_s(row: dict[str, jax.Array], device: Device) -> jax.Array:
    """Least seconds by the data sheet, [n_phases]."""
    compute = row["flops"] / gemm.peak_rate(device, 2.0 - row["fp8"])
    return jnp.maximum(compute, row["moved"] / device.memory_bytes_per_s)


def _has(structure: frozenset[str] | None, block: str) -> bool:
    return structure is None or block in structure


def _fp8_share(element_bytes: jax.Array) -> jax.Array:
    return jnp.clip(2.0 - element_bytes, 0.0, 1.0)


def _bound(name: str, like: jax.Array) -> jax.Array:
    """All of `like`'s entries bound by one thing, [..., n_bounds]."""
    one_hot = np.eye(len(BOUNDS), dtype=np.float32)[BOUNDS.index(name)]
    return jnp.ones_like(like)[..., None] * one_hot.reshape((1,) * like.ndim + (-1,))


def _expert_shapes(experts: operators.ExpertProducts):
    """(m, n, k, weight bytes, input bytes, groups) of the up and down products of the experts."""
    rows = jnp.maximum(experts.rows_per_expert, 1.0)
    groups = jnp.maximum(experts.touched, 1e-3)
    up = (experts.n_matrices - 1.0) * experts.d_expert
    shared = (experts.weight_bytes, experts.input_bytes, groups)
    return (
        (rows, up, experts.d_model, *shared),
        (rows, experts.d_model, experts.d_expert, *shared),
    )


def _add_products(table, coefficients, device, arch, work, rows, structure) -> None:
    """Every matrix product of both phases, experts included, through one traced `gemm_time`."""
    products = jax.vmap(lambda r: operators.matrix_products(arch, work, r))(rows)
    keep = np.array(
        [
            i
            for i, part in enumerate(MATRIX_PARTS)
            if part not in _OPTIONAL_MATRICES or _has(structure, _OPTIONAL_MATRICES[part])
        ]
    )
    p = jax.tree.map(lambda leaf: leaf[:, keep], products)
    shapes = [p.m, p.n, p.k, p.weight_bytes, p.input_bytes, jnp.ones_like(p.m)]
    routed = _has(structure, "experts")
    if routed:
        experts = jax.vmap(lambda r: operators.expert_products(arch, work, r))(rows)
        more = zip(*_expert_shapes(experts), strict=True)
        shapes = [
            jnp.concatenate([column, jnp.stack(jnp.broadcast_arrays(*pair), 1)], 1)
            for column, pair in zip(shapes, more, strict=True)
        ]

    def one(shape):
        m, n, k, weight_bytes, input_bytes, groups = shape
        return gemm.gemm_time(coefficients, device, m, n, k, weight_bytes, input_bytes, groups, 1.0)

    # a loop, not an axis: a batch of architectures is then contiguous inside `gemm_time`
    time_s, shares = jax.lax.map(one, tuple(column.reshape(-1) for column in shapes))
    time_s, shares = (x.reshape(*shapes[0].shape, *x.shape[1:]) for x in (time_s, shares))
    bounds = shares @ _GEMM_BOUNDS
    m, n, k, weight_bytes, input_bytes, groups = shapes
    flops = groups * gemm.floating_operations(m, n, k)
    moved = groups * (n * k * weight_bytes + m * k * input_bytes + m * n * work.activation_bytes)
    cached = flops * gemm.cached_bytes_per_flop(weight_bytes, input_bytes)
    for column, index in enumerate(keep):
        table.add(
            MATRIX_PARTS[index],
            time=time_s[:, column],
            count=p.count[:, column],
            flops=flops[:, column],
            moved=moved[:, column],
            cached=cached[:, column],
            fp8=_fp8_share(input_bytes[:, column]),
            bounds=bounds[:, column],
        )
    if routed:
        both = slice(len(keep), len(keep) + 2)
        total = time_s[:, both].sum(1)
        table.add(
            "experts",
            time=total,
            count=experts.count,
            flops=flops[:, both].sum(1),
            moved=moved[:, both].sum(1),
            cached=cached[:, both].sum(1),
            fp8=_fp8_share(experts.input_bytes),
            bounds=jnp.sum(bounds[:, both] * (time_s[:, both] / total[:, None])[..., None], 1),
        )


def _add_streams(table, coefficients, device, arch, work, rows) -> None:
    streams = jax.vmap(lambda r: operators.stream_operators(arch, work, r))(rows)
    fused = coefficients["residual_fused"]
    is_norm, is_add, computes = (
        np.array([part in names for part in STREAM_PARTS], np.float32)[None]
        for names in (("norms",), ("residual_add",), set(STREAM_PARTS) - {"embedding"})
    )
    element = streams.bytes_per_element * (1.0 + fused * is_norm)
    count = streams.count * (1.0 - fused * is_add)
    by_part = [coefficients[part] for part in STREAM_PARTS]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves * len(rows)), *by_part)

    def one(operator):
        c, rows, cols, element = operator
        return rowwise.rowwise_time_s(c, device, rows, cols, element, one_kernel=True)

    # a loop, as in `_add_products`
    sizes = (streams.rows, streams.cols, element)
    time_s, shares = jax.lax.map(one, (stacked, *(column.reshape(-1) for column in sizes)))
    time_s, shares = (x.reshape(*element.shape, *x.shape[1:]) for x in (time_s, shares))
    launch = shares[..., 0:1]
    bounds = launch * _bound("launch", time_s) + (1.0 - launch) * _bound("memory", time_s)
    elements = streams.rows * streams.cols
    for index, part in enumerate(STREAM_PARTS):
        table.add(
            part,
            time=time_s[:, index],
            count=count[:, index],
            flops=2.0 * (elements * computes)[:, index],
            moved=(elements * element)[:, index],
            bounds=bounds[:, index],
        )


_GAUSS_POINTS, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(3)


def _attention_phase(
    coefficients, device, arch, work, decode: bool, absorbed: bool, windows, trained
):
    """(time, FLOPs, bytes, bounds, spread, familiarity) of one layer, [n_kinds] each.

    Args:
        windows: [n_kinds], 0 for full attention.
        trained: blocks by name.
    """
    heads, kv_heads, key_width, value_width = operators.attention_shape(arch, work, absorbed)
    batch, kv_bytes = work.batch_size, work.kv_bytes
    phase = "decode" if decode else "prefill"
    run, block = attention.ATTENTION_TIME_S[phase], trained.get(f"attention_{phase}")
    if decode:
        middle = 0.5 * (work.context_start_tokens + work.context_end_tokens)
        half = 0.5 * (work.context_end_tokens - work.context_start_tokens)
        tokens = middle + half * np.float32(_GAUSS_POINTS)
        weights = (_GAUSS_WEIGHTS / 2.0).astype(np.float32)
    else:
        tokens, weights = work.prompt_tokens[None], np.ones(1, np.float32)

    def at(tokens, window):
        sizes = (batch, tokens, heads, kv_heads, key_width, value_width, window, kv_bytes)
        time_s, regime = run(coefficients, device, *sizes, 0.0)
        spread, familiarity = jnp.zeros_like(time_s), jnp.ones_like(time_s)
        if block is not None:
            found = blocks.attention_time(
                block, phase, coefficients, device, time_s, *sizes, l2_residency=0.0
            )
            time_s, spread, familiarity = found.time_s, found.spread, found.familiarity
        flops, moved = attention.core_work(phase, *sizes, work.activation_bytes)
        return time_s, flops, moved, spread, familiarity, regime

    over_kinds = jax.vmap(jax.vmap(at, in_axes=(0, None)), in_axes=(None, 0))
    found = over_kinds(tokens, windows)
    time_s, flops, moved, spread, familiarity = (x @ weights for x in found[:5])
    regime = jnp.einsum("kpr,p->kr", found[5], weights)
    return time_s, flops, moved, regime @ _ATTENTION_BOUNDS, spread, familiarity


def _add_attention(table, coefficients, device, arch, work, structure, trained) -> None:
    layers = operators.layer_counts(arch)
    kinds = [("attention", 0.0 * arch.window_tokens, layers["full"])]
    if _has(structure, "window"):
        window = jnp.maximum(arch.window_tokens, 1.0)
        kinds.append(("window_attention", window, layers["window"]))
    windows = jnp.stack([window for _, window, _ in kinds])
    phases = [
        _attention_phase(coefficients, device, arch, work, decode, absorbed, windows, trained)
        for decode, absorbed in ((False, False), (True, _has(structure, "latent")))
    ]
    time_s, flops, moved, bounds, spread, familiarity = (
        jnp.stack(pair) for pair in zip(*phases, strict=True)
    )
    for index, (part, _, count) in enumerate(kinds):
        table.add(
            part,
            time=time_s[:, index],
            count=count * jnp.ones_like(time_s[:, index]),
            flops=flops[:, index],
            moved=moved[:, index],
            bounds=bounds[:, index],
            spread=spread[:, index],
            familiarity=familiarity[:, index],
        )


def _replace_experts(table, block, device, arch, work, rows) -> None:
    """The routed experts by their block; tokens are split evenly where experts are shared out."""
    slices = jnp.maximum(work.tensor_parallel / work.expert_parallel, 1.0)

    def phase(tokens):
        return blocks.experts_time(
            block, device, tokens, arch.d_model, jnp.maximum(arch.d_expert, 1.0),
            jnp.maximum(arch.n_experts, 1.0), jnp.maximum(arch.experts_per_token, 1.0), slices,
            work.expert_parallel, blocks.ROUTING_EXPONENT,
            operators.expert_element_bytes(arch, work), arch.n_ff_matrices,
        )  # fmt: skip

    table.replace("experts", [phase(rows[0]), phase(rows[1])], device)


def _replace_linear(table, trained, device, arch, work) -> None:
    """Linear attention by its kernels' blocks."""
    tp = work.tensor_parallel
    heads = [jnp.maximum(h / tp, 1e-3) for h in (arch.linear_k_heads, arch.linear_v_heads)]
    width = jnp.maximum(arch.linear_head_dim, 1.0)

    def phase(name, tokens):
        return blocks.linear_time(
            trained, device, name, work.batch_size, tokens, *heads, width, width, l2_residency=0.0
        )

    one = jnp.ones_like(work.prompt_tokens)
    found = [phase("prefill", work.prompt_tokens), phase("decode", one)]
    table.replace("linear_attention", found, device)


_LATENT_MODULE = (
    "latent_q_down", "latent_q_up", "latent_kv_down", "latent_kv_up", "attention",
    "out_projection", "qk_norm", "rope", "kv_write",
)  # fmt: skip


def _rescale_latent(table, trained, device, arch, work) -> None:
    """Parts of latent attention so that they add up to their module's block."""
    latent_layers = operators.layer_counts(arch)["attention"] * arch.latent_attention
    shape = latent.LatentShape(
        d_model=arch.d_model,
        q_rank=arch.q_lora_rank,
        kv_rank=jnp.maximum(arch.kv_lora_rank, 1.0),
        nope_dim=jnp.maximum(arch.head_dim - arch.rope_head_dim, 1.0),
        rope_dim=jnp.maximum(arch.rope_head_dim, 1.0),
        v_dim=arch.value_head_dim,
    )
    heads = jnp.maximum(arch.n_heads / work.tensor_parallel, 1.0)
    context = 0.5 * (work.context_start_tokens + work.context_end_tokens)
    weight = operators.weight_element_bytes(arch, work)
    found = [
        blocks.latent_time(
            trained[f"latent_{phase}"], phase, device, work.batch_size, tokens, heads, weight,
            work.kv_bytes, shape=shape,
        )
        for phase, tokens in (("prefill", work.prompt_tokens), ("decode", context))
    ]  # fmt: skip
    table.rescale(_LATENT_MODULE, found, latent_layers, device)


def _add_linear(table, coefficients, device, arch, work, rows) -> None:
    """Gated delta net: a recurrent state per value head, read and written by every step.

    Prefill works through chunks of 64 tokens: about 6 head_dim^2 multiply-adds a token and head
    (Gated DeltaNet, arXiv 2412.06464); decode moves the float32 state twice.
    """
    c, chunk = coefficients, 64.0
    state = arch.linear_v_heads / work.tensor_parallel * arch.linear_head_dim**2
    states = work.batch_size + np.array([1.0, 0.0], np.float32) * rows / chunk
    width = 2.0 * (arch.linear_k_heads + arch.linear_v_heads) * arch.linear_head_dim
    flops = rows * state * 12.0
    moved = states * state * 8.0
    moved = moved + rows * width / work.tensor_parallel * 2.0 * work.activation_bytes
    launch = jnp.exp(c["log_launch_s"]) * jnp.ones_like(flops)
    compute = flops / device.peak_flops_per_s * (1.0 + jnp.exp(c["log_compute_excess"]))
    memory = moved / device.memory_bytes_per_s * (1.0 + jnp.exp(c["log_memory_excess"]))
    time_s = launch + compute + memory
    terms = {"launch": launch, "compute": compute, "memory": memory}
    table.add(
        "linear_attention",
        time=time_s,
        count=operators.layer_counts(arch)["linear"] * jnp.ones_like(time_s),
        flops=flops,
        moved=moved,
        bounds=sum(_bound(n, time_s) * (t / time_s)[..., None] for n, t in terms.items()),
    )


def _add_collectives(table, coefficients, device, arch, work, rows) -> None:
    """Two all-reduces of the hidden state a layer between tensor-parallel GPUs."""
    several = jnp.clip(work.tensor_parallel - 1.0, 0.0, 1.0)
    message = rows * arch.d_model * work.activation_bytes
    time_s = jax.vmap(
        lambda size: collectives.all_reduce_time_s(coefficients, device, size, work.tensor_parallel)
    )(message)
    table.add(
        "collectives",
        time=time_s,
        count=2.0 * arch.n_layers * jnp.ones_like(time_s),
        flops=jnp.zeros_like(time_s),
        moved=2.0 * message * several,
        bounds=_bound("network", time_s),
    )


def model_costs(
    coefficients: dict[str, Any],
    device: Device,
    arch: Architecture,
    work: Workload,
    structure: frozenset[str] | None = None,
    trained: Mapping[str, blocks.Block] | None = None,
) -> tuple[PassCosts, PassCosts]:
    """Costs of the prefill pass and of the average decode step; inputs with leaves of shape ().

    Prefill runs all prompt tokens of all sequences in one pass; a decode step one token of each
    sequence, averaged over the contexts of the workload with three Gauss points.

    Args:
        coefficients: of every operator, as a checkpoint holds them.
        device: data sheet.
        arch, work: what runs; relaxed or concrete.
        structure: optional blocks that the model has (`operators.structure_of`); None for all.
        trained: level-2 blocks by name; None for level 1.
    """
    trained = trained or {}
    one = jnp.ones_like(work.prompt_tokens)
    rows = work.batch_size * jnp.stack([work.prompt_tokens, one])
    table = _Table()
    _add_products(table, coefficients["gemm"], device, arch, work, rows, structure)
    _add_streams(table, coefficients["stream"], device, arch, work, rows)
    _add_attention(table, coefficients["attention"], device, arch, work, structure, trained)
    if _has(structure, "linear"):
        _add_linear(table, coefficients["linear"], device, arch, work, rows)
        if set(blocks.LINEAR_BLOCKS) <= set(trained):
            _replace_linear(table, trained, device, arch, work)
    if _has(structure, "experts") and "experts" in trained:
        _replace_experts(table, trained["experts"], device, arch, work, rows)
    if _has(structure, "latent") and set(blocks.LATENT_BLOCKS) <= set(trained):
        _rescale_latent(table, trained, device, arch, work)
    if _has(structure, "parallel"):
        _add_collectives(table, coefficients["collectives"], device, arch, work, rows)
    costs = _costs(table, coefficients["power"], device, work)
    prefill, decode = (jax.tree.map(lambda leaf, i=i: leaf[i], costs) for i in (0, 1))
    return prefill, decode


def _costs(table: _Table, coefficients, device: Device, work: Workload) -> PassCosts:
    one_time, count, flops = (table.column(name) for name in ("time", "count", "flops"))
    moved, fp8 = table.column("moved"), table.column("fp8")
    safe = jnp.maximum(one_time, 1e-12)
    watts = power.board_power_w(
        coefficients, device, flops / safe, moved / safe, table.column("cached") / safe, fp8
    )
    time_s = one_time * count
    peak = gemm.peak_rate(device, 2.0 - fp8)
    ratio = jnp.log(jnp.maximum(flops, 1.0) / peak) - jnp.log(
        jnp.maximum(moved, 1.0) / device.memory_bytes_per_s
    )
    return PassCosts(
        time_s=time_s,
        energy_j=time_s * watts * work.tensor_parallel,
        flops=flops * count,
        memory_bytes=moved * count,
        bounds=table.column("bounds"),
        regimes=gemm.regime_gates(ratio, flops, GATE_TEMPERATURE),
        spread=table.column("spread"),
        familiarity=table.column("familiarity"),
    )
