"""Claims about hymell_jax.collectives; expected values from arithmetic."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from round_numbers import DEVICE

from hymell_jax import collectives

LINK = 450e9
RUN = {
    "all_reduce": collectives.all_reduce_time_s,
    "all_gather": collectives.all_gather_time_s,
    "reduce_scatter": collectives.reduce_scatter_time_s,
    "all_to_all": collectives.all_to_all_time_s,
}
C = collectives.default_coefficients()
IDEAL = C | {  # no launch, no step, no excess, nothing of its own, a link for every GPU
    **{f"log_{path}_{what}": np.float32(-40.0) for path in ("ring", "fast", "shot")
       for what in ("s", "step_s", "excess")},
    "own_share": np.float32(-40.0),
    "log_sharing": np.float32(-40.0),
}  # fmt: skip


def corners(seed: int) -> dict[str, np.float32]:
    """Coefficients spread widely around the defaults."""
    generator = np.random.default_rng(seed)
    return {n: np.float32(v + generator.uniform(-3, 3)) for n, v in collectives.DEFAULTS.items()}


@pytest.mark.parametrize(("name", "rounds"), collectives.ROUNDS.items())
def test_a_ring_moves_its_share_of_the_vector_that_many_times(name, rounds):
    """4.5 GB are beyond the limit of the quick paths: rounds (p - 1)/p x 10 ms."""
    p = jnp.asarray([2.0, 4.0, 8.0])
    time_s = RUN[name](IDEAL, DEVICE, 4.5e9 + 0 * p, p)
    np.testing.assert_allclose(time_s, rounds * np.array([0.5, 0.75, 0.875]) * 1e-2, rtol=1e-5)


def test_the_own_part_and_a_shared_link_add_to_the_ring():
    shared = IDEAL | {"own_share": np.float32(0.0), "log_sharing": np.float32(math.log(2.0))}
    time_s = collectives.all_gather_time_s(shared, DEVICE, 4.5e9, 4.0)
    assert float(time_s) == pytest.approx(3.5 / 4.0 * 1e-2 * (4.0 / 2.0) ** 2, rel=1e-5)


def test_short_messages_cost_the_cheapest_launch_and_its_steps():
    c = C | {"log_shot_s": np.float32(math.log(3e-6)), "log_shot_step_s": np.float32(-15.0)}
    expected = 3e-6 + 7 * math.exp(-15.0)
    assert float(collectives.all_reduce_time_s(c, DEVICE, 16.0, 8.0)) == pytest.approx(
        expected, rel=0.01
    )


def test_beyond_the_limit_only_the_ring_is_left():
    c = IDEAL | {"log_ring_s": np.float32(math.log(1e-3))}
    limit = math.exp(float(c["log_limit_bytes"]))
    below = float(collectives.all_reduce_time_s(c, DEVICE, limit / 4, 2.0))
    above = float(collectives.all_reduce_time_s(c, DEVICE, limit * 16, 2.0))
    assert below == pytest.approx(limit / 4 / LINK, rel=0.03)  # two equal quick paths
    assert above == pytest.approx(1e-3 + 16 * limit / LINK, rel=1e-4)


@pytest.mark.parametrize("name", RUN)
def test_one_gpu_waits_for_nobody(name):
    time_s = RUN[name](C, DEVICE, jnp.asarray([1.0, 1e6, 1e10]), jnp.ones(3))
    assert np.array_equal(time_s, np.zeros(3))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", RUN)
def test_time_never_falls_when_bytes_or_gpus_grow(name, seed):
    c = corners(seed)
    size = jnp.asarray(np.geomspace(1, 1e11, 400), jnp.float32)
    for p in (2.0, 3.0, 8.0, 72.0):
        time_s = np.asarray(RUN[name](c, DEVICE, size, p + 0 * size))
        assert np.all(np.diff(time_s) >= -2e-6 * time_s[1:])
        assert np.all(time_s > 0)
    p = jnp.asarray(np.linspace(1.0, 72.0, 300), jnp.float32)
    for size in (1.0, 1e5, 1e7, 1e10):
        time_s = np.asarray(RUN[name](c, DEVICE, size + 0 * p, p))
        assert np.all(np.diff(time_s) >= -2e-6 * time_s[1:])


@pytest.mark.parametrize("name", RUN)
def test_time_is_at_least_the_bytes_over_the_link(name):
    size = jnp.asarray(np.geomspace(1, 1e11, 50), jnp.float32)
    ideal = np.asarray(size) * 7 / 8 / LINK  # every GPU receives 7 of 8 parts
    # three equal paths may undercut their minimum by 3^(1/32)
    assert np.all(np.asarray(RUN[name](C, DEVICE, size, 8.0 + 0 * size)) >= ideal / 3 ** (1 / 32))


@pytest.mark.parametrize("name", RUN)
def test_gradients_are_finite_from_nothing_to_a_terabyte_and_at_one_gpu(name):
    run = jax.value_and_grad(lambda c, size, p: RUN[name](c, DEVICE, size, p), (0, 1, 2))
    for size in (0.0, 1.0, 1e6, 1e12):
        for p in (1.0, 2.0, 8.0):
            for leaf in jax.tree.leaves(run(C, jnp.float32(size), jnp.float32(p))):
                assert np.isfinite(leaf)


def test_a_fit_recovers_times_and_predicts_a_number_of_gpus_left_out():
    size, p = (a.ravel() for a in np.meshgrid(np.geomspace(256, 1e9, 40), [2.0, 4.0, 8.0]))
    truth = C | {"log_ring_excess": np.float32(-2.0), "log_fast_s": np.float32(np.log(6e-6))}
    time_s = np.asarray(
        collectives.all_reduce_time_s(
            truth, DEVICE, jnp.asarray(size, jnp.float32), jnp.asarray(p, jnp.float32)
        ),
        np.float64,
    )
    seen = p != 4.0
    sizes = {"message_bytes": size[seen], "num_gpus": p[seen]}
    found = collectives.fit_collectives(DEVICE, sizes, time_s[seen], steps=1500)
    assert set(found) == set(collectives.COLLECTIVE_COEFFICIENTS)
    predicted = collectives.all_reduce_time_s(
        {n: np.float32(v) for n, v in found.items()},
        DEVICE, jnp.asarray(size, jnp.float32), jnp.asarray(p, jnp.float32),
    )  # fmt: skip
    error = np.abs(np.asarray(predicted) / time_s - 1)
    assert error[seen].mean() < 0.02
    assert error[~seen].mean() < 0.05


def test_bad_rows_and_names_are_refused():
    sizes = {"message_bytes": np.ones(2), "num_gpus": np.full(2, 2.0)}
    with pytest.raises(ValueError, match="one of all_reduce"):
        collectives.fit_collectives(DEVICE, sizes, np.ones(2), collective="broadcast")
    with pytest.raises(ValueError, match="positive"):
        collectives.fit_collectives(DEVICE, sizes, np.array([1.0, -1.0]))
    with pytest.raises(ValueError, match="one length"):
        collectives.fit_collectives(DEVICE, sizes, np.ones(3))
