"""What a pass consists of: shapes and counts against hand arithmetic. No hardware."""

from __future__ import annotations

import numpy as np
import pytest

import hymell_jax as hj
from hymell_jax import operators

DENSE = dict(n_layers=4, d_model=512, n_heads=8, n_kv_heads=2, head_dim=64, d_ff=2048,
             vocab_size=1000)  # fmt: skip
LATENT = dict(latent_attention=1, kv_lora_rank=64, q_lora_rank=96, rope_head_dim=16,
              value_head_dim=32, n_kv_heads=8)  # fmt: skip


def product(part: str, rows: float = 10.0, gpus: float = 1.0, **fields) -> tuple[float, ...]:
    """(m, n, k, times in a pass) of a matrix product."""
    arch = hj.architecture(**DENSE | fields)
    work = hj.workload(batch_size=3, tensor_parallel=gpus)
    found = operators.matrix_products(arch, work, np.float32(rows))
    index = operators.MATRIX_PARTS.index(part)
    return tuple(float(getattr(found, name)[index]) for name in ("m", "n", "k", "count"))


def test_queries_keys_and_values_are_one_product():
    assert product("qkv_projection") == (10, 8 * 64 + 2 * 2 * 64, 512, 4)
    assert product("qkv_projection", gpus=2) == (10, 4 * 64 + 2 * 64, 512, 4)
    assert product("qkv_projection", attention_gate=1)[1] == 2 * 8 * 64 + 2 * 2 * 64
    assert product("out_projection") == (10, 512, 8 * 64, 4)


def test_a_gated_block_is_two_products_of_three_matrices():
    assert product("ffn_up") == (10, 2 * 2048, 512, 4)
    assert product("ffn_up", n_ff_matrices=2)[1] == 2048
    assert product("ffn_down") == (10, 512, 2048, 4)
    assert product("ffn_down", gpus=4)[2] == 512


def test_the_head_sees_one_row_a_sequence():
    assert product("lm_head") == (3, 1000, 512, 1)


def test_a_part_that_a_model_lacks_runs_no_time():
    for part in operators.MATRIX_PARTS:
        if part.startswith(("latent", "linear", "shared", "router")):
            assert product(part)[3] == 0


def test_latent_attention_projects_down_and_up():
    assert product("qkv_projection", **LATENT)[3] == 0
    assert product("latent_q_down", **LATENT) == (10, 96, 512, 4)
    assert product("latent_q_up", **LATENT) == (10, 8 * 64, 96, 4)
    assert product("latent_kv_down", **LATENT) == (10, 64 + 16, 512, 4)
    assert product("latent_kv_up", **LATENT) == (10, 8 * (64 - 16 + 32), 64, 4)


def test_layers_are_shared_out_by_kind():
    arch = hj.architecture(
        **DENSE, window_fraction=0.5, window_tokens=8, n_experts=4, experts_per_token=1, d_expert=8,
        moe_fraction=0.25,
    )  # fmt: skip
    counts = {name: float(value) for name, value in operators.layer_counts(arch).items()}
    assert counts == {
        "attention": 4, "full": 2, "window": 2, "linear": 0, "dense": 3, "mixture": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("bits", "dtype", "expected"),
    [(16, "bf16", 2), (4, "bf16", 0.5), (16, "fp8", 1), (8, "fp32", 4)],
)
def test_weights_are_read_as_stored_but_no_wider_than_computed_with(bits, dtype, expected):
    arch = hj.architecture(**DENSE, weight_bits=bits)
    assert float(operators.weight_element_bytes(arch, hj.workload(dtype=dtype))) == expected
