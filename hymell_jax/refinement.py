"""The concrete half of a search: beam search over the ladders of a space, one model for all.

Rounded starts, their corners and a sample of the whole space seed a beam; every round moves one or
two variables of each of its members by 1, 2, 4 or 8 rungs, and keeps the best that were ever seen.
Where a round brings nothing new into the beam, three variables of its best move at once, since
along two active limits fewer cannot; it comes to rest when that brings nothing either.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import numpy as np

from hymell_jax import quantities, space_points
from hymell_jax.lagrangian import Program, np_excess
from hymell_jax.space import Space
from hymell_jax.types import Architecture, Workload

TOLERANCE = 1e-5  # ln of a quantity over its limit: rounding of float32
BEAM, MAX_ROUNDS = 24, 40
INFEASIBLE = 1e6  # scores from here on are this plus the summed excess

_MOVES = (1, 2, 4, 8)
SAMPLES = 8192  # drawn from the whole space
_TRIPLE_MOVES = (1, 2, 4)
_TRIPLES = 20_000  # at most, of one member
_TRIPLE_MEMBERS = 6


def measured(
    model, archs: Architecture, work: Workload, program: Program, chunk: int = quantities.CHUNK
) -> np.ndarray:
    """Quantities of `program.reported` [n, n_reported]: one compiled program for all uses."""
    return quantities.measure(
        model, archs, work, program.reported, dict(program.proxies), program.structure, chunk
    )


class Evaluator:
    """Scores ladder positions; remembers what it has seen."""

    def __init__(self, model, found: Space, work, program, weights, limits, tolerance) -> None:
        self.model, self.space, self.work, self.program = model, found, work, program
        self.weights, self.limits = np.asarray(weights, float), np.asarray(limits, float)
        self.slack = np.array(
            [math.log1p(tolerance) if kind == "equal" else TOLERANCE
             for _, kind, _ in program.constraints]
        )  # fmt: skip
        self.columns = [program.reported.index(name) for name in program.names]
        self.multipliers = np.random.default_rng(0).integers(
            1, 2**63, len(found.variables), dtype=np.uint64
        )
        self.seen = np.empty(0, np.uint64)
        self.count = 0
        self.archive: list[tuple[np.ndarray, np.ndarray]] = []

    def values(self, index: np.ndarray, chunk: int = quantities.CHUNK) -> np.ndarray:
        """Quantities of `program.names` [n, n_names]."""
        self.count += len(index)
        archs = space_points.concrete_architectures(self.space, index)
        return measured(self.model, archs, self.work, self.program, chunk)[:, self.columns]

    def excess(self, values: np.ndarray) -> np.ndarray:
        """Signed excesses [n, n_constraints]; equalities as distances."""
        split = len(self.program.objectives)
        columns = []
        for j, constraint in enumerate(self.program.constraints):
            signed = np_excess(constraint, values[:, split + j], self.limits[j])
            columns.append(np.abs(signed) if constraint[1] == "equal" else signed)
        return np.stack(columns, 1) if columns else np.zeros((len(values), 0))

    def scores(self, values: np.ndarray) -> np.ndarray:
        """ln objective where all holds, otherwise INFEASIBLE plus the summed excess; [n]."""
        split = len(self.program.objectives)
        objective = np.log(values[:, :split].astype(float)) @ self.weights
        over = np.maximum(self.excess(values) - self.slack, 0.0).sum(1)
        scores = np.where(over > 0, INFEASIBLE + over, objective)
        return np.where(np.isfinite(scores), scores, np.inf)

    def fresh(self, index: np.ndarray) -> np.ndarray:
        """Positions not seen before, each once; they count as seen from now on."""
        keys = (index.astype(np.uint64) * self.multipliers).sum(1, dtype=np.uint64)
        keys, first = np.unique(keys, return_index=True)
        new = ~np.isin(keys, self.seen, assume_unique=True)
        self.seen = np.concatenate([self.seen, keys[new]])
        return index[first[new]]

    def run(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(positions, scores) of the fresh ones among them."""
        index = self.fresh(index)
        if not len(index):
            return index, np.empty(0)
        values = self.values(index)
        self.archive.append((index, values))
        return index, self.scores(values)


def roundings(found: Space, x: np.ndarray, best: int = 8, corners: int = 64) -> np.ndarray:
    """Positions around relaxed coordinates [starts, n], the best first: nearest, then corners."""
    nearest = space_points.nearest_index(found, x)
    lengths = np.array([len(v.values) for v in found.variables])
    generator = np.random.default_rng(0)
    shifts = generator.integers(-1, 2, (corners, len(lengths)))
    around = (nearest[:best, None] + shifts[None]).reshape(-1, len(lengths))
    return np.clip(np.concatenate([nearest, around]), 0, lengths - 1)


def _neighbours(found: Space, beam: np.ndarray) -> np.ndarray:
    """All moves of one or two variables by 1, 2, 4 or 8 rungs, those that can be built."""
    n = len(found.variables)
    lengths = np.array([len(v.values) for v in found.variables])
    steps = [s * m for m in _MOVES for s in (-1, 1)]
    moves = [m for i in range(n) for s in steps for m in [_move(n, {i: s})]]
    moves += [
        _move(n, {i: a, j: b})
        for i, j in itertools.combinations(range(n), 2)
        for a, b in itertools.product(steps, steps)
    ]
    around = (beam[:, None] + np.array(moves)[None]).reshape(-1, n)
    around = around[((around >= 0) & (around < lengths)).all(1)]
    singles = np.array(moves[: n * len(steps)])
    near = np.clip((beam[:, None] + singles[None]).reshape(-1, n), 0, lengths - 1)
    legal = around[space_points.is_legal(found, around)]
    return np.concatenate([legal, space_points.repaired(found, near)])


def _triples(found: Space, members: np.ndarray) -> np.ndarray:
    """Moves of three variables by 1, 2 or 4 rungs, those that can be built."""
    n = len(found.variables)
    if n < 3:
        return np.empty((0, n), int)
    lengths = np.array([len(v.values) for v in found.variables])
    steps = np.array(
        list(itertools.product([s * m for m in _TRIPLE_MOVES for s in (-1, 1)], repeat=3))
    )
    moves = []
    for columns in itertools.combinations(range(n), 3):
        block = np.zeros((len(steps), n), int)
        block[:, columns] = steps
        moves.append(block)
    every = np.concatenate(moves)
    if len(every) > _TRIPLES:
        every = np.random.default_rng(0).choice(every, _TRIPLES, replace=False)
    around = (members[:, None] + every[None]).reshape(-1, n)
    around = around[((around >= 0) & (around < lengths)).all(1)]
    return around[space_points.is_legal(found, around)]


def sampled(found: Space, count: int) -> np.ndarray:
    """Those of `count` draws from the whole space that can be built."""
    generator = np.random.default_rng(0)
    drawn = np.stack([generator.integers(0, len(v.values), count) for v in found.variables], 1)
    return drawn[space_points.is_legal(found, drawn)]


def _move(n: int, by: Mapping[int, int]) -> list[int]:
    return [by.get(i, 0) for i in range(n)]


def refine(
    evaluator: Evaluator,
    seeds: np.ndarray,
    max_rounds: int,
    progress: Callable[[str, int, int], None],
):
    """(best position, its score, rounds as (score, position), whether it came to rest)."""
    near = space_points.repaired(evaluator.space, seeds)
    index, scores = evaluator.run(np.concatenate([near, sampled(evaluator.space, SAMPLES)]))
    if not len(index):
        index, scores = evaluator.run(
            space_points.random_points(evaluator.space, 256, np.random.default_rng(0))
        )
    order = np.argsort(scores, kind="stable")[:BEAM]
    index, scores = index[order], scores[order]
    rounds = [(float(scores[0]), index[0])]
    for number in range(max_rounds):
        progress("rounds at most", number + 1, max_rounds)
        for moved in (_neighbours, _triples):
            members = index if moved is _neighbours else index[:_TRIPLE_MEMBERS]
            more, more_scores = evaluator.run(moved(evaluator.space, members))
            old = scores
            index, scores = np.concatenate([index, more]), np.concatenate([scores, more_scores])
            order = np.argsort(scores, kind="stable")[:BEAM]
            index, scores = index[order], scores[order]
            if not np.array_equal(scores, old):
                break
        else:
            return index[0], scores[0], rounds, True
        rounds.append((float(scores[0]), index[0]))
    return index[0], scores[0], rounds, False
