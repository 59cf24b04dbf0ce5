"""Monotone networks: the time never decreases in the features that promise it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hymell_jax import mlp

N_MONOTONE, N_IN = 3, 5
SPEC = mlp.MLPSpec(hidden=(12, 12), n_monotone=N_MONOTONE, embedding=8)
RNG = np.random.default_rng(0)


def _level1(log2_size):
    """ln t of a launch floor and work that grows with the size."""
    return jnp.log(5.0 + jnp.exp2(log2_size - 4.0))


def _features(log2_size, free):
    """[n, N_IN]: two sizes that grow together, log2 of the level-1 time, two free ones."""
    log2_time = _level1(log2_size) / np.log(2.0)
    columns = [log2_size, 0.5 * log2_size + 1.0, log2_time, free, jnp.cos(free)]
    return jnp.stack(jnp.broadcast_arrays(*columns), -1)


def _rows(n):
    size, free = RNG.uniform(0.0, 14.0, n), RNG.uniform(-1.0, 1.0, n)
    return size, free, np.asarray(_features(jnp.asarray(size), jnp.asarray(free)))


@pytest.fixture(scope="module")
def trained():
    """Trained on a residual that falls with the size faster than level 1 rises, in places."""
    size, free, features = _rows(4000)
    base = np.asarray(_level1(jnp.asarray(size)))
    residual = 0.4 * np.sin(3.0 * size) + 0.3 * free
    normalizer = mlp.fit_normalizer(features)
    params = mlp.fit_ensemble(
        np.asarray(mlp.normalise(normalizer, features)),
        base,
        base + residual,
        SPEC,
        steps=1000,
        batch=256,
        learning_rate=1e-2,
        scale=float(mlp.level1_scale(SPEC, normalizer)),
        seeds=(0, 1),
    )
    return params, normalizer


def test_the_correction_is_exactly_zero_before_training():
    _, _, features = _rows(50)
    params = mlp.init_ensemble(SPEC, N_IN, (0, 1))
    mean, spread = mlp.correction(params, SPEC, mlp.fit_normalizer(features), features)
    assert np.all(np.asarray(mean) == 0.0) and np.all(np.asarray(spread) == 0.0)


def test_the_time_never_decreases_though_the_residual_does(trained):
    params, normalizer = trained
    size = jnp.linspace(0.0, 30.0, 6001)  # far beyond the training range too
    for free in (-1.0, 0.0, 0.7):
        features = _features(size, jnp.float32(free))
        mean, _ = mlp.correction(params, SPEC, normalizer, features)
        log_time = np.asarray(_level1(size) + mean, np.float64)
        assert np.diff(log_time).min() > -1e-5


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_random_weights_are_monotone_too(scale):
    start = mlp.init_ensemble(SPEC, N_IN, range(4))
    params = jax.tree.map(lambda a: scale * RNG.standard_normal(a.shape).astype(np.float32), start)
    size = jnp.linspace(0.0, 14.0, 801)
    features = _features(size, jnp.float32(0.2))
    normalizer = mlp.fit_normalizer(np.asarray(features))
    mean, _ = mlp.correction(params, SPEC, normalizer, features)
    assert np.diff(np.asarray(_level1(size) + mean, np.float64)).min() > -1e-5
    assert np.abs(np.asarray(mean)).max() <= SPEC.bound * (1 + 1e-6)


def test_training_learns_what_monotony_allows(trained):
    params, normalizer = trained
    size = jnp.linspace(1.0, 13.0, 50)
    found = [
        np.asarray(mlp.correction(params, SPEC, normalizer, _features(size, jnp.float32(f)))[0])
        for f in (-0.8, 0.8)
    ]
    np.testing.assert_allclose(np.mean(found[1] - found[0]), 0.3 * 1.6, atol=0.08)


def test_far_above_the_range_level_one_stands_alone(trained):
    params, normalizer = trained
    mean, _ = mlp.correction(params, SPEC, normalizer, _features(jnp.asarray([60.0]), 0.0))
    assert abs(float(mean[0])) < 1e-6


def test_gradients_are_finite_differences(trained):
    params, normalizer = trained
    with jax.enable_x64(True):

        def run(size):
            return mlp.correction(params, SPEC, normalizer, _features(size, 0.1 * size))[0]

        size, h = jnp.asarray(5.3, jnp.float64), 1e-6
        numeric = (run(size + h) - run(size - h)) / (2 * h)
        np.testing.assert_allclose(jax.grad(run)(size), numeric, rtol=1e-5)


def test_widths_must_split_into_the_kinds_of_units():
    with pytest.raises(ValueError, match="multiples of 3"):
        mlp.MLPSpec(hidden=(16,), n_monotone=2)
