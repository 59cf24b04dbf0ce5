"""The pick among GPUs: targets, memory, provenance, and one sentence for bad input."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from json_outputs import conforming

import hymell_jax as hj
from hymell_jax import ranking
from hymell_jax.cli import main

NAMES = ["h100-sxm-80gb", "h200-sxm-141gb", "l4-24gb", "l40s-48gb"]


@pytest.fixture(scope="module")
def ranked():
    """Llama-3.1-8B, batch 8, on four devices at 30 ms a token."""
    work = hj.workload(batch_size=8, prompt_tokens=512, output_tokens=64)
    hf = hj.preset("llama-3.1-8b")
    return ranking.rank(hf, work, {"time_per_token_s": 0.03, "ttft_s": 5.0}, NAMES), work, hf


def test_the_pick_meets_the_target_with_least_energy(ranked):
    content, _, _ = ranked
    meeting = [d for d in content["devices"] if d["meets"]]
    assert content["devices"][: len(meeting)] == meeting
    energies = [d["energy_per_output_token_j"] for d in meeting]
    assert energies == sorted(energies)
    assert content["pick"] == meeting[0]["device"]
    assert all(d["time_per_token_s"] <= 0.03 and d["ttft_s"] <= 5.0 for d in meeting)
    slow = {d["device"]: d["misses"] for d in content["devices"] if not d["meets"]}
    assert slow == {"l4-24gb": ["time_per_token_s"]}  # 16 GB over 300 GB/s is 53 ms
    assert meeting[0]["energy_over_pick"] == 1.0
    assert all(d["energy_over_pick"] >= 1.0 for d in meeting)


def test_numbers_are_those_of_predict(ranked):
    content, work, hf = ranked
    one = next(d for d in content["devices"] if d["device"] == "h200-sxm-141gb")
    model = hj.load("h200-sxm-141gb").at_level(content["level"])
    p = hj.predict(model, hf.architecture, work)
    assert one["time_per_token_s"] == pytest.approx(float(p.decode_time_per_token_s))
    assert one["ttft_s"] == pytest.approx(float(p.prefill.time_s))
    assert one["energy_per_output_token_j"] == pytest.approx(float(p.total_energy_j) / (8 * 64))
    assert one["power_w"] == pytest.approx(float(p.total_energy_j / p.total_time_s))


def test_all_devices_answer_at_the_highest_level_that_covers_each(monkeypatch):
    asked = []

    def best(model, arch, work):
        asked.append(model.card.device)
        return (1 if model.card.device == "l4-24gb" else model.level), hj.predict(
            model.at_level(1), arch, work
        )

    monkeypatch.setattr(ranking, "predict_best", best)
    work = hj.workload(batch_size=8, prompt_tokens=512, output_tokens=64)
    content = ranking.rank(
        hj.preset("llama-3.1-8b"), work, {"ttft_s": 9.0}, "h200-sxm-141gb,l4-24gb"
    )
    assert content["level"] == 1 and asked == ["h200-sxm-141gb", "l4-24gb"]
    assert all(d["serving"] is None for d in content["devices"])


def test_origins_at_level_3_are_those_of_the_serving_terms():
    card = {
        "time": "fitted", "energy": "transferred", "energy_from": "h200-sxm-141gb, vllm-0.22.0",
        "engine": "vllm-0.11.1", "engine_terms": "fitted", "engine_terms_from": "h100-sxm-80gb",
    }  # fmt: skip
    below, above = (ranking.origins("h100-sxm-80gb", card, level) for level in (2, 3))
    assert (below["time"], below["energy"], below["serving"]) == ("fitted", "transferred", None)
    assert (above["time"], above["energy"], above["serving"]) == ("fitted",) * 3
    assert above["serving_from"] == "vllm-0.11.1 on h100-sxm-80gb"
    assert above["energy_from"] == "h100-sxm-80gb"


def test_it_says_what_was_measured_and_what_was_carried_over(ranked):
    found = {d["device"]: d for d in ranked[0]["devices"]}
    assert found["h200-sxm-141gb"]["time"] == "fitted"
    measured = ranked[0]["pick_measured"]
    assert measured is None or all(
        found[measured][what] in ("fitted", None) for what in ranking.ORIGINS
    )
    assert {found["l4-24gb"][what] for what in ranking.ORIGINS} <= {"transferred", None}
    assert found["l4-24gb"]["time_from"] == "l40s-48gb"
    for d in found.values():
        assert d["time"] == hj.load(d["device"]).card.provenance["time"]


def test_what_does_not_fit_has_no_numbers_and_comes_last():
    work = hj.workload(batch_size=1, prompt_tokens=512, output_tokens=64)
    content = ranking.rank(
        hj.preset("llama-3-70b"), work, {"time_per_token_s": 60.0}, "l4-24gb, h200-sxm-141gb,"
    )
    first, last = content["devices"]
    assert (first["device"], first["fits"], content["pick"]) == (
        "h200-sxm-141gb", first["memory_bytes"] <= first["capacity_bytes"], first["device"]
    )  # fmt: skip
    assert last["misses"] == ["memory"] and last["time_per_token_s"] is None
    assert last["memory_bytes"] > last["capacity_bytes"]


def test_no_device_within_the_target_means_no_pick():
    work = hj.workload(batch_size=8, prompt_tokens=512, output_tokens=64)
    content = ranking.rank(
        hj.preset("llama-3.1-8b"), work, {"time_per_token_s": 1e-6}, ["h200-sxm-141gb"]
    )
    assert content["pick"] is None
    assert content["devices"][0]["energy_over_pick"] is None


def test_devices_without_fp8_are_named_with_the_reason():
    work = hj.workload(batch_size=1, dtype="fp8")
    content = ranking.rank(
        hj.preset("llama-3.1-8b"), work, {"ttft_s": 9.0}, ["a100-sxm-80gb", "h200-sxm-141gb"], "fp8"
    )
    (left,) = content["left_out"]
    assert left["device"] == "a100-sxm-80gb" and "fp8" in left["reason"]


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ({}, "at least one target"),
        ({"tpot_s": 0.1}, "There is no target 'tpot_s'"),
        ({"time_per_tokens_s": 0.1}, "did you mean time_per_token_s"),
        ({"ttft_s": 0.0}, "positive number of seconds"),
        ({"ttft_s": float("nan")}, "positive number of seconds"),
        ({"ttft_s": "soon"}, "positive number of seconds"),
    ],
)
def test_bad_targets_cost_one_sentence(slo, message):
    with pytest.raises(ValueError, match=message):
        ranking.checked_targets(slo)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("h100-sxm-80g", "did you mean"),
        ("l4-24gb,l4-24gb", "given twice"),
        (" , ", "at least one device"),
    ],
)
def test_bad_devices_cost_one_sentence(names, message):
    with pytest.raises(ValueError, match=message):
        ranking.chosen_devices(names)


def test_a_device_file_is_ranked_beside_the_shipped_ones(tmp_path):
    fields = {
        name: float(getattr(hj.get_device("l4-24gb").device, name))
        for name in hj.Device.__dataclass_fields__
    }
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine", "architecture": "ada", **fields}))
    work = hj.workload(batch_size=8, prompt_tokens=512, output_tokens=64)
    content = ranking.rank(
        hj.preset("llama-3.1-8b"), work, {"ttft_s": 60.0}, [str(path), "l4-24gb"]
    )
    mine, same = sorted(content["devices"], key=lambda d: d["device"] != "mine")
    assert mine["time"] == "transferred"
    assert mine["ttft_s"] == pytest.approx(same["ttft_s"])


def run(*arguments: str):
    return CliRunner().invoke(main, ["rank", "llama-3.1-8b", *arguments])


def test_the_command_prints_json_and_a_table():
    devices = ("--devices", "h200-sxm-141gb,l4-24gb", "--slo", "time_per_token_s=0.05")
    result = run(*devices, "--slo", "ttft_s=2", "--batch", "8", "--json")
    assert result.exit_code == 0, result.output
    got = conforming("rank", result.stdout)
    assert got["slo"] == {"time_per_token_s": 0.05, "ttft_s": 2.0}
    assert got["pick"] == "h200-sxm-141gb"
    assert got["workload"]["batch_size"] == 8
    shown = run(*devices, "--batch", "8")
    assert shown.exit_code == 0, shown.output
    assert "Least energy within the target: h200-sxm-141gb" in shown.stdout
    assert "from l40s-48gb" in shown.stdout and "measured" in shown.stdout
    none = run("--devices", "l4-24gb", "--slo", "ttft_s=0.000001")
    assert "None of the devices meets the target" in none.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--slo", "speed=3"), "no target 'speed'"),
        (("--slo", "ttft_s"), "name=number"),
        (("--slo", "ttft_s=-1"), "positive number"),
        ((), "Missing option '--slo'"),
        (("--slo", "ttft_s=1", "--devices", "h101"), "Unknown device"),
        (("--slo", "ttft_s=1", "--tensor-parallel", "3"), "tensor_parallel"),
    ],
)
def test_bad_input_costs_one_sentence_and_status_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert message in result.stderr and "Traceback" not in result.stderr
