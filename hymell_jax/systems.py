"""Measured whole models: the tables under `systems/` as rows of architecture, workload and targets.

Six public sources, each with its own columns, become one table. A row says what ran (device,
engine, architecture, batch, lengths, parallelism) and what was measured; what a source does not say
stays missing. Rows that the model cannot express are counted with the reason, never dropped in
silence.

Conventions of the sources that a reader must know:
- ML.ENERGY v3 gives "expert parallel" with tensor_parallel 1, which in vLLM means that attention is
  tensor parallel over GPUs / data_parallel. Prompt lengths are not published: one unknown constant
  a task. Serving is continuous: newcomers' prefill runs inside decode steps.
- Argonne runs one fixed batch from start to end; time is that of the whole run.
- EnergAIzer locks the clock: the data-sheet rates of a row scale with `clock_share`.
- A fixed batch whose KV cache does not fit runs in turns (`turns`, a fraction above one); a served
  batch that does not fit is not what ran, and is left out.
- Splitwise repeats a case many times; the row is the median of its repeats.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pandas as pd

from hymell_jax import data, devices, models
from hymell_jax.model import memory_use
from hymell_jax.types import Architecture, Workload, architecture, workload

SOURCES: dict[str, tuple[str, str]] = {  # table: (source, licence)
    "mlenergy_v3": ("The ML.ENERGY benchmark v3, ml-energy/leaderboard 0cd52dab", "Apache-2.0"),
    "argonne_latency": ("Argonne LLM-Inference-Bench, argonne-lcf/LLM-Inference-Bench 4211f5d4",
                        "BSD-3-Clause"),
    "argonne_power": ("Argonne LLM-Inference-Bench, argonne-lcf/LLM-Inference-Bench 4211f5d4",
                      "BSD-3-Clause"),
    "energaizer_prefill": ("EnergAIzer artifact, yifueve/energaizer-ispass26-artifact cd607491",
                           "MIT"),
    "splitwise": ("Splitwise, Mutinifni/splitwise-sim 8f99e7dc", "MIT"),
    "serving_silicon": ("NVIDIA aiconfigurator, ai-dynamo/aiconfigurator 095f58a5", "Apache-2.0"),
}  # fmt: skip

COLUMNS: dict[str, str] = {  # column: unit
    "table": "", "device": "", "engine": "", "model": "", "group": "", "task": "", "split": "",
    "batch": "sequences", "turns": "1", "prompt": "tokens", "output": "tokens", "weight_bytes": "B",
    "kv_bytes": "B", "tensor_parallel": "GPUs", "expert_parallel": "GPUs", "clock_share": "1",
    "continuous": "1", "quantised": "", "moe": "",
    "prefill_time_s": "s", "decode_time_s": "s", "decode_median_s": "s", "total_time_s": "s",
    "power_w": "W", "energy_j": "J", "energy_per_output_token_j": "J", "steadiness": "1",
}  # fmt: skip
"""Columns of a row and their units. `group` names the architecture: what is left out together."""

PRESETS: dict[str, str] = {  # model as a source writes it: preset of the same architecture
    "BAAI/Aquila-7B": "aquila-7b",
    "Qwen/Qwen1.5-7B": "qwen1.5-7b",
    "Qwen/Qwen2-72B": "qwen2.5-72b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "Qwen/Qwen3-235B-A22B-Instruct-2507": "qwen3-235b-a22b",
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": "qwen3-235b-a22b",
    "Qwen/Qwen3-235B-A22B-Thinking-2507": "qwen3-235b-a22b",
    "Qwen/Qwen3-235B-A22B-Thinking-2507-FP8": "qwen3-235b-a22b",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    "Qwen/Qwen3-30B-A3B-Thinking-2507": "qwen3-30b-a3b",
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8": "qwen3-coder-480b-a35b",
    "deepseek-ai/DeepSeek-R1-0528": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3.1": "deepseek-v3",
    "facebook/opt-13b": "opt-13b",
    "google/gemma-1.1-7b-it": "gemma-7b",
    "google/gemma-3-27b-it": "gemma-3-27b",
    "huggyllama/llama-13b": "llama-2-13b",
    "huggyllama/llama-7b": "llama-2-7b",
    "llama2-70b": "llama-2-70b",
    "meta-llama/Llama-3.1-405B-Instruct": "llama-3.1-405b",
    "meta-llama/Llama-3.1-405B-Instruct-FP8": "llama-3.1-405b",
    "meta-llama/Llama-3.1-70B": "llama-3-70b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama-3-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3-8b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3-70b",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8": "llama-4-maverick",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama-4-scout",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3-8b",
    "GPT-2": "gpt2",
    "Qwen2-1.5B": "qwen2-1.5b",
}

ARCHITECTURES: dict[str, dict[str, float]] = {
    # BAAI/Aquila-7B config.json: a Llama of its own vocabulary
    "aquila-7b": dict(n_layers=32, d_model=4096, n_heads=32, d_ff=11008, vocab_size=100008),
    # Qwen/Qwen1.5-7B config.json
    "qwen1.5-7b": dict(
        n_layers=32, d_model=4096, n_heads=32, d_ff=11008, vocab_size=151936, qkv_bias=1
    ),
    # facebook/opt-13b config.json
    "opt-13b": dict(
        n_layers=40, d_model=5120, n_heads=40, d_ff=20480, vocab_size=50272, n_ff_matrices=2,
        layer_norm=1, tied_embeddings=1, position_rows=2050, qkv_bias=1, out_bias=1, ff_bias=1,
    ),
    # meta-llama/Llama-4-Scout-17B-16E config.json: three layers of four attend within chunks of
    # 8192 tokens; a chunk is read as a window
    "llama-4-scout": dict(
        n_layers=48, d_model=5120, n_heads=40, n_kv_heads=8, head_dim=128, d_ff=16384,
        vocab_size=202048, n_experts=16, experts_per_token=1, d_expert=8192,
        d_shared_expert=8192, window_fraction=0.75, window_tokens=8192,
    ),
    # meta-llama/Llama-4-Maverick-17B-128E config.json: every second layer holds experts
    "llama-4-maverick": dict(
        n_layers=48, d_model=5120, n_heads=40, n_kv_heads=8, head_dim=128, d_ff=16384,
        vocab_size=202048, n_experts=128, experts_per_token=1, d_expert=8192,
        d_shared_expert=8192, moe_fraction=0.5, window_fraction=0.75, window_tokens=8192,
    ),
}  # fmt: skip
"""Architectures that only these tables need, from the publishers' configuration files."""

TOLERATED_RATE = 1.5  # a run may be this much faster than its weights stream by the data sheet
NOMINAL_PROMPT = 400.0  # tokens, where a source does not say, only to see whether a batch fits
USABLE_MEMORY = 0.9  # of a GPU, for weights and KV cache of a fixed batch
FULL_MEMORY = 0.95  # beyond this a served batch cannot have been running


@functools.cache
def group_architecture(group: str) -> Architecture:
    """The architecture of a row's `group`.

    Raises:
        ValueError: neither a preset nor one of `ARCHITECTURES`.
    """
    if group in ARCHITECTURES:
        return architecture(**ARCHITECTURES[group])
    return models.preset(group).architecture


def _group(name: str) -> str | None:
    """The architecture that a source's model name stands for, None where it is not at hand."""
    known = PRESETS.get(name)
    if known is None:
        try:
            known = models.preset(name).name
        except ValueError:
            return None
    same = {"llama-3.1-8b": "llama-3-8b", "llama-3.1-70b": "llama-3-70b",
            "llama-3.3-70b": "llama-3-70b", "deepseek-r1": "deepseek-v3"}  # fmt: skip
    return same.get(known, known)


def _named(frame: pd.DataFrame, engine: pd.Series, **columns: Any) -> pd.DataFrame:
    """Rows of a source with `COLUMNS` as named here: a column of the source by its name, or values.

    Every source calls device and model as they are called here.
    """
    given = {n: frame[x] if isinstance(x, str) else x for n, x in columns.items()}
    return pd.DataFrame(dict(device=frame["device"], engine=engine, model=frame["model"], **given))


def _mlenergy(frame: pd.DataFrame) -> pd.DataFrame:
    shards = frame["num_gpus"] / frame["data_parallel"]
    reason = np.where(
        frame["architecture"].str.contains("Mamba"),
        "Mamba-2 layers have no equation",
        np.where(frame["data_parallel"] > 1, "attention in data parallel is not modelled", ""),
    )
    return _named(
        frame,
        frame["runtime"],
        task="task",
        batch="avg_batch_size",
        output="avg_output_len",
        weight_bytes=np.where(frame["dtype"] == "fp8", 1.0, 2.0),
        quantised=frame["dtype"] != "bfloat16",
        tensor_parallel=shards,
        expert_parallel="expert_parallel",
        continuous=1.0,
        decode_median_s="median_itl_s",
        decode_time_s=frame["avg_batch_size"] / frame["output_tokens_per_s"],
        power_w="power_w",
        energy_per_output_token_j="energy_per_output_token_j",
        steadiness=frame["p90_itl_s"] / frame["median_itl_s"],
        reason=reason,
    )


def _argonne(frame: pd.DataFrame) -> pd.DataFrame:
    found = _named(
        frame,
        frame["runtime"].str.lower() + "-2024",
        batch="batch",
        prompt="input_len",
        output="output_len",
        tensor_parallel="num_gpus",
        total_time_s="time_s",
    )
    if "power_w" in frame:
        found["power_w"], found["energy_j"] = frame["power_w"], frame["energy_j"]
        shared = frame["power_scope"].str.startswith("sum over all")
        found["reason"] = np.where(shared, "power includes idle GPUs of the node", "")
    return found


def _energaizer(frame: pd.DataFrame) -> pd.DataFrame:
    boost = frame["device"].map(
        {d: float(devices.get_device(d).device.boost_clock_hz) for d in frame["device"].unique()}
    )
    reason = np.where(frame["model"] == "BERT-large", "an encoder, not a decoder", "")
    reason = np.where((reason == "") & (frame["dtype"] != "bf16"), "fp32 is not modelled", reason)
    return _named(
        frame,
        frame["runtime"],
        batch="batch",
        prompt="seq_len",
        output=1.0,
        clock_share=np.minimum(frame["locked_sm_mhz"] * 1e6 / boost, 1.0),
        prefill_time_s="time_s",
        power_w="power_w",
        energy_j="energy_j",
        reason=reason,
    )


def _splitwise(frame: pd.DataFrame) -> pd.DataFrame:
    keys = ["device", "runtime", "model", "tensor_parallel", "batch", "input_len", "output_len"]
    frame = frame.groupby(keys, as_index=False)[
        ["prefill_time_s", "decode_step_time_s", "total_time_s"]
    ].median()
    capped = frame["device"] == "h100-80gb-pcap"
    return _named(
        frame,
        frame["runtime"],
        batch="batch",
        prompt="input_len",
        output="output_len",
        tensor_parallel="tensor_parallel",
        prefill_time_s="prefill_time_s",
        decode_time_s="decode_step_time_s",
        reason=np.where(capped, "copies of the rows without the power cap", ""),
    )


def _silicon(frame: pd.DataFrame) -> pd.DataFrame:
    four_bit = frame["dtype"].isin(["fp4", "int4"])
    unknown = ~frame["dtype"].isin(["fp8", "bf16"]) & ~four_bit
    split = frame["attention_dp_size"].fillna(1.0) > 1
    reason = np.where(split, "attention in data parallel is not modelled", "")
    reason = np.where(four_bit, "4-bit weights have no checkpoint", reason)
    reason = np.where(unknown, "the number format is not given", reason)
    return _named(
        frame,
        frame["runtime"].str.partition("-")[0] + "-2025",
        batch="concurrency",
        prompt="input_len",
        output="output_len",
        weight_bytes=np.where(frame["dtype"] == "fp8", 1.0, 2.0),
        quantised=frame["dtype"] != "bf16",
        tensor_parallel="tp_size",
        expert_parallel="moe_ep_size",
        continuous=1.0,
        prefill_time_s=np.nan,
        decode_time_s="tpot_s",
        reason=reason,
    )


_READERS = {
    "mlenergy_v3": _mlenergy,
    "argonne_latency": _argonne,
    "argonne_power": _argonne,
    "energaizer_prefill": _energaizer,
    "splitwise": _splitwise,
    "serving_silicon": _silicon,
}

_DEFAULTS = dict(
    task="", split="", prompt=np.nan, weight_bytes=2.0, kv_bytes=2.0, tensor_parallel=1.0,
    expert_parallel=1.0, clock_share=1.0, continuous=0.0, quantised=False, prefill_time_s=np.nan,
    decode_time_s=np.nan, decode_median_s=np.nan, total_time_s=np.nan, power_w=np.nan,
    energy_j=np.nan, energy_per_output_token_j=np.nan, steadiness=np.nan, reason="",
)  # fmt: skip


def row_dtype(row: pd.Series) -> str:
    """The compute format of a row, by the bytes of its weights."""
    return {1.0: "fp8", 4.0: "fp32"}.get(row["weight_bytes"], "bf16")


def row_architecture(row: pd.Series) -> Architecture:
    """The architecture of a row: its own where it brings one, else that of its group."""
    return row["architecture"] if "architecture" in row else group_architecture(row["group"])


def row_workload(row: pd.Series, prompt: float | None = None) -> Workload:
    """The workload of a row: the batch that runs at once, prompts as given or `prompt`."""
    known = float(row["prompt"]) if np.isfinite(row["prompt"]) else NOMINAL_PROMPT
    return workload(
        batch_size=max(float(row["batch"]) / float(row.get("turns", 1.0)), 1.0),
        prompt_tokens=known if prompt is None else prompt,
        output_tokens=max(float(row["output"]), 1.0),
        dtype=row_dtype(row),
        tensor_parallel=row["tensor_parallel"],
        expert_parallel=row["expert_parallel"],
    )


def _turns(row: pd.Series) -> float:
    """How often a fixed batch runs because only a part of its KV cache fits at once."""
    if not np.isfinite(row["total_time_s"]):
        return 1.0
    spec = devices.get_device(row["device"]).device
    use = memory_use(group_architecture(row["group"]), row_workload(row), spec)
    room = max(USABLE_MEMORY * float(use.capacity_bytes) - float(use.weights_bytes), 1e9)
    return float(np.clip(float(use.kv_cache_bytes) / room, 1.0, row["batch"]))


def _waits(row: pd.Series) -> bool:
    """Whether part of a served batch must have waited: half-grown sequences do not fit."""
    if not row["continuous"]:
        return False
    half = row.copy()
    half["output"] = max(row["output"] / 2.0, 1.0)
    spec = devices.get_device(row["device"]).device
    use = memory_use(group_architecture(row["group"]), row_workload(half), spec)
    used = float(use.weights_bytes) + float(use.kv_cache_bytes)
    return used > FULL_MEMORY * float(use.capacity_bytes)


def _too_fast(row: pd.Series) -> bool:
    """Whether a run is faster than the data sheet allows: it failed.

    A whole run must read its weights once a token, a prefill pass must compute its products.
    """
    arch = group_architecture(row["group"])
    spec = devices.get_device(row["device"]).device
    width = float(arch.head_dim) * (2 * float(arch.n_heads) + 2 * float(arch.n_kv_heads))
    experts = max(float(arch.experts_per_token), 1.0)
    inner = float(arch.d_expert) * experts if float(arch.n_experts) else float(arch.d_ff)
    layer = float(arch.d_model) * (width + float(arch.n_ff_matrices) * inner)
    active = float(arch.n_layers) * layer / row["tensor_parallel"]
    if np.isfinite(row["total_time_s"]):
        read_s = 2.0 * active / float(spec.memory_bytes_per_s)
        return bool(row["total_time_s"] * TOLERATED_RATE < read_s * row["output"])
    if np.isfinite(row["prefill_time_s"]):
        flops = 2.0 * active * row["batch"] * row["prompt"]
        return bool(row["prefill_time_s"] < flops / float(spec.peak_flops_per_s))
    return False


def read_systems(
    folder: str | os.PathLike[str], tables: tuple[str, ...] = tuple(_READERS)
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measured whole models in one table, and what could not be expressed.

    Args:
        folder: of measured tables.
        tables: which of `SOURCES`; those that the folder lacks are passed over.

    Returns:
        rows with `COLUMNS`, and a table of (table, model, reason, n) of the rows left out.

    Raises:
        ValueError: the folder has none of the tables, a name is not one of `SOURCES`, or a
            measured number is not positive.
    """
    unknown = [name for name in tables if name not in _READERS]
    if unknown:
        raise ValueError(f"There is no table {unknown[0]!r}; known: {', '.join(_READERS)}.")
    root = data.data_folder(folder)
    present = [name for name in tables if data.has_table(root, f"systems/{name}")]
    if not present:
        raise ValueError(f"The data folder {str(folder)!r} holds none of {', '.join(tables)}.")
    frames = []
    for name in present:
        frame = data.read_table(root, f"systems/{name}")
        found = _READERS[name](frame).assign(table=name)
        for column, value in _DEFAULTS.items():
            if column not in found:
                found[column] = value
        frames.append(found)
    rows = pd.concat(frames, ignore_index=True)
    rows["group"] = rows["model"].map({name: _group(name) for name in rows["model"].unique()})
    rows["reason"] = rows["reason"].mask(
        (rows["reason"] == "") & rows["group"].isna(), "the architecture is not at hand"
    )
    known = set(devices.device_names())
    rows["reason"] = rows["reason"].mask(
        (rows["reason"] == "") & ~rows["device"].isin(known), "the device is not known"
    )
    kept = rows[rows["reason"] == ""].copy()
    for test, reason in (
        (_too_fast, "faster than the data sheet allows"),
        (_waits, "the reported batch does not fit into memory"),
    ):
        hit = kept.apply(test, axis=1)
        rows.loc[kept.index[hit], "reason"] = reason
        kept = kept[~hit]
    kept = kept.reset_index(drop=True)
    kept["turns"] = kept.apply(_turns, axis=1)
    kept["moe"] = [float(group_architecture(g).n_experts) > 0 for g in kept["group"]]
    _check(kept)
    left = rows[rows["reason"] != ""]
    counts = left.groupby(["table", "model", "reason"], as_index=False).size()
    return kept[list(COLUMNS)], counts.rename(columns={"size": "n"})


def _check(rows: pd.DataFrame) -> None:
    """Refuse sizes and measurements that are not positive or not of their unit."""
    for column in ("batch", "output", "tensor_parallel", "expert_parallel"):
        if not (np.isfinite(rows[column]) & (rows[column] > 0)).all():
            raise ValueError(f"Column {column} of the systems tables must be positive.")
    limits = {"prefill_time_s": 1e4, "decode_time_s": 1e2, "decode_median_s": 1e2,
              "total_time_s": 1e5, "power_w": 1e5, "energy_j": 1e8}  # fmt: skip
    for column, greatest in limits.items():
        values = rows[column].dropna()
        if not ((values > 0) & (values < greatest)).all():
            raise ValueError(
                f"Column {column} must lie between 0 and {greatest:g} {COLUMNS[column]}."
            )
    product = rows["energy_per_output_token_j"] * rows["batch"] / rows["decode_time_s"]
    ratio = (product / rows["power_w"]).dropna()
    if len(ratio) and not ((ratio > 0.98) & (ratio < 1.02)).all():
        raise ValueError("Joules a token, tokens a second and watts do not agree.")
