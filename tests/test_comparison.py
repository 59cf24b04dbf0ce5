"""Methods side by side: ours at every level, fitted ones where fits are given."""

from __future__ import annotations

import pytest
from test_baselines_wattgpu import grid_table

import hymell_jax as hj
from hymell_jax import comparison
from hymell_jax.baselines import wattgpu

pytest.importorskip("xgboost")


@pytest.fixture(scope="module")
def fits():
    return {"wattgpu": wattgpu.fit_models(grid_table())}


def _by_name(model: str, device: str, fits) -> dict:
    content = comparison.compare(hj.preset(model), device, hj.workload(batch_size=8), fits)
    return {m["method"]: m for m in content["methods"]}


def test_a_method_that_needs_a_fit_answers_with_one(fits):
    methods = _by_name("qwen2.5-7b", "l40s-48gb", fits)
    trees = methods["wattgpu"]
    assert trees["decode_energy_per_token_j"] > 0 and "runs" in trees["coefficients"]
    assert methods["hymell_jax, level 3"]["prefill_time_s"] > 0


def test_our_own_row_says_where_its_coefficients_come_from():
    own = {}
    for device in ("l40s-48gb", "l4-24gb"):
        methods = _by_name("gpt2", device, None)
        own[device] = next(m for name, m in methods.items() if name.startswith("hymell_jax"))
    assert own["l40s-48gb"]["coefficients"].startswith("Fitted, vllm")
    assert own["l4-24gb"]["coefficients"].startswith("Carried over from l40s-48gb, vllm")


def test_what_a_method_does_not_cover_is_said(fits):
    trees = _by_name("olmoe-1b-7b", "l40s-48gb", fits)["wattgpu"]
    assert trees["decode_energy_per_token_j"] is None and "experts" in trees["coefficients"]
    unfitted = _by_name("olmoe-1b-7b", "l40s-48gb", None)["wattgpu"]
    assert "before a fit" in unfitted["coefficients"]
