"""Architecture search by gradient: the cheapest architecture that meets every budget.

`lagrangian` minimises over relaxed coordinates from many starts at once, `refinement` ends on whole
numbers, every candidate evaluated by the same cost model. The best point that meets every budget
is the answer; where none does, the budgets that block are named.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hymell_jax import checkpoint, models, operators, quantities, space, space_points
from hymell_jax import model as cost_model
from hymell_jax.files import read_json
from hymell_jax.hf import HFModel
from hymell_jax.lagrangian import KINDS, Constraint, Program, descend, np_excess
from hymell_jax.model import CostModel
from hymell_jax.notebook import Answer
from hymell_jax.quantities import OBJECTIVES, QUANTITIES, Proxy
from hymell_jax.refinement import (
    INFEASIBLE,
    MAX_ROUNDS,
    TOLERANCE,
    Evaluator,
    measured,
    refine,
    roundings,
)
from hymell_jax.space import Space
from hymell_jax.types import Architecture, Workload, checked_number, workload

Progress = Callable[[str, int, int], None]

STARTS = 32
OUTER_STEPS, INNER_STEPS = 8, 40
RELAXED_TOLERANCE = 2e-3  # ln of a quantity over its limit
EQUAL_TOLERANCE = 0.01
DOMAIN_LIMIT = math.log(2.0)  # as `Prediction.in_domain`


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """A search that has been checked: everything but the optimiser's settings."""

    model: CostModel
    space: Space
    work: Workload
    name: str  # of the model or space
    minimise: str
    objectives: tuple[tuple[str, float], ...]  # quantities and weights of their logs
    constraints: tuple[Constraint, ...]
    proxies: Mapping[str, Proxy]
    tolerance: float

    @property
    def program(self) -> Program:
        """The static part."""
        # every point of the space has the blocks of its base
        structure = operators.structure_of(self.space.base, self.work)
        return Program(
            tuple(name for name, _ in self.objectives),
            tuple((c.name, c.kind, c.linear) for c in self.constraints),
            tuple(self.proxies.items()),
            structure,
        )


def _subject(source: Any, work: Workload, options: Mapping[str, Any]) -> tuple[Space, str, str]:
    """(space, name, dtype) of a model, an architecture, a space, or the file of one."""
    if isinstance(source, Space):
        return source, "space", "bf16"
    if isinstance(source, Architecture):
        return space.make_space(source, work, **options), "architecture", "bf16"
    content = source
    if isinstance(source, str) and source.lower().endswith(".json"):
        content = read_json(source, "space or configuration")
    if isinstance(content, Mapping) and "free" in content:
        base, name, dtype = _base(content.get("base"))
        given = {k: v for k, v in options.items() if v}
        if given:
            raise ValueError(
                f"A space says itself what is free; {', '.join(given)} cannot be given as well."
            )
        return space.space_from_json(content, base, work), name, dtype
    hf = source if isinstance(source, HFModel) else models.resolve_model(source)
    return space.make_space(hf.architecture, work, **options), hf.name, hf.dtype


def _base(given: Any) -> tuple[Architecture, str, str]:
    if isinstance(given, Mapping) and "d_model" in given:
        return space.base_from_fields(given), "architecture", "bf16"
    if given is None:
        raise ValueError("A space needs `base`: a model's name or an object of fields.")
    hf = models.resolve_model(given)
    return hf.architecture, hf.name, hf.dtype


def _constraints(bounds: Mapping[str, Mapping[str, Any]], model, proxies, domain_limit, memory):
    found = []
    for kind in KINDS:
        for name, limit in (bounds.get(kind) or {}).items():
            quantities.check_known(name, model, proxies)
            linear = name in proxies or name == "domain_distance"
            low = -1e30 if linear else 1e-30
            number = checked_number(f"{kind} {name}", limit, low, 1e30)
            found.append(Constraint(name, kind, number, linear))
    if memory and not any(c.name in ("memory_share", "memory_bytes") for c in found):
        found.append(Constraint("memory_share", "at_most", 1.0))
    if domain_limit is not None and not any(c.name == "domain_distance" for c in found):
        found.append(Constraint("domain_distance", "at_most", domain_limit, True))
    return tuple(found)


def ask(
    model_or_space: Any,
    device: Any,
    *,
    minimise: str = "energy",
    at_most: Mapping[str, float] | None = None,
    at_least: Mapping[str, float] | None = None,
    equal: Mapping[str, float] | None = None,
    free: Sequence[str] | None = None,
    fix: Sequence[str] = (),
    ranges: Mapping[str, tuple[float, float]] | None = None,
    multiples: Mapping[str, float] | None = None,
    levels: Mapping[str, Sequence[float]] | None = None,
    tie: str | None = "auto",
    work: Workload | Mapping[str, Any] | None = None,
    proxies: Mapping[str, Proxy] | None = None,
    tolerance: float = EQUAL_TOLERANCE,
    memory: bool = True,
    domain: bool = True,
    dtype: str | None = None,
    runtime: str | None = None,
) -> Question:
    """A checked question; see `search` for the arguments.

    Raises:
        ValueError: anything of another form, or unknown.
    """
    proxies = dict(proxies or {})
    taken = [name for name in proxies if name in QUANTITIES]
    if taken:
        raise ValueError(f"{taken[0]!r} is a built-in quantity; give the proxy another name.")
    options = dict(free=free, fix=fix, ranges=ranges, multiples=multiples, levels=levels)
    if tie != "auto":
        options["tie"] = tie
    given = work if isinstance(work, Workload) else dict(work or {})
    draft = given if isinstance(given, Workload) else workload(**given)
    found, name, own_dtype = _subject(model_or_space, draft, options)
    model = device
    if not isinstance(device, CostModel):
        model = checkpoint.load(device, runtime, dtype or own_dtype)
    if not isinstance(given, Workload):
        draft = workload(**({"dtype": model.card.dtype} | given))
    cost_model._check(model, found.base, draft)
    target = quantities.check_known(OBJECTIVES.get(minimise, minimise), model, proxies)
    checked_number("tolerance", tolerance, 1e-6, 1.0)
    bounds: dict[str, Any] = {"at_most": at_most, "at_least": at_least, "equal": equal}
    limits = _constraints(bounds, model, proxies, DOMAIN_LIMIT if domain else None, memory)
    question = Question(
        model, found, draft, name, minimise, ((target, 1.0),), limits, proxies, tolerance
    )
    return _domain_of_start(question) if domain else question


def _domain_of_start(question: Question) -> Question:
    """The question with a domain that holds the start, where the caller set none."""
    program = question.program
    row = measured(question.model, question.space.base, question.work, program)[0]
    distance = float(row[program.reported.index("domain_distance")])
    constraints = tuple(
        dataclasses.replace(c, limit=max(c.limit, distance + 1e-3))
        if c.name == "domain_distance" and c.limit == DOMAIN_LIMIT
        else c
        for c in question.constraints
    )
    return dataclasses.replace(question, constraints=constraints)


def weights_and_limits(question: Question) -> tuple[np.ndarray, np.ndarray]:
    """Weights of the objectives [n_objectives] and limits [n_constraints], float32."""
    return (
        np.array([w for _, w in question.objectives], np.float32),
        np.array([c.limit for c in question.constraints], np.float32),
    )


def first_points(question: Question, count: int, seed: int) -> np.ndarray:
    """Relaxed coordinates [count, n]: the base first, then a Latin hypercube."""
    n = len(question.space.variables)
    generator = np.random.default_rng(seed)
    cells = np.stack([generator.permutation(count) for _ in range(n)], 1)
    x = (cells + generator.uniform(size=(count, n))) / count
    x[0] = space_points.coordinates(question.space, space_points.base_values(question.space))
    return x.astype(np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """What one search came to."""

    relaxed_x: np.ndarray  # [n]
    relaxed_feasible: bool
    index: np.ndarray  # [n], of the concrete answer
    feasible: bool
    at_rest: bool
    trajectory: list[dict[str, Any]]
    evaluator: Evaluator
    last_x: np.ndarray  # [starts, n], to warm-start a neighbour


def solve(
    question: Question,
    x0: np.ndarray,
    outer: int = OUTER_STEPS,
    inner: int = INNER_STEPS,
    max_rounds: int = MAX_ROUNDS,
    progress: Progress | None = None,
) -> Found:
    """One search from relaxed coordinates x0 [starts, n]."""
    report = progress or (lambda *_: None)
    report("descent", 0, 1)
    weights, limits = weights_and_limits(question)
    program = question.program
    path_x, objective, excess = map(
        np.asarray,
        descend(
            quantities.bare(question.model), question.space.box, question.work, weights, limits,
            x0, program=program, outer=outer, inner=inner,
        ),
    )  # fmt: skip
    is_equal = np.array([c.kind == "equal" for c in question.constraints] + [False, False])
    report("descent", 1, 1)
    over = np.where(is_equal, np.abs(excess), np.maximum(excess, 0.0)).max(-1)  # [outer, starts]
    score = np.where(over > RELAXED_TOLERANCE, 1e3 + over, objective)
    score = np.where(np.isfinite(score), score, np.inf)
    order = np.argsort(score[-1], kind="stable")
    trajectory = []
    for step in range(outer):
        best = int(np.argmin(score[step]))
        trajectory.append(
            _step("relaxed", (step + 1) * inner, objective[step, best], over[step, best],
                  _relaxed_values(question.space, path_x[step, best]), question)
        )  # fmt: skip
    evaluator = Evaluator(
        question.model, question.space, question.work, program, weights, limits, question.tolerance
    )
    base_x = space_points.coordinates(question.space, space_points.base_values(question.space))
    seeds = roundings(question.space, path_x[-1][order])
    seeds = np.concatenate([seeds, space_points.nearest_index(question.space, base_x[None])])
    index, best_score, rounds, at_rest = refine(evaluator, seeds, max_rounds, report)
    for number, (value, position) in enumerate(rounds):
        values = space_points.values_at(question.space, position[None])[0]
        trajectory.append(
            _step("concrete", number, value if value < INFEASIBLE else None,
                  max(value - INFEASIBLE, 0.0), values, question)
        )  # fmt: skip
    return Found(
        path_x[-1][order[0]], bool(over[-1][order[0]] <= RELAXED_TOLERANCE), index,
        bool(best_score < INFEASIBLE), at_rest, trajectory, evaluator, path_x[-1],
    )  # fmt: skip


def _relaxed_values(found: Space, x: np.ndarray) -> np.ndarray:
    box = found.box
    return np.exp(box.log_low + x * (box.log_high - box.log_low))


def _step(stage, number, log_objective, excess, values, question: Question) -> dict[str, Any]:
    single = len(question.objectives) == 1
    objective = None
    if log_objective is not None and single and np.isfinite(log_objective):
        objective = float(np.exp(log_objective))
    return {
        "stage": stage,
        "step": int(number),
        "objective": objective,
        "excess": float(excess),
        "variables": dict(zip(question.space.names, map(float, values), strict=True)),
    }


def _design(question: Question, arch: Architecture, values: np.ndarray) -> dict[str, Any]:
    """One design laid out: its fields, its quantities and where it stands against each budget."""
    program = question.program
    row = measured(question.model, arch, question.work, program)[0]
    found = {
        name: float(value)
        for name, value in zip(program.reported, row, strict=True)
        if name in question.proxies or quantities.is_known(name, question.model)
    }
    budgets = []
    for c in question.constraints:
        excess = float(np_excess((c.name, c.kind, c.linear), found[c.name], c.limit))
        slack = math.log1p(question.tolerance) if c.kind == "equal" else TOLERANCE
        met = (abs(excess) if c.kind == "equal" else excess) <= slack
        budgets.append(
            {"quantity": c.name, "kind": c.kind, "limit": c.limit, "value": found[c.name],
             "excess": excess, "met": bool(met)}
        )  # fmt: skip
    return {
        "variables": dict(zip(question.space.names, map(float, values), strict=True)),
        "architecture": space.architecture_fields(arch),
        "objective": found[question.objectives[0][0]],
        "quantities": found,
        "constraints": budgets,
        "feasible": all(b["met"] for b in budgets),
    }


def base_design(question: Question) -> dict[str, Any]:
    """The design that a search starts from, as `search` reports it."""
    return _design(question, question.space.base, space_points.base_values(question.space))


def concrete_design(question: Question, index: np.ndarray) -> dict[str, Any]:
    """The design at a ladder position [n], as `search` reports it."""
    archs = space_points.concrete_architectures(question.space, index[None])
    arch = jax.tree.map(lambda leaf: leaf[0], archs)
    return _design(question, arch, space_points.values_at(question.space, index[None])[0])


def _answer(question: Question, found: Found, seconds: float) -> dict[str, Any]:
    start = base_design(question)
    relaxed_arch = jax.tree.map(
        np.asarray, space_points.relaxed_architecture(question.space.box, found.relaxed_x)
    )
    relaxed = _design(question, relaxed_arch, _relaxed_values(question.space, found.relaxed_x))
    relaxed["feasible"] = found.relaxed_feasible
    concrete = concrete_design(question, found.index)
    blocking = sorted(
        (b for b in concrete["constraints"] if not b["met"]), key=lambda b: -abs(b["excess"])
    )
    status = "infeasible"
    if found.feasible:
        status = "converged" if found.at_rest else "round_limit"
    quantity = question.objectives[0][0]
    return Answer("search", {
        "model": question.name,
        "device": question.model.card.device,
        "minimise": {
            "name": question.minimise, "quantity": quantity,
            "unit": QUANTITIES[quantity].unit if quantity in QUANTITIES else None,
        },
        "status": status,
        "objective": concrete["objective"],
        "gap": concrete["objective"] / relaxed["objective"] - 1.0,
        "start": start,
        "relaxed": relaxed,
        "concrete": concrete,
        "blocking": blocking,
        "trajectory": found.trajectory,
        "evaluations": found.evaluator.count,
        "time_s": seconds,
        "provenance": {
            k: question.model.card.provenance.get(k) for k in ("time", "energy")
        },
    })  # fmt: skip


def search(
    model_or_space: Any,
    device: Any,
    *,
    starts: int = STARTS,
    outer_steps: int = OUTER_STEPS,
    inner_steps: int = INNER_STEPS,
    max_rounds: int = MAX_ROUNDS,
    seed: int = 0,
    progress: Progress | None = None,
    **question: Any,
) -> dict[str, Any]:
    """The architecture that minimises a quantity within budgets, whole numbers, re-evaluated.

    Args:
        model_or_space: a preset, configuration, `HFModel` or `Architecture` to start from; or a
            `Space`, or its JSON form.
        device: a name, a data sheet, or a loaded `CostModel`.
        starts, outer_steps, inner_steps, max_rounds, seed: of the optimiser.
        progress: called with (what, done, at most).
        minimise: "energy", "latency", "energy_delay", or any of `quantities.QUANTITIES`.
        at_most, at_least, equal: limits in SI units by quantity; several at once.
        free, fix, ranges, multiples, levels, tie: as `space.make_space`.
        work: a `Workload`, or arguments of `workload`.
        proxies: by name, JAX functions of an `Architecture`, to use in limits.
        tolerance: relative, of `equal` limits.
        memory: whether the design must fit on the device.
        domain: whether sizes must stay within twice the measured ones, or as far as the start.
        dtype, runtime: of the model that is loaded.

    Returns:
        A plain dictionary: `start`, `relaxed` and `concrete` designs, `objective` (of the concrete
        one), `gap` (concrete over relaxed objective, minus one), `status` ("converged",
        "round_limit" or "infeasible"), `blocking` (limits that the concrete design breaks, worst
        first) and `trajectory`.

    Raises:
        ValueError: unknown names, limits that are not numbers, a space that cannot be built.
    """
    begin = time.perf_counter()
    for name, value in (("starts", starts), ("outer_steps", outer_steps),
                        ("inner_steps", inner_steps), ("max_rounds", max_rounds)):  # fmt: skip
        checked_number(name, value, 1, 1e5)
    checked_number("seed", seed, 0, 2**63)
    asked = ask(model_or_space, device, **question)
    x = first_points(asked, starts, seed)
    found = solve(asked, x, outer_steps, inner_steps, max_rounds, progress)
    return _answer(asked, found, time.perf_counter() - begin)
