"""Claims that hold for the level-1 form of every block."""

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax import mlp


def assert_no_correction(features, n_monotone):
    """An untrained network leaves level 1 alone at features [n_rows, n]."""
    spec = mlp.MLPSpec(hidden=(12,), n_monotone=n_monotone)
    params = mlp.init_ensemble(spec, features.shape[1], (0,))
    mean, _ = mlp.correction(params, spec, mlp.fit_normalizer(features), features)
    assert (np.asarray(mean) == 0).all()


def assert_gradient_is_the_finite_difference(time_s, sizes, names, **tolerances):
    """The slope of ln time_s(**sizes) over ln of each named size, in float64."""
    with jax.enable_x64(True):

        def run(step, name):
            values = {n: jnp.asarray(v, jnp.float64) for n, v in sizes.items()}
            values[name] = values[name] * jnp.exp(step)
            return jnp.log(time_s(**values))

        for name in names:
            numeric = (run(1e-5, name) - run(-1e-5, name)) / 2e-5
            slope = jax.grad(run)(jnp.asarray(0.0, jnp.float64), name)
            np.testing.assert_allclose(slope, numeric, err_msg=name, **tolerances)
