"""What a design's cost hangs on: elasticities, parts, and the single change that reaches a target.

The elasticity of q in a field f is d ln q / d ln f: percent of q per percent of f. `elasticities`
are gradients of the model, and a field that also acts in steps (a tile more or less) shows less in
them than a change does; `step_elasticities` move each field by a tenth, and `single_changes`
re-evaluate the model at every legal value.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax import model as cost_model
from hymell_jax import operators, quantities, space, space_points, summary
from hymell_jax.hf import HFModel
from hymell_jax.model import CostModel
from hymell_jax.notebook import Answer
from hymell_jax.types import Architecture, Workload, checked_number

ELASTIC = (
    "energy_per_token_j", "latency_s", "latency_per_token_s", "prefill_time_s",
    "decode_energy_per_token_j",
)  # fmt: skip
"""Quantities whose elasticities are given, where they are known of the device."""

_NOT_SIZES = {
    "tied_embeddings", "latent_attention", "layer_norm", "norm_bias", "embedding_norm",
    "qk_norm_per_head", "qk_norm_full", "attention_gate", "attention_sinks", "qkv_bias",
    "out_bias", "ff_bias", "expert_bias", "router_bias", "shared_expert_gate", "head_bias",
    "n_ff_matrices", "norms_per_layer", "weight_bits", "expert_weight_bits",
}  # fmt: skip
_WORK_FIELDS = ("batch_size", "prompt_tokens", "output_tokens", "tensor_parallel", "kv_bytes")
STEP = 0.1  # ln of a size, of `stepped`: over several tiles of a matrix product
_BATCHES = tuple(2.0**i for i in range(11))


@functools.partial(
    jax.jit, static_argnames=("structure",), compiler_options=cost_model.QUICK_OPTIONS
)
def _jacobian(model, arch, work, structure):
    def logs(arch, work):
        prediction = cost_model._predict_one(model, arch, work, structure)
        return jnp.log(jnp.stack(quantities.traced_quantities(ELASTIC, prediction, arch, work)))

    return jax.jacrev(logs, argnums=(0, 1))(arch, work)


def elasticities(model: CostModel, arch: Architecture, work: Workload) -> dict[str, dict]:
    """{field: {quantity: percent per percent}} of every size that is not zero.

    `value_head_dim` moves with `head_dim` where they are equal, and the contexts of decode with
    prompt and output tokens.
    """
    structure = operators.structure_of(arch, work)
    by_arch, by_work = _jacobian(quantities.bare(model), arch, work, structure)
    names = [f.name for f in dataclasses.fields(arch) if f.name not in _NOT_SIZES]
    found = {n: (getattr(by_arch, n), getattr(arch, n)) for n in names}
    slopes = {n: np.asarray(slope) * float(size) for n, (slope, size) in found.items()}
    if float(arch.value_head_dim) == float(arch.head_dim):
        slopes["head_dim"] = slopes["head_dim"] + slopes.pop("value_head_dim")
    for name in _WORK_FIELDS:
        slopes[name] = np.asarray(getattr(by_work, name)) * float(getattr(work, name))
    start, end = (np.asarray(getattr(by_work, f"context_{x}_tokens")) for x in ("start", "end"))
    if float(work.context_start_tokens) == float(work.prompt_tokens):
        slopes["prompt_tokens"] = slopes["prompt_tokens"] + (start + end) * float(
            work.prompt_tokens
        )
        slopes["output_tokens"] = slopes["output_tokens"] + end * float(work.output_tokens)
    sizes = {n: float(getattr(arch, n)) for n in names} | {
        n: float(getattr(work, n)) for n in _WORK_FIELDS
    }
    return {
        name: dict(zip(ELASTIC, map(float, slope), strict=True))
        for name, slope in slopes.items()
        if sizes[name] > 0
    }


def stepped(arch: Architecture, work: Workload) -> tuple[list[str], list[tuple]]:
    """(fields, pairs of architecture and workload): each field a tenth down, then a tenth up.

    The same sizes, tied in the same way, as in `elasticities`; one GPU is left as it is.
    `slopes_of_steps` takes the answers. Such slopes see the tiles and waves of a matrix product, by
    which the time of a prefill climbs, and a gradient does not.
    """
    names = [f.name for f in dataclasses.fields(arch) if f.name not in _NOT_SIZES]
    tied = float(arch.value_head_dim) == float(arch.head_dim)
    plain = float(work.context_start_tokens) == float(work.prompt_tokens)
    fields, pairs = [], []
    for name in (*names, *_WORK_FIELDS):
        owner: Any = arch if name in names else work
        size = float(getattr(owner, name))
        one_gpu = name == "tensor_parallel" and size == 1
        if size <= 0 or one_gpu or (tied and name == "value_head_dim"):
            continue
        fields.append(name)
        for sign in (-1, 1):
            changed = {name: np.float32(size * math.exp(sign * STEP))}
            if tied and name == "head_dim":
                changed["value_head_dim"] = changed["head_dim"]
            moved = dataclasses.replace(owner, **changed)
            if owner is work and plain:
                end = moved.prompt_tokens + moved.output_tokens
                moved = dataclasses.replace(
                    moved, context_start_tokens=moved.prompt_tokens, context_end_tokens=end
                )
            pairs.append((arch, moved) if owner is work else (moved, work))
    return fields, pairs


def slopes_of_steps(fields: list[str], values: dict[str, Any]) -> dict[str, dict[str, float]]:
    """{field: {quantity: percent per percent}} from values [2 n_fields] of `stepped`."""
    slopes = {
        name: np.diff(np.log(np.asarray(v, np.float64)).reshape(-1, 2))[:, 0] / (2 * STEP)
        for name, v in values.items()
    }
    return {
        field: {name: float(slope[i]) for name, slope in slopes.items()}
        for i, field in enumerate(fields)
    }


def step_elasticities(
    model: CostModel, arch: Architecture, work: Workload
) -> dict[str, dict[str, float]]:
    """{field: {quantity: percent per percent}} between a tenth less and a tenth more of each."""
    fields, pairs = stepped(arch, work)
    archs, works = (cost_model.stack(list(column)) for column in zip(*pairs, strict=True))
    structure = operators.structure_of(arch, work)
    names = tuple(name for name in ELASTIC if quantities.is_known(name, model))
    rows = quantities.measure(model, archs, works, names, structure=structure)
    return slopes_of_steps(fields, dict(zip(names, rows.T, strict=True)))


def _candidates(
    arch: Architecture, work: Workload
) -> list[tuple[str, str, Architecture, Workload]]:
    """(kind, field, architectures [n], workload or workloads [n]) with one field changed each."""
    free = [
        name
        for name in space.FREE_FIELDS
        if float(getattr(arch, name)) > 0 and name != "vocab_size"
    ]
    if float(arch.moe_fraction) == 1:
        free = [name for name in free if name != "d_ff"]
    if float(arch.latent_attention) > 0:
        free = [name for name in free if name not in ("n_kv_heads", "head_dim")]
    found = []
    for name in free:
        start = float(getattr(arch, name))
        alone = space.make_space(
            arch, work, free=[name], ranges={name: (max(start / 8, 1), start * 8)}, tie=None
        )
        index = np.arange(len(alone.variables[0].values))[:, None]
        index = index[space_points.is_legal(alone, index)]
        if len(index):
            found.append(
                ("architecture", name, space_points.concrete_architectures(alone, index), work)
            )
    batches: Any = np.array([b for b in _BATCHES if b != float(work.batch_size)], np.float32)
    found.append(("workload", "batch_size", arch, dataclasses.replace(work, batch_size=batches)))
    if float(work.kv_bytes) == 2:
        one_byte: Any = np.ones(1, np.float32)
        halved = dataclasses.replace(work, kv_bytes=one_byte)
        found.append(("workload", "kv_bytes", arch, halved))
    return found


def single_changes(
    model: CostModel, arch: Architecture, work: Workload, target: str, limit: float | None
) -> list[dict[str, Any]]:
    """The least change of each field that brings a quantity to its limit, cheapest first.

    Every legal value between an eighth and eight times the present one is evaluated, one field at
    a time. Cheapest is what raises the loss that Chinchilla's law expects least (a change of the
    workload raises it by nothing), then what changes its field least. Changes that do not fit in
    memory and fields that cannot reach the limit are left out.

    Args:
        target: a quantity; brought down to the limit, or up where more is better.
        limit: in SI units.

    Raises:
        ValueError: no such quantity, or a limit that is not positive.
    """
    quantities.check_known(target, model)
    limit = checked_number(target, limit, 1e-30, 1e30)
    up = quantities.QUANTITIES[target].higher_is_better
    names = tuple(dict.fromkeys((target, "loss", "parameters", "memory_share", *ELASTIC)))
    names = tuple(name for name in names if quantities.is_known(name, model))
    structure = operators.structure_of(arch, work)
    base = quantities.measure(model, arch, work, names, structure=structure)[0]
    found = []
    for kind, name, archs, works in _candidates(arch, work):
        rows = quantities.measure(model, archs, works, names, structure=structure)
        owner, changed = (arch, archs) if kind == "architecture" else (work, works)
        start = float(getattr(owner, name))
        sizes = np.atleast_1d(np.asarray(getattr(changed, name), float))
        value = rows[:, 0]
        reached = (value >= limit * (1 - 1e-6)) if up else (value <= limit * (1 + 1e-6))
        reached &= rows[:, names.index("memory_share")] <= 1.0
        if not reached.any():
            continue
        cost = np.where(reached, np.abs(np.log(sizes / start)), np.inf)
        best = int(np.argmin(cost))
        row = dict(zip(names, map(float, rows[best]), strict=True))
        found.append(
            {
                "field": name,
                "kind": kind,
                "from": start,
                "to": float(sizes[best]),
                "change": float(sizes[best] / start - 1.0),
                "loss_increase": row["loss"] - float(base[names.index("loss")]),
                "quantities": row,
            }
        )
    return sorted(found, key=lambda c: (round(max(c["loss_increase"], 0.0), 6), abs(c["change"])))


def explain(
    model: CostModel,
    hf: HFModel,
    work: Workload,
    target: str | None = None,
    limit: float | None = None,
) -> dict[str, Any]:
    """Elasticities, parts, and the single changes that reach a target; plain numbers, SI units.

    Args:
        model: of the device.
        hf: the model that runs.
        work: the workload.
        target, limit: a quantity and where it should come to; both or none.

    Raises:
        ValueError: as `summary.summarise` and `single_changes`.
    """
    content = summary.summarise(model, hf, work, check_memory=False)
    kept = ("model", "device", "runtime", "dtype", "workload", "prefill", "decode", "total",
            "parts", "in_domain", "warnings", "provenance")  # fmt: skip
    found = {name: content[name] for name in kept}
    found["elasticities"] = step_elasticities(model, hf.architecture, work)
    if target is not None:
        changes = single_changes(model, hf.architecture, work, target, limit)
        by_kind = {
            kind: next((c for c in changes if c["kind"] == kind), None)
            for kind in ("architecture", "workload")
        }
        found["target"] = {
            "quantity": target, "limit": limit, "changes": changes, "cheapest": by_kind,
        }  # fmt: skip
    return Answer("explanation", found)
