"""Any configuration file is read right or refused in one sentence, whatever stands in it."""

from __future__ import annotations

import dataclasses
import json
import random
import time

import numpy as np
import pytest
from click.testing import CliRunner
from fuzzing import (
    ODD,
    answered,
    cases,
    clear,
    damaged,
    edited,
    edits,
    finite,
    odd_values,
    random_edits,
    seeds,
)  # fmt: skip
from hypothesis import given, note
from hypothesis import strategies as st

from hymell_jax import files
from hymell_jax.cli import main
from hymell_jax.hf import HFModel, read_hf
from hymell_jax.hf_families import ALIASES, FAMILIES
from hymell_jax.hf_file import FIELD_KEYS, NESTED_TEXT_KEYS
from hymell_jax.parameters import exact_parameters, kv_cache_elements_per_token

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000, "head_dim": 32,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTURE = LLAMA | {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 96, "decoder_sparse_step": 1, "mlp_only_layers": [0],
}  # fmt: skip
LATENT = LLAMA | {
    "model_type": "deepseek_v3", "kv_lora_rank": 64, "q_lora_rank": 48, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 96, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
LINEAR = MIXTURE | {
    "model_type": "qwen3_next", "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4, "shared_expert_intermediate_size": 96,
}  # fmt: skip
OTHERS = {
    "model_type": "gpt_neo", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": 256,
    "n_positions": 512, "max_position_embeddings": 512, "vocab_size": 500, "window_size": 64,
    "attention_types": [[["global", "local"], 2]], "sliding_window": 64, "multi_query": True,
    "layer_types": ["full_attention", "sliding_attention"] * 2, "use_sliding_window": True,
    "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2},
    "expansion_ratio": 4, "new_decoder_architecture": True, "num_kv_heads": 2,
}  # fmt: skip
NESTED = {"model_type": "gemma3", "text_config": LLAMA | {"model_type": "gemma3_text"},
          "vision_config": {"hidden_size": 1152}}  # fmt: skip
QUANTIZED = LLAMA | {
    "quantization_config": {
        "quant_method": "compressed-tensors", "bits": 4, "load_in_4bit": True, "quant_algo": "FP8",
        "config_groups": {"group_0": {
            "weights": {"num_bits": 4, "type": "float", "group_size": 32},
            "input_activations": {"num_bits": 8},
        }},
    },
}  # fmt: skip
BASES = [LLAMA, MIXTURE, LATENT, LINEAR, OTHERS, NESTED, QUANTIZED]
KINDS = [*sorted(FAMILIES), *sorted(ALIASES)]
PATHS = sorted(
    {key for base in BASES for key in base}
    | {key for keys in FIELD_KEYS.values() for key in keys}
    | {f"text_config.{key}" for key in LLAMA}
    | {"quantization_config.quant_method", "quantization_config.bits", "moe_layers",
       "quantization_config.config_groups", "quantization_config.config_groups.group_0.weights",
       "quantization_config.config_groups.group_0.weights.num_bits", "attn_config.attn_type",
       "attn_config.kv_n_heads", "moe_layer_freq", "sliding_window_pattern", "architectures",
       "_name_or_path", "dtype", "ff_factor", "max_window_layers", "mamba_d_state", "bias",
       "num_nextn_predict_layers", "is_encoder_decoder", "state_size", "odd\x1b_size"}
)  # fmt: skip


def check(model: HFModel, config: dict) -> None:
    """A model that can be computed with, whose sizes are those of the file."""
    clear(model.name + ".")
    assert model.dtype in ("bf16", "fp8")
    for said in model.notes:
        clear(said)
    assert len(model.notes) < 100
    for leaf in dataclasses.astuple(model.architecture):
        assert np.asarray(leaf).dtype == np.float32 and np.isfinite(leaf) and leaf >= 0
    total, active = exact_parameters(model.architecture)
    assert 0 < active <= total < 10**40
    assert 0 <= float(kv_cache_elements_per_token(model.architecture).per_layer) < 1e20
    inner = config
    while key := next((key for key in NESTED_TEXT_KEYS if inner.get(key)), None):
        inner = inner[key]
    noted = " ".join(model.notes)
    for field in ("n_layers", "d_model", "n_heads", "vocab_size"):
        given_sizes = {inner.get(key) for key in FIELD_KEYS[field] if inner.get(key) is not None}
        if given_sizes:
            assert {np.float32(v) for v in given_sizes} == {getattr(model.architecture, field)}
        else:
            assert any(key in noted for key in FIELD_KEYS[field])


@cases(1500)
@given(st.sampled_from(BASES), st.sampled_from(KINDS), st.booleans(), edits(PATHS))
def test_changed_configurations_are_read_right_or_refused(base, kind, renamed, changes):
    if renamed:
        base = base | {"model_type": kind}
    config = edited(base, changes)
    model = answered(lambda: read_hf(config))
    if model is not None:
        check(model, config)


@cases(600)
@given(seeds)
def test_ten_changed_configurations_at_a_time(seed):
    rng = random.Random(seed)
    for _ in range(10):
        base = rng.choice(BASES)
        if rng.random() < 0.5:
            base = base | {"model_type": rng.choice(KINDS)}
        config = edited(base, random_edits(rng, PATHS))
        note(repr(config))
        model = answered(lambda c=config: read_hf(c))
        if model is not None:
            check(model, config)


@cases(300)
@given(st.dictionaries(st.sampled_from([*PATHS, 7, None]), odd_values(), max_size=8) |
       odd_values())  # fmt: skip
def test_anything_at_all_is_no_configuration(source):
    if isinstance(source, str) and source.startswith("/etc"):
        return
    answered(lambda: read_hf(source))


@cases(200)
@given(st.sampled_from(BASES), seeds)
def test_damaged_files_are_read_right_or_refused(folder, base, seed):
    path = folder / "config.json"
    for number in range(seed, seed + 6):
        content = damaged(json.dumps(base).encode(), number)
        path.write_bytes(content)
        model = answered(lambda: read_hf(path))
        if model is not None:
            check(model, json.loads(content.decode("utf-8-sig")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("configurations")


LARGE = {
    "numbers": lambda size: '{"layer_types": [' + "1," * (size // 2) + "1]}",
    "fractions": lambda size: '{"layer_types": [' + "0.5," * (size // 4) + "1]}",
    "objects": lambda size: '{"layer_types": [' + '{"a":1},' * (size // 8) + "1]}",
    "text": lambda size: '{"model_type": "' + "x" * size + '"}',
    "keys": lambda size: json.dumps(
        LLAMA | {f"size_{i}": 2 for i in range(size // 16)}, separators=(",", ":")
    ),
    "depth": lambda size: "[" * size,
    "blanks": lambda size: json.dumps(LLAMA) + " " * size,
}


@pytest.mark.parametrize("kind", LARGE)
def test_the_largest_files_that_are_read_take_seconds(tmp_path, kind):
    path = tmp_path / "config.json"
    path.write_text(LARGE[kind](files.MAX_JSON_BYTES - 1000))
    assert path.stat().st_size <= files.MAX_JSON_BYTES
    model = answered(lambda: read_hf(path))
    assert (model is not None) == (kind in ("keys", "blanks"))
    if model is not None:
        check(model, LLAMA)


def test_a_file_of_50_mb_is_refused_at_once(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(json.dumps(LLAMA).encode() + b" " * 50_000_000)
    begin = time.perf_counter()
    assert answered(lambda: read_hf(path)) is None
    assert time.perf_counter() - begin < 0.5


NAMES = ["--batch", "--prompt", "--output", "--tensor-parallel", "--carbon-intensity", "--price"]
NUMBERS = ["1", "8", "512", "0", "-3", "nan", "inf", "1e300", "x", "", "2.5"]
PLACES = ["h100-sxm-80gb"] * 4 + ["h100", "", "\u00e9\x00", "x.json", "a" * 5000]


def arguments(path) -> st.SearchStrategy:
    """Options of `predict` for a configuration, most of them sound."""
    option = st.tuples(st.sampled_from(NAMES), st.sampled_from(NUMBERS))
    fixed = ["predict", str(path), "--level", "1", "--json", "--device"]
    return st.tuples(st.sampled_from(PLACES), st.lists(option, max_size=2)).map(
        lambda drawn: [*fixed, drawn[0], *(part for pair in drawn[1] for part in pair)]
    )


DENSE_PATHS = [key for key in LLAMA if key != "model_type"]


@cases(60)
@given(edits(DENSE_PATHS, 2), st.data())
def test_the_command_answers_or_ends_with_one_sentence_and_status_2(folder, changes, data):
    path = folder / "predicted.json"
    path.write_text(json.dumps(edited(LLAMA, changes)))
    before = {item: item.stat().st_mtime_ns for item in folder.rglob("*")}
    result = CliRunner().invoke(main, data.draw(arguments(path)))
    assert {item: item.stat().st_mtime_ns for item in folder.rglob("*")} == before
    if result.exit_code:
        assert (result.exit_code, result.stdout) == (2, "")
        assert isinstance(result.exception, SystemExit) and "Traceback" not in result.stderr
        assert result.stderr.count("Error:") == 1
        return
    content = json.loads(result.stdout)
    finite(content)
    for phase in ("prefill", "decode"):
        assert all(value > 0 for value in content[phase].values())
    assert content["total"]["energy_j"] > 0 and content["parameters"]["total"] > 0


def test_odd_values_are_what_json_can_hold():
    for value in ODD:
        assert json.loads(json.dumps(value)) == value
