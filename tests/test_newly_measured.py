"""The committed profile of a small CPU, as someone who measured a machine goes on with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from json_outputs import conforming

import hymell_jax as hj
from hymell_jax import (
    checkpoint,
    comparison,
    devices,
    footprint,
    notebook,
    profile_evaluate,
    ranking,
    report,
    summary,
    sweep,
)
from hymell_jax.cli import main
from hymell_jax.profiler import devicefile

SOURCE = Path(__file__).parent.parent / "experiments" / "new_device"
NAME = "amd-epyc-2t"


def run(*arguments: str):
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> Path:
    """A profile with its checkpoints beside it, as `hymell profile --fit` leaves them."""
    folder = tmp_path_factory.mktemp("measured") / "prof"
    shutil.copytree(SOURCE / "profile", folder)
    shutil.copytree(SOURCE / "checkpoints", folder / "checkpoints")
    return folder


@pytest.fixture(scope="module")
def answer(profile) -> dict:
    options = ("--price", "0.3", "--carbon-intensity", "100", "--json")
    found = run("predict", "gpt2", "--device", str(profile / "device.json"), *options)
    assert found.exit_code == 0, found.output
    return conforming("predict", found.stdout)


def test_the_device_file_of_a_profile_finds_its_checkpoints(profile, answer):
    assert (answer["device"], answer["dtype"], answer["level"]) == (NAME, "fp32", 3)
    named = run("predict", "gpt2", "--device", NAME, "--checkpoints",
                str(profile / "checkpoints"), "--json")  # fmt: skip
    assert json.loads(named.stdout)["decode"] == answer["decode"]
    model = hj.load(profile / "device.json", dtype="fp32")
    own = checkpoint.load(profile / "checkpoints" / NAME / "device.json", dtype="fp32")
    assert float(model.device.peak_flops_per_s) == float(own.device.peak_flops_per_s)


def test_elsewhere_the_message_says_which_file_to_give():
    found = run("predict", "gpt2", "--device", str(SOURCE / "profile" / "device.json"))
    assert found.exit_code == 2 and "beside its checkpoints" in found.stderr


def test_energies_of_a_placeholder_limit_are_null_and_times_stay(answer):
    assert devicefile.UNKNOWN.startswith(checkpoint.PLACEHOLDER)
    assert answer["prefill"]["time_s"] > 0 and answer["total"]["output_tokens_per_s"] > 0
    low, high = answer["interval"]["decode"]["time_per_token_s"]
    assert low < answer["decode"]["time_per_token_s"] < high

    def numbers(content, name=""):
        if isinstance(content, dict):
            return [n for key, value in content.items() for n in numbers(value, key)]
        return [(name, content)]

    shown = {key: answer[key] for key in ("prefill", "decode", "total", "steady", "interval",
                                          "parts")}  # fmt: skip
    energies = [v for name, v in numbers(shown) if name.endswith(("_j", "_w", "_wh"))]
    assert len(energies) > 20 and set(energies) == {None}
    assert sum("placeholder" in text for text in answer["warnings"]) == 1
    costs = answer["footprint"]
    assert costs["co2_g"] is None and costs["cost"] is None
    assert footprint.footprint(answer, price_per_gpu_hour=1.0)["cost"] > 0
    assert "<td>-</td>" in notebook.Answer("prediction", answer)._repr_html_()


def test_a_known_limit_keeps_the_energies(profile, tmp_path):
    shutil.copytree(profile / "checkpoints", tmp_path / "c")
    file = tmp_path / "c" / NAME / "device.json"
    facts = json.loads(file.read_text())
    facts["fields"]["power_limit_w"] = {"value": 155.0, "unit": "W", "source": "data sheet"}
    file.write_text(json.dumps(facts))
    model = hj.load(file, dtype="fp32")
    work = hj.workload(dtype="fp32")
    found = summary.summarise(model, hj.preset("gpt2"), work)
    assert summary.knows_power(model) and found["total"]["energy_j"] > 0


def test_tables_show_a_dash_and_one_note(profile):
    place = str(profile / "device.json")
    one = run("predict", "gpt2", "--device", place)
    line = next(x for x in one.stdout.splitlines() if x.startswith("energy of the whole batch"))
    assert line.split()[-1] == "-" and one.stderr.count("left out") == 1
    assert " J" not in one.stdout and " W" not in one.stdout
    two = run("predict", "gpt2", str(profile / "models" / "opt-125m.json"), "--device", place)
    assert two.exit_code == 0, two.output
    assert "energy per 1k output tokens" in two.stdout and " J" not in two.stdout


def test_other_pages_hide_energies_of_a_placeholder(monkeypatch):
    liminal = comparison.METHODS["liminal"]
    monkeypatch.setattr(comparison, "METHODS", {"liminal": liminal})
    facts = json.loads((SOURCE / "profile" / "device.json").read_text())
    facts |= {"name": "new-gpu", "architecture": "unknown"}
    facts["fields"]["memory_bytes"]["value"] = 8e10
    work = hj.workload()
    found = comparison.compare(hj.preset("gpt2"), facts, work)["methods"]
    assert all(m["prefill_energy_j"] is None for m in found)
    assert found[0]["prefill_time_s"] > 0
    with pytest.raises(ValueError, match="placeholder in its device file"):
        report.report(["gpt2"], [devices.get_device(facts)])


def test_evaluate_takes_the_name_or_the_file_and_finds_the_checkpoints(profile):
    for given in (NAME, str(profile / "device.json"), None):
        found = profile_evaluate.open_profile(profile, given)
        assert found.name == NAME
        where = profile_evaluate.checkpoints_of(profile, found, None)
        assert where == profile / "checkpoints"
    other = run("evaluate", "--data", str(profile), "--device", "h100-sxm-80gb")
    assert other.exit_code == 2 and f"is of {NAME}, not of h100-sxm-80gb" in other.stderr
    without = run("evaluate", "--data", str(SOURCE / "profile"), "--device", NAME)
    assert without.exit_code == 2 and "by --checkpoints" in without.stderr


def test_evaluate_names_the_tables_it_looks_for(tmp_path):
    found = run("evaluate", "--device", "h100-sxm-80gb", "--data", str(tmp_path))
    assert found.exit_code == 2
    assert "operators/gemm.parquet" in found.stderr and "blocks/moe.parquet" in found.stderr


def test_questions_about_unknown_energies_are_refused_and_times_answered(profile):
    model = hj.load(profile / "device.json", dtype="fp32")
    hf, work = hj.preset("gpt2"), hj.workload(dtype="fp32")
    with pytest.raises(ValueError, match="energy_per_token_j needs energies, and the power limit"):
        hj.search(hf, model, minimise="energy", work=work)
    with pytest.raises(ValueError, match="energy_j needs energies"):
        hj.search(hf, model, minimise="latency", at_most={"energy_j": 1.0}, work=work)
    with pytest.raises(ValueError, match="energy_per_token_j needs energies"):
        hj.explain(model, hf, work, "energy_per_token_j", 1.0)
    slopes = hj.explain(model, hf, work)["elasticities"]["n_layers"]
    assert slopes["latency_s"] > 0 and not any("energy" in name for name in slopes)
    table = pd.DataFrame({"d_ff": [1024.0, 2048.0]})
    columns = hj.predict_table(model, table, hf.architecture, work).columns
    assert "latency_s" in columns and not any("energy" in name for name in columns)
    with pytest.raises(ValueError, match="energy_j needs energies"):
        hj.predict_table(model, table, hf.architecture, work, ["energy_j"])
    device = str(profile / "device.json")
    spec = {"device": device, "dtype": "fp32", "base": "gpt2", "design": "grid",
            "fields": {"d_ff": [1024, 2048]}}  # fmt: skip
    asked = sweep.read_sweep(spec)
    assert asked.front == sweep.TIMED_FRONT and not any("energy" in name for name in asked.names)
    with pytest.raises(ValueError, match="energy_per_token_j needs energies"):
        sweep.read_sweep(spec | {"quantities": ["energy_per_token_j"]})
    facts = json.loads((profile / "device.json").read_text())
    facts |= {"name": "mine", "architecture": "unknown"}
    found = ranking.rank(hf, hj.workload(), {"ttft_s": 9.0}, ["h100-sxm-80gb", facts])
    assert [d["device"] for d in found["devices"]] == ["h100-sxm-80gb"]
    assert found["left_out"][0]["device"] == "mine"
    assert "placeholder" in found["left_out"][0]["reason"]
