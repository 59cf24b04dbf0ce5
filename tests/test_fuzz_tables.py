"""Tables of measurements and of designs: checked numbers, or one sentence."""

from __future__ import annotations

import csv
import io
import os
import random
import warnings

import numpy as np
import pandas as pd
import pytest
from fuzzing import answered, cases, damaged, seeds
from hypothesis import given
from hypothesis import strategies as st

import hymell_jax as hj
from hymell_jax import data, designs, evaluate, frames, importers, types
from hymell_jax.baselines import wattgpu

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SPREADSHEET = [
    "", "x", "-1", "0", "nan", "inf", "-inf", "1e999", "0.5", "1e9", "99999999999999999999", "True",
    "None", '"', "[1]", "2024-01-01", "é", "1,5", "0x10", "a" * 300, "__import__('os').getpid()",
]  # fmt: skip
"""Cells of a text table."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("tables")
    for name in ("operators", "blocks", "systems"):
        (found / name).mkdir()
    return found


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_may_never_end_is_not_read(tmp_path, kind):
    path, llama = tmp_path / "rows.csv", hj.preset("llama-3.1-8b").architecture
    h100 = hj.load("h100-sxm-80gb")
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    for read in (
        evaluate.read_reference,
        lambda at: hj.predict_table(h100, at, llama, hj.workload()),
        wattgpu.read_runs,
    ):
        with pytest.raises(ValueError, match="not a regular file"):
            read(path)


# Parquet -----------------------------------------------------------------------------------------

GEMM = {
    "device": ["h100-sxm-80gb"] * 3, "runtime": ["vllm-0.24.0"] * 3, "dtype": ["bfloat16"] * 3,
    "m": [1, 16, 256], "n": [4096] * 3, "k": [8192] * 3, "time_s": [1e-5, 2e-5, 3e-5],
    "power_w": [400.0, None, 500.0], "energy_j": [4e-3, None, 1.5e-2],
    "split": ["train", "train", "test"],
}  # fmt: skip
COLUMNS = [
    [1, 2, 3], [1.0, None, 3.0], [0, 1, 2], [-1, 1, 1], ["1", "2", "3"], ["a", "b", "c"],
    [None, None, None], [float("nan")] * 3, [float("inf"), 1.0, 2.0], [True, False, True],
    [[1], [2], [3]], [{"a": 1}] * 3, [b"x", b"y", b"z"], [1e9, 1e9, 1e9], [1e-30, 1e-3, 1.0],
    [2**62] * 3, [pd.Timestamp("2024-01-01")] * 3, ["h100-sxm-80gb", None, "x"], ["é\x1b", "", " "],
]  # fmt: skip


def tables(columns: dict) -> st.SearchStrategy:
    """Column dictionaries with some replaced, dropped or emptied."""
    change = st.tuples(
        st.sampled_from([*columns, "extra"]),
        st.sampled_from([*COLUMNS, "drop", "empty", "category"]),
    )
    return st.lists(change, min_size=1, max_size=2)


def changed(columns: dict, changes) -> dict:
    result = dict(columns)
    for name, value in changes:
        if value == "drop":
            result.pop(name, None)
        elif value == "empty":
            result = {key: [] for key in result}
        elif value == "category":
            result[name] = pa.array(list(result.get(name, ["a", "b", "c"]))).dictionary_encode()
        else:
            result[name] = value if len(next(iter(result.values()), [1])) else []
    return result


@cases(600)
@given(tables(GEMM))
def test_tables_hold_positive_numbers_or_are_refused(folder, changes):
    try:
        content = pa.table(changed(GEMM, changes))
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return  # columns that no Parquet file can hold together: there is nothing to read
    pq.write_table(content, folder / "operators" / "gemm.parquet")
    frame = answered(lambda: data.read_table(folder, "operators/gemm"))
    if frame is None:
        return
    assert set(data.TABLES["operators/gemm"]) <= set(frame.columns)
    for name in ("m", "n", "k", "time_s"):
        values = data.columns(frame, name)[0]
        assert values.dtype == np.float32 and (values > 0).all() and np.isfinite(values).all()
    assert (data.columns(frame, "time_s")[0] < 1e3).all()
    assert all(isinstance(value, str) for value in frame["dtype"])
    assert set(frame["split"]) <= {"train", "test"}


@cases(400)
@given(seeds)
def test_damaged_parquet_is_read_or_refused(folder, seed):
    stream = io.BytesIO()
    pq.write_table(pa.table(GEMM), stream)
    (folder / "operators" / "gemm.parquet").write_bytes(damaged(stream.getvalue(), seed))
    frame = answered(lambda: data.read_table(folder, "operators/gemm"))
    if frame is not None:
        assert (frame["time_s"] > 0).all()


def test_columns_that_are_there_twice_are_refused(folder):
    content = pa.table([*GEMM.values(), [1.0] * 3], names=[*GEMM, "time_s"])
    pq.write_table(content, folder / "operators" / "gemm.parquet")
    assert answered(lambda: data.read_table(folder, "operators/gemm")) is None


@pytest.mark.parametrize(
    ("column", "factor"), [("time_s", 1e9), ("time_s", 1e12), ("power_w", 1e3), ("energy_j", 3600)]
)
def test_other_units_are_noticed(folder, column, factor):
    other = [value and value * factor for value in GEMM[column]]
    pq.write_table(pa.table(GEMM | {column: other}), folder / "operators" / "gemm.parquet")
    assert answered(lambda: data.read_table(folder, "operators/gemm")) is None
    pq.write_table(pa.table(GEMM), folder / "operators" / "gemm.parquet")
    assert len(data.read_table(folder, "operators/gemm")) == 3


# Designs -----------------------------------------------------------------------------------------

DESIGNS = {
    "name": ["a", "b", "c"], "d_model": [2048, 4096, 8192], "n_heads": [16, 32, 64],
    "n_kv_heads": [8, 8, 8], "batch_size": [1, 8, 64], "prompt_tokens": [128, 512, 2048],
}  # fmt: skip
WORK = hj.workload()
DESIGN_KEYS = {**DESIGNS, "n_experts": [8] * 3, "d_ff": [1] * 3, "tensor_parallel": [1] * 3,
               "kv_bytes": [2] * 3, "output_tokens": [9] * 3, "latency_s": [1] * 3}  # fmt: skip


@pytest.fixture
def taken(monkeypatch):
    """What reaches the cost model, which itself is left out."""
    seen = []

    def measure(model, archs, works, names):
        seen.append((archs, works))
        count = max(np.size(leaf) for leaf in vars(archs).values())
        return np.ones((count, len(names)), np.float32)

    monkeypatch.setattr(frames.sharded, "measure_sharded", measure)
    return seen


def _legal(archs: hj.Architecture, works: hj.Workload) -> None:
    for name, leaf in [*vars(archs).items(), *vars(works).items()]:
        assert np.isfinite(leaf).all(), name
    for name, (_, least, greatest) in types.ARCHITECTURE_FIELDS.items():
        leaf = np.asarray(getattr(archs, name))
        assert (leaf >= least * 0.999).all() and (leaf <= greatest * 1.001).all()
    for name, (least, greatest) in designs.WORKLOAD_RANGES.items():
        leaf = np.asarray(getattr(works, name))
        assert (leaf >= least * 0.999).all() and (leaf <= greatest * 1.001).all()
    assert (np.asarray(archs.n_heads) % np.asarray(archs.n_kv_heads) == 0).all()
    assert (np.asarray(archs.experts_per_token) <= np.asarray(archs.n_experts)).all()


@cases(800)
@given(tables(DESIGN_KEYS))
def test_designs_in_frames_are_legal_or_refused(taken, h100, llama, changes):
    taken.clear()
    columns = changed(DESIGNS, [c for c in changes if c[1] != "category"])
    frame = pd.DataFrame({key: pd.Series(value) for key, value in columns.items()})
    answer = answered(lambda: hj.predict_table(h100, frame, llama, WORK, ("latency_s",)))
    if answer is not None:
        assert list(answer.columns) == [*frame.columns, "latency_s"]
        _legal(*taken[-1])


def text_table(columns: dict, separator: str, seed: int) -> str:
    """CSV of columns with odd cells, columns gone or doubled, lines cut."""
    rng = random.Random(seed)
    names = list(columns)
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    for _ in range(rng.randint(0, 3)):
        kind = rng.randrange(6)
        at = rng.randrange(len(names))
        if kind <= 2:
            rng.choice(rows)[at] = rng.choice(SPREADSHEET)
        elif kind == 3 and len(names) > 1:
            del names[at]
            rows = [row[:at] + row[at + 1 :] for row in rows]
        elif kind == 4:
            names.append(names[at])
            rows = [[*row, row[at]] for row in rows]
        else:
            for row in rows:
                row[at] = rng.choice(SPREADSHEET)
    stream = io.StringIO()
    csv.writer(stream, delimiter=separator).writerows([names, *rows])
    text = stream.getvalue()
    if rng.random() < 0.15:
        text = damaged(text.encode(), seed).decode("latin-1")
    return text


@cases(300)
@given(seeds)
def test_designs_in_text_files_are_legal_or_refused(folder, taken, h100, llama, seed):
    taken.clear()
    path = folder / "designs.csv"
    path.write_text(text_table(DESIGNS, ",", seed), encoding="latin-1", errors="replace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pd.errors.DtypeWarning)
        answer = answered(lambda: hj.predict_table(h100, path, llama, WORK, ("loss",)))
    if answer is not None:
        _legal(*taken[-1])


def test_an_address_is_no_table(h100, llama):
    for name in ("https://localhost:9/x.csv", "s3://x/y.parquet", "file:///etc/passwd", "a\0b.csv"):
        found = answered(lambda n=name: hj.predict_table(h100, n, llama, WORK, ("loss",)))
        assert found is None


# Importers ---------------------------------------------------------------------------------------

GEMM_FILE = {
    "gemm_dtype": ["bfloat16", "fp8", "int4_wo"], "m": [1, 2, 4], "n": [64] * 3, "k": [128] * 3,
    "latency": [0.1, 0.2, 0.3], "power": [300, 0, 400], "power_limit": [700] * 3,
}  # fmt: skip
DECODE_FILE = {
    "attn_dtype": ["bfloat16"] * 3, "kv_cache_dtype": ["fp8"] * 3, "batch_size": [1, 2, 3],
    "isl": [1, 1, 1], "step": [10, 20, 30], "num_heads": [32] * 3, "num_key_value_heads": [8] * 3,
    "head_dim": [128] * 3, "latency": [0.1, 0.2, 0.3],
}  # fmt: skip
REDUCE_FILE = {
    "kernel_source": ["NCCL"] * 3, "op_name": ["all_reduce"] * 3, "nccl_dtype": ["half"] * 3,
    "num_gpus": [2, 4, 8], "message_size": [1024, 2**20, 2**31 - 1], "latency": [0.1, 0.2, 0.3],
}  # fmt: skip
PARTS = importers.vidur._PARTS
VIDUR_FILE = {f"time_stats.{part}.median": [0.1, 0.2] for part in PARTS} | {
    "n_head": [32, 32], "n_kv_head": [8, 8], "n_embd": [4096] * 2, "n_expanded_embd": [11008] * 2,
    "vocab_size": [32768] * 2, "use_gated_mlp": [True] * 2, "num_tokens": [1, 128],
    "num_tensor_parallel_workers": [1, 2],
}  # fmt: skip
LAYERS_FILE = {
    "layer_name": ["input_layernorm", "attn", "qkv_proj"], "input": [1, 2, 3],
    "kv_cache": [0] * 3, "tp_size": [1] * 3, "latency(ns)": [1000, 2000, 3000],
}  # fmt: skip
SOFTMAX_FILE = {
    "Device": ["NVIDIA L4", "Tesla T4", "another"], "B": [1, 2, 3], "H": [64, 128, 256],
    "Latency": [0.1, 0.2, 0.3],
}  # fmt: skip
SOURCES = {
    "gemm": (importers.import_aiconfigurator, GEMM_FILE,
             "systems/data/l40s/gemm/vllm/0.24.0/gemm_perf.csv"),
    "decode": (importers.import_aiconfigurator, DECODE_FILE,
               "systems/data/l40s/attention/vllm/0.24.0/generation_attention_perf.csv"),
    "reduce": (importers.import_aiconfigurator, REDUCE_FILE,
               "systems/data/l40s/comm/nccl/2.27/nccl_perf.csv"),
    "vidur": (importers.import_vidur, VIDUR_FILE,
              "data/profiling/compute/h100/meta-llama/Llama-2-7b-hf/mlp.csv"),
    "layers": (importers.import_llmservingsim, LAYERS_FILE,
               "perf_models/H100/meta-llama/Llama-3.1-8B/tp1/layers.csv"),
    "softmax": (importers.import_neusight, SOFTMAX_FILE, "dataset/train/softmax.csv"),
}  # fmt: skip


def _sound(tables: dict[str, pd.DataFrame]) -> None:
    for name, frame in tables.items():
        assert (frame["split"].isin(["train", "test"])).all()
        for column in frame.select_dtypes("number"):
            values = frame[column].to_numpy(float)
            if column == "time_s" or column in data.SIZES:
                assert (values > 0).all(), (name, column)
            assert not (values < 0).any(), (name, column)


@pytest.mark.parametrize("source", SOURCES)
def test_measured_files_are_read_right_or_refused(source, tmp_path):
    run, columns, place = SOURCES[source]
    path = tmp_path / place
    path.parent.mkdir(parents=True)

    @cases(120)
    @given(seeds)
    def every(seed):
        text = text_table(columns, ",", seed)
        path.write_text(text, encoding="latin-1", errors="replace")
        found = answered(lambda: run(tmp_path))
        if found is not None:
            _sound(found)

    path.write_text(text_table(columns, ",", 0) if not columns else _plain(columns))
    assert all(len(frame) for frame in run(tmp_path).values())
    every()


def _plain(columns: dict) -> str:
    return pd.DataFrame(columns).to_csv(index=False)


def test_large_messages_and_contexts_keep_their_size(tmp_path):
    for source, column, most in (
        ("reduce", "message_bytes", 2 * (2**31 - 1)), ("decode", "context_len", 2**31),
    ):  # fmt: skip
        run, columns, place = SOURCES[source]
        path = tmp_path / source / place
        path.parent.mkdir(parents=True)
        path.write_text(_plain(columns | {"step": [2**31 - 1] * 3}))
        (frame,) = run(tmp_path / source).values()
        assert frame[column].max() == most


# Runs of servers ---------------------------------------------------------------------------------

RUNS = {
    "model": ["a/small", "a/small"], "gpu_type": ["NVIDIA A30", "NVIDIA L4"],
    "lambda_qps": [None, 1.0], "measurement_duration": [10.0, 20.0],
    "generation_tokens_total": [100, 200], "gpu_0_power_draw_watts_mean": [120.0, 50.0],
    "time_to_first_token_seconds_events": ["[0.1, 0.2]", "[]"],
    "e2e_request_latency_seconds_events": ["[1.0, 2.0]", "[]"],
    "request_generation_tokens": ["[5, 6]", "[]"],
}  # fmt: skip
MODELS = {
    "model_name": ["a/small"], "model_type": ["llama"], "total_b_params": [1.0],
    "active_b_params": [1.0], "hidden_size": [2048], "num_attention_heads": [16],
    "num_key_value_heads": [16], "num_layers": [16],
}  # fmt: skip
LISTS = [
    "[", "[1e999, 1]", "[-1.0, 2]", "['a']", "{1: 2}", "[[1], [2, 3]]", "(1, 2)", "[1j]",
    "[" * 5000, "-" * 50000 + "1", f"[{10**400}]", "[True, 1]", "[1] + [2]", "[nan]", "b'x'",
    "__import__('os').mkdir('ran')", "[x for x in (1,)]", "[1,\x00]", "[0.5, 1.5]",
]  # fmt: skip


@cases(250)
@given(seeds, st.sampled_from([None, *LISTS]), st.booleans())
def test_runs_of_servers_are_read_right_or_refused(folder, monkeypatch, seed, text, first):
    monkeypatch.chdir(folder)
    runs = RUNS if text is None else RUNS | {
        "time_to_first_token_seconds_events": [text, "[]"],
        "request_generation_tokens": ["[5, 6]", text],
    }  # fmt: skip
    even = text is None
    (folder / "runs.csv").write_text(
        text_table(runs, ",", seed) if first and even else _plain(runs), errors="replace"
    )
    models = _plain(MODELS).replace(",", ";") if first else text_table(MODELS, ";", seed)
    (folder / "models.csv").write_text(models, errors="replace")

    def read():
        found = wattgpu.read_runs(folder / "runs.csv"), wattgpu.read_models(folder / "models.csv")
        return wattgpu.build_table(*found)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pd.errors.DtypeWarning)
        table = answered(read)
    assert not (folder / "ran").exists()
    if table is not None:
        for name in ("power_w", "itl_s", "total_b_params", "hidden_size", "mb_per_token"):
            known = table[name].dropna().to_numpy(float)
            assert np.isfinite(known).all() and (known > 0).all(), name
