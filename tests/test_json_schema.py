"""Every command prints JSON as one schema documents it.

What a search, a sweep, an explanation, a ranking, an evaluation and a profile print is checked
where those are tested, by `json_outputs.conforming`.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import jsonschema
import pandas as pd
import pytest
from click.testing import CliRunner
from json_outputs import check, conforming

from hymell_jax import checkpoint, importers, recipes
from hymell_jax.cli import main
from hymell_jax.output_schema import COMMANDS, output_schema

TESTS = Path(__file__).parent


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def answer() -> dict:
    options = ("--carbon-intensity", "400", "--json")
    return conforming("predict", run("predict", "gpt2", "--device", "h100-sxm-80gb", *options))


def test_the_schema_is_one_and_a_command_prints_it():
    whole = json.loads(run("schema"))
    jsonschema.Draft202012Validator.check_schema(whole)
    assert set(COMMANDS) <= set(whole["$defs"])
    for name in COMMANDS:
        one = json.loads(run("schema", name))
        jsonschema.Draft202012Validator.check_schema(one)
        assert one == output_schema(name)
    refused = CliRunner().invoke(main, ["schema", "nothing"])
    assert refused.exit_code == 2 and "no output 'nothing'" in refused.stderr


def test_every_reference_leads_somewhere_and_everything_is_used():
    document = output_schema()
    used = set(re.findall(r'"#/\$defs/([a-z_]+)"', json.dumps(document)))
    assert used <= set(document["$defs"])
    assert set(document["$defs"]) == used | set(COMMANDS)


def test_every_command_prints_json_and_is_checked_by_a_test():
    with_json = {
        name for name, command in main.commands.items()
        if any(p.name == "as_json" for p in command.params)
    }  # fmt: skip
    assert with_json == set(COMMANDS) - {"front"}
    assert set(main.commands) == with_json | {"schema"}
    text = "".join(p.read_text() for p in TESTS.glob("test_*.py"))
    checked = set(re.findall(r'(?:conforming|check)\(\s*"([a-z]+)"', text))
    assert checked == set(COMMANDS)


def test_several_predictions_are_a_list_with_what_is_left_out():
    arguments = ("gpt2", "llama-3.1-70b", "--device", "h100-sxm-80gb", "--json")
    found = conforming("predict", run("predict", *arguments))
    assert [p["model"] for p in found["predictions"]] == ["gpt2"]
    assert [p["model"] for p in found["left_out"]] == ["llama-3.1-70b"]


def test_lists_are_as_documented():
    conforming("devices", run("devices", "--json"))
    conforming("models", run("models", "--json"))


def test_methods_are_as_documented():
    conforming("compare", run("compare", "gpt2", "--device", "h100-sxm-80gb", "--json"))


def test_a_fit_tells_what_it_wrote(tmp_path, monkeypatch):
    entry = ("a100-sxm-80gb", "vllm-0.14.0", "bf16")
    content = checkpoint.read(*entry)
    monkeypatch.setattr(recipes, "fittable", lambda *_: [entry])
    monkeypatch.setattr(recipes, "operators_in", lambda *_: [])
    monkeypatch.setattr(recipes, "fit_level1", lambda *_, **__: content)
    arguments = (
        "--device", entry[0], "--level", "1", "--data", str(tmp_path), "--out",
        str(tmp_path / "out"), "--json",
    )  # fmt: skip
    found = conforming("fit", run("fit", *arguments))
    (written,) = found["checkpoints"]
    assert (tmp_path / "out" / written["file"]).is_file() and not written["resumed"]
    again = conforming("fit", run("fit", *arguments, "--resume"))
    assert again["checkpoints"][0]["resumed"]


def test_an_import_tells_what_it_wrote(tmp_path, monkeypatch):
    tables = {"operators/gemm": pd.DataFrame({"m": [1.0]})}
    monkeypatch.setattr(importers, "import_vidur", lambda path: tables)
    arguments = ("vidur", "--from", str(tmp_path), "--out", str(tmp_path / "out"), "--json")
    found = conforming("import", run("import", *arguments))
    assert Path(found["tables"]["operators/gemm"]).is_file()


@pytest.mark.parametrize(
    "path",
    [("prefill", "time_s"), ("decode",), ("total", "energy_wh"), ("memory", "fits"),
     ("parts", "decode"), ("interval",), ("footprint", "co2_g"), ("workload", "batch_size")],
)  # fmt: skip
def test_what_is_missing_renamed_or_of_another_type_is_noticed(answer, path):
    *way, last = path
    for change in ("missing", "renamed", "text"):
        damaged = copy.deepcopy(answer)
        place = damaged
        for name in way:
            place = place[name]
        value = place.pop(last)
        if change == "renamed":
            place[f"{last}_x"] = value
        elif change == "text":
            place[last] = "1"
        with pytest.raises(jsonschema.ValidationError):
            check("predict", damaged)
