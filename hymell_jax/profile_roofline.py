"""The reference of a profile: a roofline whose peak and bandwidth are fitted to the same rows.

    T = sum over operators of max(FLOPs / peak, bytes / bandwidth)

Both rates minimise the mean absolute relative error on the rows that are fitted, by a grid over
their logarithms that is refined around the best point, so the reference has no unlucky start.
"""

from __future__ import annotations

import numpy as np

GRID, ROUNDS = 25, 5
REACH = 3e4  # ratio between the greatest and the least rate tried


def roofline_time_s(rates: tuple[float, float], flops: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Seconds [n_rows] of work [n_rows] or [n_rows, n_operators]."""
    operators = np.maximum(flops / rates[0], moved / rates[1])
    return operators if operators.ndim == 1 else operators.sum(-1)


def fit_roofline(flops: np.ndarray, moved: np.ndarray, time_s: np.ndarray) -> tuple[float, float]:
    """(FLOP/s, B/s) of least mean absolute relative error.

    Args:
        flops, moved: [n_rows] or [n_rows, n_operators].
        time_s: [n_rows] measured seconds.

    Raises:
        ValueError: no rows, or times that are not positive.
    """
    time_s = np.asarray(time_s, np.float64)
    if not len(time_s) or not (time_s > 0).all():
        raise ValueError(f"A roofline is fitted to positive times; got {len(time_s)} rows.")
    total = [np.asarray(x, np.float64) for x in (flops, moved)]
    sums = [x if x.ndim == 1 else x.sum(-1) for x in total]
    greatest = np.log([max(float(np.max(x / time_s)), 1.0) for x in sums])
    centre, width = greatest - 0.5 * np.log(REACH) + np.log(3.0), 0.5 * np.log(REACH)
    for _ in range(ROUNDS):
        axes = [np.linspace(c - width, c + width, GRID) for c in centre]
        errors = np.array([
            [_error((np.exp(a), np.exp(b)), *total, time_s=time_s) for b in axes[1]]
            for a in axes[0]
        ])  # fmt: skip
        i, j = np.unravel_index(int(np.argmin(errors)), errors.shape)
        centre, width = np.array([axes[0][i], axes[1][j]]), 3.0 * width / GRID
    return float(np.exp(centre[0])), float(np.exp(centre[1]))


def _error(rates, flops, moved, *, time_s) -> float:
    return float(np.mean(np.abs(roofline_time_s(rates, flops, moved) / time_s - 1.0)))
