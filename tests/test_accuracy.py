"""Accuracy on measured test rows, re-checked wherever the tables are at hand."""

from __future__ import annotations

import pytest

from hymell_jax import checkpoint
from hymell_jax.evaluate import evaluate

BF16 = sorted({(device, runtime) for device, runtime, dtype in checkpoint.available()
               if dtype == "bf16"})  # fmt: skip


def _whole(rows, **wanted):
    return next(r for r in rows if all(r[k] == v for k, v in wanted.items()))


@pytest.mark.parametrize(("device", "runtime"), BF16)
def test_matrix_products_come_near_the_black_box_and_far_ahead_of_the_equation(
    data_folder, device, runtime
):
    key = dict(table="gemm", runtime=runtime, dtype="bf16", target="time", regime="all")
    refined = _whole(evaluate(device, data_folder), **key)
    published = _whole(evaluate(device, data_folder, form="published"), **key)
    assert refined["mape"] <= 1.33 * refined["reference_mape"]
    assert refined["mape"] <= 0.6 * published["mape"]


@pytest.mark.parametrize("table", ["softmax", "layernorm"])
def test_far_extrapolation_of_rowwise_operators(data_folder, table):
    row = _whole(evaluate("a100-pcie-40gb", data_folder), table=table, regime="all")
    assert row["mape"] <= 15.0
    assert row["mape"] < 0.4 * row["reference_mape"]


def test_energy_of_sound_rows_on_h200(data_folder):
    key = dict(table="gemm", runtime="vllm-0.22.0", dtype="bf16", target="energy")
    rows = evaluate("h200-sxm-141gb", data_folder)
    assert _whole(rows, regime="sound", **key)["mape"] <= 6.0
