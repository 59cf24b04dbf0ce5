"""Elasticities are what small changes do; single changes reach their targets."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from click.testing import CliRunner
from json_outputs import conforming

import hymell_jax as hj
from hymell_jax import quantities, sensitivity
from hymell_jax.cli import main

TARGET = ("latency_per_token_s", 6.5e-3)


@pytest.fixture(scope="module")
def work() -> hj.Workload:
    return hj.workload(batch_size=8, prompt_tokens=1000, output_tokens=200)


def test_layers_and_tokens_scale_as_they_must(h100, llama, work):
    found = hj.elasticities(h100.at_level(2), llama, work)  # of kernels, without the host
    layers = found["n_layers"]
    assert all(0.8 < slope <= 1.0 for slope in layers.values())  # all but embedding and head
    assert found["output_tokens"]["prefill_time_s"] == pytest.approx(0.0, abs=1e-6)
    assert found["prompt_tokens"]["latency_per_token_s"] > 0  # a longer cache to read
    assert found["batch_size"]["energy_per_token_j"] < 0
    assert "value_head_dim" not in found  # moves with head_dim
    assert "n_experts" not in found  # there are none


@pytest.mark.parametrize("field", ["n_layers", "vocab_size", "n_kv_heads"])
def test_elasticities_are_what_a_small_change_does(h100, llama, work, field):
    # compute-bound prefill pays for columns in whole tiles, so widths act there by steps only
    memory_bound = ("latency_per_token_s", "decode_energy_per_token_j")
    names = sensitivity.ELASTIC if field == "n_layers" else memory_bound
    slopes = hj.elasticities(h100, llama, work)[field]
    step = 0.02
    sizes = np.float32(float(getattr(llama, field)) * np.exp([-step, step]))
    archs = dataclasses.replace(llama, **{field: sizes})
    rows = quantities.measure(h100, archs, work, sensitivity.ELASTIC)
    slope = (np.log(rows[1]) - np.log(rows[0])) / (2 * step)
    measured = dict(zip(sensitivity.ELASTIC, slope, strict=True))
    for name in names:
        assert slopes[name] == pytest.approx(measured[name], abs=0.02), name


def test_single_changes_reach_the_target_and_are_the_least(h100, llama, work):
    changes = sensitivity.single_changes(h100, llama, work, *TARGET)
    fields = {c["field"]: c for c in changes}
    assert {"n_layers", "d_model", "d_ff"} <= fields.keys()
    for change in changes:
        assert change["quantities"][TARGET[0]] <= TARGET[1] * (1 + 1e-6)
    losses = [c["loss_increase"] for c in changes]
    assert losses == sorted(losses)
    layers = fields["n_layers"]
    one_more = dataclasses.replace(llama, n_layers=np.float32(layers["to"] + 1))
    assert float(hj.predict(h100, one_more, work).decode.time_s) > TARGET[1]


def test_a_target_that_is_met_needs_the_smallest_step(h100, llama, work):
    changes = sensitivity.single_changes(h100, llama, work, "latency_per_token_s", 1.0)
    assert all(c["change"] == 0 or c["kind"] == "workload" for c in changes)


def test_experts_are_changed_where_there_are_experts(h100, work):
    arch = hj.preset("qwen3-30b-a3b").architecture
    model = h100.at_level(1)
    now = float(hj.predict(model, arch, work).decode_energy_per_token_j)
    changes = sensitivity.single_changes(model, arch, work, "decode_energy_per_token_j", 0.9 * now)
    assert "experts_per_token" in {c["field"] for c in changes}
    assert "d_ff" not in {c["field"] for c in changes}  # no dense layers


def test_steps_agree_with_the_gradient_where_there_are_no_tiles(h100, llama):
    work = hj.workload(batch_size=8, prompt_tokens=1000, output_tokens=200)
    fields, pairs = sensitivity.stepped(llama, work)
    archs, works = (hj.stack(list(column)) for column in zip(*pairs, strict=True))
    rows = hj.predict_batch(h100, archs, works, once=True)
    values = {
        "latency_per_token_s": rows.decode.time_s,
        "decode_energy_per_token_j": rows.decode_energy_per_token_j,
        "prefill_time_s": rows.prefill.time_s,
    }
    found = sensitivity.slopes_of_steps(fields, values)
    exact = sensitivity.elasticities(h100, llama, work)
    assert set(found) == set(exact) - {"tensor_parallel"}
    for field, slopes in found.items():
        for name in ("latency_per_token_s", "decode_energy_per_token_j"):
            assert slopes[name] == pytest.approx(exact[field][name], abs=0.05), (field, name)
    # the products with d_ff are most of the prefill, and climb by tiles
    assert found["d_ff"]["prefill_time_s"] > 0.5


def test_slopes_of_a_power_are_its_exponent():
    sizes = np.exp(
        [-sensitivity.STEP, sensitivity.STEP, 1 - sensitivity.STEP, 1 + sensitivity.STEP]
    )
    found = sensitivity.slopes_of_steps(["a", "b"], {"q": 3.0 * sizes**2.5})
    assert found["a"]["q"] == pytest.approx(2.5) == found["b"]["q"]


def test_the_command_explains():
    arguments = [
        "explain", "llama-3.1-8b", "--device", "h100-sxm-80gb",
        "--workload", "batch=8,prompt=1000,output=200", "--target", "latency_per_token_s=6.5e-3",
    ]  # fmt: skip
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    got = conforming("explain", result.stdout)
    assert got["target"]["cheapest"]["architecture"] == got["target"]["changes"][0]
    # by tiles that a gradient does not see
    assert got["elasticities"]["d_ff"]["prefill_time_s"] > 0.5
    assert "tensor_parallel" not in got["elasticities"]
    part = got["parts"]["decode"]["ffn_up"]
    assert {"time_s", "energy_j", "regimes", "bound"} <= part.keys()
    shown = CliRunner().invoke(main, arguments)
    assert shown.exit_code == 0, shown.output
    assert "cheapest first" in shown.stdout
    assert "regime: where one call stands" in shown.stdout and "bound: what" in shown.stdout
    refused = CliRunner().invoke(main, [*arguments[:-1], "speed=1"])
    assert refused.exit_code == 2
    assert "no quantity" in refused.stderr
