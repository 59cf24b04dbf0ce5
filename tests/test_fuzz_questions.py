"""Sweeps, spaces and options of search: a checked question, or one sentence."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from fuzzing import answered, cases, clear, damaged, edited, edits, seeds
from hypothesis import given
from hypothesis import strategies as st

import hymell_jax as hj
from hymell_jax import checkpoint, designs, optimise, space, types
from hymell_jax.cli import main
from hymell_jax.sweep import read_sweep, sweep_rows

SPEC = {
    "device": "h100-sxm-80gb", "runtime": "vllm-0.24.0", "dtype": "bf16", "base": "llama-3.1-8b",
    "workload": {"prompt_tokens": 512, "output_tokens": 64, "dtype": "bf16"}, "design": "random",
    "fields": {
        "d_model": {"low": 1024, "high": 8192, "multiple": 128},
        "n_layers": {"low": 8, "high": 80, "log": False}, "batch_size": [1, 8, 64],
        "d_ff": {"values": [8192, 14336]}, "kv_bytes": {"low": 1, "high": 2, "multiple": 0},
    },
    "rows": 2000, "seed": 3, "tie": None, "quantities": ["latency_s"],
    "pareto": ["energy_per_token_j", "latency_s"], "part_rows": 1024,
}  # fmt: skip
GRID = {key: value for key, value in SPEC.items() if key != "rows"} | {
    "design": "grid",
    "fields": {"d_model": {"low": 1024, "high": 8192, "steps": 3}, "n_heads": [16, 32]},
}
FIELDS = {"d_model": 4096, "n_layers": 32, "n_heads": 32, "d_ff": 14336, "vocab_size": 1000}
SPEC_PATHS = [
    *SPEC, "other", "base.d_model", *(f"base.{name}" for name in FIELDS),
    *(f"workload.{name}" for name in ("batch_size", "dtype", "kv_dtype", "tensor_parallel", "x")),
    *(f"fields.{name}" for name in (*types.ARCHITECTURE_FIELDS, *designs.WORKLOAD_RANGES)),
    *(f"fields.{name}.{key}" for name in ("d_model", "n_layers", "d_ff", "kv_bytes")
      for key in ("low", "high", "multiple", "log", "steps", "values")),
]  # fmt: skip


@pytest.fixture(scope="module")
def loaded():
    """Loads of checkpoints, each sound one read once."""
    plain, kept = checkpoint.load, {}

    def load(*arguments, **options):
        key = json.dumps([arguments, options], default=repr)
        if key not in kept:
            kept[key] = plain(*arguments, **options)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "load", load)
        yield


@cases(900)
@given(st.sampled_from([SPEC, GRID, SPEC | {"base": FIELDS}]), edits(SPEC_PATHS, 2))
def test_sweeps_have_legal_rows_or_are_refused(loaded, base, changes):
    sweep = answered(lambda: read_sweep(edited(base, changes)))
    if sweep is None:
        return
    rows = sweep.design.rows
    assert 1 <= rows <= designs.MAX_ROWS and sweep.parts >= 1
    start = max(0, rows - 5)
    columns, archs, works = sweep_rows(sweep, start, rows)
    for name, column in columns.items():
        least, greatest = designs.range_of(name)
        assert column.shape == (rows - start,)
        assert ((column >= least * 0.999) & (column <= greatest * 1.001)).all(), name
    for leaf in (*vars(archs).values(), *vars(works).values()):
        assert leaf.shape == (rows - start,) and np.isfinite(leaf).all()


@cases(300)
@given(seeds)
def test_damaged_sweeps_are_legal_or_refused(loaded, tmp_path_factory, seed):
    path = tmp_path_factory.getbasetemp() / "sweep.json"
    path.write_bytes(damaged(json.dumps(SPEC).encode(), seed))
    answered(lambda: read_sweep(path))


SPACE = {
    "base": FIELDS,
    "free": {
        "d_model": {"range": [2048, 8192], "multiple": 128}, "n_layers": {},
        "n_kv_heads": {"values": [1, 2, 4, 8]}, "d_ff": {"range": [8192, 16384]},
    },
    "tie": "n_heads",
}  # fmt: skip
SPACE_PATHS = [
    *SPACE, "other", "free.heads", "free.x", *(f"base.{name}" for name in FIELDS), "base.extra",
    *(f"free.{name}" for name in SPACE["free"]),
    *(f"free.{name}.{key}" for name in ("d_model", "n_layers", "n_kv_heads", "d_ff", "n_heads")
      for key in ("range", "multiple", "values", "other")),
]  # fmt: skip


def ladders(found: space.Space) -> None:
    for variable in found.variables:
        values = np.asarray(variable.values)
        _, _, greatest = types.ARCHITECTURE_FIELDS[variable.name]
        assert (values >= 1).all() and (values <= greatest).all() and (values % 1 == 0).all()
        assert (np.diff(values) > 0).all() and len(values) <= 4096


@cases(700)
@given(edits(SPACE_PATHS, 2))
def test_spaces_have_whole_ladders_or_are_refused(changes):
    content = edited(SPACE, changes)
    work = hj.workload()

    def build():
        base = content.get("base")
        if not isinstance(base, dict):
            raise ValueError("The base is left out here.")
        return space.space_from_json(content, space.base_from_fields(base), work)

    found = answered(build)
    if found is not None:
        ladders(found)


TEXTS = [
    "latency_s=0.1", "latency_s", "=", "", "=1", "latency_s=nan", "latency_s=-1", "latency_s=1e400",
    "latency_s=1,parameters=2e9", "speed=1", "latency_s=0x1", "é=1", "a" * 3000, "latency_s=1=2",
    "parameters=8e9", "loss=2", "domain_distance=0", "latency_s=\x1b",
]  # fmt: skip
RANGES = [
    "d_model=1024:8192", "d_model=8192:1024", "d_model", "d_model=1", "d_model=a:b", "x=1:2",
    "d_model=nan:nan", "layers=8:8", "n_layers=-1:2", "heads=1:1e9", "d_ff=1:1e8",
]  # fmt: skip
STEPS = ["d_model=128", "d_model=0", "d_ff=1.5", "d_model=-2", "d_model=nan", "d_ff=1e12", "x=1"]
WORKS = ["batch=8", "batch=0", "prompt=nan", "dtype=int3", "dtype=fp8", "kv_dtype=", "x=1",
         "batch", "tensor_parallel=3", "tensor_parallel=2.5", "output=1e300",
         "context_tokens=5"]  # fmt: skip
NAMES = ["d_model", "heads", "n_kv_heads", "head_dim", "vocab_size", "n_experts", "x", "", "é"]
OPTIONS = {
    "--at-most": TEXTS, "--at-least": TEXTS, "--equal": TEXTS, "--range": RANGES,
    "--multiple": STEPS, "--workload": WORKS, "--free": NAMES, "--fix": NAMES,
    "--minimise": ["energy", "latency", "speed", "", "loss", "a" * 3000],
    "--tolerance": ["0.01", "0", "-1", "nan", "2"], "--dtype": ["bf16", "fp8", "x"],
    "--starts": ["4", "0", "-1", "1000000000"], "--seed": ["0", "-1", "x"],
    "--runtime": ["vllm-0.24.0", "x"],
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """Questions that reached the optimiser, which itself is left out."""
    seen = []

    def solve(question, x0, *rest, **options):
        seen.append((question, x0))
        raise RuntimeError("solved")

    monkeypatch.setattr(optimise, "solve", solve)
    monkeypatch.setattr(optimise, "_domain_of_start", lambda question: question)
    return seen


@cases(400)
@given(
    st.sampled_from(["llama-3.1-8b", "llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "x", ""]),
    st.sampled_from(["h100-sxm-80gb"] * 5 + ["h100", "x" * 400]),
    st.lists(
        st.sampled_from(sorted(OPTIONS)).flatmap(
            lambda name: st.tuples(st.just(name), st.sampled_from(OPTIONS[name]))
        ),
        max_size=3,
    ),
)
def test_options_of_search_make_a_question_or_one_sentence(loaded, asked, model, device, options):
    asked.clear()
    texts = [part for option in options for part in option]
    result = CliRunner().invoke(main, ["search", model, "--device", device, "--json", *texts])
    if asked:
        assert isinstance(result.exception, RuntimeError)
        question, x0 = asked[-1]
        ladders(question.space)
        assert np.isfinite(x0).all() and ((x0 >= 0) & (x0 <= 1)).all()
        assert all(np.isfinite(c.limit) for c in question.constraints)
        return
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert isinstance(result.exception, SystemExit) and result.stderr.count("Error:") == 1
    clear(" ".join(result.stderr.partition("Error:")[2].split()) + ".")
