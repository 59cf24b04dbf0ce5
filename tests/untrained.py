"""What a network says before it is trained."""

import numpy as np

from hymell_jax import mlp


def assert_no_correction(features, n_monotone):
    """An untrained network leaves level 1 alone at features [n_rows, n]."""
    spec = mlp.MLPSpec(hidden=(12,), n_monotone=n_monotone)
    params = mlp.init_ensemble(spec, features.shape[1], (0,))
    mean, _ = mlp.correction(params, spec, mlp.fit_normalizer(features), features)
    assert (np.asarray(mean) == 0).all()
