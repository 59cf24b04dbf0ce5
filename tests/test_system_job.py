"""Level 3 from all tables: what it needs, and that an interrupted run goes on where it stopped."""

from __future__ import annotations

import shutil

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from hymell_jax import (
    checkpoint,
    serving,
    system_evaluate,
    system_job,
    system_recipes,
    system_rows,
    system_store,
)
from hymell_jax.cli import main

DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb")


@pytest.fixture
def folder(tmp_path):
    """Whole runs of one model on two GPUs."""
    rows = [
        dict(device=device, batch=batch, input_len=128, output_len=128, time_s=2.0 + 0.01 * batch)
        for device in DEVICES for batch in (1, 4)
    ]  # fmt: skip
    frame = pd.DataFrame(rows).assign(
        model="huggyllama/llama-7b", runtime="vLLM", num_gpus=1, dtype="float16"
    )
    (tmp_path / "data" / "systems").mkdir(parents=True)
    frame.to_parquet(tmp_path / "data" / "systems" / "argonne_latency.parquet")
    return tmp_path / "data"


@pytest.fixture
def out(tmp_path):
    """A folder of checkpoints that has not got a level 3."""
    place = tmp_path / "out"
    for device in DEVICES:
        shutil.copytree(checkpoint.shipped_folder() / device, place / device)
    return place


def _blocks(rows, *_):
    n_grid, n_kinds = len(system_rows.GRID), len(serving.KINDS)
    one = np.arange(1.0, len(rows) + 1.0, dtype=np.float32)[:, None] * np.ones(n_grid, np.float32)
    blocks = serving.Blocks(
        time_s=np.repeat(one[..., None], n_kinds, -1), energy_j=one, flops=one, memory_bytes=one,
        streamed_bytes=one,
    )  # fmt: skip
    return blocks, blocks


def test_blocks_of_an_interrupted_run_are_kept(folder, out, monkeypatch):
    shipped = system_store.load(checkpoint.shipped_folder())
    seen, made = [], []

    def fit(problems, *_, **__):
        seen.append(problems)
        if len(seen) == 1:
            raise KeyboardInterrupt
        return shipped, None

    def costs(rows, *_):
        made.append(rows["device"].iloc[0])
        return _blocks(rows)

    monkeypatch.setattr(system_recipes, "fit_level3", fit)
    monkeypatch.setattr(system_rows, "block_costs", costs)
    with pytest.raises(KeyboardInterrupt):
        system_job.fit_systems(folder, out)
    assert made == list(DEVICES) and not system_store.file_of(out).exists()
    system_job.fit_systems(folder, out)
    assert made == list(DEVICES)  # nothing twice
    for first, second in zip(seen[0], seen[1], strict=True):
        np.testing.assert_array_equal(first.rows.prefill.time_s, second.rows.prefill.time_s)
    assert system_store.load(out)["engines"].keys() == shipped["engines"].keys()
    assert sorted(p.name for p in system_store.file_of(out).parent.iterdir()) == [
        "level3.json", "level3.npz",
    ]  # fmt: skip


def test_a_device_without_its_checkpoint_is_named(folder, out):
    (folder / "operators").mkdir()
    gemm = dict(device="l40s-48gb", runtime="r", dtype="bfloat16", m=1, n=1, k=1, time_s=1e-6)
    pd.DataFrame([gemm | {"split": "train"}]).to_parquet(folder / "operators" / "gemm.parquet")
    with pytest.raises(ValueError, match="lacks l40s-48gb"):
        system_job.fit_systems(folder, out)
    with pytest.raises(ValueError, match="No measured systems"):
        system_job.fit_systems(folder, out, engines=("nobody-1",))


def test_errors_of_models_left_out_are_evaluated(folder):
    words = ["evaluate", "--device", "h100-sxm-80gb", "--data", str(folder), "--level", "3"]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0 and "vllm-0.11.1" in shown.output
    rows = system_evaluate.evaluate_systems("h100-sxm-80gb")
    assert {r["target"] for r in rows} == {"time", "energy"} and all(r["level"] == 3 for r in rows)
    with pytest.raises(ValueError, match="No whole model of 't4-16gb'"):
        system_evaluate.evaluate_systems("t4-16gb")
