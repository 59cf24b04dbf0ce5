"""hymell_jax.importers: units, names, splits and errors, on the installed package and tiny files.

The tiny files follow the layouts of microsoft/vidur, casys-kaist/LLMServingSim, sitar-lab/NeuSight
and ai-dynamo/aiconfigurator; their numbers are made up unless a test says otherwise.
"""

import importlib.util
import itertools
import zlib
from pathlib import Path

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

from hymell_jax import importers  # noqa: E402
from hymell_jax.importers import tables  # noqa: E402


def sentence(call, *args, **keywords):
    with pytest.raises(ValueError) as caught:
        call(*args, **keywords)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


def write_csv(path, header, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join(header), *(",".join(str(value) for value in row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


# --- the split rule and the shape of a table -------------------------------------------------


def test_the_split_is_the_crc_of_the_joined_key():
    """CRC-32 of "123456789" is 0xCBF43926, its published check value: 62 modulo 100, so train."""
    frame = pd.DataFrame({"a": [123456789]})
    assert 0xCBF43926 % 100 == 62
    assert tables.hash_split(frame, ("a",)).tolist() == ["train"]
    grid = pd.DataFrame(itertools.product(range(1, 60), range(1, 60)), columns=["n", "k"])
    split = tables.hash_split(grid, ("n", "k"))
    for row in range(0, len(grid), 97):
        key = f"{grid['n'][row]}|{grid['k'][row]}".encode()
        assert split[row] == ("test" if zlib.crc32(key) % 100 < 15 else "train")
    assert np.mean(split == "test") == pytest.approx(0.15, abs=0.02)  # 3 sigma of 3481 draws


def test_the_split_does_not_depend_on_the_order_or_on_other_rows():
    grid = pd.DataFrame(itertools.product(range(1, 20), range(1, 20)), columns=["n", "k"])
    shuffled = grid.sample(frac=1, random_state=1)
    whole = tables.hash_split(grid, ("n", "k"))
    np.testing.assert_array_equal(tables.hash_split(shuffled, ("n", "k")), whole[shuffled.index])
    np.testing.assert_array_equal(tables.hash_split(grid[5:6], ("n", "k")), whole[5:6])


def test_every_table_starts_with_its_device_and_ends_with_its_split():
    for name, columns in tables.COLUMNS.items():
        assert columns[:2] == ("device", "runtime") and columns[-1] == "split"
        assert len(set(columns)) == len(columns)
        assert set(tables.GROUPS.get(name, ())) <= set(columns)


# --- aiconfigurator ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed():
    spec = importlib.util.find_spec("aiconfigurator_core")
    assert spec is not None, "aiconfigurator-core comes with the extra `test`"
    return Path(next(iter(spec.submodule_search_locations))) / "systems" / "data"


def test_installed_gemm_rows_keep_their_shapes_and_times(installed):
    raw = pd.read_parquet(installed / "a100_sxm/gemm/vllm/0.14.0/gemm_perf.parquet")
    result = importers.import_aiconfigurator(systems="a100_sxm", tables="gemm")
    assert list(result) == ["operators/gemm"]
    gemm = result["operators/gemm"]
    assert tuple(gemm.columns) == tables.COLUMNS["operators/gemm"]
    assert len(gemm) == len(raw) > 5000
    np.testing.assert_allclose(gemm["time_s"], raw["latency"] / 1000, rtol=1e-6)
    for name in "mnk":
        np.testing.assert_array_equal(gemm[name], raw[name])
        assert gemm[name].dtype == np.int32
    assert gemm["device"].unique().tolist() == ["a100-sxm-80gb"]
    assert gemm["runtime"].unique().tolist() == ["vllm-0.14.0"]
    assert gemm["dtype"].astype(str).tolist() == raw["gemm_dtype"].tolist()
    assert gemm["power_w"].isna().all() and gemm["energy_j"].isna().all()
    assert gemm["time_s"].dtype == np.float32


def test_installed_gemm_splits_by_whole_weight_shapes(installed):
    gemm = importers.import_aiconfigurator(systems=["a100-sxm-80gb"], tables=["operators/gemm"])
    groups = gemm["operators/gemm"].astype({"split": str}).groupby(["n", "k"])["split"]
    assert (groups.nunique() == 1).all()
    assert 0.10 < np.mean(groups.first() == "test") < 0.22


def test_installed_collectives_count_bytes_and_take_the_newest_version(installed):
    frame = importers.import_aiconfigurator(systems="a100_sxm", tables="collectives")
    frame = frame["operators/collectives"]
    assert sorted(frame["runtime"].unique()) == ["nccl-2.27.3", "vllm-0.14.0"]
    raw = pd.read_parquet(installed / "a100_sxm/comm/nccl/2.27.3/nccl_perf.parquet")
    nccl = frame[frame["runtime"] == "nccl-2.27.3"]
    width = np.where(raw["nccl_dtype"] == "half", 2, 1)
    np.testing.assert_array_equal(nccl["message_bytes"], raw["message_size"] * width)


GEMM = ("framework", "gemm_dtype", "m", "n", "k", "latency", "power", "power_limit")
GEMM_ROW = ("VLLM", "bfloat16", 16, 4096, 8192, 0.25, 400, 700)


@pytest.mark.parametrize(
    "place",
    [
        "src/aiconfigurator/systems/data/h200_sxm/vllm/0.22.0/gemm_perf.txt",
        "aic-core/src/aiconfigurator_core/systems/data/h200_sxm/gemm/vllm/0.22.0/gemm_perf.txt",
        "systems/data/h200_sxm/vllm/0.22.0/gemm_perf.csv",
    ],
)
def test_a_checkout_in_either_layout_gives_seconds_and_joules(tmp_path, place):
    unmeasured = (*GEMM_ROW[:5], 0.5, 0, 700)
    write_csv(tmp_path / place, GEMM, GEMM_ROW, unmeasured)
    gemm = importers.import_aiconfigurator(tmp_path)["operators/gemm"]
    assert gemm["device"].tolist() == ["h200-sxm-141gb"] * 2
    assert gemm["runtime"].tolist() == ["vllm-0.22.0"] * 2
    np.testing.assert_allclose(gemm["time_s"], [2.5e-4, 5e-4])
    np.testing.assert_allclose(gemm["power_w"], [400, np.nan])
    np.testing.assert_allclose(gemm["energy_j"], [0.1, np.nan])  # 400 W x 0.25 ms
    np.testing.assert_allclose(gemm["power_limit_w"], [700, 700])


def test_parquet_wins_over_text_and_other_frameworks_and_versions_are_left_out(tmp_path):
    root = tmp_path / "systems/data/h100_sxm"
    text = write_csv(root / "gemm/vllm/0.24.0/gemm_perf.txt", GEMM, GEMM_ROW)
    frame = pd.read_csv(text)
    frame["latency"] = 1.0
    frame.to_parquet(text.with_suffix(".parquet"))
    write_csv(root / "gemm/sglang/0.24.0/gemm_perf.txt", GEMM, GEMM_ROW)
    write_csv(root / "gemm/vllm/0.19.0/gemm_perf.txt", GEMM, GEMM_ROW)
    gemm = importers.import_aiconfigurator(tmp_path)["operators/gemm"]
    np.testing.assert_allclose(gemm["time_s"], [1e-3])
    other = importers.import_aiconfigurator(tmp_path, versions=("0.19.0",))["operators/gemm"]
    assert other["runtime"].tolist() == ["vllm-0.19.0"]


def test_contexts_are_cached_plus_new_tokens(tmp_path):
    root = tmp_path / "systems/data/h100_sxm"
    heads = ("num_heads", "num_key_value_heads", "head_dim", "attn_dtype", "kv_cache_dtype")
    write_csv(
        root / "attention/vllm/0.14.0/generation_attention_perf.csv",
        ("batch_size", "isl", "step", *heads, "latency"),
        (8, 1, 1023, 32, 8, 128, "bfloat16", "fp8", 0.02),
    )
    write_csv(
        root / "attention/vllm/0.14.0/context_attention_perf.csv",
        ("batch_size", "isl", "step", *heads, "window_size", "latency"),
        (8, 512, 0, 32, 8, 128, "bfloat16", "bfloat16", 128, 0.02),
    )
    mla = ("model", "gemm_type", "kv_cache_dtype", "batch_size", "isl", "step", "num_heads")
    for kind, row in (
        ("context", ("deepseek-ai/DeepSeek-V3", "bfloat16", "fp8", 2, 64, 64, 16, 0.5)),
        ("generation", ("deepseek-ai/DeepSeek-V3", "fp8_block", "fp8", 2, 1, 7, 16, 0.4)),
    ):
        name = f"mla_{kind}_module_perf.csv"
        write_csv(root / "mla/vllm/0.24.0" / name, (*mla, "latency"), row)
    result = importers.import_aiconfigurator(tmp_path)
    decode = result["blocks/attention_decode"].iloc[0]
    assert (decode["context_len"], decode["window_size"], decode["kv_dtype"]) == (1024, 0, "fp8")
    prefill = result["blocks/attention_prefill"].iloc[0]
    assert (prefill["seq_len"], prefill["window_size"]) == (512, 128)
    mla = result["blocks/mla"].astype(str)
    assert mla["phase"].tolist() == ["prefill", "decode"]
    assert mla["context_len"].tolist() == ["128", "8"]
    assert mla["dtype"].tolist() == ["bfloat16", "fp8_block"]


def test_int4_experts_are_left_out(tmp_path):
    columns = (
        *("moe_dtype", "kernel_source", "distribution", "num_tokens", "hidden_size"),
        *("inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "latency"),
    )
    row = ("k", "balanced", 4, 4096, 2048, 8, 256, 1, 1, 0.1)
    path = tmp_path / "systems/data/l40s/moe/vllm/0.24.0/moe_perf.csv"
    write_csv(path, columns, ("int4_wo", *row), ("fp8_block", *row))
    moe = importers.import_aiconfigurator(tmp_path)["blocks/moe"]
    assert moe["dtype"].tolist() == ["fp8_block"]
    assert moe[["top_k", "n_experts", "d_expert"]].iloc[0].tolist() == [8, 256, 2048]


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ((*GEMM_ROW[:5], 0, 400, 700), "positive"),
        ((*GEMM_ROW[:5], -1, 400, 700), "positive"),
        ((*GEMM_ROW[:5], "fast", 400, 700), "positive"),
        ((*GEMM_ROW[:5], 1e9, 400, 700), "below"),
        (("VLLM", "bfloat16", 16.5, 4096, 8192, 0.25, 400, 700), "whole"),
        (("VLLM", "bfloat16", 16, -4096, 8192, 0.25, 400, 700), "whole"),
        (("VLLM", "bfloat16", 16, 2**40, 8192, 0.25, 400, 700), "whole"),
        ((*GEMM_ROW[:6], -5, 700), "power"),
    ],
)
def test_values_of_the_wrong_kind_are_refused_with_the_file_and_row(tmp_path, row, word):
    write_csv(tmp_path / "data/l40s/gemm/vllm/0.24.0/gemm_perf.csv", GEMM, row)
    message = sentence(importers.import_aiconfigurator, tmp_path)
    assert word in message and "gemm_perf.csv" in message


def test_sources_without_data_are_refused(tmp_path):
    run = importers.import_aiconfigurator
    assert "existing folder" in sentence(run, tmp_path / "absent")
    assert "no aiconfigurator measurements" in sentence(run, tmp_path)
    path = write_csv(tmp_path / "data/l40s/gemm/vllm/0.24.0/gemm_perf.csv", GEMM, GEMM_ROW)
    assert "Unknown table 'gem'" in sentence(run, tmp_path, tables="gem")
    assert "Unknown system 'h300'" in sentence(run, tmp_path, systems=["h300"])
    assert "at least one" in sentence(run, tmp_path, tables=[])
    assert "no measurements of blocks/moe" in sentence(run, tmp_path, tables="moe")
    assert "no measurements" in sentence(run, tmp_path, systems="h100_sxm")
    path.write_text("m,n,k\n1,2,3\n")
    assert "lacks the columns gemm_dtype, latency" in sentence(run, tmp_path)
    path.write_text("")
    assert "cannot be read" in sentence(run, tmp_path)
    path.write_text(",".join(GEMM) + "\n")
    assert "no rows" in sentence(run, tmp_path)
    path.unlink()
    path.with_suffix(".parquet").write_bytes(b"not parquet")
    assert "cannot be read" in sentence(run, tmp_path)
    path.with_suffix(".parquet").write_text("version https://git-lfs.github.com/spec/v1\noid x")
    assert "git lfs pull" in sentence(run, tmp_path)


# --- Vidur ------------------------------------------------------------------------------------

PARTS = (
    *("emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj"),
    *("post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add"),
)
WIDTHS = (
    *("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "vocab_size", "use_gated_mlp"),
    *("num_tokens", "num_tensor_parallel_workers"),
)


def vidur(root, gpu, model, *rows, parts=PARTS):
    header = [f"time_stats.{part}.median" for part in parts] + list(WIDTHS)
    write_csv(root / f"data/profiling/compute/{gpu}/{model}/mlp.csv", header, *rows)


LLAMA = (32, 32, 4096, 11008, 32768, True)


def test_vidur_medians_become_seconds(tmp_path):
    times = [0.07, 0.02, 0.2, 0.06, 0.08, 0.03, 0.3, 0.05, 0.31, 0.04]
    vidur(tmp_path, "h100", "meta-llama/Llama-2-7b-hf", (*times, *LLAMA, 128, 2))
    frame = importers.import_vidur(tmp_path)["blocks/layer_parts_vidur"]
    assert tuple(frame.columns) == tables.COLUMNS["blocks/layer_parts_vidur"]
    row = frame.iloc[0]
    np.testing.assert_allclose([row[f"{p}_s"] for p in PARTS], np.array(times) * 1e-3, rtol=1e-6)
    assert (row["device"], row["runtime"], row["dtype"]) == ("h100-sxm-80gb", "vidur", "float16")
    assert (row["d_model"], row["d_ff"], row["tensor_parallel"]) == (4096, 11008, 2)
    assert row["gated_ffn"] and row["split"] == "test"


def test_vidur_rmsnorm_is_the_median_over_models_and_degrees_of_one_width(tmp_path):
    def row(norm, degree):
        return (1, norm, 1, 1, 1, 2 * norm, 1, 1, 1, 1, *LLAMA, 128, degree)

    vidur(tmp_path, "a100", "meta-llama/Llama-2-7b-hf", row(0.01, 1), row(0.02, 2))
    vidur(tmp_path, "a100", "meta-llama/Meta-Llama-3-8B", row(0.06, 1))
    norms = importers.import_vidur(tmp_path)["operators/rmsnorm"]
    assert norms["kernel"].tolist() == ["input_layernorm", "post_attention_layernorm"]
    np.testing.assert_allclose(norms["time_s"], [2e-5, 4e-5], rtol=1e-6)
    side = "test" if zlib.crc32(b"4096|128") % 100 < 15 else "train"
    assert norms["split"].tolist() == [side, side]


def test_vidur_models_with_parallel_blocks_have_no_second_norm_and_no_rmsnorm(tmp_path):
    parts = [part for part in PARTS if part != "post_attention_layernorm"]
    row = (*[0.1] * 9, 32, 32, 2560, 10240, 51200, False, 128, 1)
    vidur(tmp_path, "h100", "microsoft/phi-2", row, parts=parts)
    result = importers.import_vidur(tmp_path / "data")
    assert list(result) == ["blocks/layer_parts_vidur"]
    frame = result["blocks/layer_parts_vidur"]
    assert np.isnan(frame["post_attention_layernorm_s"][0]) and frame["split"][0] == "train"


def test_vidur_refuses_what_is_not_a_checkout(tmp_path):
    assert "existing folder" in sentence(importers.import_vidur, tmp_path / "absent")
    assert "no Vidur profiles" in sentence(importers.import_vidur, tmp_path)
    vidur(tmp_path, "h100", "a/b", (*[0.1] * 9, *LLAMA, 128, 1), parts=PARTS[1:])
    assert "time_stats.emb.median" in sentence(importers.import_vidur, tmp_path)
    vidur(tmp_path, "h100", "a/b", (*[0.1] * 9, 0, *LLAMA, 128, 1))
    assert "time_stats.add.median must be positive" in sentence(importers.import_vidur, tmp_path)


# --- LLMServingSim ----------------------------------------------------------------------------

LAYERS = ("layer_name", "input", "kv_cache", "tp_size", "latency(ns)")


@pytest.mark.parametrize(
    "place", ["llmservingsim/profiler/v0/perf_models", "llm_profile/perf_models"]
)
def test_llmservingsim_nanoseconds_become_seconds(tmp_path, place):
    """The first rows of the published H100 profile of Llama-3.1-8B."""
    root = tmp_path / place / "H100/meta-llama/Llama-3.1-8B"
    write_csv(
        root / "tp1/layers.csv",
        LAYERS,
        ("embedding", 1, 0, 1, 2915),
        ("input_layernorm", 1, 0, 1, 17701),
        ("attn", 1, 0, 1, 5810),
        ("q_proj", 3, 0, 1, 16445),
    )
    write_csv(root / "tp2/layers.csv", LAYERS, ("embedding", 1, 0, 2, 1))
    result = importers.import_llmservingsim(tmp_path)
    parts = result["blocks/layer_parts_transformers"]
    assert tuple(parts.columns) == tables.COLUMNS["blocks/layer_parts_transformers"]
    assert parts["part"].tolist() == ["embedding", "input_layernorm", "q_proj"]
    np.testing.assert_allclose(parts["time_s"], [2.915e-6, 1.7701e-5, 1.6445e-5], rtol=1e-6)
    assert parts["split"].tolist() == ["train", "train", "test"]  # 3 mod 8 = 3
    assert parts[["d_model", "d_ff", "n_experts"]].iloc[0].tolist() == [4096, 14336, 0]
    norms = result["operators/rmsnorm"]
    assert norms["kernel"].tolist() == ["input_layernorm"]
    assert norms["runtime"].tolist() == ["transformers-eager"]


def test_llmservingsim_layer_norms_are_not_rmsnorms(tmp_path):
    path = tmp_path / "perf_models/A6000/microsoft/Phi-mini-MoE-instruct/tp1/layers.csv"
    write_csv(path, LAYERS, ("input_layernorm", 1, 0, 1, 17701))
    assert list(importers.import_llmservingsim(tmp_path)) == ["blocks/layer_parts_transformers"]


def test_llmservingsim_refuses_what_is_not_a_checkout(tmp_path):
    run = importers.import_llmservingsim
    assert "existing folder" in sentence(run, tmp_path / "absent")
    assert "no LLMServingSim profiles" in sentence(run, tmp_path)
    path = tmp_path / "perf_models/H100/meta-llama/Llama-3.1-8B/tp1/layers.csv"
    write_csv(path, LAYERS[:4], ("embedding", 1, 0, 1))
    assert "latency(ns)" in sentence(run, tmp_path)
    write_csv(path, LAYERS, ("embedding", 1, 0, 1, 0))
    assert "positive" in sentence(run, tmp_path)


# --- NeuSight ---------------------------------------------------------------------------------


def neusight(root, split, name, *rows):
    path = root / f"scripts/asplos/data/dataset/{split}/{name}.csv"
    write_csv(path, ("OPName", "Latency", "Device", "B", "H"), *rows)


def test_neusight_milliseconds_become_seconds_and_its_split_is_kept(tmp_path):
    """Two published rows: softmax on V100 (test) and on A100 (train)."""
    row = ("softmax", 0.1343552023172378, "NVIDIA A100-PCIE-40GB", 5082, 2217)
    neusight(tmp_path, "train", "softmax", row)
    neusight(
        tmp_path,
        "test",
        "softmax",
        ("softmax", 0.7137215971946717, "Tesla V100-PCIE-32GB", 32768, 1600),
        ("softmax", 1.0, "AMD Instinct MI210", 32768, 1600),
    )
    neusight(tmp_path, "test", "ln", ("ln", 3.318003129959106, "Tesla T4", 8192, 8192))
    result = importers.import_neusight(tmp_path)
    softmax = result["operators/softmax"]
    assert tuple(softmax.columns) == tables.COLUMNS["operators/softmax"]
    assert softmax["device"].tolist() == ["a100-pcie-40gb", "v100-pcie-32gb"]
    np.testing.assert_allclose(softmax["time_s"], [1.343552e-4, 7.137216e-4], rtol=1e-6)
    assert softmax["split"].tolist() == ["train", "test"]
    assert softmax["upstream_split"].tolist() == ["train", "test"]
    norm = result["operators/layernorm"].iloc[0]
    assert (norm["device"], norm["rows"], norm["cols"]) == ("t4-16gb", 8192, 8192)


def test_neusight_refuses_what_is_not_a_checkout(tmp_path):
    assert "existing folder" in sentence(importers.import_neusight, tmp_path / "absent")
    assert "no NeuSight data set" in sentence(importers.import_neusight, tmp_path)
    neusight(tmp_path, "train", "ln", ("ln", -1, "Tesla T4", 8, 8))
    assert "positive" in sentence(importers.import_neusight, tmp_path)


# --- writing ----------------------------------------------------------------------------------


def test_written_tables_are_read_back_equal(tmp_path):
    write_csv(tmp_path / "in/data/l40s/gemm/vllm/0.24.0/gemm_perf.csv", GEMM, GEMM_ROW)
    result = importers.import_aiconfigurator(tmp_path / "in")
    written = importers.write_tables(result, tmp_path / "out")
    assert written == {"operators/gemm": tmp_path / "out/operators/gemm.parquet"}
    pd.testing.assert_frame_equal(
        pd.read_parquet(written["operators/gemm"]), result["operators/gemm"]
    )
    assert [path.name for path in (tmp_path / "out/operators").iterdir()] == ["gemm.parquet"]


def test_tables_of_one_name_are_joined(tmp_path):
    vidur(tmp_path, "h100", "meta-llama/Llama-2-7b-hf", (*[0.1] * 10, *LLAMA, 128, 1))
    path = tmp_path / "perf_models/H100/meta-llama/Llama-3.1-8B/tp1/layers.csv"
    write_csv(path, LAYERS, ("input_layernorm", 1, 0, 1, 17701))
    merged = importers.merge_tables(
        importers.import_vidur(tmp_path), importers.import_llmservingsim(tmp_path)
    )
    norms = merged["operators/rmsnorm"]
    assert norms["runtime"].tolist() == ["vidur", "vidur", "transformers-eager"]
    assert isinstance(norms["runtime"].dtype, pd.CategoricalDtype)
    assert norms["num_tokens"].dtype == np.int32
    assert len(merged) == 3


def test_a_source_that_cannot_be_read_leaves_no_folder(tmp_path):
    from click.testing import CliRunner

    from hymell_jax.cli import main

    words = ["import", "vidur", "--from", str(tmp_path / "absent"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert list(tmp_path.iterdir()) == []


def test_tables_are_not_written_outside_the_folder_or_over_a_file(tmp_path):
    frame = pd.DataFrame({"a": [1]})
    for name in ("../x", "/x", "a//b", "", "a/.."):
        assert "name" in sentence(importers.write_tables, {name: frame}, tmp_path)
    (tmp_path / "file").write_text("x")
    assert "folder" in sentence(importers.write_tables, {"a/b": frame}, tmp_path / "file")
