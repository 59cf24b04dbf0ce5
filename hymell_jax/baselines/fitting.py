"""Fits of the few positive coefficients of a method to measured times or energies.

Every coefficient named `log_...` is fitted, the others stay. The loss is relative: residuals are
differences of logs, so that 10 % is 10 % at every scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.baselines.interface import QUANTITIES
from hymell_jax.types import Architecture, Device, Workload


def positive(name: str, values: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """A float64 array of finite positive numbers.

    Raises:
        ValueError: another shape, or a number that is not finite and positive.
    """
    array = np.asarray(values, np.float64)
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}; got {array.shape}.")
    if array.size == 0 or not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(f"{name} must hold finite positive numbers.")
    return array


def fit_logs(
    predict: Callable[..., Any],
    archs: Architecture,
    works: Workload,
    device: Device,
    initial: dict[str, Any],
    measured: dict[str, Any],
) -> dict[str, Any]:
    """Coefficients of a method that bring its predictions close to measured rows of one device.

    Least squares on ln(predicted / measured) with a soft L1 loss, so that single bad rows do not
    decide; a weak pull (0.01) to the start keeps coefficients finite that the rows do not see.

    Args:
        predict: of the method or of one of its forms.
        archs, works: stacked, leaves [n].
        initial: coefficients to start from, such as the method's defaults.
        measured: quantity of `QUANTITIES`: measured values [n], at least one quantity.

    Raises:
        ValueError: unknown quantities, one that the method does not give, wrong sizes, no
            coefficient to fit.
    """
    from scipy.optimize import least_squares

    unknown = [name for name in measured if name not in QUANTITIES]
    if unknown or not measured:
        raise ValueError(f"measured must name some of {', '.join(QUANTITIES)}; got {unknown}.")
    n = jax.tree.leaves(archs)[0].shape[0]
    targets = {name: np.log(positive(name, rows, (n,))) for name, rows in measured.items()}
    names = [name for name in initial if name.startswith("log_")]
    if not names:
        raise ValueError("None of the coefficients starts with log_: there is nothing to fit.")
    fixed = {name: jnp.float32(value) for name, value in initial.items()}
    start = np.array([float(initial[name]) for name in names])

    @jax.jit
    def run(vector):
        coefficients = fixed | {name: vector[i] for i, name in enumerate(names)}
        return jax.vmap(lambda a, w: predict(a, w, device, coefficients))(archs, works)

    @jax.jit
    def logs(vector):
        found = run(vector)
        return jnp.concatenate([jnp.log(getattr(found, name)) for name in targets])

    first = run(jnp.asarray(start, jnp.float32))
    for name in targets:
        if not np.asarray(first.available)[:, QUANTITIES.index(name)].all():
            raise ValueError(f"The method does not give {name}.")
    slope = jax.jit(jax.jacfwd(logs))
    goal = np.concatenate(list(targets.values()))

    def residuals(x):
        found = np.asarray(logs(jnp.asarray(x, jnp.float32)), np.float64) - goal
        return np.concatenate([found, 0.01 * (x - start)])

    def jacobian(x):
        found = np.asarray(slope(jnp.asarray(x, jnp.float32)), np.float64)
        return np.concatenate([found, 0.01 * np.eye(len(names))])

    fitted = least_squares(residuals, start, jacobian, loss="soft_l1", f_scale=0.3).x
    result = {name: np.float32(value) for name, value in initial.items()}
    return result | {name: np.float32(x) for name, x in zip(names, fitted, strict=True)}
