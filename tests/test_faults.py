"""Faults that cost models of this kind are known for, each with what must hold instead."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import hymell_jax as hj
from hymell_jax import checkpoint, operators, summary
from hymell_jax.baselines import METHODS
from hymell_jax.files import read_json
from hymell_jax.operators import PARTS

ROOT = Path(__file__).parent.parent
SHIPPED = checkpoint.available()
UNITS = ("_s", "_j", "_w", "_wh", "_bytes", "_per_s", "_per_token", "_tokens")


def content_of(entry: tuple[str, str, str]) -> dict:
    return read_json(checkpoint.shipped_folder() / checkpoint.file_name(*entry))


@pytest.fixture(scope="module")
def answer(h100) -> dict:
    """A prediction as `--json` prints it."""
    work = hj.workload(batch_size=8, prompt_tokens=1024, output_tokens=64)
    return summary.summarise(h100, hj.preset("llama-3.1-8b"), work)


# What a prediction says of itself -----------------------------------------------------------------


def test_an_answer_says_what_it_is_for_and_what_it_leaves_out(answer):
    assert answer["device"] == "h100-sxm-80gb" and answer["dtype"] == "bf16"
    assert answer["runtime"].startswith("vllm-") and answer["level"] in (1, 2, 3)
    assert answer["workload"]["batch_size"] == 8
    assert answer["workload"]["prompt_tokens"] == 1024
    assert "tokenising" in answer["excluded"] and "model loading" in answer["excluded"]
    assert answer["provenance"]["time"] == "fitted" and answer["provenance"]["energy"]
    assert isinstance(answer["in_domain"], bool) and answer["domain_distance"] >= 0


def test_every_number_of_an_answer_has_its_unit_in_its_name(answer):
    for group in ("prefill", "decode", "total", "steady"):
        for name in answer[group]:
            assert name.endswith(UNITS), name
    for name, value in answer["memory"].items():
        assert name.endswith(("_bytes", "_per_token")) or isinstance(value, bool)
    for part in answer["parts"]["decode"].values():
        assert {"time_s", "energy_j", "flops", "memory_bytes", "share", "bound"} <= part.keys()


def test_every_operator_has_its_time_its_energy_and_what_holds_it_up(answer):
    for phase in ("prefill", "decode"):
        parts = answer["parts"][phase]
        assert sum(part["share"] for part in parts.values()) == pytest.approx(1.0, abs=1e-6)
        for part in parts.values():
            assert part["time_s"] > 0 and part["energy_j"] > 0
            assert sum(part["bound_shares"].values()) == pytest.approx(1.0, abs=1e-3)


def test_prefill_and_steps_are_told_apart_and_a_step_is_at_its_exact_context(h100, llama):
    """The mean step is none that carries prompts; that one is named `steady`."""
    grows = hj.predict(h100, llama, hj.workload(prompt_tokens=1000, output_tokens=2000))
    exact = [
        float(hj.predict(h100, llama, hj.workload(context_tokens=tokens)).decode.time_s)
        for tokens in (1000, 2000, 3000)
    ]
    assert exact[0] < exact[1] < exact[2]
    assert exact[0] < float(grows.decode.time_s) < exact[2]
    assert float(grows.steady_time_per_token_s) > float(grows.decode.time_s)
    whole = float(grows.prefill.time_s) + 2000 * float(grows.decode.time_s)
    assert float(grows.total_time_s) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("entry", SHIPPED, ids="/".join)
def test_fitted_numbers_name_the_version_of_their_rows_and_their_engine(entry):
    content = content_of(entry)
    assert content["runtime"] == entry[1] and entry[1].rpartition("-")[2][0].isdigit()
    gemm = [source for source in content["sources"] if source["table"] == "operators/gemm"]
    assert gemm and all(source["rows_train"] > 1000 for source in gemm)
    assert all(len(source["name"].split()[-1]) == 8 for source in content["sources"])  # a commit
    assert {"jax", "numpy"} <= content["libraries"].keys() and content["recipe"]


@pytest.mark.parametrize("entry", SHIPPED, ids="/".join)
def test_errors_are_published_per_device_and_regime(entry):
    rows = content_of(entry)["errors"]
    found = {(row["table"], row["target"], row["regime"]) for row in rows if row["split"] == "test"}
    regimes = {regime for table, target, regime in found if (table, target) == ("gemm", "time")}
    assert len(regimes - {"all"}) >= 3
    assert all(row["n"] > 0 and row["mape"] >= 0 for row in rows)


def test_errors_of_whole_models_are_published_per_phase():
    """An end-to-end error can hide a prefill and a step that are wrong in opposite ways."""
    path = ROOT / "experiments" / "end_to_end_accuracy" / "results.json"
    rows = json.loads(path.read_text())["by_device"]
    phases = {row["phase"].partition(",")[0] for row in rows}
    assert {"prefill", "decode"} <= phases and {row["target"] for row in rows} >= {"time", "energy"}


# Counts ------------------------------------------------------------------------------------------


def stream_bytes(arch: hj.Architecture, part: str) -> float:
    found = operators.stream_operators(arch, hj.workload(), 10.0)
    index = operators.STREAM_PARTS.index(part)
    return float((found.rows * found.cols * found.bytes_per_element)[index])


def test_the_activation_moves_the_feed_forward_width_and_not_the_models(llama):
    assert stream_bytes(llama, "activation") == 10 * 14336 * 3 * 2  # gate and up in, one out
    wide = dataclasses.replace(llama, d_ff=2 * llama.d_ff)
    assert stream_bytes(wide, "activation") == 2 * stream_bytes(llama, "activation")
    wide = dataclasses.replace(llama, d_model=2 * llama.d_model)
    assert stream_bytes(wide, "activation") == stream_bytes(llama, "activation")


def test_a_step_reads_keys_and_values_once_for_all_the_query_heads_of_a_group(h100, llama):
    """32 query heads on 8 KV heads read a quarter of what 32 on 32 do."""
    work = hj.workload(batch_size=32, prompt_tokens=8192, output_tokens=1)
    index = PARTS.index("attention")
    grouped, full = (
        float(hj.predict(h100, dataclasses.replace(llama, n_kv_heads=np.float32(heads)), work)
              .decode.parts.memory_bytes[index])
        for heads in (8, 32)
    )  # fmt: skip
    assert full / grouped == pytest.approx(4.0, rel=0.02)
    cache = 32 * 32 * 8192 * 2 * 8 * 128 * 2  # layers, sequences, tokens, K and V, heads, width, B
    assert grouped == pytest.approx(cache, rel=0.02)


def test_a_head_counts_two_flops_a_weight_and_the_embedding_none(llama):
    products = operators.matrix_products(llama, hj.workload(batch_size=4), 400.0)
    index = operators.MATRIX_PARTS.index("lm_head")
    flops = 2.0 * products.m[index] * products.n[index] * products.k[index]
    assert float(flops) == 2.0 * 4 * 128256 * 4096  # one row a sequence
    assert "embedding" not in operators.MATRIX_PARTS


# Predictions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", sorted({device for device, _, _ in SHIPPED}))
def test_predictions_are_slower_than_a_bare_roofline_and_not_by_far(device):
    roofline = METHODS["roofline"]
    arch, model = hj.preset("llama-3.1-8b").architecture, hj.load(device).at_level(1)
    efficiencies = roofline.default_coefficients()
    for batch in (1, 32):
        work = hj.workload(batch_size=batch, prompt_tokens=512, output_tokens=64)
        ideal = roofline.predict(arch, work, model.device, efficiencies)
        found = hj.predict(model, arch, work)
        assert 1.0 < float(found.prefill.time_s / ideal.prefill_time_s) < 3.0
        assert 1.0 < float(found.decode.time_s / ideal.decode_time_per_token_s) < 3.0


def test_faster_boards_are_predicted_faster_for_steps_that_memory_binds():
    """In the order of their bandwidths, measured or carried over."""
    names = ["t4-16gb", "l40s-48gb", "a100-sxm-40gb", "h100-sxm-80gb", "h200-sxm-141gb",
             "b200-sxm-180gb"]  # fmt: skip
    bandwidth = [float(hj.get_device(name).device.memory_bytes_per_s) for name in names]
    assert bandwidth == sorted(bandwidth)
    arch, work = hj.preset("qwen3-8b").architecture, hj.workload(prompt_tokens=512)
    times = [
        float(hj.predict(hj.load(name).at_level(1), arch, work).decode.time_s) for name in names
    ]
    assert times == sorted(times, reverse=True)


def test_more_prompt_tokens_take_longer_and_not_the_same(h100, llama):
    times = [
        float(hj.predict(h100, llama, hj.workload(prompt_tokens=tokens)).prefill.time_s)
        for tokens in (1, 512, 2048, 8192)
    ]
    assert all(later > earlier for earlier, later in zip(times, times[1:], strict=False))
    assert times[3] > 3 * times[2] > 6 * times[1]


def test_batch_one_has_an_answer_at_every_level_and_overheads_are_named(h100, llama):
    for level in (1, 2, 3):
        p = hj.predict(h100.at_level(level), llama, hj.workload(batch_size=1, output_tokens=1))
        assert 0 < float(p.decode.time_s) < 0.1 and 0 < float(p.prefill.time_s) < 1
    terms = h100.engine.coefficients
    assert {"log_step_s", "log_request_s", "log_launch_s", "log_sampling_passes"} <= terms.keys()
    without = terms | dict.fromkeys(
        ("log_step_s", "log_request_s", "log_launch_s", "log_sampling_passes"), np.float32(-40)
    )
    bare = dataclasses.replace(h100, engine=dataclasses.replace(h100.engine, coefficients=without))
    work = hj.workload(batch_size=1)
    served, kernels = (float(hj.predict(m, llama, work).decode.time_s) for m in (h100, bare))
    assert kernels < served


def test_one_gpu_is_what_is_assumed(h100, llama):
    work = hj.workload()
    assert float(work.tensor_parallel) == float(work.expert_parallel) == 1.0
    parts = hj.predict(h100, llama, work).prefill.parts.time_s
    assert float(parts[PARTS.index("collectives")]) == 0.0


def test_energy_per_token_falls_strictly_with_the_batch_and_has_an_interval(h100, llama):
    found = [hj.predict(h100, llama, hj.workload(batch_size=b)) for b in (1, 2, 4, 8, 16, 32, 64)]
    joules = [float(p.decode_energy_per_token_j) for p in found]
    assert all(a > b * 1.02 for a, b in zip(joules, joules[1:], strict=False))
    assert all(float(width) > 0 for p in found for width in p.decode.log_half_widths)


def test_fewer_bits_are_no_constant_factor():
    """fp8 converts its activations first: it pays for large products and costs small ones."""
    ratios = {}
    for name in ("gpt2", "llama-3.1-8b"):
        for batch, prompt in ((1, 1), (64, 2048)):
            times = [
                hj.predict(hj.load("h100-sxm-80gb", dtype=dtype).at_level(1),
                           hj.preset(name).architecture,
                           hj.workload(batch_size=batch, prompt_tokens=prompt, dtype=dtype))
                for dtype in ("fp8", "bf16")
            ]  # fmt: skip
            for quantity in ("time_s", "energy_j"):
                a, b = (float(getattr(p.prefill, quantity)) for p in times)
                ratios[name, batch, quantity] = a / b
    for quantity in ("time_s", "energy_j"):
        assert ratios["gpt2", 1, quantity] > 1.0
        assert ratios["llama-3.1-8b", 64, quantity] < 0.9


# What ships --------------------------------------------------------------------------------------


def test_fitted_numbers_ship_inside_the_wheel_and_nothing_is_downloaded():
    project = (ROOT / "pyproject.toml").read_text()
    assert '"checkpoints" = "hymell_jax/checkpoints"' in project
    shipped = [p for p in checkpoint.shipped_folder().rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in shipped) < 12e6
    for path in (ROOT / "hymell_jax").rglob("*.py"):
        text = path.read_text()
        assert not any(f"import {name}" in text for name in ("requests", "urllib", "httpx")), path
