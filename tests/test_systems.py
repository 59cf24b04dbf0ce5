"""Measured whole models as rows: units, groups, what is left out and why."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from hymell_jax import engines, serving, system_recipes, system_rows, systems


def _write(folder, table, **columns):
    (folder / "systems").mkdir(exist_ok=True)
    rows = max(len(v) for v in columns.values() if isinstance(v, list))
    full = {k: v if isinstance(v, list) else [v] * rows for k, v in columns.items()}
    pd.DataFrame(full).to_parquet(folder / "systems" / f"{table}.parquet")


@pytest.fixture
def folder(tmp_path):
    """Two small tables with sound, failed and unknown rows."""
    _write(
        tmp_path, "argonne_latency", device="h100-sxm-80gb", runtime="vLLM", num_gpus=1,
        model=["meta-llama/Llama-2-7b-hf", "huggyllama/llama-7b", "nobody/knows", "gpt2"],
        dtype="float16", batch=[1, 64, 1, 1], input_len=[128, 2048, 128, 128],
        output_len=[128, 2048, 128, 1024], time_s=[0.9, 117.0, 1.0, 1e-4],
    )  # fmt: skip
    _write(
        tmp_path, "mlenergy_v3", device="h100-sxm-80gb", runtime="vllm-0.11.1", num_gpus=[1, 8, 1],
        tensor_parallel=1, expert_parallel=[1, 8, 1], data_parallel=1,
        model=["Qwen/Qwen3-8B", "Qwen/Qwen3-235B-A22B-Thinking-2507", "Qwen/Qwen3-8B"],
        architecture=["Dense Transformer", "MoE", "Dense Transformer"], dtype="bfloat16",
        task="gpqa", avg_batch_size=[8.0, 16.0, 4000.0], avg_output_len=[8000.0] * 3,
        median_itl_s=0.01, p90_itl_s=0.012, output_tokens_per_s=[800.0, 1600.0, 400000.0],
        power_w=[500.0, 3000.0, 500.0], energy_per_output_token_j=[0.625, 1.875, 0.00125],
    )  # fmt: skip
    return tmp_path


def test_rows_say_what_ran_and_in_which_unit(folder):
    rows, _ = systems.read_systems(folder)
    assert list(rows.columns) == list(systems.COLUMNS)
    run = rows[rows["model"] == "meta-llama/Llama-2-7b-hf"].iloc[0]
    assert (run["engine"], run["prompt"], run["total_time_s"]) == ("vllm-2024", 128, 0.9)
    served = rows[rows["table"] == "mlenergy_v3"]
    assert np.isnan(served["prompt"]).all()
    np.testing.assert_allclose(served["decode_time_s"], 0.01)
    assert list(served["tensor_parallel"]) == [1.0, 8.0]  # attention is split where experts are
    assert list(served["moe"]) == [False, True]


def test_one_architecture_under_two_names_is_left_out_together(folder):
    rows, _ = systems.read_systems(folder)
    llamas = rows[rows["table"] == "argonne_latency"]
    assert set(llamas["group"]) == {"llama-2-7b"}
    assert float(systems.group_architecture("llama-2-7b").n_layers) == 32


def test_a_batch_that_does_not_fit_runs_in_turns(folder):
    rows, _ = systems.read_systems(folder)
    turns = dict(zip(rows["model"], rows["turns"], strict=True))
    assert turns["meta-llama/Llama-2-7b-hf"] == 1.0
    cache, room = 64 * 4096 * 0.5 * 2**20, 0.9 * 85.5e9 - 13.5e9
    assert turns["huggyllama/llama-7b"] == pytest.approx(cache / room, rel=0.05)


def test_rows_left_out_are_counted_with_the_reason(folder):
    _, left = systems.read_systems(folder)
    reasons = {(row["model"], row["reason"]): row["n"] for _, row in left.iterrows()}
    assert reasons == {
        ("nobody/knows", "the architecture is not at hand"): 1,
        ("gpt2", "faster than the data sheet allows"): 1,
        ("Qwen/Qwen3-8B", "the reported batch does not fit into memory"): 1,
    }


def test_joules_seconds_and_watts_must_agree(folder):
    path = folder / "systems" / "mlenergy_v3.parquet"
    frame = pd.read_parquet(path)
    frame["energy_per_output_token_j"] *= 1000.0  # millijoules
    frame.to_parquet(path)
    with pytest.raises(ValueError, match="do not agree"):
        systems.read_systems(folder)


def test_unknown_tables_and_empty_folders_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="There is no table"):
        systems.read_systems(folder, ("mlenergy_v4",))
    with pytest.raises(ValueError, match="holds none of"):
        systems.read_systems(folder, ("splitwise",))


@pytest.mark.parametrize("name", sorted(systems.ARCHITECTURES))
def test_architectures_of_the_tables_have_their_published_size(name):
    from hymell_jax.parameters import total_parameters

    billions = {
        "aquila-7b": 7.3, "qwen1.5-7b": 7.7, "opt-13b": 12.9, "llama-4-scout": 107.8,
        "llama-4-maverick": 400.7,
    }  # fmt: skip
    found = float(total_parameters(systems.group_architecture(name))) / 1e9
    assert found == pytest.approx(billions[name], rel=0.02)


def test_the_quantile_is_the_conformal_one():
    scores = np.arange(1.0, 20.0)  # 19 of them: the 18th
    assert system_recipes.conformal_quantile(scores) == 18.0
    assert system_recipes.conformal_quantile(scores[:5]) == 5.0
    assert np.isnan(system_recipes.conformal_quantile(np.array([np.nan])))


def test_a_device_that_nobody_measured_takes_the_terms_of_its_kin():
    machine = serving.default_coefficients()
    wide, narrow = (
        {w: {"time": q, "energy": q} for w in system_recipes.WIDTHS} for q in (9.0, 2.0)
    )
    content = {
        "engines": {"vllm-0.11.1": {
            "machines": {"h100-sxm-80gb": machine, "b200-sxm-180gb": machine},
            "quantiles": {"h100-sxm-80gb": narrow, "b200-sxm-180gb": narrow},
        }},
        "transferred": wide,
    }  # fmt: skip
    own = engines.terms_for(content, "h100-sxm-80gb")
    kin = engines.terms_for(content, "h200-sxm-141gb")
    assert (own.machine, own.transferred) == ("h100-sxm-80gb", False)
    assert (kin.machine, kin.transferred) == ("h100-sxm-80gb", True)
    assert (kin.quantiles > own.quantiles).all()
    with pytest.raises(ValueError, match="No engine 'vllm-9'"):
        engines.terms_for(content, "h100-sxm-80gb", "vllm-9")


def test_left_out_models_on_measured_systems(data_folder):
    """Physics alone on one engine and table, one architecture left out at a time."""
    rows, _ = systems.read_systems(data_folder, ("energaizer_prefill",))
    costs = system_rows.block_costs(rows, system_rows.shipped_models())
    problem = system_rows.problem("transformers-eager", rows, costs)
    fitted = system_recipes.fit_folds([problem], seeds=(0,))
    frame = system_recipes.predict_left_out(fitted)
    here = frame[(frame["device"] == "h100-sxm-80gb") & (frame["group"] == "qwen2-1.5b")]
    assert len(here) == 16
    for target in ("prefill", "energy"):
        error = (here[target] / here[f"{target}_measured"] - 1.0).abs().mean()
        assert error <= 0.10, target
