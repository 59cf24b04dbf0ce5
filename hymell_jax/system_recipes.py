"""How level 3 is made: terms by engine, networks and intervals, with architectures left out.

`fit_folds` fits every engine and the networks once without each architecture and once with all
rows, `predict_left_out` predicts each row by the fold that never saw its architecture, and
`fit_level3` makes what a checkpoint stores. Deterministic: the same rows and seeds give the same
numbers.

Intervals are split conformal, ln y = ln y_predicted +- q scale: q is the quantile over rows of
left-out architectures of |ln error| / scale, by engine and device where there are rows enough. A
device without rows takes the terms of the most alike one, and a q over devices left out.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from hymell_jax import devices, engines, mlp, serving, system_fit, systems
from hymell_jax.mlp import Progress
from hymell_jax.system_fit import TARGETS
from hymell_jax.system_rows import Problem, stack_leaves

QUANTISED_WEIGHT = 0.1  # of rows in 8 or 4 bits: their kernels differ from checkpoint to checkpoint
SEEDS = (0, 1, 2)
COVERAGE = 0.9
LEAST_ROWS, LEAST_GROUPS = 20, 4  # for a quantile of an engine and device alone


def base_weights(frame: pd.DataFrame) -> np.ndarray:
    """Rows of one architecture on one device count less the more there are; mean one."""
    count = frame.groupby(["group", "device"])["group"].transform("size").to_numpy()
    weights = np.where(frame["quantised"], QUANTISED_WEIGHT, 1.0) / np.sqrt(count)
    return weights / weights.mean()


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Terms of every engine and the networks, with a fold axis: one a group, then all rows."""

    problems: tuple[Problem, ...]
    groups: tuple[str, ...]
    terms: tuple[Any, ...]  # of each problem, leaves [n_folds, ...]
    networks: dict[str, Any]  # "time", "energy": params [n_folds, n_members, ...], normalizer


def fit_folds(
    problems: Sequence[Problem], seeds: Sequence[int] = SEEDS, progress: Progress | None = None
) -> Fitted:
    """Every engine and the networks, once without each architecture and once with all rows."""
    groups = tuple(sorted({g for p in problems for g in p.groups}))
    terms = []
    for index, p in enumerate(problems):
        base, group = base_weights(p.frame), p.frame["group"].to_numpy()
        weights = np.stack([base * (group != g) for g in p.groups] + [base])
        if len(p.groups) == 1:
            weights[0] = 1e-6  # nothing is left: the priors alone
        own = system_fit.fit_engine(p.rows, p.sizes, weights, p.priors)
        own_places = [p.groups.index(g) if g in p.groups else len(p.groups) for g in groups]
        place = np.array([*own_places, len(p.groups)])
        terms.append(jax.tree.map(lambda leaf, place=place: np.asarray(leaf)[place], own))
        if progress is not None:
            progress("engines", index + 1, len(problems) + 1)
    networks = _fit_networks(problems, groups, terms, seeds)
    if progress is not None:
        progress("engines", len(problems) + 1, len(problems) + 1)
    return Fitted(tuple(problems), groups, tuple(terms), networks)


def _fit_networks(problems, groups, terms, seeds) -> dict[str, Any]:
    left = []
    for p, values in zip(problems, terms, strict=True):
        run = jax.jit(jax.vmap(lambda v, p=p: system_fit.residuals(v, p.rows, p.sizes)))
        left.append(jax.tree.map(np.asarray, run(values)))
    group = np.concatenate([p.frame["group"].to_numpy() for p in problems])
    base = np.concatenate([base_weights(p.frame) for p in problems])
    weights = np.stack([base * (group != g) for g in groups] + [base])
    found = {}
    for target in ("time", "energy"):
        features = np.concatenate([x[target] for x in left], 1)
        errors = np.concatenate([x[f"{target}_error"] for x in left], 1)
        missing = not np.isfinite(errors[-1]).any()
        normalizers = [
            mlp.fit_normalizer(f[(w > 0) & (np.isfinite(e) | missing)])
            for f, w, e in zip(features, weights, errors, strict=True)
        ]
        stacked = stack_leaves(normalizers)
        if missing:  # nothing to learn from: networks that correct nothing
            found[target] = {"params": untrained(len(weights), seeds), "normalizer": stacked}
            continue
        z = jax.vmap(mlp.normalise)(stacked, features)
        scales = jax.vmap(lambda n: mlp.level1_scale(serving.NETWORK, n))(stacked)
        params = system_fit.fit_networks(z, errors, weights, scales, seeds)
        found[target] = {"params": jax.tree.map(np.asarray, params), "normalizer": stacked}
    return found


def untrained(n_folds: int, seeds: Sequence[int]) -> Any:
    """Networks whose correction is zero, with a fold axis."""
    first = mlp.init_ensemble(serving.NETWORK, len(serving.FEATURES), seeds)
    return jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[None], n_folds, 0), first)


def predict_left_out(fitted: Fitted, with_network: bool = True) -> pd.DataFrame:
    """Each row predicted by the fold that never saw its architecture.

    Returns:
        The rows of all problems with, for every target, `<target>` and `<target>_measured`, and
        the scales of ln errors as `scale_time` and `scale_energy`.
    """
    frames = []
    for p, values in zip(fitted.problems, fitted.terms, strict=True):
        fold = np.array([fitted.groups.index(g) for g in p.frame["group"]])

        def one(fold, row, p=p, values=values):
            pick = functools.partial(jax.tree.map, lambda leaf: jnp.asarray(leaf)[fold])
            network = pick(fitted.networks) if with_network else None
            return system_fit.predict_row(pick(values), network, row, p.sizes)

        predicted, scale = jax.jit(jax.vmap(one))(fold, p.rows)
        frames.append(_with_predictions(p, np.asarray(predicted), np.asarray(scale)))
    return pd.concat(frames, ignore_index=True)


def _with_predictions(p: Problem, predicted: np.ndarray, scale: np.ndarray) -> pd.DataFrame:
    frame = p.frame.copy()
    for index, target in enumerate(TARGETS):
        frame[target] = predicted[:, index]
        frame[f"{target}_measured"] = p.rows.measured[:, index]
    which = np.where(p.rows.phase[:, 1] > 0, 0, 1)
    rows = np.arange(len(frame))
    frame["scale_time"], frame["scale_energy"] = scale[rows, which, 0], scale[rows, which, 1]
    return frame


def predict_bare(fitted: Fitted, problems: Sequence[Problem] | None = None) -> pd.DataFrame:
    """The blocks alone, added up: what levels 1 and 2 say without level 3.

    Prompt lengths that a source hides are those of each row's fold. The median step is taken as a
    step without newcomers.

    Args:
        fitted: whose folds.
        problems: the same rows with blocks of other levels; by default those of `fitted`.
    """
    frames = []
    for p, values in zip(problems or fitted.problems, fitted.terms, strict=True):
        fold = np.array([fitted.groups.index(g) for g in p.frame["group"]])

        def one(fold, row, p=p, values=values):
            here = jax.tree.map(lambda leaf: jnp.asarray(leaf)[fold], values)
            return system_fit.predict_bare_row(here, row, p.sizes)

        predicted = np.asarray(jax.jit(jax.vmap(one))(fold, p.rows))
        frames.append(_with_predictions(p, predicted, np.ones((len(p.frame), 2, 2))))
    return pd.concat(frames, ignore_index=True)


PHASES = {
    "prefill": "prefill", "decode": "decode", "median": "decode", "steady": "decode, mean step",
    "total": "whole run",
}  # fmt: skip
"""What a measured time is of, as tables of errors call it."""

PRIMARY = ("median", "total", "prefill", "decode", "steady")
"""Which time of a row its interval is judged by: the first that was measured."""


WIDTHS = ("16 bits", "quantised")
"""Kernels of 8 and 4 bits differ from checkpoint to checkpoint: intervals of their own."""


def _width(frame: pd.DataFrame) -> np.ndarray:
    return np.where(frame["quantised"].astype(bool), WIDTHS[1], WIDTHS[0])


def scores(frame: pd.DataFrame) -> pd.DataFrame:
    """`error_time`, `error_energy` (|ln|) and `score_time`, `score_energy` (over scale) by row."""
    time = pd.Series(np.nan, frame.index)
    for target in PRIMARY:
        ratio = np.log(frame[target] / frame[f"{target}_measured"]).abs()
        time = time.fillna(ratio)
    energy = np.log(frame["energy"] / frame["energy_measured"]).abs()
    return frame.assign(
        error_time=time,
        error_energy=energy,
        score_time=time / frame["scale_time"],
        score_energy=energy / frame["scale_energy"],
    )


def conformal_quantile(values: np.ndarray) -> float:
    """The ceil((n + 1) 0.9)-th smallest score; the greatest where there are fewer than nine."""
    values = np.sort(values[np.isfinite(values)])
    if not len(values):
        return np.nan
    rank = int(np.ceil((len(values) + 1) * COVERAGE))
    return float(values[min(rank, len(values)) - 1])


def _quantile_for(scored: pd.DataFrame, engine: str, device: str, target: str) -> float:
    """From rows of the engine on the device where they hold architectures enough.

    A few architectures say little about a new one, however many rows they have: then the greatest
    of the quantiles of engine and device, engine, and all rows.
    """
    measured = scored[scored[f"score_{target}"].notna()]
    of_engine = measured[measured["engine"] == engine]
    own = of_engine[of_engine["device"] == device]
    if len(own) >= LEAST_ROWS and own["group"].nunique() >= LEAST_GROUPS:
        return conformal_quantile(own[f"score_{target}"].to_numpy())
    found = [
        conformal_quantile(x[f"score_{target}"].to_numpy()) for x in (own, of_engine, measured)
    ]
    return float(np.nanmax(found))


def coverage(scored: pd.DataFrame) -> pd.DataFrame:
    """Share of rows within intervals whose quantile never saw their architecture.

    Returns:
        One row for each device, target and width: device, target, width, n, groups, coverage
        (percent) and the median half width (percent).
    """
    found = []
    for target, width in itertools.product(("time", "energy"), WIDTHS):
        here = scored[scored[f"score_{target}"].notna() & (_width(scored) == width)]
        quantile = pd.Series(np.nan, here.index)
        for (engine, device, group), rows in here.groupby(["engine", "device", "group"]):
            others = here[here["group"] != group]
            quantile[rows.index] = _quantile_for(others, engine, device, target)
        inside = here[f"score_{target}"] <= quantile
        half = np.expm1(quantile * here[f"scale_{target}"])
        for device, rows in here.groupby("device"):
            found.append(
                dict(
                    device=device, target=target, width=width, n=len(rows),
                    groups=rows["group"].nunique(),
                    coverage=round(100.0 * float(inside[rows.index].mean()), 1),
                    half_width=round(100.0 * float(half[rows.index].median()), 1),
                )
            )  # fmt: skip
    return pd.DataFrame(found)


def device_left_out(problems: Sequence[Problem]) -> pd.DataFrame:
    """Rows of each device predicted from the other devices of its engine, physics alone.

    Terms are those of the most alike device that was kept, carried over as `engines.terms_for`.
    """
    frames = []
    for p in problems:
        if len(p.machines) < 2:
            continue
        base, device = base_weights(p.frame), p.frame["device"].to_numpy()
        weights = np.stack([base * (device != name) for name in p.machines])
        terms = system_fit.fit_engine(p.rows, p.sizes, weights, p.priors)
        terms = _carried(terms, p.machines)

        def one(fold, row, p=p, terms=terms):
            values = jax.tree.map(lambda leaf: jnp.asarray(leaf)[fold], terms)
            return system_fit.predict_row(values, None, row, p.sizes)

        predicted, scale = jax.jit(jax.vmap(one))(p.rows.machine, p.rows)
        frames.append(_with_predictions(p, np.asarray(predicted), np.asarray(scale)))
    return pd.concat(frames, ignore_index=True)


def _carried(terms: Mapping[str, Any], machines: Sequence[str]) -> dict[str, Any]:
    """Terms [n_folds, n_machines] with those of the machine of each fold taken from its nearest."""
    found: dict[str, Any] = jax.tree.map(np.array, dict(terms))
    for fold, name in enumerate(machines):
        source = devices.nearest_measured(name, [other for other in machines if other != name])
        at, specs = machines.index(source), map(devices.get_device, (source, name))
        energy = {key: value[fold, at] for key, value in found["energy"].items()}
        for key, value in engines.carried_energy(energy, *specs).items():
            found["energy"][key][fold, fold] = value
        found["host"][fold, fold] = found["host"][fold, at]
    return found


def _plain(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), tree)


def _terms(fitted: Fitted, scored: pd.DataFrame) -> dict[str, Any]:
    """Coefficients by engine and machine, with energy terms borrowed where none was measured."""
    engines: dict[str, Any] = {}
    with_energy: dict[str, Any] = {}
    for p, values in zip(fitted.problems, fitted.terms, strict=True):
        values = jax.tree.map(lambda leaf: leaf[-1], values)
        machines = {}
        for index, name in enumerate(p.machines):
            machines[name] = _plain(system_fit.machine_coefficients(values, index))
            machines[name]["unseen_prefill"] = np.float32(not p.rows.prompt_known.any())
            rows = p.frame["device"] == name
            if np.isfinite(p.rows.measured[rows.to_numpy(), TARGETS.index("energy")]).any():
                with_energy.setdefault(name, machines[name])
        engines[p.engine] = {
            "machines": machines,
            "prompt_tokens": {
                t: float(np.exp(values["prompt"][i])) for i, t in enumerate(p.tasks) if t
            },
            "campaigns": {
                c: [float(x) for x in np.exp(values["campaign"][i])]
                for i, c in enumerate(p.campaigns)
            },
            "quantiles": {
                name: {
                    width: {
                        t: _quantile_for(scored[_width(scored) == width], p.engine, name, t)
                        for t in ("time", "energy")
                    }
                    for width in WIDTHS
                }
                for name in p.machines
            },
        }
    for p in fitted.problems:
        for name, terms in engines[p.engine]["machines"].items():
            rows = (p.frame["device"] == name).to_numpy()
            if np.isfinite(p.rows.measured[rows, TARGETS.index("energy")]).any():
                continue
            source = devices.nearest_measured(name, with_energy)
            for term in serving.ENERGY_COEFFICIENTS:
                terms[term] = with_energy[source][term]
    return engines


def fit_level3(
    problems: Sequence[Problem],
    unmapped: pd.DataFrame,
    *,
    seeds: Sequence[int] = SEEDS,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], Fitted]:
    """Level 3 as a plain dict of numbers, and the folds that its error tables come from.

    Args:
        problems: of `system_rows.problem`, one an engine.
        unmapped: the second table of `systems.read_systems`.
        seeds: one a network of the ensemble.
        progress: called with (what, done, total).
    """
    fitted = fit_folds(problems, seeds, progress)
    scored = scores(predict_left_out(fitted))
    moved = scores(device_left_out(problems))
    networks = jax.tree.map(lambda leaf: leaf[-1], fitted.networks)
    tables = sorted(scored["table"].unique())
    content = {
        "engines": _terms(fitted, scored),
        "transferred": {
            width: {
                t: conformal_quantile(moved.loc[_width(moved) == width, f"score_{t}"].to_numpy())
                for t in ("time", "energy")
            }
            for width in WIDTHS
        },
        "network": network_content(networks),
        "card": {
            "sources": [
                {
                    "name": systems.SOURCES[t][0], "licence": systems.SOURCES[t][1],
                    "table": f"systems/{t}", "rows": int((scored["table"] == t).sum()),
                }
                for t in tables
            ],
            "rows_left_out": unmapped.to_dict("records"),
            "recipe": {
                "seeds": list(seeds), "features": list(serving.FEATURES),
                "network": dataclasses.asdict(serving.NETWORK),
                "steps": system_fit.STEPS, "network_steps": system_fit.NETWORK_STEPS,
                "prior_weight": system_fit.PRIOR_WEIGHT, "coverage": COVERAGE,
            },
            "errors": error_table(scored),
            "coverage": coverage(scored).to_dict("records"),
            "split": "errors are of architectures left out, one at a time",
            "libraries": {p: importlib.metadata.version(p) for p in ("jax", "optax", "numpy")},
        },
    }  # fmt: skip
    return content, fitted


def network_content(networks: Mapping[str, Any]) -> dict[str, Any]:
    """Networks of time and energy as plain arrays, as a file stores them."""
    return {
        target: {
            "params": _plain(entry["params"]),
            "normalizer": {
                f.name: np.asarray(getattr(entry["normalizer"], f.name), np.float32)
                for f in dataclasses.fields(entry["normalizer"])
            },
        }
        for target, entry in networks.items()
    }


def error_table(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Errors in percent by table, engine, device, kind of model, GPUs, width, phase and target."""
    kind = np.where(frame["moe"], "moe", "dense")
    gpus = np.where(frame["tensor_parallel"] > 1, "several", "one")
    keyed = frame.assign(kind=kind, gpus=gpus, width=_width(frame))
    keys = ["table", "engine", "device", "kind", "gpus", "width"]
    found = []
    for target in TARGETS:
        known = keyed[keyed[f"{target}_measured"].notna()]
        error = (known[target] / known[f"{target}_measured"] - 1.0).abs() * 100.0
        for key, rows in known.groupby(keys):
            here = error[rows.index]
            found.append(
                {
                    **dict(zip(keys, key, strict=True)), "target": target, "n": len(rows),
                    "models": int(rows["group"].nunique()), "mape": round(float(here.mean()), 2),
                    "mdape": round(float(here.median()), 2),
                }
            )  # fmt: skip
    return found
