"""Fitting a handful of level-1 coefficients to measured times, for blocks with few of them.

Minimises the mean of sqrt(r^2 + 0.01^2), r = ln(time / measured): close to the mean absolute
relative error, little moved by outliers. A weak pull (1e-5 squared) keeps what the rows do not
determine near its start. Adam with cosine decay on a fixed subsample: same rows, same fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

LOSS_WIDTH = 0.01
PULL = 1e-5
LAUNCH = "log_launch_s"  # starts at the fastest rows, not where the caller says


def fit_coefficients(
    time_of: Callable[..., jax.Array],
    start: Mapping[str, float],
    columns: Sequence[np.ndarray],
    time_s: np.ndarray,
    *,
    steps: int = 1500,
    learning_rate: float = 0.05,
    max_rows: int = 4000,
    seed: int = 0,
) -> dict[str, float]:
    """Coefficients under which `time_of(coefficients, *columns)` is closest to `time_s`.

    Args:
        time_of: seconds [n_rows] from coefficients and columns.
        start: names and first values; `log_launch_s`, where there is one, starts instead at 0.8 of
            the time that one row in fifty undercuts.
        columns: arrays [n_rows].
        time_s: [n_rows] measured seconds.
        steps, learning_rate: of Adam, on all rows kept.
        max_rows: a random subsample of this size is used where there are more rows.
        seed: of the subsample.

    Raises:
        ValueError: no rows, arrays of unequal length, times not positive.
    """
    measured = np.asarray(time_s, np.float64)
    columns = [np.asarray(a, np.float64) for a in columns]
    if measured.ndim != 1 or not len(measured) or any(a.shape != measured.shape for a in columns):
        shapes = [a.shape for a in (*columns, measured)]
        raise ValueError(f"Give arrays of one length, at least 1; got {shapes}.")
    if not (np.isfinite(measured).all() and (measured > 0).all()):
        raise ValueError("time_s must be positive and finite in every row.")
    kept = np.random.default_rng(seed).permutation(len(measured))[:max_rows]
    rows = [jnp.asarray(a[kept], jnp.float32) for a in columns]
    log_measured = jnp.log(jnp.asarray(measured[kept], jnp.float32))
    first = {name: jnp.float32(value) for name, value in start.items()}
    if LAUNCH in first:
        first[LAUNCH] = jnp.float32(np.log(0.8 * np.quantile(measured, 0.02)))

    def loss(c):
        residual = jnp.log(time_of(c, *rows)) - log_measured
        pull = sum(jnp.square(c[name] - first[name]) for name in first)
        return jnp.mean(jnp.sqrt(jnp.square(residual) + LOSS_WIDTH**2)) + PULL * pull

    fitted = adam(loss, first, steps, learning_rate)
    return {name: float(fitted[name]) for name in first}


def fit_piecewise(
    terms: np.ndarray, y: np.ndarray, regime: np.ndarray, n_regimes: int
) -> np.ndarray:
    """Coefficients [n_regimes, n_terms] of a linear form a regime, float64.

    Least squares weighted with 1/y: minimises the sum of squared relative errors. Columns are
    scaled to unit norm first: unscaled, the terms of a matrix product have a condition number near
    1e17. A regime without rows gets zeros.

    Args:
        terms: [n_rows, n_terms].
        y: [n_rows] seconds or joules, positive.
        regime: [n_rows] which regime a row is in.
        n_regimes: how many there are.
    """
    terms, y = np.asarray(terms, np.float64), np.asarray(y, np.float64)
    fitted = np.zeros((n_regimes, terms.shape[1]))
    for index in range(n_regimes):
        here = np.asarray(regime) == index
        if not here.any():
            continue
        weighted = terms[here] / y[here, None]
        scale = np.linalg.norm(weighted, axis=0)
        scale[scale == 0] = 1.0
        solution, *_ = np.linalg.lstsq(weighted / scale, np.ones(here.sum()), rcond=None)
        fitted[index] = solution / scale
    return fitted


def adam(loss, start, steps: int, learning_rate: float):
    """Where Adam with cosine decay gets from `start` in `steps` full-batch steps."""
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))

    def step(carry, _):
        values, state = carry
        updates, state = optimizer.update(jax.grad(loss)(values), state)
        return (optax.apply_updates(values, updates), state), None

    run = jax.jit(lambda values: jax.lax.scan(step, (values, optimizer.init(values)), length=steps))
    (values, _), _ = run(start)
    return values
