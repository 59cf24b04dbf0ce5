"""A measured machine from rows to a checkpoint, on a made-up one whose times follow known laws."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from hymell_jax import (
    checkpoint,
    data,
    mlp,
    profile_device,
    profile_fit,
    profile_level1,
    profile_level2,
    profile_level3,
    profile_roofline,
    profile_rows,
    system_fit,
    system_store,
)
from hymell_jax.cli import main
from hymell_jax.profiler import steadiness

NAME, RUNTIME = "cpu-made-up-2t", "transformers-9.0"
PEAK, BANDWIDTH, NOISE = 2e11, 2.5e10, 0.02
LAYER_S, PASS_S = 1e-3, 2e-3  # work of the host a layer and a pass
RNG = np.random.default_rng(0)


def _product_s(m, n, k):
    compute, moved = 2.5 * m * n * k / PEAK, 4.0 * (m * k + n * k + m * n) / BANDWIDTH
    return 4e-6 + (compute**4 + moved**4) ** 0.25


def _row_s(elements, arrays):
    return 3e-6 + 4.0 * arrays * elements / (0.7 * BANDWIDTH)


def _attention_s(batch, queries, keys, heads, kv_heads, width):
    flops = 4.0 * batch * heads * width * queries * keys
    return 6e-6 + 2.0 * flops / PEAK + 8.0 * batch * kv_heads * width * keys / BANDWIDTH


def _layer_s(c, batch, queries, keys):
    rows, d, width = batch * queries, c["hidden_size"], c["intermediate_size"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    products = [(d + 2 * kv_heads * d // heads, d), (d, d), (2 * width, d), (d, width)]
    total = sum(_product_s(rows, n, k) for n, k in products)
    total += 4 * _row_s(rows * d, 3) + _row_s(rows * width, 3)
    return total + _attention_s(batch, queries, 0.5 * keys if queries > 1 else keys,
                                heads, kv_heads, d // heads)  # fmt: skip


def _table(folder, table, rows, **columns):
    frame = pd.DataFrame(rows).assign(
        device=NAME, runtime=RUNTIME, dtype="float32", energy_j=np.nan, power_w=np.nan,
        disturbed=False, **columns,
    )  # fmt: skip
    frame["time_s"] *= np.exp(NOISE * RNG.standard_normal(len(frame)))
    path = folder / f"{table}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(path)


def _split(key) -> str:
    return "test" if hash(key) % 4 == 0 else "train"  # of integers: the same every time


CONFIGS = {
    name: dict(
        model_type="llama", hidden_size=d, num_hidden_layers=layers, num_attention_heads=d // 64,
        num_key_value_heads=kv, intermediate_size=3 * d, vocab_size=8000, hidden_act="silu",
        tie_word_embeddings=True, max_position_embeddings=2048,
    )
    for name, d, layers, kv in (("a", 512, 8, 8), ("b", 768, 12, 4), ("c", 1024, 6, 16),
                                ("d", 640, 20, 2))
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The profile of a machine that does not exist."""
    root = tmp_path_factory.mktemp("profile")
    widths = (128, 512, 640, 768, 1024, 1536, 2304, 3072)
    shapes = [(n, k) for n in widths for k in widths[1::2]]
    _table(root, "operators/gemm", [
        dict(m=m, n=n, k=k, split=_split((n, k)), time_s=_product_s(m, n, k))
        for n, k in shapes for m in (1, 4, 16, 64, 256, 1024)
    ])  # fmt: skip
    rows = [(m, d) for m in (1, 8, 64, 512, 4096) for d in widths]
    _table(root, "operators/rmsnorm", [
        dict(num_tokens=m, d_model=d, split=_split((d, 1)), time_s=_row_s(m * d, 2))
        for m, d in rows
    ], kernel="eager")  # fmt: skip
    _table(root, "operators/elementwise", [
        dict(num_tokens=m, width=d, split=_split((d, 1)), time_s=_row_s(m * d, 3)) for m, d in rows
    ], kernel="copy", tensors_read=2, tensors_written=1)  # fmt: skip
    layouts = [(8, 8, 64), (12, 4, 64), (10, 2, 64), (16, 16, 64), (8, 2, 128)]
    for phase, column in (("prefill", "seq_len"), ("decode", "context_len")):
        _table(root, f"blocks/attention_{phase}", [
            {"batch": b, column: s, "n_heads": h, "n_kv_heads": kv, "head_dim": d,
             "split": "test" if h == 10 else "train",
             "time_s": _attention_s(b, s if phase == "prefill" else 1.0,
                                    0.5 * s if phase == "prefill" else s, h, kv, d)}
            for h, kv, d in layouts for b in (1, 4) for s in (16, 64, 256, 1024)
        ], kernel="sdpa", kv_dtype="float32", window_size=0)  # fmt: skip
    passes = []
    (root / "models").mkdir()
    for name, config in CONFIGS.items():
        (root / "models" / f"{name}.json").write_text(json.dumps(config))
        for phase in ("prefill", "decode"):
            for b, s in ((1, 64), (1, 512), (4, 128), (8, 32)):
                queries = s if phase == "prefill" else 1
                layers = config["num_hidden_layers"]
                total = layers * (_layer_s(config, b, queries, s) + LAYER_S) + PASS_S
                total += _product_s(b, config["vocab_size"], config["hidden_size"])
                passes.append(dict(
                    model=name, config=f"models/{name}.json", phase=phase, batch=b, time_s=total,
                    prompt_len=s if phase == "prefill" else None, n_experts=0,
                    context_len=s if phase == "decode" else None, split="train",
                ))  # fmt: skip
    _table(root, "systems/transformers", passes, attention="sdpa")
    (root / "manifest.json").write_text(json.dumps({"device": NAME, "licence": "Apache-2.0"}))
    fields = dict(
        peak_flops_per_s=1e12, peak_fp8_flops_per_s=1e12, peak_vector_flops_per_s=1e11,
        memory_bytes_per_s=1e11, memory_bytes=2e10, l2_bytes=4e6, n_sm=2, boost_clock_hz=3e9,
        power_limit_w=100, idle_power_w=10, link_bytes_per_s=1e10,
    )  # fmt: skip
    described = {"name": NAME, "architecture": "cpu", **fields}
    (root / "device.json").write_text(json.dumps(described))
    return root


@pytest.fixture(scope="module")
def fitted(folder, tmp_path_factory):
    """(error rows, folder of checkpoints) of a short fit."""
    out = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_level1, "STAGES", ((128, 700, 0.06),))
        patch.setattr(profile_level1, "ROWWISE_FIT", {"starts": 4, "steps": 300})
        patch.setattr(profile_level2, "LEAST_ROWS", 1000)
        patch.setattr(profile_level3, "SEEDS", (0,))
        patch.setattr(system_fit, "STEPS", 400)
        patch.setattr(system_fit, "NETWORK_STEPS", 10)
        return profile_fit.fit_profile(folder, out), out


def _row(rows, level, table, kernel=""):
    return next(r for r in rows if (r["level"], r["table"], r["kernel"]) == (level, table, kernel))


def test_held_out_shapes_are_predicted_within_the_noise_and_beat_a_fitted_roofline(fitted):
    rows, _ = fitted
    assert _row(rows, 1, "gemm")["mape"] < 6.0
    assert _row(rows, 1, "rmsnorm", "eager")["mape"] < 5.0
    for phase in ("prefill", "decode"):
        assert _row(rows, 2, f"attention_{phase}", "sdpa")["mape"] < 12.0
    for level in (1, 2):
        assert _row(rows, level, "all")["times_better"] > 2.0
    assert all(r["n"] > 0 and np.isfinite(r["mape"]) for r in rows)


def test_models_left_out_are_predicted(fitted):
    rows, _ = fitted
    for phase in ("prefill", "decode"):
        row = _row(rows, 3, "systems", f"{phase}, models left out")
        assert row["n"] == 16 and row["mape"] < 8.0 and row["times_better"] > 2.0


def test_the_facts_of_the_device_are_what_train_rows_reached(fitted, folder):
    _, out = fitted
    spec = checkpoint.device_spec(NAME, out)
    assert float(spec.device.peak_flops_per_s) == pytest.approx(0.8 * PEAK, rel=0.1)
    assert 0.7 * BANDWIDTH < float(spec.device.memory_bytes_per_s) < 1.1 * BANDWIDTH
    assert "train rows" in spec.sources["peak_flops_per_s"]
    assert float(spec.device.n_sm) == 2.0
    spoiled = profile_rows.read_profile(folder)
    rows = spoiled.rows("operators/gemm")
    assert (rows["split"] == "test").any()
    assert profile_device.describe(spoiled)["fields"]["n_sm"]["value"] == 2.0


def test_a_second_run_keeps_what_is_there(fitted, folder, monkeypatch):
    rows, out = fitted
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}

    def refuse(*_, **__):
        raise AssertionError("fitted again")

    for module, name in (
        (profile_level1, "fit_gemm"),
        (profile_level1, "fit_rowwise"),
        (profile_level2, "fit_block"),
        (profile_level3, "fit_level3"),
    ):
        monkeypatch.setattr(module, name, refuse)
    assert profile_fit.fit_profile(folder, out) == rows
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before


def test_the_command_predicts_with_the_new_device_and_says_what_its_energy_is_worth(fitted, folder):
    _, out = fitted
    words = ["predict", str(folder / "models" / "b.json"), "--prompt", "128", "--output", "4",
             "--device", str(out / NAME / "device.json"), "--json"]  # fmt: skip
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert (answer["device"], answer["dtype"], answer["runtime"]) == (NAME, "fp32", RUNTIME)
    assert answer["level"] == 3 and answer["provenance"]["engine"] == RUNTIME
    config = CONFIGS["b"]
    truth = 12 * (_layer_s(config, 1, 128, 128) + LAYER_S) + PASS_S
    truth += _product_s(1, 8000, 768)
    assert answer["prefill"]["time_s"] == pytest.approx(truth, rel=0.12)
    assert answer["provenance"]["energy"] == "transferred"
    assert answer["decode"]["energy_per_token_j"] > 0
    assert any("nothing metered" in text.lower() for text in answer["warnings"])


def test_the_command_prints_the_errors_and_refuses_another_device(fitted, folder):
    rows, out = fitted
    words = ["evaluate", "--data", str(folder), "--checkpoints", str(out), "--device"]
    result = CliRunner().invoke(main, [*words, NAME, "--level", "3", "--json"])
    assert json.loads(result.stdout) == [r for r in rows if r["level"] == 3]
    shown = CliRunner().invoke(main, [*words, NAME])
    assert shown.exit_code == 0 and "models left out" in shown.output
    for command in (words, ["fit", "--data", str(folder), "--out", str(out), "--device"]):
        refused = CliRunner().invoke(main, [*command, "h100-sxm-80gb"])
        assert refused.exit_code == 2 and NAME in refused.output


def test_a_host_neither_gives_coefficients_nor_takes_them(fitted):
    _, out = fitted
    assert checkpoint.default_dtype(NAME, "bf16", out) == "fp32"
    with pytest.raises(ValueError, match="no other device's coefficients"):
        checkpoint.load("h100-sxm-80gb", dtype="fp32", folder=out)
    with pytest.raises(ValueError, match="no checkpoints for bf16"):
        checkpoint.load(NAME, dtype="bf16", folder=out)
    facts = json.loads((out / NAME / "device.json").read_text())
    with pytest.raises(ValueError, match="not measured in bf16"):
        checkpoint.load(facts, dtype="bf16")


def test_energy_terms_are_those_of_a_metered_machine(fitted):
    _, out = fitted
    content = system_store.load(out, NAME)
    assert content["card"]["energy"] == "transferred"
    assert content["card"]["energy_from"] != NAME
    machine = content["engines"][RUNTIME]["machines"][NAME]
    assert machine["serial"] == 1.0
    assert 0.0 < np.exp(machine["log_step_s"]) < 1e-2


def test_a_damaged_device_file_is_named(fitted, tmp_path):
    _, out = fitted
    for path in (out / NAME).glob(f"{RUNTIME}--fp32.*"):
        (tmp_path / NAME).mkdir(exist_ok=True)
        (tmp_path / NAME / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="device"):
        checkpoint.load_file(tmp_path / NAME / f"{RUNTIME}--fp32.json")


def test_a_roofline_finds_its_rates():
    flops, moved = np.geomspace(1e6, 1e11, 60), np.geomspace(1e8, 1e5, 60)
    truth = profile_roofline.roofline_time_s((3e11, 4e10), flops, moved)
    rates = profile_roofline.fit_roofline(flops, moved, truth)
    np.testing.assert_allclose(rates, (3e11, 4e10), rtol=0.02)
    with pytest.raises(ValueError, match="positive times"):
        profile_roofline.fit_roofline(flops, moved, -truth)


def test_disturbed_rows_are_left_out_while_enough_others_are_there(folder, tmp_path):
    for name in ("manifest.json", "device.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    frame = data.read_table(folder, "operators/gemm")
    for share, left in ((0.25, 0.75), (0.75, 1.0)):
        hit = np.arange(len(frame)) < share * len(frame)
        target = tmp_path / f"{share}"
        (target / "operators").mkdir(parents=True)
        frame.assign(disturbed=hit).to_parquet(target / "operators" / "gemm.parquet")
        for name in ("manifest.json", "device.json"):
            (target / name).write_text((folder / name).read_text())
        profile = profile_rows.read_profile(target)
        assert len(profile.rows("operators/gemm")) == pytest.approx(left * len(frame), abs=1)


def test_what_is_no_profile_is_said(tmp_path, folder):
    with pytest.raises(ValueError, match=r"lacks manifest\.json"):
        profile_rows.read_profile(tmp_path)
    (tmp_path / "manifest.json").write_text((folder / "manifest.json").read_text())
    (tmp_path / "device.json").write_text((folder / "device.json").read_text())
    (tmp_path / "operators").mkdir()
    frame = data.read_table(folder, "operators/gemm").assign(dtype="int8")
    frame.to_parquet(tmp_path / "operators" / "gemm.parquet")
    with pytest.raises(ValueError, match="int8"):
        profile_rows.read_profile(tmp_path)


def test_folds_inside_train_decide_whether_a_network_helps(monkeypatch):
    """A residual that the features explain calls for the network, pure noise does not."""
    monkeypatch.setattr(profile_level2, "FOLDS", 2)
    rng = np.random.default_rng(0)
    x = rng.uniform(0.0, 6.0, (120, 3)).astype(np.float32)
    spec = mlp.MLPSpec((6, 6), bound=0.7, n_monotone=2, embedding=4)
    choices = [
        profile_level2._Choice("alone", spec, {"steps": 0}),
        profile_level2._Choice("network", spec, {"steps": 250, "learning_rate": 2e-2,
                                                 "weight_decay": 1e-2}),
    ]  # fmt: skip
    base, folds = x[:, 1].astype(np.float64), np.arange(120) % 2
    slow = 0.4 * np.tanh(x[:, 0] - 3.0)
    for residual, expected in ((slow, "network"), (0.0 * slow, "alone")):
        chosen, scores = profile_level2._choose(choices, base, x, base + residual, folds, 0)
        assert chosen.name == expected and set(scores) == {"alone", "network"}


def test_configurations_are_read_as_written(folder):
    profile = profile_rows.read_profile(folder)
    frame = profile_level3.rows_of(profile, profile_device.spec_of(profile))
    assert len(frame) == 32 and set(frame["group"]) == set(CONFIGS)
    decode = frame[frame["decode_time_s"].notna()]
    assert ((decode["prompt"] + 0.5) % 1.0 == 0.0).all()
    read = frame.groupby("group")["architecture"].first()
    layers = {name: float(arch.n_layers) for name, arch in read.items()}
    assert layers == {name: c["num_hidden_layers"] for name, c in CONFIGS.items()}


def test_a_slower_machine_is_seen_in_its_anchor(folder, tmp_path):
    anchors = [
        {"kind": "anchor", "order": order, "compute_s": value, "memory_s": 1.0}
        for order, value in ((0, 1.0), (10, 1.0), (20, 1.2))
    ]
    judge = steadiness.Judge(anchors)
    assert judge.ratio_at(5) == 1.0 and judge.ratio_at(15) == pytest.approx(1.1)
    assert steadiness.Judge([]).ratio_at(5) is None
    for part in ("operators", "systems", "models"):
        shutil.copytree(folder / part, tmp_path / part)
    frame = data.read_table(folder, "systems/transformers")
    frame.assign(anchor_ratio=1.25).to_parquet(tmp_path / "systems" / "transformers.parquet")
    for name in ("manifest.json", "device.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    rows = profile_rows.read_profile(tmp_path).rows("systems/transformers")
    np.testing.assert_allclose(rows["raw_s"], frame["time_s"])
    np.testing.assert_allclose(rows["time_s"], frame["time_s"] / 1.25)


def test_the_experiment_runs_the_loop_again(fitted, folder, tmp_path, capsys):
    rows, out = fitted
    shutil.copytree(out, tmp_path / "checkpoints")  # fitted from the same rows: kept
    path = Path(__file__).parent.parent / "experiments" / "new_device" / "run.py"
    config = {"example": {"model": "b", "batch": 1, "prompt": 64, "output": 8}}
    found = runpy.run_path(str(path))["main"](config, folder, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == found
    assert found["errors"] == rows and found["example"]["level"] == 3
    assert {m["model"] for m in found["models"]} == set(CONFIGS)
    assert all("asked for" in text for text in found["verdicts"])
    assert (tmp_path / "predicted.png").stat().st_size > 5000
    readme = (tmp_path / "README.md").read_text()
    assert NAME in readme and "models left out" in capsys.readouterr().out
