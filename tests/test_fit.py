"""Fitting: on measured rows that anybody can install, never on test rows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from json_outputs import conforming

from hymell_jax import (
    checkpoint,
    collectives,
    data,
    devices,
    evaluate,
    fit,
    gemm,
    importers,
    recipes,
)

QUICK = ((8, 150, 1024, 0.06), (gemm.CHOICE, 150, 1024, 0.03))


@pytest.fixture(scope="module")
def a100_rows() -> pd.DataFrame:
    """Matrix products of an A100, from the aiconfigurator-core package."""
    tables = importers.import_aiconfigurator(systems=["a100_sxm"], tables=["gemm"])
    frame = tables["operators/gemm"]
    return frame[(frame["dtype"] == "bfloat16") & (frame["device"] == "a100-sxm-80gb")]


def _fit(rows, seed=0):
    device = devices.get_device("a100-sxm-80gb").device
    shapes = data.columns(rows, "m", "n", "k", "time_s")
    return fit.fit_gemm(device, *shapes, seed=seed, stages=QUICK)[0]


def _error(coefficients, rows) -> float:
    device = devices.get_device("a100-sxm-80gb").device
    m, n, k, time_s = data.columns(rows, "m", "n", "k", "time_s")
    predicted = np.exp(fit.gemm_log_time(coefficients, device, m, n, k, 2.0))
    return evaluate.errors(predicted, time_s)["mape"]


def test_a_short_fit_beats_the_published_equation_on_shapes_never_fitted(a100_rows):
    train, test = (a100_rows[a100_rows["split"] == s] for s in ("train", "test"))
    assert not set(zip(train["n"], train["k"], strict=True)) & set(
        zip(test["n"], test["k"], strict=True)
    )
    m, n, k, time_s = data.columns(train, "m", "n", "k", "time_s")
    published = fit.fit_published_gemm(m, n, k, time_s)
    m, n, k, time_s = data.columns(test, "m", "n", "k", "time_s")
    other = evaluate.errors(evaluate._published_gemm(published, m, n, k, 2.0), time_s)["mape"]
    refined = _error(_fit(train), test)
    assert refined < 0.8 * other
    assert refined < 12.0


def test_the_same_seed_gives_the_same_fit(a100_rows):
    rows = a100_rows[a100_rows["split"] == "train"].iloc[:500]
    first, second = _fit(rows), _fit(rows)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_the_published_fit_recovers_known_coefficients():
    rng = np.random.default_rng(0)
    m, n, k = (np.exp(rng.uniform(3, 9, 4000)).round() for _ in range(3))
    truth = rng.uniform(0.5, 1.5, (5, 11)) * np.array(
        [1e-22, 1e-19, 1e-14, 1e-15, 1e-9, 1e-8, 1e-12, 1e-12, 1e-7, 1e-6, 1e-6]
    )
    y = evaluate._published_gemm(truth, m, n, k, 2.0)
    fitted = fit.fit_published_gemm(m, n, k, y)
    regime = gemm.published_regime(m, n, k)
    for index in np.unique(regime):
        here = regime == index
        got = evaluate._published_gemm(fitted, m[here], n[here], k[here], 2.0)
        np.testing.assert_allclose(got, y[here], rtol=1e-6)


def test_power_is_fitted_on_sound_rows_only():
    device = devices.get_device("h200-sxm-141gb").device
    rng = np.random.default_rng(0)
    m, n, k = (np.exp(rng.uniform(4, 10, 2000)).round().astype(np.float32) for _ in range(3))
    time_s = np.float32(2 * m * n * k / 7e14 + 3e-6)
    truth = {name: np.float32(v) for name, v in fit.power.default_coefficients().items()}
    truth["log_flops_share"] = np.float32(0.2)
    watts = np.exp(fit.gemm_log_power(truth, device, m, n, k, time_s, 2.0))
    biased = np.where(time_s < fit.SOUND_POWER_S, 0.4 * watts, watts).astype(np.float32)
    fitted, _ = fit.fit_power(device, m, n, k, time_s, biased)
    sound = time_s >= fit.SOUND_POWER_S
    assert sound.sum() > 50
    again = np.exp(fit.gemm_log_power(fitted, device, m, n, k, time_s, 2.0))
    np.testing.assert_allclose(again[sound], watts[sound], rtol=0.02)


def test_errors_are_the_textbook_ones():
    got = evaluate.errors(np.array([1.1, 1.9, 4.0]), np.array([1.0, 2.0, 4.0]))
    r2 = pytest.approx(1 - 0.02 / (14 / 3), abs=1e-5)
    assert got == {"n": 3, "mape": 5.0, "mdape": 5.0, "r2": r2}


def _write(folder, frame):
    (folder / "operators").mkdir(parents=True)
    frame.to_parquet(folder / "operators" / "gemm.parquet")


def test_bad_tables_are_refused(tmp_path, a100_rows):
    good = a100_rows.iloc[:20]
    for index, (frame, said) in enumerate(
        [
            (good.drop(columns="k"), "lacks the columns k"),
            (good.assign(time_s=-1.0), "positive seconds; 20 rows"),
            (good.assign(m=-good["m"]), "m must be positive; 20 rows"),
            (good.assign(k=1e30), "k must be at most 1e\\+12; 20 rows"),
            (good.assign(time_s=np.nan), "positive seconds"),
            (good.assign(time_s="fast"), "positive seconds"),
        ]
    ):
        folder = tmp_path / str(index)
        _write(folder, frame)
        with pytest.raises(ValueError, match=said):
            data.read_table(folder, "operators/gemm")
    (tmp_path / "text" / "operators").mkdir(parents=True)
    (tmp_path / "text" / "operators" / "gemm.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match="cannot be read"):
        data.read_table(tmp_path / "text", "operators/gemm")
    with pytest.raises(ValueError, match="no table"):
        data.read_table(tmp_path, "operators/gemm")


def test_what_is_not_in_the_tables_is_named(tmp_path, a100_rows):
    _write(tmp_path, a100_rows.iloc[:20])
    with pytest.raises(ValueError, match="a100-sxm-80gb vllm-0.14.0 bfloat16"):
        data.gemm_rows(tmp_path, "h100-sxm-80gb", "vllm-0.24.0", "bf16")
    with pytest.raises(ValueError, match="There are: a100-sxm-80gb"):
        recipes.fittable(tmp_path, "h100-sxm-80gb")


def test_the_command_evaluates_the_shipped_fit_on_imported_rows(tmp_path, a100_rows):
    from click.testing import CliRunner

    from hymell_jax.cli import main

    _write(tmp_path, a100_rows)
    for form, limit in (("refined", 7.0), ("published", 15.0)):
        result = CliRunner().invoke(
            main,
            ["evaluate", "--device", "a100-sxm-80gb", "--data", str(tmp_path), "--form", form,
             "--json"],
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        rows = conforming("evaluate", result.stdout)
        whole = next(r for r in rows if r["regime"] == "all")
        assert whole["n"] == sum(r["n"] for r in rows) - whole["n"]
        assert 0 < whole["mape"] < limit
        assert set(rows[0]) == set(evaluate.ROW_FIELDS)


def _evaluate(*arguments):
    from click.testing import CliRunner

    from hymell_jax.cli import main

    return CliRunner().invoke(main, ["evaluate", *arguments])


def test_a_checkpoint_that_the_tables_do_not_hold_is_left_out_and_named(tmp_path):
    device = "h200-sxm-141gb"
    tables = importers.import_aiconfigurator(systems=["h200_sxm"], tables=["gemm"])
    importers.write_tables(tables, tmp_path)
    result = _evaluate("--device", device, "--data", str(tmp_path), "--level", "1", "--json")
    assert result.exit_code == 0, result.output
    found = {row["runtime"] for row in conforming("evaluate", result.stdout)}
    shipped = {runtime for name, runtime, _ in checkpoint.available() if name == device}
    assert found and found < shipped
    for runtime in shipped - found:
        assert f"Left out: No gemm rows for {device}, {runtime}" in result.stderr
    kept = pd.read_parquet(tmp_path / "operators" / "gemm.parquet").assign(runtime="vllm-0.0.1")
    _write(tmp_path / "none", kept)
    message = _evaluate("--device", device, "--data", str(tmp_path / "none"), "--level", "1")
    assert message.exit_code == 2
    assert "vllm-0.0.1" in message.stderr and "Left out" not in message.stderr


def test_the_published_form_is_of_level_1(tmp_path, a100_rows):
    _write(tmp_path, a100_rows.iloc[:20])
    where = ("--device", "a100-sxm-80gb", "--data", str(tmp_path), "--form", "published")
    for level in ("2", "3"):
        result = _evaluate(*where, "--level", level)
        assert result.exit_code == 2 and f"--level {level}" in result.stderr


def test_a_small_fit_runs_from_tables_to_checkpoint(tmp_path, a100_rows, monkeypatch):
    tables = importers.import_aiconfigurator(
        systems=["a100_sxm"],
        tables=["gemm", "attention_prefill", "attention_decode", "collectives"],
    )
    importers.write_tables(tables, tmp_path / "data")
    monkeypatch.setattr(fit, "GEMM_STAGES", QUICK)
    operators = checkpoint.shipped_folder() / "operators"
    (tmp_path / "out" / "operators").mkdir(parents=True)
    for file in operators.glob("*.json"):
        (tmp_path / "out" / "operators" / file.name).write_bytes(file.read_bytes())
    shipped = checkpoint.read("a100-sxm-80gb", "vllm-0.14.0", "bf16")
    monkeypatch.setattr(
        recipes, "_power", lambda content, *_: content.update(energy="transferred")
        or content["coefficients"].update(power=shipped["coefficients"]["power"]),
    )  # fmt: skip
    content = recipes.fit_level1(
        "a100-sxm-80gb", "vllm-0.14.0", "bf16", tmp_path / "data", tmp_path / "out", seeds=(0,)
    )
    checkpoint.save(content, tmp_path / "out")
    again = checkpoint.read("a100-sxm-80gb", "vllm-0.14.0", "bf16", tmp_path / "out")
    assert again["sources"][0]["rows_train"] == (a100_rows["split"] == "train").sum()
    assert again["origins"]["attention"] == "a100-sxm-80gb, vllm-0.14.0"
    assert again["origins"]["collectives"] == "a100-sxm-80gb, vllm-0.14.0, vLLM_custom_graph"
    sizes = np.float32([1e4, 1e6, 1e8]), np.float32([2, 4, 8])
    fitted, kept = (
        collectives.all_reduce_time_s(
            c["coefficients"]["collectives"], devices.get_device("a100-sxm-80gb").device, *sizes
        )
        for c in (again, shipped)
    )
    np.testing.assert_allclose(fitted, kept, rtol=0.2)
