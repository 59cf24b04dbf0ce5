"""Points of a search space: relaxed coordinates, positions on its ladders, what can be built.

A position is an index into each variable's ladder, int64 [n, n_variables]. Whatever is derived from
positions is exact: float64 until the architecture is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.space import Box, Rules, Space, architecture_fields
from hymell_jax.types import Architecture

_FRACTIONS = ("moe_fraction", "window_fraction", "linear_fraction")
_HEAD_MULTIPLE = 8  # of head_dim, in FlashAttention


def follow(rules: Rules, base: Architecture, ratio: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that move, with those that follow them."""
    full = dict(fields)
    width = full.get("d_model", base.d_model) * ratio
    if rules.tie == "n_heads":
        full["n_heads"] = width / full.get("head_dim", base.head_dim)
    elif rules.tie == "head_dim":
        full["head_dim"] = width / full.get("n_heads", base.n_heads)
    if "head_dim" in full and rules.value_width_follows:
        full["value_head_dim"] = full["head_dim"]
    if "n_heads" in full and rules.kv_heads_follow:
        full["n_kv_heads"] = full["n_heads"]
    return full


def relaxed_architecture(box: Box, x: jax.Array | np.ndarray) -> Architecture:
    """The architecture at relaxed coordinates x [n_variables] in [0, 1]; traceable."""
    values = jnp.exp(box.log_low + x * (box.log_high - box.log_low))
    fields = dict(zip(box.rules.names, values, strict=True))
    return dataclasses.replace(box.base, **follow(box.rules, box.base, box.ratio, fields))


def relaxed_gaps(arch: Architecture) -> jax.Array:
    """ln-excess of the structural constraints of a relaxed architecture, all at most 0 if legal.

    KV heads over heads, experts a token over experts; [2].
    """
    heads = jnp.log(arch.n_kv_heads / arch.n_heads)
    experts = jnp.where(
        arch.n_experts > 0,
        jnp.log(jnp.maximum(arch.experts_per_token, 1e-6))
        - jnp.log(jnp.maximum(arch.n_experts, 1e-6)),
        -1.0,
    )
    heads = jnp.where(arch.latent_attention > 0, -1.0, heads)
    return jnp.stack([heads, experts])


def _moved(space: Space, moving: dict[str, np.ndarray]) -> dict[str, Any]:
    """`follow` on exact float64 numbers."""
    exact: dict[str, Any] = dict(architecture_fields(space.base))
    base = Architecture(**exact)
    return follow(space.rules, base, space.ratio, moving)


def values_at(space: Space, index: np.ndarray) -> np.ndarray:
    """Values [n, n_variables] of ladder positions [n, n_variables]."""
    columns = [np.asarray(v.values)[index[:, j]] for j, v in enumerate(space.variables)]
    return np.stack(columns, 1)


def coordinates(space: Space, values: np.ndarray) -> np.ndarray:
    """Relaxed coordinates of values [..., n_variables], clipped to [0, 1]."""
    low, high = (
        np.array(ends) for ends in zip(*(v.log_range for v in space.variables), strict=True)
    )
    return np.clip((np.log(values) - low) / np.maximum(high - low, 1e-12), 0.0, 1.0)


def base_values(space: Space) -> np.ndarray:
    """Values [n_variables] of the base."""
    return np.array([float(getattr(space.base, name)) for name in space.names])


def nearest_index(space: Space, x: np.ndarray) -> np.ndarray:
    """Ladder positions [n, n_variables] nearest to relaxed coordinates [n, n_variables]."""
    found = np.empty(x.shape, np.int64)
    for j, variable in enumerate(space.variables):
        low, high = variable.log_range
        rungs = (np.log(np.asarray(variable.values)) - low) / max(high - low, 1e-12)
        middle = 0.5 * (rungs[1:] + rungs[:-1])
        found[:, j] = np.searchsorted(middle, x[:, j])
    return found


def concrete_architectures(space: Space, index: np.ndarray) -> Architecture:
    """Architectures at ladder positions [n, n_variables]; float32 leaves [n].

    Shares of layers of a kind are rounded to whole layers.
    """
    count = len(index)
    moving = dict(zip(space.names, values_at(space, index).T, strict=True))
    fields = {
        f.name: np.full(count, float(getattr(space.base, f.name)))
        for f in dataclasses.fields(space.base)
    }
    moved = _moved(space, moving)
    fields |= {name: np.asarray(value) * np.ones(count) for name, value in moved.items()}
    layers = fields["n_layers"]
    for name in _FRACTIONS:
        some = fields[name] > 0
        fields[name] = np.where(
            some, np.maximum(np.round(fields[name] * layers), 1.0) / layers, 0.0
        )
    leaves: dict[str, Any] = {name: value.astype(np.float32) for name, value in fields.items()}
    return Architecture(**leaves)


def is_legal(space: Space, index: np.ndarray) -> np.ndarray:
    """Which ladder positions [n, n_variables] are architectures that can be built, boolean [n]."""
    moving = dict(zip(space.names, values_at(space, index).T, strict=True))
    fields = _moved(space, moving)

    def field(name: str) -> np.ndarray:
        return np.asarray(fields.get(name, float(getattr(space.base, name)))) * np.ones(len(index))

    heads, kv = field("n_heads"), field("n_kv_heads")
    gpus, groups = space.tensor_parallel, space.expert_parallel
    legal = (heads >= 1) & (heads % 1 == 0) & (heads % gpus == 0)
    if "head_dim" in fields:
        legal &= (fields["head_dim"] % _HEAD_MULTIPLE == 0) & (fields["head_dim"] > 0)
    if float(space.base.latent_attention) == 0:
        legal &= heads % kv == 0
        legal &= (kv % gpus == 0) | (gpus % kv == 0)
    legal &= field("d_ff") % gpus == 0
    if float(space.base.n_experts) > 0:
        legal &= field("experts_per_token") <= field("n_experts")
        legal &= field("n_experts") % groups == 0
        legal &= (field("d_expert") * groups) % max(gpus, groups) == 0
    return legal


def repaired(space: Space, index: np.ndarray, reach: int = 16) -> np.ndarray:
    """Positions [m, n_variables] that can be built, m <= n: one variable moved where needed.

    Takes the least move in ln(value) within `reach` rungs; what stays illegal is left out.
    """
    legal = is_legal(space, index)
    bad = index[~legal]
    if not len(bad):
        return index
    fixed = np.zeros(len(bad), bool)
    best = np.full(len(bad), np.inf)
    result = bad.copy()
    for j, variable in enumerate(space.variables):
        logs = np.log(np.asarray(variable.values))
        for move in range(-reach, reach + 1):
            trial = bad.copy()
            trial[:, j] = np.clip(trial[:, j] + move, 0, len(logs) - 1)
            cost = np.abs(logs[trial[:, j]] - logs[bad[:, j]])
            better = is_legal(space, trial) & (cost < best)
            result[better], best[better], fixed[better] = trial[better], cost[better], True
    return np.concatenate([index[legal], result[fixed]])


def all_points(space: Space, block: int = 65536) -> Iterator[np.ndarray]:
    """Blocks of every position that can be built, [<= block, n_variables]."""
    shape = tuple(len(v.values) for v in space.variables)
    for start in range(0, space.size, block):
        flat = np.arange(start, min(start + block, space.size))
        index = np.stack(np.unravel_index(flat, shape), 1)
        yield index[is_legal(space, index)]


def random_points(space: Space, count: int, rng: np.random.Generator) -> np.ndarray:
    """Positions that can be built, drawn evenly from them, [count, n_variables].

    Raises:
        ValueError: next to none of the space can be built.
    """
    found: list[np.ndarray] = []
    total, drawn = 0, 0
    while total < count:
        index = np.stack(
            [rng.integers(0, len(v.values), 4 * count + 256) for v in space.variables], 1
        )
        legal = index[is_legal(space, index)]
        found.append(legal)
        total, drawn = total + len(legal), drawn + len(index)
        if drawn > 1_000_000 and total < drawn * 1e-5:
            raise ValueError(
                "Next to none of the space can be built: KV heads must divide the heads, heads "
                "and widths the GPUs. Widen the ranges, or give other multiples."
            )
    return np.concatenate(found)[:count]
