"""Every published method: one signature, positive finite answers, finite gradients, float32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hymell_jax import device_names, get_device
from hymell_jax.baselines import METHODS, QUANTITIES, fit_logs, get_method
from hymell_jax.baselines.counting import (
    ATTENTION_PARTS,
    COUNT_PARTS,
    mean_context_tokens,
    pass_counts,
)
from hymell_jax.baselines.interface import MethodPrediction, prediction
from hymell_jax.model import stack
from hymell_jax.models import preset
from hymell_jax.parameters import active_parameter_counts
from hymell_jax.types import architecture, workload

NAMES = (
    "tokens-to-watt-hours", "sweetspot", "life", "liminal", "amali-lite", "roofline", "tdp",
    "load-scaled-tdp", "wattgpu",
)  # fmt: skip
FORMS = [
    (name, form)
    for name, method in METHODS.items()
    if not method.needs_fit and name != "load-scaled-tdp"
    for form in method.forms
] + [("load-scaled-tdp", "offline")]
LLAMA = preset("llama-3.1-8b").architecture
H100 = get_device("h100-sxm-80gb").device
N_RANDOM = 200


def random_architectures(seed=0, n=N_RANDOM):
    rng = np.random.default_rng(seed)
    found = []
    for i in range(n):
        kv_heads = int(2 ** rng.integers(0, 5))
        heads = kv_heads * int(2 ** rng.integers(0, 4))
        head_dim = int(rng.choice([64, 80, 128, 256]))
        fields = dict(
            n_layers=int(rng.integers(1, 120)),
            d_model=int(128 * rng.integers(2, 128)),
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=head_dim,
            d_ff=int(128 * rng.integers(2, 400)),
            n_ff_matrices=int(rng.integers(2, 4)),
            vocab_size=int(rng.integers(1000, 260000)),
            tied_embeddings=int(rng.integers(0, 2)),
        )
        if i % 4 == 1:
            experts = int(2 ** rng.integers(2, 9))
            fields |= dict(
                n_experts=experts,
                experts_per_token=int(rng.integers(1, min(experts, 8) + 1)),
                d_expert=int(128 * rng.integers(1, 64)),
                d_shared_expert=int(128 * rng.integers(0, 32)),
                moe_fraction=float(rng.choice([0.5, 1.0])),
            )
        elif i % 4 == 2:
            fields |= dict(window_fraction=0.5, window_tokens=int(rng.integers(64, 8192)))
        elif i % 8 == 3:
            fields |= dict(latent_attention=1, kv_lora_rank=512, rope_head_dim=32)
        elif i % 8 == 7:
            fields |= dict(
                linear_fraction=0.75, linear_k_heads=16, linear_v_heads=32, linear_head_dim=128
            )
        found.append(architecture(**fields))
    return stack(found)


def random_workloads(seed=1, n=N_RANDOM):
    rng = np.random.default_rng(seed)
    return stack(
        [
            workload(
                batch_size=int(2 ** rng.integers(0, 9)),
                prompt_tokens=int(2 ** rng.uniform(0, 17)),
                output_tokens=int(2 ** rng.uniform(0, 14)),
                tensor_parallel=int(2 ** rng.integers(0, 4)),
                dtype=str(rng.choice(["bf16", "fp8"])),
            )
            for _ in range(n)
        ]
    )


def test_the_registry_holds_the_nine_methods_with_complete_cards():
    assert sorted(METHODS) == sorted(NAMES)
    for name, method in METHODS.items():
        assert method.name == name
        assert method.title and method.source and method.published_accuracy
        assert method.inputs and method.assumes and method.leaves_out and method.default_note
        assert set(method.gives) <= set(QUANTITIES) and method.gives
        assert get_method(name) is method
        assert method.gives_time or method.gives_energy
    assert [name for name in NAMES if not METHODS[name].differentiable] == ["wattgpu"]


def test_unknown_names_are_answered_with_near_ones():
    with pytest.raises(ValueError, match="liminal"):
        get_method("limnal")
    with pytest.raises(ValueError, match="plain, efficient"):
        METHODS["roofline"].form("steep")


def test_a_prediction_marks_what_is_not_given_with_zero_and_a_flag():
    found = prediction(workload(), decode_energy_per_token_j=2.0)
    assert float(found.decode_energy_per_token_j) == 2.0
    assert float(found.prefill_time_s) == 0.0
    np.testing.assert_array_equal(found.available, [0, 0, 0, 1])
    with pytest.raises(TypeError, match="speed"):
        prediction(workload(), speed=1.0)


def test_predictions_of_all_methods_have_one_structure_and_stack():
    work = workload()
    found = [
        METHODS[name].form(form)[0](LLAMA, work, H100, METHODS[name].form(form)[1]())
        for name, form in FORMS
    ]
    stacked = stack(found)
    assert isinstance(stacked, MethodPrediction)
    assert stacked.available.shape == (len(FORMS), 4)
    for (name, _), flags in zip(FORMS, np.asarray(stacked.available), strict=True):
        given = [q for q, flag in zip(QUANTITIES, flags, strict=True) if flag]
        assert tuple(given) == METHODS[name].gives


DISTINCT = [  # one form of each function
    ("tokens-to-watt-hours", "table3_refit"),
    ("tokens-to-watt-hours", "calibrated"),
    ("tokens-to-watt-hours", "simplified"),
    ("sweetspot", "across-models"),
    ("sweetspot", "one-model"),
    ("life", "default"),
    ("liminal", "default"),
    ("amali-lite", "default"),
    ("roofline", "efficient"),
    ("tdp", "default"),
]
EXTREME = (
    preset("llama-3.1-405b").architecture,
    workload(batch_size=64, prompt_tokens=1e7, output_tokens=1e7),
)
PROMPTS = [(LLAMA, workload(prompt_tokens=n, output_tokens=64)) for n in (100, 1000, 10000)]
DEPTHS = [(dataclasses.replace(LLAMA, n_layers=np.float32(n)), workload()) for n in (8, 32, 33.5)]


@functools.cache
def outcome(name, form):
    """Values [rows, given] and gradients of 200 random cases, the extreme and seven ordered ones.

    All in one batch, so that each function is compiled once.
    """
    predict, coefficients = METHODS[name].form(form)
    start = coefficients()

    def logs(arch, work):
        found = predict(arch, work, H100, start)
        values = jnp.stack([getattr(found, quantity) for quantity in METHODS[name].gives])
        return jnp.sum(jnp.log(values)), values

    extra = [EXTREME, *PROMPTS, *DEPTHS]
    cases = [
        jax.tree.map(lambda *parts: jnp.concatenate(parts), drawn, stack(list(more)))
        for drawn, more in zip(
            (random_architectures(), random_workloads()), zip(*extra, strict=True), strict=True
        )
    ]
    gradient = jax.vmap(jax.grad(logs, argnums=(0, 1), has_aux=True))
    # quick to compile rather than to run
    run = jax.jit(gradient, compiler_options={"xla_backend_optimization_level": "0"})
    gradients, values = run(*cases)
    return np.asarray(values), jax.tree.map(np.asarray, gradients)


@pytest.mark.parametrize("name,form", DISTINCT)
def test_answers_are_positive_and_gradients_finite_for_random_architectures(name, form):
    values, gradients = outcome(name, form)
    assert values.shape[0] >= 200
    assert np.isfinite(values[:N_RANDOM]).all() and (values[:N_RANDOM] > 0).all()
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(leaf[:N_RANDOM]).all(), path


@pytest.mark.parametrize("name,form", DISTINCT)
def test_ten_million_tokens_stay_inside_float32(name, form):
    values, gradients = outcome(name, form)
    assert np.isfinite(values[N_RANDOM]).all() and (values[N_RANDOM] > 0).all()
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(leaf[N_RANDOM]).all(), path


@pytest.mark.parametrize("name,form", DISTINCT)
def test_longer_prompts_and_more_layers_never_cost_less(name, form):
    values, _ = outcome(name, form)
    prompts, depths = values[N_RANDOM + 1 : N_RANDOM + 4], values[N_RANDOM + 4 :]
    outputs = {64: prompts, 128: depths}
    for n_outputs, rows in outputs.items():
        if rows is depths and form == "one-model":
            continue  # does not look at the architecture
        given = dict(zip(METHODS[name].gives, rows.T, strict=True))
        for prefill, decode in (QUANTITIES[:2], QUANTITIES[2:]):
            if prefill in given:
                assert (np.diff(given[prefill] + n_outputs * given[decode]) > 0).all()


def test_every_shipped_device_gives_finite_answers():
    for device in device_names():
        for name in ("life", "amali-lite", "tdp"):
            method = METHODS[name]
            spec = get_device(device).device
            found = method.predict(LLAMA, workload(), spec, method.default_coefficients())
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found)), (device, name)


def test_counts_of_a_decode_step_are_two_flops_a_weight_and_one_read_of_cache_and_weights():
    work = workload(batch_size=1, prompt_tokens=1024, output_tokens=1, context_tokens=1024)
    counts = pass_counts(LLAMA, work, "decode")
    parts = active_parameter_counts(LLAMA)
    weights = float(parts["attention"] + parts["dense_feed_forward"] + parts["head"])
    assert float(jnp.sum(counts.weight_bytes)) == pytest.approx(2 * weights, rel=1e-6)
    kv = 1024 * 2 * 8 * 128 * 2 * 32
    i = COUNT_PARTS.index("attention")
    assert float(counts.cache_bytes[i]) == pytest.approx(kv, rel=1e-6)
    attention = 4 * 32 * 128 * 1024 * 32
    assert float(counts.flops[i]) == pytest.approx(attention, rel=1e-6)
    assert float(jnp.sum(counts.flops)) == pytest.approx(2 * weights + attention, rel=1e-3)
    assert COUNT_PARTS[-4:] == (*ATTENTION_PARTS, "experts")


def test_prefill_attention_is_causal_and_unfused_scores_add_traffic():
    work = workload(batch_size=2, prompt_tokens=3, output_tokens=1)
    i = COUNT_PARTS.index("attention")
    fused, plain = (pass_counts(LLAMA, work, "prefill", f) for f in (1.0, 0.0))
    pairs = 1 + 2 + 3
    assert float(fused.flops[i]) == pytest.approx(4 * 2 * 32 * 128 * pairs * 32, rel=1e-6)
    extra = float(plain.activation_bytes[i] - fused.activation_bytes[i])
    assert extra == pytest.approx(2 * 2 * 32 * pairs * 2 * 32, rel=1e-5)
    with pytest.raises(ValueError, match="prefill, decode"):
        pass_counts(LLAMA, work, "training")


def test_mean_context_times_outputs_is_the_papers_number_of_token_reads():
    work = workload(prompt_tokens=500, output_tokens=500)
    assert float(mean_context_tokens(work)) * 500 == 500 * 500 + 500 * 499 / 2
    assert float(mean_context_tokens(workload(context_tokens=777))) == 777


def test_latent_attention_reads_its_shared_cache_once():
    arch = preset("deepseek-v3").architecture
    work = workload(batch_size=1, context_tokens=1000)
    counts = pass_counts(arch, work, "decode")
    cached = 1000 * (512 + 64) * 2 * 61
    assert float(counts.cache_bytes[COUNT_PARTS.index("attention")]) == pytest.approx(
        cached, rel=1e-6
    )


def test_fit_recovers_efficiencies_from_predicted_times():
    method = METHODS["life"]
    truth = method.default_coefficients() | {
        "log_compute_efficiency": np.float32(np.log(0.63)),
        "log_memory_efficiency": np.float32(np.log(0.71)),
        "log_dispatch_s": np.float32(np.log(2e-6)),
    }
    names = ("llama-3.2-1b", "llama-3.1-8b", "gemma-2-9b", "qwen2.5-14b")
    cases = [
        (preset(name).architecture, workload(prompt_tokens=prompt, batch_size=batch))
        for name in names
        for prompt, batch in ((128, 1), (1024, 4), (4096, 1))
    ]
    archs, works = stack([a for a, _ in cases]), stack([w for _, w in cases])
    found = jax.jit(jax.vmap(lambda a, w: method.predict(a, w, H100, truth)))(archs, works)
    measured = {q: np.asarray(getattr(found, q)) for q in method.gives}
    fitted = fit_logs(method.predict, archs, works, H100, method.default_coefficients(), measured)
    for name, value in truth.items():
        assert float(fitted[name]) == pytest.approx(float(value), abs=0.02), name
    for wrong, problem in (
        ({"prefill_energy_j": np.ones(len(cases))}, "does not give prefill_energy_j"),
        ({"prefill_time_s": np.zeros(len(cases))}, "finite positive"),
    ):
        with pytest.raises(ValueError, match=problem):
            fit_logs(method.predict, archs, works, H100, method.default_coefficients(), wrong)
