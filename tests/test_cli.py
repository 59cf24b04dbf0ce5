"""The command line: what it prints, and that bad input costs one sentence and exit status 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hymell_jax.cli import main


def run(*arguments: str):
    return CliRunner().invoke(main, list(arguments))


def refused(*arguments: str) -> str:
    """The one-sentence error of a command that must fail."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return result.stderr.strip().splitlines()[-1]


def test_predict_prints_the_documented_json():
    result = run("predict", "llama-3.1-8b", "--device", "h100-sxm-80gb", "--batch", "4", "--json")
    assert result.exit_code == 0, result.output
    got = json.loads(result.stdout)
    assert {
        "model", "device", "runtime", "level", "prefill", "decode", "total", "memory", "parts",
        "in_domain", "warnings", "provenance",
    } <= got.keys()  # fmt: skip
    assert {"time_s", "energy_j", "power_w"} <= got["prefill"].keys()
    assert {"time_per_token_s", "energy_per_token_j", "power_w"} <= got["decode"].keys()
    assert {"time_s", "energy_j", "energy_wh", "output_tokens_per_s"} <= got["total"].keys()
    assert got["memory"]["fits"] is True
    assert got["memory"]["kv_cache_bytes_per_token"] == 131072  # 32 layers, 8 x 128, K and V, 2 B
    total = got["prefill"]["time_s"] + 128 * got["decode"]["time_per_token_s"]
    assert got["total"]["time_s"] == pytest.approx(total, rel=1e-5)
    assert got["total"]["energy_wh"] == pytest.approx(got["total"]["energy_j"] / 3600)
    step = got["decode"]["power_w"] * got["decode"]["time_per_token_s"]
    assert got["decode"]["energy_per_token_j"] == pytest.approx(step / 4, rel=1e-5)
    shares = sum(part["share"] for part in got["parts"]["decode"].values())
    assert shares == pytest.approx(1.0, abs=1e-6)


def test_predict_shows_a_table_for_people():
    result = run("predict", "qwen3-8b", "--device", "h200-sxm-141gb")
    assert result.exit_code == 0, result.output
    assert "output tokens/s" in result.stdout
    assert "qkv_projection" in result.stdout


def test_compare_lines_up_every_method():
    arguments = ("compare", "llama-3.1-8b", "--device", "h100-sxm-80gb", "--batch", "8")
    methods = json.loads(run(*arguments, "--json").stdout)["methods"]
    by_name = {m["method"]: m for m in methods}
    assert set(by_name) == {
        "hymell_jax, level 3", "hymell_jax, level 2", "hymell_jax, level 1",
        "tokens-to-watt-hours", "wattgpu", "sweetspot", "life", "liminal",
        "amali-lite", "roofline", "tdp", "load-scaled-tdp",
    }  # fmt: skip
    assert all(m["assumes"] and m["leaves_out"] and m["source"] for m in methods)
    steps = [m["decode_time_per_token_s"] for m in methods[:3]]
    assert steps[0] > steps[2] > by_name["roofline"]["decode_time_per_token_s"] > 0
    assert "queueing" in methods[0]["leaves_out"][0] and "host" in methods[2]["leaves_out"][0]
    assert by_name["tokens-to-watt-hours"]["decode_time_per_token_s"] is None
    table = run(*arguments)
    assert table.exit_code == 0
    assert "load-scaled-tdp" in table.stdout


def test_a_configuration_file_or_its_folder_is_a_model(tmp_path: Path):
    config = {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1000,
        "num_hidden_layers": 2, "num_attention_heads": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (str(tmp_path), str(tmp_path / "config.json")):
        result = run("predict", model, "--device", "h100-sxm-80gb", "--json")
        assert json.loads(result.stdout)["parameters"]["total"] > 0


def test_a_device_without_measurements_says_so():
    result = run("predict", "llama-3.1-8b", "--device", "h100-nvl-94gb", "--json")
    got = json.loads(result.stdout)
    assert got["provenance"]["energy"] == "transferred"
    assert any("carried over" in warning for warning in got["warnings"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("predict", "no-such-model", "--device", "h100-sxm-80gb"), "no-such-model"),
        (("predict", "./missing/config.json", "--device", "h100-sxm-80gb"), "missing"),
        (("predict", "llama-3.1-8b", "--device", "h100"), "h100-sxm-80gb"),
        (("predict", "llama-3.1-8b", "--device", "h100-sxm-80gb", "--dtype", "int3"), "int3"),
        (("predict", "llama-3.1-8b", "--device", "h100-sxm-80gb", "--prompt", "-5"), "-5"),
        (("predict", "llama-3.1-8b", "--device", "h100-sxm-80gb", "--batch", "nan"), "nan"),
        (("predict", "llama-3.1-8b", "--device", "h100-sxm-80gb", "--runtime", "x"), "vllm"),
        (("predict", "llama-3.1-70b", "--device", "h100-sxm-80gb"), "does not fit"),
        (("predict", "llama-3.1-8b", "--device", "h100-sxm-80gb", "--engine", "none"), "none"),
        (("evaluate", "--device", "h100-sxm-80gb", "--data", "/nowhere"), "not a folder"),
        (("fit", "--device", "h100-sxm-80gb", "--data", "/nowhere", "--out", "x"), "not a folder"),
        (("predict", "gpt2", "--device", "h100-sxm-80gb", "--tensor-parallel", "7"), "divides"),
        (("predict", "llama-3.1-8b", "--device", "a100-sxm-80gb", "--dtype", "fp8"), "no fp8"),
        (("import", "vidur", "--out", "x"), "--from"),
        (("import", "aiconfigurator", "--out", "/dev/null/x"), "cannot be written"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(arguments, said, monkeypatch):
    monkeypatch.delenv("HYMELL_DATA", raising=False)
    assert said in refused(*arguments)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "JSON"),
        ('{"model_type": "clip_vision_model", "hidden_size": 768}', "clip"),
        ('{"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "vocab_size": 9,'
         ' "num_hidden_layers": 1, "num_attention_heads": 0}', "num_attention_heads"),
        ('{"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "vocab_size": 9,'
         ' "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 3}', "divide"),
    ],
)  # fmt: skip
def test_bad_configurations_are_refused_and_nothing_is_written(tmp_path, content, said):
    path = tmp_path / "config.json"
    path.write_text(content)
    assert said.lower() in refused("predict", str(path), "--device", "h100-sxm-80gb").lower()
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_square_brackets_in_a_name_are_shown_as_they_are(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1000,
        "num_hidden_layers": 2, "num_attention_heads": 8,
    }  # fmt: skip
    (tmp_path / "[/red]").mkdir(parents=True)
    folder = tmp_path / "[/red]"
    (folder / "config.json").write_text(json.dumps(config))
    result = run("predict", str(folder / "config.json"), "--device", "h100-sxm-80gb")
    assert result.exit_code == 0, result.output
    assert "red]" in result.stdout


@pytest.mark.parametrize("command", ["devices", "models"])
def test_lists_come_as_tables_and_as_json(command):
    assert run(command).exit_code == 0
    found = json.loads(run(command, "--json").stdout)
    assert len(found) >= 17
    assert all("name" in entry for entry in found)


def test_help_does_not_wait_for_jax():
    code = "import sys; from hymell_jax.cli import main; sys.exit('jax' in sys.modules)"
    package = Path(__file__).parent.parent
    # the package's public names need JAX, so the command must be importable without them
    assert subprocess.run([sys.executable, "-c", code], cwd=package, check=False).returncode == 0
