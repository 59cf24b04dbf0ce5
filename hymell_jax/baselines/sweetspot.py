"""SweetSpot: joules per output token as six terms of the prompt and output lengths. No time.

    E_tok(n, m) = t0 + t1 n^2 / m + t2 n + t3 n / m + t4 m + t5 / m,   n = n_in, m = n_out

so E_total = m E_tok = (t1 n^2 + t3 n + t5) + (t0 m + t2 n m + t4 m^2): a prefill with quadratic
attention, and decode steps whose KV reads grow with the context. Physics expects t4 near t2 / 2.
The cheapest output length is in closed form, the published optimum:

    m* = sqrt((t1 n^2 + t3 n + t5) / t4)

The paper prints the optimum; that t0 and t2 multiply a constant and n is a reading of this
project. The cross-model version, t_j = exp(a_j + b_j . x) with x the logs of three sizes of the
architecture, is an addition of this project that makes the form differentiable in the
architecture.

Source: SweetSpot, ICPE'26, doi 10.1145/3777884.3797011.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax import operators, parameters
from hymell_jax.baselines.fitting import positive
from hymell_jax.baselines.interface import Method, MethodPrediction, prediction
from hymell_jax.types import Architecture, Device, Workload

TERMS = ("1", "n_in^2/n_out", "n_in", "n_in/n_out", "n_out", "1/n_out")
"""What theta 0 to 5 multiply."""

SIZES = ("active_parameters", "cached_elements", "attention_width")
"""Sizes whose logs the cross-model version uses, and their centres below."""

CENTRES = (8e9, 65536.0, 131072.0)  # of Llama-3.1-8B, rounded

PARAMETER_SHARE = 0.05
"""Share of the per-step weight reads that the starting point charges to one request."""


def terms(n_in, n_out) -> np.ndarray:
    """The six terms in float64, [..., 6]."""
    n, m = np.broadcast_arrays(np.asarray(n_in, np.float64), np.asarray(n_out, np.float64))
    return np.stack([np.ones_like(n), n * n / m, n, n / m, m, 1.0 / m], axis=-1)


def energy_per_output_token_j(theta, n_in, n_out) -> jax.Array:
    """E_tok [J] of coefficients theta [..., 6]; n_in, n_out of the shape of theta[..., 0]."""
    t = [theta[..., j] for j in range(6)]
    prefill = (t[1] * n_in + t[3]) * n_in + t[5]
    return t[0] + t[2] * n_in + t[4] * n_out + prefill / n_out


def optimal_output_tokens(theta, n_in) -> jax.Array:
    """m* = sqrt((t1 n^2 + t3 n + t5) / t4), where dE_tok / dm = 0; t4 must be positive."""
    prefill = (theta[..., 1] * n_in + theta[..., 3]) * n_in + theta[..., 5]
    return jnp.sqrt(prefill / theta[..., 4])


def fit_theta(n_in, n_out, energy_per_output_token) -> np.ndarray:
    """theta [6] of one model on one GPU: min sum (E_fit / E - 1)^2, theta >= 0, float64.

    Args:
        n_in, n_out: lengths of each measured row, [n], positive.
        energy_per_output_token: measured joules, [n].

    Raises:
        ValueError: fewer than six rows, wrong sizes or signs.
    """
    from scipy.optimize import nnls

    energy = positive("energy_per_output_token", energy_per_output_token)
    if energy.ndim != 1 or len(energy) < 6:
        raise ValueError(f"A fit of six coefficients needs at least 6 rows; got {energy.shape}.")
    design = terms(positive("n_in", n_in, energy.shape), positive("n_out", n_out, energy.shape))
    design = design / energy[:, None]
    scale = np.linalg.norm(design, axis=0)
    return nnls(design / scale, np.ones(len(energy)))[0] / scale


def log_sizes(arch: Architecture) -> jax.Array:
    """Centred logs of `SIZES`, [..., 3].

    Active parameters; KV elements that one token adds over all attention layers; softmax layers
    times heads times mean head width, which scales attention FLOPs.
    """
    cache = parameters.kv_cache_elements_per_token(arch)
    layers = operators.layer_counts(arch)["attention"]
    width = layers * arch.n_heads * 0.5 * (arch.head_dim + arch.value_head_dim)
    sizes = (
        parameters.active_parameters(arch),
        jnp.maximum(cache.full_layers + cache.windowed_layers, 1.0),
        jnp.maximum(width, 1.0),
    )
    return jnp.stack(
        [jnp.log(size) - np.float32(np.log(c)) for size, c in zip(sizes, CENTRES, strict=True)], -1
    )


def theta_of(arch: Architecture, coefficients: dict[str, Any]) -> jax.Array:
    """theta [..., 6] = exp(log_theta + log_sizes . slopes), positive for every architecture."""
    powers = jnp.dot(log_sizes(arch), jnp.asarray(coefficients["slopes"], jnp.float32))
    start = jnp.asarray(coefficients["log_theta"], jnp.float32)
    return jnp.exp(jnp.broadcast_to(start, powers.shape) + powers)


def default_coefficients() -> dict[str, Any]:
    """A starting point from physics, not the paper's coefficients, which are not printed.

    H100 energies of 0.52 pJ/FLOP and 11.68 pJ/bit: 2 FLOPs a parameter, 4 a head element and
    attended token, 16-bit weights and cache; one request bears `PARAMETER_SHARE` of the weight
    reads. `log_theta` [6] is ln theta at `CENTRES`, `slopes` [3, 6] the exponents of each size.
    """
    per_flop, per_bit = 0.52e-12, 11.68e-12
    n, cached, width = CENTRES
    weights = PARAMETER_SHARE * 16.0 * n * per_bit
    context = 16.0 * cached * per_bit + 4.0 * width * per_flop
    theta = [
        2.0 * n * per_flop + weights,
        2.0 * width * per_flop,
        context,
        2.0 * n * per_flop,
        0.5 * context,
        weights,
    ]
    slopes = np.array([[1, 0, 0, 1, 0, 1], [0, 0, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0]], np.float32)
    return {"log_theta": np.float32(np.log(theta)), "slopes": slopes}


def fit_across_models(
    sizes_log, n_in, n_out, energy_per_output_token, *, pull: float = 0.03
) -> dict[str, Any]:
    """Cross-model coefficients from rows of several architectures on one GPU, float64.

    Least squares on E_fit / E - 1 with a soft L1 loss, and a pull to the starting point in units
    of a factor e per coefficient, which decides what the rows do not.

    Args:
        sizes_log: `log_sizes` of each row's architecture, [n, 3].
        n_in, n_out, energy_per_output_token: as in `fit_theta`, [n].
        pull: weight of one coefficient's departure, against one row's relative error.

    Raises:
        ValueError: wrong sizes or signs, too few rows.
    """
    from scipy.optimize import least_squares

    energy = positive("energy_per_output_token", energy_per_output_token)
    x = np.asarray(sizes_log, np.float64)
    if energy.ndim != 1 or len(energy) < 6:
        raise ValueError(f"A cross-model fit needs at least 6 rows; got {energy.shape}.")
    if x.shape != (len(energy), len(SIZES)) or not np.isfinite(x).all():
        raise ValueError(f"sizes_log must be finite, of shape ({len(energy)}, {len(SIZES)}).")
    phi = terms(positive("n_in", n_in, energy.shape), positive("n_out", n_out, energy.shape))
    phi = phi / energy[:, None]
    inputs = np.concatenate([np.ones((len(energy), 1)), x], axis=1)
    start = default_coefficients()
    first = np.concatenate([start["log_theta"][None], start["slopes"]]).astype(np.float64)

    def parts(vector):
        return phi * np.exp(np.clip(inputs @ vector.reshape(first.shape), -120.0, 40.0))

    def residuals(vector):
        return np.concatenate([parts(vector).sum(1) - 1.0, pull * (vector - first.ravel())])

    def jacobian(vector):
        rows = inputs[:, :, None] * parts(vector)[:, None, :]
        return np.concatenate([rows.reshape(len(energy), -1), pull * np.eye(first.size)])

    found = least_squares(
        residuals, first.ravel(), jacobian, loss="soft_l1", f_scale=0.3, x_scale="jac"
    ).x.reshape(first.shape)
    return {"log_theta": np.float32(found[0]), "slopes": np.float32(found[1:])}


def predict(
    arch: Architecture, work: Workload, device: Device, coefficients: dict[str, Any]
) -> MethodPrediction:
    """Energies [J] with theta from the architecture, `default_coefficients` or a fit's.

    Prefill costs t1 n^2 + t3 n + t5 a request, decode t0 + t2 n + t4 m a token. The device enters
    only by its coefficients, and so does the batch they were measured at.
    """
    return _predict(theta_of(arch, coefficients), work)


def predict_one_model(
    arch: Architecture, work: Workload, device: Device, coefficients: dict[str, Any]
) -> MethodPrediction:
    """Energies [J] with the theta [6] of one model; the architecture is not looked at."""
    return _predict(jnp.asarray(coefficients["theta"], jnp.float32), work)


def one_model_coefficients() -> dict[str, Any]:
    """theta of the starting point at `CENTRES`, a model like Llama-3.1-8B."""
    return {"theta": np.exp(default_coefficients()["log_theta"])}


def _predict(t: jax.Array, work: Workload) -> MethodPrediction:
    n, m = work.prompt_tokens, work.output_tokens
    return prediction(
        work,
        prefill_energy_j=work.batch_size * ((t[..., 1] * n + t[..., 3]) * n + t[..., 5]),
        decode_energy_per_token_j=t[..., 0] + t[..., 2] * n + t[..., 4] * m,
    )


METHOD = Method(
    name="sweetspot",
    title="SweetSpot",
    source="ICPE'26, doi 10.1145/3777884.3797011",
    inputs=("tokens in and out", "six coefficients per model and GPU, or per GPU across models"),
    assumes=(
        "energy is a quadratic polynomial of the two lengths",
        "one batching regime, that of the measurements",
    ),
    leaves_out=("time", "batch", "device, other than by refitting"),
    published_accuracy=(
        "1.79 % mean MAPE on H100 with TensorRT-LLM, 1B to 9B, lengths 64 to 4096: a curve fitted "
        "to each model, no held-out models stated"
    ),
    gives=("prefill_energy_j", "decode_energy_per_token_j"),
    forms={
        "across-models": (predict, default_coefficients),
        "one-model": (predict_one_model, one_model_coefficients),
    },
    default_note="a starting point from H100 energies per FLOP and bit; published values unknown",
)
