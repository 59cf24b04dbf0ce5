"""Level 1 of the attention core: counts by hand, limits, monotonicity, gradients, the fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hymell_jax.attention import (
    ATTENTION_PHASES,
    ATTENTION_REGIMES,
    ATTENTION_TIME_S,
    DEFAULT_COEFFICIENTS,
    attended_keys,
    attention_bound_s,
    attention_decode_time_s,
    attention_prefill_time_s,
    causal_pairs,
    log_attention_flops,
    log_kv_bytes,
)
from hymell_jax.attention_features import ATTENTION_FEATURES, attention_features
from hymell_jax.attention_fit import fit_attention
from hymell_jax.smooth import soft_ceil
from hymell_jax.types import device

H100 = device(
    peak_flops_per_s=989.4e12,
    peak_fp8_flops_per_s=1978.9e12,
    peak_vector_flops_per_s=66.9e12,
    memory_bytes_per_s=3.35e12,
    memory_bytes=80e9,
    l2_bytes=50e6,
    n_sm=132,
    boost_clock_hz=1.98e9,
    power_limit_w=700,
    idle_power_w=70,
    link_bytes_per_s=450e9,
)
SHAPE = {
    "batch": 4.0,
    "tokens": 1024.0,
    "n_heads": 32.0,
    "n_kv_heads": 8.0,
    "head_dim": 128.0,
    "value_head_dim": 128.0,
    "window_tokens": 0.0,
    "kv_bytes": 2.0,
    "l2_residency": 1.0,
}
RUN = {phase: jax.jit(function) for phase, function in ATTENTION_TIME_S.items()}
GRADIENT = {
    phase: jax.jit(jax.grad(lambda c, d, sizes, f=f: jnp.log(f(c, d, *sizes)[0]), argnums=(0, 2)))
    for phase, f in ATTENTION_TIME_S.items()
}
EXTRA_COSTS = [
    name
    for name in DEFAULT_COEFFICIENTS
    if name.endswith(("launch_s", "excess", "wide", "exp", "cycles", "fallback_tiles", "_tensor"))
]
# Coefficients that leave only what the data sheet asks for.
IDEAL = DEFAULT_COEFFICIENTS | dict.fromkeys(EXTRA_COSTS, -60.0)


def time_s(phase, coefficients=DEFAULT_COEFFICIENTS, **changes):
    """The time of SHAPE with changes, as an array."""
    shape = SHAPE | changes
    leaves = [jnp.asarray(shape[name], jnp.float32) for name in SHAPE]
    return RUN[phase](coefficients, H100, *leaves)[0]


def random_coefficients(seed):
    """The defaults, each moved by a normal step of 1."""
    steps = np.random.default_rng(seed).normal(size=len(DEFAULT_COEFFICIENTS))
    return {n: float(v + s) for (n, v), s in zip(DEFAULT_COEFFICIENTS.items(), steps, strict=True)}


@pytest.mark.parametrize(
    ("tokens", "window", "pairs"),
    [(1, 0, 1), (4, 0, 10), (1000, 0, 500500), (4, 1, 4), (4, 2, 7), (4, 4, 10), (4, 9, 10)],
)
def test_causal_pairs_are_the_sum_of_attended_lengths(tokens, window, pairs):
    by_hand = sum(min(i, window or tokens) for i in range(1, tokens + 1))
    assert by_hand == pairs
    assert causal_pairs(float(tokens), float(window)) == pairs


def test_causal_masking_halves_a_long_square():
    # (s (s + 1) / 2) / s^2 = 1/2 + 1/(2 s); float32 carries 7 digits.
    np.testing.assert_allclose(causal_pairs(4096.0) / 4096.0**2, 0.5 + 1 / 8192, rtol=1e-6)


def test_a_short_window_makes_pairs_linear_in_tokens():
    # w s - w (w - 1) / 2 pairs: 1e6 x 128 - 128 x 127 / 2.
    np.testing.assert_allclose(causal_pairs(1e6, 128.0), 127_991_872, rtol=1e-6)
    assert attended_keys(1e6, 128.0) == 128 and attended_keys(100.0, 128.0) == 100


def test_flops_of_one_llama_layer():
    # Llama-3-8B, 8192 tokens: 2 products x 2 x 32 heads x 128 x 8192 x 8193 / 2 = 549,822,922,752.
    log_flops = log_attention_flops(1.0, causal_pairs(8192.0), 32.0, 128.0, 128.0)
    np.testing.assert_allclose(jnp.exp(log_flops), 549_822_922_752, rtol=3e-6)


def test_flops_count_both_widths():
    # DeepSeek's 192-wide keys and 128-wide values: 2 x 16 heads x (192 + 128) x 10 pairs.
    log_flops = log_attention_flops(1.0, 10.0, 16.0, 192.0, 128.0)
    np.testing.assert_allclose(jnp.exp(log_flops), 102_400, rtol=1e-5)


def test_kv_bytes_scale_with_kv_heads_and_cache_format():
    # Llama-3-8B: 8 KV heads x (128 + 128) x 2 bytes = 4096 bytes a token; a quarter of 32 KV heads.
    grouped = jnp.exp(log_kv_bytes(1.0, 1.0, 8.0, 128.0, 128.0, 2.0))
    full = jnp.exp(log_kv_bytes(1.0, 1.0, 32.0, 128.0, 128.0, 2.0))
    halved = jnp.exp(log_kv_bytes(1.0, 1.0, 8.0, 128.0, 128.0, 1.0))
    np.testing.assert_allclose([grouped, full, halved], [4096, 16384, 2048], rtol=1e-5)


def test_long_context_decode_time_scales_with_kv_heads():
    # At 1e6 tokens x 4 sequences the cache dwarfs L2: 8 against 2 KV heads is nearly 4 x the bytes.
    few = time_s("decode", IDEAL, tokens=1e6, n_kv_heads=2.0)
    many = time_s("decode", IDEAL, tokens=1e6, n_kv_heads=8.0)
    assert 3.0 < many / few < 4.0


def test_decode_from_dram_reaches_the_bandwidth_and_no_more():
    # 1 x 1e6 tokens x 8 KV heads x 256 x 2 bytes = 4.096 GB at 3.35 TB/s = 1.2227 ms. The terms add
    # up (p = 2 in IDEAL); tensor and exp are small beside it but the padded rows are not nothing.
    took = time_s("decode", IDEAL, batch=1.0, tokens=1e6, n_heads=8.0)
    assert 1.2227e-3 * 0.9999 <= took < 1.2227e-3 * 1.2


def test_long_prefill_reaches_the_tensor_peak_and_no_more():
    # 5.4976e11 FLOPs at 989.4e12 = 555.7 us; tiles are full, the diagonal costs under 2 %.
    shape = dict(batch=1.0, tokens=8192.0)
    took = time_s("prefill", IDEAL, **shape)
    assert 555.7e-6 * 0.9999 <= took < 555.7e-6 * 1.05


@pytest.mark.parametrize("phase", ATTENTION_PHASES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("residency", [0.0, 1.0])
def test_time_is_at_least_the_data_sheet_bound(phase, seed, residency):
    rng = np.random.default_rng(seed)
    n = 200
    batch, kv_heads, group = (np.float32(2.0 ** rng.integers(0, k, n)) for k in (9, 5, 5))
    tokens = np.float32(2.0 ** rng.uniform(0, 20, n))
    head_dim = np.float32(rng.choice([64, 96, 128, 256, 512], n))
    window = np.float32(rng.choice([0, 128, 1024], n))
    shape = (batch, tokens, kv_heads * group, kv_heads, head_dim, head_dim, window)
    coefficients = random_coefficients(seed) if seed else IDEAL
    took, _ = RUN[phase](coefficients, H100, *shape, 2.0, residency)
    pairs = causal_pairs(tokens, window) if phase == "prefill" else attended_keys(tokens, window)
    keys = tokens if phase == "prefill" else attended_keys(tokens, window)
    bound = attention_bound_s(
        H100,
        log_attention_flops(batch, pairs, kv_heads * group, head_dim, head_dim),
        log_kv_bytes(batch, keys, kv_heads, head_dim, head_dim, 2.0),
        residency,
    )
    assert np.all(took >= bound * (1 - 1e-5))  # logs of 1e15 carry 1e-6 in float32


def test_bound_by_hand():
    # 100 MB of KV: 50 MB must come from DRAM with L2 (14.93 us), all of it without (29.85 us).
    small_flops, kv = jnp.log(1e6), jnp.log(100e6)
    np.testing.assert_allclose(attention_bound_s(H100, small_flops, kv), 14.925e-6, rtol=1e-4)
    np.testing.assert_allclose(attention_bound_s(H100, small_flops, kv, 0.0), 29.851e-6, rtol=1e-4)
    # 989.4 GFLOP take 1 ms.
    np.testing.assert_allclose(attention_bound_s(H100, jnp.log(989.4e9), kv), 1e-3, rtol=1e-4)


@pytest.mark.parametrize("phase", ATTENTION_PHASES)
def test_kv_that_fits_in_l2_is_cheaper_than_from_dram(phase):
    shape = dict(batch=1.0, tokens=2048.0)  # 8.4 MB of KV, in a 50 MB L2
    assert time_s(phase, l2_residency=1.0, **shape) < time_s(phase, l2_residency=0.0, **shape)


@pytest.mark.parametrize("phase", ATTENTION_PHASES)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("name", "start", "stop"),
    [
        ("batch", 1, 4096),
        ("tokens", 1, 1e8),
        ("n_heads", 8, 1024),
        ("n_kv_heads", 1, 32),
        ("head_dim", 16, 1024),
        ("value_head_dim", 16, 1024),
        ("window_tokens", 1, 1e5),
    ],
)
def test_time_never_falls_as_the_work_grows(phase, seed, name, start, stop):
    sizes = np.float32(np.geomspace(start, stop, 400))
    took = time_s(phase, random_coefficients(seed), **{name: sizes})
    steps = np.diff(np.log(np.asarray(took, np.float64)))
    assert np.all(np.isfinite(took)) and steps.min() > -1e-5  # float32 rounding of the log terms


@pytest.mark.parametrize("phase", ATTENTION_PHASES)
def test_windows(phase):
    full = time_s(phase)
    np.testing.assert_allclose(time_s(phase, window_tokens=1024.0), full, rtol=1e-6)
    np.testing.assert_allclose(time_s(phase, window_tokens=1e7), full, rtol=1e-6)
    assert time_s(phase, tokens=65536.0, window_tokens=128.0) < 0.2 * time_s(phase, tokens=65536.0)


def test_windowed_decode_does_not_depend_on_the_context_beyond_the_window():
    near, far = (time_s("decode", tokens=t, window_tokens=128.0) for t in (128.0, 1e6))
    np.testing.assert_allclose(near, far, rtol=1e-6)


@pytest.mark.parametrize("phase", ATTENTION_PHASES)
def test_fp8_cache_is_never_slower_where_the_cache_streams_from_dram(phase):
    shape = dict(batch=64.0, tokens=32768.0)
    assert time_s(phase, kv_bytes=1.0, **shape) <= time_s(phase, kv_bytes=2.0, **shape)


@pytest.mark.parametrize("phase", ATTENTION_PHASES)
def test_regime_weights_are_shares(phase):
    function = ATTENTION_TIME_S[phase]
    tokens = jnp.asarray([1.0, 1e3, 1e6])
    _, weights = function(DEFAULT_COEFFICIENTS, H100, 1.0, tokens, 32.0, 8.0, 128.0, 128.0)
    assert weights.shape == (3, len(ATTENTION_REGIMES))
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-5)
    assert np.all(weights >= 0)
    assert weights[0, ATTENTION_REGIMES.index("launch")] > 0.4
    last = {"prefill": ("tensor", "exp"), "decode": ("memory",)}[phase]
    assert sum(weights[2, ATTENTION_REGIMES.index(name)] for name in last) > 0.5


@pytest.mark.parametrize("phase", ATTENTION_PHASES)
def test_weights_are_the_share_of_each_term_in_the_derivative(phase):
    # A floor raised by 1 % raises the time by 1 % of the launch share.
    name = f"{phase}_log_launch_s"

    def log_time(log_launch):
        return jnp.log(time_s(phase, DEFAULT_COEFFICIENTS | {name: log_launch}, batch=1.0))

    shape = (1.0, 1024.0, 32.0, 8.0, 128.0, 128.0)
    _, weights = ATTENTION_TIME_S[phase](DEFAULT_COEFFICIENTS, H100, *shape)
    slope = jax.grad(log_time)(jnp.float32(DEFAULT_COEFFICIENTS[name]))
    np.testing.assert_allclose(slope, weights[0], rtol=1e-4)


@pytest.mark.parametrize("phase", ATTENTION_PHASES)
@pytest.mark.parametrize("tokens", [1.0, 2.0, 1e8])
@pytest.mark.parametrize("window", [0.0, 1.0, 128.0])
def test_gradients_are_finite_at_the_corners(phase, tokens, window):
    sizes = [jnp.float32(x) for x in (1, tokens, 32, 8, 128, 128, window, 2, 1)]
    gradients = GRADIENT[phase](DEFAULT_COEFFICIENTS, H100, sizes)
    assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("phase", ATTENTION_PHASES)
def test_float32_holds_at_the_largest_sizes(phase):
    took = time_s(phase, batch=4096.0, tokens=1e8, n_heads=1024.0, n_kv_heads=1024.0)
    assert np.isfinite(took) and took > 0
    # Prefill is quadratic there, decode linear: time over size^power is the same at 1e7 and 1e8.
    power = {"prefill": 2, "decode": 1}[phase]
    ratio = time_s(phase, tokens=1e8) / time_s(phase, tokens=1e7)
    np.testing.assert_allclose(ratio, 10.0**power, rtol=0.02)


@pytest.mark.parametrize("phase", ATTENTION_PHASES)
def test_jit_and_eager_agree(phase):
    function = ATTENTION_TIME_S[phase]
    tokens = jnp.geomspace(1.0, 1e6, 64)

    def run(tokens):
        return function(DEFAULT_COEFFICIENTS, H100, 4.0, tokens, 32.0, 8.0, 128.0, 128.0)[0]

    np.testing.assert_allclose(jax.jit(run)(tokens), run(tokens), rtol=1e-5)


def test_prefill_and_decode_have_their_own_coefficients():
    moved = {n: v + (n.startswith("decode_")) for n, v in DEFAULT_COEFFICIENTS.items()}
    shape = (H100, 4.0, 1024.0, 32.0, 8.0, 128.0, 128.0)
    same = attention_prefill_time_s(DEFAULT_COEFFICIENTS, *shape)[0]
    assert attention_prefill_time_s(moved, *shape)[0] == same
    assert (
        attention_decode_time_s(moved, *shape)[0]
        > attention_decode_time_s(DEFAULT_COEFFICIENTS, *shape)[0]
    )


def synthetic_rows(phase, coefficients, n=400):
    """Random shapes and the times that `coefficients` give them."""
    rng = np.random.default_rng(0)
    kv_heads, group, batch = (2.0 ** rng.integers(0, k, n) for k in (4, 4, 8))
    columns = dict(
        batch=batch,
        tokens=2.0 ** rng.integers(0, 15, n),
        n_heads=kv_heads * group,
        n_kv_heads=kv_heads,
        head_dim=rng.choice([64.0, 128.0, 256.0], n),
        window_tokens=rng.choice([0.0, 128.0], n),
        kv_bytes=rng.choice([1.0, 2.0], n),
    )
    values = [jnp.asarray(columns[k], jnp.float32) for k in columns]
    values.insert(5, values[4])
    columns["time_s"] = np.asarray(ATTENTION_TIME_S[phase](coefficients, H100, *values)[0])
    return columns, values


@pytest.mark.parametrize("phase", ATTENTION_PHASES)
def test_fit_reproduces_synthetic_times(phase):
    truth = DEFAULT_COEFFICIENTS | {
        f"{phase}_log_tile_cycles": 8.6,
        f"{phase}_log_launch_s": -11.2,
        f"{phase}_log_dram_excess": -2.0,
        f"{phase}_log_tensor_excess": 0.3,
    }
    columns, values = synthetic_rows(phase, truth)
    fitted = fit_attention(phase, H100, **columns, steps=500)
    error = ATTENTION_TIME_S[phase](fitted, H100, *values)[0] / columns["time_s"] - 1
    before = ATTENTION_TIME_S[phase](DEFAULT_COEFFICIENTS, H100, *values)[0] / columns["time_s"] - 1
    assert np.abs(before).mean() > 0.2
    assert np.abs(error).mean() < 0.01
    assert fitted == fit_attention(phase, H100, **columns, steps=500)


def test_fit_refuses_what_it_cannot_use():
    columns, _ = synthetic_rows("decode", DEFAULT_COEFFICIENTS, 8)
    with pytest.raises(ValueError, match="phase must be one of prefill, decode; got 'both'"):
        fit_attention("both", H100, **columns)
    with pytest.raises(ValueError, match="one length"):
        fit_attention("decode", H100, **(columns | {"batch": [1.0]}))
    with pytest.raises(ValueError, match="positive and finite"):
        fit_attention("decode", H100, **(columns | {"time_s": np.zeros(8)}))


@pytest.mark.parametrize("phase", ATTENTION_PHASES)
def test_features_have_names_and_are_finite_from_1_to_1e8_tokens(phase):
    tokens = jnp.asarray([1.0, 128.0, 1e8])
    shape = (4.0, tokens, 32.0, 8.0, 128.0, 128.0, 0.0, 2.0)
    features = attention_features(phase, DEFAULT_COEFFICIENTS, H100, *shape)
    assert features.shape == (3, len(ATTENTION_FEATURES)) and np.all(np.isfinite(features))
    by_name = dict(zip(ATTENTION_FEATURES, features[1], strict=True))
    assert by_name["log2_batch"] == 2 and by_name["log2_group"] == 2
    np.testing.assert_allclose(by_name["head_dim_128"], 1.0, atol=1e-6)
    # 4 sequences x 128 tokens x 8 KV heads x 128 x 2 x 2 bytes over 50 MB.
    expected = np.log2(4 * 128 * 8 * 128 * 4 / 50e6)
    np.testing.assert_allclose(by_name["log2_kv_bytes_per_l2"], expected, rtol=1e-5)

    def total(t):
        shape = (4.0, t, 32.0, 8.0, 128.0, 128.0, 0.0, 2.0)
        return attention_features(phase, DEFAULT_COEFFICIENTS, H100, *shape).sum()

    assert all(np.isfinite(jax.grad(total)(jnp.float32(t))) for t in (1.0, 128.0, 1e8))


def test_soft_ceil_is_an_increasing_staircase():
    x = jnp.linspace(0.0, 20.0, 4001)
    assert np.all(np.diff(soft_ceil(x)) > 0)
    # Hard limit ceil(x - 1/8) away from its steps, at r = 0.999 to 1 %.
    middle = jnp.asarray([0.6, 1.6, 7.0, 12.9])
    np.testing.assert_allclose(soft_ceil(middle, 0.999), [1, 2, 7, 13], atol=0.01)
    assert np.isfinite(jax.grad(soft_ceil)(1e7))
