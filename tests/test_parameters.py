"""Counts of parameters and of cached elements, against hand arithmetic and published facts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hymell_jax.models import preset
from hymell_jax.parameters import (
    PARAMETER_PARTS,
    active_parameter_counts,
    active_parameters,
    exact_parameters,
    kv_cache_bytes,
    kv_cache_elements_per_token,
    parameter_counts,
    recurrent_state_elements,
    total_parameters,
)
from hymell_jax.types import Architecture, architecture

TINY = dict(n_layers=3, d_model=8, n_heads=4, n_kv_heads=2, d_ff=20, vocab_size=100)
TINY_MOE = TINY | dict(n_experts=6, experts_per_token=2, d_expert=5, d_shared_expert=7)


def kv_elements(name):
    return kv_cache_elements_per_token(preset(name).architecture)


def test_a_tiny_dense_model_counts_as_by_hand():
    # per layer: q 8x8, k and v 8x4, o 8x8, three 8x20 matrices, two norms of 8
    per_layer = 64 + 2 * 32 + 64 + 3 * 160 + 16
    assert exact_parameters(architecture(**TINY)) == (2 * 800 + 3 * per_layer + 8,) * 2


def test_a_tiny_mixture_counts_as_by_hand():
    attention = 64 + 2 * 32 + 64
    expert, shared, router, norms = 3 * 8 * 5, 3 * 8 * 7, 8 * 6, 16
    rest = 2 * 800 + 8 + 3 * (attention + shared + router + norms)
    assert exact_parameters(architecture(**TINY_MOE)) == (
        rest + 3 * 6 * expert,
        rest + 3 * 2 * expert,
    )


def test_the_parts_of_llama_count_as_by_hand():
    parts = parameter_counts(preset("llama-3.1-8b").architecture)
    assert tuple(parts) == PARAMETER_PARTS
    expected = dict.fromkeys(PARAMETER_PARTS, 0) | {
        "embedding": 128256 * 4096,
        "attention": 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024),
        "dense_feed_forward": 32 * 3 * 4096 * 14336,
        "norms": 65 * 4096,
        "head": 128256 * 4096,
    }
    for name, value in expected.items():
        assert float(parts[name]) == pytest.approx(value, rel=1e-6), name  # float32


def test_the_parts_sum_to_the_total():
    for name in ("deepseek-v3", "qwen3-next-80b-a3b", "gpt-oss-20b", "bloom-7b1"):
        arch = preset(name).architecture
        assert float(total_parameters(arch)) == pytest.approx(sum(parameter_counts(arch).values()))
        active = active_parameter_counts(arch)
        assert float(active_parameters(arch)) == pytest.approx(sum(active.values()))


def test_tying_embeddings_saves_one_vocabulary_matrix():
    untied, tied = (exact_parameters(architecture(**TINY, tied_embeddings=t))[0] for t in (0, 1))
    assert untied - tied == 100 * 8


def test_a_gated_feed_forward_has_half_again_as_many_weights():
    plain, gated = (
        parameter_counts(architecture(**TINY, n_ff_matrices=n))["dense_feed_forward"]
        for n in (2, 3)
    )
    assert gated == 1.5 * plain


def test_layer_kinds_round_to_whole_layers():
    arch = architecture(**TINY_MOE, moe_fraction=2 / 3)  # 2/3 is not exact in float32
    dense_layer, moe_layer = 3 * 8 * 20, 3 * 8 * (6 * 5 + 7) + 8 * 6
    attention_and_norms = 64 + 2 * 32 + 64 + 16
    total = 2 * 800 + 8 + 3 * attention_and_norms + dense_layer + 2 * moe_layer
    assert exact_parameters(arch)[0] == total


def test_exact_counts_refuse_batches():
    batched = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), architecture(**TINY))
    with pytest.raises(ValueError, match="one architecture"):
        exact_parameters(batched)


def test_counts_are_the_same_eager_jitted_and_batched():
    arch = preset("deepseek-v3").architecture
    batched = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), arch)
    expected = exact_parameters(arch)
    for count, exact in zip((total_parameters, active_parameters), expected, strict=True):
        assert float(count(arch)) == pytest.approx(exact, rel=1e-6)  # float32 sum of nine parts
        assert float(jax.jit(count)(arch)) == pytest.approx(exact, rel=1e-6)
        assert np.allclose(jax.jit(jax.vmap(count))(batched), exact, rtol=1e-6)


def test_the_gradient_of_the_total_is_the_count_of_one_more_unit():
    gradient = jax.jit(jax.grad(total_parameters))(architecture(**TINY_MOE))
    assert float(gradient.vocab_size) == 2 * 8
    assert float(gradient.n_experts) == 3 * (3 * 8 * 5 + 8)
    assert float(gradient.d_shared_expert) == 3 * 3 * 8
    assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("name", "per_layer"),
    [
        ("llama-2-7b", 2 * 32 * 128),  # multi-head
        ("llama-3.1-8b", 2 * 8 * 128),  # grouped-query
        ("falcon-7b", 2 * 1 * 64),  # multi-query
        ("deepseek-v3", 512 + 64),  # latent
        ("mistral-small-24b", 2 * 8 * 128),  # head_dim 128, not 5120 / 32 = 160
    ],
)
def test_each_attention_kind_caches_its_elements(name, per_layer):
    elements = kv_elements(name)
    layers = float(preset(name).architecture.n_layers)
    assert float(elements.per_layer) == per_layer
    assert float(elements.full_layers + elements.windowed_layers) == per_layer * layers


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [("deepseek-v3", 70_272), ("qwen2.5-72b", 327_680), ("llama-3.1-405b", 516_096)],
)
def test_cache_bytes_a_token_match_the_deepseek_report(name, bytes_per_token):
    # "Insights into DeepSeek-V3", arXiv 2505.09343, table 1: bf16 KB per token
    cache = kv_cache_bytes(preset(name).architecture, tokens=1.0)
    assert float(cache.compute) == float(cache.reserved) == bytes_per_token


def test_windowed_layers_stop_growing_at_the_window_but_stay_reserved():
    # gemma-3-12b: 8 full layers and 40 with a window of 1024, 2 x 8 heads x 256 elements each
    arch, element = preset("gemma-3-12b").architecture, 2 * 8 * 256
    for tokens in (100.0, 1024.0, 5000.0):
        cache = kv_cache_bytes(arch, tokens, kv_bytes=2.0)
        compute = 2 * element * (8 * tokens + 40 * min(tokens, 1024))
        assert float(cache.compute) == pytest.approx(compute, rel=1e-6)
        assert float(cache.reserved) == pytest.approx(2 * element * 48 * tokens, rel=1e-6)


def test_linear_layers_hold_a_state_instead_of_a_cache():
    # qwen3-next: 12 full layers of 2 x 2 x 256; 36 layers with 32 matrices of 128 x 128 and the
    # last 3 inputs of a convolution over (16 + 16 + 32) x 128 channels
    arch = preset("qwen3-next-80b-a3b").architecture
    assert float(kv_cache_elements_per_token(arch).full_layers) == 12 * 2 * 2 * 256
    state = 36 * (32 * 128 * 128 + 3 * 64 * 128)
    assert float(recurrent_state_elements(arch)) == state
    short, long = (kv_cache_bytes(arch, tokens) for tokens in (1.0, 100_000.0))
    assert float(short.recurrent_state) == float(long.recurrent_state) == 4 * state


def test_fp8_halves_the_cache():
    arch = preset("llama-3.1-8b").architecture
    assert kv_cache_bytes(arch, 999.0, 1.0).compute == kv_cache_bytes(arch, 999.0).compute / 2


def test_the_gradient_of_a_full_window_is_zero_in_tokens():
    arch = preset("mistral-7b").architecture
    compute = jax.jit(jax.grad(lambda tokens: kv_cache_bytes(arch, tokens).compute))
    assert float(compute(10_000.0)) == 0
    assert float(compute(100.0)) == 131_072


def test_numpy_float64_leaves_stay_in_numpy():
    arch = preset("llama-3.1-8b").architecture
    leaves = {f.name: np.float64(getattr(arch, f.name)) for f in dataclasses.fields(arch)}
    counted = total_parameters(Architecture(**leaves))
    assert isinstance(counted, np.float64) and counted == 8_030_261_248
