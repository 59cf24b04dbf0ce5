"""Whole models at the highest level: what must hold for every legal configuration."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grown import grown

import hymell_jax as hj
from hymell_jax.operators import PARTS, touched_experts

N_RANDOM = 10_000


def _random_batch(count: int, seed: int = 0, moe: bool = False):
    """Legal architectures and workloads, sizes spread over decades, stacked [count]."""
    rng = np.random.default_rng(seed)

    def spread(low, high, whole=True):
        values = np.exp(rng.uniform(np.log(low), np.log(high), count))
        return np.round(values) if whole else values

    kv_heads = 2.0 ** rng.integers(0, 6, count)
    group = 2.0 ** rng.integers(0, 4, count)
    head_dim = rng.choice([32.0, 64, 80, 96, 128, 192, 256], count)
    experts = np.round(spread(2, 256)) if moe else np.zeros(count)
    fields = dict(
        n_layers=spread(1, 128),
        d_model=spread(64, 20000),
        n_heads=kv_heads * group,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        d_ff=spread(64, 60000),
        n_ff_matrices=rng.choice([2.0, 3.0], count),
        vocab_size=spread(1000, 300000),
        n_experts=experts,
        experts_per_token=np.minimum(experts, np.round(spread(1, 8))) if moe else experts,
        d_expert=spread(64, 8192) if moe else experts,
        moe_fraction=np.ones(count) if moe else experts,
    )
    base = hj.architecture(n_layers=1, d_model=64, n_heads=1, d_ff=64, vocab_size=1000)
    full = {f.name: np.full(count, getattr(base, f.name)) for f in dataclasses.fields(base)}
    full |= fields
    archs = hj.Architecture(**{n: jnp.asarray(v, jnp.float32) for n, v in full.items()})
    one = hj.workload()
    works = {f.name: np.full(count, getattr(one, f.name)) for f in dataclasses.fields(one)}
    works |= dict(
        batch_size=spread(1, 1024), prompt_tokens=spread(1, 65536), output_tokens=spread(1, 4096)
    )
    works["context_start_tokens"] = works["prompt_tokens"]
    works["context_end_tokens"] = works["prompt_tokens"] + works["output_tokens"]
    return archs, hj.Workload(**{n: jnp.asarray(v, jnp.float32) for n, v in works.items()})


def _totals(prediction: hj.Prediction) -> np.ndarray:
    return np.stack(
        [
            prediction.prefill.time_s, prediction.decode.time_s,
            prediction.prefill.energy_j, prediction.decode.energy_j,
        ]
    )  # fmt: skip


@pytest.mark.parametrize("moe", [False, True])
def test_times_and_energies_are_positive_and_bounded(h100, moe):
    archs, works = _random_batch(N_RANDOM // 2, seed=int(moe), moe=moe)
    p = hj.predict_batch(h100, archs, works)
    totals = _totals(p)
    assert np.isfinite(totals).all()
    assert (totals > 0).all()
    peak, bandwidth = h100.device.peak_flops_per_s, h100.device.memory_bytes_per_s
    for phase in (p.prefill, p.decode):
        assert (phase.time_s >= phase.parts.flops.sum(-1) / peak * 0.9999).all()
        watts = np.asarray(phase.energy_j / phase.time_s)
        assert (watts >= float(h100.device.idle_power_w) * 0.95).all()
        assert (watts <= float(h100.device.power_limit_w) * 1.05).all()
    counts = hj.active_parameters(archs) if not moe else None
    if counts is not None:
        heads = archs.vocab_size * archs.d_model
        linear = (hj.total_parameters(archs) - 2 * heads) * 2.0
        assert (p.decode.time_s >= linear / bandwidth * 0.99).all()


WIDTHS = ("d_model", "d_ff")
FIELDS = (*WIDTHS, "n_layers", "batch_size", "prompt_tokens", "output_tokens")


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("factor", [1.01, 1.5])
def test_time_and_energy_never_fall_as_a_size_grows(h100, moe, field, factor):
    if moe and field in WIDTHS:  # the experts' network promises it in tokens alone
        h100 = h100.at_level(1)
    if moe and field == "d_ff":
        field = "d_expert"
    archs, works = _random_batch(1000, seed=FIELDS.index(field) if field in FIELDS else 9, moe=moe)
    before = _totals(hj.predict_batch(h100, archs, works))
    after = _totals(hj.predict_batch(h100, *grown(archs, works, field, factor)))
    assert (after >= before * (1 - 1e-5)).all()


def test_kv_bytes_follow_the_kv_heads(llama):
    work = hj.workload()
    quarter = dataclasses.replace(llama, n_kv_heads=llama.n_kv_heads / 4)
    full, less = (
        float(hj.kv_cache_bytes(a, 1000.0, work.kv_bytes).compute) for a in (llama, quarter)
    )
    assert full == 4 * less
    assert full == 1000 * 32 * 2 * 8 * 128 * 2  # tokens, layers, K and V, heads, width, bytes


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1.0, 8.0), (2.0, 15.5), (10_000.0, 128.0)]
)  # 128 (1 - (15/16)^2) = 15.5
def test_touched_experts_go_from_top_k_to_all(tokens, expected):
    got = float(touched_experts(jnp.float32(128), jnp.float32(8), jnp.float32(tokens)))
    assert got == pytest.approx(expected, rel=1e-5)


def test_a_mixture_reads_the_experts_it_touches(h100):
    arch = hj.preset("qwen3-30b-a3b").architecture
    expert = 3 * 2048 * 768 * 2 * 48  # matrices, width, expert width, bytes, layers
    index = PARTS.index("experts")
    for batch, touched in ((1, 8.0), (1024, 128.0)):
        p = hj.predict(h100, arch, hj.workload(batch_size=batch, output_tokens=1))
        weights = touched * expert
        moved = float(p.decode.parts.memory_bytes[index])
        assert weights * 0.999 <= moved <= weights * (1.01 if batch == 1 else 1.2)


def test_tied_and_untied_embeddings_take_the_same_time(h100, llama):
    tied = dataclasses.replace(llama, tied_embeddings=jnp.float32(1.0))
    work = hj.workload(batch_size=4)
    a, b = (hj.predict(h100, arch, work) for arch in (llama, tied))
    assert float(a.total_time_s) == float(b.total_time_s)
    saved = float(a.memory.weights_bytes - b.memory.weights_bytes)
    assert saved == pytest.approx(128256 * 4096 * 2, rel=1e-6)


@pytest.mark.parametrize(
    ("batch", "phase", "measured_s"),
    [(1, "decode", 6.2e-3), (32, "decode", 8.3e-3), (1, "prefill", 22.1e-3)],
)  # sums of measured vLLM kernels at 1024 tokens, aiconfigurator 0.12.0
def test_llama_8b_on_h100_is_near_the_measured_kernels(h100, llama, batch, phase, measured_s):
    work = hj.workload(batch_size=batch, output_tokens=1, context_tokens=1024)
    for level in (1, 2):
        got = float(getattr(hj.predict(h100.at_level(level), llama, work), phase).time_s)
        assert got == pytest.approx(measured_s, rel=0.15), level


@pytest.mark.parametrize("count", [1, 16_385, 32_769, 34_071])
def test_batches_agree_with_single_predictions(h100, count):
    archs, works = _random_batch(count, seed=3)
    batch = _totals(hj.predict_batch(h100, archs, works))
    for index in {0, count // 3, count - 1}:
        arch, work = jax.tree.map(lambda leaf, i=index: leaf[i], (archs, works))
        np.testing.assert_allclose(
            _totals(hj.predict(h100, arch, work)), batch[:, index], rtol=2e-5
        )
    with jax.disable_jit():
        eager = _totals(hj.predict(h100, arch, work))
    np.testing.assert_allclose(eager, batch[:, index], rtol=2e-5)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "gemma-2-9b"])
def test_gradients_agree_with_finite_differences_in_float64(h100, name):
    arch = hj.preset(name).architecture
    work = hj.workload(batch_size=3, prompt_tokens=777, output_tokens=11)
    with jax.enable_x64(True):
        model, arch, work = jax.tree.map(
            lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), (h100, arch, work)
        )
        # off whole tiles, where the time has kinks
        arch = jax.tree.map(lambda leaf: leaf * 1.00137, arch)

        def scalar(a):
            p = hj.predict(model, a, work)
            return jnp.log(p.total_time_s) + 2.0 * jnp.log(p.total_energy_j)

        gradient = jax.grad(scalar)(arch)
        for field in dataclasses.fields(arch):
            exact = float(getattr(gradient, field.name))
            assert np.isfinite(exact), field.name
            size = float(getattr(arch, field.name))
            if size == 0 or field.name in ("weight_bits", "expert_weight_bits"):
                continue  # an edge of its range
            step = size * 1e-5
            up, down = (
                float(scalar(dataclasses.replace(arch, **{field.name: jnp.float64(size + s)})))
                for s in (step, -step)
            )
            np.testing.assert_allclose(
                exact, (up - down) / (2 * step), rtol=2e-4, atol=1e-7, err_msg=field.name
            )


def test_one_program_serves_every_architecture_of_a_structure(h100):
    from hymell_jax import model as module

    work = hj.workload()
    hj.predict(h100, hj.preset("llama-3.1-8b").architecture, work)
    before = module._predict_once._cache_size()
    for name in ("llama-2-7b", "qwen3-8b", "gpt2"):
        hj.predict(h100, hj.preset(name).architecture, hj.workload(batch_size=7))
    assert module._predict_once._cache_size() == before


def test_parts_add_up_to_the_total(h100, llama):
    p = hj.predict(h100.at_level(2), llama, hj.workload())
    for phase in (p.prefill, p.decode):
        np.testing.assert_allclose(phase.parts.time_s.sum(), phase.time_s, rtol=1e-6)
        np.testing.assert_allclose(phase.parts.bounds.sum(-1), 1.0, atol=1e-4)
        np.testing.assert_allclose(phase.parts.regimes.sum(-1), 1.0, atol=1e-5)


def test_energy_per_token_falls_with_batch_while_memory_binds(h100, llama):
    joules = [
        float(hj.predict(h100, llama, hj.workload(batch_size=b)).decode_energy_per_token_j)
        for b in (1, 2, 4, 8, 16)
    ]
    assert joules == sorted(joules, reverse=True)


def test_batches_of_different_length_are_refused(h100):
    archs, _ = _random_batch(3)
    _, works = _random_batch(4)
    with pytest.raises(ValueError, match="one common batch length"):
        hj.predict_batch(h100, archs, works)


def test_every_value_survives_a_round_trip_through_the_tree(h100, llama):
    for value in (llama, hj.workload(), h100):
        leaves, tree = jax.tree.flatten(value)
        again = jax.tree.unflatten(tree, leaves)
        assert all(a is b for a, b in zip(leaves, jax.tree.leaves(again), strict=True))
        assert all(np.asarray(leaf).dtype == np.float32 for leaf in leaves)


def test_a_kv_head_is_never_split_between_gpus(h100, llama):
    def cache(arch, gpus):
        work = hj.workload(batch_size=8, tensor_parallel=gpus)
        return float(hj.predict(h100.at_level(1), arch, work).memory.kv_cache_bytes)

    assert cache(llama, 8) == pytest.approx(cache(llama, 1) / 8)  # eight KV heads
    assert cache(llama, 32) == cache(llama, 8)
    latent = hj.preset("deepseek-v2-lite").architecture
    assert cache(latent, 8) == cache(latent, 1)


def test_what_does_not_go_together_is_refused(h100, llama):
    with pytest.raises(ValueError, match="one dtype"):
        hj.predict(h100, llama, hj.workload(dtype="fp8"))
    with pytest.raises(ValueError, match=r"Pass its \.architecture"):
        hj.predict(h100, hj.preset("llama-3.1-8b"), hj.workload())
    with pytest.raises(ValueError, match="one type"):
        hj.stack([llama, hj.workload()])
    with pytest.raises(ValueError, match="batch_size"):
        hj.workload(batch_size="8")
    with pytest.raises(ValueError, match="batch_size must be a number"):
        hj.workload(batch_size=True)
    with pytest.raises(ValueError, match="no fp8 matrix units"):
        hj.load("a100-sxm-80gb", dtype="fp8")


def test_the_domain_ends_at_twice_the_largest_measured_matrix(h100):
    work = hj.workload()
    inside = hj.predict(h100, hj.preset("mixtral-8x7b").architecture, work)
    assert float(inside.domain_distances[0]) == 0.0  # a router over 8 experts is small, not unknown
    beyond = hj.predict(h100, hj.preset("gemma-2-9b").architecture, work)
    assert not bool(beyond.in_domain)  # 256,000 words against 65,536 measured columns
    assert float(beyond.domain_distances[0]) == pytest.approx(np.log(256000 / 65536), rel=1e-4)
