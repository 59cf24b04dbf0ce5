"""Levels 1, 2 and 3 of one model: what each adds, and which one answers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hymell_jax as hj
from hymell_jax import blocks, latent, linear, mlp, model, moe
from hymell_jax.operators import PARTS

MODELS = ("mixtral-8x7b", "deepseek-v3", "qwen3-next-80b-a3b")
RNG = np.random.default_rng(0)


def _defaults(name):
    if name in blocks.ATTENTION_BLOCKS:
        return {}
    module = moe if name == "experts" else linear if name in blocks.LINEAR_BLOCKS else latent
    return {key: np.float32(value) for key, value in module.DEFAULT_COEFFICIENTS.items()}


def _block(name, scale=0.0, reach=1e3):
    """A block with random weights of a scale, 0: untrained; known from -reach to reach."""
    features, n_monotone = blocks.feature_names(name)
    n = len(features)
    spec = mlp.MLPSpec((12, 12), n_monotone=n_monotone, embedding=8)
    params = mlp.init_ensemble(spec, n, (0, 1))
    if scale:
        params = jax.tree.map(
            lambda a: a + scale * RNG.standard_normal(a.shape).astype(np.float32), params
        )
    ones = np.ones(n, np.float32)
    normalizer = mlp.Normalizer(mean=5 * ones, std=4 * ones, low=-reach * ones, high=reach * ones)
    return blocks.Block(
        coefficients=_defaults(name),
        params=jax.tree.map(np.asarray, params),
        normalizer=normalizer,
        spec=spec,
    )


@pytest.fixture(scope="module")
def level1(h100):
    return h100.at_level(1)


def _with(level1, names, **how):
    return dataclasses.replace(level1, blocks={name: _block(name, **how) for name in names})


def test_untrained_attention_networks_change_nothing(level1, llama):
    untrained = _with(level1, blocks.ATTENTION_BLOCKS)
    work = hj.workload(batch_size=8)
    one, two = (hj.predict(m, llama, work) for m in (level1, untrained))
    np.testing.assert_allclose(two.prefill.parts.time_s, one.prefill.parts.time_s, rtol=1e-5)
    np.testing.assert_allclose(two.decode.parts.time_s, one.decode.parts.time_s, rtol=1e-5)
    assert (level1.level, untrained.level) == (1, 2)


def test_networks_only_touch_the_parts_that_their_blocks_cover(level1, llama):
    trained = _with(level1, blocks.ATTENTION_BLOCKS, scale=0.3)
    work = hj.workload(batch_size=8)
    one, two = (
        np.asarray(hj.predict(m, llama, work).decode.parts.time_s) for m in (level1, trained)
    )
    changed = {PARTS[i] for i in np.flatnonzero(np.abs(two / np.maximum(one, 1e-12) - 1) > 1e-5)}
    assert changed - {p for p, t in zip(PARTS, one, strict=True) if t == 0} == {"attention"}


@pytest.mark.parametrize("name", MODELS)
def test_every_family_of_blocks_stays_above_its_bound(level1, name):
    trained = _with(level1, blocks.BLOCKS, scale=0.5)
    arch = hj.preset(name).architecture
    for batch in (1, 64):
        p = hj.predict(trained, arch, hj.workload(batch_size=batch))
        for phase in (p.prefill, p.decode):
            assert np.isfinite(phase.time_s) and np.isfinite(phase.energy_j)
            least = phase.parts.flops.sum() / level1.device.peak_flops_per_s
            assert phase.time_s >= 0.9999 * least


@pytest.mark.parametrize("name", MODELS)
def test_time_never_falls_with_batch_or_prompt_whatever_the_weights(level1, name):
    trained = _with(level1, blocks.BLOCKS, scale=0.5, reach=20.0)
    arch = hj.preset(name).architecture
    sizes = np.round(np.exp(np.linspace(0.0, np.log(20000.0), 160)))
    one = hj.workload()
    for field in ("batch_size", "prompt_tokens"):
        works = jax.tree.map(lambda leaf: jnp.full(len(sizes), leaf), one)
        works = dataclasses.replace(works, **{field: jnp.asarray(sizes, jnp.float32)})
        works = dataclasses.replace(
            works,
            context_start_tokens=works.prompt_tokens,
            context_end_tokens=works.prompt_tokens + works.output_tokens,
        )
        p = hj.predict_batch(trained, arch, works)
        for time_s in (p.prefill.time_s, p.decode.time_s):
            assert (np.diff(np.log(np.asarray(time_s, np.float64))) > -2e-5).all()


def test_gradients_pass_through_the_networks(level1, llama):
    trained = _with(level1, blocks.BLOCKS, scale=0.3)
    work = hj.workload(batch_size=8)
    found = jax.grad(lambda a: hj.predict(trained, a, work).total_energy_j)(llama)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert float(found.n_layers) > 0


def test_a_level_that_is_not_there_is_named(level1):
    with pytest.raises(ValueError, match="holds level 1; got level 3"):
        level1.at_level(3)
    assert level1.at_level(1) is level1


def test_best_is_the_highest_level_that_knows_the_request(level1, llama):
    work = hj.workload(batch_size=1, prompt_tokens=16384, output_tokens=16)
    known = _with(level1, blocks.ATTENTION_BLOCKS, scale=0.3)
    unknown = _with(level1, blocks.ATTENTION_BLOCKS, scale=0.3, reach=0.01)
    for trained, expected in ((known, 2), (unknown, 1)):
        level, prediction = model.predict_best(trained, llama, work)
        # of this prefill more than half is attention where its network is lost
        far = float(hj.predict(trained, llama, work).domain_distances[1]) > np.log(2.0)
        assert level == (1 if far else 2)
        alone = hj.predict(trained.at_level(level), llama, work)
        np.testing.assert_allclose(prediction.total_time_s, alone.total_time_s, rtol=1e-6)
        assert expected == level or not far
