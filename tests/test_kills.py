"""Outputs are whole or not there at all, wherever the process dies."""

from __future__ import annotations

import ast
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

import hymell_jax as hj
from hymell_jax import checkpoint, experiment, importers, system_store

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hymell_jax"

WRITER = """
import sys
from hymell_jax.files import write_whole
contents = [letter * 3_000_000 for letter in "abcdef"]
print("ready", flush=True)
while True:
    for content in contents:
        write_whole(sys.argv[1], content)
"""


def test_a_file_is_whole_after_kills_at_any_moment(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    generator = random.Random(0)
    seen = set()
    for _ in range(6):
        command = [sys.executable, "-c", WRITER, str(path)]
        running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert running.stdout.readline() == b"ready\n"
        time.sleep(generator.uniform(0.0, 0.15))
        running.send_signal(signal.SIGKILL)
        running.communicate()
        content = path.read_text()
        assert content == "old" or (len(content) == 3_000_000 and len(set(content)) == 1)
        seen.add(content[0])
    assert len(seen) > 1  # some of them had written


class Died(BaseException):
    """Stands for a kill: nothing after it runs but `finally`."""


def _steps(write) -> int:
    """How many renames a writer makes."""
    plain, count = os.replace, 0

    def counted(*arguments):
        nonlocal count
        count += 1
        plain(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", counted)
        write()
    return count


def _dies_before(step: int, write) -> None:
    """Run a writer that dies before its rename of that number, from 0."""
    plain, done = os.replace, 0

    def dying(*arguments):
        nonlocal done
        if done == step:
            raise Died
        done += 1
        plain(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(Died):
            write()


def _alike(a: hj.CostModel, b: hj.CostModel) -> bool:
    name = next(iter(a.coefficients["power"]))
    same = a.coefficients["power"][name] == b.coefficients["power"][name]
    return bool(same) and sorted(a.blocks) == sorted(b.blocks)


def test_a_checkpoint_is_the_old_or_the_new_one(tmp_path):
    old = checkpoint.read("l40s-48gb", "vllm-0.24.0", "bf16")
    new = json.loads(json.dumps({k: v for k, v in old.items() if k in ("device", "runtime")}))
    power = old["coefficients"]["power"] | {"log_active_share": np.float32(-2.5)}
    new = old | {"coefficients": old["coefficients"] | {"power": power}}
    block = dict(new["blocks"]["attention_decode"])
    block["normalizer"] = type(block["normalizer"])(
        **{k: np.asarray(v) * np.float32(1.01) for k, v in vars(block["normalizer"]).items()}
    )
    new["blocks"] = new["blocks"] | {"attention_decode": block}
    steps = _steps(lambda: checkpoint.save(old, tmp_path / "count"))
    for step in range(steps):
        folder = tmp_path / str(step)
        path = checkpoint.save(old, folder)
        before = hj.load_file(path)
        _dies_before(step, lambda folder=folder: checkpoint.save(new, folder))
        assert _alike(hj.load_file(path), before)
        checkpoint.save(new, folder)
        after = hj.load_file(path)
        assert float(after.coefficients["power"]["log_active_share"]) == -2.5
        assert len(list(path.parent.iterdir())) == 2  # nothing is left of the old weights


def test_level_3_is_the_old_or_the_new_one(tmp_path):
    old = system_store.load(checkpoint.shipped_folder())
    new = old | {"card": old["card"] | {"note": "new"}, "network": _scaled(old["network"])}
    for step in range(_steps(lambda: system_store.save(old, tmp_path / "count"))):
        folder = tmp_path / str(step)
        system_store.save(old, folder)
        _dies_before(step, lambda folder=folder: system_store.save(new, folder))
        assert "note" not in system_store.load(folder)["card"]
        system_store.save(new, folder)
        assert system_store.load(folder)["card"]["note"] == "new"


def _scaled(tree):
    if isinstance(tree, dict):
        return {name: _scaled(value) for name, value in tree.items()}
    return np.asarray(tree) * np.float32(1.0001)


def test_results_and_tables_are_the_old_or_the_new_ones(tmp_path):
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"x": [1, 2]})
    writers = {
        "results.json": lambda: experiment.write_results(tmp_path, {"x": [1] * 1000}),
        "gemm.parquet": lambda: importers.write_tables({"gemm": frame}, tmp_path),
    }
    for name, write in writers.items():
        (tmp_path / name).write_text("old")
        _dies_before(0, write)
        assert (tmp_path / name).read_text() == "old"
        assert [path.name for path in tmp_path.iterdir() if name not in path.name] == []
        write()
        assert (tmp_path / name).read_bytes()[:3] != b"old"
        (tmp_path / name).unlink()


WRITES = {"write_text", "write_bytes", "savefig", "to_parquet", "to_csv", "write_table", "savez"}
ALLOWED = {  # module: calls that write to memory, or to a file that is not a result
    "files": {"open"},
    "arrays": {"savez"},  # into memory
    "profiler/store": {"open", "write_table"},  # an append-only journal; into memory
    "sweep": {"open", "write_table", "savefig", "ParquetWriter"},  # a draft that is renamed
    "importers/tables": {"to_parquet"},  # into memory
    "system_job": {"to_csv"},  # into a hash
    "report_svg": {"savefig"},  # into memory
    "experiment": {"savefig"},  # into memory
}


def _writing_calls(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        modes = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
        modes += [k.value.value for k in node.keywords
                  if k.arg == "mode" and isinstance(k.value, ast.Constant)]  # fmt: skip
        if name in WRITES | {"ParquetWriter"}:
            found.add(name)
        elif name in ("open", "fdopen") and any(set(str(m)) & set("wax+") for m in modes):
            found.add("open")
    return found


def test_every_result_is_written_by_the_one_that_writes_whole():
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE).with_suffix(""))
        assert _writing_calls(ast.parse(path.read_text())) <= ALLOWED.get(name, set()), name
