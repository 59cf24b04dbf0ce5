"""Fits of the baselines to measured whole models: they recover, and never see what is left out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from hymell_jax import baseline_fits, devices, wattgpu_fits
from hymell_jax.baselines import roofline, sweetspot, tokens_to_watt_hours
from hymell_jax.system_fit import TARGETS
from hymell_jax.system_rows import stack_leaves
from hymell_jax.systems import group_architecture
from hymell_jax.types import workload

MODELS = ("llama-3-8b", "qwen3-8b", "llama-2-7b", "qwen3-32b")
EFFICIENT = {"log_compute_efficiency": np.log(0.4), "log_memory_efficiency": np.log(0.7)}
CALIBRATED = tokens_to_watt_hours.calibrated_coefficients() | {
    "log_j_per_flop": np.float32(np.log(0.4e-12)),
    "log_j_per_bit": np.float32(np.log(8e-12)),
}


def rows(device="h100-sxm-80gb", models=MODELS, served=False):
    """Runs of fixed batches, or steady steps, that the roofline and the calibrated form made."""
    cases = [
        (m, b, n) for m in models for b in (1.0, 8.0, 32.0) for n in (128.0, 512.0, 1024.0, 2048.0)
    ]
    frame = pd.DataFrame(cases, columns=["group", "batch", "prompt"]).assign(
        output=256.0, device=device, engine="engine", table="argonne_power", quantised=False,
        moe=False, tensor_parallel=1.0, continuous=float(served), weight_bytes=2.0,
    )  # fmt: skip
    works = [workload(batch_size=b, prompt_tokens=n, output_tokens=256.0) for _, b, n in cases]
    n = len(cases)
    phase = np.tile(np.float32([[1, 0, 0]] if served else [[0, 0, 1]]), (n, 1))
    found = baseline_fits.Measured(
        frame=frame,
        arch=stack_leaves([group_architecture(m) for m, _, _ in cases]),
        work=stack_leaves(works),
        device=stack_leaves([devices.get_device(device).device] * n),
        turns=np.ones(n, np.float32),
        phase=phase,
        measured=np.full((n, len(TARGETS)), np.nan, np.float32),
    )
    times = baseline_fits.answers(roofline.predict, found, EFFICIENT)
    joules = baseline_fits.answers(tokens_to_watt_hours.predict_calibrated, found, CALIBRATED)
    measured = np.full((n, len(TARGETS)), np.nan, np.float32)
    for name in ("steady", "median") if served else ("total",):
        measured[:, TARGETS.index(name)] = times[:, TARGETS.index(name)]
    measured[:, TARGETS.index("energy")] = joules[:, TARGETS.index("energy")]
    frame = frame.assign(
        total_time_s=times[:, TARGETS.index("total")] if not served else np.nan,
        decode_median_s=times[:, TARGETS.index("median")] if served else np.nan,
        decode_time_s=times[:, TARGETS.index("steady")] if served else np.nan,
        power_w=joules[:, -1] / times[:, TARGETS.index("steady" if served else "total")],
    )
    return dataclasses.replace(found, measured=measured, frame=frame)


@pytest.fixture(scope="module")
def runs():
    return rows()


def error(found, measured, target):
    column = TARGETS.index(target)
    return np.abs(found[:, column] / measured.measured[:, column] - 1.0)


def test_a_fit_recovers_the_coefficients_that_made_the_rows(runs):
    weights = np.ones((1, len(runs.frame)), np.float32)
    found = baseline_fits.fit_rows(
        roofline.predict, roofline.plain_coefficients(), baseline_fits.TIMES, runs, weights
    )
    for name, value in EFFICIENT.items():
        assert found[name][0] == pytest.approx(value, abs=0.02)
    assert error(baseline_fits.left_out("roofline", [runs])[0], runs, "total").max() < 0.01


def test_the_calibrated_form_is_fitted_to_energy(runs):
    (found,) = baseline_fits.left_out("tokens-to-watt-hours", [runs])
    assert error(found, runs, "energy").max() < 0.05
    assert np.isnan(found[:, TARGETS.index("total")]).all()  # it gives no time


@pytest.mark.parametrize("by", ["group", "device"])
def test_what_is_left_out_does_not_touch_its_own_prediction(runs, by):
    both = [runs] if by == "group" else [_joined(runs, rows("a100-sxm-80gb"))]
    name = {"group": "llama-3-8b", "device": "a100-sxm-80gb"}[by]
    (first,) = baseline_fits.left_out("life", both, by)
    left = (both[0].frame[by] == name).to_numpy()
    wrong = both[0].measured * np.where(left, 3.0, 1.0)[:, None].astype(np.float32)
    (second,) = baseline_fits.left_out("life", [dataclasses.replace(both[0], measured=wrong)], by)
    np.testing.assert_allclose(second[left], first[left], rtol=1e-5)
    total = TARGETS.index("total")
    assert np.abs(second[~left, total] / first[~left, total] - 1.0).max() > 0.05


def _joined(a, b):
    import jax

    leaves = (
        jax.tree.map(lambda x, y: np.concatenate([x, y]), getattr(a, n), getattr(b, n))
        for n in ("arch", "work", "device", "turns", "phase", "measured")
    )
    return baseline_fits.Measured(pd.concat([a.frame, b.frame], ignore_index=True), *leaves)


def test_published_coefficients_follow_the_gpu():
    name = "tokens-to-watt-hours, literal"
    found = {
        d: baseline_fits.given(name, [rows(d)])[0][:, TARGETS.index("energy")]
        for d in ("h100-sxm-80gb", "a100-sxm-80gb")
    }
    ratio = found["a100-sxm-80gb"] / found["h100-sxm-80gb"]
    assert (ratio > 13.11 / 11.68 - 1e-3).all() and (ratio < 0.70 / 0.52 + 1e-3).all()


def test_a_mean_step_carries_the_prompts_of_newcomers():
    served = rows(served=True)
    steady, median = (served.measured[:, TARGETS.index(t)] for t in ("steady", "median"))
    whole = baseline_fits.answers(roofline.predict, rows(), EFFICIENT)
    prefill = whole[:, TARGETS.index("prefill")]
    np.testing.assert_allclose(steady - median, prefill / 256.0, rtol=1e-2)


def test_load_factors_follow_the_scenario(runs):
    assert set(baseline_fits.scenarios(runs.frame)) == {"offline"}
    served = rows(served=True)
    assert set(baseline_fits.scenarios(served.frame)) == {"server_low", "server_high"}
    tdp = baseline_fits.left_out("tdp", [served])[0]
    share = baseline_fits.load_scaled(served.frame, tdp)[:, -1] / tdp[:, -1]
    np.testing.assert_allclose(share, np.where(served.frame["batch"] < 32, 0.2, 0.6))


def _sweet(measured):
    """The same rows with energies of SweetSpot's cross-model form."""
    start = sweetspot.default_coefficients()
    sizes = np.stack(
        [np.asarray(sweetspot.log_sizes(group_architecture(g))) for g in measured.frame["group"]]
    )
    theta = np.exp(start["log_theta"] + sizes @ start["slopes"])
    lengths = measured.frame["prompt"], measured.frame["output"]
    joules = (sweetspot.terms(*lengths) * theta).sum(1)
    joules = joules * measured.frame["batch"].to_numpy() * 256.0
    changed = measured.measured.copy()
    changed[:, TARGETS.index("energy")] = joules
    return dataclasses.replace(measured, measured=changed)


def test_sweetspot_left_out_recovers_its_own_rows_and_skips_time(runs):
    sweet = _sweet(runs)
    (found,) = baseline_fits.sweetspot_left_out([sweet])
    assert np.median(error(found, sweet, "energy")) < 0.02
    assert np.isnan(found[:, TARGETS.index("total")]).all()


def test_sweetspot_of_one_model_reports_both_errors(runs):
    one = baseline_fits.sweetspot_per_model([_sweet(runs)])
    assert set(one["group"]) == set(MODELS)
    assert (one["in_sample"] < 0.1).all()  # one energy per pair of lengths, whatever the batch
    assert one["left_length_out"].notna().any()


def test_wattgpu_covers_dense_single_gpu_rows_and_the_extended_form_all(runs):
    pytest.importorskip("xgboost")
    mixture = dataclasses.replace(runs, frame=runs.frame.assign(moe=True))
    assert len(wattgpu_fits.table([runs, mixture])) == len(runs.frame)
    both = wattgpu_fits.table([runs, mixture], extended=True)
    assert len(both) == 2 * len(runs.frame)
    found = wattgpu_fits.left_out([runs, rows(served=True)], extended=True)
    total, step = found[0][:, TARGETS.index("total")], found[1][:, TARGETS.index("median")]
    assert np.isfinite(total).all() and np.isfinite(step).all()
    assert np.isfinite(found[0][:, TARGETS.index("energy")]).all()
