"""Level-1 coefficients of the attention core from measured kernel times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.attention import ATTENTION_TIME_S, DEFAULT_COEFFICIENTS, TILING, check_phase
from hymell_jax.robust_fit import adam
from hymell_jax.types import Device

PULL = 1e-5  # weight of the squared distance from the start


def fit_attention(
    phase: str,
    device: Device,
    batch,
    tokens,
    n_heads,
    n_kv_heads,
    head_dim,
    window_tokens,
    kv_bytes,
    time_s,
    row_weights=None,
    *,
    steps: int = 1000,
    learning_rate: float = 0.05,
    max_rows: int = 6000,
    start: Mapping[str, float] | None = None,
    tiling: bool = False,
    pull: float = PULL,
    seed: int = 0,
) -> dict[str, float]:
    """Coefficients of one phase and device from measured kernel times.

    Minimises the weighted mean of sqrt(r^2 + 0.01^2), r = log(time / measured): close to the mean
    absolute relative error, little moved by outliers. A weak pull (1e-5 squared) keeps what the
    rows do not determine near its start. Adam with cosine decay; the same rows give the same fit.

    Args:
        phase: "prefill" (`tokens` = prompt) or "decode" (`tokens` = context).
        device: data-sheet facts of the device that was measured.
        batch, tokens, n_heads, n_kv_heads, head_dim, window_tokens, kv_bytes: arrays [rows].
        time_s: [rows] measured seconds of one layer.
        row_weights: [rows] non-negative, or None for equal ones.
        steps: Adam steps.
        learning_rate: its first value.
        max_rows: a random subsample of this size is used where there are more rows.
        start: coefficients to start from and be pulled to, those of another device for example; by
            default `DEFAULT_COEFFICIENTS`, with the launch floor at the fastest rows.
        tiling: whether the sizes of tiles are fitted too, for a library of another kind of device.
        pull: weight of the squared distance from the start; more for fewer rows.
        seed: of the subsample.

    Raises:
        ValueError: an unknown phase, no rows, arrays of unequal length, times not positive.
    """
    check_phase(phase)
    weights = np.ones(len(time_s)) if row_weights is None else row_weights
    shape = [batch, tokens, n_heads, n_kv_heads, head_dim, window_tokens, kv_bytes]
    columns: list[Any] = [np.asarray(a, np.float64) for a in (*shape, time_s, weights)]
    rows = len(columns[0])
    if rows == 0 or any(c.shape != (rows,) for c in columns):
        shapes = [c.shape for c in columns]
        raise ValueError(f"Give arrays of one length, at least 1; got {shapes}.")
    if not (np.all(np.isfinite(columns[7])) and np.all(columns[7] > 0)):
        raise ValueError("time_s must be positive and finite in every row.")
    kept = np.random.default_rng(seed).permutation(rows)[:max_rows]
    used = [jnp.asarray(c[kept], jnp.float32) for c in columns]
    default = DEFAULT_COEFFICIENTS | (TILING if tiling else {})
    names = [name for name in default if name.startswith(phase + "_")]
    first = {name: jnp.float32((start or default)[name]) for name in names}
    if start is None:
        fastest = np.log(np.quantile(np.asarray(used[7]), 0.02))
        first[f"{phase}_log_launch_s"] = jnp.float32(fastest)
    loss = _fit_loss(phase, device, used, first, pull)
    fitted = adam(loss, first, steps, learning_rate)
    return {name: float(fitted[name]) for name in names}


def _fit_loss(phase: str, device: Device, columns: list[jax.Array], start: dict, weight: float):
    """The loss of `fit_attention` as a function of the coefficients."""
    batch, tokens, heads, kv_heads, head_dim, window, kv_bytes, time_s, weights = columns
    shape = (batch, tokens, heads, kv_heads, head_dim, head_dim, window, kv_bytes)
    log_measured = jnp.log(time_s)
    weights = weights / jnp.sum(weights)

    def loss(coefficients):
        time, _ = ATTENTION_TIME_S[phase](coefficients, device, *shape)
        residual = jnp.log(time) - log_measured
        pull = sum(jnp.square(coefficients[name] - start[name]) for name in start)
        return jnp.sum(weights * jnp.sqrt(jnp.square(residual) + 1e-4)) + weight * pull

    return loss
