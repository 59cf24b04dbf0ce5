"""Reading configuration files: each family, each fault that other readers are known for.

Expected sizes are the published ones of the named models, or hand arithmetic.
"""

import json
import random
import warnings

import numpy as np
import pytest

from hymell_jax import files, hf_file
from hymell_jax.hf import HFModel, architecture_from_hf, read_hf
from hymell_jax.hf_families import ALIASES, FAMILIES
from hymell_jax.models import model_names, preset
from hymell_jax.parameters import (
    exact_parameters,
    kv_cache_bytes,
    kv_cache_elements_per_token,
    parameter_counts,
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}
LATENT = {
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
DEEPSEEK = LLAMA | LATENT | {"model_type": "deepseek_v3"}


def changed(config, **keys):
    return config | keys


def without(config, *keys):
    return {k: v for k, v in config.items() if k not in keys}


def arch_of(config):
    return read_hf(config).architecture


def sizes(config, *names):
    arch = arch_of(config)
    return tuple(float(getattr(arch, name)) for name in names)


def one_sentence(config, match):
    """The config is refused with a ValueError whose message matches and stays readable."""
    with pytest.raises(ValueError, match=match) as caught:
        read_hf(config)
    message = str(caught.value)
    assert type(caught.value) is ValueError
    assert len(message) < 1500 and "\n" not in message
    return message


# --- known faults of other readers, items 1 to 17 -------------------------------------------------


def test_01_an_explicit_head_dim_is_not_replaced_by_hidden_over_heads():
    for name, head_dim in [("mistral-small-24b", 128), ("gpt-oss-20b", 64), ("qwen3-4b", 128)]:
        assert preset(name).architecture.head_dim == head_dim
    qwen = preset("qwen3-4b").architecture
    assert qwen.n_heads * qwen.head_dim == 4096  # outputs of the query projection, not 2560


def test_02_a_null_head_dim_reads_as_an_absent_one():
    for base in (LLAMA, changed(LLAMA, model_type="mistral")):
        assert arch_of(changed(base, head_dim=None)) == arch_of(base)
        assert sizes(changed(base, head_dim=None), "head_dim") == (32,)


def test_03_an_explicit_head_dim_needs_no_divisibility():
    config = changed(LLAMA, hidden_size=1792, num_attention_heads=24, head_dim=128)
    assert sizes(config, "head_dim", "n_heads") == (128, 24)
    one_sentence(without(config, "head_dim"), "head_dim")


def test_04_missing_kv_heads_are_the_attention_heads():
    config = without(LLAMA, "num_key_value_heads")
    assert sizes(config, "n_kv_heads") == (8,)
    assert sizes(changed(config, num_key_value_heads=None), "n_kv_heads") == (8,)
    assert float(kv_cache_elements_per_token(arch_of(config)).per_layer) == 2 * 8 * 32


@pytest.mark.parametrize(("kind", "kv_heads"), [("mixtral", 8), ("gemma2", 4), ("glm", 2)])
def test_04_missing_kv_heads_of_grouped_families_are_the_library_default(kind, kv_heads):
    config = without(changed(LLAMA, model_type=kind), "num_key_value_heads")
    model = read_hf(config)
    assert float(model.architecture.n_kv_heads) == kv_heads
    assert any("num_key_value_heads" in note for note in model.notes)


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads"),
    [("falcon-7b", 71, 1), ("falcon-40b", 128, 8), ("falcon-rw-1b", 32, 32)],
)
def test_05_falcon_kv_heads(name, heads, kv_heads):
    arch = preset(name).architecture
    assert (arch.n_heads, arch.n_kv_heads, arch.head_dim) == (heads, kv_heads, 64)


def test_05_falcon_7b_ignores_the_kv_heads_that_its_file_repeats():
    config = {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71}
    config |= {"num_hidden_layers": 32, "vocab_size": 65024, "num_kv_heads": 71}
    assert sizes(config, "n_kv_heads") == (1,)
    old = {"model_type": "RefinedWeb", "hidden_size": 8192, "n_head": 128, "n_head_kv": 8}
    old |= {"n_layer": 60, "vocab_size": 65024}
    assert sizes(old, "n_kv_heads", "norms_per_layer") == (8, 2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", (768, 12, 12, 4 * 768, 2)),
        ("starcoder-15b", (6144, 40, 48, 24576, 2)),
        ("bloom-7b1", (4096, 30, 32, 4 * 4096, 2)),
        ("gpt-neo-2.7b", (2560, 32, 20, 4 * 2560, 2)),
        ("opt-1.3b", (2048, 24, 32, 8192, 2)),
        ("mpt-7b", (4096, 32, 32, 4 * 4096, 2)),
    ],
)
def test_06_old_spellings_give_the_right_sizes(name, expected):
    arch = preset(name).architecture
    read = (arch.d_model, arch.n_layers, arch.n_heads, arch.d_ff, arch.n_ff_matrices)
    assert tuple(map(float, read)) == expected


def test_06_mpt_reads_kv_heads_from_its_attention_object():
    config = {"model_type": "mpt", "d_model": 512, "n_heads": 8, "n_layers": 2, "vocab_size": 100}
    grouped = {"attn_type": "grouped_query_attention", "kv_n_heads": 2}
    assert sizes(changed(config, attn_config=grouped), "n_kv_heads") == (2,)
    multi = {"attn_type": "multiquery_attention"}
    assert sizes(changed(config, attn_config=multi), "n_kv_heads") == (1,)
    assert sizes(changed(config, expansion_ratio=3), "n_kv_heads", "d_ff") == (8, 1536)


@pytest.mark.parametrize(
    "path", [[k] for k in hf_file.NESTED_TEXT_KEYS[:3]] + [["thinker_config", "text_config"]]
)
def test_07_the_nested_text_model_is_read_and_not_the_vision_sizes_around_it(path):
    config = dict(LLAMA)
    for key in reversed(path):
        config = {"model_type": "some_vlm", "hidden_size": 9999, "vision_config": {}, key: config}
    model = read_hf(config)
    assert model.architecture == arch_of(LLAMA)
    assert any(".".join(path) in note for note in model.notes)


def test_07_a_text_part_without_sizes_is_refused_with_the_keys_seen():
    nested = {"model_type": "llava", "hidden_size": 1024, "text_config": {"model_type": "llama"}}
    message = one_sentence(changed(nested, num_hidden_layers=24), "num_hidden_layers")
    assert "model_type" in message and "1024" not in message


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"],
)
def test_07_no_size_is_ever_guessed(key):
    assert key in one_sentence(without(LLAMA, key), "sizes are never guessed")
    assert key in one_sentence(changed(LLAMA, **{key: None}), "sizes are never guessed")


def test_08_every_spelling_of_the_expert_keys():
    mixtral = preset("mixtral-8x7b").architecture
    assert (mixtral.n_experts, mixtral.experts_per_token, mixtral.d_expert) == (8, 2, 14336)
    qwen = preset("qwen1.5-moe-a2.7b").architecture
    assert (qwen.n_experts, qwen.d_expert, qwen.d_shared_expert) == (60, 1408, 5632)
    deepseek = preset("deepseek-v3").architecture
    assert (deepseek.n_experts, deepseek.experts_per_token, deepseek.d_expert) == (256, 8, 2048)
    total, active = exact_parameters(mixtral)
    assert (round(total / 1e9, 1), round(active / 1e9, 1)) == (46.7, 12.9)
    total, active = exact_parameters(preset("qwen3-30b-a3b").architecture)
    assert (round(total / 1e9, 1), round(active / 1e9, 2)) == (30.5, 3.35)


def test_08_experts_a_token_without_experts_are_refused():
    message = one_sentence(without(MOE, "num_experts"), "does not say of how many")
    assert "num_experts" in message


@pytest.mark.parametrize(
    ("keys", "moe_layers"),
    [
        ({}, 6),
        ({"decoder_sparse_step": 2}, 3),  # layers 1, 3, 5
        ({"decoder_sparse_step": 4}, 1),  # layer 3
        ({"mlp_only_layers": [0, 5]}, 4),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, 2),
        ({"first_k_dense_replace": 1}, 5),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, 2),  # layers 2, 4
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, 4),
    ],
)
def test_08_the_layers_that_hold_experts_are_not_off_by_one(keys, moe_layers):
    arch = arch_of(changed(MOE, num_hidden_layers=6, **keys))
    assert round(float(arch.moe_fraction * arch.n_layers), 4) == moe_layers


def test_09_deepseek_v3_caches_its_latent_and_has_three_dense_layers():
    arch = preset("deepseek-v3").architecture
    assert float(kv_cache_elements_per_token(arch).per_layer) == 512 + 64
    assert round(float(arch.moe_fraction) * 61) == 58
    assert (arch.d_ff, arch.d_expert, arch.d_shared_expert) == (18432, 2048, 2048)
    assert (arch.head_dim, arch.value_head_dim, arch.weight_bits) == (192, 128, 8)
    total, active = exact_parameters(arch)
    assert (round(total / 1e9), int(active / 1e9)) == (671, 37)


def test_10_a_null_or_lonely_latent_rank_stays_grouped_query():
    null = changed(LLAMA, kv_lora_rank=None, q_lora_rank=None, qk_rope_head_dim=None)
    assert arch_of(null) == arch_of(LLAMA)
    lonely = read_hf(changed(LLAMA, kv_lora_rank=512))
    assert lonely.architecture == arch_of(LLAMA)
    assert any("kv_lora_rank" in note for note in lonely.notes)
    assert sizes(DEEPSEEK, "latent_attention", "head_dim", "q_lora_rank") == (1, 48, 0)


@pytest.mark.parametrize(
    "key", ["kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"]
)
def test_10_deepseek_needs_every_latent_size(key):
    assert key in one_sentence(without(DEEPSEEK, key), "sizes are never guessed")


@pytest.mark.parametrize("key", ["routed_expert_hidden_size", "moe_latent_size"])
def test_11_an_unknown_size_in_a_mixture_is_noted(key):
    with pytest.warns(UserWarning, match=f"{key} is not modelled"):
        architecture_from_hf(changed(MOE, **{key: 128}))
    assert read_hf(changed(LLAMA, **{key: 128})).notes == ()  # only mixtures


def test_11_the_usual_keys_of_a_mixture_give_no_note():
    usual = {"max_position_embeddings": 4096, "rope_theta": 1e6, "router_aux_loss_coef": 0.1}
    usual |= {"max_window_layers": 4, "pad_token_id": 7, "use_cache": True, "ep_size": 1}
    assert read_hf(changed(MOE, **usual)).notes == ()


def test_12_the_dense_width_is_not_the_expert_width():
    assert sizes(MOE, "d_ff", "d_expert") == (704, 96)
    per_expert = 3 * 256 * 96
    parts = parameter_counts(arch_of(MOE))
    assert float(parts["routed_experts"]) == 4 * 8 * per_expert


def test_13_the_family_decides_between_gated_and_plain():
    plain = {"phi-2", "gpt2", "opt-1.3b", "falcon-7b", "bloom-7b1", "mpt-7b", "gpt-j-6b"}
    plain |= {"gpt-neox-20b", "gpt-neo-2.7b", "starcoder-15b", "starcoder2-3b", "pythia-6.9b"}
    plain |= {"gpt2-medium", "gpt2-large", "gpt2-xl", "opt-125m", "opt-6.7b"}
    plain |= {"falcon-40b", "falcon-rw-1b", "bloom-176b"}
    read = {n for n in model_names() if preset(n).architecture.n_ff_matrices == 2}
    assert read == plain


def test_14_tied_embeddings_follow_the_file_or_the_family():
    untied, tied = arch_of(LLAMA), arch_of(changed(LLAMA, tie_word_embeddings=True))
    assert exact_parameters(untied)[0] - exact_parameters(tied)[0] == 1000 * 256
    by_default = {name for name, family in FAMILIES.items() if family.tied}
    assert by_default >= {"gemma", "gemma2", "gemma3", "gpt2", "gpt_neo", "opt", "bloom", "falcon"}
    assert by_default.isdisjoint({"llama", "mistral", "qwen2", "qwen3", "gptj", "gpt_neox", "phi"})
    nested = {"model_type": "vlm", "tie_word_embeddings": True, "text_config": LLAMA}
    assert sizes(nested, "tied_embeddings") == (1,)


def windowed_layers(config):
    arch = arch_of(config)
    return round(float(arch.window_fraction * arch.n_layers), 4), float(arch.window_tokens)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 128}, (4, 128)),
        ({"model_type": "mistral", "sliding_window": None}, (0, 0)),
        ({"model_type": "mistral", "sliding_window": 128, "use_sliding_window": False}, (0, 0)),
        ({"model_type": "qwen2", "sliding_window": 128}, (0, 0)),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False}, (0, 0)),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 128,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (1, 128),
        ),
        ({"model_type": "gemma2", "head_dim": 32, "sliding_window": 128}, (2, 128)),
        (
            {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": 128},
            (4, 128),  # only each sixth layer is full
        ),
        (
            {
                "model_type": "gemma3_text",
                "head_dim": 32,
                "sliding_window": 128,
                "sliding_window_pattern": 2,
            },
            (2, 128),
        ),
        (
            {
                "model_type": "llama",
                "sliding_window": 128,
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            },
            (3, 128),
        ),
        ({"model_type": "llama", "sliding_window": 128}, (0, 0)),  # llama has no windows
    ],
)
def test_15_windowed_layers_are_counted_per_layer(keys, expected):
    assert windowed_layers(LLAMA | keys) == expected


def test_15_gemma_3_12b_has_8_full_layers_and_40_with_a_window():
    text = {"hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma3_text"}
    text |= {"num_attention_heads": 16, "num_hidden_layers": 48, "num_key_value_heads": 8}
    text |= {"sliding_window": 1024}  # the published file leaves out head_dim and vocab_size
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    model = read_hf(config)
    assert windowed_layers(config) == (40, 1024)
    assert model.architecture == preset("gemma-3-12b").architecture
    assert any("head_dim" in n and "256" in n for n in model.notes)
    assert any("vocab_size" in n and "262208" in n for n in model.notes)
    cache = kv_cache_bytes(model.architecture, 8192.0)
    element = 2 * 8 * 256 * 2
    assert float(cache.compute) == pytest.approx(element * (8 * 8192 + 40 * 1024), rel=1e-6)
    assert float(cache.reserved) == pytest.approx(element * 48 * 8192, rel=1e-6)


GROUPS = {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}
FP8_GROUPS = {"group_0": GROUPS["group_0"] | {"input_activations": {"num_bits": 8}}}
NVFP4 = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}
NVFP4 |= {"input_activations": {"num_bits": 4}}


@pytest.mark.parametrize(
    ("quantization", "bits", "dtype"),
    [
        (None, 16, "bf16"),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, 8, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, 8, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": FP8_GROUPS}, 8, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": GROUPS}, 8, "bf16"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            4,
            "bf16",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": NVFP4}}, 4.5, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5, "fp8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4, "bf16"),
        ({"quant_method": "gptq", "bits": 8}, 8, "bf16"),
        ({"quant_method": "awq", "bits": 4}, 4, "bf16"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8, "bf16"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 4, "bf16"),
    ],
)
def test_16_stored_bits_come_from_the_quantization_object(quantization, bits, dtype):
    model = read_hf(changed(LLAMA, quantization_config=quantization))
    assert (float(model.architecture.weight_bits), model.dtype) == (bits, dtype)
    assert (model.quantization is None) == (quantization is None)


def test_16_mxfp4_stores_only_the_experts_in_four_bits():
    arch = preset("gpt-oss-20b").architecture
    # 4 bits and a shared 8-bit exponent for each 32 values (OCP MX 1.0)
    assert (float(arch.weight_bits), float(arch.expert_weight_bits)) == (16, 4.25)


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "brand-new"}, "brand-new"),
        ({"quant_method": 7}, "7"),
        ({"bits": 4}, "None"),
        ({"quant_method": "modelopt", "quant_algo": "NEWALGO"}, "NEWALGO"),
        ({"quant_method": "gptq"}, "bits"),
        ({"quant_method": "gptq", "bits": "4"}, "bits"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit"),
        ([1], "quantization_config"),
    ],
)
def test_16_an_unknown_quantization_is_an_error_that_names_it(quantization, named):
    assert named in one_sentence(changed(LLAMA, quantization_config=quantization), ".")


def test_16_both_spellings_of_the_dtype_are_read():
    for key in ("torch_dtype", "dtype"):
        assert read_hf(changed(LLAMA, **{key: "bfloat16"})).dtype == "bf16"
        model = read_hf(changed(LLAMA, **{key: "float8_e4m3fn"}))
        assert (model.dtype, model.architecture.weight_bits) == ("fp8", 8)
        assert "float3" in one_sentence(changed(LLAMA, **{key: "float3"}), "dtype")


def test_17_unknown_keys_are_tolerated():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    strange = changed(LLAMA, rope_scaling=scaling, brand_new_switch=[1, {"a": None}], some_dim=3)
    assert arch_of(strange) == arch_of(LLAMA)
    assert read_hf(strange).notes == ()


# --- families -------------------------------------------------------------------------------------


def test_every_alias_leads_to_a_family():
    assert set(ALIASES.values()) <= set(FAMILIES)
    assert set(ALIASES).isdisjoint(FAMILIES)


@pytest.mark.parametrize(
    ("kind", "biases"),
    [
        ("llama", (0, 0, 0, 0)),
        ("qwen2", (1, 0, 0, 0)),
        ("qwen3", (0, 0, 0, 0)),
        ("gpt2", (1, 1, 1, 0)),
        ("gptj", (0, 0, 1, 1)),
        ("gpt_neo", (0, 1, 1, 0)),
        ("gpt_neox", (1, 1, 1, 0)),
        ("opt", (1, 1, 1, 0)),
        ("phi", (1, 1, 1, 1)),
        ("falcon", (0, 0, 0, 0)),
        ("bloom", (1, 1, 1, 0)),
        ("mpt", (0, 0, 0, 0)),
        ("starcoder2", (1, 1, 1, 0)),
    ],
)
def test_each_family_has_its_biases(kind, biases):
    config = changed(LLAMA, model_type=kind, n_positions=64, max_position_embeddings=64)
    assert sizes(config, "qkv_bias", "out_bias", "ff_bias", "head_bias") == biases


def test_bias_keys_in_the_file_override_the_family():
    switched = changed(LLAMA, attention_bias=True, mlp_bias=True)
    assert sizes(switched, "qkv_bias", "out_bias", "ff_bias") == (1, 1, 1)
    assert sizes(
        changed(LLAMA, model_type="glm", head_dim=32, attention_bias=True), "out_bias"
    ) == (0,)
    falcon = changed(without(LLAMA, "num_key_value_heads"), model_type="falcon", bias=True)
    assert sizes(falcon, "qkv_bias", "ff_bias") == (1, 1)


@pytest.mark.parametrize(
    ("name", "norms"),
    [("llama-3-8b", 2), ("gemma-2-9b", 4), ("gemma-3-12b", 4), ("phi-2", 1), ("falcon-7b", 1)],
)
def test_norms_per_layer_follow_the_block(name, norms):
    assert preset(name).architecture.norms_per_layer == norms


def test_linear_layers_of_qwen3_next():
    arch = preset("qwen3-next-80b-a3b").architecture
    assert (arch.linear_fraction, arch.linear_k_heads, arch.linear_v_heads) == (0.75, 16, 32)
    assert (arch.linear_head_dim, arch.linear_conv_width, arch.attention_gate) == (128, 4, 1)


def test_olmo_and_opt_350m_note_what_is_not_modelled():
    assert any("OLMo" in n for n in read_hf(changed(LLAMA, model_type="olmo")).notes)
    opt = {"model_type": "opt", "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24}
    opt |= {"num_attention_heads": 16, "max_position_embeddings": 2048, "vocab_size": 50272}
    assert any("512" in n for n in read_hf(changed(opt, word_embed_proj_dim=512)).notes)


def test_multi_token_prediction_layers_are_noted():
    model = read_hf(changed(DEEPSEEK, num_nextn_predict_layers=1))
    assert any("num_nextn_predict_layers" in note for note in model.notes)


def test_a_missing_model_type_is_taken_from_the_architecture_name():
    named = without(LLAMA, "model_type") | {"architectures": ["LlamaForCausalLM"]}
    assert read_hf(named).family == "llama"


def test_an_unknown_type_with_llama_keys_is_read_as_llama_with_a_note():
    model = read_hf(changed(LLAMA, model_type="brand_new"))
    assert model.family == "llama-like"
    assert model.architecture == arch_of(LLAMA)
    assert any("brand_new" in note for note in model.notes)


def test_an_unknown_type_says_which_llama_key_is_missing():
    flat = without(LLAMA, "rms_norm_eps", "num_key_value_heads") | {"model_type": "brand_new"}
    assert "lacks num_key_value_heads or rms_norm_eps" in one_sentence(flat, "brand_new")
    assert "lacks vocab_size" in one_sentence(
        without(LLAMA, "vocab_size") | {"model_type": "brand_new"}, "brand_new"
    )
    model = read_hf(flat | {"rms_norm_eps": 1e-5})
    assert model.architecture.n_kv_heads == model.architecture.n_heads
    assert any("multi-head" in note for note in model.notes)


def test_the_encoders_of_a_flat_multimodal_file_are_noted():
    flat = changed(LLAMA, model_type="qwen2_vl")
    noted = read_hf(flat | {"vision_config": {"depth": 32, "embed_dim": 1280}})
    assert any("vision_config" in note for note in noted.notes)
    for absent in ({}, {"vision_config": None}):
        assert not any("encoders" in note for note in read_hf(flat | absent).notes)


def test_an_unknown_type_without_llama_keys_is_refused_with_near_names():
    message = one_sentence({"model_type": "gemma9", "width": 3}, "gemma9")
    assert "gemma2" in message and "width" in message


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "bert"},
        {"model_type": "t5", "is_encoder_decoder": True},
        {"model_type": "clip", "text_config": LLAMA},
        {"model_type": "mamba"},
        {"model_type": "nemotron_h"},
        {"model_type": "vit"},
        {"model_type": "xlm-roberta"},
        {"model_type": "new_thing", "is_encoder_decoder": True},
        {"model_type": "new_thing", "mamba_d_state": 128},
        {"model_type": "new_thing", "type_vocab_size": 2},
        {"architectures": ["NewForMaskedLM"]},
        {"layer_types": ["mamba", "full_attention"] * 2},
    ],
)
def test_other_kinds_of_model_are_refused_with_what_was_seen(keys):
    message = one_sentence(LLAMA | keys, ".")
    assert any(str(v) in message or k in message for k, v in keys.items())


def test_a_key_given_in_two_spellings_must_agree():
    assert arch_of(changed(LLAMA, n_layer=4)) == arch_of(LLAMA)
    one_sentence(changed(LLAMA, n_layer=5), "n_layer=5")


# --- files ----------------------------------------------------------------------------------------


def test_a_dict_a_file_and_a_folder_read_alike(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8-sig")  # with a byte-order mark
    by_file = read_hf(path)
    assert isinstance(by_file, HFModel)
    assert read_hf(folder) == read_hf(str(path)) == by_file
    assert by_file.architecture == arch_of(LLAMA)
    assert by_file.name == "my-model"
    (tmp_path / "other.json").write_text(json.dumps(LLAMA))
    assert read_hf(tmp_path / "other.json").name == "other"


def test_names_come_from_the_repository_and_never_from_a_local_folder():
    assert read_hf(changed(LLAMA, _name_or_path="org/model-1b")).name == "org/model-1b"
    assert read_hf(changed(LLAMA, _name_or_path="/home/me/run/model-1b/")).name == "model-1b"
    assert read_hf(LLAMA).name == "llama"


def test_leaves_are_float32_scalars_and_notes_are_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arch = architecture_from_hf(LLAMA)
    assert all(np.asarray(v).dtype == np.float32 for v in vars(arch).values())
    with pytest.warns(UserWarning, match="brand_new"):
        architecture_from_hf(changed(LLAMA, model_type="brand_new"))


BAD_FILES = {
    "empty": (b"", "empty"),
    "blank": (b" \n\t", "empty"),
    "prose": (b"hello", "not valid JSON"),
    "truncated": (b'{"model_type": "llama"', "not valid JSON"),
    "list": (b"[1, 2]", "list"),
    "number": (b"7", "int"),
    "null": (b"null", "NoneType"),
    "duplicate": (b'{"hidden_size": 1, "hidden_size": 2}', "hidden_size.*twice"),
    "nan": (b'{"hidden_size": NaN}', "NaN"),
    "infinity": (b'{"hidden_size": -Infinity}', "Infinity"),
    "latin-1": (b'{"model_type": "\xff\xfe"}', "not UTF-8"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    "deep": (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
    "deep objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    "long number": (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "too large"),
    "binary": (bytes(range(256)), "not UTF-8"),
}


@pytest.mark.parametrize("kind", sorted(BAD_FILES))
def test_a_bad_file_is_one_clear_sentence(kind, tmp_path):
    content, match = BAD_FILES[kind]
    path = tmp_path / "config.json"
    path.write_bytes(content)
    one_sentence(path, match)


def test_a_missing_or_oversized_file_is_one_clear_sentence(tmp_path, monkeypatch):
    one_sentence(tmp_path / "absent.json", "No such file|cannot be read")
    one_sentence(tmp_path, "No such file|cannot be read")  # a folder without a configuration
    one_sentence("nul\0byte", "No such file|cannot be read")
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 10)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    one_sentence(tmp_path, "at most 10")


@pytest.mark.parametrize("source", [None, 7, 2.5, [LLAMA], (), object(), {1: 2}, {}])
def test_what_is_not_a_configuration_is_a_value_error(source):
    one_sentence(source, ".")


BAD_SIZES = [True, False, "4096", "", -1, 0, 2.5, 1e300, 10**30, 10**5000, float("nan")]
BAD_SIZES += [float("inf"), [4096], {"a": 1}]


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_key_value_heads"])
@pytest.mark.parametrize("value", BAD_SIZES, ids=lambda v: type(v).__name__)
def test_a_bad_size_is_an_error_that_names_the_key(key, value):
    assert key in one_sentence(changed(LLAMA, **{key: value}), "whole number")


@pytest.mark.parametrize(
    "keys",
    [
        {"num_key_value_heads": 3},
        {"model_type": ["llama"]},
        {"model_type": 3},
        {"tie_word_embeddings": "yes"},
        {"attention_bias": 1},
        {"layer_types": "full_attention"},
        {"layer_types": ["full_attention"]},
        {"layer_types": [None] * 4},
        {"text_config": "llama"},
        {"num_local_experts": 8},
        {"num_local_experts": 8, "num_experts_per_tok": 9},
        {"num_local_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": "0"},
        {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": [1]},
    ],
)
def test_other_bad_values_are_value_errors(keys):
    one_sentence(LLAMA | keys, ".")


def test_no_damage_to_a_configuration_escapes_as_another_error():
    rng = random.Random(0)
    bad = [None, True, -1, 0, 1, 7, 2.5, "x", "", [], [1], ["a"], {}, {"a": 1}, 10**40, [[1, 2]]]
    bad += [float("nan"), {"text_config": {}}, [["global"], 3], [[["global"], 2]], b"x", object()]
    bases = [LLAMA, MOE, DEEPSEEK]
    bases += [LLAMA | {"model_type": kind} for kind in sorted(FAMILIES) + sorted(ALIASES)]
    extra = ["layer_types", "sliding_window", "sliding_window_pattern", "max_window_layers"]
    extra += ["attn_config", "expansion_ratio", "attention_types", "quantization_config", "dtype"]
    extra += ["text_config", "architectures", "moe_layers", "ff_factor", "_name_or_path"]
    extra += ["linear_key_head_dim", "full_attention_interval", "use_sliding_window", "n_positions"]
    for _ in range(4000):
        config = dict(rng.choice(bases))
        for key in rng.sample(sorted(config) + extra, rng.randint(1, 3)):
            config[key] = rng.choice(bad)
        try:
            read_hf(config)
        except ValueError as error:
            assert str(error)
