"""Level 1 of a dense feed-forward block: seconds of its products and its activation.

    t = t_up + t_activation + t_down

Up is one product of tokens x d_model with all up-projections (gate and up in a gated block), down
one product back; both by `gemm.gemm_time`. The activation is a launch floor plus its bytes, read
and written once, over the DRAM bandwidth,

    t_activation = t_launch + (n_up + 1) tokens width bytes (1 + e) / bandwidth,

with n_up the number of up-projections. Monotone in all sizes, because every part is. Inputs are
scalars, as in `gemm.gemm_time`; use `jax.vmap` for batches.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax import gemm
from hymell_jax.robust_fit import LOSS_WIDTH, adam, fit_coefficients
from hymell_jax.smooth import floating, soft_ceil
from hymell_jax.types import Device

FFN_PARTS = ("up", "activation", "down")
FFN_SIZES = ("tokens", "d_model", "d_ff", "tensor_parallel", "n_matrices")
ACTIVATION_BYTES = 2.0

DEFAULT_COEFFICIENTS: dict[str, float] = {"log_launch_s": -12.5, "log_memory_excess": -1.0}
"""Natural logs of the activation's floor in seconds, and of e: DRAM time over the ideal, 1 + e."""

PRODUCT_CHOICE = 32
"""Sharpness of the choice of kernels in `fit_ffn`, blunter than `gemm.CHOICE`: an older library
picks by rule, not always the cheapest. Chosen with whole models left out."""

PRODUCT_PULL = 3e-4
"""Weight of the mean square distance of product coefficients from their start in `fit_ffn`. Chosen
with whole models left out of train."""

NETWORK = {"hidden": (24, 24), "bound": float(np.log(1.5)), "steps": 3000, "weight_decay": 1e-2}
"""Level 2: `MLPSpec` and `fit_ensemble` settings, chosen with whole models left out.

On an H100 (Vidur) it cuts 5.7 to 4.2 % on left-out models of a measured width, but raises 5.2 to
6.0 % on the test model, whose width no training model has: there level 1 is the better estimate,
4.7 % as `fit_ffn` fits it with the attention projections of the same runtime.
"""

TILES = ((128.0, 256.0), (128.0, 128.0), (256.0, 128.0))
"""(rows, columns) of the thread-block tiles whose waves the network sees."""


def _products(d_model, d_ff, tensor_parallel, n_matrices):
    """((n, k) of the up product, (n, k) of the down product)."""
    width = floating(d_ff) / tensor_parallel
    return ((floating(n_matrices) - 1.0) * width, floating(d_model)), (floating(d_model), width)


def _activation_s(coefficients, device, tokens, width, n_matrices):
    moved = tokens * n_matrices * width * ACTIVATION_BYTES / device.memory_bytes_per_s
    excess = 1.0 + jnp.exp(floating(coefficients["log_memory_excess"]))
    return jnp.exp(floating(coefficients["log_launch_s"])) + moved * excess


def _parts(
    coefficients, product, device, tokens, sizes, weight_bytes, streaming_weights,
    sharpness=gemm.CHOICE,
):  # fmt: skip
    """Seconds of `FFN_PARTS` [3] and the shares of both products [2, n_bounds]."""
    (up_n, up_k), (down_n, down_k) = _products(*sizes)
    tokens = floating(tokens)

    def run(n, k):
        return gemm.gemm_time(
            product, device, tokens, n, k, weight_bytes, weight_bytes,
            streaming_weights=streaming_weights, sharpness=sharpness,
        )  # fmt: skip

    (up_s, up_shares), (down_s, down_shares) = run(up_n, up_k), run(down_n, down_k)
    activation = _activation_s(coefficients, device, tokens, down_k, floating(sizes[3]))
    return jnp.stack([up_s, activation, down_s]), jnp.stack([up_shares, down_shares])


def ffn_time_s(
    coefficients: Mapping[str, float],
    product: gemm.Coefficients,
    device: Device,
    tokens,
    d_model,
    d_ff,
    tensor_parallel=1.0,
    n_matrices=3.0,
    weight_bytes=2.0,
    streaming_weights=0.0,
    sharpness: int = gemm.CHOICE,
) -> tuple[jax.Array, jax.Array]:
    """Seconds of one dense feed-forward block on one GPU, and of its parts; scalar inputs.

    Args:
        coefficients: of the activation, names of `DEFAULT_COEFFICIENTS`.
        product: coefficients of `gemm.gemm_time`.
        device: data sheet.
        tokens: rows.
        d_model: width of the model.
        d_ff: width of the block, before tensor parallelism.
        tensor_parallel: GPUs that share the block.
        n_matrices: 3 gated (gate, up, down), 2 plain.
        weight_bytes: per weight; the products run in that format.
        streaming_weights, sharpness: as in `gemm.gemm_time`; coefficients from `fit_ffn` go with
            `PRODUCT_CHOICE`.

    Returns:
        time_s [] and the seconds of `FFN_PARTS` [3], which add up to it.
    """
    sizes = (d_model, d_ff, tensor_parallel, n_matrices)
    parts, _ = _parts(
        coefficients, product, device, tokens, sizes, weight_bytes, streaming_weights, sharpness
    )
    return jnp.sum(parts), parts


def fit_ffn(
    device: Device,
    sizes: Mapping[str, np.ndarray],
    part_s: Mapping[str, np.ndarray],
    product: gemm.Coefficients,
    *,
    more_products: Mapping[str, np.ndarray] | None = None,
    steps: int = 800,
    learning_rate: float = 0.03,
    max_rows: int = 2000,
    seed: int = 0,
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """(coefficients of the activation, coefficients of the products) from measured blocks.

    Products of one runtime are few, so their coefficients start at those of a newer library on the
    same device and are pulled to them. The loss is that of `robust_fit.fit_coefficients`.

    Args:
        device: data sheet.
        sizes: `FFN_SIZES`, arrays [n_rows].
        part_s: measured seconds of `FFN_PARTS`, arrays [n_rows].
        product: coefficients of `gemm.gemm_time` to start from.
        more_products: "m", "n", "k" and "time_s" [n] of other 16-bit products of the runtime.
        steps, learning_rate: of Adam.
        max_rows: a random subsample of the products is used where there are more.
        seed: of the subsample.

    Raises:
        ValueError: no rows, arrays of unequal length, times not positive.
    """
    arrays = {name: np.asarray(sizes[name], np.float64) for name in FFN_SIZES}
    tokens, width = arrays["tokens"], arrays["d_ff"] / arrays["tensor_parallel"]
    activation = fit_coefficients(
        lambda c, *row: _activation_s(c, device, *row),
        DEFAULT_COEFFICIENTS,
        [tokens, width, arrays["n_matrices"]],
        part_s["activation"],
        seed=seed,
    )
    up = (tokens, (arrays["n_matrices"] - 1.0) * width, arrays["d_model"], part_s["up"])
    down = (tokens, arrays["d_model"], width, part_s["down"])
    blocks: list[tuple[np.ndarray, ...]] = [up, down]
    if more_products is not None:
        blocks.append(tuple(more_products[name] for name in ("m", "n", "k", "time_s")))
    rows = [np.concatenate([np.asarray(b[i], np.float64) for b in blocks]) for i in range(4)]
    if len({len(row) for row in rows}) > 1 or not (np.isfinite(rows[3]) & (rows[3] > 0)).all():
        raise ValueError("Products need m, n, k and positive seconds in every row.")
    kept = np.random.default_rng(seed).permutation(len(rows[0]))[:max_rows]
    m, n, k, measured = (jnp.asarray(row[kept], jnp.float32) for row in rows)
    start = {name: jnp.asarray(value, jnp.float32) for name, value in product.items()}

    def loss(c):
        run = jax.vmap(
            lambda m, n, k: gemm.gemm_time(c, device, m, n, k, sharpness=PRODUCT_CHOICE)[0]
        )
        residual = jnp.log(run(m, n, k)) - jnp.log(measured)
        pull = sum(jnp.mean(jnp.square(c[name] - start[name])) for name in start)
        return jnp.mean(jnp.sqrt(jnp.square(residual) + LOSS_WIDTH**2)) + PRODUCT_PULL * pull

    fitted = adam(loss, start, steps, learning_rate)
    return activation, {name: np.asarray(value, np.float32) for name, value in fitted.items()}


FFN_FEATURES: tuple[str, ...] = (
    "log2_tokens",
    "log2_width",  # of the block on this GPU
    "log2_weight_bytes_per_l2",
    "log2_activation_share",
    "log2_down_share",
    *(f"{part}_{bound}" for part in ("up", "down") for bound in gemm.BOUNDS),
    *(f"row_fill_{int(rows)}" for rows in (64, 128, 256)),
    *(f"wave_{part}_{int(r)}x{int(c)}" for part in ("up", "down") for r, c in TILES),
    "log2_level1_us",
)


def _fill(log2_count) -> jax.Array:
    """log2 of the whole number above a count over the count, 3 at the most."""
    count = jnp.exp2(log2_count)
    return jnp.minimum(jnp.log2(jnp.maximum(soft_ceil(count), 1.0)) - log2_count, 3.0)


def ffn_features(
    coefficients: Mapping[str, float],
    product: gemm.Coefficients,
    device: Device,
    *sizes,
    weight_bytes=2.0,
    streaming_weights=0.0,
) -> jax.Array:
    """Inputs of the level-2 correction, [n] in the order of `FFN_FEATURES`; scalar inputs.

    Args:
        sizes: all of `FFN_SIZES`.

    The others are as in `ffn_time_s`.
    """
    tokens, *widths = sizes
    parts, bounds = _parts(
        coefficients, product, device, tokens, widths, weight_bytes, streaming_weights
    )
    (up_n, up_k), (down_n, down_k) = _products(*widths)
    total, log_rows = jnp.sum(parts), jnp.log2(floating(tokens))
    weights = (up_n * up_k + down_n * down_k) * weight_bytes
    waves = [
        _fill(
            jnp.maximum(log_rows - np.log2(rows), 0.0) + jnp.log2(n / cols) - jnp.log2(device.n_sm)
        )
        for n in (up_n, down_n)
        for rows, cols in TILES
    ]
    values = [
        log_rows,
        jnp.log2(down_k),
        jnp.log2(weights / device.l2_bytes),
        jnp.log2(parts[1] / total),
        jnp.log2(parts[2] / total),
        *(bounds[part, i] for part in range(2) for i in range(len(gemm.BOUNDS))),
        *(_fill(log_rows - np.log2(rows)) for rows in (64.0, 128.0, 256.0)),
        *waves,
        jnp.log2(total * 1e6),
    ]
    return jnp.stack(jnp.broadcast_arrays(*values))
