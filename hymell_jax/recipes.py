"""How the shipped checkpoints are made: which rows feed which operator, and what is carried over.

`fit_operator` fits a row-wise operator on every device that has rows of it; `fit_level1` makes one
checkpoint per device, runtime and compute format. What a device has no rows for comes from the most
alike device that has, and the checkpoint says so.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from hymell_jax import attention_fit, checkpoint, collectives, data, devices, evaluate, fit, rowwise
from hymell_jax.files import write_whole
from hymell_jax.fit import Progress
from hymell_jax.robust_fit import fit_piecewise
from hymell_jax.types import DTYPES, Device

FUSED_RESIDUAL = ("vllm", "sglang", "trtllm")
"""Runtimes that add the residual inside the norm kernel."""

ROWWISE_OPERATORS = (
    "rmsnorm", "softmax", "layernorm", "rope", "activation", "residual_add", "embedding",
)  # fmt: skip

PART_OPERATOR = {
    "embedding": "embedding",
    "norms": "rmsnorm",
    "qk_norm": "rmsnorm",
    "rope": "rope",
    "kv_write": "residual_add",
    "activation": "activation",
    "residual_add": "residual_add",
}
"""Which fitted operator serves a row-wise part of a layer."""

PARALLEL_BLOCK_MODELS = ("microsoft/phi-2",)
"""Attention and feed-forward in parallel: their residual add has more operands."""

SERVING_KERNEL = {"rmsnorm": "post_attention_layernorm"}
"""Of the kernels of an operator, the one that a serving engine runs most."""

SERVING_RUNTIME = "vidur"
"""Of the row-wise fits: fused kernels, as a serving engine has them."""


PLAIN_WEIGHT = 4.0
"""Weight of attention rows in bf16 without a window, the most used case, over the others."""


def operator_file(folder: str | os.PathLike[str], operator: str) -> Path:
    """Path of the fits of one row-wise operator."""
    return Path(folder) / "operators" / f"{operator}.json"


def operator_rows(folder: Path, operator: str) -> pd.DataFrame:
    """Rows with device, runtime, dtype, kernel, rows, cols, element_bytes, time_s, split.

    `element_bytes` counts what is read and written for one element, over all operands.
    """
    if operator == "rmsnorm":
        frame = data.read_table(folder, "operators/rmsnorm")
        frame = frame.rename(columns={"num_tokens": "rows", "d_model": "cols"})
        return frame.assign(element_bytes=4.0)
    if operator in ("softmax", "layernorm"):
        frame = data.read_table(folder, f"operators/{operator}")
        return frame.assign(element_bytes=8.0, kernel=operator)
    return _layer_part_rows(data.read_table(folder, "blocks/layer_parts_vidur"), operator)


def _layer_part_rows(frame: pd.DataFrame, operator: str) -> pd.DataFrame:
    """One part of a decoder layer as row-wise rows; float16, times rounded to a microsecond."""
    shards = frame["tensor_parallel"]
    head_dim = frame["d_model"] / frame["n_heads"]
    heads = frame["n_heads"] / shards + np.maximum(frame["n_kv_heads"] / shards, 1)
    width = {
        "rope": heads * head_dim,
        "activation": frame["d_ff"] / shards,
        "residual_add": frame["d_model"],
        "embedding": frame["d_model"],
    }[operator]
    column = {
        "rope": "attn_rope_s", "activation": "mlp_act_s", "residual_add": "add_s",
        "embedding": "emb_s",
    }[operator]  # fmt: skip
    moved = {
        "rope": 4.0, "residual_add": 6.0, "embedding": 4.0,
        "activation": np.where(frame["gated_ffn"], 6.0, 4.0),
    }[operator]  # fmt: skip
    rows = frame[["device", "runtime", "dtype", "split", "model"]].assign(
        rows=frame["num_tokens"],
        cols=width,
        element_bytes=moved,
        time_s=frame[column],
        kernel=operator,
    )
    odd = (operator == "residual_add") & rows["model"].isin(PARALLEL_BLOCK_MODELS)
    return rows[(rows["time_s"] > 0) & ~odd].reset_index(drop=True)


def operators_in(folder: Path) -> list[str]:
    """The row-wise operators that the tables have rows for.

    Raises:
        ValueError: none.
    """
    found = [op for op in ROWWISE_OPERATORS if data.has_table(folder, _operator_table(op))]
    if not found:
        raise ValueError(f"The data folder {str(folder)!r} has no table of a row-wise operator.")
    return found


def _operator_table(operator: str) -> str:
    own = operator in ("rmsnorm", "softmax", "layernorm")
    return f"operators/{operator}" if own else "blocks/layer_parts_vidur"


def fit_operator(
    folder: Path, operator: str, *, seed: int = 0, progress: Progress | None = None
) -> dict[str, Any]:
    """Fits of one row-wise operator, one for each device and runtime in the tables."""
    frame = operator_rows(folder, operator)
    keys = ["device", "runtime", "dtype", "kernel"]
    groups = list(frame[frame["split"] == "train"].groupby(keys))
    fits = []
    for index, (key, rows) in enumerate(groups):
        fits.append(_fit_rowwise(operator, dict(zip(keys, key, strict=True)), rows, seed))
        if progress:
            progress(operator, index + 1, len(groups))
    runtimes = sorted(frame["runtime"].unique())
    return {
        "format_version": checkpoint.FORMAT_VERSION,
        "operator": operator,
        "fits": fits,
        "sources": [_source(runtime) for runtime in runtimes],
        "split": "fitted on train rows only",
        "seed": seed,
    }


def _fit_rowwise(operator: str, key: dict[str, str], rows: pd.DataFrame, seed: int):
    """The fit of one operator, device, runtime and kernel: an entry of its file."""
    n, d, element, time_s = data.columns(rows, "rows", "cols", "element_bytes", "time_s")
    far = operator in rowwise.KERNELS  # softmax and LayerNorm are asked for far larger shapes
    staggered = operator == "rmsnorm" and key["runtime"] == SERVING_RUNTIME  # one fused kernel
    refined = rowwise.fit_refined(
        n,
        d,
        time_s,
        devices.get_device(key["device"]).device,
        element if np.ptp(element) else float(element[0]),
        staggered=staggered,
        starts=16 if staggered else 8,
        steps=1000 if far else 1500,
        seed=seed,
        **(rowwise.BEYOND_RANGE if far else rowwise.WITHIN_RANGE),
        **rowwise.KERNELS.get(operator, {}),
    )
    entry = {**key, "n_train": len(rows), "refined": refined}
    if operator in evaluate.PUBLISHED_ROWWISE:
        terms, regime, _ = evaluate.PUBLISHED_ROWWISE[operator]
        matrix = np.asarray(terms(n, d), np.float64)
        fitted = fit_piecewise(matrix, time_s, regime(n, d), len(rowwise.REGIMES))
        entry["published"] = fitted.tolist()
    return entry


def save_operator(content: Mapping[str, Any], folder: str | os.PathLike[str]) -> None:
    """Write the fits of one row-wise operator, whole or not at all."""
    path = operator_file(folder, content["operator"])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _source(runtime: str, **more: Any) -> dict[str, Any]:
    name, licence = data.source_of(runtime)
    return {"name": name, "licence": licence, "runtime": runtime, **more}


def _stream_coefficients(
    device: str, runtime: str, checkpoints: str | os.PathLike[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Coefficients of the row-wise parts, and the device that each comes from."""
    chosen: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for part, operator in PART_OPERATOR.items():
        fits = evaluate.operator_fits(operator, checkpoints)
        serving = [f for f in fits if f["runtime"] == SERVING_RUNTIME] or fits
        source = devices.nearest_measured(device, {f["device"] for f in serving})
        here = [f for f in serving if f["device"] == source]
        kernel = SERVING_KERNEL.get(operator, here[0]["kernel"])
        fitted = next((f for f in here if f["kernel"] == kernel), here[0])
        chosen[part] = {name: np.float32(v) for name, v in fitted["refined"].items()}
        origin[part] = f"{source}, {fitted['runtime']}"
    chosen["residual_fused"] = np.float32(runtime.startswith(FUSED_RESIDUAL))
    return chosen, origin


SERVING_ALL_REDUCE = "vLLM_custom_graph"
"""Of the all-reduce kernels, the one that a serving engine replays in its graphs."""

COLLECTIVE_NAMES = {"alltoall": "all_to_all"}
"""Collectives that the tables call otherwise than `collectives.ROUNDS`."""


def fit_all_reduce(
    folder: str | os.PathLike[str], device: str, *, seed: int = 0
) -> tuple[dict[str, Any], str]:
    """Coefficients of the collective that a model's layers wait for, and where its rows come from.

    The serving engine's own kernels (custom ones for short messages, NCCL for long ones) where
    there are rows of them, else NCCL's. A device without rows takes those of the one with the link
    most alike; tables without any give the defaults, and "not measured".

    Args:
        folder: of measured tables.
        device: exact name.
        seed: of the fit.

    Returns:
        Coefficients, and "device, runtime, kernel".

    Raises:
        ValueError: an unknown device, or a table of collectives without train rows.
    """
    if not data.has_table(Path(folder), "operators/collectives"):
        return collectives.default_coefficients(), "not measured"
    frame = data.read_table(Path(folder), "operators/collectives")
    frame = frame[frame["split"] == "train"]
    frame = frame.assign(collective=frame["collective"].replace(COLLECTIVE_NAMES))
    frame = frame[frame["collective"].isin(collectives.ROUNDS)]
    source = devices.nearest_linked(device, set(frame["device"].unique()))
    rows = frame[(frame["device"] == source) & (frame["collective"] == "all_reduce")]
    if rows.empty:
        return collectives.default_coefficients(), "not measured"
    serving = rows["kernel"] == SERVING_ALL_REDUCE
    rows = rows[serving] if serving.any() else rows[rows["kernel"] == "NCCL"]
    newest = max(rows["runtime"].unique(), key=checkpoint.version_key)
    rows = rows[rows["runtime"] == newest]
    fitted = collectives.fit_collectives(
        devices.get_device(source).device,
        {size: rows[size].to_numpy(np.float64) for size in ("message_bytes", "num_gpus")},
        rows["time_s"].to_numpy(np.float64),
        collective="all_reduce",
        seed=seed,
    )
    found = {key: np.float32(value) for key, value in fitted.items()}
    return found, f"{source}, {newest}, {rows['kernel'].iloc[0]}"


def _fit_attention(folder, device, runtime, spec, seed) -> tuple[dict[str, Any], str, int]:
    """Both phases, from rows of the device or of the most alike one; (coefficients, origin, n)."""
    found: dict[str, float] = {}
    count, origin = 0, f"{device}, {runtime}"
    for phase, tokens in (("prefill", "seq_len"), ("decode", "context_len")):
        frame = data.read_table(folder, f"blocks/attention_{phase}")
        frame = frame[frame["split"] == "train"]
        here = frame[(frame["device"] == device) & (frame["runtime"] == runtime)]
        if here.empty:
            near = devices.nearest_measured(spec, set(frame["device"].unique()))
            here = frame[frame["device"] == near]
            newest = max(here["runtime"].unique(), key=checkpoint.version_key)
            here, origin = here[here["runtime"] == newest], f"{near}, {newest}"
        source = devices.get_device(origin.split(",")[0]).device
        kv_bytes = np.where(here["kv_dtype"] == "fp8", 1.0, 2.0)
        names = ("batch", tokens, "n_heads", "n_kv_heads", "head_dim", "window_size", "time_s")
        batch, length, heads, kv_heads, head_dim, window, time_s = data.columns(here, *names)
        found |= attention_fit.fit_attention(
            phase,
            source,
            batch,
            length,
            heads,
            kv_heads,
            head_dim,
            window,
            kv_bytes,
            time_s,
            np.where((kv_bytes == 2.0) & (here["window_size"] == 0), PLAIN_WEIGHT, 1.0),
            seed=seed,
        )
        count += len(here)
    return {name: np.float32(value) for name, value in found.items()}, origin, count


def _power(content, frame, spec, folder, dtype, seed, progress) -> None:
    """Power coefficients: fitted where power was measured, else carried over by the data sheet."""
    element = DTYPES[dtype]
    name, runtime = content["device"], content["runtime"]
    if "power_w" not in frame or not frame["power_w"].notna().any():
        every = data.read_table(folder, "operators/gemm")
        measured = every[every["power_w"].notna()]
        source = devices.nearest_measured(spec, set(measured["device"].unique()))
        rows = measured[measured["device"] == source]
        runtime = max(rows["runtime"].unique(), key=checkpoint.version_key)
        rows = rows[rows["runtime"] == runtime]
        frame = rows[rows["dtype"] == data.table_dtype(rows, dtype)]
        name = source
    train = frame[(frame["split"] == "train") & frame["power_w"].notna()]
    device = devices.get_device(name).device
    fitted, _ = fit.fit_power(
        device,
        *data.columns(train, "m", "n", "k", "time_s", "power_w"),
        element_bytes=element,
        seed=seed,
        progress=progress,
    )
    content["coefficients"]["power"] = fitted
    same = name == content["device"] and runtime == content["runtime"]
    content["energy"] = "fitted" if same or name == content["device"] else "transferred"
    content["energy_from"] = f"{name}, {runtime}"
    content["energy_note"] = (
        f"Power is fitted on GEMM rows of {fit.SOUND_POWER_S * 1e6:.0f} us or longer; labels of "
        "shorter rows carry what ran before and are lower bounds. Shares of the board's range "
        "between idle and limit carry over to other devices."
    )
    if element == 1.0 and data.table_dtype(frame, "bf16"):
        content["energy_note"] += " fp8 rows."


def fittable(
    folder: Path, device: str, runtime: str | None = None, dtype: str | None = None
) -> list[tuple[str, str, str]]:
    """(device, runtime, dtype) with matrix products in the tables, as asked for.

    Raises:
        ValueError: none matches; the message lists what there is.
    """
    frame = data.read_table(folder, "operators/gemm")
    found = []
    for (name, engine), rows in frame.groupby(["device", "runtime"]):
        found += [(name, engine, d) for d in DTYPES if data.table_dtype(rows, d)]
    chosen = [
        entry
        for entry in found
        if device in ("all", entry[0]) and runtime in (None, entry[1]) and dtype in (None, entry[2])
    ]
    if not chosen:
        shown = "; ".join(" ".join(entry) for entry in found)
        raise ValueError(f"No matrix products of {device}, {runtime}, {dtype}. There are: {shown}.")
    return chosen


def fit_level1(
    device: str,
    runtime: str,
    dtype: str,
    folder: str | os.PathLike[str],
    checkpoints: str | os.PathLike[str],
    *,
    seeds: tuple[int, ...] = (0,),
    gemm_fits: Mapping[int, tuple[dict[str, np.ndarray], float]] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """A level-1 checkpoint of one device, runtime and compute format, ready for `checkpoint.save`.

    The matrix product is fitted from each seed and the least train error kept. Row-wise operators
    come from the fits in `checkpoints` (`fit_operator` makes them).

    Args:
        device: exact name.
        runtime: as in the tables.
        dtype: "bf16" or "fp8".
        folder: of measured tables.
        checkpoints: folder with the operator fits.
        seeds: of the matrix-product fits.
        gemm_fits: (coefficients, loss) of seeds that were fitted before.
        progress: called with (what, done, total).

    Raises:
        ValueError: no rows for this device, runtime and format.
    """
    root = Path(folder)
    spec, element = devices.get_device(device), DTYPES[dtype]
    frame = data.gemm_rows(root, device, runtime, dtype)
    train = frame[frame["split"] == "train"]
    m, n, k, time_s = data.columns(train, "m", "n", "k", "time_s")
    fits = dict(gemm_fits or {})
    for seed in seeds:
        if seed not in fits:
            fits[seed] = fit.fit_gemm(
                spec.device, m, n, k, time_s, element_bytes=element, seed=seed, progress=progress
            )
    best = min(seeds, key=lambda seed: fits[seed][1])
    gemm_coefficients, loss = fits[best]
    stream, stream_origin = _stream_coefficients(device, runtime, checkpoints)
    attention_coefficients, attention_origin, n_attention = _fit_attention(
        root, device, runtime, spec, seeds[0]
    )
    all_reduce, all_reduce_origin = fit_all_reduce(root, device, seed=seeds[0])
    content: dict[str, Any] = {
        "format_version": checkpoint.FORMAT_VERSION,
        "level": 1,
        "device": device,
        "runtime": runtime,
        "dtype": dtype,
        "time": "fitted",
        "coefficients": {
            "gemm": gemm_coefficients,
            "stream": stream,
            "attention": attention_coefficients,
            "linear": checkpoint.default_linear_coefficients(),
            "collectives": all_reduce,
        },
        "domain": {
            f"gemm_log_{name}_{end}": np.float32(np.log(getattr(np, end)(values)))
            for name, values in (("m", m), ("n", n), ("k", k))
            for end in ("min", "max")
        },
        "published": {"gemm_time_s": fit.fit_published_gemm(m, n, k, time_s, element).tolist()},
        "origins": {
            "gemm": f"{device}, {runtime}, {train['dtype'].iloc[0]}",
            "attention": attention_origin,
            **stream_origin,
            "linear": "not fitted at level 1",
            "collectives": all_reduce_origin,
        },
        "sources": [
            _source(runtime, table="operators/gemm", rows_train=len(train),
                    rows_test=int((frame["split"] == "test").sum())),
            _source(runtime, table="blocks/attention", rows_train=n_attention),
            _source(SERVING_RUNTIME, table="operators/rmsnorm, blocks/layer_parts_vidur"),
        ],
        "recipe": {
            "seeds": list(seeds), "seed_kept": best, "train_loss": round(loss, 5),
            "stages": fit.GEMM_STAGES,
        },
        "split": "fitted on train rows only; test rows are shapes never trained on",
        "libraries": {p: importlib.metadata.version(p) for p in ("jax", "optax", "numpy")},
    }  # fmt: skip
    if "energy_j" in train and train["energy_j"].notna().all():
        (joules,) = data.columns(train, "energy_j")
        published = fit.fit_published_gemm(m, n, k, joules, element)
        content["published"]["gemm_energy_j"] = published.tolist()
    _power(content, frame, spec, root, dtype, seeds[0], progress)
    content["errors"] = _errors(content, frame)
    content["replay"] = replay_rows(content, spec.device, train, element)
    return content


def _errors(content, frame) -> list[dict[str, Any]]:
    rows = []
    for split in ("train", "test"):
        chosen = frame[frame["split"] == split]
        rows += [
            {"split": split, **row} for row in evaluate.gemm_errors(content, chosen, "refined")
        ]
    return rows


def replay_rows(
    content: Mapping[str, Any], device: Device, train: pd.DataFrame, element: float
) -> list[dict[str, float]]:
    """Five train rows and the predicted seconds and watts, for tests to repeat."""
    rows = train.iloc[np.linspace(0, len(train) - 1, 5).astype(int)]
    m, n, k, measured = data.columns(rows, "m", "n", "k", "time_s")
    c = jax.tree.map(np.asarray, content["coefficients"])
    time_s = np.exp(fit.gemm_log_time(c["gemm"], device, m, n, k, element))
    watts = np.exp(fit.gemm_log_power(c["power"], device, m, n, k, time_s, element))
    return [
        dict(m=float(a), n=float(b), k=float(d), measured_time_s=float(e), time_s=float(t),
             power_w=float(w))
        for a, b, d, e, t, w in zip(m, n, k, measured, time_s, watts, strict=True)
    ]  # fmt: skip
