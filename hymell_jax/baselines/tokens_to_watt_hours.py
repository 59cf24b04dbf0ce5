"""From Tokens to Watt-hours: joules of one request from parameters and tokens. No time.

Published form, energy of the accelerator only, T_in and T_out tokens, N parameters, n_l layers of
width d, r = N / 24e9:

    E_req  = alpha (C_pre + C_dec) + e eta(N) Bits
    C_pre  = K N T_in + 2 n_l d T_in^2,         K = 6
    C_dec  = K N T_out + 4 n_l d A,             A = T_out T_in + T_out (T_out - 1) / 2
    Bits   = b_w N gamma(N) + 2 b_kv d n_l T_out + 2 b_kv d n_l A s(N),   b_w = b_kv = 16
    gamma  = 0.10 r^0.8,   s = 1 + 1.5 r^0.9,   eta = 1 + 0.8 r^0.8

alpha is 0.52 pJ/FLOP and e 11.68 pJ/bit on H100, 0.70 and 13.11 on A100 (microbenchmarks of
Antepara et al., SC'25, doi 10.1145/3712285.3759815). Simplified: E_out = alpha K N for every output
token and E_in = M(T_in) E_out for every input token, with M = 1.2, 1.8, 3, 4 up to 2048, 5120,
10240 tokens and beyond.

Four forms, and what to know of each:

literal         The equations above. With the printed constants they do not give the paper's own
                Table 3: they overshoot by 20 to 149 % (70B: 0.426 Wh against 0.1707).
table3_refit    The same terms, changed in four places until the 13 rows of Table 3 come out within
                0.1 % (`TABLE3_DEPARTURES`). A description of that table.
calibrated      Two FLOPs a parameter, weights once a step for the whole batch, the real KV heads,
                idle power, the board's power limit: coefficients to be fitted (`fit_calibrated`).
simplified      The parameter-only estimator.

K = 6 counts a backward pass that inference does not run, and gamma hides the batch of the servers
that the paper calibrated on, so published coefficients must not be read as physics.

Source: Vartziotis et al., "From Tokens to Watt-hours".
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax import parameters
from hymell_jax.baselines import roofline
from hymell_jax.baselines.counting import pass_counts
from hymell_jax.baselines.fitting import positive
from hymell_jax.baselines.interface import Method, MethodPrediction, exp, prediction
from hymell_jax.smooth import smooth_maximum
from hymell_jax.types import Architecture, Device, Workload

MICROBENCHMARKS = {  # J per FLOP and J per bit of HBM
    "h100": (0.52e-12, 11.68e-12),
    "a100": (0.70e-12, 13.11e-12),
}
REFERENCE_PARAMETERS = 24e9
BITS = 16.0
PROMPT_EDGES = (2048.0, 5120.0, 10240.0)
PROMPT_MULTIPLIERS = (1.2, 1.8, 3.0, 4.0)
PROMPT_STEP_WIDTH = 0.1  # of ln T_in, in predictions

TABLE3 = (  # parameters, layers, d_model, mJ per output token, mJ per input token, Wh at 500/500
    (0.308e9, 26, 768, 0.961, 1.153, 0.000599),
    (0.334e9, 24, 1024, 1.042, 1.250, 0.000696),
    (0.6e9, 28, 1024, 1.872, 2.246, 0.001027),
    (1.7e9, 28, 2048, 5.304, 6.365, 0.002641),
    (2.53e9, 32, 4096, 7.894, 9.472, 0.004923),
    (8e9, 36, 4096, 24.96, 29.95, 0.011795),
    (8.17e9, 40, 4096, 25.49, 30.59, 0.012465),
    (14e9, 40, 5120, 43.68, 52.42, 0.021313),
    (16e9, 27, 2048, 49.92, 59.90, 0.017425),
    (20e9, 24, 2880, 62.40, 74.88, 0.022281),
    (32e9, 64, 5120, 99.84, 119.81, 0.052721),
    (70e9, 80, 8192, 218.40, 262.08, 0.170747),
    (120e9, 36, 2880, 374.40, 449.28, 0.155204),
)
"""Table 3 of the paper, with the layer counts and widths that it uses."""

TABLE3_DEPARTURES = (
    "attention reads only generated tokens, T_out (T_out - 1) / 2, not the prompt",
    "s = 1 + 1.2 r^0.9 instead of 1 + 1.5 r^0.9",
    "input tokens cost M(T_in) times an output token's FLOPs, and attention none",
    "up to 14B parameters e is 13.11 pJ/bit, the A100's, while alpha stays the H100's",
)
"""What differs from the printed equations in the form that reproduces Table 3."""


def literal_coefficients(gpu: str = "h100") -> dict[str, Any]:
    """The printed constants.

    Args:
        gpu: a key of `MICROBENCHMARKS`.

    Raises:
        ValueError: another GPU.
    """
    if gpu not in MICROBENCHMARKS:
        raise ValueError(f"gpu must be one of {', '.join(MICROBENCHMARKS)}; got {gpu!r}.")
    per_flop, per_bit = MICROBENCHMARKS[gpu]
    values = dict(
        log_j_per_flop=np.log(per_flop),
        log_j_per_bit=np.log(per_bit),
        flops_per_parameter=6.0,
        prompt_multiplier=0.0,  # share of M(T_in) - 1
        attention_flops=1.0,
        prompt_reads=1.0,  # share of T_out T_in in the attention reads
        gamma_scale=0.10,
        gamma_exponent=0.8,
        s_scale=1.5,
        s_exponent=0.9,
        eta_scale=0.8,
        eta_exponent=0.8,
        small_bit_ratio=1.0,  # of e below `small_parameters`
        small_parameters=15e9,
    )
    return {name: np.float32(value) for name, value in values.items()}


def table3_coefficients() -> dict[str, Any]:
    """Constants with which the printed terms give Table 3 within 0.1 %.

    How they were found: with the attention reads as the unknown, each row of Table 3 gives one
    value of s(N). Leaving out the prompt in A and multiplying the input tokens by M = 1.2 makes
    these values a smooth function of N alone; without attention FLOPs, s = 1 + 1.2 r^0.9 then
    meets the five rows from 16B up to their last digit, and the eight rows below need one common
    factor 1.1225 on all bits, which is 13.11 / 11.68. 15B lies between the two groups.
    """
    changes = dict(
        prompt_multiplier=1.0,
        attention_flops=0.0,
        prompt_reads=0.0,
        s_scale=1.2,
        small_bit_ratio=MICROBENCHMARKS["a100"][1] / MICROBENCHMARKS["h100"][1],
    )
    return literal_coefficients() | {k: np.float32(v) for k, v in changes.items()}


def simplified_coefficients() -> dict[str, Any]:
    """alpha_eff = alpha of the H100 and K = 6, as in the paper's inventory table."""
    return {
        "log_j_per_flop": np.float32(np.log(MICROBENCHMARKS["h100"][0])),
        "flops_per_parameter": np.float32(6.0),
    }


def prompt_multiplier(prompt_tokens, width: float = PROMPT_STEP_WIDTH) -> jax.Array:
    """M(T_in), what an input token costs in output tokens: 1.2, 1.8, 3 or 4.

    A sum of sigmoids in ln T_in. Hard limit, width -> 0: the published step, where an edge belongs
    to the shorter prompts; width 0 is that step itself.
    """
    log_tokens = jnp.log(jnp.asarray(prompt_tokens, jnp.float32))
    found = PROMPT_MULTIPLIERS[0] + 0.0 * log_tokens
    rises = np.diff(PROMPT_MULTIPLIERS)
    for edge, rise in zip(PROMPT_EDGES, rises, strict=True):
        distance = log_tokens - np.float32(np.log(edge + 0.5))
        if width > 0:
            share = jax.nn.sigmoid(distance / width)
        else:
            share = jnp.where(distance > 0, 1.0, 0.0)
        found = found + np.float32(rise) * share
    return found


def simplified_j_per_token(
    n_parameters, prompt_tokens, coefficients: dict[str, Any], width: float = PROMPT_STEP_WIDTH
) -> tuple[jax.Array, jax.Array]:
    """Joules per output token alpha K N, and per input token M(T_in) alpha K N."""
    per_flop = exp(coefficients, "log_j_per_flop") * coefficients["flops_per_parameter"]
    output = per_flop * n_parameters
    return output, prompt_multiplier(prompt_tokens, width) * output


def request_energy_j(
    n_parameters, n_layers, d_model, prompt_tokens, output_tokens, coefficients: dict[str, Any]
) -> dict[str, jax.Array]:
    """Joules of one request by part, published forms: literal or table3_refit by coefficients.

    Returns:
        compute_prefill, compute_decode, parameters (charged once a request), kv_write (the
        output tokens' only) and attention_read, which add up to E_req.
    """
    c = coefficients
    n, t_in, t_out = n_parameters, prompt_tokens, output_tokens
    log_r = jnp.log(n / REFERENCE_PARAMETERS)
    s = 1.0 + c["s_scale"] * jnp.exp(c["s_exponent"] * log_r)
    eta = 1.0 + c["eta_scale"] * jnp.exp(c["eta_exponent"] * log_r)
    gamma = c["gamma_scale"] * jnp.exp(c["gamma_exponent"] * log_r)
    width = n_layers * d_model
    generated = 0.5 * t_out * (t_out - 1.0)
    reads = t_out * t_in * c["prompt_reads"] + generated
    multiplier = 1.0 + c["prompt_multiplier"] * (prompt_multiplier(t_in) - 1.0)
    per_flop = exp(c, "log_j_per_flop")
    per_parameter = c["flops_per_parameter"] * n
    attention = c["attention_flops"] * width
    per_bit = exp(c, "log_j_per_bit") * eta
    per_bit = per_bit * jnp.where(n < c["small_parameters"], c["small_bit_ratio"], 1.0)
    return {
        "compute_prefill": per_flop
        * (per_parameter * t_in * multiplier + 2.0 * attention * t_in * t_in),
        "compute_decode": per_flop
        * (per_parameter * t_out + 4.0 * attention * (t_out * t_in + generated)),
        "parameters": per_bit * BITS * n * gamma,
        "kv_write": per_bit * 2.0 * BITS * width * t_out,
        "attention_read": per_bit * 2.0 * BITS * width * reads * s,
    }


def token_energy_j(parts: dict[str, jax.Array], prompt_tokens, output_tokens) -> dict[str, Any]:
    """Joules per input token E_pre / T_in, per output token E_dec / T_out, and per token.

    The paper does not say which phase the parameter reads belong to; here they are shared out in
    proportion to the tokens, so the two phases still add up to E_req.
    """
    total = prompt_tokens + output_tokens
    shared = parts["parameters"] / total
    prefill = parts["compute_prefill"] + shared * prompt_tokens
    decode = (
        parts["compute_decode"]
        + parts["kv_write"]
        + parts["attention_read"]
        + shared * output_tokens
    )
    return {
        "prefill_j": prefill,
        "decode_j": decode,
        "per_input_token_j": prefill / prompt_tokens,
        "per_output_token_j": decode / output_tokens,
        "per_token_j": (prefill + decode) / total,
    }


def predict_published(
    arch: Architecture, work: Workload, device: Device, coefficients: dict[str, Any]
) -> MethodPrediction:
    """Energies of the literal or the refitted form [J]; requests of a batch just add up.

    N counts every stored parameter, experts included, as the paper does.
    """
    parts = request_energy_j(
        parameters.total_parameters(arch),
        arch.n_layers,
        arch.d_model,
        work.prompt_tokens,
        work.output_tokens,
        coefficients,
    )
    tokens = token_energy_j(parts, work.prompt_tokens, work.output_tokens)
    return prediction(
        work,
        prefill_energy_j=work.batch_size * tokens["prefill_j"],
        decode_energy_per_token_j=tokens["per_output_token_j"],
    )


def predict_simplified(
    arch: Architecture, work: Workload, device: Device, coefficients: dict[str, Any]
) -> MethodPrediction:
    """Energies of the parameter-only estimator [J]."""
    output, prompt = simplified_j_per_token(
        parameters.total_parameters(arch), work.prompt_tokens, coefficients
    )
    return prediction(
        work,
        prefill_energy_j=work.batch_size * work.prompt_tokens * prompt,
        decode_energy_per_token_j=output,
    )


CALIBRATED = ("log_j_per_flop", "log_j_per_bit", "log_idle_share")
"""Coefficients of the calibrated form that a fit sets; J/FLOP, J/bit, share of data-sheet idle."""


def calibrated_coefficients() -> dict[str, Any]:
    """H100 microbenchmarks, the data sheet's idle power, and efficient roofline times."""
    per_flop, per_bit = MICROBENCHMARKS["h100"]
    values = dict(
        log_j_per_flop=np.log(per_flop),
        log_j_per_bit=np.log(per_bit),
        log_idle_share=0.0,
    )
    return {k: np.float32(v) for k, v in values.items()} | roofline.efficient_coefficients()


def calibrated_features(
    arch: Architecture, work: Workload, device: Device, coefficients: dict[str, Any], phase: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """FLOPs, bits of memory traffic and seconds of one pass on one GPU.

    FLOPs: 2 N_active a token plus attention. Bits: weights once a pass for the whole batch, KV
    written and read by real KV heads, activations. Seconds: the roofline with efficiencies.
    """
    counts = pass_counts(arch, work, phase)
    seconds = jnp.sum(jnp.maximum(*roofline.operator_times_s(counts, work, device, coefficients)))
    return jnp.sum(counts.flops), 8.0 * jnp.sum(counts.memory_bytes), seconds


def calibrated_energy_j(flops, bits, seconds, device: Device, coefficients) -> jax.Array:
    """Joules of one pass on one GPU: alpha FLOPs + e bits + P_idle T, within the power limit.

    Where FLOPs and bits would need more than the limit, the pass lasts until their energy fits:
    T = max(seconds, E_dynamic / (P_limit - P_idle)), a smooth maximum (power 8).
    """
    dynamic = (
        exp(coefficients, "log_j_per_flop") * flops + exp(coefficients, "log_j_per_bit") * bits
    )
    idle_w = device.idle_power_w * exp(coefficients, "log_idle_share")
    spare_w = jnp.maximum(device.power_limit_w - idle_w, 0.05 * device.power_limit_w)
    return dynamic + idle_w * smooth_maximum(seconds, dynamic / spare_w, sharpness=8)


def predict_calibrated(
    arch: Architecture, work: Workload, device: Device, coefficients: dict[str, Any]
) -> MethodPrediction:
    """Energies of the calibrated form [J], all GPUs of the tensor-parallel group."""
    prefill, decode = (
        calibrated_energy_j(
            *calibrated_features(arch, work, device, coefficients, phase), device, coefficients
        )
        * work.tensor_parallel
        for phase in ("prefill", "decode")
    )
    return prediction(
        work, prefill_energy_j=prefill, decode_energy_per_token_j=decode / work.batch_size
    )


def fit_calibrated(flops, bits, seconds, energy_j, idle_power_w: float) -> dict[str, Any]:
    """alpha, e and idle power from measured energies: non-negative relative least squares.

    min sum ((alpha F + e b + P T) / E - 1)^2 with alpha, e, P >= 0, in float64. Matrix products
    tell alpha, streaming copies e, idle windows P; rows at the power limit should be left out. A
    coefficient that comes out as 0 is kept at a millionth of its H100 or data-sheet value.

    Args:
        flops, bits, seconds: of each measured row, [n], non-negative.
        energy_j: measured, [n], positive.
        idle_power_w: of the data sheet; the fitted idle power is stored as a share of it.

    Raises:
        ValueError: fewer than three rows, wrong sizes or signs.
    """
    from scipy.optimize import nnls

    energy = positive("energy_j", energy_j)
    if energy.ndim != 1 or len(energy) < len(CALIBRATED):
        raise ValueError(f"A fit needs at least {len(CALIBRATED)} rows; got {energy.shape}.")
    columns = [np.asarray(x, np.float64) for x in (flops, bits, seconds)]
    for name, column in zip(("flops", "bits", "seconds"), columns, strict=True):
        if column.shape != energy.shape or not (np.isfinite(column) & (column >= 0)).all():
            raise ValueError(f"{name} must hold {len(energy)} finite numbers of at least 0.")
    idle = float(positive("idle_power_w", idle_power_w))
    units = np.array([*MICROBENCHMARKS["h100"], idle])
    design = np.stack(columns, axis=1) * units / energy[:, None]
    scale = np.maximum(np.linalg.norm(design, axis=0), 1e-300)
    shares = nnls(design / scale, np.ones(len(energy)))[0] / scale
    values = np.log(np.maximum(shares, 1e-6) * np.array([*units[:2], 1.0]))
    return {name: np.float32(v) for name, v in zip(CALIBRATED, values, strict=True)}


METHOD = Method(
    name="tokens-to-watt-hours",
    title="From Tokens to Watt-hours",
    source=(
        "Vartziotis et al.; J/FLOP and J/bit from Antepara et al., doi 10.1145/3712285.3759815"
    ),
    inputs=("parameters", "layers", "width", "tokens in and out", "J/FLOP", "J/bit of HBM"),
    assumes=(
        "energy is linear in FLOPs and in bits of memory",
        "six FLOPs a parameter and token, full multi-head KV (published forms)",
        "weights are charged once a request by a factor that hides the batch (published forms)",
    ),
    leaves_out=("time", "idle power (published forms)", "CPU, network and cooling", "GQA", "batch"),
    published_accuracy=(
        "4.7 to 27 % against four measured models at 500/500 tokens, by the paper's own numbers; "
        "the printed equations do not give these numbers"
    ),
    gives=("prefill_energy_j", "decode_energy_per_token_j"),
    forms={
        "literal": (predict_published, literal_coefficients),
        "table3_refit": (predict_published, table3_coefficients),
        "calibrated": (predict_calibrated, calibrated_coefficients),
        "simplified": (predict_simplified, simplified_coefficients),
    },
    default_note="published constants of the H100; the calibrated form starts from them",
)
