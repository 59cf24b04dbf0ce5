"""The same question has the same answer: in any process, thread, width of floats, and again."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

import hymell_jax as hj
from hymell_jax import files, quantities
from hymell_jax import model as cost_model

ROOT = Path(__file__).parent.parent
WORK = hj.workload(batch_size=4, prompt_tokens=700, output_tokens=50)


def numbers(p: hj.Prediction) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(p)]


def test_float64_gives_the_same_within_the_rounding_of_float32(h100, llama):
    narrow = hj.predict(h100, llama, WORK)
    with jax.enable_x64(True):
        wide = hj.predict(h100, llama, WORK)
    assert all(leaf.dtype == np.float32 for leaf in numbers(narrow))
    for name in ("total_time_s", "total_energy_j", "decode_energy_per_token_j"):
        a, b = (float(getattr(p, name)) for p in (narrow, wide))
        assert a == pytest.approx(b, rel=2e-5), name
    for a, b in zip(numbers(narrow.prefill), numbers(wide.prefill), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(b).max(initial=0))


def test_processes_print_the_same_bytes_whatever_their_hashes(tmp_path):
    """The second process finds the program of the first: what is compiled is the same, too."""
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "hymell_jax.cli", "predict", "mixtral-8x7b", "--device",
               "h200-sxm-141gb", "--level", "1", "--json"]  # fmt: skip
    printed, programs = [], []
    outer = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    for seed in ("1", "2"):
        environment = outer | {
            "PYTHONHASHSEED": seed, "HYMELL_COMPILE_CACHE": str(cache), "PYTHONPATH": str(ROOT),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }  # fmt: skip
        printed.append(subprocess.run(command, env=environment, capture_output=True, check=True))
        programs.append(sorted(p.name for p in cache.rglob("*-cache")))
    assert printed[0].stdout == printed[1].stdout != b""
    assert programs[0] == programs[1] != []


def test_threads_get_the_answers_of_one(h100, llama):
    works = [hj.workload(batch_size=b, prompt_tokens=128 * b) for b in range(1, 9)]
    alone = [float(hj.predict(h100, llama, work).total_energy_j) for work in works]
    start = threading.Barrier(8)

    def many(number: int) -> list[float]:
        start.wait()
        return [
            float(hj.predict(h100, llama, works[(number + i) % 8]).total_energy_j)
            for i in range(24)
        ]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(many, range(8)))
    assert together == [[alone[(number + i) % 8] for i in range(24)] for number in range(8)]


def test_a_batch_has_the_same_bits_on_any_number_of_cores(h100, llama, monkeypatch):
    d_ff = np.arange(1024.0, 1024.0 + 8 * 39, 8, np.float32)
    archs, model = dataclasses.replace(llama, d_ff=d_ff), h100.at_level(1)
    found = []
    for cores in (1, 4):
        monkeypatch.setattr(quantities, "cores", lambda cores=cores: cores)
        found.append(quantities.measure(model, archs, WORK, ("latency_s", "energy_j"), chunk=8))
    np.testing.assert_array_equal(*found)
    assert (np.diff(found[0], axis=0) >= 0).all() and np.ptp(found[0], axis=0).min() > 0


def test_threads_that_write_leave_the_permissions_of_the_process_alone(tmp_path):
    before = os.umask(0o027)
    try:
        start = threading.Barrier(8)

        def write(number: int) -> None:
            start.wait()
            for i in range(20):
                files.write_whole(tmp_path / f"{number}-{i}.txt", "x")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, range(8)))
        after = os.umask(0o027)
    finally:
        os.umask(before)
    assert after == 0o027
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells its memory there")
def test_two_thousand_questions_take_one_program_and_no_memory(h100, llama):
    def ask(number: int) -> None:
        arch = dataclasses.replace(llama, d_ff=np.float32(8192 + 8 * number))
        float(hj.predict(h100, arch, hj.workload(batch_size=1 + number % 64)).total_time_s)

    for number in range(200):
        ask(number)
    gc.collect()
    compiled, resident = cost_model._predict_once._cache_size(), _resident_bytes()
    for number in range(200, 2200):
        ask(number)
    gc.collect()
    assert cost_model._predict_once._cache_size() == compiled
    assert _resident_bytes() - resident < 8e6
