"""Fitting blocks from tables, moving them to another device, and power from lower bounds."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pandas as pd
import pytest

from hymell_jax import (
    attention,
    block_evaluate,
    block_power,
    block_recipes,
    blocks,
    checkpoint,
    devices,
    evaluate,
    mlp,
    power,
)
from hymell_jax.model import Card, CostModel

DEVICE, RUNTIME = "h100-sxm-80gb", "vllm-0.24.0"
C = {name: np.float32(value) for name, value in attention.DEFAULT_COEFFICIENTS.items()}
SHEET = devices.get_device(DEVICE).device
TINY = {"hidden": (6, 6), "bound": 1.0, "steps": 250, "members": 1}


def _decode_rows(n=240, seed=0) -> pd.DataFrame:
    """Decode rows whose time is 1.3 times level 1, power 300 W at the least."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({
        "device": DEVICE, "runtime": RUNTIME, "dtype": "bfloat16",
        "kv_dtype": rng.choice(["bfloat16", "fp8"], n, p=[0.8, 0.2]),
        "batch": rng.integers(1, 65, n), "context_len": rng.integers(16, 8192, n),
        "n_heads": 32, "n_kv_heads": rng.choice([4, 8, 32], n), "head_dim": 128,
        "window_size": rng.choice([0, 1024], n, p=[0.8, 0.2]),
        "split": np.where(np.arange(n) % 4 == 0, "test", "train"),
    })  # fmt: skip
    renamed = frame.rename(columns={"context_len": "tokens"}).assign(
        value_head_dim=128,
        window_tokens=frame["window_size"],
        kv_bytes=np.where(frame["kv_dtype"] == "fp8", 1.0, 2.0),
    )
    log_time, _ = block_recipes.level1("attention_decode", C, SHEET, renamed)
    power_w = rng.uniform(200.0, 400.0, n)
    time_s = 1.3 * np.exp(log_time)
    return frame.assign(time_s=time_s, power_w=power_w, energy_j=power_w * time_s)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with attention_decode and nothing else."""
    root = tmp_path_factory.mktemp("data")
    (root / "blocks").mkdir()
    _decode_rows().to_parquet(root / "blocks" / "attention_decode.parquet")
    return root


@pytest.fixture(scope="module")
def fitted(folder):
    return block_recipes.fit_block(
        "attention_decode", folder, DEVICE, RUNTIME, "bf16", C, settings=TINY
    )


def _block(fitted) -> blocks.Block:
    fields = ("coefficients", "params", "normalizer", "spec")
    return blocks.Block(**{field: fitted[field] for field in fields})


@pytest.fixture(scope="module")
def model(fitted):
    coefficients = {"attention": C, "power": power.default_coefficients()}
    return CostModel(
        device=SHEET,
        coefficients=coefficients,
        domain={},
        blocks={"attention_decode": _block(fitted)},
        card=Card(DEVICE, RUNTIME, "bf16"),
    )


def test_a_fit_learns_what_level_one_misses(fitted):
    rows = {(r["split"], r["rows"]): r for r in fitted["errors"]}
    test = rows["test", "all"]
    assert test["n"] == fitted["rows_test"] == 60 and fitted["rows_train"] <= 180
    np.testing.assert_allclose(test["level1_mape"], 100 * 0.3 / 1.3, atol=0.1)
    assert test["level2_mape"] < 4.0
    assert rows["test", "bf16 full"]["n"] < test["n"]


def test_test_rows_are_never_trained_on_and_the_same_seed_gives_the_same_fit(tmp_path, fitted):
    frame = _decode_rows()
    time_s = np.where(frame["split"] == "test", 1.0, frame["time_s"])
    spoiled = frame.assign(time_s=time_s, energy_j=frame["power_w"] * time_s)
    (tmp_path / "blocks").mkdir()
    spoiled.to_parquet(tmp_path / "blocks" / "attention_decode.parquet")
    other = block_recipes.fit_block(
        "attention_decode", tmp_path, DEVICE, RUNTIME, "bf16", C, settings=TINY
    )
    jax.tree.map(np.testing.assert_array_equal, fitted["params"], other["params"])


def test_what_was_not_measured_is_not_fitted(folder):
    for name, device in (("experts", DEVICE), ("attention_decode", "l40s-48gb")):
        arguments = (name, folder, device, RUNTIME, "bf16", C)
        assert block_recipes.fit_block(*arguments, settings=TINY) is None


def test_rows_that_less_work_exceeds_are_left_out():
    frame = pd.DataFrame({
        "batch": [1, 2, 4], "time_s": [1.0, 4.0, 2.0], "split": "train", "n_heads": 8,
        "n_kv_heads": 8, "head_dim": 64, "window_tokens": 0, "kv_bytes": 2.0, "tokens": 99,
    })  # fmt: skip
    use = block_recipes._trainable("attention_decode", DEVICE, RUNTIME, frame)
    assert use.tolist() == [True, True, False]


def test_a_published_network_is_plain_and_of_the_stated_size(folder):
    stated = block_recipes.published_settings("attention_decode", 11475)
    assert stated["hidden"] == (384, 384, 384, 384) and stated["n_monotone"] == 0
    assert stated["learning_rate"] == 5e-5 and stated["weight_decay"] == 1e-5
    assert stated["steps"] == -(-2000 * 11475 // 1024)
    small = block_recipes.published_settings("attention_decode", 180, hidden=(8, 8), steps=250)
    fitted = block_recipes.fit_block(
        "attention_decode", folder, DEVICE, RUNTIME, "bf16", C, settings=small
    )
    assert set(fitted["params"]) == {"Dense_0", "Dense_1", "Dense_2"}
    with pytest.raises(ValueError, match="latent_decode"):
        block_recipes.published_settings("latent_decode", 100)


@pytest.mark.parametrize("loss", ["smooth_l1", "squared"])
def test_other_losses_find_the_mean_of_the_residual(loss):
    rng = np.random.default_rng(0)
    x, r = rng.normal(size=(500, 2)), 0.2 + 0.05 * rng.standard_normal(500)
    spec = mlp.MLPSpec((4,), bound=1.0)
    params = mlp.fit_ensemble(x, 0 * r, r, spec, steps=500, seeds=(0,), loss=loss)
    found = mlp.correction(params, spec, mlp.fit_normalizer(x), x)[0]
    np.testing.assert_allclose(np.mean(found), 0.2, atol=0.03)


def test_training_goes_on_from_a_start():
    rng = np.random.default_rng(0)
    x, r = rng.normal(size=(64, 2)), np.full(64, 0.3)
    spec = mlp.MLPSpec((4,), bound=1.0)
    options = dict(steps=250, batch=64, seeds=(0, 1))
    first = mlp.fit_ensemble(x, 0 * r, r, spec, **options)
    still = mlp.fit_ensemble(x, 0 * r, r, spec, start=first, learning_rate=1e-9, **options)
    np.testing.assert_allclose(still["Dense_0"]["kernel"], first["Dense_0"]["kernel"], atol=1e-5)
    with pytest.raises(ValueError, match="start must have the shapes"):
        mlp.fit_ensemble(x, 0 * r, r, spec, start=first, steps=1, seeds=(0,))
    with pytest.raises(ValueError, match="loss must be one of"):
        mlp.fit_ensemble(x, 0 * r, r, spec, steps=1, loss="l2")


def test_a_block_moves_to_rows_of_another_device(folder, fitted):
    frame = block_recipes.block_rows("attention_decode", folder, DEVICE, RUNTIME, "bf16")
    slower = frame.assign(time_s=1.5 * frame["time_s"])
    train = slower[slower["split"] == "train"]
    test = slower[slower["split"] == "test"]
    before = _block(fitted)
    after = block_recipes.tune_block(
        "attention_decode", before, C, SHEET, train, steps=250, learning_rate=1e-2, members=1
    )
    error = []
    for block in (before, after):
        _, two = block_recipes.block_seconds("attention_decode", block, C, SHEET, test)
        error.append(evaluate.errors(two, test["time_s"].to_numpy())["mape"])
    assert error[0] > 25.0 and error[1] < 8.0
    np.testing.assert_array_equal(after.normalizer.mean, before.normalizer.mean)


def test_error_rows_hold_both_levels_beside_the_references(model, folder):
    rows = block_evaluate.predicted_rows(model, folder)
    assert set(rows) == {"attention_decode"} and len(rows["attention_decode"]) == 60
    black_box = pd.DataFrame({
        "table": ["attention_decode"], "device": [DEVICE], "runtime": [RUNTIME],
        "target": ["time_s"], "mape_pct": [1.89],
    })  # fmt: skip
    one, two = (
        block_evaluate.with_references(block_evaluate.block_errors(model, rows, level), black_box)
        for level in (1, 2)
    )
    assert all(tuple(row) == evaluate.ROW_FIELDS for row in one + two)
    by_key = {(r["regime"], r["target"]): r for r in two}
    assert set(by_key) == {(r, t) for r in ("bf16 full", "all") for t in ("time", "energy")}
    assert by_key["bf16 full", "time"]["reference_mape"] == 1.89
    assert by_key["bf16 full", "time"]["published_mape"] == 0.441
    assert by_key["all", "time"]["reference_mape"] is None
    assert two[0]["mape"] < one[0]["mape"] and (one[0]["level"], two[0]["level"]) == (1, 2)


def test_an_fp8_model_leaves_shared_blocks_to_the_bf16_one(model, folder):
    fp8 = dataclasses.replace(model, card=Card(DEVICE, RUNTIME, "fp8"))
    assert block_evaluate.predicted_rows(fp8, folder) == {}


def test_power_shares_count_labels_that_are_reached(model, folder):
    rows = block_evaluate.predicted_rows(model, folder)
    frame = rows["attention_decode"]
    labels = np.where(np.arange(len(frame)) < 15, 1.06, 1.04) * frame["power_pred_w"]
    changed = {"attention_decode": frame.assign(power_w=labels)}
    found = {r["regime"]: r for r in block_evaluate.power_shares(model, changed)}
    assert found["all"]["reached_pct"] == 75.0 and found["all"]["above_limit_pct"] == 0.0


def test_alike_rows_show_the_scatter_of_their_labels():
    sizes = np.repeat(np.geomspace(1, 1e4, 20), 2)
    frame = pd.DataFrame({
        "batch": sizes, "time_s": sizes * 1e-6, "power_w": np.tile([200.0, 300.0], 20),
        "energy_j": 1.0,
    })  # fmt: skip
    np.testing.assert_allclose(block_evaluate.label_scatter(frame), np.log(1.5))
    alone = frame.iloc[:1]
    assert block_evaluate.label_scatter(alone).tolist() == [0.0]


def test_the_work_of_blocks_by_hand():
    row = dict(batch=2, tokens=100, n_heads=8, n_kv_heads=2, head_dim=64, value_head_dim=64,
               window_tokens=0, kv_bytes=2.0)  # fmt: skip
    flops, moved, cached, fp8 = block_power.block_work("attention_decode", pd.DataFrame([row]))
    np.testing.assert_allclose(flops, 2 * 2 * 8 * 128 * 100)
    np.testing.assert_allclose(moved, 2 * 128 * (2 * 100 * 2 + 8 * 2))
    assert cached[0] == fp8[0] == 0.0
    prefill, *_ = block_power.block_work("attention_prefill", pd.DataFrame([row]))
    np.testing.assert_allclose(prefill, 2 * 2 * 8 * 128 * 100 * 101 / 2, rtol=1e-6)
    row = dict(tokens=4096, d_model=1024, d_expert=512, n_experts=8, top_k=2, tensor_parallel=1,
               expert_parallel=1, exponent=0.0, weight_bytes=2.0, n_matrices=3.0)  # fmt: skip
    flops, moved, _, _ = block_power.block_work("experts", pd.DataFrame([row]))
    np.testing.assert_allclose(flops, 2 * 4096 * 2 * 3 * 1024 * 512, rtol=1e-5)
    weights = 8 * 3 * 1024 * 512 * 2
    rows = 4096 * 2 * (1024 + 512 + 2 * 512 + 1024) * 2
    np.testing.assert_allclose(moved, weights + rows, rtol=1e-3)
    row = dict(batch=4, seq_len=1, k_heads=2, v_heads=4, k_dim=128, v_dim=128)
    flops, *_ = block_power.block_work("linear_rule_decode", pd.DataFrame([row]))
    np.testing.assert_allclose(flops, 12 * 4 * 4 * 128 * 128)
    with pytest.raises(ValueError, match="latent_decode"):
        block_power.block_work("latent_decode", pd.DataFrame([{n: 1.0 for n in (
            "batch", "tokens", "n_heads", "weight_bytes", "kv_bytes")}]))  # fmt: skip


def test_power_is_drawn_to_the_upper_labels_of_blocks(tmp_path):
    """Labels scatter below 500 W where DRAM is busy; products alone do not know that draw."""
    rng = np.random.default_rng(0)
    device, runtime = "h200-sxm-141gb", "vllm-0.22.0"
    sheet = devices.get_device(device).device
    n = 300
    sizes = {"m": rng.integers(2048, 8192, n), "n": 8192, "k": 8192}
    time_s = 2.0 * sizes["m"] * 8192.0 * 8192.0 / (0.6 * float(sheet.peak_flops_per_s))
    gemm = pd.DataFrame({"device": device, "runtime": runtime, "dtype": "bfloat16", **sizes,
                         "time_s": np.maximum(time_s, 3e-4), "power_w": 600.0,
                         "split": "train"})  # fmt: skip
    frame = _decode_rows(400).assign(device=device, runtime=runtime, split="train")
    kept = frame["batch"] * frame["context_len"] * frame["n_kv_heads"] > 2e6
    frame = frame[kept & (frame["window_size"] == 0)]
    work = block_power.block_work("attention_decode", frame.rename(
        columns={"context_len": "tokens"}).assign(value_head_dim=128, window_tokens=0,
        kv_bytes=np.where(frame["kv_dtype"] == "fp8", 1.0, 2.0)))  # fmt: skip
    busy = work[1] / (0.8 * float(sheet.memory_bytes_per_s))
    power_w = 500.0 * rng.uniform(0.6, 1.0, len(frame))
    frame = frame.assign(time_s=busy, power_w=power_w, energy_j=power_w * busy)
    for folder, name, rows in (("operators", "gemm", gemm), ("blocks", "attention_decode", frame)):
        (tmp_path / folder).mkdir()
        rows.to_parquet(tmp_path / folder / f"{name}.parquet")
    fitted, counts = block_power.fit_power(tmp_path, device, runtime, "bf16")
    assert counts["gemm"] == n and counts["attention_decode"] == len(frame) > 30
    assert set(fitted) == set(power.POWER_COEFFICIENTS)
    watts = block_power.block_watts(fitted, sheet, work, busy)
    assert 0.75 < np.mean(watts >= frame["power_w"]) < 1.0
    product = block_power._product_work(gemm, 2.0)
    found = block_power.block_watts(fitted, sheet, product, gemm["time_s"])
    np.testing.assert_allclose(np.median(found), 600.0, rtol=0.03)
    assert (watts <= 700.0).all() and (found <= 700.0).all()
    with pytest.raises(ValueError, match="No products|no table|No gemm"):
        block_power.fit_power(tmp_path, "l40s-48gb", runtime, "bf16")


def test_devices_without_blocks_are_named(tmp_path, folder):
    with pytest.raises(ValueError, match="No checkpoint of 'h100-sxm-80gb'"):
        block_evaluate.evaluate_blocks(DEVICE, folder, checkpoints=tmp_path)


def test_shipped_blocks_are_evaluated_from_their_checkpoints(data_folder):
    rows = block_evaluate.evaluate_blocks("a100-sxm-80gb", data_folder)
    plain = {r["table"]: r for r in rows if r["regime"] in ("bf16 full", "all")}
    assert plain["moe"]["mape"] <= plain["moe"]["reference_mape"]


def test_settings_of_single_devices_are_those_of_the_shipped_networks():
    for (name, device, runtime), changes in block_recipes.MEASURED_SETTINGS.items():
        settings = {"embedding": 24} | block_recipes.SETTINGS[name] | changes
        block = checkpoint.load(device, runtime, "bf16").blocks[name]
        assert {key: getattr(block.spec, key) for key in ("hidden", "bound", "embedding")} == {
            key: settings[key] for key in ("hidden", "bound", "embedding")
        }
        assert len(jax.tree.leaves(block.params)[0]) == settings["members"]
