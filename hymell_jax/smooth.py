"""Smooth building blocks. Each one states its hard limit; all are safe in float32.

Gates and maxima follow the recipes for regime equations of HYMELL (arXiv 2608.06723): the published
piecewise form is the limit of a small temperature.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.types import Value


def floating(x) -> jax.Array:
    """An array of floats of the input's own width: sizes may come as integers."""
    return 1.0 * jnp.asarray(x)


def safe_log(x: Value) -> jax.Array:
    """ln(x) where x > 0, else ln of the smallest normal float32; finite gradient everywhere."""
    tiny = 1.2e-38
    positive = x > tiny
    return jnp.log(jnp.where(positive, x, tiny))


def power_of_two(x: jax.Array, exponent: int) -> jax.Array:
    """x ** exponent for exponent 1, 2, 4, 8, ... by squaring: much cheaper than exp and log."""
    while exponent > 1:
        x = x * x
        exponent //= 2
    return x


def root_of_two(x: jax.Array, exponent: int) -> jax.Array:
    """x ** (1 / exponent) for exponent 1, 2, 4, 8, ... by square roots, without exp and log."""
    while exponent > 1:
        x = jnp.sqrt(x)
        exponent //= 2
    return x


def smooth_maximum(*terms: jax.Array, sharpness: int = 4) -> jax.Array:
    """(sum t^p)^(1/p) of positive terms of one shape, p = sharpness, a power of two.

    Hard limit: the maximum, as p grows. Never below the maximum, at most n^(1/p) times it. Terms
    are scaled by the largest first, so nothing overflows; the gradient is the share of each term.
    """
    alike = jnp.broadcast_arrays(*terms)
    largest = jax.lax.stop_gradient(functools.reduce(jnp.maximum, alike))
    largest = jnp.maximum(largest, 1e-30)
    total = jnp.asarray(sum(power_of_two(term / largest, sharpness) for term in alike))
    return largest * root_of_two(total, sharpness)


def p_norm(order: jax.Array, *terms: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum t^p)^(1/p) [...] of positive terms, p = order, and each one's share [n_terms, ...].

    Hard limit: the maximum, as p grows. Any p > 0, unlike `smooth_maximum`.
    """
    logs = order * jnp.log(jnp.stack(terms))
    return jnp.exp(jax.nn.logsumexp(logs, axis=0) / order), jax.nn.softmax(logs, axis=0)


def added_and_overlapped(
    order: jax.Array, terms: Sequence[jax.Array], added: int
) -> tuple[jax.Array, jax.Array]:
    """The first `added` terms plus the p-norm of the others [...], and shares [..., n_terms].

    Terms are positive, of one shape; shares are of d log(sum) and add up to one.
    """
    body, shares = p_norm(order, *terms[added:])
    total = sum(terms[:added]) + body
    parts = [term / total for term in terms[:added]]
    return total, jnp.stack([*parts, *(shares * (body / total)[None])], -1)


def smooth_minimum(terms: jax.Array, sharpness: int = 32) -> jax.Array:
    """(sum t^-p)^(-1/p) over the last axis of positive terms, p = sharpness, a power of two.

    Hard limit: the minimum, as p grows. Never above the minimum.
    """
    smallest = jax.lax.stop_gradient(jnp.min(terms, axis=-1, keepdims=True))
    total = jnp.sum(power_of_two(smallest / terms, sharpness), axis=-1)
    return jnp.squeeze(smallest, -1) * total ** (-1.0 / sharpness)


def ordered_gates(x: Value, edges: Value, temperature: Value) -> jax.Array:
    """Weights of the regimes between ordered edges on a coordinate x, shape [..., n_edges + 1].

    w_k = c_k - c_(k+1) with c_k = sigmoid((x - edge_k) / temperature): non-negative, sum one.
    Hard limit: the indicator of the interval that holds x, as the temperature goes to zero.
    """
    x, edges = jnp.asarray(x), jnp.asarray(edges)
    edges = edges.reshape((1,) * x.ndim + (-1,))
    above = jax.nn.sigmoid((x[..., None] - edges) / temperature)
    ones = jnp.ones_like(above[..., :1])
    return jnp.concatenate([ones, above], -1) - jnp.concatenate([above, 0.0 * ones], -1)


def below_gate(x: Value, edge: Value, temperature: Value) -> jax.Array:
    """sigmoid((edge - x) / temperature). Hard limit: 1 where x < edge, else 0."""
    return jax.nn.sigmoid((edge - x) / temperature)


def partial_ceil(x: Value, quantisation: jax.Array) -> jax.Array:
    """q ceil(x) + (1 - q) max(x, 1): the tiles of a grid that x fills, non-decreasing in x.

    Hard limits: q = 1 is ceil(x), q = 0 is x but at least one.
    """
    return quantisation * jnp.ceil(x) + (1.0 - quantisation) * jnp.maximum(x, 1.0)


LARGEST_WAVE = 64.0  # beyond this many waves whole waves no longer matter
WAVE_SHARPNESS = 0.8  # r of `soft_ceil`; 1 would be the hard ceiling


def soft_ceil(x: jax.Array, sharpness: float = WAVE_SHARPNESS) -> jax.Array:
    """A smooth, increasing staircase; its hard limit (sharpness r -> 1) is ceil(x - 1/8).

    u + 1/2 + atan(r sin(2 pi u) / (1 - r cos(2 pi u))) / pi with u = x - 1/8, the Fourier series of
    ceil damped by r^k. The slope is the Poisson kernel, between (1-r)/(1+r) and (1+r)/(1-r).
    """
    u = x - 0.125
    angle = 2.0 * jnp.pi * (u - jax.lax.stop_gradient(jnp.floor(u)))
    saw = jnp.arctan2(sharpness * jnp.sin(angle), 1.0 - sharpness * jnp.cos(angle))
    return u + 0.5 + saw / jnp.pi


def log2_whole_waves(log2_waves: jax.Array) -> jax.Array:
    """log2 of the waves that thread blocks take, at least 0; a smooth increasing staircase.

    Hard limit: log2 max(ceil(waves - 1/8), 1), and log2 waves beyond `LARGEST_WAVE`.
    """
    most = np.log2(LARGEST_WAVE)
    waves = jnp.exp2(jnp.minimum(log2_waves, most))
    return jnp.log2(jnp.maximum(soft_ceil(waves), 1.0)) + jnp.maximum(log2_waves - most, 0.0)


def bounded(x: jax.Array, bound: float) -> jax.Array:
    """bound tanh(x / bound). Hard limits: x near zero, +-bound far out."""
    return bound * jnp.tanh(x / bound)
