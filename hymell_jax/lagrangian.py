"""The relaxed half of a search: an augmented Lagrangian over many starts, one compiled program.

minimise f(x) = sum_i w_i ln q_i(x) over relaxed coordinates x in [0, 1]^n, subject to g_j(x) <= 0
and h_k(x) = 0, with q quantities of `quantities` and g, h logs of quantities over their limits. The
augmented Lagrangian (Nocedal and Wright, Numerical Optimization, 2nd edition, chapter 17.4)

    L = f + sum_j (max(0, m_j + r g_j)^2 - m_j^2) / (2 r) + sum_k (l_k h_k + r/2 h_k^2)

is minimised by Adam with projection onto the box; after every round multipliers are updated and the
penalty r doubles.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hymell_jax import model as cost_model
from hymell_jax import quantities, space_points
from hymell_jax.compile_cache import LIGHT_OPTIONS
from hymell_jax.quantities import Proxy

LEARNING_RATE = 0.04
FIRST_PENALTY, PENALTY_GROWTH = 10.0, 2.0

KINDS = ("at_most", "at_least", "equal")

SHOWN = (
    "energy_per_token_j", "decode_energy_per_token_j", "latency_s", "latency_per_token_s",
    "prefill_time_s", "output_tokens_per_s", "parameters", "active_parameters", "loss",
    "aspect_ratio", "memory_bytes", "domain_distance",
)  # fmt: skip
"""Quantities that every design of an answer is reported with."""


@dataclasses.dataclass(frozen=True)
class Constraint:
    """One budget. `linear` ones compare by difference, the others by logarithm."""

    name: str
    kind: str
    limit: float
    linear: bool = False


def _excess(constraint, value, limit):
    """Signed excess of a value over its limit; at most 0 where an inequality holds."""
    _, kind, linear = constraint
    if linear:
        excess = (value - limit) / jnp.maximum(jnp.abs(limit), 1.0)
    else:
        excess = jnp.log(jnp.maximum(value, 1e-30)) - jnp.log(limit)
    return -excess if kind == "at_least" else excess


@dataclasses.dataclass(frozen=True)
class Program:
    """What a compiled search is made for; hashable."""

    objectives: tuple[str, ...]
    constraints: tuple[tuple[str, str, bool], ...]
    proxies: tuple[tuple[str, Proxy], ...]
    structure: frozenset[str] | None

    @property
    def names(self) -> tuple[str, ...]:
        """Quantities that decide: objectives first, then constraints."""
        return (*self.objectives, *(name for name, _, _ in self.constraints))

    @property
    def reported(self) -> tuple[str, ...]:
        """Quantities that concrete designs are evaluated for, each once."""
        return tuple(dict.fromkeys((*self.names, *SHOWN)))


def _objective_and_excess(program, model, box, work, weights, limits, x):
    """(sum of weights x ln objective, excesses [n_constraints + 2]) at relaxed coordinates."""
    arch = space_points.relaxed_architecture(box, x)
    prediction = cost_model._predict_one(model, arch, work, program.structure)
    values = quantities.traced_quantities(program.names, prediction, arch, work, program.proxies)
    split = len(program.objectives)
    objective = sum(w * jnp.log(q) for w, q in zip(weights, values[:split], strict=True))
    excess = [
        _excess(c, value, limit)
        for c, value, limit in zip(program.constraints, values[split:], limits, strict=True)
    ]
    structural = space_points.relaxed_gaps(arch)
    return objective, jnp.stack([*excess, *structural])


def _penalty(excess, is_equal, multiplier, weight):
    inequality = (jnp.maximum(multiplier + weight * excess, 0.0) ** 2 - multiplier**2) / (
        2.0 * weight
    )
    equality = multiplier * excess + 0.5 * weight * excess**2
    return jnp.sum(jnp.where(is_equal, equality, inequality))


@functools.partial(
    jax.jit, static_argnames=("program", "outer", "inner"), compiler_options=LIGHT_OPTIONS
)
def descend(model, box, work, weights, limits, x, *, program, outer, inner):
    """Paths of all starts: (x [outer, starts, n], objective, excess) from x [starts, n].

    Multipliers are updated after every `inner` steps; a path holds the points where they are.
    """
    is_equal = np.array([kind == "equal" for _, kind, _ in program.constraints] + [False, False])
    optimiser = optax.chain(optax.clip_by_global_norm(10.0), optax.scale_by_adam())

    def lagrangian(x, multiplier, weight):
        objective, excess = _objective_and_excess(program, model, box, work, weights, limits, x)
        return objective + _penalty(excess, is_equal, multiplier, weight), (objective, excess)

    def step(carry, at):
        rate, last = at
        x, state, multiplier, weight = carry
        gradient, (objective, excess) = jax.grad(lagrangian, has_aux=True)(x, multiplier, weight)
        gradient = jnp.where(jnp.isfinite(gradient), gradient, 0.0)
        update, state = optimiser.update(gradient, state)
        moved = multiplier + weight * excess
        moved = jnp.where(is_equal, moved, jnp.maximum(moved, 0.0))
        moved = jnp.where(jnp.isfinite(moved), moved, multiplier)
        following = (
            jnp.clip(x - rate * update, 0.0, 1.0),
            jax.tree.map(lambda new, old: jnp.where(last, new, old), optimiser.init(x), state),
            jnp.where(last, moved, multiplier),
            jnp.where(last, weight * PENALTY_GROWTH, weight),
        )
        return following, (x, objective, excess)

    def run(x):
        steps = np.arange(outer * inner)
        rates = LEARNING_RATE * (0.02 + 0.98 * np.cos(0.5 * np.pi * steps / len(steps)) ** 2)
        last = steps % inner == inner - 1
        first = (x, optimiser.init(x), jnp.zeros(len(is_equal)), jnp.asarray(FIRST_PENALTY))
        _, path = jax.lax.scan(step, first, (np.float32(rates), last))
        return jax.tree.map(lambda leaf: leaf[inner - 1 :: inner], path)

    return jax.vmap(run, out_axes=1)(x)


def np_excess(
    constraint: tuple[str, str, bool], value: np.ndarray | float, limit: float
) -> np.ndarray:
    """`_excess` in numpy float64."""
    _, kind, linear = constraint
    value = np.asarray(value, float)
    if linear:
        excess = (value - limit) / max(abs(limit), 1.0)
    else:
        excess = np.log(np.maximum(value, 1e-30)) - math.log(limit)
    return -excess if kind == "at_least" else excess
