"""Every experiment runs from its command, on a small real subset."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hymell_jax import checkpoint, experiment, importers, unseen

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def test_tables_show_nothing_as_a_dash():
    rows = experiment.values([{"a": 1, "b": 2.345}, {"b": float("nan")}], ("a", "b"))
    assert experiment.markdown(("a", "b"), rows, digits=2) == [
        "| a | b |", "|---|---|", "| 1 | 2.35 |", "| - | - |",
    ]  # fmt: skip
    assert experiment.aligned(("a", "name"), [[1, 2.345]]) == ["a  name ", "1  2.345"]


def test_results_are_written_whole_and_finite(tmp_path):
    experiment.write_results(tmp_path / "new", {"x": np.float32(0.5)}, ["# Title", ""])
    assert json.loads((tmp_path / "new" / "results.json").read_text()) == {"x": 0.5}
    assert (tmp_path / "new" / "README.md").read_text() == "# Title\n"
    with pytest.raises(ValueError):
        experiment.write_results(tmp_path / "new", {"x": float("nan")})
    assert json.loads((tmp_path / "new" / "results.json").read_text()) == {"x": 0.5}


def test_a_figure_has_as_many_panels_as_asked_for(tmp_path):
    with experiment.figure(tmp_path / "a.png", (2, 1.5), 4, 3) as (figure, axes):
        assert len(axes) == len(figure.axes) == 4
        assert tuple(figure.get_size_inches()) == (6, 3)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_of_an_experiment(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"rows": 3}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run.py", "--data", str(tmp_path), "--seeds", "2"])
    given = experiment.command(
        "Help.\nMore.", tmp_path, reads_data=True, seeds=dict(type=int, default=1)
    )
    assert (given.config, given.seeds, given.data) == ({"rows": 3}, 2, tmp_path)
    assert given.out == Path("results") / tmp_path.name  # never over the committed ones
    assert given.out.is_dir()
    monkeypatch.setattr("sys.argv", ["run.py", "--out", str(tmp_path)])
    assert experiment.command("Help.", tmp_path).out == tmp_path
    monkeypatch.setattr("sys.argv", ["run.py"])
    monkeypatch.delenv("HYMELL_DATA", raising=False)
    with pytest.raises(ValueError, match="--data"):
        experiment.command("Help.", tmp_path, reads_data=True)


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


def systems_folder(folder: Path) -> Path:
    """Whole runs of three models on two GPUs, at times that such GPUs could have, made up."""
    found = []
    for device, rate, peak in (("h100-sxm-80gb", 3.35e12, 989e12), ("gh200-96gb", 4.0e12, 989e12)):
        for model, weights in (("Qwen/Qwen1.5-7B", 15.4e9), ("BAAI/Aquila-7B", 14.6e9),
                               ("huggyllama/llama-7b", 13.5e9)):  # fmt: skip
            for batch in (1, 16):
                for length in (128, 256, 512, 1024):
                    step_s = 1.4 * (weights + 0.5e6 * batch * 1.5 * length) / rate + 1e-3
                    time_s = length * step_s + 2.0 * weights * batch * length / peak
                    found.append((device, model, batch, length, time_s, 380.0 + 5.0 * batch))
    columns = ["device", "model", "batch", "input_len", "time_s", "power_w"]
    frame = pd.DataFrame(found, columns=columns).assign(
        runtime="vLLM", num_gpus=1, power_scope="one GPU", split="train"
    )
    frame = frame.assign(output_len=frame["input_len"], energy_j=frame["time_s"] * frame["power_w"])
    (folder / "systems").mkdir(parents=True)
    frame.to_parquet(folder / "systems" / "argonne_power.parquet")
    return folder


@pytest.fixture
def short_fits(monkeypatch):
    """Fits of level 3 with few steps."""
    from hymell_jax import system_fit

    monkeypatch.setattr(system_fit, "STEPS", 60)
    monkeypatch.setattr(system_fit, "NETWORK_STEPS", 10)


def test_method_comparison_puts_every_method_beside_ours(tmp_path, capsys, short_fits):
    pytest.importorskip("xgboost")
    module = runpy.run_path(str(EXPERIMENTS / "method_comparison" / "run.py"))
    config = {"engines": ["vllm-2024"], "seeds": [0]}
    found = module["main"](config, systems_folder(tmp_path / "data"), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == found
    assert (tmp_path / "out" / "errors.png").stat().st_size > 5000
    cells = {(c["device"], c["target"]): c for c in found["cells"]}
    assert set(cells) == {(d, t) for d in ("h100-sxm-80gb", "gh200-96gb")
                          for t in ("time", "energy")}  # fmt: skip
    for (_, target), cell in cells.items():
        assert (cell["n"], cell["models"]) == (24, 3)
        expected = module["TIME"] if target == "time" else module["ENERGY"]
        assert set(expected) | {"level 1", "level 3"} <= set(cell["methods"])
        assert cell["best_other"] not in module["OURS"]
    time = cells["gh200-96gb", "time"]["methods"]
    assert time["roofline"]["mape"] < time["roofline, plain"]["mape"]
    assert time["level 3"]["mape"] < time["roofline, plain"]["mape"]
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "## Verdict" in readme and "least error in" in capsys.readouterr().out


def test_unseen_gpu_never_uses_the_gpu_that_it_predicts(tmp_path, capsys, short_fits):
    pytest.importorskip("xgboost")
    folder = systems_folder(tmp_path / "data")
    systems = ["h100_sxm", "a100_sxm"]
    tables = importers.import_aiconfigurator(systems=systems, tables=["gemm"])
    importers.write_tables(tables, folder)
    module = runpy.run_path(str(EXPERIMENTS / "unseen_gpu" / "run.py"))
    with unseen.without("h100-sxm-80gb") as place:
        names = {name for name, _, _ in checkpoint.available(place)}
        assert "h100-sxm-80gb" not in names and "h200-sxm-141gb" in names
    config = {"engines": ["vllm-2024"], "rows_each": 100}
    found = module["main"](config, folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == found
    assert (tmp_path / "out" / "errors.png").stat().st_size > 5000
    gemm = {r["device"]: r for r in found["kernels"]}
    assert gemm["h100-sxm-80gb"]["from"] == "h200-sxm-141gb"
    errors = gemm["h100-sxm-80gb"]["methods"]
    assert errors["measured there"]["mdape"] < errors["ours"]["mdape"]
    assert errors["ours"]["mdape"] < errors["roofline"]["mdape"]
    whole = {r["target"]: r for r in found["systems"] if r["device"] == "all"}
    assert set(whole) == {"time", "power", "energy"} and whole["time"]["n"] == 48
    assert whole["time"]["methods"]["ours"]["gpu_tau"] == 1.0  # gh200 is faster on every row
    assert "ours" in capsys.readouterr().out


def test_sequence_length_finds_the_optimum_that_sweetspot_describes(tmp_path):
    module = runpy.run_path(str(EXPERIMENTS / "sequence_length" / "run.py"))
    config = {
        "device": "h100-sxm-80gb", "models": ["llama-3.1-8b"], "batch": 8,
        "lengths": [64, 256, 1024, 4096], "points": 25,
    }  # fmt: skip
    found = module["main"](config, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == found
    assert (tmp_path / "energy.png").stat().st_size > 5000
    (model,) = found["models"]
    assert (model["dearest"]["prompt"], model["dearest"]["output"]) == (4096, 64)
    assert model["cheapest"]["prompt"] == 64
    assert model["sweetspot"]["in_sample_mape"] < 5.0
    outputs = [o["output"] for o in model["optimum"]]
    assert outputs == sorted(outputs)  # a longer prompt wants a longer answer
    for row in model["optimum"]:
        if row["interior"]:
            assert 0.5 < row["output"] / row["sweetspot_output"] < 2.0
    shares = np.array(model["share_of_energy"])
    np.testing.assert_allclose(shares.sum(0), 1.0, rtol=1e-3)
