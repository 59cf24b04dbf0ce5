"""Named plans: which cases, in which order, in how much time."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from hymell_jax.profiler import catalogue, designs
from hymell_jax.profiler.cases import Case
from hymell_jax.profiler.designs import Scale

SEED = 20


@dataclasses.dataclass(frozen=True)
class Plan:
    """Cases in the order to measure them, and the time they may take."""

    name: str
    cases: Sequence[Case]
    hours: float  # of all levels together, unless the caller says otherwise
    shares: tuple[float, float, float]  # of the time, a level
    sample_s: float  # measured seconds a case of levels 1 and 2
    pass_s: float  # measured seconds a whole pass of level 3


_CPU = Scale(
    models=catalogue.SMALL, shapes=30, draws=5, most_tokens=2048, most_flops=2e10, most_bytes=7e8,
    pass_flops=1.2e11, passes=7, value_bytes=4,
)  # fmt: skip
_GPU = Scale(
    models=catalogue.LARGE, shapes=24, draws=5, most_tokens=8192, most_flops=2e13, most_bytes=2e10,
    pass_flops=3e14, passes=7, value_bytes=2,
)  # fmt: skip

PLANS = ("quick", "paper", "full")
_Settings = tuple[float, tuple[float, float, float], float, float, dict[str, Any]]
_SETTINGS: dict[str, _Settings] = {  # hours, shares, sample_s, pass_s, changes of the scale
    "quick": (0.31, (0.30, 0.27, 0.43), 0.2, 1.0, {}),
    "paper": (0.5, (0.40, 0.25, 0.35), 0.3, 2.0, {"shapes": 12, "draws": 4, "metered": True}),
    "full": (8.0, (0.35, 0.30, 0.35), 0.5, 4.0, {"shapes": 120, "draws": 8, "passes": 20}),
}

_DESIGNS: dict[int, Sequence[Callable[[Scale, random.Random], list[Case]]]] = {
    1: (designs.gemm, designs.rowwise),
    2: (designs.attention, designs.feed_forward, designs.experts, designs.latent,
        designs.linear_attention),
    3: (designs.whole_models,),
}  # fmt: skip


def make_plan(name: str, kind: str, levels: Sequence[int] = (1, 2, 3)) -> Plan:
    """A named plan for "cpu" or "cuda".

    "quick" takes under 20 minutes on two cores. "paper" is the method of HYMELL (arXiv 2608.06723):
    RMSNorm, softmax and GEMM with energy first, then blocks, then whole models of 1 to 8 billion
    parameters. "full" has more of everything.

    Raises:
        ValueError: an unknown name, or levels other than 1, 2, 3.
    """
    if name not in PLANS:
        raise ValueError(f"Unknown plan {name!r}; there are {', '.join(PLANS)}.")
    if not levels or not set(levels) <= {1, 2, 3}:
        raise ValueError("Levels are 1 (operators), 2 (blocks) and 3 (whole models).")
    hours, shares, sample_s, pass_s, changes = _SETTINGS[name]
    scale = dataclasses.replace(_GPU if kind == "cuda" else _CPU, **changes)
    cases: list[Case] = []
    for level in sorted(set(levels)):
        found: list[Case] = []
        for design in _DESIGNS[level]:
            found += design(scale, random.Random(f"{SEED} {design.__name__}"))
        cases += _shuffled(found, level, paper=name == "paper")
    return Plan(name, cases, hours, shares, sample_s, pass_s)


def _shuffled(cases: list[Case], level: int, paper: bool) -> list[Case]:
    """Random order; models stay together, and the paper's operators come first in its plan."""
    draw = random.Random(SEED)
    cases = sorted(cases, key=lambda case: case.key)
    draw.shuffle(cases)
    if level == 3:
        names = sorted({case.sizes["model"] for case in cases})
        draw.shuffle(names)
        return sorted(cases, key=lambda case: names.index(case.sizes["model"]))
    if paper and level == 1:
        first = ("operators/rmsnorm", "operators/softmax", "operators/gemm")
        return sorted(cases, key=lambda case: case.table not in first)
    return cases
