"""Sweeps: designs, files that survive a kill, memory that does not grow."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from json_outputs import check

import hymell_jax as hj
from hymell_jax.cli import main
from hymell_jax.designs import design_rows, make_design
from hymell_jax.frames import predict_table
from hymell_jax.sweep import EXAMPLE, read_sweep, run_sweep, sweep_rows

pq = pytest.importorskip("pyarrow.parquet")

ROOT = Path(__file__).parent.parent
FIELDS = {
    "d_model": {"low": 1024, "high": 8192, "multiple": 128},
    "n_layers": {"low": 8, "high": 80},
    "batch_size": {"low": 1, "high": 64},
}
SPEC = {
    "device": "h100-sxm-80gb", "base": "llama-3.1-8b", "design": "latin_hypercube",
    "workload": {"prompt_tokens": 512, "output_tokens": 64}, "fields": FIELDS, "rows": 5000,
    "seed": 3, "part_rows": 1024,
}  # fmt: skip


def test_a_latin_hypercube_fills_every_stratum_once():
    entry = {"low": 1, "high": 2, "log": False, "multiple": 0}
    fields = {"kv_bytes": entry, "n_heads": {"low": 1, "high": 64}}
    for rows in (1, 2, 1000, 4097):
        design = make_design("latin_hypercube", fields, rows, 5)
        values = design_rows(design, 0, rows)["kv_bytes"]
        strata = np.floor((values - 1) * rows).astype(int)
        assert sorted(strata) == list(range(rows))


def test_columns_of_random_designs_are_uniform_and_independent():
    entry = {"low": 1, "high": 2, "log": False, "multiple": 0}
    for kind in ("random", "latin_hypercube"):
        design = make_design(kind, {"kv_bytes": entry, "batch_size": entry}, 20000, 1)
        a, b = (design_rows(design, 0, 20000)[n] - 1 for n in ("kv_bytes", "batch_size"))
        assert abs(a.mean() - 0.5) < 0.01  # five standard errors
        assert abs(a.std() - 12**-0.5) < 0.01
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.035
        assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.035


@pytest.mark.parametrize("kind", ["grid", "random", "latin_hypercube"])
def test_any_row_stands_alone(kind):
    fields = {name: entry | ({"steps": 9} if kind == "grid" else {}) for name, entry in
              FIELDS.items()}  # fmt: skip
    design = make_design(kind, fields, None if kind == "grid" else 700)
    whole = design_rows(design, 0, design.rows)
    piece = design_rows(design, 300, 333)
    for name, values in piece.items():
        np.testing.assert_array_equal(values, whole[name][300:333])
        assert (values % FIELDS[name].get("multiple", 1) == 0).all()
        assert values.min() >= FIELDS[name]["low"]
        assert values.max() <= FIELDS[name]["high"]


def test_a_grid_holds_every_combination_once():
    design = make_design("grid", {"n_layers": [2, 4, 8], "d_ff": [100, 200]})
    columns = design_rows(design, 0, design.rows)
    pairs = set(zip(columns["n_layers"], columns["d_ff"], strict=True))
    assert pairs == {(n, d) for n in (2, 4, 8) for d in (100, 200)}
    assert design.rows == 6


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sweep") / "whole.parquet"
    done = []
    content = run_sweep(SPEC, out, lambda what, now, total: done.append((what, now, total)))
    check("sweep", content)
    assert content["rows"] == content["computed"] == 5000
    assert done[-1] == ("rows", 5000, 5000)
    assert sorted(p.name for p in out.parent.iterdir()) == [
        "whole.front.parquet", "whole.parquet", "whole.png",
    ]  # fmt: skip
    return out


def test_rows_are_what_predict_says(swept, h100, llama):
    table = pq.read_table(swept).to_pylist()
    assert [row["row"] for row in table] == list(range(5000))
    sweep = read_sweep(SPEC)
    for i in (0, 1023, 1024, 4999):
        row = table[i]
        fields = {f: getattr(llama, f) for f in llama.__dataclass_fields__}
        fields |= {n: row[n] for n in ("d_model", "n_layers")}
        work = hj.workload(batch_size=row["batch_size"], prompt_tokens=512, output_tokens=64)
        p = hj.predict(h100, hj.architecture(**fields), work)
        assert row["latency_s"] == pytest.approx(float(p.total_time_s), rel=2e-5)
        assert row["latency_per_token_s"] == pytest.approx(float(p.decode.time_s), rel=2e-5)
        assert row["memory_share"] == pytest.approx(
            float(p.memory.total_bytes / p.memory.capacity_bytes), rel=2e-5
        )
    assert sweep_rows(sweep, 0, 10)[0]["d_model"].shape == (10,)


def test_the_front_is_not_beaten(swept):
    rows = pq.read_table(swept)
    front = pq.read_table(swept.with_suffix(".front.parquet"))
    names = ("energy_per_token_j", "latency_per_token_s")
    usable = rows["legal"].to_numpy() & (rows["memory_share"].to_numpy() <= 1)
    costs = np.stack([rows[n].to_numpy() for n in names], 1)[usable]
    for a, b in zip(*(front[n].to_numpy() for n in names), strict=True):
        assert not ((costs <= [a, b]).all(1) & (costs < [a, b]).any(1)).any()
    assert len(front) >= 1


def test_a_finished_sweep_is_not_computed_again(swept):
    before = swept.read_bytes()
    assert run_sweep(SPEC, swept)["computed"] == 0
    assert swept.read_bytes() == before
    with pytest.raises(ValueError, match="another sweep"):
        run_sweep(SPEC | {"seed": 4}, swept)


def _start(out: Path, spec: Path, cache: Path) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HYMELL_COMPILE_CACHE": str(cache)}
    command = [sys.executable, "-m", "hymell_jax.cli", "sweep", str(spec), "--out", str(out)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


def test_a_killed_sweep_goes_on_to_the_same_file(swept, tmp_path):
    spec, out, cache = tmp_path / "spec.json", tmp_path / "killed.parquet", tmp_path / "cache"
    spec.write_text(json.dumps(SPEC))
    kills = int(os.environ.get("HYMELL_TEST_KILLS", "2"))
    parts = out.with_name(out.name + ".parts")
    generator = random.Random(0)
    for number in range(kills):
        running = _start(out, spec, cache)
        deadline = time.monotonic() + 120
        wanted = generator.randrange(1, 5)  # dies around this many parts, at any moment
        while running.poll() is None and time.monotonic() < deadline:
            if len(list(parts.glob("part-*.parquet"))) >= min(wanted, number + 1):
                time.sleep(generator.uniform(0, 0.05))
                break
            time.sleep(0.005)
        running.send_signal(signal.SIGKILL)
        running.wait()
    assert _start(out, spec, cache).wait(timeout=300) == 0
    assert out.read_bytes() == swept.read_bytes()
    fronts = (p.with_suffix(".front.parquet").read_bytes() for p in (out, swept))
    assert len(set(fronts)) == 1
    assert not parts.exists()


def test_parts_of_another_sweep_are_refused(tmp_path):
    out = tmp_path / "x.parquet"
    parts = tmp_path / "x.parquet.parts"
    parts.mkdir()
    (parts / "sweep.json").write_text('{"sweep": "other"}')
    with pytest.raises(ValueError, match="another sweep"):
        run_sweep(SPEC, out)


def test_heads_that_do_not_divide_are_marked(tmp_path):
    spec = {
        "device": "h100-sxm-80gb", "base": "llama-3.1-8b", "design": "grid", "tie": "head_dim",
        "fields": {"n_heads": [16, 24, 32, 64]}, "quantities": ["prefill_energy_j"],
        "part_rows": 1024,
    }  # fmt: skip
    run_sweep(spec, tmp_path / "heads.parquet")
    table = pq.read_table(tmp_path / "heads.parquet")
    assert table["legal"].to_pylist() == [True, False, True, True]  # 4096 / 24 is not whole


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"design": "sobol"}, "design must be"),
        ({"rows": 0}, "rows"),
        ({"fields": {"d_modle": [1]}}, "d_model"),
        ({"fields": {"d_model": {"low": 8, "high": 4}}}, "nothing between"),
        ({"fields": {"d_model": [-1]}}, "d_model"),
        ({"fields": {"d_model": {"low": 8, "high": 64, "steps": 3}}}, "for grids"),
        ({"fields": {}}, "needs `fields`"),
        ({"base": None, "rows": None, "fields": None}, "A sweep needs base, fields, rows: {"),
        ({"quantities": ["speed"]}, "no quantity"),
        ({"pareto": ["latency_s"]}, "two quantities"),
        ({"part_rows": 10}, "part_rows"),
        ({"fold": 1}, "fold"),
        ({"device": "h100"}, "h100-sxm-80gb"),
    ],
)
def test_bad_sweeps_are_refused_before_anything_is_written(tmp_path, change, said):
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(SPEC | change))
    out = tmp_path / "x.parquet"
    result = CliRunner().invoke(main, ["sweep", str(path), "--out", str(out)])
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())
    assert result.stderr.startswith("Error: ")
    assert [p.name for p in tmp_path.iterdir()] == ["spec.json"]


def test_the_least_sweep_of_the_message_is_one_and_nothing_is_promised_of_a_finished_one(swept):
    assert read_sweep(json.loads(EXAMPLE)).design.rows == 2
    assert hj.run_sweep is run_sweep
    spec = swept.with_name("again.json")
    spec.write_text(json.dumps(SPEC))
    result = CliRunner().invoke(main, ["sweep", str(spec), "--out", str(swept)])
    spec.unlink()
    assert result.exit_code == 0, result.output
    assert "nothing was computed" in result.stdout and "rows/s" not in result.stdout


def test_pyarrow_is_asked_for_where_it_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="extra `data`"):
        run_sweep(SPEC, tmp_path / "x.parquet")


def test_results_need_a_folder_and_a_parquet_name(tmp_path):
    with pytest.raises(ValueError, match="ends in .parquet"):
        run_sweep(SPEC, tmp_path / "x.csv")
    with pytest.raises(ValueError, match="no folder"):
        run_sweep(SPEC, tmp_path / "missing" / "x.parquet")


def test_tables_are_predicted_row_by_row(tmp_path, h100, llama):
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(
        {"name": ["a", "b"], "d_ff": [8192, 14336], "prompt_tokens": [100, 1000]}, index=[7, 9]
    )
    frame.to_parquet(tmp_path / "t.parquet")
    work = hj.workload(output_tokens=10)
    for table in (frame, tmp_path / "t.parquet"):
        found = predict_table(h100, table, llama, work)
        assert list(found["name"]) == ["a", "b"]
        exact = hj.predict(h100, llama, hj.workload(prompt_tokens=1000, output_tokens=10))
        assert found["latency_s"].iloc[1] == pytest.approx(float(exact.total_time_s), rel=2e-5)
    for bad, said in (
        (frame.assign(d_ff=-1), "between"),
        (frame.assign(d_ff="x"), "numbers"),
        (frame[["name"]], "needs rows"),
        (frame.assign(latency_s=1.0), "already"),
        (tmp_path / "missing.csv", "cannot be read"),
    ):
        with pytest.raises(ValueError, match=said):
            predict_table(h100, bad, llama, work)


def test_a_row_beyond_float32_is_named_and_nothing_is_written(tmp_path):
    fields = {
        "n_layers": {"values": [32, 1e5]}, "d_model": {"values": [4096, 1e7]},
        "d_ff": {"values": [14336, 1e8]}, "batch_size": {"values": [1, 1e7]},
        "prompt_tokens": {"values": [512, 1e8]},
    }  # fmt: skip
    spec = {"device": "h100-sxm-80gb", "base": "llama-3.1-8b", "design": "grid", "fields": fields}
    said = r"Row \d+: \w+ is beyond float32 at n_layers .*reduce"
    with pytest.raises(ValueError, match=said):
        run_sweep(spec, tmp_path / "a.parquet")
    assert not list(tmp_path.rglob("*.parquet"))
