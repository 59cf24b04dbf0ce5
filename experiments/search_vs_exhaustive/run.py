"""Does the search find the best architecture? Every point of eight spaces, beside its answer.

Each space is evaluated in full with the same model, which gives its true optimum. The search then
answers the same question, first with compiling, then again without; random search and Optuna's TPE
get as long as the second search took, each with everything compiled beforehand. Gaps are to the
true optimum; TPE and random search report the best feasible design that they met.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from hymell_jax import experiment, optimise, space_points
from hymell_jax.optimise import Question
from hymell_jax.refinement import INFEASIBLE, Evaluator

HERE = Path(__file__).parent


def ladder(low: float, high: float, count: int, step: float) -> list[float]:
    """`count` multiples of a step, spread in logarithm between low and high."""
    values = np.exp(np.linspace(math.log(low), math.log(high), count))
    return sorted({float(max(1, round(v / step)) * step) for v in values})


def question(entry: dict[str, Any], scale: float) -> tuple[Question, dict[str, Any]]:
    """A checked question of config.json; `scale` is of the ladders' lengths."""
    levels = {
        name: ladder(low, high, max(2, round(count * scale)), step)
        for name, (low, high, count, step) in entry["levels"].items()
    }
    given = dict(
        minimise=entry["minimise"],
        at_most=entry.get("at_most", {}),
        at_least=entry.get("at_least", {}),
        free=tuple(levels),
        levels=levels,
        tie=entry.get("tie", "auto"),
        work=entry["workload"],
    )
    return optimise.ask(entry["base"], entry["device"], **given), given


def judge(asked: Question) -> Evaluator:
    """The evaluator that the search itself uses."""
    weights, limits = optimise.weights_and_limits(asked)
    return Evaluator(
        asked.model, asked.space, asked.work, asked.program, weights, limits, asked.tolerance
    )


def exhaustive(asked: Question) -> tuple[float, int, int]:
    """(least ln objective within all limits, points that can be built, feasible ones)."""
    best, points, feasible = math.inf, 0, 0
    evaluator = judge(asked)
    for index in space_points.all_points(asked.space):
        if not len(index):
            continue
        scores = evaluator.scores(evaluator.values(index))
        best = min(best, float(scores.min()))
        points += len(index)
        feasible += int((scores < INFEASIBLE).sum())
    return best, points, feasible


def random_search(asked: Question, seconds: float, seed: int) -> tuple[float, int]:
    """(least ln objective, designs) of uniform draws for a time, in compiled batches."""
    generator = np.random.default_rng(seed)
    evaluator = judge(asked)
    begin, best = time.perf_counter(), math.inf
    while time.perf_counter() - begin < seconds:
        index = space_points.random_points(asked.space, 1024, generator)
        best = min(best, float(evaluator.scores(evaluator.values(index)).min()))
    return best, evaluator.count


def tree_parzen(asked: Question, seconds: float, seed: int) -> tuple[float, int]:
    """(least ln objective, designs) of Optuna's TPE for a time; limits by its own constraints."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    evaluator = judge(asked)
    ladders = {v.name: list(v.values) for v in asked.space.variables}
    best, count = math.inf, 0

    def objective(trial: Any) -> float:
        nonlocal best, count
        index = np.array(
            [[trial.suggest_int(n, 0, len(values) - 1) for n, values in ladders.items()]]
        )
        count += 1
        if not space_points.is_legal(asked.space, index)[0]:
            trial.set_constraint("over", 10.0)
            return 50.0
        values = evaluator.values(index, chunk=1)
        score = float(evaluator.scores(values)[0])
        best = min(best, score)
        over = float(np.maximum(evaluator.excess(values), 0.0).sum())
        trial.set_constraint("over", over)
        weights = np.asarray(evaluator.weights)
        return float(np.log(values[0, : len(weights)]) @ weights)

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(objective, timeout=seconds)
    return best, count


def compare(name: str, entry: dict[str, Any], scale: float, seeds: int) -> dict[str, Any]:
    """One row of the table."""
    asked, given = question(entry, scale)
    begin = time.perf_counter()
    best, points, feasible = exhaustive(asked)
    exhaustive_s = time.perf_counter() - begin

    def run(seed: int) -> dict[str, Any]:
        return optimise.search(entry["base"], asked.model, seed=seed, **given)

    first = run(0)
    again = [run(seed) for seed in range(seeds)]
    seconds = float(np.median([a["time_s"] for a in again]))
    judge(asked).values(
        space_points.random_points(asked.space, 1, np.random.default_rng(0)), chunk=1
    )
    others = {
        "random": [random_search(asked, seconds, seed) for seed in range(seeds)],
        "tpe": [tree_parzen(asked, seconds, seed) for seed in range(seeds)],
    }

    def gap(log_objective: float) -> float | None:
        over = 100 * math.expm1(log_objective - best)
        return over if log_objective < INFEASIBLE else None

    def worst(found: list[float | None]) -> float | None:
        return None if None in found else max(found)

    row = {
        "space": name,
        "device": entry["device"],
        "variables": len(asked.space.variables),
        "points": points,
        "feasible": feasible,
        "optimum": math.exp(best),
        "exhaustive_s": exhaustive_s,
        "status": first["status"],
        "feasible_answer": all(a["concrete"]["feasible"] for a in [first, *again]),
        "search_gap": worst([gap(math.log(a["objective"])) for a in again]),
        "rounding_gap": 100 * first["gap"],
        "with_compiling_s": first["time_s"],
        "search_s": seconds,
        "search_designs": first["evaluations"],
    }
    for method, found in others.items():
        row[f"{method}_gap"] = worst([gap(score) for score, _ in found])
        row[f"{method}_designs"] = int(np.median([count for _, count in found]))
    return row


HEADS = (
    "space", "variables", "points", "feasible", "search_gap", "random_gap", "tpe_gap", "search_s",
    "with_compiling_s", "exhaustive_s", "search_designs", "random_designs", "tpe_designs",
)  # fmt: skip
"""Gaps are percent above the true optimum, worst of the seeds."""


def main(config: dict[str, Any], out: Path, scale: float = 1.0, seeds: int = 3) -> list[dict]:
    """Run, print and write results.json; returns the rows."""
    rows = []
    for name, entry in config["spaces"].items():
        rows.append(compare(name, entry, scale, seeds))
        print(f"{name}: {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    answers = [["none" if x is None else x for x in row] for row in experiment.values(rows, HEADS)]
    print("\n".join(experiment.markdown(HEADS, answers, digits=3)))
    experiment.write_results(out, rows, indent=1)
    return rows


if __name__ == "__main__":
    given = experiment.command(
        __doc__,
        HERE,
        scale=dict(type=float, default=1.0, help="of the ladders' lengths"),
        seeds=dict(type=int, default=3),
        only=dict(help="name of one space"),
    )
    if given.only:
        given.config["spaces"] = {given.only: given.config["spaces"][given.only]}
    main(given.config, given.out, given.scale, given.seeds)
