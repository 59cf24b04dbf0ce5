"""Level 3 of a profile: whole models in the library that was measured, one left out at a time.

The library's operators were measured as it runs them, so the terms of an engine begin near one
(`PRIORS`): blocks added up, work of the host for every kernel and pass. On a host the same cores
compute and launch, so both add up (`serial`); on an accelerator the longer one counts.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pandas as pd

from hymell_jax import (
    checkpoint,
    devices,
    hf,
    profile_level1,
    serving,
    system_fit,
    system_recipes,
    system_rows,
    system_store,
    systems,
)
from hymell_jax.baselines import counting
from hymell_jax.devices import DeviceSpec
from hymell_jax.fit import Progress
from hymell_jax.model import CostModel
from hymell_jax.profile_rows import Profile

TABLE = "systems/transformers"
LEAST_MODELS = 3
SEEDS = (0, 1, 2)

PRIORS: dict[str, tuple[float, float]] = {
    "log_matrix": (0.0, 0.2),
    "log_stream": (0.0, 0.4),
    "log_attention": (0.0, 0.4),
    "log_experts": (0.0, 0.3),
    "log_launch_s": (np.log(5e-6), 1.0),
    "log_step_s": (np.log(3e-4), 0.7),
    "log_traffic": (-9.0, 0.1),
    "eager": (1.0, 1e-6),
}
"""What differs from `serving.EAGER_COEFFICIENTS`: kernels were measured as the library runs them,
so the traffic of unfused ones is in them already."""


def priors(spec: DeviceSpec) -> dict[str, tuple[float, float]]:
    """(mean, width) of every coefficient on a device."""
    host = float(spec.architecture == checkpoint.HOST)
    return serving.priors(eager=True) | PRIORS | {"serial": (host, 1e-6)}


def rows_of(profile: Profile, spec: DeviceSpec) -> pd.DataFrame:
    """Measured passes with the columns of `systems.COLUMNS`, `architecture` and `spec`.

    A decode step at c cached tokens is written as one output token after a prompt of c - 1/2, whose
    mean context is c.

    Raises:
        ValueError: a configuration that is missing or that the package cannot read.
    """
    frame = profile.rows(TABLE)
    if frame.empty:
        return frame
    kinds = list(frame["attention"].unique())
    frame = frame[frame["attention"] == ("sdpa" if "sdpa" in kinds else kinds[0])]
    frame = frame.reset_index(drop=True)
    configs = frame.groupby("model")["config"].first()
    known = {name: hf.read_hf(profile.folder / path).architecture for name, path in configs.items()}
    prefill = (frame["phase"] == "prefill").to_numpy()
    time_s, nothing = frame["time_s"].to_numpy(), np.nan
    metered = "energy_j" in frame and frame["energy_j"].notna().any()
    return pd.DataFrame({
        "table": TABLE.partition("/")[2], "device": profile.name, "engine": profile.runtime,
        "model": frame["model"], "group": frame["model"], "task": "", "split": frame["split"],
        "batch": frame["batch"].astype(float), "turns": 1.0,
        "prompt": np.where(prefill, frame["prompt_len"], frame["context_len"] - 0.5),
        "output": 1.0, "weight_bytes": profile.element_bytes, "kv_bytes": profile.element_bytes,
        "tensor_parallel": 1.0, "expert_parallel": 1.0, "clock_share": 1.0, "continuous": 0.0,
        "quantised": False, "moe": frame["n_experts"].to_numpy() > 0,
        "prefill_time_s": np.where(prefill, time_s, nothing),
        "decode_time_s": np.where(prefill, nothing, time_s),
        "decode_median_s": nothing, "total_time_s": nothing,
        "power_w": frame["power_w"].astype(float) if metered else nothing,
        "energy_j": frame["energy_j"].astype(float) if metered else nothing,
        "energy_per_output_token_j": nothing, "steadiness": nothing,
        "raw_s": frame["raw_s"], "spec": [spec] * len(frame),
        "architecture": frame["model"].map(known),
    })  # fmt: skip


def problem(
    profile: Profile, model: CostModel, spec: DeviceSpec, progress: Progress | None = None
) -> system_rows.Problem | None:
    """The rows with the blocks that the lower levels give them; None with too few models."""
    rows = rows_of(profile, spec)
    if rows.empty or rows["group"].nunique() < LEAST_MODELS:
        return None
    costs = system_rows.block_costs(rows, lambda *_: model, progress)
    return system_rows.problem(profile.runtime, rows, costs, priors=priors(spec))


def _shipped_energy(spec: DeviceSpec) -> tuple[dict[str, Any], str, Mapping[str, Any]] | None:
    """Energy terms of the most alike machine of the shipped level 3, whose, and intervals."""
    content = system_store.load(checkpoint.shipped_folder())
    if content is None:
        return None
    machines = {
        name: terms for entry in content["engines"].values()
        for name, terms in entry["machines"].items()
    }  # fmt: skip
    near = devices.nearest_measured(spec, sorted(machines))
    terms = {name: machines[near][name] for name in serving.ENERGY_COEFFICIENTS}
    return terms, near, content["transferred"]


def fit_level3(
    profile: Profile,
    model: CostModel,
    spec: DeviceSpec,
    *,
    seeds: tuple[int, ...] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any] | None:
    """Level 3 as `system_store.save` takes it; None with fewer than `LEAST_MODELS` models.

    Args:
        profile: measured machine.
        model: its levels 1 and 2.
        spec: its facts.
        seeds: one a network of the ensemble; by default `SEEDS`.
        progress: called with (what, done, total).
    """
    seeds = SEEDS if seeds is None else seeds
    p = problem(profile, model, spec, progress)
    if p is None:
        return None
    fitted = system_recipes.fit_folds([p], seeds, progress)
    forms = _left_out(fitted)
    helps = _network_helps(forms)
    if not helps:  # networks that correct nothing
        params = system_recipes.untrained(len(fitted.groups) + 1, seeds)
        networks = {t: {**entry, "params": params} for t, entry in fitted.networks.items()}
        fitted = dataclasses.replace(fitted, networks=networks)
        forms["level 3"] = system_recipes.predict_left_out(fitted)
    left_out = system_recipes.scores(forms["level 3"])
    terms = jax.tree.map(lambda leaf: leaf[-1], fitted.terms[0])
    coefficients = {
        name: np.float32(v) for name, v in system_fit.machine_coefficients(terms, 0).items()
    }
    metered = bool(left_out["energy_measured"].notna().any())
    quantiles = {"time": system_recipes.conformal_quantile(left_out["score_time"].to_numpy())}
    energy_from = profile.name
    if metered:
        energy = left_out["score_energy"].to_numpy()
        quantiles["energy"] = system_recipes.conformal_quantile(energy)
    else:
        found = _shipped_energy(spec)
        if found is None:
            raise ValueError("Energy was not measured, and no shipped level 3 has terms for it.")
        coefficients |= {name: np.float32(v) for name, v in found[0].items()}
        energy_from, quantiles["energy"] = found[1], found[2]["16 bits"]["energy"]
    widths = dict.fromkeys(system_recipes.WIDTHS, quantiles)
    networks = jax.tree.map(lambda leaf: leaf[-1], fitted.networks)
    return {
        "engines": {
            profile.runtime: {
                "machines": {profile.name: coefficients}, "quantiles": {profile.name: widths},
                "prompt_tokens": {}, "campaigns": {},
            }
        },
        "transferred": widths,
        "network": system_recipes.network_content(networks),
        "card": {
            "sources": [profile_level1.source(profile, table=TABLE, rows=len(left_out))],
            "energy": "fitted" if metered else "transferred",
            "energy_from": energy_from,
            "recipe": {
                "seeds": list(seeds), "steps": system_fit.STEPS,
                "network_steps": system_fit.NETWORK_STEPS,
                "priors": {name: list(pair) for name, pair in p.priors.items()},
            },
            "errors": system_recipes.error_table(left_out),
            "left_out": left_out_table(forms),
            "network": "kept" if helps else "of no help on the models of train",
            "split": "errors are of models left out, one at a time",
            "libraries": {n: importlib.metadata.version(n) for n in ("jax", "optax", "numpy")},
        },
    }  # fmt: skip


def _left_out(fitted: system_recipes.Fitted) -> dict[str, pd.DataFrame]:
    """Each row predicted by fits that never saw its model: with networks, without, blocks alone."""
    return {
        "level 3": system_recipes.predict_left_out(fitted),
        "physics": system_recipes.predict_left_out(fitted, with_network=False),
        "blocks": system_recipes.predict_bare(fitted),
    }


def _network_helps(forms: dict[str, pd.DataFrame]) -> bool:
    """Whether networks lower the mean error of left-out models, by those of train alone."""
    mean = {}
    for name in ("level 3", "physics"):
        frame = forms[name]
        frame = frame[frame["split"] == "train"]
        errors = [
            (frame[phase] / frame[f"{phase}_measured"] - 1.0).abs()
            for phase in ("prefill", "decode")
        ]
        mean[name] = float(pd.concat(errors).dropna().mean())
    return mean["level 3"] < mean["physics"]


def left_out_table(forms: dict[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """Measured and predicted seconds of every pass, by model and phase."""
    first = forms["level 3"]
    found: list[dict[str, Any]] = []
    for index in range(len(first)):
        row = first.iloc[index]
        phase = "prefill" if np.isfinite(row["prefill_measured"]) else "decode"
        found.append(
            {
                "model": row["group"], "phase": phase, "split": row["split"],
                "batch": int(row["batch"]), "prompt": float(row["prompt"]),
                "measured_s": float(row[f"{phase}_measured"]),
                "raw_s": float(row["raw_s"]),
                **{name: float(frame.iloc[index][phase]) for name, frame in forms.items()},
            }
        )  # fmt: skip
    return found


def pass_work(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """(FLOPs, bytes) [n_rows, n_parts] of measured passes, as `baselines.counting` counts them."""
    flops, moved = [], []
    for _, row in rows.iterrows():
        phase = "prefill" if np.isfinite(row["prefill_time_s"]) else "decode"
        counts = counting.pass_counts(
            systems.row_architecture(row), systems.row_workload(row), phase
        )
        flops.append(np.asarray(counts.flops, np.float64))
        moved.append(np.asarray(counts.memory_bytes, np.float64))
    return np.stack(flops), np.stack(moved)
