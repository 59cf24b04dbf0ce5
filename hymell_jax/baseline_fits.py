"""The baselines on measured whole models: what each says of a row, and fits with a model left out.

Rows and folds are those of level 3 (`hymell_jax.system_rows`, `system_recipes`), and so are prompt
lengths that a source hides: every method gets the length that level 3 found without the row's
model. A method that gives a prefill pass and a decode step answers for a row as the bare blocks do:
a mean step under continuous batching carries the prompts of those that join, a whole run is prefill
and all steps, as often as the batch has turns.

Methods with coefficients are fitted for each engine on each device, once without each architecture,
by least squares on ln(predicted / measured) with a soft L1 loss and a weak pull to where they
start. Energy is fitted to energy, time to time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from hymell_jax.baselines import (
    amali,
    life,
    liminal,
    roofline,
    sweetspot,
    tdp,
    tokens_to_watt_hours,
)
from hymell_jax.baselines.interface import MethodPrediction
from hymell_jax.system_fit import TARGETS
from hymell_jax.system_recipes import Fitted, base_weights
from hymell_jax.system_rows import HEADLESS_TABLES, Problem
from hymell_jax.systems import group_architecture
from hymell_jax.types import Architecture, Device, Workload

TIMES = tuple(t for t in TARGETS if t != "energy")
SOFT = 0.3  # relative error above which a row counts linearly
PULL = 0.01  # weight of one coefficient's departure by a factor e, against one row's error
STEPS = 30  # of Levenberg and Marquardt

LOW_LOAD = 32.0  # sequences at once below which a server is at low load, for WattGPU's scenario

FITTED: dict[str, tuple[Callable, Callable, tuple[str, ...]]] = {
    "roofline": (roofline.predict, roofline.efficient_coefficients, TIMES),
    "life": (life.predict, life.default_coefficients, TIMES),
    "liminal": (liminal.METHOD.predict, liminal.default_coefficients, TIMES),
    "amali-lite": (amali.METHOD.predict, amali.default_coefficients, TIMES),
    "tdp": (tdp.predict, tdp.default_coefficients, TIMES),
    "tokens-to-watt-hours": (
        tokens_to_watt_hours.predict_calibrated,
        tokens_to_watt_hours.calibrated_coefficients,
        ("energy",),
    ),
}
"""Methods fitted to rows: predict, where to start, the targets that they are fitted to."""

GIVEN: dict[str, tuple[Callable, Callable[[str], dict[str, Any]]]] = {
    "roofline, plain": (roofline.predict, lambda gpu: roofline.plain_coefficients()),
    "tokens-to-watt-hours, literal": (
        tokens_to_watt_hours.predict_published, tokens_to_watt_hours.literal_coefficients,
    ),
    "tokens-to-watt-hours, table3_refit": (
        tokens_to_watt_hours.predict_published,
        lambda gpu: tokens_to_watt_hours.table3_coefficients(),
    ),
    "tokens-to-watt-hours, simplified": (
        tokens_to_watt_hours.predict_simplified,
        lambda gpu: tokens_to_watt_hours.simplified_coefficients(),
    ),
}  # fmt: skip
"""Methods with published coefficients: predict, and the coefficients for "h100" or "a100"."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Rows of one engine with concrete prompts, as arrays [n_rows, ...]."""

    frame: pd.DataFrame
    arch: Architecture
    work: Workload
    device: Device
    turns: np.ndarray
    phase: np.ndarray  # [n_rows, 3], as in `system_fit.Rows`
    measured: np.ndarray  # [n_rows, n_targets], NaN where not measured


def measured_rows(p: Problem, prompt_tokens: np.ndarray) -> Measured:
    """The rows of a problem at the given prompt lengths [n_rows].

    Bare models without the product that makes logits are given a vocabulary of one.
    """
    prompt: Any = np.asarray(prompt_tokens, np.float32)
    work = dataclasses.replace(
        p.rows.work,
        prompt_tokens=prompt,
        context_start_tokens=prompt,
        context_end_tokens=prompt + p.rows.work.output_tokens,
    )
    headless = p.frame["table"].isin(HEADLESS_TABLES).to_numpy()
    vocabulary: Any = np.where(headless, np.float32(1.0), p.rows.arch.vocab_size)
    arch = dataclasses.replace(p.rows.arch, vocab_size=vocabulary)
    arrays = (np.asarray(x) for x in (p.rows.turns, p.rows.phase, p.rows.measured))
    return Measured(p.frame, arch, work, p.rows.device, *arrays)


def left_out_rows(fitted: Fitted) -> list[Measured]:
    """The rows of every engine, hidden prompts as found without the row's architecture."""
    found = []
    for p, values in zip(fitted.problems, fitted.terms, strict=True):
        fold = np.array([fitted.groups.index(g) for g in p.frame["group"]])
        hidden = np.exp(np.asarray(values["prompt"])[fold, p.rows.task])
        known = np.asarray(p.rows.prompt_known) > 0
        found.append(measured_rows(p, np.where(known, p.rows.work.prompt_tokens, hidden)))
    return found


def row_targets(found: MethodPrediction, work: Workload, turns, phase) -> jax.Array:
    """What a method says the targets of one row should read, [n_targets]."""
    prefill_s, step_s = found.prefill_time_s, found.decode_time_per_token_s
    prefill_j, step_j = found.prefill_energy_j, found.decode_energy_per_token_j * work.batch_size
    newcomers = 1.0 / work.output_tokens  # of the batch's prompts, in a mean step
    energies = jnp.stack(
        [
            step_j + newcomers * prefill_j,
            prefill_j,
            turns * (prefill_j + work.output_tokens * step_j),
        ]
    )
    times = [
        prefill_s,
        step_s,
        step_s + newcomers * prefill_s,
        step_s,
        turns * (prefill_s + work.output_tokens * step_s),
    ]
    return jnp.stack([*times, jnp.sum(phase * energies)])


@functools.partial(jax.jit, static_argnames="predict")
def _answers(predict, arch, work, device, turns, phase, coefficients):
    """[n_rows, n_targets]; coefficients [n_rows] each."""

    def one(arch, work, device, turns, phase, c):
        return row_targets(predict(arch, work, device, c), work, turns, phase)

    return jax.vmap(one)(arch, work, device, turns, phase, coefficients)


@functools.partial(jax.jit, static_argnames=("predict", "columns"))
def _fit(predict, columns, fixed, start, arch, work, device, turns, phase, measured, weights):
    """Coefficients [n_folds] by name; weights [n_folds, n_rows], 0 where left out."""
    names = sorted(start)
    first = jnp.stack([start[n] for n in names])
    goal = measured[:, np.array(columns)]
    known = jnp.isfinite(goal)
    log_goal = jnp.log(jnp.where(known, goal, 1.0))

    def logs(x):
        c = fixed | {n: x[i] for i, n in enumerate(names)}

        def one(arch, work, device, turns, phase):
            return row_targets(predict(arch, work, device, c), work, turns, phase)

        found = jax.vmap(one)(arch, work, device, turns, phase)[:, np.array(columns)]
        return jnp.log(jnp.maximum(jnp.where(known, found, 1.0), 1e-30))

    def one_fold(weight):
        root = jnp.sqrt(weight)[:, None]

        def parts(x):
            rows = jnp.where(known, logs(x) - log_goal, 0.0) * root
            return jnp.concatenate([jnp.ravel(rows), PULL * (x - first)])

        def cost(r):
            return jnp.sum(SOFT**2 * (jnp.sqrt(1.0 + jnp.square(r / SOFT)) - 1.0))

        def step(carry, _):
            x, damping = carry
            r, slopes = parts(x), jax.jacfwd(parts)(x)
            share = 1.0 / jnp.sqrt(1.0 + jnp.square(r / SOFT))
            normal = slopes.T @ (share[:, None] * slopes)
            normal = normal + damping * jnp.diag(jnp.diag(normal)) + 1e-9 * jnp.eye(len(names))
            change = jnp.linalg.solve(normal, slopes.T @ (share * r))
            new = x - jnp.clip(change, -1.0, 1.0)
            better = cost(parts(new)) < cost(r)
            x = jnp.where(better, new, x)
            return (x, jnp.where(better, damping * 0.3, jnp.minimum(damping * 4.0, 1e6))), None

        return jax.lax.scan(step, (first, jnp.float32(1e-2)), length=STEPS)[0][0]

    found = jax.vmap(one_fold)(weights)
    return {n: found[:, i] for i, n in enumerate(names)}


def _padded(tree: Any, index: np.ndarray, size: int) -> Any:
    """Rows of every leaf, repeated at the end up to a size, so that one program serves all."""
    full = np.concatenate([index, np.repeat(index[:1], size - len(index))])
    return jax.tree.map(lambda leaf: np.asarray(leaf)[full], tree)


def fit_rows(
    predict: Callable[..., MethodPrediction],
    initial: Mapping[str, Any],
    targets: Sequence[str],
    rows: Measured,
    weights: np.ndarray,
    pad: tuple[int, int] = (0, 0),
) -> dict[str, np.ndarray]:
    """Coefficients of a method from measured rows, one set for each vector of weights.

    Those named `log_...` are fitted, the others stay.

    Args:
        predict: of a method or one of its forms.
        initial: where to start, such as the method's default coefficients.
        targets: of `system_fit.TARGETS`, to fit to; a row counts where it has any of them.
        rows: measured.
        weights: [n_folds, n_rows], 0 where a row is left out; a fold without rows stays at the
            start.
        pad: least (folds, rows) of the compiled program.

    Returns:
        Each coefficient, [n_folds].
    """
    n_folds, n_rows = weights.shape
    folds, size = max(pad[0], n_folds), max(pad[1], n_rows)
    padded = np.zeros((folds, size), np.float32)
    padded[:n_folds, :n_rows] = weights
    leaves = (rows.arch, rows.work, rows.device, rows.turns, rows.phase, rows.measured)
    arrays = _padded(leaves, np.arange(n_rows), size)
    start = {n: jnp.float32(v) for n, v in initial.items() if n.startswith("log_")}
    fixed = {n: jnp.float32(v) for n, v in initial.items() if n not in start}
    columns = tuple(TARGETS.index(t) for t in targets)
    found = _fit(predict, columns, fixed, start, *arrays, padded)
    found = {n: np.asarray(v)[:n_folds] for n, v in found.items()}
    return found | {n: np.full(n_folds, float(v), np.float32) for n, v in fixed.items()}


def answers(
    predict: Callable[..., MethodPrediction], rows: Measured, coefficients: Mapping[str, Any]
) -> np.ndarray:
    """What a method says of every row [n_rows, n_targets]; coefficients () or [n_rows] each."""
    n = len(rows.frame)
    each = {k: np.broadcast_to(np.asarray(v, np.float32), (n,)) for k, v in coefficients.items()}
    size = -(-n // 128) * 128
    leaves = (rows.arch, rows.work, rows.device, rows.turns, rows.phase, each)
    found = _answers(predict, *_padded(leaves, np.arange(n), size))
    return np.array(found, np.float64)[:n]


def left_out(name: str, every: Sequence[Measured], by: str = "group") -> list[np.ndarray]:
    """Rows by a method fitted without their architecture, on each engine and device.

    Args:
        name: of `FITTED`.
        every: of `left_out_rows`, one an engine.
        by: the column whose values are left out one at a time: "group", or "device" to fit on the
            engine's other devices.

    Returns:
        [n_rows, n_targets] for each engine; a target that the method does not give is NaN.
    """
    predict, start, targets = FITTED[name]
    jobs = []
    for number, rows in enumerate(every):
        scope = rows.frame["device"] if by == "group" else rows.frame["engine"]
        jobs += [(number, np.flatnonzero(scope == value)) for value in sorted(set(scope))]
    sizes = [len(set(every[n].frame[by].iloc[i])) for n, i in jobs]
    pad = max(sizes), -(-max(len(i) for _, i in jobs) // 32) * 32
    found = [np.full((len(rows.frame), len(TARGETS)), np.nan) for rows in every]
    for number, index in jobs:
        part = _subset(every[number], index)
        names = part.frame[by].to_numpy()
        values = sorted(set(names))
        base = base_weights(part.frame)
        weights = np.stack([base * (names != value) for value in values])
        each = fit_rows(predict, start(), targets, part, weights, pad)
        fold = np.array([values.index(x) for x in names])
        found[number][index] = answers(predict, part, {n: v[fold] for n, v in each.items()})
    return [np.where(x > 0, x, np.nan) for x in found]


def _subset(rows: Measured, index: np.ndarray) -> Measured:
    pick = functools.partial(jax.tree.map, lambda leaf: np.asarray(leaf)[index])
    return Measured(
        rows.frame.iloc[index].reset_index(drop=True),
        *(pick(getattr(rows, n)) for n in ("arch", "work", "device", "turns", "phase", "measured")),
    )


def given(name: str, every: Sequence[Measured]) -> list[np.ndarray]:
    """Rows by a method of `GIVEN`, its published coefficients, as `left_out` returns them."""
    predict, coefficients = GIVEN[name]
    found = []
    for rows in every:
        sets = {g: coefficients(g) for g in ("h100", "a100")}
        gpu = np.where(rows.frame["device"].str.startswith("a1"), "a100", "h100")
        each = {n: np.array([sets[g][n] for g in gpu]) for n in sets["h100"]}
        values = answers(predict, rows, each)
        found.append(np.where(values > 0, values, np.nan))
    return found


def scenarios(frame: pd.DataFrame) -> np.ndarray:
    """WattGPU's scenario of every row: a fixed batch is offline, a server is at low or high load.

    The published split is by requests a second, which these sources do not give: below `LOW_LOAD`
    sequences at once the load is low.
    """
    served = np.where(frame["batch"] < LOW_LOAD, "server_low", "server_high")
    return np.where(frame["continuous"] > 0, served, "offline")


def load_scaled(frame: pd.DataFrame, tdp_targets: np.ndarray) -> np.ndarray:
    """The answers of the power limit times time, energy times the load factor of the scenario."""
    found = tdp_targets.copy()
    factor = np.array([tdp.LOAD_FACTORS[s] for s in scenarios(frame)])
    found[:, TARGETS.index("energy")] *= factor
    return found


# --- SweetSpot --------------------------------------------------------------------------------


def _per_output_token(rows: Measured) -> tuple[np.ndarray, np.ndarray]:
    """Measured joules per output token [n_rows], NaN where not measured, and tokens of a row."""
    steady = np.asarray(rows.phase)[:, 0] > 0
    output = np.where(steady, 1.0, np.asarray(rows.work.output_tokens, np.float64))
    tokens = rows.frame["batch"].to_numpy(np.float64) * output
    return rows.measured[:, TARGETS.index("energy")] / tokens, tokens


def sweetspot_left_out(every: Sequence[Measured], by: str = "group") -> list[np.ndarray]:
    """Rows by the cross-model SweetSpot, fitted without their architecture.

    SweetSpot knows one batching regime: rows are fitted for each engine, device and power of two
    of the batch, where six rows of other models have it, else for each engine and device.
    """
    found = []
    for rows in every:
        energy, tokens = _per_output_token(rows)
        known = np.isfinite(energy)
        lengths = [np.asarray(getattr(rows.work, n), np.float64)
                   for n in ("prompt_tokens", "output_tokens")]  # fmt: skip
        groups = rows.frame["group"].to_numpy()
        logs = {g: np.asarray(sweetspot.log_sizes(group_architecture(g))) for g in set(groups)}
        sizes = np.stack([logs[g] for g in groups]).astype(np.float64)
        device = rows.frame["device"].to_numpy()
        bucket = np.round(np.log2(rows.frame["batch"].to_numpy(float)))
        out = np.full((len(groups), len(TARGETS)), np.nan)
        left = rows.frame[by].to_numpy()
        cells = {(d, b, v) for d, b, v in zip(device[known], bucket[known], left[known],
                                              strict=True)}  # fmt: skip
        for d, b, value in sorted(cells, key=str):
            here = known & (device == d) & (bucket == b) & (left == value)
            others = known & (left != value) & ((device == d) | (by == "device"))
            train = others & (bucket == b)
            train = train if train.sum() >= 6 else others
            if train.sum() < 6:
                continue
            c = sweetspot.fit_across_models(
                sizes[train], lengths[0][train], lengths[1][train], energy[train]
            )
            powers = sizes[here] @ np.asarray(c["slopes"], np.float64) + c["log_theta"]
            terms = sweetspot.terms(lengths[0][here], lengths[1][here])
            joules = (terms * np.exp(powers)).sum(1) * tokens[here]
            out[np.flatnonzero(here), TARGETS.index("energy")] = joules
        found.append(out)
    return found


def sweetspot_per_model(every: Sequence[Measured]) -> pd.DataFrame:
    """SweetSpot's own protocol: six coefficients for each model, engine, device and batch.

    Returns:
        One row for each cell with seven rows or more: its keys, n, `in_sample` (MAPE, percent) and
        `left_length_out`, where the prompt length of a row was not fitted; None where a fit
        without it would have fewer than six rows.
    """
    found = []
    for rows in every:
        energy, _ = _per_output_token(rows)
        frame = rows.frame.assign(
            energy=energy,
            n_in=np.round(np.asarray(rows.work.prompt_tokens, np.float64)),
            n_out=np.asarray(rows.work.output_tokens, np.float64),
            size=np.round(np.log2(rows.frame["batch"])),
        )
        frame = frame[np.isfinite(frame["energy"]) & (rows.phase[:, 2] > 0)]
        keys = ["engine", "device", "group", "tensor_parallel"]
        for key, cell in frame.groupby(keys):
            for batch, one in [*cell.groupby("size"), (None, cell)]:
                if len(one) >= 7:
                    error = _sweetspot_errors(one)
                    name = 2.0**batch if batch is not None else None
                    found.append(dict(zip(keys, key, strict=True)) | dict(batch=name, **error))
    return pd.DataFrame(found)


def _sweetspot_errors(one: pd.DataFrame) -> dict[str, Any]:
    n_in, n_out, energy = (one[n].to_numpy(float) for n in ("n_in", "n_out", "energy"))

    def error(train, test) -> float:
        theta = sweetspot.fit_theta(n_in[train], n_out[train], energy[train])
        predicted = sweetspot.terms(n_in[test], n_out[test]) @ theta
        return float(np.mean(np.abs(predicted / energy[test] - 1.0)) * 100.0)

    every = np.ones(len(one), bool)
    folds = [n_in == length for length in np.unique(n_in)]
    usable = all((~test).sum() >= 6 for test in folds) and len(folds) > 1
    outside = None
    if usable:
        outside = float(np.average([error(~t, t) for t in folds], weights=[t.sum() for t in folds]))
    return dict(n=len(one), in_sample=error(every, every), left_length_out=outside)
