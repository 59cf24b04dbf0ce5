"""Level 1: seconds of row-wise and streaming operators, published and refined equations.

RMSNorm, LayerNorm, softmax, rotary positions, activations, residual adds, embedding look-ups and
copies all read and write each element of `rows` x `cols` about once.

Published (HYMELL, arXiv 2608.06723, equations 1 to 4): linear forms with one set of coefficients in
a launch-bound and a memory-bound regime. Here the regimes are soft gates whose hard limit is the
published piecewise form.

Refined: what the kernel does on the device. A kernel hands out rows to the streaming
multiprocessors (SMs), in waves of `slots` = SMs x rows per SM:

    t_wave   = latency of a wave x waves
    t_cache  = bytes of whole waves / (cache speed-up x efficiency x bandwidth)
    t_memory = (bytes + drain x L2) / (efficiency x bandwidth) x misses(bytes / L2)
    t_kernel = t_fixed + ((t_wave + t_cache)^p + t_memory^p)^(1/p)
    t        = (t_launch^q + t_kernel^q)^(1/q)

    misses   1 / (1 + (share x L2 / bytes)^s): what fits in L2 is not read from DRAM
    drain    dirty lines of what ran before, written back once the operator overflows L2
    steps    waves after the second come in two steps, the share `half` when the SMs hold more than
             one block less than they can: blocks are out of step by then, and one with an SM to
             itself runs faster; from the ninth wave on steps keep the share `late` of their height
    rereads  a kernel that reads its input again (LayerNorm, long softmax) finds it in L2 only
             while the rows in flight fit there:
             t_memory x (1 + reread x sigmoid(4 ln(in flight / (share x L2))))
    switch   above `switch_cols` columns another kernel takes over (softmax: one warp a row, held
             in registers, up to 1024 columns, one thread block above, which rereads); it has its
             own latency, slots and cache speed

Every term is positive and non-decreasing in rows and in columns, and so are sums and p-norms: time
is monotone by construction. Sums and norms are taken of logarithms, so float32 is safe from 1 to
1e12 elements and beyond. Far outside the data time is bytes over a constant share of the data-sheet
bandwidth. Efficiency, speed-up, drain and shares are dimensionless and carry to another device by
its data sheet; launch, fixed part and latency of a wave are in seconds.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hymell_jax.smooth import below_gate, safe_log
from hymell_jax.types import Device, Value

Coefficients = dict[str, Any]

REGIMES = ("launch", "memory")

RMSNORM_EDGE_ELEMENTS = 2.5e6  # N d, arXiv 2608.06723
SOFTMAX_EDGE_ROWS = 1024.0  # N, arXiv 2608.06723
SOFTMAX_SWITCH_COLS = 1024.0  # PyTorch: persistent warp softmax up to here, block softmax above

LAYERNORM_REREAD = 0.5  # reads its input twice, writes once: 3 passes, not 2
SOFTMAX_REREAD = 1.0  # the block softmax reads 3 times, writes once: 4 passes, not 2

NO_SWITCH_COLS = 1e30
NO_REREAD = 1e-6
NOT_STAGGERED = 1e-6

KERNELS: dict[str, dict[str, Any]] = {
    "layernorm": {"reread": LAYERNORM_REREAD},
    "softmax": {"switch_cols": SOFTMAX_SWITCH_COLS, "reread": SOFTMAX_REREAD},
}
"""Facts of PyTorch's kernels, for `fit_refined` and `default_coefficients`; others have none.

The warp softmax keeps its row in registers; the block softmax reads it for the maximum, for the sum
and for the result. RMSNorm kernels read twice too, but rows there are short.
"""

WITHIN_RANGE: dict[str, Any] = {"prior_weight": 3e-5, "time_weight": 0.0}
"""Settings of `fit_refined` where predictions stay among the shapes that were measured."""

BEYOND_RANGE: dict[str, Any] = {"prior_weight": 3e-4, "time_weight": 0.5}
"""Settings of `fit_refined` where predictions go to far larger shapes."""

_WAVE_STEPS = 8
_LATE_STEPS = 16
_SWITCH_SHARPNESS = 16.0
_SWITCH_WIDTH = 0.003  # of the gate between kernels, in ln(cols)
_SWITCH_OFFSET = 0.03  # the gate is shut at switch_cols itself
_REREAD_STEEPNESS = 4.0
_SMALL_GRID_WIDTH = 0.3  # in ln(rows)

# name: (least, greatest, start, prior mean, prior standard deviation), of the value, not its log;
# the standard deviation is in natural-log units, None where the data alone decide.
_BOX: dict[str, tuple[float, float, float, float, float | None]] = {
    "log_launch_s": (1e-7, 5e-4, 4e-6, 4e-6, None),
    "log_small_grid_discount": (1e-3, 0.7, 0.01, 0.01, 2.0),
    "log_small_grid_rows": (1.0, 1e3, 8.0, 8.0, 2.0),
    "log_first_wave": (0.3, 1.0, 0.8, 0.8, 0.7),
    "log_wave_quantisation": (0.01, 0.999, 0.6, 0.6, 1.0),
    "log_half_wave": (1e-6, 0.5, 0.1, 0.1, 1.0),
    "log_late_waves": (1e-6, 1.0, 0.5, 0.5, 1.0),
    "log_step_width": (3e-3, 0.5, 0.03, 0.03, 2.0),
    "log_bandwidth_efficiency": (0.05, 0.95, 0.7, 0.8, 0.1),
    "log_drain": (1e-3, 2.0, 0.3, 0.5, 0.7),
    "log_cache_share": (0.1, 1.5, 0.7, 0.7, 0.4),
    "log_cache_steepness": (2.0, 8.0, 3.0, 3.0, 0.4),
    "log_memory_norm": (1.0, 16.0, 3.0, 3.0, 0.7),
    "log_launch_norm": (1.0, 16.0, 3.0, 3.0, 1.5),
    "log_reread_share": (0.05, 20.0, 1.0, 1.0, 0.5),
    "log_fixed_s": (1e-8, 1e-4, 3e-6, 3e-6, None),
    "log_rows_per_sm": (1.0, 64.0, 4.0, 4.0, None),
    "log_wave_s": (1e-9, 1e-4, 1e-6, 1e-6, None),
    "log_cache_speedup": (1.0, 20.0, 3.0, 3.0, 0.5),
    "log_wide_fixed_s": (1e-8, 1e-4, 3e-6, 3e-6, None),
    "log_wide_rows_per_sm": (1.0, 64.0, 4.0, 4.0, None),
    "log_wide_wave_s": (1e-9, 1e-4, 1e-6, 1e-6, None),
    "log_wide_cache_speedup": (1.0, 20.0, 3.0, 3.0, 0.5),
}
_GIVEN = ("log_reread", "log_switch_cols")  # facts of the kernel, not fitted
_STAGGERED = ("log_half_wave", "log_late_waves")
_WIDE = tuple(name for name in _BOX if name.startswith("log_wide_"))

NEUTRAL = dict.fromkeys(_STAGGERED, math.log(NOT_STAGGERED))
"""Coefficients that a checkpoint may leave out: waves in step, none of them late."""

COEFFICIENTS = (*_BOX, *_GIVEN)
"""Names of the refined form, natural logs of positive numbers; seconds where they end in `_s`."""

BOUNDS = {name: (math.log(box[0]), math.log(box[1])) for name, box in _BOX.items()}
"""Least and greatest fitted value of each coefficient; the guarantees hold inside."""


def default_coefficients(
    switch_cols: float = NO_SWITCH_COLS, reread: float = NO_REREAD
) -> dict[str, float]:
    """Starting point of a fit: a launch of 4 us, 70 % of the bandwidth, three times that in L2."""
    values = {name: box[2] for name, box in _BOX.items()}
    values |= {"log_reread": reread, "log_switch_cols": switch_cols}
    return {name: math.log(value) for name, value in values.items()} | NEUTRAL


# Refined form ------------------------------------------------------------------------------------


def _steps(log_x: jax.Array, width: jax.Array, first: float, last: float) -> jax.Array:
    """Unit steps at first, first + 1, ... last, the one at k as wide as k `width`."""
    at = np.log(np.arange(first, last + 0.5))
    return jnp.asarray(sum(jax.nn.sigmoid((log_x - float(step)) / width) for step in at))


def _beyond(x: jax.Array, width: jax.Array, last: int, half: jax.Array | float) -> jax.Array:
    """Waves after the last step, a smooth max(x - last - 1/2 - half / 2, 0)."""
    tail = last * width
    return tail * jax.nn.softplus((x - last - 0.5 - 0.5 * half) / tail)


def _even_waves(x: jax.Array, width: jax.Array) -> jax.Array:
    """`soft_waves` with first = 1 and half = late = 0."""
    return 1.0 + _steps(safe_log(x), width, 1, _WAVE_STEPS) + _beyond(x, width, _WAVE_STEPS, 0.0)


def soft_waves(
    x: jax.Array,
    width: jax.Array,
    first: jax.Array | float = 1.0,
    half: jax.Array | float = 0.0,
    late: jax.Array | float = 0.0,
) -> jax.Array:
    """Waves that x full loads of the device take, smooth and non-decreasing in x > 0.

    Steps at 1, 2, ... 8, the k-th as wide as k `width`: waves blur as blocks drift apart. Then
    x + 1/2, the mean of the ceiling. The first wave counts `first` <= 1, the second 2 - first. Of
    every later one the share `half` comes half a load later; the steps at 9 to 16 keep the share
    `late` of their height.

    Hard limit (width to zero, first = 1, half = late = 0): ceil(x) up to 8, then
    9 + max(x - 8.5, 0).
    """
    x = jnp.asarray(x)
    log_x = safe_log(x)

    def stairs(low, high):
        whole = _steps(log_x, width, low, high)
        return (1.0 - half) * whole + half * _steps(log_x, width, low + 0.5, high + 0.5)

    second = (2.0 - first) * jax.nn.sigmoid(log_x / width)
    smooth = (1.0 - late) * _beyond(x, width, _WAVE_STEPS, half)
    rest = late * (stairs(_WAVE_STEPS + 1, _LATE_STEPS) + _beyond(x, width, _LATE_STEPS, half))
    return first + second + stairs(2, _WAVE_STEPS) + smooth + rest


def _log_norm(order: jax.Array | float, *logs: jax.Array) -> jax.Array:
    """ln of the p-norm of exp(logs), p = order. Hard limit: the maximum of logs as p grows."""
    scaled = [order * log for log in jnp.broadcast_arrays(*logs)]
    return functools.reduce(jnp.logaddexp, scaled) / order


def _log_kernel_s(c: Coefficients, kind: str, device: Device, rows, log_cols, log_element):
    """(ln seconds of a kernel, ln of its fixed part), `kind` "" or "wide_"."""
    slots = device.n_sm * jnp.exp(c[f"log_{kind}rows_per_sm"])
    just_below = rows / (1.0 + 0.5 / rows)  # a full wave is one wave, a row more are two
    width = jnp.exp(c["log_step_width"])
    shares = (jnp.exp(c[f"log_{x}"]) for x in ("first_wave", "half_wave", "late_waves"))
    waves = soft_waves(just_below / slots, width, *shares)
    fine = _even_waves(just_below / device.n_sm, width)
    whole = jnp.exp(c["log_wave_quantisation"])
    log_row = log_cols + log_element
    log_rate = jnp.log(device.memory_bytes_per_s) + c["log_bandwidth_efficiency"]
    log_wave = jnp.log(waves) + c[f"log_{kind}wave_s"]
    filled = whole * slots * waves + (1.0 - whole) * device.n_sm * fine
    log_cache = jnp.log(filled) + log_row - log_rate - c[f"log_{kind}cache_speedup"]

    log_bytes, log_l2 = safe_log(rows) + log_row, jnp.log(device.l2_bytes)
    excess = log_bytes - log_l2 - c["log_cache_share"]
    log_misses = jax.nn.log_sigmoid(jnp.exp(c["log_cache_steepness"]) * excess)
    in_flight = jnp.log(slots) + log_row - math.log(2.0) - log_l2 - c["log_reread_share"]
    in_registers = 0.0 if kind else jax.nn.log_sigmoid(c["log_switch_cols"] - math.log(1e15))
    rereads = jnp.exp(c["log_reread"] + in_registers) * jax.nn.sigmoid(
        _REREAD_STEEPNESS * in_flight
    )
    log_moved = jnp.logaddexp(log_bytes, log_l2 + c["log_drain"]) + jnp.log1p(rereads)
    log_memory = log_moved + log_misses - log_rate

    on_chip = jnp.logaddexp(log_wave, log_cache)
    log_fixed = c[f"log_{kind}fixed_s"]
    streaming = _log_norm(jnp.exp(c["log_memory_norm"]), on_chip, log_memory)
    return jnp.logaddexp(streaming, log_fixed), log_fixed


def _log_either_kernel_s(c: Coefficients, device: Device, rows, log_cols, log_element):
    """(ln seconds of the kernel that runs, ln of the fixed part of the narrow one)."""
    switch = c["log_switch_cols"]
    narrow_cols = -_log_norm(_SWITCH_SHARPNESS, -log_cols, -switch)
    narrow, fixed = _log_kernel_s(c, "", device, rows, narrow_cols, log_element)
    gate = jax.nn.log_sigmoid((log_cols - switch - _SWITCH_OFFSET) / _SWITCH_WIDTH)
    wide, _ = _log_kernel_s(c, "wide_", device, rows, log_cols, log_element)
    return _log_norm(_SWITCH_SHARPNESS, narrow, wide + gate), fixed


def rowwise_log_time(
    coefficients: Coefficients,
    device: Device,
    rows: Value,
    cols: Value,
    bytes_per_element: Value,
    one_kernel: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """ln seconds of a row-wise operator and its regime shares [2, ...]; see `rowwise_time_s`."""
    c = coefficients
    rows, cols = jnp.asarray(rows), jnp.asarray(cols)
    log_cols, log_element = safe_log(cols), safe_log(jnp.asarray(bytes_per_element))
    if one_kernel:
        kernel, fixed = _log_kernel_s(c, "", device, rows, log_cols, log_element)
    else:
        kernel, fixed = _log_either_kernel_s(c, device, rows, log_cols, log_element)

    small = jax.nn.sigmoid((c["log_small_grid_rows"] - safe_log(rows)) / _SMALL_GRID_WIDTH)
    launch = c["log_launch_s"] + jnp.log1p(-jnp.exp(c["log_small_grid_discount"]) * small)
    order = jnp.exp(c["log_launch_norm"])
    log_time = _log_norm(order, launch, kernel)
    streaming = jnp.exp(order * (kernel - log_time))
    streaming = streaming * (1.0 - jnp.minimum(jnp.exp(fixed - kernel), 1.0))
    return log_time, jnp.stack([1.0 - streaming, streaming])


def rowwise_time_s(
    coefficients: Coefficients,
    device: Device,
    rows: Value,
    cols: Value,
    bytes_per_element: Value,
    one_kernel: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Seconds of a row-wise operator and the shares of `REGIMES` in it [2, ...], sum one.

    Args:
        coefficients: `COEFFICIENTS`, natural logs.
        device: leaves of shape () or that of rows.
        rows: independent rows, at least one (tokens, or tokens x heads), shape [...].
        cols: elements of a row, at least one, shape [...].
        bytes_per_element: read and written, over all operands: 4 for RMSNorm in 16 bits.
        one_kernel: no other one takes over above `switch_cols`, which is `NO_SWITCH_COLS`: the same
            answer for less work.

    Time is non-decreasing in rows, cols and bytes. Within `BOUNDS` it is at least
    (bytes - 2 L2) / bandwidth, and from 8 L2 on at least bytes / bandwidth of the data sheet.
    Hard limits: launch and fixed part for one element, bytes / (efficiency x bandwidth) far out.
    """
    log_time, shares = rowwise_log_time(
        coefficients, device, rows, cols, bytes_per_element, one_kernel
    )
    return jnp.exp(log_time), shares


def fit_refined(
    rows: np.ndarray,
    cols: np.ndarray,
    time_s: np.ndarray,
    device: Device,
    bytes_per_element: float | np.ndarray,
    *,
    switch_cols: float = NO_SWITCH_COLS,
    reread: float = NO_REREAD,
    staggered: bool = False,
    prior_weight: float = 3e-4,
    time_weight: float = 0.5,
    starts: int = 8,
    steps: int = 1000,
    max_rows: int = 2500,
    learning_rate: float = 0.05,
    seed: int = 0,
) -> dict[str, float]:
    """Coefficients that minimise the mean absolute log error, Adam from several starts.

    Starts differ in the rows that an SM holds, as waves are steps. A weak Gaussian prior on the
    dimensionless coefficients holds those that the rows do not determine.

    Args:
        rows, cols, time_s: measured rows [n].
        device: leaves of shape () or [n] (several devices at once).
        bytes_per_element: see `rowwise_time_s`; a number, or one for each row.
        switch_cols: columns above which another kernel runs; for it and the next see `KERNELS`.
        reread: share of the traffic that further reads of the input add if they miss L2, above
            `switch_cols` if there are two kernels.
        staggered: whether to fit the steps of waves that are out of step (`half`, `late`).
        prior_weight: of the prior, against the mean loss; see `WITHIN_RANGE`, `BEYOND_RANGE`.
        time_weight: rows weigh time^time_weight: launch-bound rows all say the same.
        starts, steps, learning_rate: of the optimiser.
        max_rows: a random subset of more rows than this is fitted.
        seed: of starts and subset.

    Raises:
        ValueError: no rows, or times that are not positive.
    """
    time_s = np.asarray(time_s, np.float64)
    if time_s.size == 0 or not np.all(time_s > 0):
        raise ValueError(f"fit_refined needs positive times; got {time_s.size} rows.")
    given = default_coefficients(switch_cols, reread)
    fitted = [n for n in _BOX if switch_cols < NO_SWITCH_COLS or n not in _WIDE]
    if reread <= NO_REREAD:
        fitted.remove("log_reread_share")
    if not staggered:
        fitted = [n for n in fitted if n not in _STAGGERED]
    generator = np.random.default_rng(seed)
    kept = np.arange(time_s.size)
    if kept.size > max_rows:
        kept = np.sort(generator.choice(kept, max_rows, replace=False))
    first = _starting_points(fitted, time_s, starts, generator)
    weights = (time_s[kept] / time_s[kept].min()) ** time_weight
    arrays = tuple(
        jnp.asarray(a[kept], jnp.float32)
        for a in (np.asarray(rows), np.asarray(cols), np.log(time_s))
    )
    part = jax.tree.map(lambda leaf: leaf if np.ndim(leaf) == 0 else np.asarray(leaf)[kept], device)
    weights = jnp.asarray(weights / weights.sum(), jnp.float32)
    element = np.asarray(bytes_per_element, np.float32)
    own_bytes = element[kept] if element.ndim else float(element)
    found, losses = _descend(
        first, tuple(fitted), given, part, arrays, weights, own_bytes,
        steps=steps, learning_rate=learning_rate, prior_weight=prior_weight,
    )  # fmt: skip
    losses = np.where(np.isfinite(losses), losses, np.inf)
    best = np.asarray(found)[int(np.argmin(losses))]
    return given | {name: float(v) for name, v in zip(fitted, _into_box(best, fitted), strict=True)}


def _starting_points(fitted, time_s, starts, generator) -> np.ndarray:
    """Unbounded coordinates [starts, n_fitted]."""
    low, high = (np.array([BOUNDS[name][i] for name in fitted]) for i in (0, 1))
    middle = np.array([math.log(_BOX[name][2]) for name in fitted])
    middle[fitted.index("log_launch_s")] = math.log(0.8 * np.quantile(time_s, 0.05))
    points = middle + 0.5 * generator.normal(size=(starts, len(fitted)))
    points[0] = middle
    for index, name in enumerate(fitted):
        if name.endswith("rows_per_sm"):
            points[:, index] = np.log(np.resize([2, 2, 1, 1, 4, 8, 16, 32], starts)) + 0.02
    points[1::2, fitted.index("log_launch_norm")] = math.log(10.0)
    points[1::2, fitted.index("log_launch_s")] = math.log(0.97 * np.quantile(time_s, 0.05))
    points[1::2, fitted.index("log_first_wave")] = math.log(0.6)
    margin = 0.01 * (high - low)
    inside = (np.clip(points, low + margin, high - margin) - low) / (high - low)
    return np.log(inside / (1.0 - inside))


def _into_box(u, fitted):
    low, high = (np.array([BOUNDS[name][i] for name in fitted]) for i in (0, 1))
    return low + (high - low) / (1.0 + np.exp(-np.asarray(u, np.float64)))


def _descend(
    first, fitted, given, device, arrays, weights, element_bytes, *,
    steps, learning_rate, prior_weight,
):  # fmt: skip
    """(unbounded coordinates [starts, n_fitted], losses [starts]) after Adam with cosine decay."""
    low, high = (jnp.asarray([BOUNDS[name][i] for name in fitted]) for i in (0, 1))
    boxes = [_BOX[name] for name in fitted]
    mean = jnp.asarray([math.log(box[3]) for box in boxes])
    precision = jnp.asarray([0.0 if box[4] is None else box[4] ** -2 for box in boxes])
    rows, cols, log_measured = arrays

    def loss(u):
        values = low + (high - low) * jax.nn.sigmoid(u)
        coefficients = given | dict(zip(fitted, values, strict=True))
        log_time, _ = rowwise_log_time(coefficients, device, rows, cols, element_bytes)
        error = jnp.sqrt((log_time - log_measured) ** 2 + 1e-5)
        return jnp.sum(weights * error) + prior_weight * jnp.sum(precision * (values - mean) ** 2)

    schedule = optax.cosine_decay_schedule(learning_rate, steps, 0.01)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    def run(u):
        def step(carry, _):
            u, state = carry
            updates, state = optimiser.update(jax.grad(loss)(u), state)
            return (optax.apply_updates(u, updates), state), None

        (u, _), _ = jax.lax.scan(step, (u, optimiser.init(u)), None, length=steps)
        return u, loss(u)

    found, losses = jax.jit(jax.vmap(run))(jnp.asarray(first, jnp.float32))
    return np.asarray(found), np.asarray(losses)


# Published forms ---------------------------------------------------------------------------------


def published_rmsnorm_terms(rows: Value, cols: Value) -> jax.Array:
    """N d, N log2 d, d, N, log2 d, 1 of equations 1 and 2 of arXiv 2608.06723, [..., 6]."""
    log2_d = jnp.log(cols) / math.log(2.0)
    one = 0.0 * rows * cols + 1.0
    terms = (rows * cols, rows * log2_d, cols * one, rows * one, log2_d * one, one)
    return jnp.stack(terms, -1)


def published_softmax_terms(rows: Value, cols: Value) -> jax.Array:
    """N^2, N, log2 N, 1 of equations 3 and 4 of arXiv 2608.06723, [..., 4].

    The paper's scores are N x N. Here N^2 is rows x cols and N is rows; the same where they agree.
    """
    one = 0.0 * rows * cols + 1.0
    return jnp.stack([rows * cols, rows * one, jnp.log(rows) / math.log(2.0) * one, one], -1)


def published_rmsnorm_gates(rows: Value, cols: Value, temperature: Value) -> jax.Array:
    """Weights of `REGIMES` [..., 2] on ln(N d). Hard limit: launch where N d < 2.5e6."""
    launch = below_gate(jnp.log(rows * cols), math.log(RMSNORM_EDGE_ELEMENTS), temperature)
    return jnp.stack([launch, 1.0 - launch], -1)


def published_softmax_gates(rows: Value, temperature: Value) -> jax.Array:
    """Weights of `REGIMES` [..., 2] on ln N. Hard limit: launch where N < 1024."""
    launch = below_gate(jnp.log(rows), math.log(SOFTMAX_EDGE_ROWS), temperature)
    return jnp.stack([launch, 1.0 - launch], -1)


def published_rmsnorm(
    coefficients: jax.Array, rows: Value, cols: Value, temperature: Value = 0.02
) -> jax.Array:
    """Equations 1 and 2 of arXiv 2608.06723 with soft regimes: seconds or joules, as the fit was.

    Args:
        coefficients: [2, 6], rows in the order of `REGIMES`, columns of `published_rmsnorm_terms`.
        rows, cols: tokens N and width d, shape [...].
        temperature: width of the gate in ln(N d); to zero for the published piecewise form.

    A linear form may be negative or far off outside the shapes that it was fitted on.
    """
    per_regime = published_rmsnorm_terms(rows, cols) @ coefficients.T
    return jnp.sum(published_rmsnorm_gates(rows, cols, temperature) * per_regime, -1)


def published_softmax(
    coefficients: jax.Array, rows: Value, cols: Value, temperature: Value = 0.02
) -> jax.Array:
    """Equations 3 and 4 of arXiv 2608.06723 with soft regimes, see `published_rmsnorm`.

    `coefficients` is [2, 4], columns of `published_softmax_terms`; the gate is on ln(rows).
    """
    per_regime = published_softmax_terms(rows, cols) @ coefficients.T
    gates = published_softmax_gates(rows + 0.0 * cols, temperature)
    return jnp.sum(gates * per_regime, -1)


def published_rmsnorm_regime(rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """Index into `REGIMES` of the hard published regimes of RMSNorm."""
    elements = np.asarray(rows, np.float64) * np.asarray(cols, np.float64)
    return np.where(elements < RMSNORM_EDGE_ELEMENTS, 0, 1)


def published_softmax_regime(rows: np.ndarray) -> np.ndarray:
    """Index into `REGIMES` of the hard published regimes of softmax."""
    return np.where(np.asarray(rows, np.float64) < SOFTMAX_EDGE_ROWS, 0, 1)
