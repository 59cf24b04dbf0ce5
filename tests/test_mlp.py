"""Level 2 networks: zero before training, bounded, fading, deterministic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hymell_jax import mlp

SPEC = mlp.MLPSpec(hidden=(8, 8))
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def trained():
    """A network that has learnt a residual of 0.3 sin(2 x0), clipped in part by the bound."""
    x = RNG.uniform(-2.0, 2.0, (2000, 2))
    residual = 0.3 * np.sin(2.0 * x[:, 0])
    normalizer = mlp.fit_normalizer(x)
    params = mlp.fit_ensemble(
        mlp.normalise(normalizer, x),
        np.zeros(2000),
        residual,
        SPEC,
        steps=1000,
        batch=256,
        seeds=(0, 1),
    )
    return params, normalizer


def _random_params(scale: float, members: int = 3):
    start = mlp.init_ensemble(SPEC, 4, range(members))
    return jax.tree.map(lambda a: scale * jnp.asarray(RNG.standard_normal(a.shape)), start)


def _plain_normalizer(n: int = 4) -> mlp.Normalizer:
    ones = np.ones(n, np.float32)
    return mlp.Normalizer(mean=0 * ones, std=ones, low=-5 * ones, high=5 * ones)


def test_the_correction_is_exactly_zero_before_training():
    params = mlp.init_ensemble(SPEC, 4, (0, 1, 2))
    mean, spread = mlp.correction(params, SPEC, _plain_normalizer(), RNG.normal(size=(50, 4)))
    assert np.all(np.asarray(mean) == 0.0) and np.all(np.asarray(spread) == 0.0)


def test_members_start_differently():
    kernel = mlp.init_ensemble(SPEC, 4, (0, 1))["Dense_0"]["kernel"]
    assert kernel.shape == (2, 4, 8)
    assert not np.allclose(kernel[0], kernel[1])


@pytest.mark.parametrize("n_monotone", [0, 3])
def test_shapes_by_arithmetic_are_those_of_the_arrays(n_monotone):
    spec = mlp.MLPSpec(hidden=(6, 9), n_monotone=n_monotone, embedding=5)
    arrays = jax.eval_shape(lambda: mlp.init_ensemble(spec, 7, (0, 1)))
    assert mlp.ensemble_shapes(spec, 7, 2) == jax.tree.map(lambda leaf: leaf.shape, dict(arrays))


def test_the_correction_never_exceeds_its_bound():
    params = _random_params(30.0)
    mean, spread = mlp.correction(params, SPEC, _plain_normalizer(), RNG.normal(size=(200, 4)))
    assert np.abs(mean).max() > 0.5 * SPEC.bound  # the bound is reached for, so it is tested
    assert np.abs(mean).max() <= SPEC.bound * (1 + 1e-6)
    assert np.max(spread) <= SPEC.bound * (1 + 1e-6)


def test_one_layer_by_hand():
    spec = mlp.MLPSpec(hidden=(1,), activation="tanh", bound=0.5)
    params = {
        "Dense_0": {"kernel": jnp.asarray([[2.0]]), "bias": jnp.asarray([0.5])},
        "Dense_1": {"kernel": jnp.asarray([[3.0]]), "bias": jnp.asarray([-1.0])},
    }
    inner = 3.0 * np.tanh(2.0 * 0.25 + 0.5) - 1.0
    expected = 0.5 * np.tanh(inner / 0.5)
    np.testing.assert_allclose(mlp.apply_mlp(params, spec, jnp.asarray([0.25])), expected, 1e-6)


def test_an_ensemble_is_the_mean_of_its_members():
    params, x = _random_params(0.5), jnp.asarray(RNG.normal(size=(6, 4)), jnp.float32)
    single = [mlp.apply_mlp(jax.tree.map(lambda a, i=i: a[i], params), SPEC, x) for i in range(3)]
    mean, spread = mlp.correction(params, SPEC, _plain_normalizer(), x)
    np.testing.assert_allclose(mean, np.mean(single, axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(spread, np.std(single, axis=0), rtol=1e-4, atol=1e-6)


def test_the_correction_fades_outside_the_training_range():
    normalizer = _plain_normalizer(1)
    inside, edge, half, far = (
        float(mlp.familiarity(normalizer, jnp.asarray([x]))) for x in (0.0, 5.0, -5.5, 1e9)
    )
    assert inside == 1.0 and edge == 1.0 and far == 0.0
    np.testing.assert_allclose(half, np.exp(-((0.5 / mlp.FADE_WIDTH) ** 2)), rtol=1e-5)


def test_far_away_level_two_is_level_one(trained):
    params, normalizer = trained
    mean, spread = mlp.correction(params, SPEC, normalizer, jnp.asarray([[50.0, 0.0]]))
    assert float(mean[0]) == 0.0 and float(spread[0]) == 0.0


def test_normaliser_by_hand():
    found = mlp.fit_normalizer(np.array([[1.0, 4.0], [3.0, 4.0]]))
    np.testing.assert_allclose(found.mean, [2.0, 4.0])
    np.testing.assert_allclose(found.std, [1.0 + mlp.LEAST_STD, mlp.LEAST_STD], rtol=1e-5)
    np.testing.assert_allclose(found.low, [1.0, 4.0])
    np.testing.assert_allclose(found.high, [3.0, 4.0])


def test_training_finds_a_known_residual(trained):
    params, normalizer = trained
    x = np.stack([np.linspace(-1.8, 1.8, 41), np.zeros(41)], 1)
    mean, _ = mlp.correction(params, SPEC, normalizer, x)
    assert np.abs(np.asarray(mean) - 0.3 * np.sin(2.0 * x[:, 0])).mean() < 0.02


def test_the_same_seeds_give_the_same_parameters():
    x, y = RNG.normal(size=(64, 3)), RNG.normal(size=64)
    run = lambda seeds: mlp.fit_ensemble(x, 0 * y, y, SPEC, steps=10, batch=16, seeds=seeds)  # noqa: E731
    first, again, other = run((0, 1)), run((0, 1)), run((2, 3))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["Dense_0"]["kernel"], other["Dense_0"]["kernel"])


def test_rows_of_zero_weight_do_not_matter():
    x, y = RNG.normal(size=(400, 2)), np.full(400, 0.2)
    y[200:] = -0.2
    weights = np.r_[np.ones(200), np.zeros(200)]
    params = mlp.fit_ensemble(x, 0 * y, y, SPEC, steps=250, weights=weights, seeds=(0,))
    found = jax.vmap(mlp.apply_mlp, (0, None, None))(params, SPEC, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(np.mean(found), 0.2, atol=0.03)


def test_progress_is_reported():
    seen = []
    x, y = RNG.normal(size=(20, 2)), RNG.normal(size=20)
    mlp.fit_ensemble(
        x, 0 * y, y, SPEC, steps=251, batch=4, seeds=(0,), progress=lambda *a: seen.append(a)
    )
    assert seen == [("network", 250, 500), ("network", 500, 500)]


def test_jit_vmap_and_grad_agree_with_plain_calls(trained):
    params, normalizer = trained
    x = jnp.asarray(RNG.uniform(-2.5, 2.5, (20, 2)), jnp.float32)
    run = lambda row: mlp.correction(params, SPEC, normalizer, row)[0]  # noqa: E731
    plain = run(x)
    np.testing.assert_allclose(jax.jit(run)(x), plain, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(run)(x), plain, rtol=1e-4, atol=1e-5)
    slopes = jax.vmap(jax.grad(run))(x)
    both = jax.vmap(jax.grad(lambda row: sum(mlp.correction(params, SPEC, normalizer, row))))(x)
    assert np.isfinite(slopes).all() and np.isfinite(both).all()


def test_the_gradient_is_the_finite_difference(trained):
    params, normalizer = trained
    with jax.enable_x64(True):
        run = lambda u: mlp.correction(  # noqa: E731
            params, SPEC, normalizer, jnp.stack([u, 0.0 * u + 0.3])
        )[0]
        u, h = jnp.asarray(0.7, jnp.float64), 1e-6
        numeric = (run(u + h) - run(u - h)) / (2 * h)
        np.testing.assert_allclose(jax.grad(run)(u), numeric, rtol=1e-6)


@pytest.mark.parametrize(
    "bad",
    [
        dict(hidden=()),
        dict(hidden=(0,)),
        dict(activation="relu6"),
        dict(bound=0.0),
    ],
)
def test_bad_specs_are_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        mlp.MLPSpec(**bad)


def test_bad_rows_are_named():
    x = np.ones((4, 2))
    with pytest.raises(ValueError, match="n_rows"):
        mlp.fit_ensemble(x, np.zeros(3), np.zeros(3), SPEC)
    with pytest.raises(ValueError, match="finite"):
        mlp.fit_ensemble(x, np.zeros(4), np.full(4, np.nan), SPEC)
    with pytest.raises(ValueError, match="weights"):
        mlp.fit_ensemble(x, np.zeros(4), np.zeros(4), SPEC, weights=-np.ones(4))
    with pytest.raises(ValueError, match="finite"):
        mlp.fit_normalizer(np.array([[np.inf]]))
