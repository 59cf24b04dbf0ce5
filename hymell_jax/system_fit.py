"""Fitting level 3 to measured whole models: what a row predicts, engine terms, networks.

Block costs come in as numbers, so the same fit runs on level 1 alone or on levels 1 and 2. Where a
source hides the prompt length, blocks are given on a grid of prompts and read off in between, and
the length is fitted, one for each task. Each campaign (device, task, one GPU or several) may have
host work of its own per step and per request, nearly zero unless the rows insist.

Folds run together: the leading axis of `weights` holds one weight vector per left-out model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hymell_jax import serving
from hymell_jax.mlp import Params, apply_mlp, init_ensemble
from hymell_jax.serving import NETWORK, Blocks
from hymell_jax.types import Architecture, Device, Workload

TARGETS = ("prefill", "decode", "steady", "median", "total", "energy")
"""What a row may have measured: seconds of the prefill pass, of a decode step, of the mean and the
median step under continuous batching, of the whole run; joules of a step, a pass or the run."""

LOSS_WIDTH = 0.03  # relative errors below this count quadratically
MEAN_WEIGHT = 0.5  # of the mean step, which says again what the median step says
PRIOR_WEIGHT = 1e-3
HOST_TERMS = (
    "log_launch_s", "log_step_s", "log_request_s", "log_parallel_s", "log_fp8_layer_s",
)  # fmt: skip
HIDDEN_PREFILL_WIDTH = 0.05  # of ln of the factor of prefill, where no prompt length was published
HOST_WIDTH = 0.5  # prior of ln of a machine's host speed against the others of its engine
PROMPT_PRIOR = (float(np.log(500.0)), 1.5)  # ln tokens, where a source does not say
CAMPAIGN_PRIOR = (np.log([1e-4, 1e-6]).astype(np.float32), 3.0)  # ln s a step, ln s a request
STEPS, LEARNING_RATE = 800, 0.05
NETWORK_STEPS, NETWORK_RATE, NETWORK_DECAY = 150, 3e-3, 0.1


Priors = Mapping[str, tuple[float, float]]
"""(mean, width) of every coefficient, as `serving.priors` gives them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Measured rows as arrays; leaves [n_rows, ...]."""

    arch: Architecture
    device: Device
    work: Workload
    prefill: Blocks  # [n_rows, n_grid, ...]
    decode: Blocks
    prompt_known: jax.Array  # 1 where the prompt length was published
    task: jax.Array  # index, of those with an unknown prompt
    campaign: jax.Array  # index
    machine: jax.Array  # index of the device
    turns: jax.Array
    phase: jax.Array  # [n_rows, 3]: the energy is of a steady step, of the prefill, of the run
    measured: jax.Array  # [n_rows, n_targets], NaN where not measured


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How many of each there are, and the grid of prompts."""

    tasks: int
    campaigns: int
    machines: int
    grid: tuple[float, ...]  # tokens, in equal steps of their logarithm


def start(sizes: Sizes, values: Priors) -> dict[str, Any]:
    """Where a fit starts: the priors."""
    energy = {n: jnp.full(sizes.machines, values[n][0]) for n in serving.ENERGY_COEFFICIENTS}
    time = {n: jnp.asarray(values[n][0]) for n in serving.ENGINE_COEFFICIENTS}
    found = {
        "time": time,
        "energy": energy,
        "host": jnp.zeros(sizes.machines),
        "prompt": jnp.full(max(sizes.tasks, 1), PROMPT_PRIOR[0]),
        "campaign": jnp.tile(jnp.asarray(CAMPAIGN_PRIOR[0])[None], (sizes.campaigns, 1)),
    }
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), found)


def penalty(values: Mapping[str, Any], expected: Priors, hidden_prompts: bool = False) -> jax.Array:
    """Squared distance from the priors in units of their widths.

    Where a source hides its prompt lengths, these and the speed of prefill cannot be told apart:
    the lower levels' prefill then stands.
    """
    priors = dict(expected)
    total: jax.Array | float = 0.0
    if hidden_prompts:
        priors["log_prefill"] = (0.0, HIDDEN_PREFILL_WIDTH)
    for kind in ("time", "energy"):
        for name, value in values[kind].items():
            mean, width = priors[name]
            if name not in serving.FLAGS:
                total += jnp.sum(jnp.square((value - mean) / width))
    total += jnp.sum(jnp.square(values["host"] / HOST_WIDTH))
    total += jnp.sum(jnp.square((values["prompt"] - PROMPT_PRIOR[0]) / PROMPT_PRIOR[1]))
    away = (values["campaign"] - CAMPAIGN_PRIOR[0][None]) / CAMPAIGN_PRIOR[1]
    return total + jnp.sum(jnp.square(away))


def machine_coefficients(values: Mapping[str, Any], machine) -> dict[str, jax.Array]:
    """Coefficients of `serving` for one machine, from a fit over all machines of an engine."""
    found = dict(values["time"])
    for name in HOST_TERMS:
        found[name] = found[name] + values["host"][machine]
    return found | {name: value[machine] for name, value in values["energy"].items()}


def _read_grid(table: jax.Array, log_prompt: jax.Array, sizes: Sizes) -> jax.Array:
    """[n_grid, ...] read at one prompt length, linear in logs between the points of the grid."""
    if len(sizes.grid) == 1:
        return table[0]
    first, step = np.log(sizes.grid[0]), np.log(sizes.grid[1] / sizes.grid[0])
    place = jnp.clip((log_prompt - first) / step, 0.0, len(sizes.grid) - 1.001)
    index = jnp.floor(place).astype(jnp.int32)
    share = place - index
    low, high = (jnp.maximum(table[index + i], 1e-30) for i in (0, 1))
    return jnp.exp((1.0 - share) * jnp.log(low) + share * jnp.log(high))


def _at_prompt(values, row: Rows, sizes: Sizes) -> tuple[Workload, tuple[Blocks, Blocks]]:
    """The workload and the blocks of a row at its known or fitted prompt length."""
    log_prompt = jnp.where(
        row.prompt_known > 0, jnp.log(row.work.prompt_tokens), values["prompt"][row.task]
    )
    prompt = jnp.exp(log_prompt)
    work = dataclasses.replace(
        row.work,
        prompt_tokens=prompt,
        context_start_tokens=prompt,
        context_end_tokens=prompt + row.work.output_tokens,
    )
    read = functools.partial(_read_grid, log_prompt=log_prompt, sizes=sizes)
    return work, (jax.tree.map(read, row.prefill), jax.tree.map(read, row.decode))


def predict_row(
    values: Mapping[str, Any], network: Mapping[str, Any] | None, row: Rows, sizes: Sizes
) -> tuple[jax.Array, jax.Array]:
    """(what the row's targets should read [n_targets], scales [2, 2] of its errors)."""
    work, (prefill, decode) = _at_prompt(values, row, sizes)
    c = machine_coefficients(values, row.machine)
    served = serving.serve_blocks(c, network, row.device, row.arch, work, prefill, decode)
    extra = jnp.exp(values["campaign"][row.campaign])
    extra_s = extra[0] + work.batch_size * extra[1]
    reach = row.device.power_limit_w - row.device.idle_power_w
    idle_w = row.device.idle_power_w + jnp.exp(c["log_gap_share"]) * reach
    extra_j = extra_s * idle_w * work.tensor_parallel
    step_s, step_j = served.decode_time_s + extra_s, served.decode_energy_j + extra_j
    energies = jnp.stack(
        [
            served.steady_energy_j + extra_j,
            served.prefill_energy_j,
            row.turns * (served.prefill_energy_j + work.output_tokens * step_j),
        ]
    )
    found = [
        served.prefill_time_s,
        step_s,
        served.steady_time_s + extra_s,
        served.steady_median_s + extra_s,
        row.turns * (served.prefill_time_s + work.output_tokens * step_s),
        jnp.sum(row.phase * energies),
    ]
    return jnp.stack(found), served.scale


def predict(values, network, rows: Rows, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """`predict_row` of all rows: [n_rows, n_targets] and [n_rows, 2, 2]."""
    return jax.vmap(lambda row: predict_row(values, network, row, sizes))(rows)


def predict_bare_row(values: Mapping[str, Any], row: Rows, sizes: Sizes) -> jax.Array:
    """The blocks of a row added up, [n_targets]: nothing of level 3 but the prompt length."""
    work, (prefill, decode) = _at_prompt(values, row, sizes)
    prefill_s, decode_s = jnp.sum(prefill.time_s), jnp.sum(decode.time_s)
    prompts = 1.0 / work.output_tokens  # of the batch's, in a mean step
    energies = jnp.stack(
        [
            decode.energy_j + prompts * prefill.energy_j,
            prefill.energy_j,
            row.turns * (prefill.energy_j + work.output_tokens * decode.energy_j),
        ]
    )
    found = [
        prefill_s,
        decode_s,
        decode_s + prompts * prefill_s,
        decode_s,
        row.turns * (prefill_s + work.output_tokens * decode_s),
        jnp.sum(row.phase * energies),
    ]
    return jnp.stack(found)


def _bent(error: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.square(error) + LOSS_WIDTH**2) - LOSS_WIDTH


def misfit(predicted: jax.Array, rows: Rows, weights: jax.Array) -> jax.Array:
    """Weighted mean of bent log errors, and of how far the mean step exceeds the median one."""
    known = jnp.isfinite(rows.measured)
    measured = jnp.where(known, rows.measured, 1.0)
    error = jnp.where(known, jnp.log(jnp.where(known, predicted, 1.0) / measured), 0.0)
    share = np.array([MEAN_WEIGHT if t == "steady" else 1.0 for t in TARGETS], np.float32)
    total = jnp.sum(weights[:, None] * _bent(error) * known * share[None])
    mean, median = TARGETS.index("steady"), TARGETS.index("median")
    both = known[:, mean] & known[:, median]
    gap = (predicted[:, mean] - predicted[:, median]) - (measured[:, mean] - measured[:, median])
    total += jnp.sum(jnp.where(both, weights * _bent(gap / measured[:, median]), 0.0))
    return total / jnp.sum(weights)


def fit_engine(rows: Rows, sizes: Sizes, weights: np.ndarray, priors: Priors) -> dict[str, Any]:
    """Terms of one engine, for each of the weight vectors [n_folds, n_rows].

    Minimises the misfit plus `PRIOR_WEIGHT` times the penalty: Adam, cosine decay, all rows a step.

    Returns:
        The tree of `start` with a leading axis [n_folds].
    """
    optimiser = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, STEPS))
    first = start(sizes, priors)

    def loss(values, fold):
        predicted, _ = predict(values, None, rows, sizes)
        return misfit(predicted, rows, fold) + PRIOR_WEIGHT * penalty(
            values, priors, sizes.tasks > 1
        )

    def one(fold):
        def step(carry, _):
            values, state = carry
            gradient = jax.grad(loss)(values, fold)
            for flag in serving.FLAGS:
                gradient["time"][flag] = jnp.zeros_like(gradient["time"][flag])
            updates, state = optimiser.update(gradient, state)
            return (optax.apply_updates(values, updates), state), None

        return jax.lax.scan(step, (first, optimiser.init(first)), length=STEPS)[0][0]

    return jax.jit(jax.vmap(one))(jnp.asarray(weights, jnp.float32))


def residuals(values, rows: Rows, sizes: Sizes) -> dict[str, jax.Array]:
    """What the physics leaves of each row, and the features of the pass that it is put down to.

    A row belongs to the pass that was measured, or that takes most of the run. Energy is put down
    to U: the measured power gives s, and s^-1 gives U / T, held where the limit hides it.

    Returns:
        "time" and "energy": features [n_rows, n], "time_error" and "energy_error": ln(measured over
        predicted) [n_rows], NaN where not measured.
    """
    predicted, _ = predict(values, None, rows, sizes)
    ratio = jnp.log(rows.measured / predicted)
    prefill = TARGETS.index("prefill")
    others = jnp.array([TARGETS.index(t) for t in ("decode", "median", "steady", "total")])
    rest = ratio[:, others]
    known = jnp.isfinite(rest)
    rest = jnp.sum(jnp.where(known, rest, 0.0), 1) / jnp.sum(known, 1)
    time_error = jnp.where(jnp.sum(known, 1) > 0, rest, ratio[:, prefill])

    def one(row):
        work, blocks = _at_prompt(values, row, sizes)
        c, found = machine_coefficients(values, row.machine), []
        for here, prefill in zip(blocks, (True, False), strict=True):
            done = serving.serve_pass(c, row.device, row.arch, work, here, prefill)
            args = (row.arch, work, done, prefill)
            found.append(
                (serving.features(*args, done.time_s), serving.features(*args, done.shares_s))
            )
        only_prefill = row.phase[1] > 0
        return jax.tree.map(lambda a, b: jnp.where(only_prefill, a, b), *found)

    time, energy = jax.vmap(one)(rows)
    joules = TARGETS.index("energy")
    energy_error = _share_error(rows, predicted[:, joules])
    return dict(time=time, energy=energy, time_error=time_error, energy_error=energy_error)


def _share_error(rows: Rows, predicted_j: jax.Array) -> jax.Array:
    """ln of the factor on U that explains the measured energy, at the measured time."""
    steady, prefill, whole = (TARGETS.index(t) for t in ("steady", "prefill", "total"))
    seconds = rows.phase[:, 0] * jnp.nan_to_num(rows.measured[:, steady])
    seconds += rows.phase[:, 1] * jnp.nan_to_num(rows.measured[:, prefill])
    seconds += rows.phase[:, 2] * jnp.nan_to_num(rows.measured[:, whole])
    gpus_s = jnp.maximum(seconds, 1e-9) * rows.work.tensor_parallel
    reach = rows.device.power_limit_w - rows.device.idle_power_w

    def load(energy_j):
        share = (energy_j / gpus_s - rows.device.idle_power_w) / reach
        share = jnp.clip(share, 0.05, 0.97)
        return share / (1.0 - share**8) ** 0.125

    measured = rows.measured[:, TARGETS.index("energy")]
    return jnp.log(load(measured) / load(predicted_j))


def fit_networks(
    z: jax.Array, errors: np.ndarray, weights: np.ndarray, scales: jax.Array, seeds: Sequence[int]
) -> Params:
    """Networks on what the physics leaves, for every fold and seed at once.

    AdamW, cosine decay, all rows a step, on the bent error; folds and seeds are vmapped axes.

    Args:
        z: standardised features [n_folds, n_rows, n].
        errors: [n_folds, n_rows] ln(measured over physics), NaN where not measured.
        weights: [n_folds, n_rows], 0 where a row is left out.
        scales: [n_folds] `mlp.level1_scale` of each fold's normaliser.
        seeds: one a member.

    Returns:
        Parameters with leading axes [n_folds, n_members].
    """
    known = np.isfinite(errors) & (weights > 0)
    rows = tuple(
        jnp.asarray(a, jnp.float32)
        for a in (z, np.where(known, errors, 0.0), weights * known, scales)
    )
    optimiser = optax.adamw(
        optax.cosine_decay_schedule(NETWORK_RATE, NETWORK_STEPS), weight_decay=NETWORK_DECAY
    )

    def member(params, z, error, weight, scale):
        def loss(params):
            left = apply_mlp(params, NETWORK, z, scale) - error
            return jnp.sum(weight * _bent(left)) / jnp.sum(weight)

        def step(carry, _):
            params, state = carry
            updates, state = optimiser.update(jax.grad(loss)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimiser.init(params)), length=NETWORK_STEPS)[0][0]

    first = init_ensemble(NETWORK, z.shape[-1], seeds)
    over_seeds = jax.vmap(member, in_axes=(0, None, None, None, None))
    return jax.jit(jax.vmap(over_seeds, in_axes=(None, 0, 0, 0, 0)))(first, *rows)
