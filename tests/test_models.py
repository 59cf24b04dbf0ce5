"""Presets by name, and the published parameter totals of their models.

The totals are those of the checkpoints on Hugging Face (safetensors metadata) or of the model
cards, with tied embeddings counted once and without buffers: DeepSeek-V3 publishes 671,026,419,200
with 58 x 256 router selection biases, Kimi-K2 1,026,408,232,448 with 60 x 384. The multimodal
Gemma 3 totals are less the vision tower (416,866,032) and its projector.
"""

import json
import os

import pytest

from hymell_jax.hf import read_hf
from hymell_jax.models import (
    model_names,
    preset,
    preset_source,
    published_parameters,
    resolve_model,
)
from hymell_jax.parameters import exact_parameters

TOTALS = {
    "bloom-176b": 176_247_271_424,
    "bloom-7b1": 7_069_016_064,
    "deepseek-r1": 671_026_419_200 - 58 * 256,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "falcon-40b": 41_303_293_952,
    "falcon-7b": 6_921_720_704,
    "falcon-rw-1b": 1_311_625_216,
    "gemma-2-27b": 27_227_128_320,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2b": 2_506_172_416,
    "gemma-3-12b": 12_187_325_040 - 416_866_032 - 1152 * (3840 + 1),
    "gemma-3-1b": 999_885_952,
    "gemma-3-27b": 27_432_406_640 - 416_866_032 - 1152 * (5376 + 1),
    "gemma-3-4b": 4_300_079_472 - 416_866_032 - 1152 * (2560 + 1),
    "gemma-7b": 8_537_680_896,
    "glm-4-9b": 9_399_951_360,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neo-2.7b": 2_651_307_520,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "granite-3.1-8b": 8_170_848_256,
    "kimi-k2": 1_026_408_232_448 - 60 * 384,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-2-7b": 6_738_415_616,
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x22b": 140_620_634_112,
    "mixtral-8x7b": 46_702_792_704,
    "mpt-7b": 6_649_286_656,
    "olmo-2-7b": 7_298_617_344,
    "olmoe-1b-7b": 6_919_161_856,
    "opt-1.3b": 1_315_758_080,
    "opt-125m": 125_239_296,
    "opt-6.7b": 6_658_473_984,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-3.5-moe": 41_873_153_344,
    "phi-4": 14_659_507_200,
    "pythia-6.9b": 6_857_302_016,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-14b": 14_768_307_200,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-coder-30b-a3b": 30_532_122_624,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "smollm2-1.7b": 1_711_376_384,
    "stablelm-2-1.6b": 1_644_515_328,
    "starcoder-15b": 15_517_456_384,
    "starcoder2-3b": 3_030_371_328,
    "tinyllama-1.1b": 1_100_048_384,
    "yi-34b": 34_388_917_248,
}

# Model cards give active parameters in billions, to the digits shown: an absolute tolerance of one
# unit of the last digit. Cards that leave the embedding out of the count are not listed.
ACTIVE_BILLIONS = {
    "deepseek-v2": (21, 1),
    "deepseek-v3": (37, 1),
    "mixtral-8x22b": (39, 1),
    "mixtral-8x7b": (12.9, 0.1),
    "phi-3.5-moe": (6.6, 0.1),
    "olmoe-1b-7b": (1.3, 0.1),
    "qwen1.5-moe-a2.7b": (2.7, 0.1),
    "qwen3-235b-a22b": (22, 1),
    "qwen3-30b-a3b": (3.3, 0.1),
    "qwen3-coder-480b-a35b": (35, 1),
}


def test_every_preset_has_a_published_total_here():
    assert set(TOTALS) == set(model_names())


@pytest.mark.parametrize("name", sorted(TOTALS))
def test_preset_counts_exactly_the_published_parameters(name):
    model = preset(name)
    total, active = exact_parameters(model.architecture)
    assert total == TOTALS[name] == published_parameters(name)
    assert active <= total
    assert model.name == name
    assert model.notes == ()


@pytest.mark.parametrize("name", sorted(ACTIVE_BILLIONS))
def test_active_parameters_match_the_model_card(name):
    billions, tolerance = ACTIVE_BILLIONS[name]
    _, active = exact_parameters(preset(name).architecture)
    assert abs(active / 1e9 - billions) <= tolerance


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2", "qwen3-next-80b-a3b"])
def test_every_token_of_a_dense_model_uses_all_parameters(name):
    total, active = exact_parameters(preset(name).architecture)
    assert (active == total) == (preset(name).architecture.n_experts == 0)


def test_every_preset_names_the_repository_of_its_file():
    for name in model_names():
        assert preset_source(name).startswith("Hugging Face ")
        assert "/" in preset_source(name) and "config.json" in preset_source(name)


@pytest.mark.parametrize(
    "spelling",
    ["llama-3.1-8b", "LLAMA-3.1-8B", "meta-llama/Llama-3.1-8B", "someone/Llama-3.1-8B", " gpt2 "],
)
def test_names_ignore_case_and_organisation(spelling):
    assert preset(spelling).name in ("llama-3.1-8b", "gpt2")


def test_the_repository_id_finds_a_preset_of_another_name():
    assert preset("mistralai/Mistral-7B-v0.1").name == "mistral-7b"
    assert preset("microsoft/Phi-3-mini-4k-instruct").name == "phi-3-mini"


def test_an_unknown_name_lists_near_names():
    with pytest.raises(ValueError, match=r"llama-3\.1-8b"):
        preset("llama-3.1-9b")


@pytest.mark.parametrize("name", ["", "zzzz", None, 3, "x" * 10_000, "a/b/c"])
def test_an_impossible_name_is_one_short_sentence(name):
    with pytest.raises(ValueError, match="There is no model named") as caught:
        preset(name)
    assert len(str(caught.value)) < 500


def test_a_model_resolves_from_name_file_folder_and_dict(tmp_path, monkeypatch):
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4}
    config |= {"n_positions": 128, "vocab_size": 1000}
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    sources = [config, folder, str(folder), str(folder / "config.json"), "tiny", "./tiny"]
    sources.append(os.path.join("tiny", "config.json"))
    for source in sources:
        assert float(resolve_model(source).architecture.n_layers) == 3
    assert resolve_model("gpt2").architecture.n_layers == 12


def test_a_bare_preset_name_wins_over_a_folder_without_a_configuration(tmp_path, monkeypatch):
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("gpt2").architecture.n_layers == 12
    (tmp_path / "gpt2" / "config.json").write_text(
        '{"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 8, '
        '"vocab_size": 9}'
    )
    assert resolve_model("gpt2").architecture.n_layers == 3


@pytest.mark.parametrize("source", ["./absent", "absent.json", "/no/such/place", "~/no-such-place"])
def test_a_missing_path_says_that_there_is_no_file(source):
    with pytest.raises(ValueError, match="No such file"):
        resolve_model(source)


@pytest.mark.parametrize("source", ["no-such-model", None, 7, b"gpt2", "absent/folder"])
def test_what_is_neither_path_nor_name_is_a_value_error(source):
    with pytest.raises(ValueError):
        resolve_model(source)


def test_a_preset_equals_the_same_configuration_read_by_hand():
    by_hand = read_hf(
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        }
    )
    assert by_hand.architecture == preset("llama-3.1-8b").architecture
