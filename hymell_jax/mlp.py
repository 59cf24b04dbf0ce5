"""Level 2: a small network per block that corrects level 1 by a bounded factor.

    ln t = ln t_level1 + fade(z) bound tanh(mlp(z) / bound),    z = (features - mean) / std

The last layer starts at zero, so before training the correction is zero and level 2 is level 1. It
never exceeds the bound, and it fades out away from the features that it was trained on, where
level 1 stands alone again. An ensemble is a leading axis of every parameter array; its mean is the
correction, its spread says how much the members disagree.

With `MLPSpec.n_monotone` the *time*, not the correction, does not decrease in the first features:

    mlp(z) = |w| z_level1 + g(z) - z_level1,    g non-decreasing in the first n_monotone features,

with z_level1 the last of them, ln t_level1. In g their weights and those of all later layers are
absolute values, each layer mixes convex, concave and saturating units (Runje and Shankaranarayana,
arXiv 2205.11775), and the other features enter every layer freely through an embedding. Then
ln t = ln t_level1 + f bound tanh(mlp / bound) does not decrease either, because its slope is a
mean of those of ln t_level1 and of ln t_level1 + mlp.

This is the only module that imports Flax. Parameters are plain nested dicts of float32 arrays,
`{"Dense_0": {"kernel": [n_members, n_in, width], "bias": [n_members, width]}, ...}`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hymell_jax.smooth import bounded

Params = dict[str, dict[str, jax.Array]]
Features = jax.Array | np.ndarray | tuple[jax.Array, jax.Array]
"""[..., n_in], or the monotone and the free ones apart: free ones that do not vary along an axis of
`jax.vmap` are then embedded once."""
Progress = Callable[[str, int, int], None]
"""Called with (what is fitted, steps done, steps in all)."""

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nn.silu,
    "gelu": nn.gelu,
    "tanh": nn.tanh,
}

STEPS_PER_CALL = 250
WARM_UP_STEPS = 200
LOSS_WIDTH = 0.02  # relative errors below this count quadratically
VECTOR = 8  # units of a kind are padded to a multiple of it: processors compute as many at a time
LEAST_STD = 1e-3  # of a feature that hardly varies in training
FADE_WIDTH = 0.5  # standard deviations outside the training range at which 1/e is left
FADE_OCTAVES = 4.0  # the same above the range of a monotone feature, in its own unit, a doubling
N_KINDS = 3  # of units in a monotone layer


@dataclasses.dataclass(frozen=True)
class MLPSpec:
    """Shape of one network; static, so it may be hashed.

    Attributes:
        hidden: widths of the hidden layers.
        activation: one of `ACTIVATIONS`.
        bound: greatest |correction| of ln(time).
        n_monotone: leading features in which the time must not decrease, log2 each, the last of
            them log2 of the level-1 time; 0 for a plain network.
        embedding: width of the free features' embedding in a monotone network.
    """

    hidden: tuple[int, ...] = (48, 48)
    activation: str = "silu"
    bound: float = math.log(4.0)
    n_monotone: int = 0
    embedding: int = 24

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(int(width) for width in self.hidden))
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"hidden must hold positive widths; got {self.hidden}.")
        if self.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation must be one of {known}; got {self.activation!r}.")
        if not 0.0 < self.bound < 10.0:
            raise ValueError(f"bound must lie between 0 and 10; got {self.bound!r}.")
        if self.n_monotone < 0 or self.embedding < 1:
            raise ValueError("n_monotone must not be negative, embedding at least 1.")
        if self.n_monotone and any(width % N_KINDS for width in self.hidden):
            raise ValueError(f"hidden widths of a monotone network must be multiples of {N_KINDS}.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Normalizer:
    """What training saw of each feature, float32 arrays [n_in]."""

    mean: jax.Array
    std: jax.Array
    low: jax.Array  # least value in training
    high: jax.Array  # greatest value in training


class _Network(nn.Module):
    """[..., n_in] -> [...], unbounded; zero at the start."""

    spec: MLPSpec

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.spec.hidden:
            x = ACTIVATIONS[self.spec.activation](nn.Dense(width)(x))
        return nn.Dense(1, kernel_init=nn.initializers.zeros)(x)[..., 0]


def _positive(weight: jax.Array) -> jax.Array:
    """|w|, with slope 1 at zero, so that a weight can leave it."""
    return jnp.where(weight >= 0, weight, -weight)


@jax.custom_jvp
def _rise(x: jax.Array) -> jax.Array:
    """softplus(x) - ln 2: convex, increasing, zero at zero."""
    return jnp.maximum(x, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(x))) - math.log(2.0)


_rise.defjvps(lambda slope, _, x: slope * nn.sigmoid(x))


def _mixed_units(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Increasing activations: a third each convex, concave and saturating; zero at zero."""
    convex, concave, saturating = jnp.split(x, N_KINDS, axis=-1)
    return _rise(convex), -_rise(-concave), jnp.tanh(saturating)


def _product(parts: tuple[jax.Array, ...], kernel: jax.Array) -> jax.Array:
    """The parts side by side times a kernel, without laying them side by side.

    A compiler that fuses the units into one array computes them anew for every use.
    """
    edges = np.cumsum([part.shape[-1] for part in parts])[:-1]
    pieces = jnp.split(kernel, edges)
    return jnp.asarray(sum(part @ rows for part, rows in zip(parts, pieces, strict=True)))


def _together(features: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Both groups as one array, for a network that keeps others apart or none."""
    leading = jnp.broadcast_shapes(*(group.shape[:-1] for group in features))
    wide = [jnp.broadcast_to(group, (*leading, group.shape[-1])) for group in features]
    return jnp.concatenate(wide, axis=-1)


def _apart(features: Features, n_monotone: int) -> tuple[jax.Array, jax.Array]:
    """(monotone, free) features."""
    if isinstance(features, tuple):
        if features[0].shape[-1] == n_monotone:
            return features
        features = _together(features)
    features = 1.0 * jnp.asarray(features)
    return features[..., :n_monotone], features[..., n_monotone:]


class _MonotoneNetwork(nn.Module):
    """[..., n_in] -> [...]: |w| s z_y + g(z) - s z_y, s z_y the level-1 log time; zero at start."""

    spec: MLPSpec

    @nn.compact
    def __call__(self, x: Features, level1_scale: jax.Array) -> jax.Array:
        spec = self.spec
        monotone, free = _apart(x, spec.n_monotone)
        for _ in range(2):
            free = nn.silu(nn.Dense(spec.embedding)(free))
        scaled = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        hidden: tuple[jax.Array, ...] = (monotone,)
        n_in = spec.n_monotone
        for layer, width in enumerate(spec.hidden):
            kernel = self.param(f"monotone_{layer}", scaled, (n_in, width))
            offset = nn.Dense(width, bias_init=nn.initializers.normal(0.5))(free)
            hidden, n_in = _mixed_units(_product(hidden, _positive(kernel)) + offset), width
        zero = nn.initializers.zeros
        last = self.param("monotone_out", zero, (n_in,))
        slope = self.param("level1_slope", nn.initializers.ones, ())
        offset = nn.Dense(1, kernel_init=zero)(free)[..., 0]
        level1 = level1_scale * monotone[..., -1]
        return _product(hidden, _positive(last)) + offset + (_positive(slope) - 1.0) * level1


def fit_normalizer(features: np.ndarray) -> Normalizer:
    """Mean, standard deviation and range of training features [n_rows, n_in].

    Raises:
        ValueError: not a table with rows, or not finite.
    """
    table = np.asarray(features, np.float64)
    if table.ndim != 2 or not table.size or not np.isfinite(table).all():
        raise ValueError(f"features must be finite, [n_rows, n_in]; got shape {table.shape}.")
    columns = {
        "mean": table.mean(0),
        "std": table.std(0) + LEAST_STD,
        "low": table.min(0),
        "high": table.max(0),
    }
    return Normalizer(**{name: value.astype(np.float32) for name, value in columns.items()})


def normalise(normalizer: Normalizer, features: jax.Array | np.ndarray) -> jax.Array:
    """(features - mean) / std, shape [..., n_in]."""
    features = 1.0 * jnp.asarray(features)
    shape = (1,) * (features.ndim - 1) + (-1,)
    mean, std = (jnp.reshape(x, shape) for x in (normalizer.mean, normalizer.std))
    return (features - mean) / std


def _ranges(normalizer: Normalizer, n_monotone: int) -> tuple[Normalizer, Normalizer]:
    """What training saw of the monotone and of the free features."""
    return (
        jax.tree.map(lambda leaf: leaf[:n_monotone], normalizer),
        jax.tree.map(lambda leaf: leaf[n_monotone:], normalizer),
    )


def _standardised(normalizer: Normalizer, features: Features, n_monotone: int) -> Features:
    """`normalise` of both groups, or of all features where none is monotone."""
    ranges, groups = _ranges(normalizer, n_monotone), _apart(features, n_monotone)
    sizes, free = (normalise(*pair) for pair in zip(ranges, groups, strict=True))
    return (sizes, free) if n_monotone else free


def _above(normalizer: Normalizer, features: jax.Array) -> jax.Array:
    """How far features [..., n_in] lie above the training range, in their own units."""
    high = jnp.reshape(normalizer.high, (1,) * (features.ndim - 1) + (-1,))
    return jnp.maximum(features - high, 0.0)


def familiarity(
    normalizer: Normalizer, features: Features, n_monotone: int = 0, above: bool = True
) -> jax.Array:
    """exp(-sum (distance outside the training range / width)^2), [...].

    The width is `FADE_WIDTH` standard deviations. Of the first `n_monotone` features only sizes
    above the range count, over `FADE_OCTAVES`: slow enough to keep the time increasing; with
    `above` false not even these.
    Hard limits: 1 inside the range of every feature, 0 far outside. Continuous first derivative.
    """
    sizes, free = _apart(features, n_monotone)
    of_sizes, of_free = _ranges(normalizer, n_monotone)
    shape = (1,) * (free.ndim - 1) + (-1,)
    low, std = (jnp.reshape(x, shape) for x in (of_free.low, of_free.std))
    outside = (_above(of_free, free) + jnp.maximum(low - free, 0.0)) / (std * FADE_WIDTH)
    total = jnp.sum(jnp.square(jnp.minimum(outside, 1e3)), axis=-1)
    if n_monotone and above:  # sizes go together, so the farthest counts, not their sum
        farthest = jnp.max(_above(of_sizes, sizes), axis=-1) / FADE_OCTAVES
        total = total + jnp.square(jnp.minimum(farthest, 1e3))
    return jnp.exp(-total)


def _padded(kernel: jax.Array, axis: int) -> jax.Array:
    """Units side by side along an axis, each kind padded with zeros to a multiple of `VECTOR`."""
    kinds = jnp.split(jnp.asarray(kernel), N_KINDS, axis)
    missing = [(0, 0)] * kernel.ndim
    missing[axis] = (0, -kinds[0].shape[axis] % VECTOR)
    return jnp.concatenate([jnp.pad(kind, missing) for kind in kinds], axis)


def _in_whole_vectors(params: Params, spec: MLPSpec) -> tuple[Params, MLPSpec]:
    """A monotone network with more units that count for nothing, and its shape."""
    if not spec.n_monotone:
        return params, spec
    wide: dict[str, Any] = dict(params)
    wide["monotone_out"] = _padded(wide["monotone_out"], -1)
    for layer in range(len(spec.hidden)):
        offset, name = f"Dense_{2 + layer}", f"monotone_{layer}"
        wide[offset] = {leaf: _padded(x, -1) for leaf, x in params[offset].items()}
        kernel = _padded(wide[name], -1)
        wide[name] = _padded(kernel, -2) if layer else kernel
    widths = tuple(width + N_KINDS * (-width // N_KINDS % VECTOR) for width in spec.hidden)
    return wide, dataclasses.replace(spec, hidden=widths)


def init_mlp(key: jax.Array, spec: MLPSpec, n_in: int) -> Params:
    """Parameters of one network, without an ensemble axis; `apply_mlp` of them is zero."""
    if spec.n_monotone:
        return _MonotoneNetwork(spec).init(key, jnp.zeros((1, n_in)), 1.0)["params"]
    return _Network(spec).init(key, jnp.zeros((1, n_in)))["params"]


def apply_mlp(
    params: Params, spec: MLPSpec, x: Features, level1_scale: jax.Array | float = 1.0
) -> jax.Array:
    """bound tanh(mlp(x) / bound) of one network: [..., n_in] -> [...], within +-bound.

    Args:
        params: without an ensemble axis.
        spec: of the network.
        x: standardised features.
        level1_scale: of a monotone network: ln(time) per unit of the last monotone feature.
    """
    if spec.n_monotone:
        out: Any = _MonotoneNetwork(spec).apply({"params": params}, x, level1_scale)
    else:
        out = _Network(spec).apply({"params": params}, x)
    return bounded(out, spec.bound)


def level1_scale(spec: MLPSpec, normalizer: Normalizer) -> jax.Array:
    """ln(time) per unit of the standardised last monotone feature, which is log2 of a time."""
    return normalizer.std[max(spec.n_monotone - 1, 0)] * math.log(2.0)


def init_ensemble(spec: MLPSpec, n_in: int, seeds: Sequence[int]) -> Params:
    """Parameters of an ensemble, one member a seed, along a leading axis."""
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
    return jax.vmap(lambda key: init_mlp(key, spec, n_in))(keys)


def ensemble_shapes(spec: MLPSpec, n_in: int, members: int) -> dict[str, Any]:
    """Shapes of the arrays of `init_ensemble`, as arithmetic: tracing a network takes longer."""

    def dense(n_from: int, n_to: int) -> dict[str, tuple[int, ...]]:
        return {"kernel": (members, n_from, n_to), "bias": (members, n_to)}

    if not spec.n_monotone:
        widths = (n_in, *spec.hidden, 1)
        return {f"Dense_{i}": dense(*widths[i : i + 2]) for i in range(len(widths) - 1)}
    found: dict[str, Any] = {"Dense_0": dense(n_in - spec.n_monotone, spec.embedding)}
    for i, width in enumerate((spec.embedding, *spec.hidden, 1), 1):
        found[f"Dense_{i}"] = dense(spec.embedding, width)
    widths = (spec.n_monotone, *spec.hidden)
    for i in range(len(spec.hidden)):
        found[f"monotone_{i}"] = (members, *widths[i : i + 2])
    return found | {"monotone_out": (members, widths[-1]), "level1_slope": (members,)}


def correction(
    params: Params,
    spec: MLPSpec,
    normalizer: Normalizer,
    features: Features,
    fade_above: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Correction of ln(time) by an ensemble, and how much its members disagree.

    Args:
        params: with a leading ensemble axis.
        spec: of the networks.
        normalizer: of the training features.
        features: [..., n_in], as they are (not standardised).
        fade_above: whether the correction fades above the range of the monotone features too. Where
            level 1 hardly grows there, fading could make the time fall; without it none does.

    Returns:
        mean [...] within +-bound, and the standard deviation over the members [...].
    """
    scale = level1_scale(spec, normalizer)
    z = _standardised(normalizer, features, spec.n_monotone)
    wide, shape = _in_whole_vectors(params, spec)
    members = jax.vmap(apply_mlp, in_axes=(0, None, None, None))(wide, shape, z, scale)
    fade = familiarity(normalizer, features, spec.n_monotone, fade_above)
    mean = jnp.mean(members, axis=0)
    variance = jnp.mean(jnp.square(members - mean[None]), axis=0)
    spread = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), 0.0)
    return fade * mean, fade * spread


def _optimiser(steps: int, learning_rate: float, weight_decay: float):
    schedule = optax.warmup_cosine_decay_schedule(
        learning_rate / 10.0,
        learning_rate,
        min(WARM_UP_STEPS, steps // 2),
        steps,
        learning_rate / 300.0,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, weight_decay=weight_decay, b2=0.98),
    )


def _relative(error: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.square(error) + LOSS_WIDTH**2)


LOSSES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relative": _relative,
    "smooth_l1": optax.losses.huber_loss,
    "squared": jnp.square,
}
"""Of the error of ln(time); all but the first of the error over the standard deviation of r."""


def _checked_rows(features, base_log_time, log_time, weights) -> tuple[np.ndarray, ...]:
    """(features [n, n_in], residual [n], weights [n] of mean one), float32."""
    features = np.asarray(features, np.float32)
    residual = np.asarray(log_time, np.float64) - np.asarray(base_log_time, np.float64)
    weights = np.ones(len(residual)) if weights is None else np.asarray(weights, np.float64)
    n_rows = len(features) if features.ndim == 2 else 0
    if n_rows == 0 or residual.shape != (n_rows,) or weights.shape != (n_rows,):
        raise ValueError(
            "features must be [n_rows, n_in], log times and weights [n_rows]; got "
            f"{features.shape}, {residual.shape}, {weights.shape}."
        )
    if not (np.isfinite(features).all() and np.isfinite(residual).all()):
        raise ValueError("features and log times must be finite.")
    if not (weights >= 0).all() or weights.sum() <= 0:
        raise ValueError("weights must not be negative, and not all zero.")
    return features, residual.astype(np.float32), (weights / weights.mean()).astype(np.float32)


def fit_ensemble(
    features: np.ndarray,
    base_log_time: np.ndarray,
    log_time: np.ndarray,
    spec: MLPSpec,
    *,
    steps: int = 6000,
    batch: int = 1024,
    learning_rate: float = 5e-3,
    weight_decay: float = 1e-3,
    weights: np.ndarray | None = None,
    scale: float = 1.0,
    seeds: Sequence[int] = (0, 1, 2),
    loss: str = "relative",
    start: Params | None = None,
    progress: Progress | None = None,
) -> Params:
    """Networks trained on what level 1 leaves, r = ln t - ln t_level1 - correction.

    Minimises the weighted mean of sqrt(r^2 + 0.02^2), close to the mean absolute relative error:
    AdamW (b2 0.98), 200 steps of warm-up, cosine decay to 1/300, gradients clipped to norm 1.
    Members differ by their start and by the rows of each step. The same seeds give the same fit.

    Args:
        features: [n_rows, n_in], standardised (`normalise`).
        base_log_time: [n_rows] ln seconds of level 1.
        log_time: [n_rows] measured ln seconds.
        spec: of the networks.
        steps: optimiser steps, rounded up to whole calls of `STEPS_PER_CALL`.
        batch: rows a step, drawn with replacement.
        learning_rate: the greatest.
        weight_decay: of AdamW.
        weights: [n_rows] non-negative, or None for equal ones.
        scale: `level1_scale` of a monotone network.
        seeds: one a member.
        loss: one of `LOSSES`.
        start: parameters to start from, as many members as seeds; by default fresh ones.
        progress: called after every `STEPS_PER_CALL` steps.

    Returns:
        Parameters with a leading ensemble axis, numpy float32.

    Raises:
        ValueError: arrays of unequal length, no rows, numbers that are not finite, an unknown
            loss, a start of another shape.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}; got {loss!r}.")
    rows = tuple(jnp.asarray(a) for a in _checked_rows(features, base_log_time, log_time, weights))
    calls = -(-steps // STEPS_PER_CALL)
    optimiser = _optimiser(calls * STEPS_PER_CALL, learning_rate, weight_decay)
    params = init_ensemble(spec, rows[0].shape[1], seeds)
    if start is not None:
        if jax.tree.map(jnp.shape, dict(start)) != jax.tree.map(jnp.shape, dict(params)):
            raise ValueError("start must have the shapes of the network, one member a seed.")
        params = jax.tree.map(jnp.asarray, dict(start))
    state = jax.vmap(optimiser.init)(params)
    run = _training_run(spec, optimiser, rows, min(batch, len(rows[0])), scale, loss)
    for call in range(calls):
        keys = jax.vmap(lambda s, call=call: jax.random.fold_in(jax.random.key(s), call))(
            jnp.asarray(seeds, jnp.uint32) + jnp.uint32(1)
        )
        params, state = run(params, state, keys)
        if progress is not None:
            progress("network", (call + 1) * STEPS_PER_CALL, calls * STEPS_PER_CALL)
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)


def _training_run(
    spec: MLPSpec, optimiser, rows: tuple[jax.Array, ...], batch: int, scale: float, name: str
):
    """(params, state, keys [n_members]) -> (params, state) after `STEPS_PER_CALL` steps."""
    features, residual, weights = rows
    unit = float(np.std(np.asarray(residual))) + LEAST_STD

    def loss(params: Params, index: jax.Array) -> jax.Array:
        error = apply_mlp(params, spec, features[index], scale) - residual[index]
        return jnp.mean(
            weights[index] * LOSSES[name](error if name == "relative" else error / unit)
        )

    def step(carry: tuple[Params, Any], key: jax.Array):
        params, state = carry
        index = jax.random.randint(key, (batch,), 0, len(residual))
        updates, state = optimiser.update(jax.grad(loss)(params, index), state, params)
        return (optax.apply_updates(params, updates), state), None

    def member(params: Params, state: Any, key: jax.Array):
        keys = jax.random.split(key, STEPS_PER_CALL)
        return jax.lax.scan(step, (params, state), keys)[0]

    return jax.jit(jax.vmap(member))
