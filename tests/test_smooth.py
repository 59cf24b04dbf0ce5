"""Hard limits, ranges and gradients of the smooth building blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hymell_jax import smooth


def test_smooth_maximum_lies_between_the_maximum_and_its_known_excess():
    a, b = jnp.array([1.0, 3.0, 1e-9]), jnp.array([1.0, 1.0, 2e9])
    hard = np.maximum(a, b)
    soft = smooth.smooth_maximum(a, b, sharpness=8)
    assert (soft >= hard).all()
    assert (soft <= hard * 2 ** (1 / 8) * 1.000001).all()


def test_smooth_maximum_tends_to_the_maximum():
    gaps = [
        abs(float(smooth.smooth_maximum(jnp.float32(2), jnp.float32(3), sharpness=p)) - 3.0)
        for p in (2, 8, 32)
    ]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-5


def test_smooth_minimum_lies_below_the_minimum_and_tends_to_it():
    terms = jnp.array([2.0, 3.0, 5.0])
    loose, tight = (float(smooth.smooth_minimum(terms, p)) for p in (4, 128))
    assert loose < tight <= 2.0
    assert tight > 1.99999


def test_smooth_extremes_survive_float32_extremes():
    huge = jnp.array([1e30, 1e-30, 1e10])
    assert float(smooth.smooth_minimum(huge, 128)) == pytest.approx(1e-30)
    assert float(smooth.smooth_maximum(*huge, sharpness=8)) == pytest.approx(1e30)


@pytest.mark.parametrize("x", [-3.0, 0.0, 0.4, 5.0])
def test_gates_are_non_negative_and_sum_to_one(x):
    gates = smooth.ordered_gates(jnp.float32(x), jnp.array([-1.0, 0.5, 2.0]), 0.2)
    assert gates.shape == (4,)
    assert (gates >= 0).all()
    assert float(gates.sum()) == pytest.approx(1.0, abs=1e-6)


def test_gates_become_indicators_as_the_temperature_vanishes():
    edges = jnp.array([-1.0, 0.5, 2.0])
    for x in (-2.0, 0.0, 1.0, 3.0):
        hard = np.eye(4)[np.searchsorted(np.asarray(edges), x)]
        soft = smooth.ordered_gates(jnp.float32(x), edges, 1e-4)
        np.testing.assert_allclose(soft, hard, atol=1e-6)


def test_safe_log_has_a_finite_gradient_at_zero():
    value, gradient = jax.value_and_grad(smooth.safe_log)(jnp.float32(0.0))
    assert np.isfinite(value)
    assert gradient == 0.0


@pytest.mark.parametrize("q", [0.0, 0.3, 1.0])
def test_partial_ceil_is_non_decreasing_and_at_least_one(q):
    x = jnp.linspace(0.01, 9, 2000)
    y = smooth.partial_ceil(x, jnp.float32(q))
    assert (jnp.diff(y) >= -1e-6).all()
    assert (y >= 1.0 - 1e-6).all()
    assert (y >= x - 1e-6).all()


def test_bounded_never_leaves_its_bound():
    x = jnp.array([-1e9, -0.01, 0.0, 0.01, 1e9])
    np.testing.assert_allclose(smooth.bounded(x, 0.5), [-0.5, -0.01, 0, 0.01, 0.5], atol=1e-5)
