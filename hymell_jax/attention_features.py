"""Inputs of the level-2 correction of the attention core: logs of sizes and of level-1 shares.

Sizes enter as log2, so that a doubling is a step of 1 for every input; the caller standardises.
Where the kernels switch (number of thread blocks against SMs, KV bytes against L2, head
dimensions that have their own tile shapes) there is an input that crosses zero or peaks there.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from hymell_jax.attention import (
    ATTENTION_PHASES,
    ATTENTION_REGIMES,
    ATTENTION_TIME_S,
    DECODE_TILE_ROWS,
    QUERY_TILE_ROWS,
    attended_keys,
)
from hymell_jax.types import Device

HEAD_DIM_BUMPS = (64.0, 128.0, 192.0, 256.0, 512.0)
WAVE_SHARPNESS = 0.8  # r of `soft_ceil`; 1 would be the hard ceiling

ATTENTION_FEATURES: tuple[str, ...] = (
    "log2_batch",
    "log2_tokens",
    "log2_heads",
    "log2_kv_heads",
    "log2_group",  # query heads a KV head
    "log2_head_dim",
    "log2_keys",  # keys the last query sees
    "log2_tokens_per_key",  # 0 without a window
    "window",  # 1 with a sliding window
    "fp8_cache",
    "log2_tiles_per_sm",
    "log2_heads_per_sm",  # batch heads max(queries / 128, 1) / SMs
    "log2_kv_bytes_per_l2",
    "log2_query_bytes_per_l2",
    "log2_sequences_per_sm",  # batch kv_heads / SMs
    "log2_batch_heads_per_sm",
    "log2_work",  # batch heads queries keys head_dim
    "log2_rows",  # query rows that share a KV head
    *(f"head_dim_{int(d)}" for d in HEAD_DIM_BUMPS),
    "multi_head",  # 1 where every query head has its own KV head
    "wave_tiles",  # log2 of whole waves over waves: 128-row tiles
    "wave_sequences",
    "wave_half_tiles",
    *(f"log2_share_{regime}" for regime in ATTENTION_REGIMES),
    "log2_level1_us",
)


def soft_ceil(x: jax.Array, sharpness: float = WAVE_SHARPNESS) -> jax.Array:
    """A smooth, increasing staircase; its hard limit (sharpness r -> 1) is ceil(x - 1/8).

    u + 1/2 + atan(r sin(2 pi u) / (1 - r cos(2 pi u))) / pi with u = x - 1/8, the Fourier series of
    ceil damped by r^k. The slope is the Poisson kernel, between (1-r)/(1+r) and (1+r)/(1-r).
    """
    u = x - 0.125
    angle = 2.0 * jnp.pi * (u - jax.lax.stop_gradient(jnp.floor(u)))
    saw = jnp.arctan2(sharpness * jnp.sin(angle), 1.0 - sharpness * jnp.cos(angle))
    return u + 0.5 + saw / jnp.pi


def _bump(log2_ratio: jax.Array, width: float = 0.25) -> jax.Array:
    """exp(-(x / width)^2): 1 at a ratio of 1, near 0 a factor of 1.4 away."""
    return jnp.exp(-jnp.square(log2_ratio / width))


def attention_features(
    phase: str,
    coefficients: Mapping[str, float],
    device: Device,
    batch,
    tokens,
    n_heads,
    n_kv_heads,
    head_dim,
    value_head_dim,
    window_tokens=0.0,
    kv_bytes=2.0,
    l2_residency=1.0,
) -> jax.Array:
    """Features [..., n] in the order of `ATTENTION_FEATURES`, not standardised.

    Args:
        phase: "prefill" (`tokens` = prompt) or "decode" (`tokens` = context).
        coefficients: level 1, whose shares and time are the last seven features.

    The others are as in `attention_prefill_time_s`.

    Raises:
        ValueError: an unknown phase.
    """
    if phase not in ATTENTION_PHASES:
        raise ValueError(f"phase must be one of {', '.join(ATTENTION_PHASES)}; got {phase!r}.")
    time_s, weights = ATTENTION_TIME_S[phase](
        coefficients, device, batch, tokens, n_heads, n_kv_heads, head_dim, value_head_dim,
        window_tokens, kv_bytes, l2_residency,
    )  # fmt: skip

    def log2(x):
        return jnp.log2(1.0 * jnp.asarray(x))

    keys = log2(attended_keys(tokens, window_tokens))
    queries = log2(tokens) if phase == "prefill" else jnp.zeros_like(log2(tokens))
    b, h, kv, sm = log2(batch), log2(n_heads), log2(n_kv_heads), log2(device.n_sm)
    width = log2(0.5 * (1.0 * jnp.asarray(head_dim) + value_head_dim))
    group, l2 = h - kv, log2(device.l2_bytes)
    tile, half_tile = log2(QUERY_TILE_ROWS), log2(DECODE_TILE_ROWS)
    rows = queries + group

    def wave(log2_waves):
        """log2 of whole over actual waves, from 3 for few thread blocks to 0 for many."""
        waves = jnp.exp2(log2_waves)
        return jnp.minimum(log2(jnp.maximum(soft_ceil(waves), 1.0)) - log2_waves, 3.0)

    values = [
        b,
        log2(tokens),
        h,
        kv,
        group,
        width,
        keys,
        log2(tokens) - keys,
        jnp.where(jnp.asarray(window_tokens) > 0, 1.0, 0.0),
        2.0 - 1.0 * jnp.asarray(kv_bytes),
        b + kv + jnp.maximum(rows - tile, 0.0) - sm,
        b + h + jnp.maximum(queries - tile, 0.0) - sm,
        b + kv + keys + width + 1.0 + log2(kv_bytes) - l2,
        b + h + queries + width + 2.0 - l2,
        b + kv - sm,
        b + h - sm,
        b + h + queries + keys + width,
        rows,
        *(_bump(width - log2(d)) for d in HEAD_DIM_BUMPS),
        _bump(group, 0.3),
        wave(b + kv + jnp.maximum(rows - tile, 0.0) - sm),
        wave(b + kv - sm),
        wave(b + kv + jnp.maximum(rows - half_tile, 0.0) - sm),
        *(log2(weights[..., i] + 1e-4) for i in range(len(ATTENTION_REGIMES))),
        log2(time_s) + log2(1e6),
    ]
    return jnp.stack(jnp.broadcast_arrays(*values), axis=-1)
