"""Layer parts under Hugging Face transformers from LLMServingSim (MIT, casys-kaist/LLMServingSim).

A checkout holds `<gpu>/<organisation>/<model>/tp<n>/layers.csv` under
`llmservingsim/profiler/v0/perf_models` (`llm_profile/perf_models` in older ones), with the columns
layer_name, input (tokens), kv_cache, tp_size and latency(ns). Only tp1 is one GPU's whole layer, so
only that is taken; rows of `attn` are left out, as they leave the context open. RMSNorm runs as
several kernels there.
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
    require_texts,
    seconds,
    whole_numbers,
)

GPUS: dict[str, str] = {"A6000": "a6000-48gb", "H100": "h100-sxm-80gb"}
"""The source's folder names, and our device names."""

TABLES = ("blocks/layer_parts_transformers", "operators/rmsnorm")

# Published configurations: d_model, n_heads, n_kv_heads, d_ff, vocab_size, n_experts, top_k.
_MODELS: dict[str, tuple[int, ...]] = {
    "meta-llama/Llama-3.1-8B": (4096, 32, 8, 14336, 128256, 0, 0),
    "meta-llama/Llama-3.1-70B": (8192, 64, 8, 28672, 128256, 0, 0),
    "mistralai/Mixtral-8x7B-v0.1": (4096, 32, 8, 14336, 32000, 8, 2),
    "microsoft/Phi-mini-MoE-instruct": (4096, 32, 8, 960, 32064, 16, 2),
}
_WIDTHS = ("d_model", "n_heads", "n_kv_heads", "d_ff", "vocab_size", "n_experts", "top_k")
_NS = 1e-9
_DROPPED = ("attn",)
_NORMS = ("input_layernorm", "post_layernorm")
_LAYER_NORM_MODELS = ("microsoft/Phi-mini-MoE-instruct",)  # their norms are LayerNorm


def import_llmservingsim(path: str | os.PathLike[str]) -> dict[str, pd.DataFrame]:
    """Tidy tables "blocks/layer_parts_transformers" and "operators/rmsnorm".

    Layer parts with num_tokens mod 8 = 3 are for testing; RMSNorm rows are split by their shape.

    Args:
        path: a checkout of the repository, or a folder inside it down to `perf_models`.

    Raises:
        ValueError: no profiles at `path`, a damaged file, missing columns, a time that is not
            positive.
    """
    base = existing_folder(path, "The LLMServingSim checkout")
    frames = [_rows(file, gpu, model) for file, gpu, model in _profiles(base)]
    parts = pd.concat(frames, ignore_index=True)
    split = np.where(parts["num_tokens"] % 8 == 3, "test", "train")
    norms = parts[parts["part"].isin(_NORMS) & ~parts["model"].isin(_LAYER_NORM_MODELS)]
    norms = norms.rename(columns={"part": "kernel"})
    return finish_with_norms(parts, TABLES[0], split, norms)


def _profiles(base: Path) -> list[tuple[Path, str, str]]:
    """(file, GPU folder, model) of every one-GPU profile of a known model."""
    places = (
        "llmservingsim/profiler/v0/perf_models",
        "profiler/v0/perf_models",
        "llm_profile/perf_models",
        "perf_models",
        ".",
    )
    for place in places:
        found = [
            (base / place / gpu / model / "tp1" / "layers.csv", gpu, model)
            for gpu in GPUS
            for model in _MODELS
        ]
        found = [entry for entry in found if entry[0].is_file()]
        if found:
            return found
    raise ValueError(
        f"{str(base)!r} holds no LLMServingSim profiles "
        "(llmservingsim/profiler/v0/perf_models/<gpu>/<organisation>/<model>/tp1/layers.csv)."
    )


def _rows(file: Path, gpu: str, model: str) -> pd.DataFrame:
    source = read_table(file)
    require_columns(source, ("layer_name", "input", "latency(ns)"), file)
    require_texts(source, ["layer_name"], file)
    source = source[~source["layer_name"].isin(_DROPPED)].reset_index(drop=True)
    frame = source[["layer_name", "input"]].set_axis(["part", "num_tokens"], axis="columns")
    whole_numbers(frame, ("num_tokens",), file)
    frame["time_s"] = seconds(source["latency(ns)"], _NS, file)
    frame = frame.assign(**dict(zip(_WIDTHS, _MODELS[model], strict=True)))
    return frame.assign(
        device=GPUS[gpu], runtime="transformers-eager", model=model, dtype="float16"
    )
