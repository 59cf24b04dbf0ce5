"""Joules of an operator: board power between idle and the limit, times seconds.

    P = P_idle + R s / (1 + s^8)^(1/8),   R = P_limit - P_idle,
    s = a + f u_flops + d u_dram + c u_cache

with u_flops, u_dram and u_cache the used shares of the data-sheet rates.
`a` is what a busy board draws whatever it does, `f`, `d` and `c` what each unit at its full rate
adds, all as shares of the board's range R. Energy is positive and between idle and limit by
construction, however far out; at full use power saturates at the limit, where energy is limit times
time. Another board of the same chip spends the same joules on a FLOP and on a byte whatever its
limit (`carried`); other chips take the shares.

The published linear energy form of HYMELL (arXiv 2608.06723) is kept in `gemm.published_gemm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax.smooth import power_of_two
from hymell_jax.types import Device, Value

POWER_COEFFICIENTS = (
    "log_active_share",
    "log_flops_share",
    "log_fp8_flops_share",
    "log_memory_share",
    "log_cache_share",
)


def default_coefficients() -> dict[str, Any]:
    """Starting point of a fit: half the range when busy, half of it again at full compute."""
    values = dict(
        log_active_share=-1.0,
        log_flops_share=-0.3,
        log_fp8_flops_share=-0.3,
        log_memory_share=-0.7,
        log_cache_share=-2.3,
    )
    return {name: np.float32(value) for name, value in values.items()}


RATES = {
    "log_active_share": None,
    "log_flops_share": "peak_flops_per_s",
    "log_fp8_flops_share": "peak_fp8_flops_per_s",
    "log_memory_share": "memory_bytes_per_s",
    "log_cache_share": "memory_bytes_per_s",
    "log_busy_share": None,
    "log_gap_share": None,
    "log_power_flops": "peak_flops_per_s",
    "log_power_bytes": "memory_bytes_per_s",
}
"""Coefficients that are a share of a board's range, by the rate that they are of; None: by time."""


def carried(
    coefficients: Mapping[str, np.ndarray], source: Device, target: Device
) -> dict[str, np.ndarray]:
    """Coefficients of one board for another of the same chip: equal watts and joules.

    A share of the range R at a rate r is worth share x R / r joules each; so ln share moves by
    ln(R_source / R_target) + ln(r_target / r_source). Names outside `RATES` stay.

    Args:
        coefficients: natural logs of shares, float32 [] or [n].
        source, target: data sheets.
    """
    range_w = [d.power_limit_w - d.idle_power_w for d in (source, target)]
    found = {name: np.asarray(value) for name, value in coefficients.items()}
    for name in found.keys() & RATES.keys():
        moved = np.log(range_w[0] / range_w[1])
        rate = RATES[name]
        if rate is not None:
            moved = moved + np.log(getattr(target, rate) / getattr(source, rate))
        found[name] = np.asarray(found[name] + moved, np.float32)
    return found


def board_power_w(
    coefficients: dict[str, jax.Array],
    device: Device,
    flops_per_s: Value,
    memory_bytes_per_s: Value,
    cache_bytes_per_s: Value,
    fp8_share: Value = 0.0,
) -> jax.Array:
    """Watts of one board at the given rates; between idle power and the limit.

    Args:
        coefficients: as named in `POWER_COEFFICIENTS`.
        device: data sheet.
        flops_per_s: useful FLOPs a second, of the format that `fp8_share` says.
        memory_bytes_per_s: DRAM traffic.
        cache_bytes_per_s: traffic of tiles through L2.
        fp8_share: 1 where the FLOPs are fp8, 0 where they are bf16.
    """
    c = coefficients
    peak = device.peak_flops_per_s * (
        device.peak_fp8_flops_per_s / device.peak_flops_per_s
    ) ** jnp.asarray(fp8_share)
    log_flops_share = (
        c["log_flops_share"] * (1.0 - fp8_share) + c["log_fp8_flops_share"] * fp8_share
    )
    compute = jnp.minimum(flops_per_s / peak, 1.0)
    memory = jnp.minimum(memory_bytes_per_s / device.memory_bytes_per_s, 1.0)
    cache = jnp.minimum(cache_bytes_per_s / device.memory_bytes_per_s, 32.0)
    share = (
        jnp.exp(c["log_active_share"])
        + jnp.exp(log_flops_share) * compute
        + jnp.exp(c["log_memory_share"]) * memory
        + jnp.exp(c["log_cache_share"]) * cache
    )
    share = jnp.minimum(share, 1e3)
    saturated = share / (1.0 + power_of_two(share, 8)) ** 0.125
    return device.idle_power_w + (device.power_limit_w - device.idle_power_w) * saturated
