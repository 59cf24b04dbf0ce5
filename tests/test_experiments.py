"""Every experiment runs from its command, on a small real subset."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from hymell_jax import importers

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def test_operator_accuracy_prints_its_table_and_writes_results_and_plots(tmp_path, capsys):
    tables = importers.import_aiconfigurator(systems=["a100_sxm"], tables=["gemm"])
    importers.write_tables(tables, tmp_path / "data")
    module = runpy.run_path(str(EXPERIMENTS / "operator_accuracy" / "run.py"))
    config = {"split": "test", "devices": ["a100-sxm-80gb"]}
    rows = module["main"](config, tmp_path / "data", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == rows
    assert (tmp_path / "out" / "gemm_time.png").stat().st_size > 5000
    whole = next(r for r in rows if r["regime"] == "all" and r["table"] == "gemm")
    assert whole["mape"] < 0.7 * whole["published_form_mape"]
    assert f"{whole['mape']}" in capsys.readouterr().out


def test_committed_results_are_those_of_the_shipped_fits():
    rows = json.loads((EXPERIMENTS / "operator_accuracy" / "results.json").read_text())
    devices = {r["device"] for r in rows if r["table"] == "gemm"}
    assert devices == {
        "a100-sxm-80gb", "b200-sxm-180gb", "h100-sxm-80gb", "h200-sxm-141gb", "l40s-48gb",
    }  # fmt: skip
