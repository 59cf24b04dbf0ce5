"""Inputs of the level-2 correction of the attention core: logs of sizes and of level-1 terms.

Sizes enter as log2, so that a doubling is a step of 1 for every input; the caller standardises.
The first group does not decrease with batch or tokens, so that a network that is monotone in it is
monotone in both. Where the kernels switch (number of thread blocks against SMs, KV bytes against
L2, head dimensions that have their own tile shapes) there is an input that steps or peaks there.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.attention import (
    ATTENTION_REGIMES,
    DECODE_TILE_ROWS,
    QUERY_TILE_ROWS,
    attended_keys,
    attention_log_terms,
    check_phase,
)
from hymell_jax.smooth import log2_whole_waves
from hymell_jax.types import Device

HEAD_DIM_BUMPS = (64.0, 128.0, 192.0, 256.0, 512.0)
GROUP_BUMPS = (1.0, 2.0, 4.0, 8.0)  # query heads a KV head

ATTENTION_MONOTONE: tuple[str, ...] = (
    "log2_batch",
    "log2_tokens",
    "log2_keys",  # keys the last query sees
    "log2_tokens_per_key",  # 0 without a window
    "log2_tiles_per_sm",
    "log2_heads_per_sm",  # batch heads max(queries / 128, 1) / SMs
    "log2_kv_bytes_per_l2",
    "log2_query_bytes_per_l2",
    "log2_sequences_per_sm",  # batch kv_heads / SMs
    "log2_batch_heads_per_sm",
    "log2_work",  # batch heads queries keys head_dim
    "log2_rows",  # query rows that share a KV head
    "waves_tiles",  # log2 of whole waves of 128-row tiles
    "waves_sequences",
    "waves_half_tiles",
    "waves_heads",
    *(f"log2_{regime}_us" for regime in ATTENTION_REGIMES[1:]),
    "log2_level1_us",
)
ATTENTION_FREE: tuple[str, ...] = (
    "log2_heads",
    "log2_kv_heads",
    "log2_group",
    "log2_head_dim",
    "log2_heads_over_sm",
    "window",  # 1 with a sliding window
    "log2_window",
    "fp8_cache",
    *(f"head_dim_{int(d)}" for d in HEAD_DIM_BUMPS),
    *(f"group_{int(g)}" for g in GROUP_BUMPS),
)
ATTENTION_FEATURES = ATTENTION_MONOTONE + ATTENTION_FREE


def _bump(log2_ratio: jax.Array, width: float) -> jax.Array:
    """exp(-(x / width)^2): 1 at a ratio of 1."""
    return jnp.exp(-jnp.square(jnp.clip(log2_ratio, -8.0, 8.0) / width))


def attention_features(
    phase: str,
    coefficients: Mapping[str, float],
    device: Device,
    *sizes,
    l2_residency=1.0,
) -> jax.Array:
    """Features [..., n] in the order of `ATTENTION_FEATURES`, not standardised.

    Arguments and errors are those of `attention_feature_groups`.
    """
    groups = attention_feature_groups(
        phase, coefficients, device, *sizes, l2_residency=l2_residency
    )
    return jnp.concatenate(groups, axis=-1)


def attention_feature_groups(
    phase: str,
    coefficients: Mapping[str, float],
    device: Device,
    *sizes,
    l2_residency=1.0,
) -> tuple[jax.Array, jax.Array]:
    """The monotone features [..., n] and the free ones, as a network takes them apart.

    Args:
        phase: "prefill" (`tokens` = prompt) or "decode" (`tokens` = context).
        coefficients: level 1, whose terms and time close the monotone group.
        sizes: batch to kv_bytes.

    The others are as in `attention_prefill_time_s`.

    Raises:
        ValueError: an unknown phase.
    """
    check_phase(phase)
    terms, log_time = attention_log_terms(
        phase, coefficients, device, *sizes, l2_residency=l2_residency
    )
    batch, tokens, n_heads, n_kv_heads, head_dim, value_head_dim, window_tokens, kv_bytes = sizes

    def log2(x):
        return jnp.log2(1.0 * jnp.asarray(x))

    def log2_us(log_s):
        return (log_s + np.log(1e6)) / np.log(2.0)

    keys = log2(attended_keys(tokens, window_tokens))
    queries = log2(tokens) if phase == "prefill" else jnp.zeros_like(log2(tokens))
    b, h, kv, sm = log2(batch), log2(n_heads), log2(n_kv_heads), log2(device.n_sm)
    width = log2(0.5 * (1.0 * jnp.asarray(head_dim) + value_head_dim))
    group, l2 = h - kv, log2(device.l2_bytes)
    tile, half_tile = np.log2(QUERY_TILE_ROWS), np.log2(DECODE_TILE_ROWS)
    rows = queries + group
    tiles = b + kv + jnp.maximum(rows - tile, 0.0) - sm
    half_tiles = b + kv + jnp.maximum(rows - half_tile, 0.0) - sm
    head_tiles = b + h + jnp.maximum(queries - tile, 0.0) - sm
    windowed = jnp.where(jnp.asarray(window_tokens) > 0, 1.0, 0.0)
    monotone = [
        b,
        log2(tokens),
        keys,
        log2(tokens) - keys,
        tiles,
        head_tiles,
        b + kv + keys + width + 1.0 + log2(kv_bytes) - l2,
        b + h + queries + width + 2.0 - l2,
        b + kv - sm,
        b + h - sm,
        b + h + queries + keys + width,
        rows,
        *(log2_whole_waves(x) for x in (tiles, b + kv - sm, half_tiles, head_tiles)),
        *(log2_us(term) for term in terms[1:]),
        log2_us(log_time),
    ]
    free = [
        h,
        kv,
        group,
        width,
        h - sm,
        windowed,
        windowed * log2(jnp.maximum(window_tokens, 1.0)),
        2.0 - 1.0 * jnp.asarray(kv_bytes),
        *(_bump(width - np.log2(d), 0.25) for d in HEAD_DIM_BUMPS),
        *(_bump(group - np.log2(g), 0.3) for g in GROUP_BUMPS),
    ]
    shape = jnp.broadcast_shapes(*map(jnp.shape, (*monotone, *free)))
    groups = [[jnp.broadcast_to(x, shape) for x in group] for group in (monotone, free)]
    return jnp.stack(groups[0], axis=-1), jnp.stack(groups[1], axis=-1)
