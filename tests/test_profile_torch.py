"""The profiler on this machine's CPU, through PyTorch and transformers, at tiny sizes."""

from __future__ import annotations

import dataclasses
import json
import sys
import types

import pandas as pd
import pytest
from click.testing import CliRunner
from json_outputs import conforming

import hymell_jax
from hymell_jax import cli, devices
from hymell_jax.hf import read_hf
from hymell_jax.profiler import bench as benches
from hymell_jax.profiler import blocks, catalogue, machine, plans, run
from hymell_jax.profiler.cases import Case

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # those libraries warn as they please

TINY = dict(
    model_type="llama", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=64, vocab_size=100, max_position_embeddings=256,
)  # fmt: skip


def small(cases) -> list[Case]:
    """The cheapest case of each table, kernel and phase."""
    best: dict = {}
    for case in sorted(cases, key=lambda c: c.flops + c.bytes_moved):
        s = case.sizes
        if s.get("d_model", 0) <= 1024 and s.get("context_len") != 1:
            best.setdefault((case.table, s.get("kernel"), s.get("phase")), case)
    return list(best.values())


@pytest.fixture(scope="module")
def profiler():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "last_cache_bytes", lambda *_: 2e5)
        plan = plans.make_plan("quick", "cpu")
        plan = dataclasses.replace(plan, sample_s=0.005, pass_s=0.005)
        yield run.Profiler(benches.Bench("cpu", [0]), plan, "test-cpu")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(catalogue.MODELS, "tiny", TINY)
    monkeypatch.setitem(catalogue.MODELS, "broken", TINY | {"model_type": "no_such_family"})
    columns = catalogue.columns("tiny")

    def make(name: str = "tiny", **sizes) -> Case:
        own = dict(model=name, family="llama", config=f"models/{name}.json", attention="sdpa")
        lengths = {"prompt_len": None, "context_len": None}
        return Case("systems/transformers", own | lengths | columns | sizes, "train", 1.0, 1.0, 1e6)

    return make


@pytest.mark.parametrize("level", [1, 2])
def test_every_kind_of_operator_and_block_runs(profiler, level):
    cases = small(c for c in profiler.plan.cases if c.level == level)
    assert len(cases) == {1: 10, 2: 10}[level]
    with torch.inference_mode():
        for case in cases:
            row = profiler.measure(case)
            assert 1e-8 < row["time_s"] < 10 and row["repeats"] >= 7, case.title()
            assert row["energy_j"] is None or row["energy_j"] > 0
            if row["launch_s"] is not None:
                assert 0 < row["launch_s"] <= row["time_s"]


def test_prepared_blocks_compute_what_their_columns_say(profiler):
    head = dict(kv_dtype="float32", batch=2, n_heads=4, n_kv_heads=2, head_dim=8, window_size=0)
    with torch.inference_mode():
        for table, length in (("prefill", "seq_len"), ("decode", "context_len")):
            for kernel in ("sdpa", "eager"):
                case = Case(
                    f"blocks/attention_{table}", {"kernel": kernel, length: 6} | head, "train",
                    1.0, 1.0, 1.0,
                )  # fmt: skip
                out, _ = profiler._prepare(case)(0)
                assert out.shape == (2, 6 if table == "prefill" else 1, 4, 8)
        gemm = Case("operators/gemm", {"m": 3, "n": 5, "k": 7}, "train", 1.0, 1.0, 1.0)
        call = profiler._prepare(gemm)
        assert call(0).shape == (3, 5) and not torch.equal(call(0), call(1))
        assert float(call(0).abs().sum()) > 0


def test_the_inputs_exceed_the_cache_and_do_not_overlap(profiler):
    sets = profiler.bench.rotate((8, 64), weights=[(64, 64)])
    size = sum(t.numel() for t in sets[0]) * 4
    assert len(sets) * size >= profiler.bench.past_bytes
    starts = sorted(w.data_ptr() for _, w in sets)
    assert all(b - a >= 64 * 64 * 4 for a, b in zip(starts, starts[1:], strict=False))
    assert all(start % 64 == starts[0] % 64 for start in starts)


def test_a_decode_step_is_that_of_the_library(profiler, tiny):
    """Same logits as a pass over the whole sequence, and every step at the same context."""
    bench = profiler.bench
    prompt = torch.arange(12).reshape(1, 12) % 100
    with torch.inference_mode():
        model = profiler.models._get(tiny().sizes["model"], "sdpa")
        whole = model(input_ids=prompt).logits[:, -1]
        name = blocks.cache_argument(model.forward)
        rewind = blocks.Rewind(model(input_ids=prompt[:, :-1], use_cache=True)[name])
        for _ in range(3):
            step = model(input_ids=prompt[:, -1:], use_cache=True, **{name: rewind()})
            assert torch.allclose(step.logits[:, -1], whole, atol=1e-4)
        call = profiler.models.prepare(tiny(phase="decode", batch=3, context_len=9))
        for index in range(3):
            kept = call(index)[name]
            assert kept.get_seq_length() == 9 and call(index).logits.shape == (3, 1, 100)
        prefill = profiler.models.prepare(tiny(phase="prefill", batch=2, prompt_len=7))(0)
        assert prefill.logits.shape == (2, 1, 100)
        assert prefill[name].get_seq_length() == 7
    assert bench.dtype == torch.float32 and float(prefill.logits.std()) > 0


def test_a_profile_from_the_command_line(tmp_path, tiny, monkeypatch):
    """Measured, resumed, memory out in the middle, a model class missing; all of it kept."""
    gemm = [c for c in plans.make_plan("quick", "cpu").cases if c.table == "operators/gemm"]
    cheap = sorted(gemm, key=lambda c: c.bytes_moved)[:5]
    huge = dataclasses.replace(cheap[0], sizes=cheap[0].sizes | {"m": 2**30}, bytes_held=1e18)
    whole = [
        tiny(phase="prefill", batch=2, prompt_len=8),
        tiny("broken", phase="decode", batch=1, context_len=4),
        tiny(phase="decode", batch=1, context_len=4),
    ]
    plan = plans.Plan(
        "quick", [*cheap[:2], huge, *cheap[2:], *whole], 0.1, (0.3, 0.3, 0.4), 0.005, 0.005
    )
    monkeypatch.setattr(plans, "make_plan", lambda *_: plan)
    monkeypatch.setattr(run.Profiler, "idle_power_w", lambda self: None)
    out = tmp_path / "profile"
    for _ in range(2):
        arguments = ["profile", "--out", str(out), "--name", "test-cpu", "--json"]
        done = CliRunner().invoke(cli.main, arguments)
        assert done.exit_code == 0, done.output
    content = conforming("profile", done.stdout)
    assert content["rows"] == {"operators/gemm": 5, "systems/transformers": 2}
    reasons = sorted(content["not_measured"].values())
    assert "MemoryError: it needs about 1000000000.0 GB" in reasons[0]
    assert "broken cannot be built" in reasons[1] and "no_such_family" in reasons[1]
    assert "No energy meter" in done.stderr or "rapl" in content["energy_source"]
    frame = pd.read_parquet(out / "systems/transformers.parquet")
    assert set(frame["phase"]) == {"prefill", "decode"} and (frame["time_s"] > 0).all()
    assert read_hf(str(out / "models/tiny.json")).architecture.n_layers == 2
    spec = devices.get_device(str(out / "device.json"))
    assert spec.name == "test-cpu" and float(spec.device.peak_flops_per_s) > 1e9
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["software"]["torch"] == torch.__version__ and len(manifest["sessions"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "give cpu, cuda"),
        (["--device", "cuda:99"], "There is no GPU 'cuda:99'"),
        (["--levels", "1,5"], "--levels takes numbers from 1 to 3"),
        (["--hours", "-1"], "Hours must be a positive number"),
        (["--out", "/proc/none"], "cannot be written"),
    ],
)
def test_bad_questions_end_in_one_sentence(tmp_path, arguments, message):
    done = CliRunner().invoke(cli.main, ["profile", "--out", str(tmp_path / "x"), *arguments])
    assert done.exit_code == 2 and message in done.output


def test_without_pytorch_the_message_names_the_extra(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(benches.importlib, "import_module", missing)
    done = CliRunner().invoke(cli.main, ["profile", "--out", str(tmp_path)])
    assert done.exit_code == 2 and "install the extra `profile`" in done.output


def test_the_fit_follows_on_the_same_folder(tmp_path, monkeypatch):
    seen = []

    def fit_profile(folder, out, progress, levels):
        seen.append((folder, out, levels))
        return [
            {"level": 1, "table": "gemm", "kernel": "", "target": "time", "n": 3, "mape": 5.12,
             "mdape": 4.0, "roofline_mape": 20.0, "times_better": 3.91, "uncorrected_mape": 5.3}
        ]  # fmt: skip

    stub = types.SimpleNamespace(fit_profile=fit_profile)
    monkeypatch.setitem(sys.modules, "hymell_jax.profile_fit", stub)
    monkeypatch.setattr(hymell_jax, "profile_fit", stub, raising=False)
    measured = {"device": "d", "runtime": "r", "dtype": "float32", "threads": 1, "rows": {},
                "outcome": {"measured": 1, "failed": 0, "left": 0}, "disturbed": 0,
                "anchors": {}, "energy_source": "none: no meter"}  # fmt: skip
    monkeypatch.setattr(run, "profile", lambda *_, **__: measured)
    arguments = ["profile", "--out", str(tmp_path), "--levels", "3,1", "--fit"]
    done = CliRunner().invoke(cli.main, arguments)
    assert done.exit_code == 0 and "5.12" in done.stdout and "3.91" in done.stdout
    assert "No level 3: whole models measured: 0" in done.stdout
    assert f"--device d --checkpoints {tmp_path / 'checkpoints'}" in done.stdout
    assert f"hymell evaluate --device d --data {tmp_path} --checkpoints" in done.stdout
    assert seen == [(str(tmp_path), str(tmp_path / "checkpoints"), (1, 3))]
    done = CliRunner().invoke(cli.main, [*arguments, "--json"])
    assert json.loads(done.stdout)["errors"][0]["n"] == 3


def test_a_busy_machine_is_told_what_was_seen_and_what_helps(tmp_path, monkeypatch):
    measured = {"device": "d", "runtime": "r", "dtype": "float32", "threads": 1,
                "rows": {"operators/gemm": 607}, "disturbed": 607,
                "disturbed_by": {"other load": 600, "spread": 9}, "other_load": 0.42,
                "outcome": {"measured": 607, "failed": 0, "left": 0, "disturbed": 607},
                "anchors": {}, "energy_source": "none: no meter"}  # fmt: skip
    monkeypatch.setattr(run, "profile", lambda *_, **__: measured)
    done = CliRunner().invoke(cli.main, ["profile", "--out", str(tmp_path)])
    assert "607 of 607 rows disturbed" in done.stdout
    assert "600: other work took more than 5 % of the processors (median of all rows 42 %)" in (
        done.stdout
    )
    assert "run the same command again" in done.stdout and "607 of them once more" in done.stdout
    assert f"hymell fit --device d --data {tmp_path} --level 3" in done.stdout
    measured["outcome"]["disturbed"] = 0  # all of them twice already
    done = CliRunner().invoke(cli.main, ["profile", "--out", str(tmp_path)])
    assert "measured twice" in done.stdout and "another --out" in done.stdout


def test_an_interrupt_says_what_is_kept(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "profile", stop)
    done = CliRunner().invoke(cli.main, ["profile", "--out", str(tmp_path)])
    assert done.exit_code == 130 and f"kept in {tmp_path}" in done.stderr
    assert "the same command goes on" in done.stderr


def test_a_plan_is_listed_without_measuring(tmp_path):
    out = tmp_path / "none"
    done = CliRunner().invoke(cli.main, ["profile", "--dry-run", "--out", str(out), "--json"])
    assert done.exit_code == 0 and not out.exists()
    tables = conforming("profile", done.stdout)["tables"]
    assert {t["table"] for t in tables} >= {"operators/gemm", "systems/transformers"}
    assert all(t["cases"] > t["test"] > 0 for t in tables)
