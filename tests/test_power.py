"""Board power stays between idle and limit, however hard the board is driven."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from hymell_jax import power
from hymell_jax.devices import get_device, same_chip

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


def test_boards_of_one_chip_spend_the_same_joules():
    """A decode step far below both limits costs the same energy on the SXM and the NVL board."""
    sxm, nvl = (get_device(n).device for n in ("h100-sxm-80gb", "h100-nvl-94gb"))
    shares = {name: np.float32(-3.0) for name in power.POWER_COEFFICIENTS}
    moved = power.carried(shares, sxm, nvl)
    rates = (1e14, 1e12, 2e12)
    above_idle = [
        float(power.board_power_w(c, d, *rates) - d.idle_power_w)
        for c, d in ((shares, sxm), (moved, nvl))
    ]
    assert above_idle[0] == pytest.approx(above_idle[1], rel=1e-4)
    assert above_idle[0] > 30
    other = power.carried({"log_step_s": np.float32(1.0)}, sxm, nvl)
    assert other == {"log_step_s": 1.0}


def test_only_boards_of_one_chip_count_as_such():
    pairs = {
        ("h100-sxm-80gb", "h100-nvl-94gb"): True, ("a100-pcie-40gb", "a10-24gb"): False,
        ("h100-sxm-80gb", "a100-sxm-80gb"): False,
    }  # fmt: skip
    for names, alike in pairs.items():
        assert same_chip(*map(get_device, names)) is alike
