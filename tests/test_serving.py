"""Level 3: physics of a served step, its bounds, its monotony, its networks."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grown import grown

import hymell_jax as hj
from hymell_jax import analytical, mlp, operators, serving, system_fit

PHASES = ("prefill", "decode")
COUNT = 300


@pytest.fixture(scope="module")
def networks():
    """Untuned networks that do correct: random last layers, ranges of ordinary models."""
    generator = np.random.default_rng(0)
    found = {}
    for index, target in enumerate(("time", "energy")):
        seeds = range(10 * index, 10 * index + 3)
        params = mlp.init_ensemble(serving.NETWORK, len(serving.FEATURES), list(seeds))
        params = jax.tree.map(
            lambda leaf: leaf + 0.3 * generator.standard_normal(leaf.shape).astype(np.float32),
            params,
        )
        low = np.array([3, 0, 0, 3, 9, 0, 0, 6, 9, 0, 0, 0, 0], np.float32)
        high = np.array([18, 17, 17, 7, 14, 9, 17, 14, 20, 1, 1, 1, 4], np.float32)
        table = low + (high - low) * generator.random((500, len(low))).astype(np.float32)
        found[target] = {"params": params, "normalizer": mlp.fit_normalizer(table)}
    return found


def _served(model, arch, work, network=None, eager=False, **changes):
    structure = operators.structure_of(arch, work)
    costs = analytical.model_costs(model.coefficients, model.device, arch, work, structure)
    c = serving.default_coefficients(eager) | {k: np.float32(v) for k, v in changes.items()}
    return serving.serve(c, network, model.device, arch, work, *costs), costs


def _leaves(served):
    names = [f.name for f in dataclasses.fields(served) if f.name not in ("scale", "familiarity")]
    return {name: np.asarray(getattr(served, name)) for name in names}


def test_without_host_and_sampling_a_step_is_its_kernels(h100, llama):
    work = hj.workload(batch_size=16, prompt_tokens=512, output_tokens=256)
    nothing = dict.fromkeys(
        ("log_launch_s", "log_step_s", "log_request_s", "log_sampling_passes"), -60.0
    )
    served, costs = _served(h100, llama, work, **nothing)
    for phase, one in zip(PHASES, costs, strict=True):
        time_s = float(getattr(served, f"{phase}_time_s"))
        np.testing.assert_allclose(time_s, float(one.time_s.sum()), rtol=1e-5)


def test_step_request_and_parallel_seconds_are_added(h100, llama):
    one, two = (hj.workload(batch_size=32, tensor_parallel=n) for n in (1, 2))
    for work, several in ((one, 0.0), (two, 1.0)):
        tiny = dict(log_step_s=-60.0, log_request_s=-60.0, log_parallel_s=-60.0)
        before = _served(h100, llama, work, **tiny)[0].decode_time_s
        after = _served(
            h100, llama, work,
            log_step_s=np.log(2e-3), log_request_s=np.log(1e-4), log_parallel_s=np.log(5e-3),
        )[0].decode_time_s  # fmt: skip
        expected = 2e-3 + 32 * 1e-4 + several * 5e-3
        np.testing.assert_allclose(float(after - before), expected, rtol=1e-3)


def test_an_eager_engine_is_bound_by_its_launches_at_small_passes(h100):
    arch = hj.preset("gpt2").architecture
    assert float(serving.eager_kernels(arch)) == 2 + 1 + 7 + 4 + 2 + 8
    small = hj.workload(batch_size=1, prompt_tokens=128)
    large = hj.workload(batch_size=32, prompt_tokens=1024)
    slow = dict(log_launch_s=np.log(1e-5), log_step_s=-60.0, log_request_s=-60.0)
    launches = 12 * 24 * 1e-5
    served, _ = _served(h100, arch, small, eager=True, **slow)
    np.testing.assert_allclose(float(served.prefill_time_s), launches, rtol=0.02)
    served, _ = _served(h100, arch, large, eager=True, **slow)
    assert float(served.prefill_time_s) > 5 * launches


def test_scores_in_memory_grow_with_the_square_of_the_prompt(llama):
    short, long = (
        float(serving.eager_traffic_bytes(llama, 1.0 * n, 1.0 * n * n)) for n in (4096, 8192)
    )
    assert 3.0 < long / short < 4.0
    assert long > 8192**2 * 32 * 32.0


@pytest.mark.parametrize(("batch", "output"), [(1, 1000), (100, 1000), (3000, 1000)])
def test_newcomers_in_mean_and_median_steps(batch, output):
    mean, median = serving.newcomers(jnp.float32(batch), jnp.float32(output))
    assert float(mean) == pytest.approx(batch / output)
    generator = np.random.default_rng(0)
    prompts = generator.poisson(batch / output, 20000)  # of very different lengths
    draws = np.where(prompts > 0, generator.gamma(np.maximum(prompts, 1e-9)), 0.0)
    assert abs(float(median) - np.median(draws)) < 0.25
    assert float(median) < float(mean) + 0.05


def test_steady_steps_carry_the_prompts_of_newcomers(h100, llama):
    work = hj.workload(batch_size=256, prompt_tokens=512, output_tokens=512)
    served, costs = _served(h100, llama, work)
    share = 256 / 512 / 256
    extra = float(served.steady_time_s - served.decode_time_s)
    np.testing.assert_allclose(extra, share * float(costs[0].time_s.sum()), rtol=1e-3)
    assert float(served.decode_time_s) <= float(served.steady_median_s)
    assert float(served.steady_median_s) < float(served.steady_time_s)


def _random(count: int, seed: int, moe: bool):
    generator = np.random.default_rng(seed)
    archs, works = [], []
    for _ in range(count):
        heads = 2 ** int(generator.integers(2, 7))
        fields = dict(
            n_layers=int(generator.integers(1, 100)),
            d_model=int(generator.integers(2, 128)) * 128,
            n_heads=heads,
            n_kv_heads=max(heads // 2 ** int(generator.integers(0, 4)), 1),
            head_dim=128,
            d_ff=int(generator.integers(2, 200)) * 128,
            vocab_size=int(generator.integers(1000, 300000)),
        )
        if moe:
            experts = int(generator.integers(2, 256))
            fields |= dict(
                n_experts=experts, experts_per_token=min(experts, 8), d_expert=fields["d_ff"] // 8
            )
        archs.append(hj.architecture(**fields))
        works.append(
            hj.workload(
                batch_size=2 ** generator.uniform(0, 10),
                prompt_tokens=2 ** generator.uniform(0, 15),
                output_tokens=2 ** generator.uniform(0, 12),
            )
        )
    stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)  # noqa: E731
    return stack(archs), stack(works)


@pytest.fixture(scope="module")
def run(h100, networks):
    """(architectures, workloads) -> served and block costs, compiled once for dense and once for
    mixtures, with networks that do correct."""

    @functools.partial(jax.jit, static_argnames="structure")
    def compiled(archs, works, structure):
        def one(arch, work):
            costs = analytical.model_costs(h100.coefficients, h100.device, arch, work, structure)
            c = serving.default_coefficients()
            return serving.serve(c, networks, h100.device, arch, work, *costs), costs

        return jax.vmap(one)(archs, works)

    return lambda archs, works: compiled(archs, works, operators.structure_of(archs, works))


@pytest.mark.parametrize("moe", [False, True])
def test_time_is_at_least_the_roofline_and_energy_within_the_board(h100, run, moe):
    archs, works = _random(COUNT, int(moe), moe)
    served, costs = run(archs, works)
    idle, limit = float(h100.device.idle_power_w), float(h100.device.power_limit_w)
    for phase, one in zip(PHASES, costs, strict=True):
        time_s = np.asarray(getattr(served, f"{phase}_time_s"))
        watts = np.asarray(getattr(served, f"{phase}_energy_j")) / time_s
        floor = np.asarray(one.flops.sum(-1)) / float(h100.device.peak_flops_per_s)
        assert np.isfinite(time_s).all()
        assert (time_s >= floor * 0.9999).all()
        assert (watts >= idle * 0.9999).all()
        assert (watts <= limit * 1.0001).all()


SIZES = ("n_layers", "d_model", "batch_size", "prompt_tokens", "output_tokens")


@pytest.mark.parametrize("moe", [False, True])
def test_time_and_energy_never_fall_as_a_size_grows(run, moe):
    archs, works = _random(COUNT, 7, moe)
    before = _leaves(run(archs, works)[0])
    for field, factor in itertools.product(SIZES, (1.01, 2.0)):
        after = _leaves(run(*grown(archs, works, field, factor))[0])
        for name in before:
            if name.startswith("steady") and field == "output_tokens":
                continue  # longer outputs mean fewer newcomers
            assert (after[name] >= before[name] * (1 - 2e-5)).all(), (name, field, factor)


def test_gradients_are_finite(h100, llama, networks):
    work = hj.workload(batch_size=3, prompt_tokens=777, output_tokens=11)
    structure = operators.structure_of(llama, work)

    @jax.jit
    def scalar(arch, work):
        costs = analytical.model_costs(h100.coefficients, h100.device, arch, work, structure)
        c = serving.default_coefficients()
        served = serving.serve(c, networks, h100.device, arch, work, *costs)
        return sum(jnp.sum(jnp.log(leaf)) for leaf in jax.tree.leaves(served))

    for gradient in jax.grad(scalar, argnums=(0, 1))(llama, work):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_an_untrained_network_corrects_nothing(h100, llama):
    work = hj.workload(batch_size=8)
    params = mlp.init_ensemble(serving.NETWORK, len(serving.FEATURES), [0, 1])
    table = np.random.default_rng(0).normal(size=(50, len(serving.FEATURES)))
    one = {"params": params, "normalizer": mlp.fit_normalizer(table)}
    plain, _ = _served(h100, llama, work)
    served, _ = _served(h100, llama, work, network={"time": one, "energy": one})
    for name, value in _leaves(plain).items():
        np.testing.assert_allclose(value, _leaves(served)[name], rtol=1e-5)


def test_the_fit_finds_known_terms(h100):
    """Rows made by the equations themselves give their terms back."""
    archs, works = _random(60, 3, False)
    structure = operators.structure_of(archs, works)
    costs = jax.jit(
        jax.vmap(
            lambda a, w: analytical.model_costs(h100.coefficients, h100.device, a, w, structure)
        )
    )(archs, works)
    prefill, decode = (
        jax.tree.map(lambda leaf: jnp.asarray(leaf)[:, None], serving.blocks_of(one))
        for one in costs
    )
    count = len(works.batch_size)
    device = jax.tree.map(lambda leaf: jnp.full(count, leaf), h100.device)
    rows = system_fit.Rows(
        arch=archs, device=device, work=works, prefill=prefill, decode=decode,
        prompt_known=np.ones(count, np.float32), task=np.zeros(count, np.int32),
        campaign=np.zeros(count, np.int32), machine=np.zeros(count, np.int32),
        turns=np.ones(count, np.float32), phase=np.tile(np.float32([0, 0, 1]), (count, 1)),
        measured=np.full((count, len(system_fit.TARGETS)), np.nan, np.float32),
    )  # fmt: skip
    sizes = system_fit.Sizes(1, 1, 1, (1024.0,))
    truth = system_fit.start(sizes, serving.priors())
    truth["time"] |= {"log_step_s": jnp.float32(np.log(3e-3)), "log_matrix": jnp.float32(0.08)}
    predicted, _ = jax.jit(lambda v: system_fit.predict(v, None, rows, sizes))(truth)
    measured = np.array(rows.measured)
    for target in ("prefill", "decode"):
        index = system_fit.TARGETS.index(target)
        measured[:, index] = predicted[:, index]
    rows = dataclasses.replace(rows, measured=measured)
    found = system_fit.fit_engine(rows, sizes, np.ones((1, count)), serving.priors())
    prior, truth = serving.priors()["log_step_s"][0], np.log(3e-3)
    assert abs(float(found["time"]["log_step_s"][0]) - truth) < 0.2 * abs(prior - truth)
    again, _ = system_fit.predict(jax.tree.map(lambda x: x[0], found), None, rows, sizes)
    index = system_fit.TARGETS.index("decode")
    np.testing.assert_allclose(again[:, index], predicted[:, index], rtol=0.03)
