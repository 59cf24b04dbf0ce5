"""Grams of CO2 and money of a prediction, from an intensity and prices that the reader gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hymell_jax.types import checked_number

JOULES_PER_KWH = 3.6e6


def footprint(
    answer: Mapping[str, Any],
    carbon_intensity_g_per_kwh: float | None = None,
    price_per_kwh: float | None = None,
    price_per_gpu_hour: float | None = None,
) -> dict[str, Any] | None:
    """What the energy and the GPU time of a workload cost; None where nothing was given.

    CO2 and the price of energy count the energy of the GPU boards, without host and cooling.

    Args:
        answer: of `summary.summarise`.
        carbon_intensity_g_per_kwh: grams of CO2 for a kilowatt-hour.
        price_per_kwh, price_per_gpu_hour: in any one currency; both are added.

    Returns:
        The given numbers; `co2_g` and `co2_g_per_1k_tokens`, None without an intensity; `cost` and
        `cost_per_million_tokens`, None without a price. Tokens are output tokens. What
        needs an energy is None where the answer has none.

    Raises:
        ValueError: a negative number.
    """
    given = {
        "carbon_intensity_g_per_kwh": carbon_intensity_g_per_kwh,
        "price_per_kwh": price_per_kwh,
        "price_per_gpu_hour": price_per_gpu_hour,
    }
    given = {
        name: None if value is None else checked_number(name, value, 0.0, 1e9)
        for name, value in given.items()
    }
    if all(value is None for value in given.values()):
        return None
    work, total = answer["workload"], answer["total"]
    tokens = work["batch_size"] * work["output_tokens"]
    known = total["energy_j"] is not None
    kwh = total["energy_j"] / JOULES_PER_KWH if known else 0.0
    gpus = max(work["tensor_parallel"], work["expert_parallel"])
    hours = total["time_s"] / 3600.0 * gpus
    co2_g = cost = None
    if known and given["carbon_intensity_g_per_kwh"] is not None:
        co2_g = kwh * given["carbon_intensity_g_per_kwh"]
    priced = (given["price_per_kwh"], given["price_per_gpu_hour"]) != (None, None)
    if priced and (known or given["price_per_kwh"] is None):
        cost = kwh * (given["price_per_kwh"] or 0.0) + hours * (given["price_per_gpu_hour"] or 0.0)
    return given | {
        "co2_g": co2_g,
        "co2_g_per_1k_tokens": None if co2_g is None else co2_g / tokens * 1e3,
        "cost": cost,
        "cost_per_million_tokens": None if cost is None else cost / tokens * 1e6,
    }
