"""A device with round numbers, so that expected values can be worked out by hand."""

from hymell_jax import types

DEVICE = types.device(
    peak_flops_per_s=1e15,
    peak_fp8_flops_per_s=2e15,
    peak_vector_flops_per_s=5e13,
    memory_bytes_per_s=4e12,
    memory_bytes=100e9,
    l2_bytes=50e6,
    n_sm=128,
    boost_clock_hz=1.8e9,
    power_limit_w=700,
    idle_power_w=80,
    link_bytes_per_s=450e9,
)
