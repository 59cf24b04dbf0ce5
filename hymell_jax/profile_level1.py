"""Level 1 of a profile: the same forms as the shipped checkpoints, from a few hundred rows.

So few rows cannot tell the numbers of 94 kernels apart. Each kernel's numbers are therefore those
of all kernels together plus a difference of its own, which is pulled to zero:

    c_kernel = start_kernel + shared + own_kernel,
    loss = mean sqrt(r^2 + w^2) + pull (mean own^2 + share (all others from their start)^2)

with r = ln(predicted / measured). Operands were rotated past the caches, so nothing is kept
between calls: weights stream, as in a whole model. Row-wise operators are fitted as elsewhere
(`rowwise.fit_refined`), one fit for each operator and kernel.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from hymell_jax import (
    attention,
    attention_fit,
    checkpoint,
    collectives,
    data,
    evaluate,
    fit,
    gemm,
    operators,
    profile_rows,
    recipes,
    rowwise,
)
from hymell_jax.devices import DeviceSpec
from hymell_jax.fit import Progress
from hymell_jax.profile_rows import Profile
from hymell_jax.robust_fit import adam
from hymell_jax.types import Device

STAGES = ((8, 500, 0.08), (32, 700, 0.05), (gemm.CHOICE, 1000, 0.03))
"""(sharpness of the choice of kernels, steps, learning rate)."""
PULL, OTHERS, WIDTH = 3e-3, 3e-3, 1e-2
_HOST_START = {
    "log_pnorm": -4.0, "log_exp": -2.0, "log_chain_cycles": 2.0, "log_tile_cycles_wide": 4.0,
    "log_tensor_excess_wide": -4.0, "log_dram_excess": -2.0, "log_l2_excess": -3.0,
}  # fmt: skip
HOST_ATTENTION = {
    **attention.DEFAULT_COEFFICIENTS,
    **attention.TILING,
    **{f"{phase}_{n}": v for phase in attention.ATTENTION_PHASES for n, v in _HOST_START.items()},
    "prefill_log_tile_cycles": 8.5, "prefill_log_row_cycles": 11.0,
    "prefill_log_tensor_excess": -0.3, "decode_log_tile_cycles": 6.5, "decode_log_row_cycles": 5.0,
    "decode_log_tensor_excess": 1.6, "decode_log_l2_capacity": 3.0,
}  # fmt: skip
"""Where attention starts on a host: its terms add up, and there are no tiles to fill. Found on
train rows of one CPU; the weight of the distance from it by folds of head layouts there."""
HOST_PULL = 1e-3
ROWWISE_FIT: dict[str, Any] = {"starts": 8, "steps": 800, "prior_weight": 3e-4, "time_weight": 0.0}

ROWWISE = ("operators/rmsnorm", "operators/softmax", "operators/layernorm", "operators/elementwise")
PART_KERNEL = {  # row-wise part of a layer: (table, kernels that may serve it, best first)
    "embedding": ("operators/elementwise", ("copy",)),
    "norms": ("operators/rmsnorm", ("eager", "fused")),
    "qk_norm": ("operators/rmsnorm", ("eager", "fused")),
    "rope": ("operators/elementwise", ("rope", "copy")),
    "kv_write": ("operators/elementwise", ("copy",)),
    "activation": ("operators/elementwise", ("silu_mul", "gelu", "copy")),
    "residual_add": ("operators/elementwise", ("add", "copy")),
}


def gemm_time_s(coefficients, device: Device, m, n, k, element, sharpness=gemm.CHOICE) -> jax.Array:
    """Seconds [n_rows] of products whose weights stream from memory."""
    return fit.gemm_time_s(coefficients, device, m, n, k, element, sharpness, streaming_weights=1.0)


def fit_gemm(
    device: Device,
    m: np.ndarray,
    n: np.ndarray,
    k: np.ndarray,
    time_s: np.ndarray,
    element: float,
    progress: Progress | None = None,
) -> tuple[dict[str, np.ndarray], float]:
    """(coefficients, mean loss) of the matrix product from few rows [n_rows]."""
    start: dict[str, Any] = {
        name: np.asarray(v, np.float32) for name, v in gemm.default_coefficients().items()
    }
    start["log_launch_s"] = np.float32(np.log(0.5 * np.quantile(time_s, 0.02)))
    shared = {f"shared {name}": np.float32(0) for name in gemm.KERNEL_COEFFICIENTS}
    first = {name: jnp.asarray(v) for name, v in (start | shared).items()}
    sizes = tuple(jnp.asarray(x, jnp.float32) for x in (m, n, k))
    log_measured = jnp.log(jnp.asarray(time_s, jnp.float32))

    def whole(values):
        return {n: values[n] + values.get(f"shared {n}", 0.0) for n in start}

    values = first
    for index, (sharpness, steps, rate) in enumerate(STAGES):

        def loss(values, sharpness=sharpness):
            rows, cols, depth = sizes
            predicted = gemm_time_s(whole(values), device, rows, cols, depth, element, sharpness)
            error = jnp.log(predicted) - log_measured
            away = {n: jnp.square(values[n] - first[n]) for n in first}
            own = sum(jnp.mean(away[n]) for n in gemm.KERNEL_COEFFICIENTS)
            others = sum(jnp.sum(a) for n, a in away.items() if n not in gemm.KERNEL_COEFFICIENTS)
            misfit = jnp.mean(jnp.sqrt(jnp.square(error) + WIDTH**2))
            return misfit + PULL * (own + OTHERS * others)

        values = adam(loss, values, steps, rate)
        if progress is not None:
            progress("gemm time", index + 1, len(STAGES))
    return {n: np.asarray(v, np.float32) for n, v in whole(values).items()}, float(loss(values))


def bytes_per_element(table: str, frame: pd.DataFrame, element: float) -> float:
    """Bytes read and written for one element, over all operands."""
    read = float(frame.get("tensors_read", pd.Series([1.0])).iloc[0])
    return element * (read + float(frame.get("tensors_written", pd.Series([1.0])).iloc[0]))


def sizes_of(table: str) -> tuple[str, str]:
    """Columns of the rows and of the width of a row-wise table."""
    return {
        "operators/rmsnorm": ("num_tokens", "d_model"),
        "operators/elementwise": ("num_tokens", "width"),
    }.get(table, ("rows", "cols"))


def fit_rowwise(
    profile: Profile, device: Device, table: str, seed: int = 0, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Fits of every kernel of a row-wise table, as `evaluate.operator_fits` reads them."""
    found = []
    every = profile_rows.groups(table, profile.rows(table))
    for index, (kernel, frame) in enumerate(every):
        train = frame[frame["split"] == "train"]
        if train.empty:
            continue
        moved = bytes_per_element(table, frame, profile.element_bytes)
        rows, cols, time_s = data.columns(train, *sizes_of(table), "time_s")
        refined = rowwise.fit_refined(rows, cols, time_s, device, moved, seed=seed, **ROWWISE_FIT)
        found.append(
            dict(
                device=profile.name, runtime=profile.runtime, kernel=kernel,
                dtype=data.DTYPE_NAMES[profile.dtype][0], element_bytes=moved,
                n_train=len(train), refined=refined,
            )
        )  # fmt: skip
        if progress is not None:
            progress(table.partition("/")[2], index + 1, len(every))
    return found


def streams(fits: Mapping[str, list[dict[str, Any]]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Coefficients of the row-wise parts of a layer and the kernel that each comes from.

    Raises:
        ValueError: an operator that a part needs was not measured.
    """
    chosen: dict[str, Any] = {}
    origin = {}
    for part, (table, kernels) in PART_KERNEL.items():
        known = {f["kernel"]: f for f in fits.get(table, [])}
        kernel = next((name for name in kernels if name in known), None)
        if kernel is None:
            raise ValueError(
                f"The profile has no train rows of {' or '.join(kernels)} in {table}: "
                "measure level 1 again."
            )
        chosen[part] = {n: np.float32(v) for n, v in known[kernel]["refined"].items()}
        origin[part] = f"{table.partition('/')[2]}, {kernel}"
    assert set(chosen) == set(operators.STREAM_PARTS)
    return {**chosen, "residual_fused": np.float32(0)}, origin


def attention_frame(profile: Profile, phase: str, kernel: str | None = None) -> pd.DataFrame:
    """Rows of the core with the sizes that its form takes; by default of the library's own kernel.

    Args:
        profile: measured machine.
        phase: "prefill" or "decode".
        kernel: "sdpa" or "eager".
    """
    frame = profile.rows(f"blocks/attention_{phase}")
    if frame.empty:
        return frame
    kinds = list(frame["kernel"].unique())
    chosen = kernel or ("sdpa" if "sdpa" in kinds else kinds[0])
    frame = frame[frame["kernel"] == chosen].reset_index(drop=True)
    tokens = frame["seq_len" if phase == "prefill" else "context_len"]
    return frame.assign(
        tokens=tokens, value_head_dim=frame["head_dim"], window_tokens=frame["window_size"],
        kv_bytes=profile.element_bytes, weight=1.0,
    )  # fmt: skip


def fit_attention(
    profile: Profile, spec: DeviceSpec, kernel: str | None = None, seed: int = 0
) -> tuple[dict[str, np.float32], int]:
    """Coefficients of both phases from train rows, defaults where there are none; rows in all."""
    host = spec.architecture == checkpoint.HOST
    found: dict[str, float] = dict(HOST_ATTENTION if host else attention.DEFAULT_COEFFICIENTS)
    count = 0
    for phase in attention.ATTENTION_PHASES:
        frame = attention_frame(profile, phase, kernel)
        train = frame if frame.empty else frame[frame["split"] == "train"]
        if train.empty:
            continue
        sizes = ("batch", "tokens", "n_heads", "n_kv_heads", "head_dim", "window_tokens",
                 "kv_bytes", "time_s")  # fmt: skip
        options: dict[str, Any] = {}
        if host:
            launch = float(np.log(np.quantile(train["time_s"], 0.02)))
            start = HOST_ATTENTION | {f"{phase}_log_launch_s": launch}
            options = dict(start=start, tiling=True, pull=HOST_PULL)
        found |= attention_fit.fit_attention(
            phase, spec.device, *data.columns(train, *sizes), seed=seed, **options
        )
        count += len(train)
    return {name: np.float32(v) for name, v in found.items()}, count


def fit_level1(
    profile: Profile,
    spec: DeviceSpec,
    description: Mapping[str, Any] | None,
    fits: Mapping[str, list[dict[str, Any]]],
    power: Mapping[str, Any],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The content of a level-1 checkpoint, ready for `checkpoint.save`.

    Args:
        profile: measured machine.
        spec, description: its facts, and as a description where no data sheet has them.
        fits: of the row-wise tables, by table.
        power: `coefficients` and `provenance` of energy.
        progress: called with (what, done, total).

    Raises:
        ValueError: no train rows of an operator that a model needs.
    """
    frame = profile.rows("operators/gemm")
    train = frame[frame["split"] == "train"]
    if train.empty:
        raise ValueError("The profile has no train rows of matrix products: measure level 1.")
    m, n, k, time_s = data.columns(train, "m", "n", "k", "time_s")
    element = profile.element_bytes
    coefficients, loss = fit_gemm(spec.device, m, n, k, time_s, element, progress)
    stream, stream_origin = streams(fits)
    attention_coefficients, n_attention = fit_attention(profile, spec)
    content: dict[str, Any] = {
        "format_version": checkpoint.FORMAT_VERSION,
        "level": 1,
        "device": profile.name,
        "runtime": profile.runtime,
        "dtype": profile.dtype,
        "time": "fitted",
        **power["provenance"],
        "coefficients": {
            "gemm": coefficients,
            "stream": stream,
            "attention": attention_coefficients,
            "linear": checkpoint.default_linear_coefficients(),
            "collectives": collectives.default_coefficients(),
            "power": power["coefficients"],
        },
        "domain": {
            f"gemm_log_{name}_{end}": np.float32(np.log(getattr(np, end)(values)))
            for name, values in (("m", m), ("n", n), ("k", k))
            for end in ("min", "max")
        },
        "published": {"gemm_time_s": fit.fit_published_gemm(m, n, k, time_s, element).tolist()},
        "origins": {
            "gemm": f"{profile.name}, {profile.runtime}", **stream_origin,
            "attention": "sdpa" if n_attention else "not fitted",
            "linear": "not fitted", "collectives": "not fitted",
        },
        "sources": [source(profile, rows_train=len(train))],
        "recipe": {
            "stages": STAGES, "pull": PULL, "train_loss": round(loss, 5),
            "measured": profile.digest("operators/gemm"),
        },
        "split": "fitted on train rows only; test rows are shapes never trained on",
        "libraries": {p: importlib.metadata.version(p) for p in ("jax", "optax", "numpy")},
    }  # fmt: skip
    if description is not None:
        content["device_file"] = description
    content["errors"] = _errors(content, spec.device, frame)
    content["replay"] = recipes.replay_rows(content, spec.device, train, element)
    return content


def source(profile: Profile, **more: Any) -> dict[str, Any]:
    """Where the rows come from, for a card."""
    licence = str(profile.manifest.get("licence", "unspecified"))
    name = f"`hymell profile` on {profile.name}"
    return {"name": name, "licence": licence, "runtime": profile.runtime, **more}


def _errors(content, device: Device, frame: pd.DataFrame) -> list[dict[str, Any]]:
    found = []
    for split in ("train", "test"):
        rows = frame[frame["split"] == split]
        if len(rows):
            m, n, k, time_s = data.columns(rows, "m", "n", "k", "time_s")
            element = np.float32(evaluate.DTYPES[content["dtype"]])
            predicted = gemm_time_s(content["coefficients"]["gemm"], device, m, n, k, element)
            found.append({"split": split, "table": "gemm", "target": "time", "regime": "all",
                          **evaluate.errors(np.asarray(predicted), time_s)})  # fmt: skip
    return found
