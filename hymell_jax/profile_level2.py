"""Level 2 of a profile: the corrections of blocks, from tens of rows each.

A block is the level-1 form of the shipped checkpoints, fitted to its train rows, times a network's
correction. With so few rows a network may do harm, so folds inside train decide: whole groups (head
layouts, expert shapes) are left out in turn, and the least mean error wins among no network, a
small fresh one, and on accelerators the nearest shipped device's, trained on from there.

A dense feed-forward layer is its products and its activation, as in a whole model, with a factor
for each and a floor, fitted to its rows:

    t = t_0 + a ((n - 1) t_up + t_down) + b t_activation,    n matrices

Routed experts may be described the same way, by the grouped products that level 1 has for them,
t = t_0 + a t_products; folds decide between that and the block of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from hymell_jax import (
    block_recipes,
    blocks,
    checkpoint,
    devices,
    gemm,
    latent,
    mlp,
    moe,
    operators,
    profile_level1,
    rowwise,
)
from hymell_jax.devices import DeviceSpec
from hymell_jax.evaluate import errors
from hymell_jax.fit import Progress
from hymell_jax.profile_rows import Profile
from hymell_jax.robust_fit import fit_coefficients
from hymell_jax.types import Device

FITTED = (*blocks.ATTENTION_BLOCKS, "experts", *blocks.LATENT_BLOCKS)
"""Blocks that a profile can hold; linear attention stays at level 1."""

NETWORK: dict[str, Any] = {"hidden": (12, 12), "embedding": 8, "bound": float(np.log(2.0))}
TRAINING = {"steps": 1000, "learning_rate": 1e-2, "weight_decay": 1e-2}
MEMBERS, FOLDS = 2, 3
LEAST_ROWS = 30  # of train, for a network at all
EXPERTS = {"log_launch_s": -9.0, "log_products": 0.0}
FFN = {"log_launch_s": -12.0, "log_products": 0.0, "log_activation": 0.0}

GROUP = {
    "attention": ("n_heads", "n_kv_heads", "head_dim"),
    "experts": ("d_model", "d_expert", "n_experts", "top_k"),
    "latent": ("n_heads", "d_model"),
}
"""Columns whose rows are held out together, by kind of block."""


def block_rows(profile: Profile, name: str) -> pd.DataFrame:
    """Rows of a block with the sizes that its level-1 form takes; empty where not measured."""
    kind, _, phase = name.partition("_")
    if kind == "attention":
        return profile_level1.attention_frame(profile, phase)
    frame = profile.rows("blocks/moe" if name == "experts" else "blocks/mla")
    if frame.empty:
        return frame
    if name == "experts":
        exponent = frame["distribution"].map(moe.POWER_LAWS).fillna(0.0)
        return frame.assign(
            tokens=frame["num_tokens"], tensor_parallel=1.0, expert_parallel=1.0,
            exponent=exponent, weight_bytes=profile.element_bytes, n_matrices=3.0, weight=1.0,
        )  # fmt: skip
    frame = frame[frame["phase"] == phase].reset_index(drop=True)
    return frame.assign(
        tokens=frame["context_len"], weight_bytes=profile.element_bytes,
        kv_bytes=profile.element_bytes, weight=1.0,
    )  # fmt: skip


def _shape(frame: pd.DataFrame) -> latent.LatentShape:
    """Widths of measured latent-attention modules, arrays [n_rows]."""
    c = {name: frame[name].to_numpy(np.float32) for name in (
        "d_model", "q_lora_rank", "kv_lora_rank", "head_dim", "rope_head_dim", "value_head_dim"
    )}  # fmt: skip
    return latent.LatentShape(
        d_model=c["d_model"], q_rank=c["q_lora_rank"], kv_rank=c["kv_lora_rank"],
        nope_dim=c["head_dim"] - c["rope_head_dim"], rope_dim=c["rope_head_dim"],
        v_dim=c["value_head_dim"],
    )  # fmt: skip


def level1(
    name: str, coefficients: Mapping[str, Any], device: Device, frame: pd.DataFrame
) -> tuple[np.ndarray, np.ndarray]:
    """(ln seconds [n_rows], features [n_rows, n]) of measured rows at level 1."""
    if name not in blocks.LATENT_BLOCKS:
        return block_recipes.level1(name, coefficients, device, frame)
    phase, shape = name.partition("_")[2], _shape(frame)
    sizes = block_recipes.block_sizes(name, frame)
    time_s, _ = latent.latent_time_s(phase, coefficients, device, *sizes, shape=shape)
    features = latent.latent_features(phase, coefficients, device, *sizes, shape=shape)
    return np.log(np.asarray(time_s, np.float64)), np.asarray(features)


def _fit_level1(name: str, device: Device, train: pd.DataFrame, seed: int) -> dict[str, float]:
    columns = block_recipes.block_sizes(name, train)
    time_s = train["time_s"].to_numpy()
    if name == "experts":
        sizes = dict(zip(block_recipes.size_names(name), columns, strict=True))
        return moe.fit_moe(device, sizes, time_s, seed=seed)
    phase, index = name.partition("_")[2], np.arange(len(train))
    shape = _shape(train)

    def time_of(c, index, *row):
        index = index.astype(int)
        fields = dataclasses.fields(shape)
        here = {f.name: jnp.asarray(getattr(shape, f.name))[index] for f in fields}
        return latent.latent_time_s(phase, c, device, *row, shape=latent.LatentShape(**here))[0]

    return fit_coefficients(
        time_of, latent.DEFAULT_COEFFICIENTS, [index, *columns], time_s, seed=seed
    )


@dataclasses.dataclass(frozen=True)
class _Choice:
    """One way to correct a block: a network, where it starts and its training, none at 0 steps."""

    name: str
    spec: mlp.MLPSpec
    options: Mapping[str, Any]
    start: Any = None
    normalizer: mlp.Normalizer | None = None


def _choices(name: str, profile: Profile, spec: DeviceSpec, n_train: int) -> list[_Choice]:
    small = mlp.MLPSpec(n_monotone=blocks.feature_names(name)[1], **NETWORK)
    found = [_Choice("level 1 alone", small, {"steps": 0})]
    if n_train < LEAST_ROWS:
        return found
    found.append(_Choice("a small network", small, TRAINING))
    shipped = None if spec.architecture == checkpoint.HOST else _nearest(name, profile, spec)
    if shipped is not None:
        block, source = shipped
        start = jax.tree.map(lambda leaf: np.asarray(leaf)[:MEMBERS], block.params)
        options = {"steps": 1000, "learning_rate": 2e-3, "weight_decay": 1e-3}
        found.append(
            _Choice(f"the network of {source}", block.spec, options, start, block.normalizer)
        )
    return found


def _nearest(name: str, profile: Profile, spec: DeviceSpec) -> tuple[blocks.Block, str] | None:
    """The block of the most alike shipped device in this format, and whose it is."""
    models = {
        entry[0]: entry for entry in checkpoint.available() if entry[2] == profile.dtype
    }  # fmt: skip
    models = {d: e for d, e in models.items() if d in devices.device_names() and d != spec.name}
    if not models:
        return None
    near = devices.nearest_measured(spec, sorted(models))
    block = checkpoint.load(*models[near]).blocks.get(name)
    return None if block is None else (block, near)


def _train(choice: _Choice, base, features, measured, use: np.ndarray, seed: int):
    """(params, normalizer) of one choice, trained on the rows of a mask."""
    normalizer = mlp.fit_normalizer(features[use])
    if choice.normalizer is not None:  # means and units stay, so that the weights mean the same
        normalizer = dataclasses.replace(
            choice.normalizer,
            low=np.minimum(np.asarray(choice.normalizer.low), features[use].min(0)),
            high=np.maximum(np.asarray(choice.normalizer.high), features[use].max(0)),
        )
    seeds = tuple(range(seed, seed + MEMBERS))
    if not choice.options["steps"]:
        params = mlp.init_ensemble(choice.spec, features.shape[1], seeds)
        return jax.tree.map(np.asarray, params), normalizer
    params = mlp.fit_ensemble(
        np.asarray(mlp.normalise(normalizer, features[use])), base[use], measured[use],
        choice.spec, scale=float(mlp.level1_scale(choice.spec, normalizer)), seeds=seeds,
        start=choice.start, **choice.options,
    )  # fmt: skip
    return params, normalizer


def _corrected(choice: _Choice, trained, base, features) -> np.ndarray:
    params, normalizer = trained
    mean, _ = mlp.correction(params, choice.spec, normalizer, features)
    return base + np.asarray(mean, np.float64)


def fold_numbers(frame: pd.DataFrame, columns: Sequence[str], count: int = FOLDS) -> np.ndarray:
    """Which fold holds each row out, [n_rows]: whole groups, dealt out by size."""
    keys = frame.groupby(list(columns)).ngroup().to_numpy()
    order = np.argsort(-np.bincount(keys), kind="stable")
    place = np.empty(len(order), int)
    place[order] = np.arange(len(order)) % count
    return place[keys]


def _choose(choices, base, features, measured, folds, seed) -> tuple[_Choice, dict[str, float]]:
    """The choice of least mean absolute relative error on rows left out inside train."""
    if len(choices) == 1 or len(set(folds)) < 2:
        return choices[0], {}
    scores = {}
    for choice in choices:
        found = np.empty(len(base))
        for fold in range(FOLDS):
            out = folds == fold
            trained = _train(choice, base, features, measured, ~out, seed)
            found[out] = _corrected(choice, trained, base[out], features[out])
        scores[choice.name] = round(float(np.mean(np.abs(np.expm1(found - measured)))), 5)
    return min(choices, key=lambda c: scores[c.name]), scores


def fit_block(
    profile: Profile,
    spec: DeviceSpec,
    name: str,
    attention_coefficients: Mapping[str, Any],
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any] | None:
    """One block as a checkpoint holds it; None without train rows.

    Args:
        profile: measured machine.
        spec: its facts.
        name: one of `FITTED`.
        attention_coefficients: of level 1, both phases.
        seed: of the networks.
        progress: called with (what, done, total).
    """
    frame = block_rows(profile, name)
    use = np.zeros(0, bool) if frame.empty else (frame["split"] == "train").to_numpy()
    if not use.any():
        return None
    own = {} if name in blocks.ATTENTION_BLOCKS else _fit_level1(
        name, spec.device, frame[use].reset_index(drop=True), seed
    )  # fmt: skip
    base, features = level1(name, own or attention_coefficients, spec.device, frame)
    measured = np.log(frame["time_s"].to_numpy())
    kind = name if name in GROUP else name.partition("_")[0]
    folds = fold_numbers(frame[use], GROUP[kind])
    choices = _choices(name, profile, spec, int(use.sum()))
    chosen, scores = _choose(choices, base[use], features[use], measured[use], folds, seed)
    trained = _train(chosen, base, features, measured, use, seed)
    if progress is not None:
        progress(name, 1, 1)
    both = _corrected(chosen, trained, base, features)
    table = []
    for split in ("train", "test"):
        here = (frame["split"] == split).to_numpy()
        if here.any():
            one, two = (errors(np.exp(x[here]), np.exp(measured[here])) for x in (base, both))
            table.append({"split": split, "rows": "all", "n": one["n"],
                          "level1_mape": one["mape"], "level2_mape": two["mape"],
                          "level2_mdape": two["mdape"]})  # fmt: skip
    return {
        "coefficients": {key: np.float32(v) for key, v in own.items()},
        "spec": chosen.spec,
        "params": trained[0],
        "normalizer": trained[1],
        "rows_train": int(use.sum()),
        "rows_test": int((~use).sum()),
        "errors": table,
        "origin": {"chosen": chosen.name, "left_out_inside_train": scores},
    }


def expert_products_s(
    coefficients: Mapping[str, Any], profile: Profile, device: Device, frame: pd.DataFrame
) -> np.ndarray:
    """Seconds of the grouped products of routed layers, [n_rows], as level 1 counts them."""
    tokens, d, width, experts, top_k = (
        frame[c].to_numpy(np.float32)
        for c in ("num_tokens", "d_model", "d_expert", "n_experts", "top_k")
    )
    touched = np.asarray(operators.touched_experts(experts, top_k, tokens))
    element = profile.element_bytes

    def one(rows, n, k, groups):
        return gemm.gemm_time(
            coefficients["gemm"], device, rows, n, k, element, element, groups, 1.0
        )[0]  # fmt: skip

    run = jax.jit(jax.vmap(one))
    rows = tokens * top_k / touched
    return np.asarray(run(rows, 2.0 * width, d, touched)) + np.asarray(run(rows, d, width, touched))


def expert_time_s(fitted: Mapping[str, Any], products):
    """Seconds of routed layers from those of their products, [n_rows]."""
    return jnp.exp(fitted["log_launch_s"]) + products * jnp.exp(fitted["log_products"])


def fit_experts(
    profile: Profile, spec: DeviceSpec, coefficients: Mapping[str, Any], seed: int = 0
) -> dict[str, float] | None:
    """Floor and factor of routed layers by their products; None where their own block is better
    on rows left out inside train, or without train rows."""
    frame = block_rows(profile, "experts")
    train = frame if frame.empty else frame[frame["split"] == "train"].reset_index(drop=True)
    if train.empty:
        return None
    products, measured = (
        expert_products_s(coefficients, profile, spec.device, train),
        train["time_s"].to_numpy(),
    )

    def fit(use):
        return fit_coefficients(expert_time_s, EXPERTS, [products[use]], measured[use], steps=800)

    folds = fold_numbers(train, GROUP["experts"])
    errors_of: dict[str, list[float]] = {"block": [], "products": []}
    for fold in sorted(set(folds)) if len(set(folds)) > 1 else ():
        out = folds == fold
        kept, left = (train[mask].reset_index(drop=True) for mask in (~out, out))
        own = _fit_level1("experts", spec.device, kept, seed)
        log_s, _ = level1("experts", own, spec.device, left)
        errors_of["block"] += list(np.abs(np.exp(log_s) / measured[out] - 1.0))
        found = np.asarray(expert_time_s(fit(~out), products[out]))
        errors_of["products"] += list(np.abs(found / measured[out] - 1.0))
    if not errors_of["block"] or np.mean(errors_of["products"]) < np.mean(errors_of["block"]):
        return fit(np.ones(len(train), bool))
    return None


def ffn_parts_s(
    coefficients: Mapping[str, Any], profile: Profile, device: Device, frame: pd.DataFrame
) -> tuple[np.ndarray, np.ndarray]:
    """(seconds of the products, seconds of the activation) of feed-forward rows, [n_rows]."""
    m, d, width, n = (
        frame[c].to_numpy(np.float32) for c in ("num_tokens", "d_model", "d_ff", "n_ff_matrices")
    )
    element = profile.element_bytes
    run = jax.jit(
        lambda m, n, k: profile_level1.gemm_time_s(coefficients["gemm"], device, m, n, k, element)
    )
    products = (n - 1.0) * np.asarray(run(m, width, d)) + np.asarray(run(m, d, width))
    moved = element * n  # gated: two arrays in, one out; plain: one in, one out
    activation, _ = rowwise.rowwise_time_s(
        coefficients["stream"]["activation"], device, m, width, moved
    )
    return products, np.asarray(activation)


def ffn_time_s(fitted: Mapping[str, Any], products, activation):
    """Seconds of feed-forward layers from those of their parts, [n_rows]."""
    floor = jnp.exp(fitted["log_launch_s"])
    scaled = products * jnp.exp(fitted["log_products"])
    return floor + scaled + activation * jnp.exp(fitted["log_activation"])


def fit_ffn(profile: Profile, spec: DeviceSpec, coefficients: Mapping[str, Any]):
    """Factors of a feed-forward layer's parts from train rows; None where there are none."""
    frame = profile.rows("blocks/ffn")
    train = frame if frame.empty else frame[frame["split"] == "train"]
    if train.empty:
        return None
    parts = ffn_parts_s(coefficients, profile, spec.device, train)
    return fit_coefficients(ffn_time_s, FFN, parts, train["time_s"].to_numpy(), steps=800)
