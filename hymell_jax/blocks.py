"""Level 2: seconds of a block, a level-1 form corrected by its trained networks.

    t = t_level1 exp(correction),    |correction| <= bound, fading to 0 away from the data

A block is one of `BLOCKS`: the fused attention core of each phase, the routed experts of a mixture
layer, the kernels of linear attention, and a whole latent-attention module of each phase. Each has
level-1 coefficients of its own, except the attention core, whose coefficients level 1 already has.
A block that was not measured is not in the dictionary, and level 1 answers.

Adding a kind of block is an entry here and a file with its level-1 form and features; nothing below
changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hymell_jax import attention, attention_features, latent, linear, mlp, moe
from hymell_jax.types import Device

ATTENTION_BLOCKS = tuple(f"attention_{phase}" for phase in attention.ATTENTION_PHASES)
LINEAR_BLOCKS = tuple(f"linear_{kernel}" for kernel in linear.LINEAR_KERNELS)
LATENT_BLOCKS = tuple(f"latent_{phase}" for phase in latent.LATENT_PHASES)
BLOCKS = (*ATTENTION_BLOCKS, "experts", *LINEAR_BLOCKS, *LATENT_BLOCKS)

ROUTING_EXPONENT = 1.01
"""Power law of the load of real routers, the mildest of the measured ones (NVIDIA aiconfigurator
takes 1.01 to 1.2 for trained models)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A trained block; leaves float32."""

    coefficients: dict[str, Any]  # level 1 of the block; empty for the attention core
    params: mlp.Params  # with a leading ensemble axis
    normalizer: mlp.Normalizer
    spec: mlp.MLPSpec = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockTime:
    """Seconds of a block and what is known of the answer, arrays [...]."""

    time_s: jax.Array
    spread: jax.Array  # standard deviation over the ensemble, relative
    familiarity: jax.Array  # 1 inside the training range, 0 far outside


def feature_names(name: str) -> tuple[tuple[str, ...], int]:
    """Names of a block's features, and how many of them are monotone.

    Raises:
        ValueError: not one of `BLOCKS`.
    """
    if name in ATTENTION_BLOCKS:
        groups = attention_features.ATTENTION_MONOTONE, attention_features.ATTENTION_FREE
    elif name == "experts":
        groups = moe.MOE_MONOTONE, moe.MOE_FREE
    elif name in LINEAR_BLOCKS:
        groups = linear.LINEAR_MONOTONE, linear.LINEAR_FREE
    elif name in LATENT_BLOCKS:
        groups = latent.LATENT_MONOTONE, latent.LATENT_FREE
    else:
        raise ValueError(f"A block must be one of {', '.join(BLOCKS)}; got {name!r}.")
    return groups[0] + groups[1], len(groups[0])


def level1_names(name: str) -> tuple[str, ...]:
    """Names of the level-1 coefficients that a block brings along.

    Raises:
        ValueError: not one of `BLOCKS`.
    """
    feature_names(name)
    if name in ATTENTION_BLOCKS:
        return ()
    if name == "experts":
        return tuple(moe.DEFAULT_COEFFICIENTS)
    module = linear if name in LINEAR_BLOCKS else latent
    return tuple(module.DEFAULT_COEFFICIENTS)


def corrected(block: Block, level1_s: jax.Array, features: mlp.Features) -> BlockTime:
    """Level-1 seconds [...] times the correction at features [..., n]."""
    mean, spread = mlp.correction(block.params, block.spec, block.normalizer, features)
    known = mlp.familiarity(block.normalizer, features, block.spec.n_monotone)
    return BlockTime(time_s=level1_s * jnp.exp(mean), spread=spread, familiarity=known)


def attention_time(
    block: Block,
    phase: str,
    coefficients: Mapping[str, Any],
    device: Device,
    level1_s: jax.Array,
    *sizes,
    l2_residency=1.0,
) -> BlockTime:
    """The attention core of one layer, never below its data-sheet bound.

    Args:
        block: "attention_prefill" or "attention_decode".
        phase: "prefill" or "decode".
        coefficients: of level 1, both phases.
        device: data sheet.
        level1_s: what level 1 says for these sizes.
        sizes: batch, tokens, n_heads, n_kv_heads, head_dim, value_head_dim, window_tokens,
            kv_bytes, as `attention.attention_prefill_time_s` takes them.
        l2_residency: as there.
    """
    features = attention_features.attention_feature_groups(
        phase, coefficients, device, *sizes, l2_residency=l2_residency
    )
    found = corrected(block, level1_s, features)
    batch, tokens, heads, kv_heads, head_dim, value_dim, window, kv_bytes = sizes
    keys = attention.attended_keys(tokens, window)
    prefill = phase == "prefill"
    pairs = attention.causal_pairs(tokens, window) if prefill else keys
    bound = attention.attention_bound_s(
        device,
        attention.log_attention_flops(batch, pairs, heads, head_dim, value_dim),
        attention.log_kv_bytes(
            batch, tokens if prefill else keys, kv_heads, head_dim, value_dim, kv_bytes
        ),
        l2_residency,
    )
    return dataclasses.replace(found, time_s=jnp.maximum(found.time_s, bound))


def experts_time(block: Block, device: Device, *sizes) -> BlockTime:
    """The routed experts of one mixture layer on the busiest GPU.

    Args:
        block: "experts".
        device: data sheet.
        sizes: in the order of `moe.MOE_SIZES`.
    """
    level1_s, _ = moe.moe_time_s(block.coefficients, device, *sizes)
    return corrected(block, level1_s, moe.moe_features(block.coefficients, device, *sizes))


def linear_time(
    blocks: Mapping[str, Block], device: Device, phase: str, *sizes, l2_residency=1.0
) -> BlockTime:
    """Both kernels of a linear-attention layer, projections not included.

    Args:
        blocks: holds those of `LINEAR_BLOCKS` that belong to the phase.
        device: data sheet.
        phase: "prefill" or "decode".
        sizes: batch, seq_len (1 in decode), k_heads, v_heads, k_dim, v_dim.
        l2_residency: as in `linear.linear_kernel_time_s`.
    """
    parts = []
    for kernel in (f"conv_{phase}", f"rule_{phase}"):
        block = blocks[f"linear_{kernel}"]
        arguments = (kernel, block.coefficients, device, *sizes)
        level1_s, _ = linear.linear_kernel_time_s(*arguments, l2_residency=l2_residency)
        features = linear.linear_features(*arguments, l2_residency=l2_residency)
        parts.append(corrected(block, level1_s, features))
    total = jnp.asarray(sum(part.time_s for part in parts))
    return BlockTime(
        time_s=total,
        spread=jnp.asarray(sum(part.spread * part.time_s for part in parts)) / total,
        familiarity=jnp.minimum(parts[0].familiarity, parts[1].familiarity),
    )


def latent_time(
    block: Block, phase: str, device: Device, *sizes, shape: latent.LatentShape
) -> BlockTime:
    """A whole latent-attention module of one layer, projections included.

    Args:
        block: "latent_prefill" or "latent_decode".
        phase: "prefill" or "decode".
        device: data sheet.
        sizes: in the order of `latent.LATENT_SIZES`.
        shape: widths of the module.
    """
    level1_s, _ = latent.latent_time_s(phase, block.coefficients, device, *sizes, shape=shape)
    features = latent.latent_features(phase, block.coefficients, device, *sizes, shape=shape)
    return corrected(block, level1_s, features)
