"""Board power stays between idle and limit, however hard the board is driven."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from hymell_jax import power
from hymell_jax.devices import get_device

H100 = get_device("h100-sxm-80gb").device
START = power.default_coefficients()


def test_power_lies_between_idle_and_limit_everywhere():
    rates = 10.0 ** jnp.linspace(0, 30, 40)
    watts = jnp.stack([power.board_power_w(START, H100, r, r, r) for r in rates])
    assert (watts > H100.idle_power_w).all()
    assert (watts <= H100.power_limit_w * 1.00001).all()


def test_power_rises_with_every_kind_of_work():
    base = float(power.board_power_w(START, H100, 1e14, 1e11, 1e11))
    assert float(power.board_power_w(START, H100, 3e14, 1e11, 1e11)) > base
    assert float(power.board_power_w(START, H100, 1e14, 1e12, 1e11)) > base
    assert float(power.board_power_w(START, H100, 1e14, 1e11, 1e12)) > base


def test_a_full_unit_saturates_at_the_limit():
    watts = power.board_power_w(START, H100, 1e15, 3e12, 3e13)
    np.testing.assert_allclose(watts, 700.0, rtol=0.01)


def test_shares_carry_to_another_board_by_its_range():
    a100 = get_device("a100-sxm-80gb").device
    scaled = [
        (power.board_power_w(START, d, 0.3 * d.peak_flops_per_s, 0.0, 0.0) - d.idle_power_w)
        / (d.power_limit_w - d.idle_power_w)
        for d in (H100, a100)
    ]
    np.testing.assert_allclose(scaled[0], scaled[1], rtol=1e-5)
