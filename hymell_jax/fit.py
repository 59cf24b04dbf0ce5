"""Fitting level 1: losses on the logarithm of time, full determinism from a seed.

Every fit sees rows of `split == "train"` only. Times and power are fitted by the mean absolute
relative error (robust to outliers), published linear forms by least squares weighted with 1/y in
float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hymell_jax import gemm, power
from hymell_jax.robust_fit import fit_piecewise
from hymell_jax.types import Device

Progress = Callable[[str, int, int], None]
"""Called with (what is fitted, steps done, steps in all)."""

STEPS_PER_CALL = 50
GEMM_STAGES = ((8, 600, 1024, 0.05), (32, 1500, 2048, 0.03), (gemm.CHOICE, 3500, 4096, 0.02))
"""(sharpness of the choice of kernels, steps, rows a step, learning rate)."""

SOUND_POWER_S = 300e-6
"""GEMM power labels of shorter rows are lower bounds: the meter averages over what ran before."""


def _silent(what: str, done: int, total: int) -> None:
    del what, done, total


def minimise(
    loss: Callable[..., jax.Array],
    start: Any,
    rows: tuple[np.ndarray, ...],
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    what: str = "fit",
    progress: Progress | None = None,
) -> tuple[Any, float]:
    """Adam with cosine decay on random batches of rows; returns (coefficients, last mean loss).

    Args:
        loss: loss(coefficients, *row arrays [batch]) -> scalar.
        start: pytree of float32 leaves.
        rows: arrays [n_rows].
        steps: optimiser steps, rounded up to whole calls of `STEPS_PER_CALL`.
        batch: rows of a step, all of them if there are fewer.
        learning_rate: at the start; decays to zero.
        seed: of the choice of rows.
    """
    report = progress or _silent
    calls = -(-steps // STEPS_PER_CALL)
    schedule = optax.cosine_decay_schedule(learning_rate, calls * STEPS_PER_CALL)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    arrays = tuple(jnp.asarray(row) for row in rows)
    n_rows, chosen = len(rows[0]), min(batch, len(rows[0]))

    @jax.jit
    def run(coefficients, state, indices):
        def step(carry, index):
            coefficients, state = carry
            picked = tuple(a[index] for a in arrays)
            value, gradient = jax.value_and_grad(loss)(coefficients, *picked)
            updates, state = optimiser.update(gradient, state, coefficients)
            return (optax.apply_updates(coefficients, updates), state), value

        (coefficients, state), values = jax.lax.scan(step, (coefficients, state), indices)
        return coefficients, state, jnp.mean(values)

    generator = np.random.default_rng(seed)
    coefficients = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), start)
    state, value = optimiser.init(coefficients), np.inf
    for call in range(calls):
        indices = np.stack(
            [generator.choice(n_rows, chosen, replace=False) for _ in range(STEPS_PER_CALL)]
        )
        coefficients, state, value = run(coefficients, state, indices)
        report(what, (call + 1) * STEPS_PER_CALL, calls * STEPS_PER_CALL)
    return jax.tree.map(np.asarray, coefficients), float(value)


def gemm_time_s(
    coefficients, device, m, n, k, element_bytes, sharpness=gemm.CHOICE, streaming_weights=0.0
) -> jax.Array:
    """Seconds [n_rows] of measured products: with warm operands, or with weights that stream."""

    def one(m, n, k):
        return gemm.gemm_time(
            coefficients, device, m, n, k, element_bytes, element_bytes,
            streaming_weights=streaming_weights, sharpness=sharpness,
        )[0]  # fmt: skip

    return jax.vmap(one)(m, n, k)


def gemm_log_time(coefficients, device, m, n, k, element_bytes, sharpness=gemm.CHOICE) -> jax.Array:
    """ln seconds [n_rows] of measured products with warm operands."""
    return jnp.log(gemm_time_s(coefficients, device, m, n, k, element_bytes, sharpness))


def fit_gemm(
    device: Device,
    m: np.ndarray,
    n: np.ndarray,
    k: np.ndarray,
    time_s: np.ndarray,
    *,
    element_bytes: float = 2.0,
    seed: int = 0,
    stages: tuple | None = None,
    start: dict[str, np.ndarray] | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, np.ndarray], float]:
    """Coefficients of the refined matrix product from rows [n_rows]; (coefficients, train loss).

    The loss is the mean absolute log error, in the last stage the mean absolute relative error
    (which alone would leave rows that are predicted far too fast). The soft choice of kernels
    starts blunt and is sharpened, so that no kernel is ruled out early.
    """
    coefficients = start or _scattered(gemm.default_coefficients(), seed)
    value = np.inf
    for sharpness, steps, batch, rate in stages or GEMM_STAGES:

        def loss(c, m, n, k, log_time, sharpness=sharpness):
            error = gemm_log_time(c, device, m, n, k, element_bytes, sharpness) - log_time
            relative = jnp.expm1(jnp.minimum(error, 3.0))
            return jnp.mean(jnp.abs(relative if sharpness == gemm.CHOICE else error))

        coefficients, value = minimise(
            loss,
            coefficients,
            (m, n, k, np.log(time_s)),
            steps=steps,
            batch=batch,
            learning_rate=rate,
            seed=seed,
            what="gemm time",
            progress=progress,
        )
    return coefficients, value


def _scattered(start: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """The starting point with its per-kernel numbers spread a little, so that kernels differ."""
    generator = np.random.default_rng(seed)
    return {
        name: (value + 0.25 * generator.standard_normal(value.shape)).astype(np.float32)
        if value.ndim
        else value
        for name, value in start.items()
    }


def gemm_log_power(c, device, m, n, k, time_s, element_bytes) -> jax.Array:
    """ln watts [n_rows] of measured products, from their measured seconds."""
    flops = gemm.floating_operations(m, n, k)
    moved = n * k * element_bytes + m * k * element_bytes + m * n * 2.0
    cached = flops * gemm.cached_bytes_per_flop(element_bytes, element_bytes)
    fp8 = max(2.0 - element_bytes, 0.0)
    run = jax.vmap(functools.partial(power.board_power_w, c, device, fp8_share=fp8))
    return jnp.log(run(flops / time_s, moved / time_s, cached / time_s))


def fit_power(
    device: Device,
    m: np.ndarray,
    n: np.ndarray,
    k: np.ndarray,
    time_s: np.ndarray,
    power_w: np.ndarray,
    *,
    element_bytes: float = 2.0,
    sound_s: float = SOUND_POWER_S,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[dict[str, np.ndarray], float]:
    """Power coefficients from sound rows (`sound_s` or longer); (coefficients, loss)."""
    sound = time_s >= sound_s
    rows = tuple(a[sound] for a in (m, n, k, time_s, np.log(power_w)))

    def loss(c, m, n, k, time_s, log_power):
        error = gemm_log_power(c, device, m, n, k, time_s, element_bytes) - log_power
        return jnp.mean(jnp.abs(jnp.expm1(jnp.minimum(error, 3.0))))

    return minimise(
        loss,
        power.default_coefficients(),
        rows,
        steps=1500,
        batch=2048,
        learning_rate=0.03,
        seed=seed,
        what="gemm power",
        progress=progress,
    )


def fit_published_gemm(
    m: np.ndarray, n: np.ndarray, k: np.ndarray, y: np.ndarray, element_bytes: float = 2.0
) -> np.ndarray:
    """Published coefficients [5, 11] for y in seconds or joules (arXiv 2608.06723, equation 5)."""
    m, n, k = (np.asarray(a, np.float64) for a in (m, n, k))
    with jax.enable_x64(True):
        m64, n64, k64 = map(jnp.asarray, (m, n, k))
        terms = np.asarray(gemm.published_terms(m64, n64, k64, element_bytes))
    regime = gemm.published_regime(m, n, k, element_bytes)
    return fit_piecewise(terms, y, regime, len(gemm.REGIMES))
