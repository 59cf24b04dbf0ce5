"""Level 1: seconds of a collective between the GPUs of one node.

Ring and one-shot all-reduce, the cheaper of the two (Thakur et al. 2005, section 3; NCCL and
vLLM's custom kernels choose likewise):

    ring      2 (p - 1) a_ring + 2 (p - 1)/p bytes / link x excess
    one shot  a_shot + (p - 1) bytes / link x excess

Both vanish at p = 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.smooth import smooth_minimum
from hymell_jax.types import Device

COLLECTIVE_COEFFICIENTS = (
    "log_ring_step_s",
    "log_ring_excess",
    "log_shot_s",
    "log_shot_excess",
)


def default_coefficients() -> dict[str, np.ndarray]:
    """A few microseconds a step, four fifths of the link."""
    values = dict(
        log_ring_step_s=np.log(3e-6),
        log_ring_excess=np.log(0.5),
        log_shot_s=np.log(6e-6),
        log_shot_excess=np.log(0.5),
    )
    return {name: np.float32(value) for name, value in values.items()}


def all_reduce_time_s(
    coefficients: dict[str, jax.Array],
    device: Device,
    message_bytes: jax.Array,
    num_gpus: jax.Array,
) -> jax.Array:
    """Seconds of one all-reduce of `message_bytes` on every one of `num_gpus` GPUs; 0 at one."""
    c = coefficients
    others = jnp.maximum(num_gpus - 1.0, 0.0)
    link_s = message_bytes / device.link_bytes_per_s
    ring = 2.0 * others * jnp.exp(c["log_ring_step_s"]) + 2.0 * others / num_gpus * link_s * (
        1.0 + jnp.exp(c["log_ring_excess"])
    )
    shot = jnp.exp(c["log_shot_s"]) + others * link_s * (1.0 + jnp.exp(c["log_shot_excess"]))
    shot = shot * others / jnp.maximum(others, 1e-6)
    both = jnp.stack([ring, shot], axis=-1)
    return jnp.where(others > 0, smooth_minimum(jnp.maximum(both, 1e-12), 8), 0.0)
