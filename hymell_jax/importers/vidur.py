"""Layer parts and RMSNorm times from Microsoft Vidur (MIT, microsoft/vidur).

A checkout holds `data/profiling/compute/<gpu>/<organisation>/<model>/mlp.csv`: one row per number
of tokens and tensor-parallel degree, with `time_stats.<part>.{min,max,mean,median,std}` in
milliseconds (resolution 1 us) and the model's widths. Medians are taken. The files name no dtype;
the profiler runs in float16.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd

from .tables import (
    existing_folder,
    finish_with_norms,
    read_table,
    require_columns,
    seconds,
    whole_numbers,
)

GPUS: dict[str, str] = {"a100": "a100-sxm-80gb", "a40": "a40-48gb", "h100": "h100-sxm-80gb"}
"""The source's folder names, and our device names."""

TEST_MODELS = ("meta-llama/Llama-2-7b-hf", "meta-llama/Meta-Llama-3-8B")
"""Models whose layer parts are for testing; RMSNorm rows are split by their shape instead."""

TABLES = ("blocks/layer_parts_vidur", "operators/rmsnorm")

_MS = 1e-3
_PARTS = (
    *("emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj"),
    *("post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add"),
)
_OPTIONAL = ("post_attention_layernorm",)  # absent in models with parallel blocks
_WHOLE = {
    "num_tokens": "num_tokens",
    "tensor_parallel": "num_tensor_parallel_workers",
    "n_heads": "n_head",
    "n_kv_heads": "n_kv_head",
    "d_model": "n_embd",
    "d_ff": "n_expanded_embd",
    "vocab_size": "vocab_size",
}
_LAYER_NORM_MODELS = ("microsoft/phi-2",)  # their norms are LayerNorm


def import_vidur(path: str | os.PathLike[str]) -> dict[str, pd.DataFrame]:
    """Tidy tables "blocks/layer_parts_vidur" and "operators/rmsnorm".

    RMSNorm rows are the medians over models and tensor-parallel degrees of one width, since the
    norm runs on the whole width whatever the degree.

    Args:
        path: a checkout of the repository, or a folder inside it down to `compute`.

    Raises:
        ValueError: no profiles at `path`, a damaged file, missing columns, a time that is not
            positive.
    """
    base = existing_folder(path, "The Vidur checkout")
    frames = [_rows(file, gpu, model) for file, gpu, model in _profiles(base)]
    parts = pd.concat(frames, ignore_index=True)
    split = np.where(parts["model"].isin(TEST_MODELS), "test", "train")
    return finish_with_norms(parts, TABLES[0], split, _rmsnorm(parts))


def _profiles(base: Path) -> list[tuple[Path, str, str]]:
    """(file, GPU folder, model) of every profile."""
    for place in ("data/profiling/compute", "profiling/compute", "compute", "."):
        root = base / place
        found = []
        for gpu in GPUS:
            for file in sorted((root / gpu).rglob("mlp.csv")):
                model = "/".join(file.relative_to(root / gpu).parts[:-1])
                if "/" in model:
                    found.append((file, gpu, model))
        if found:
            return found
    raise ValueError(
        f"{str(base)!r} holds no Vidur profiles "
        "(data/profiling/compute/<gpu>/<organisation>/<model>/mlp.csv)."
    )


def _rows(file: Path, gpu: str, model: str) -> pd.DataFrame:
    source = read_table(file)
    columns = {part: f"time_stats.{part}.median" for part in _PARTS}
    required = [name for part, name in columns.items() if part not in _OPTIONAL]
    require_columns(source, [*_WHOLE.values(), "use_gated_mlp", *required], file)
    frame = pd.DataFrame({ours: source[theirs] for ours, theirs in _WHOLE.items()})
    whole_numbers(frame, _WHOLE, file)
    if not source["use_gated_mlp"].isin([True, False]).all():
        raise ValueError(f"{str(file)!r}: use_gated_mlp must be True or False in every row.")
    frame["gated_ffn"] = source["use_gated_mlp"].astype(bool)
    for part, name in columns.items():
        given = name in source and not (part in _OPTIONAL and source[name].isna().all())
        frame[f"{part}_s"] = seconds(source[name], _MS, file) if given else np.nan
    return frame.assign(device=GPUS[gpu], runtime="vidur", model=model, dtype="float16")


def _rmsnorm(parts: pd.DataFrame) -> pd.DataFrame:
    norms = parts[~parts["model"].isin(_LAYER_NORM_MODELS)]
    keys = ["device", "runtime", "dtype", "d_model", "num_tokens"]
    kernels = []
    for kernel in ("input_layernorm", "post_attention_layernorm"):
        times = norms.groupby(keys, sort=True)[f"{kernel}_s"].median().dropna()
        kernels.append(times.rename("time_s").reset_index().assign(kernel=kernel))
    return pd.concat(kernels, ignore_index=True)
