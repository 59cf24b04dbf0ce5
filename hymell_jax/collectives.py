"""Level 1: seconds of a collective between the GPUs of one node.

A library has several paths for one collective and takes the cheapest (Thakur, Rabenseifner, Gropp
2005, sections 3 and 4: latency plus bytes over bandwidth; NCCL's protocols and vLLM's custom
kernels choose likewise). With p GPUs and messages of `message_bytes`:

    path      launch + (p - 1) step + traffic / link x (1 + excess) x (p / 2)^sharing
    ring      traffic = rounds (p - 1 + own) / p x bytes: full bandwidth, slow to start
    fast      the same traffic by a quick start and less bandwidth (NCCL's LL, a two-shot kernel)
    shot      traffic = (p - 1) bytes: every GPU reads all others at once
    t         soft minimum of the paths; above a limit an engine no longer offers fast and shot

`rounds` is 2 for all-reduce (reduce-scatter, then all-gather), else 1. `own` <= 1 is the GPU's own
part, copied in its memory. `sharing` is for links that the GPUs share, such as a PCIe root: nearly
0 behind a switch. Message bytes are those of the whole vector: what an all-gather delivers, what a
reduce-scatter takes, what one GPU of an all-to-all sends.

Each path grows with bytes and with p, and so does the minimum. At p = 1 all are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.robust_fit import fit_coefficients
from hymell_jax.smooth import safe_log, smooth_minimum
from hymell_jax.types import Device

ROUNDS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Times that the vector goes round, by collective."""

DEFAULTS: dict[str, float] = {
    "log_ring_s": float(np.log(2e-5)),
    "log_ring_step_s": float(np.log(2e-6)),
    "log_ring_excess": -1.0,
    "log_fast_s": float(np.log(8e-6)),
    "log_fast_step_s": float(np.log(1e-6)),
    "log_fast_excess": 1.0,
    "log_shot_s": float(np.log(5e-6)),
    "log_shot_step_s": float(np.log(1e-7)),
    "log_shot_excess": 0.0,
    "log_limit_bytes": float(np.log(1.2e7)),
    "own_share": -1.0,
    "log_sharing": -3.0,
}
"""Natural logs, `own_share` a logit; relative to the data sheet's link, but launch and steps."""

COLLECTIVE_COEFFICIENTS = tuple(DEFAULTS)

_CHOICE = 32  # sharpness of the soft minimum
_LIMIT = 16.0  # steepness of the limit in ln(bytes)
_FARTHEST = 30.0  # a path beyond its limit costs at most e^30 times as much
_STEPS = 3000


def default_coefficients() -> dict[str, Any]:
    """Start of a fit: a few microseconds, two thirds of the link, no kernels above 12 MB."""
    return {name: np.float32(value) for name, value in DEFAULTS.items()}


def _time_s(c, device: Device, message_bytes, num_gpus, rounds: float) -> jax.Array:
    message_bytes, p = jnp.asarray(message_bytes), jnp.asarray(num_gpus)
    others = jnp.maximum(p - 1.0, 0.0)
    sharing = jnp.exp(jnp.exp(c["log_sharing"]) * jnp.log(jnp.maximum(p, 1.0) / 2.0))
    link_s = message_bytes / device.link_bytes_per_s * sharing
    own = jax.nn.sigmoid(c["own_share"])
    round_s = rounds * (others + own) / jnp.maximum(p, 1.0) * link_s
    traffic = {"ring": round_s, "fast": round_s, "shot": others * link_s}
    over = _LIMIT * (safe_log(message_bytes) - c["log_limit_bytes"])
    offered = 1.0 + jnp.exp(jnp.minimum(over, _FARTHEST))

    def path(name):
        start = jnp.exp(c[f"log_{name}_s"]) + others * jnp.exp(c[f"log_{name}_step_s"])
        return start + traffic[name] * (1.0 + jnp.exp(c[f"log_{name}_excess"]))

    paths = [path("ring"), path("fast") * offered, path("shot") * offered]
    best = smooth_minimum(jnp.stack(jnp.broadcast_arrays(*paths), -1), _CHOICE)
    return jnp.where(others > 0, best, 0.0)


def all_reduce_time_s(
    coefficients: Mapping[str, jax.Array],
    device: Device,
    message_bytes: jax.Array,
    num_gpus: jax.Array,
) -> jax.Array:
    """Seconds of one all-reduce of `message_bytes` on every one of `num_gpus` GPUs; 0 at one.

    Args:
        coefficients: `COLLECTIVE_COEFFICIENTS` of this collective, leaves of shape ().
        device: data sheet.
        message_bytes: of the vector on each GPU, shape [...].
        num_gpus: at least one, shape [...].
    """
    return _time_s(coefficients, device, message_bytes, num_gpus, ROUNDS["all_reduce"])


def all_gather_time_s(coefficients, device, message_bytes, num_gpus) -> jax.Array:
    """Seconds of an all-gather that leaves `message_bytes` on each GPU; see `all_reduce_time_s`."""
    return _time_s(coefficients, device, message_bytes, num_gpus, ROUNDS["all_gather"])


def reduce_scatter_time_s(coefficients, device, message_bytes, num_gpus) -> jax.Array:
    """Seconds of a reduce-scatter of `message_bytes` from each GPU; see `all_reduce_time_s`."""
    return _time_s(coefficients, device, message_bytes, num_gpus, ROUNDS["reduce_scatter"])


def all_to_all_time_s(coefficients, device, message_bytes, num_gpus) -> jax.Array:
    """Seconds of an all-to-all of `message_bytes` from each GPU; see `all_reduce_time_s`."""
    return _time_s(coefficients, device, message_bytes, num_gpus, ROUNDS["all_to_all"])


def fit_collectives(
    device: Device,
    sizes: Mapping[str, np.ndarray],
    time_s: np.ndarray,
    *,
    collective: str = "all_reduce",
    steps: int = _STEPS,
    seed: int = 0,
) -> dict[str, float]:
    """Coefficients of one collective from measured rows.

    Args:
        device: data sheet.
        sizes: "message_bytes" and "num_gpus" [n_rows].
        time_s: [n_rows] measured seconds.
        collective: a name in `ROUNDS`.
        steps, seed: of the fit.

    Raises:
        ValueError: an unknown collective, or see `robust_fit.fit_coefficients`.
    """
    if collective not in ROUNDS:
        known = ", ".join(ROUNDS)
        raise ValueError(f"collective must be one of {known}; got {collective!r}.")
    rounds = ROUNDS[collective]
    return fit_coefficients(
        lambda c, message_bytes, num_gpus: _time_s(c, device, message_bytes, num_gpus, rounds),
        _start(device, sizes, time_s, rounds),
        (sizes["message_bytes"], sizes["num_gpus"]),
        time_s,
        steps=steps,
        seed=seed,
    )


def _start(device: Device, sizes, time_s, rounds: float) -> dict[str, float]:
    """First values: the fastest row for the quick paths, the greatest message for the ring."""
    size, p = (np.asarray(sizes[name], np.float64) for name in ("message_bytes", "num_gpus"))
    time_s = np.asarray(time_s, np.float64)
    if time_s.ndim != 1 or not len(time_s) or size.shape != time_s.shape or p.shape != size.shape:
        return dict(DEFAULTS)  # refused by the fit, with its message
    least = float(np.log(np.maximum(time_s.min(), 1e-9)))
    top = np.argmax(size / p)
    ideal = rounds * (p[top] - 1.0) / p[top] * size[top] / float(device.link_bytes_per_s)
    excess = float(np.log(np.clip(time_s[top] / np.maximum(ideal, 1e-12) - 1.0, 0.1, 30.0)))
    return DEFAULTS | {
        "log_ring_s": least + 1.5,
        "log_ring_excess": excess,
        "log_fast_s": least - 0.2,
        "log_shot_s": least - 0.2,
    }
