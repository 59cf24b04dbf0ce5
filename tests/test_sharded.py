"""Batches over devices and processes give what one device in one process gives."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent

BATCH = """
import numpy as np
import hymell_jax as hj
rng = np.random.default_rng(0)
base = hj.preset("llama-3.1-8b").architecture
import dataclasses
n = 3000
archs = dataclasses.replace(
    base, d_model=np.float32(128 * rng.integers(8, 64, n)),
    d_ff=np.float32(128 * rng.integers(8, 200, n)), n_layers=np.float32(rng.integers(2, 64, n)),
)
works = hj.workload(batch_size=8)
model = hj.load("h100-sxm-80gb")
def totals(p):
    names = ("total_time_s", "total_energy_j", "domain_distance", "decode_energy_per_token_j")
    parts = [p.prefill.parts.time_s, p.decode.parts.energy_j]
    return np.concatenate([np.stack([np.asarray(getattr(p, n)) for n in names], 1), *parts], 1)
"""


def _environment(devices: int) -> dict[str, str]:
    return os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def _run(code: str, path: Path, devices: int = 1) -> np.ndarray:
    code = f"{BATCH}\n{code}\nnp.save({str(path)!r}, totals(p))"
    subprocess.run([sys.executable, "-c", code], env=_environment(devices), check=True, timeout=600)
    return np.load(path)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory) -> np.ndarray:
    path = tmp_path_factory.mktemp("one") / "one.npy"
    return _run("p = hj.predict_sharded(model, archs, works)", path)


def test_eight_devices_give_what_one_gives(one_device, tmp_path):
    code = "import jax\nassert len(jax.devices()) == 8\np = hj.predict_sharded(model, archs, works)"
    eight = _run(code, tmp_path / "eight.npy", 8)
    np.testing.assert_allclose(eight, one_device, rtol=3e-6)  # ten steps of float32
    code = "import jax\np = hj.predict_sharded(model, archs, works, jax.devices()[:3])"
    np.testing.assert_array_equal(_run(code, tmp_path / "three.npy", 8), eight)


def test_a_single_batch_gives_the_same_within_rounding(one_device, tmp_path):
    plain = _run("p = hj.predict_batch(model, archs, works)", tmp_path / "plain.npy")
    assert plain.shape[0] == 3000
    np.testing.assert_allclose(plain, one_device, rtol=2e-5)


def test_two_processes_give_what_one_gives(one_device, tmp_path):
    address = f"localhost:{_free_port()}"
    code = f"""
import sys
from hymell_jax import sharded
sharded.start_processes(sys.argv[1], 2, int(sys.argv[2]))
{BATCH}
import jax
assert jax.process_count() == 2 and len(jax.local_devices()) == 1
p = hj.predict_sharded(model, archs, works)
np.save(sys.argv[3], totals(p))
"""
    paths = [tmp_path / f"{i}.npy" for i in range(2)]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, address, str(i), str(path)], env=_environment(1)
        )
        for i, path in enumerate(paths)
    ]
    assert [process.wait(timeout=600) for process in running] == [0, 0]
    for path in paths:
        np.testing.assert_array_equal(np.load(path), one_device)


def test_a_process_number_beyond_the_count_is_refused():
    from hymell_jax.sharded import start_processes

    with pytest.raises(ValueError, match="count from 0"):
        start_processes("localhost:1", 2, 2)


def test_two_processes_write_the_sweep_of_one(tmp_path):
    spec = tmp_path / "spec.json"
    spec.write_text(
        '{"device": "h100-sxm-80gb", "base": "llama-3.1-8b", "design": "random", "rows": 5000,'
        ' "fields": {"d_ff": {"low": 4096, "high": 20000}}, "part_rows": 1024}'
    )
    address = f"localhost:{_free_port()}"
    command = [sys.executable, "-m", "hymell_jax.cli", "sweep", str(spec)]
    one, two = tmp_path / "one.parquet", tmp_path / "two.parquet"
    subprocess.run([*command, "--out", str(one)], env=_environment(1), check=True, timeout=600)
    join = ["--coordinator", address, "--processes", "2", "--process"]
    running = [
        subprocess.Popen([*command, "--out", str(two), *join, str(i)], env=_environment(1))
        for i in range(2)
    ]
    assert [process.wait(timeout=600) for process in running] == [0, 0]
    assert one.read_bytes() == two.read_bytes()
