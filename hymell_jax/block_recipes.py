"""How the level-2 networks of a checkpoint are made: which rows feed which block, and settings.

`fit_blocks` fits every block that a device, runtime and compute format has rows for. What a device
has no rows for stays at level 1. Settings were chosen with whole shapes left out inside train.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from hymell_jax import attention, blocks, checkpoint, data, devices, latent, linear, mlp, moe
from hymell_jax.fit import Progress
from hymell_jax.types import DTYPES, Device

_LN2, _LN4 = float(np.log(2.0)), float(np.log(4.0))
SETTINGS: dict[str, dict[str, Any]] = {
    "attention_prefill": {"hidden": (63, 63), "bound": _LN4, "steps": 4000, "members": 4,
                          "learning_rate": 1e-2, "weight_decay": 1e-3},
    "attention_decode": {"hidden": (63, 63), "bound": _LN4, "steps": 8000, "members": 5,
                         "learning_rate": 1e-2, "weight_decay": 1e-3},
    "experts": {"hidden": (30, 30), "bound": _LN2, "steps": 3000, "members": 3,
                "weight_decay": 1e-2},
    "linear": {"hidden": (24, 24), "bound": _LN2, "steps": 3000, "members": 3,
               "weight_decay": 1e-2},
    "latent": {"hidden": (30, 30), "bound": _LN2, "steps": 4000, "members": 3,
               "weight_decay": 1e-2},
}  # fmt: skip
"""Network and training of each kind of block (`mlp.MLPSpec`, `mlp.fit_ensemble`).

`MEASURED_SETTINGS` holds what is chosen for single devices alone.
"""

MEASURED_SETTINGS: dict[tuple[str, str, str], dict[str, Any]] = {
    ("attention_prefill", "l40s-48gb", "vllm-0.24.0"): {"steps": 24000, "batch": 512},
    ("attention_prefill", "b200-sxm-180gb", "vllm-0.22.0"):
        {"steps": 24000, "batch": 512, "embedding": 6},
}  # fmt: skip
"""(block, device, runtime): settings in place of those of its kind, chosen for that device alone.

Two folds of head layouts left out of train, bf16 without a window. L40S: 5.4 to 4.4 %; its times
step between 1 and 16 prompt tokens, which takes long to learn. B200, vLLM 0.22.0: 4.0 to 3.2 %, all
but 0.1 of it by the narrow embedding, which tells less of one head layout from another.
"""

PUBLISHED_SETTINGS: dict[str, dict[str, Any]] = {
    "attention": {"hidden": (384,) * 4, "epochs": 2000, "learning_rate": 5e-5,
                  "weight_decay": 1e-5, "loss": "smooth_l1"},
    "experts": {"hidden": (64,) * 4, "epochs": 500, "learning_rate": 2e-3,
                "weight_decay": 1e-6, "loss": "squared"},
}  # fmt: skip
"""Network sizes and training as HYMELL states them (arXiv 2608.06723); see `published_settings`."""

PLAIN_WEIGHT = 2.0
"""Weight of attention rows in bf16 without a window, the most used case, over the others."""

IMPLAUSIBLE = 1.5

CHUNK_ROWS = 2048
"""Rows a call, so that every table is evaluated by one compiled program a block."""

UNGATED_EXPERTS = {(2048, 5120, 22, 512), (2688, 1856, 6, 128), (1024, 2688, 22, 512)}
"""(d_model, d_expert, top_k, n_experts) of models with two matrices an expert (Nemotron-H), as the
0.24.0 tables time them; older tables time three."""

MEASURED_KERNELS = {("b200-sxm-180gb", "vllm-0.24.0"): "trtllm"}
"""Where a table mixes kernels: the one that the engine takes, by a part of its name."""


def block_rows(
    name: str, folder: str | os.PathLike[str], device: str, runtime: str, dtype: str
) -> pd.DataFrame:
    """Measured rows of one block; columns named as its level-1 form names its sizes.

    Empty where nothing was measured.
    """
    if name in blocks.ATTENTION_BLOCKS:
        return _attention_rows(name, folder, device, runtime)
    if name == "experts":
        return _expert_rows(folder, device, runtime, dtype)
    if name in blocks.LINEAR_BLOCKS:
        return _linear_rows(name, folder, device, runtime)
    return _latent_rows(name, folder, device, runtime, dtype)


def _table(folder, table: str, device: str, runtime: str) -> pd.DataFrame:
    if not data.has_table(Path(folder), table):
        return pd.DataFrame()
    return data.read_table(folder, table, device=device, runtime=runtime)


def _attention_rows(name, folder, device, runtime) -> pd.DataFrame:
    frame = _table(folder, f"blocks/{name}", device, runtime)
    if frame.empty:
        return frame
    frame = frame.rename(columns={"seq_len": "tokens", "context_len": "tokens"})
    fp8 = frame["kv_dtype"] == "fp8"
    plain = ~fp8 & (frame["window_size"] == 0)
    return frame.assign(
        value_head_dim=frame["head_dim"],
        window_tokens=frame["window_size"],
        kv_bytes=np.where(fp8, 1.0, 2.0),
        weight=np.where(plain, PLAIN_WEIGHT, 1.0),
        plain=plain,
    )


def _expert_rows(folder, device, runtime, dtype) -> pd.DataFrame:
    frame = _table(folder, "blocks/moe", device, runtime)
    if frame.empty:
        return frame
    frame = frame[frame["dtype"] == data.DTYPE_NAMES[dtype][0]]
    kernel = MEASURED_KERNELS.get((device, runtime), "")
    frame = frame[frame["kernel"].str.contains(kernel) | (frame["split"] == "test")]
    names = {"num_tokens": "tokens", "moe_tp_size": "tensor_parallel",
             "moe_ep_size": "expert_parallel"}  # fmt: skip
    frame = frame.rename(columns=names).reset_index(drop=True)
    shape = zip(
        *(frame[c].astype(int) for c in ("d_model", "d_expert", "top_k", "n_experts")), strict=True
    )
    plain = np.array([s in UNGATED_EXPERTS for s in shape], bool) & (runtime == "vllm-0.24.0")
    return frame.assign(
        exponent=frame["distribution"].map(moe.POWER_LAWS).astype(float),
        weight_bytes=DTYPES[dtype],
        n_matrices=np.where(plain, 2.0, 3.0),
        weight=1.0,
    )


def _linear_rows(name, folder, device, runtime) -> pd.DataFrame:
    frame = _table(folder, "blocks/linear_attention", device, runtime)
    if frame.empty:
        return frame
    role = frame["kernel"].map(linear.KERNEL_NAMES)
    frame = frame[role == name.removeprefix("linear_")].reset_index(drop=True)
    names = {"num_k_heads": "k_heads", "num_v_heads": "v_heads", "head_k_dim": "k_dim",
             "head_v_dim": "v_dim"}  # fmt: skip
    return frame.rename(columns=names).assign(weight=1.0)


def _latent_rows(name, folder, device, runtime, dtype) -> pd.DataFrame:
    frame = _table(folder, "blocks/mla", device, runtime)
    if frame.empty:
        return frame
    wanted = {"bf16": "bfloat16", "fp8": "fp8_block"}[dtype]
    phase = name.removeprefix("latent_")
    frame = frame[(frame["dtype"] == wanted) & (frame["phase"] == phase)].reset_index(drop=True)
    return frame.assign(
        tokens=frame["context_len"],
        weight_bytes=DTYPES[dtype],
        kv_bytes=np.where(frame["kv_dtype"] == "fp8", 1.0, 2.0),
        weight=1.0,
    )


ATTENTION_SIZES = (
    "batch", "tokens", "n_heads", "n_kv_heads", "head_dim", "value_head_dim", "window_tokens",
    "kv_bytes",
)  # fmt: skip


def size_names(name: str) -> tuple[str, ...]:
    """The sizes that a block's level-1 form takes, in order: columns of `block_rows`."""
    if name in blocks.ATTENTION_BLOCKS:
        return ATTENTION_SIZES
    if name == "experts":
        return moe.MOE_SIZES
    return linear.LINEAR_SIZES if name in blocks.LINEAR_BLOCKS else latent.LATENT_SIZES


def block_sizes(name: str, frame: pd.DataFrame) -> list[np.ndarray]:
    """The columns of `size_names`, float32 arrays [n_rows]."""
    return [frame[column].to_numpy(np.float32) for column in size_names(name)]


def level1_form(
    name: str, coefficients: Mapping[str, Any], device: Device, *sizes
) -> tuple[jax.Array, jax.Array]:
    """(seconds [n_rows], features [n_rows, n]) of a block at level 1, sizes by `size_names`."""
    key = name.partition("_")[2]
    if name in blocks.ATTENTION_BLOCKS:
        time_s, _ = attention.ATTENTION_TIME_S[key](coefficients, device, *sizes)
        return time_s, blocks.attention_features.attention_features(
            key, coefficients, device, *sizes
        )
    if name == "experts":
        time_s, _ = moe.moe_time_s(coefficients, device, *sizes)
        return time_s, moe.moe_features(coefficients, device, *sizes)
    if name in blocks.LINEAR_BLOCKS:
        time_s, _ = linear.linear_kernel_time_s(key, coefficients, device, *sizes)
        return time_s, linear.linear_features(key, coefficients, device, *sizes)
    time_s, _ = latent.latent_time_s(key, coefficients, device, *sizes)
    return time_s, latent.latent_features(key, coefficients, device, *sizes)


def level1(name: str, coefficients: Mapping[str, Any], device: Device, frame: pd.DataFrame):
    """(ln seconds [n_rows], features [n_rows, n]) of measured rows at level 1."""
    run = jax.jit(lambda *sizes: level1_form(name, coefficients, device, *sizes))
    time_s, features = run(*block_sizes(name, frame))
    return np.log(np.asarray(time_s, np.float64)), np.asarray(features)


def _fit_level1(name: str, device: Device, train: pd.DataFrame, seed: int) -> dict[str, float]:
    sizes = dict(zip(size_names(name), block_sizes(name, train), strict=True))
    time_s = train["time_s"].to_numpy()
    key = name.partition("_")[2]
    if name == "experts":
        return moe.fit_moe(device, sizes, time_s, seed=seed)
    if name in blocks.LINEAR_BLOCKS:
        return linear.fit_linear(key, device, sizes, time_s, max_rows=3000, seed=seed)
    return latent.fit_latent(key, device, sizes, time_s, max_rows=3000, seed=seed)


def _faster_than_less_work(frame: pd.DataFrame) -> np.ndarray:
    """Attention rows more than `IMPLAUSIBLE` times faster than one with fewer sequences.

    Kernels switch there (head dimension 512, more than 512 sequences); a time that does not
    decrease in the batch cannot follow, and the rows would only pull at the others.
    """
    layout = ["n_heads", "n_kv_heads", "head_dim", "window_tokens", "kv_bytes", "tokens", "split"]
    ordered = frame.sort_values("batch")
    slowest = ordered.groupby(layout)["time_s"].cummax()
    return (slowest > IMPLAUSIBLE * ordered["time_s"]).reindex(frame.index).to_numpy()


def _trainable(name: str, device: str, runtime: str, frame: pd.DataFrame) -> np.ndarray:
    """Train rows without those of other kernels."""
    use = (frame["split"] == "train").to_numpy().copy()
    if name in blocks.ATTENTION_BLOCKS:
        return use & ~_faster_than_less_work(frame)
    if name != "experts":
        return use
    if device.startswith("a100"):  # few tokens over many GPUs: half of the rows are a floor
        few = (frame["expert_parallel"] > 1) & (
            frame["tokens"] * frame["top_k"] <= 4 * frame["n_experts"]
        )
        use = use & ~few.to_numpy()
    return use


def published_settings(name: str, n_rows: int, batch: int = 1024, **changes: Any) -> dict[str, Any]:
    """Settings of `fit_block` with the network and training that HYMELL states.

    A plain network: four hidden layers, AdamW, standardised inputs and targets. Not stated and
    chosen here: SiLU, the batch, a cosine schedule, and a fixed number of epochs for the experts
    where HYMELL stops early. Inputs and the bounded correction of level 1 stay those of
    `fit_block`.

    Args:
        name: an attention core or "experts".
        n_rows: of the training set, to count epochs.
        batch: rows a step.
        changes: in place of single settings, for example `steps=` to train for less.

    Raises:
        ValueError: a block that HYMELL has no network for.
    """
    kind = "attention" if name in blocks.ATTENTION_BLOCKS else name
    if kind not in PUBLISHED_SETTINGS:
        raise ValueError(f"HYMELL states no network for {name!r}, only for attention and experts.")
    stated = dict(PUBLISHED_SETTINGS[kind])
    steps = -(-stated.pop("epochs") * n_rows // batch)
    found = {"bound": _LN4, "members": 1, "n_monotone": 0, "steps": steps, "batch": batch}
    return found | stated | changes


def fit_block(
    name: str,
    folder: str | os.PathLike[str],
    device: str,
    runtime: str,
    dtype: str,
    attention_coefficients: Mapping[str, Any],
    *,
    settings: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any] | None:
    """One block fitted on train rows, as a checkpoint holds it; None without rows.

    Args:
        name: one of `blocks.BLOCKS`.
        folder: of measured tables.
        device, runtime, dtype: what was measured.
        attention_coefficients: of level 1, both phases; used by the attention cores.
        settings: in place of `SETTINGS` of its kind and of `MEASURED_SETTINGS`.
        seed: of the first member of the ensemble; the others follow it.
        progress: called with (what, done, total).
    """
    frame = block_rows(name, folder, device, runtime, dtype)
    if frame.empty or not (frame["split"] == "train").any():
        return None
    spec_sheet = devices.get_device(device).device
    use = _trainable(name, device, runtime, frame)
    own = {} if name in blocks.ATTENTION_BLOCKS else _fit_level1(
        name, spec_sheet, frame[use], seed
    )  # fmt: skip
    base, features = level1(name, own or attention_coefficients, spec_sheet, frame)
    measured = np.log(frame["time_s"].to_numpy())
    kind = name if name in SETTINGS else name.partition("_")[0]
    own_settings = MEASURED_SETTINGS.get((name, device, runtime), {})
    options = dict(settings or SETTINGS[kind] | own_settings)
    seeds = tuple(seed + member for member in range(options.pop("members")))
    n_monotone = options.pop("n_monotone", blocks.feature_names(name)[1])
    shape = {key: options.pop(key) for key in ("hidden", "bound", "embedding") if key in options}
    spec = mlp.MLPSpec(**shape, n_monotone=n_monotone)
    normalizer = mlp.fit_normalizer(features[use])
    params = mlp.fit_ensemble(
        np.asarray(mlp.normalise(normalizer, features[use])),
        base[use],
        measured[use],
        spec,
        weights=frame["weight"].to_numpy()[use],
        scale=float(mlp.level1_scale(spec, normalizer)),
        seeds=seeds,
        progress=progress and (lambda _, done, total: progress(name, done, total)),
        **options,
    )
    fitted: dict[str, Any] = {
        "coefficients": {key: np.float32(value) for key, value in own.items()},
        "spec": spec,
        "params": params,
        "normalizer": normalizer,
    }
    block = blocks.Block(**fitted)
    return fitted | {
        "rows_train": int(use.sum()),
        "rows_test": int((frame["split"] == "test").sum()),
        "errors": block_errors(name, block, attention_coefficients, spec_sheet, frame),
    }


def tune_block(
    name: str,
    source: blocks.Block,
    coefficients: Mapping[str, Any],
    device: Device,
    frame: pd.DataFrame,
    *,
    steps: int = 1000,
    learning_rate: float = 2e-3,
    weight_decay: float = 1e-3,
    members: int | None = None,
    seed: int = 0,
) -> blocks.Block:
    """A block whose networks start at those of another device and train on rows of this one.

    Args:
        name: one of `blocks.BLOCKS`.
        source: the block of the other device.
        coefficients: of level 1 on this device.
        device: data sheet of this one.
        frame: its rows to train on, as `block_rows` returns them.
        steps, learning_rate, weight_decay: of `mlp.fit_ensemble`.
        members: how many networks of the ensemble to keep; by default all.
        seed: of the choice of rows.
    """
    start = jax.tree.map(lambda leaf: np.asarray(leaf)[:members], source.params)
    base, features = level1(name, coefficients, device, frame)
    known = source.normalizer  # means and units stay, so that the weights mean the same
    normalizer = dataclasses.replace(
        known,
        low=np.minimum(np.asarray(known.low), features.min(0)),
        high=np.maximum(np.asarray(known.high), features.max(0)),
    )
    params = mlp.fit_ensemble(
        np.asarray(mlp.normalise(normalizer, features)),
        base,
        np.log(frame["time_s"].to_numpy()),
        source.spec,
        steps=steps,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        scale=float(mlp.level1_scale(source.spec, normalizer)),
        seeds=tuple(seed + i for i in range(len(jax.tree.leaves(start)[0]))),
        start=start,
    )
    own = {} if name in blocks.ATTENTION_BLOCKS else dict(coefficients)
    return blocks.Block(coefficients=own, params=params, normalizer=normalizer, spec=source.spec)


@functools.partial(jax.jit, static_argnames="name")
def _seconds(name, block, coefficients, device, sizes):
    """(level 1 [n_rows], level 2 [n_rows]) seconds of a block."""
    key = name.partition("_")[2]
    own = block.coefficients or coefficients
    level1_s, features = level1_form(name, own, device, *sizes)
    if name in blocks.ATTENTION_BLOCKS:
        found = blocks.attention_time(block, key, own, device, level1_s, *sizes)
    else:
        found = blocks.corrected(block, level1_s, features)
    return level1_s, found.time_s


def block_seconds(
    name: str, block: blocks.Block, coefficients, device: Device, frame: pd.DataFrame
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds [n_rows] of measured rows at level 1 and at level 2.

    Args:
        name: one of `blocks.BLOCKS`.
        block: trained.
        coefficients: of level-1 attention, used by the attention cores.
        device: data sheet.
        frame: as `block_rows` returns it.
    """
    sizes = block_sizes(name, frame)
    found = []
    for start in range(0, len(frame), CHUNK_ROWS):
        part = [column[start : start + CHUNK_ROWS] for column in sizes]
        full = tuple(np.pad(x, (0, CHUNK_ROWS - len(x)), mode="edge") for x in part)
        seconds = _seconds(name, block, coefficients, device, full)
        found.append([np.asarray(x, np.float64)[: len(part[0])] for x in seconds])
    one, two = (np.concatenate(columns) for columns in zip(*found, strict=True))
    return one, two


def block_errors(
    name: str, block: blocks.Block, attention_coefficients, device: Device, frame: pd.DataFrame
) -> list[dict[str, Any]]:
    """MAPE in percent by split, at level 1 and at level 2; plain attention rows apart.

    Arguments as in `block_seconds`.
    """
    seconds = block_seconds(name, block, attention_coefficients, device, frame)
    measured = frame["time_s"].to_numpy()
    plain = frame["plain"].to_numpy() if "plain" in frame else np.ones(len(frame), bool)
    rows = []
    for split in ("train", "test"):
        for case, mask in (("all", np.ones(len(frame), bool)), ("bf16 full", plain)):
            here = (frame["split"] == split).to_numpy() & mask
            if not here.any() or (case != "all" and name not in blocks.ATTENTION_BLOCKS):
                continue
            one, two = (100.0 * np.abs(x / measured - 1.0)[here] for x in seconds)
            rows.append({"split": split, "rows": case, "n": int(here.sum()),
                         "level1_mape": round(float(one.mean()), 3),
                         "level2_mape": round(float(two.mean()), 3),
                         "level2_mdape": round(float(np.median(two)), 3)})  # fmt: skip
    return rows


ANY_FORMAT = (*blocks.ATTENTION_BLOCKS, *blocks.LINEAR_BLOCKS)
"""Blocks whose rows serve every compute format: theirs depends on the cache, or on nothing."""


def add_blocks(
    content: dict[str, Any],
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Fit the blocks that a checkpoint lacks, and write it anew after each.

    A block that serves every compute format is taken from the checkpoint of another one, where
    that has it, so that it is fitted once.

    Args:
        content: of `checkpoint.read` or `recipes.fit_level1`; gains `blocks`.
        folder: of measured tables.
        out: folder of checkpoints.
        seed: of the fits.
        progress: called with (what, done, total).
    """
    device, runtime, dtype = (content[field] for field in ("device", "runtime", "dtype"))
    shared: dict[str, Any] = {}
    for other in checkpoint.available(out):
        if other[:2] == (device, runtime) and other[2] != dtype:
            shared |= checkpoint.read(*other, folder=out).get("blocks", {})
    held = content.setdefault("blocks", {})
    for name in blocks.BLOCKS:
        if name in held:
            continue
        fitted = shared.get(name) if name in ANY_FORMAT else None
        fitted = fitted or fit_block(
            name, folder, device, runtime, dtype, content["coefficients"]["attention"],
            seed=seed, progress=progress,
        )  # fmt: skip
        if fitted is not None:
            held[name] = fitted
            content["level"] = 2
            checkpoint.save(content, out)
