"""Why level 3 does not answer a request: which size leaves what was measured, and how far."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hymell_jax import serving
from hymell_jax.mlp import FADE_OCTAVES, FADE_WIDTH
from hymell_jax.model import CostModel, Prediction
from hymell_jax.types import Architecture, Workload

_TIMES = {
    "log2_matrix": "the matrix products of the {}",
    "log2_attention": "the attention of the {}",
    "log2_experts": "the experts of the {}",
    "log2_physics": "the {}",
}
_SIZES = {
    "log2_layers": "layers",
    "log2_width": "d_model",
    "log2_batch": "batch",
    "log2_tokens": "tokens of the {}",
    "log2_context": "prompt or context of the {}",
    "log2_heads_per_kv": "query heads for each KV head",
}
_KINDS = {"mixture": "the share of layers with experts", "parallel": "the number of GPUs"}


def uncovered(
    model: CostModel, arch: Architecture, work: Workload, prediction: Prediction, level: int
) -> str:
    """One note: how a request leaves level 3, and what a lower level's answer lacks.

    Args:
        model: holds level 3.
        arch, work: the request, leaves of shape ().
        prediction: of level 3.
        level: that answers instead.
    """
    assert model.engine is not None
    normalizer = model.engine.networks["time"]["normalizer"]
    found: list[_Outside] = []
    for phase, name in ((prediction.prefill, "prefill"), (prediction.decode, "decode")):
        blocks, prefill = serving.blocks_of(phase.parts), name == "prefill"
        terms = model.engine.coefficients
        one = serving.serve_pass(terms, model.device, arch, work, blocks, prefill)
        values = serving.features(arch, work, one, prefill, one.time_s)
        found += _outside(np.asarray(values, np.float64), normalizer, name)
    found.sort(key=lambda one: -one.distance)
    reasons = [found[0].words] if found else ["no model of this kind and size was measured"]
    if found and not found[0].is_size:  # the size behind it too
        reasons += [x.words for x in found if x.is_size and x.phase == found[0].phase][:1]
    return (
        f"Level 3 does not cover this request: {'; '.join(reasons)}. Level {level} answers "
        "instead, kernels alone: the engine's own time and the intervals are missing, so expect "
        "a token to take longer."
    )


@dataclasses.dataclass(frozen=True)
class _Outside:
    """A feature of a pass outside the measured range."""

    distance: float
    words: str
    phase: str
    is_size: bool


def _outside(values: np.ndarray, normalizer: Any, phase: str) -> list[_Outside]:
    low, high, std = (
        np.asarray(getattr(normalizer, n), np.float64) for n in ("low", "high", "std")
    )
    found = []
    for place, name in enumerate(serving.FEATURES):
        above, below = values[place] - high[place], low[place] - values[place]
        monotone = place < len(serving.MONOTONE)  # of these only large ones leave the range
        far = above if monotone else max(above, below)
        if far <= 1e-4:
            continue
        width = FADE_OCTAVES if monotone else FADE_WIDTH * std[place]
        words = _words(name, phase, values[place], far, above > 0)
        found.append(_Outside(far / width, words, phase, name in _SIZES))
    return found


def _words(name: str, phase: str, value: float, far: float, above: bool) -> str:
    if name in _TIMES:
        return f"{_TIMES[name].format(phase)} takes {2.0**far:.3g} times as long as any measured"
    if name in _SIZES:
        end = "largest" if above else "smallest"
        limit = 2.0 ** (value - far if above else value + far)
        return f"{_SIZES[name].format(phase)} {2.0**value:.6g}, {end} measured {limit:.6g}"
    return f"{_KINDS.get(name, name)} is {'above' if above else 'below'} what was measured"
