"""The matrix product: published limits, bounds, monotonicity, gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hymell_jax import gemm
from hymell_jax.devices import get_device

H100 = get_device("h100-sxm-80gb").device
START = gemm.default_coefficients()


def _published_reference(coefficients, m, n, k):
    """Equations 5 and 6 of arXiv 2608.06723 in plain Python, with real if and else."""
    flops = 2 * m * n * k
    b_in, b_out = (m + n) * k * 2, m * n * 2
    ai, pf = flops / (b_in + b_out), m * n / k
    if flops < 8_388_608:
        row = 0
    elif ai < 81.92:
        row = 1
    elif ai < 166.05:
        row = 2
    elif ai < 288.91:
        row = 3
    else:
        row = 4
    g10, g9, g8, g7, g6, g5, g4, g3, g2, g1, g0 = coefficients[row]
    return (g10 * pf * flops + g9 * pf * b_in + g8 * ai * b_in + g7 * flops + g6 * pf + g5 * ai
            + g4 * b_out + g3 * b_in + g2 * np.log10(flops) + g1 / pf + g0)  # fmt: skip


def _shapes(count: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return tuple(np.exp(rng.uniform(0, np.log(60000), count)).round() for _ in range(3))


def test_the_published_form_tends_to_the_plain_piecewise_equation():
    m, n, k = _shapes(500)
    rng = np.random.default_rng(1)
    coefficients = rng.uniform(0.1, 1, (5, 11)) * np.array(
        [1e-22, 1e-18, 1e-14, 1e-15, 1e-9, 1e-8, 1e-12, 1e-12, 1e-7, 1e-6, 1e-6]
    )
    expected = [_published_reference(coefficients, *shape) for shape in zip(m, n, k, strict=True)]
    with jax.enable_x64(True):
        got = gemm.published_gemm(
            jnp.asarray(coefficients), *(jnp.asarray(a, jnp.float64) for a in (m, n, k)), 1e-7
        )
    np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_the_published_regimes_have_the_published_edges():
    assert gemm.LAUNCH_EDGE_FLOPS == 8_388_608  # 2^23, m n k = 2^22
    cube = np.array([160.0, 161.0, 162.0])
    assert list(gemm.published_regime(cube, cube, cube)) == [0, 0, 1]  # 2 n^3 passes 2^23
    sides = np.array([245.0, 247.0, 498.0, 499.0, 866.0, 867.0])  # intensity of a cube is n / 3
    assert list(gemm.published_regime(sides, sides, sides)) == [1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("temperature", [0.02, 0.2])
def test_regime_weights_sum_to_one(temperature):
    m, n, k = (jnp.asarray(a, jnp.float32) for a in _shapes(200))
    gates = gemm.published_gates(m, n, k, temperature)
    np.testing.assert_allclose(gates.sum(-1), 1.0, atol=1e-5)
    assert (gates >= 0).all()


def test_time_is_at_least_the_roofline_when_weights_stream():
    m, n, k = (jnp.asarray(a, jnp.float32) for a in _shapes(2000))
    time_s, shares = jax.vmap(
        lambda m, n, k: gemm.gemm_time(START, H100, m, n, k, streaming_weights=1.0)
    )(m, n, k)
    assert (time_s >= 2 * m * n * k / 989.4e12 * 0.9999).all()
    assert (time_s >= n * k * 2 / 3.35e12 * 0.9999).all()
    np.testing.assert_allclose(shares.sum(-1), 1.0, atol=1e-4)


@pytest.mark.parametrize("strong", [0.0, 2.0], ids=["default", "slowed"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("factor", [1.003, 1.1, 2.0])
def test_time_is_non_decreasing_in_every_size(axis, factor, strong):
    terms = ("log_row_slowdown", "log_power_flops", "log_power_bytes")
    c = START | {name: np.float32(strong) for name in terms if strong}
    sizes = [jnp.asarray(a, jnp.float32) for a in _shapes(3000, seed=axis)]
    run = jax.jit(jax.vmap(lambda m, n, k: gemm.gemm_time(c, H100, m, n, k)[0]))
    before = run(*sizes)
    sizes[axis] = sizes[axis] * factor
    assert (run(*sizes) >= before * (1 - 2e-6)).all()


def test_gradients_are_finite_from_one_to_ten_million():
    ends = [1.0, 17.0, 1e4, 1e7]
    shapes = jnp.array([[m, n, k] for m in ends for n in ends for k in ends])
    gradient = jax.vmap(jax.grad(lambda s: jnp.log(gemm.gemm_time(START, H100, *s)[0])))(shapes)
    assert np.isfinite(gradient).all()


def test_fp8_doubles_the_peak_and_four_bits_do_not():
    two, one, half = (float(gemm.peak_rate(H100, jnp.float32(b))) for b in (2.0, 1.0, 0.5))
    assert two == pytest.approx(989.4e12, rel=1e-3)
    assert one == pytest.approx(1978.9e12, rel=1e-3)
    assert half == pytest.approx(one)


def test_groups_cost_at_least_as_much_as_one_product_and_at_most_their_sum():
    one = float(gemm.gemm_time(START, H100, 64.0, 2048.0, 4096.0)[0])
    eight = float(gemm.gemm_time(START, H100, 64.0, 2048.0, 4096.0, groups=8.0)[0])
    assert one < eight <= 8 * one


def _slowed(m, n, k, **coefficients):
    """Seconds with these coefficients over seconds with both slowdowns off."""
    off = {
        f"log_{name}": np.float32(-30) for name in ("row_slowdown", "power_flops", "power_bytes")
    }
    on = {f"log_{name}": np.float32(value) for name, value in coefficients.items()}
    times = [gemm.gemm_time(START | off | more, H100, m, n, k)[0] for more in (on, {})]
    return float(times[0] / times[1])


def test_many_rows_are_slowed_where_weights_are_not_huge():
    edges = dict(row_slowdown=-1.0, rows=np.log(3000.0), row_weights=np.log(1e9))
    assert _slowed(2048.0, 8192.0, 8192.0, **edges) == pytest.approx(1.0, abs=1e-4)
    assert 1.1 < _slowed(4096.0, 8192.0, 8192.0, **edges) < 1.4
    assert 1.0 <= _slowed(4096.0, 300e3, 300e3, **edges) < 1.01


def test_the_power_limit_adds_up_the_joules_of_flops_and_bytes():
    shape = m, n, k = 4096.0, 8192.0, 8192.0
    by_flops = START | {"log_power_flops": np.float32(3), "log_power_bytes": np.float32(-30)}
    time_s, shares = gemm.gemm_time(by_flops, H100, *shape)
    limited = float(time_s - np.exp(START["log_launch_s"])) / (2 * m * n * k / 989.4e12 * np.exp(3))
    blunt = len(gemm.KERNELS) ** (-1 / gemm.CHOICE)  # the soft minimum of equal terms
    assert blunt * 0.999 < limited < 1.001
    assert shares[gemm.BOUNDS.index("compute")] > 0.99
    by_bytes = START | {"log_power_flops": np.float32(-30), "log_power_bytes": np.float32(5)}
    assert gemm.gemm_time(by_bytes, H100, *shape)[1][gemm.BOUNDS.index("memory")] > 0.99
    assert _slowed(*shape, power_flops=0.5, power_bytes=1.0) > _slowed(*shape, power_flops=0.5)


def test_boards_of_one_chip_move_equal_bytes_a_cycle_through_l2():
    h100, h200 = (get_device(n).device for n in ("h100-sxm-80gb", "h200-sxm-141gb"))
    c = gemm.default_coefficients()
    moved = gemm.carried(c, h100, h200)
    assert {name for name in c if np.any(moved[name] != c[name])} == {"log_cache_cost"}
    # the same clock and SMs: the L2 time of a byte is the same, whatever the DRAM does
    seconds = [
        float(np.exp(x["log_cache_cost"]) / d.memory_bytes_per_s)
        for x, d in ((c, h100), (moved, h200))
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-4)
