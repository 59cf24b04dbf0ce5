"""Fronts of two objectives: non-dominated rows, and a search that sweeps their weights.

`front` minimises (1 - w) ln a + w ln b for weights from 0 to 1 (ln b negated where more is better),
every search started where the last one ended, and keeps what no other evaluated design beats in
both. Weighted sums reach only the convex part of a front; the concrete candidates that the
searches pass on their way fill the rest.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from hymell_jax import optimise, quantities
from hymell_jax.notebook import Answer
from hymell_jax.quantities import QUANTITIES
from hymell_jax.types import checked_number


def non_dominated(costs: np.ndarray) -> np.ndarray:
    """Positions of the rows of costs [n, 2] that no other row beats, by the first column.

    Of equal rows the first is kept; rows that are not finite are left out.
    """
    costs = np.asarray(costs, float)
    finite = np.flatnonzero(np.isfinite(costs).all(1))
    order = finite[np.lexsort((costs[finite, 1], costs[finite, 0]))]
    second = costs[order, 1]
    best_before = np.concatenate([[np.inf], np.minimum.accumulate(second)[:-1]])
    return order[second < best_before]


def front(
    model_or_space: Any,
    device: Any,
    *,
    against: str = "latency_per_token_s",
    points: int = 8,
    starts: int = optimise.STARTS,
    seed: int = 0,
    progress: optimise.Progress | None = None,
    **question: Any,
) -> dict[str, Any]:
    """The front of `minimise` against another quantity, within the same budgets as `search`.

    Args:
        model_or_space, device, starts, seed, question: as `optimise.search`.
        against: the other quantity; maximised where more is better.
        points: weights that are searched.
        progress: called with ("weights", done, all).

    Returns:
        `front`: designs as in `optimise.search`, ascending in the first objective; `start`,
        `against`, `evaluations` and `time_s`.

    Raises:
        ValueError: as `optimise.search`, or both objectives the same.
    """
    begin = time.perf_counter()
    checked_number("points", points, 2, 1000)
    asked = optimise.ask(model_or_space, device, **question)
    first = asked.objectives[0][0]
    other = quantities.check_known(against, asked.model)
    if other == first:
        raise ValueError(f"A front needs two quantities; got {first} twice.")
    sign = -1.0 if QUANTITIES[other].higher_is_better else 1.0
    x = optimise.first_points(asked, starts, seed)
    positions, values, evaluations = [], [], 0
    for number, weight in enumerate(np.linspace(0.0, 1.0, points)):
        pair = ((first, 1.0 - weight), (other, sign * weight))
        found = optimise.solve(dataclasses.replace(asked, objectives=pair), x)
        x = found.last_x
        evaluations += found.evaluator.count
        for index, row in found.evaluator.archive:
            held = found.evaluator.scores(row) < optimise.INFEASIBLE
            positions.append(index[held])
            values.append(row[held, :2])
        if progress is not None:
            progress("weights", number + 1, points)
    designs, costs = np.concatenate(positions), np.concatenate(values) * [1.0, sign]
    best = non_dominated(costs)
    kept = best[np.unique(np.linspace(0, len(best) - 1, min(len(best), 4 * points)).astype(int))]
    content = {
        "model": asked.name,
        "device": asked.model.card.device,
        "minimise": first,
        "against": other,
        "status": "converged" if len(best) else "infeasible",
        "start": optimise.base_design(asked),
        "front": [optimise.concrete_design(asked, designs[i]) for i in kept],
        "front_size": len(best),
        "evaluations": evaluations,
        "time_s": time.perf_counter() - begin,
    }
    return Answer("front", content)
