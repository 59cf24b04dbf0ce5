"""The tests notice a wrong sign, a factor of two and a dropped term in the core equations.

Each mutation is made in a copy of the package, and the tests named with it run against that copy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hymell_jax.compile_cache import QUICK_FLAGS

ROOT = Path(__file__).parent.parent

MUTATIONS = {  # name: (module, code, what replaces it, test file, tests that notice)
    "gemm, a factor": (
        "gemm", "return 2.0 * m * n * k", "return 1.0 * m * n * k",
        "test_gemm.py", "power_limit_adds",
    ),
    "rowwise, a sign": (
        "rowwise", "log_memory = log_moved + log_misses - log_rate",
        "log_memory = log_moved - log_misses - log_rate",
        "test_rowwise.py", "far_out_time or l2_cannot_hold or one_element",
    ),
    "attention, a factor": (
        "attention", "return keys * (0.5 * (2.0 * tokens - keys + 1.0))",
        "return keys * (1.0 * (2.0 * tokens - keys + 1.0))",
        "test_attention.py", "causal_pairs or halves",
    ),
    "power, a sign": (
        "power", "+ jnp.exp(c[\"log_memory_share\"]) * memory",
        "- jnp.exp(c[\"log_memory_share\"]) * memory",
        "test_power.py", "rises_with_every",
    ),
    "collectives, a dropped term": (
        "collectives", "start = jnp.exp(c[f\"log_{name}_s\"]) + others * "
        "jnp.exp(c[f\"log_{name}_step_s\"])",
        "start = jnp.exp(c[f\"log_{name}_s\"])",
        "test_collectives.py", "cheapest_launch",
    ),
    "moe, a factor": (
        "moe", "flops = 2.0 * padded * n_matrices * d_model * width",
        "flops = 1.0 * padded * n_matrices * d_model * width",
        "test_moe.py", "compute_bound_time",
    ),
    "linear, a dropped term": (
        "linear", "moved = tokens * (channels + out) * ACTIVATION_BYTES + 2.0 * states",
        "moved = tokens * (channels + out) * ACTIVATION_BYTES",
        "test_linear.py", "reads_and_writes_every_state",
    ),
    "parameters, a dropped term": (
        "parameters", "return projections + output + arch.attention_sinks * arch.n_heads",
        "return projections + arch.attention_sinks * arch.n_heads",
        "test_parameters.py", "tiny_dense",
    ),
    "operators, a sign": (
        "operators", "qkv = q_width * (1.0 + arch.attention_gate) + kv_heads",
        "qkv = q_width * (1.0 + arch.attention_gate) - kv_heads",
        "test_operators.py", "queries_keys_and_values",
    ),
    "serving, a dropped term": (
        "serving", "+ jnp.exp(c[\"log_gap_share\"]) * jnp.maximum(time_s - busy, 0.0)", "",
        "test_serving_terms.py", "gaps",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A folder with the package and the tests in it."""
    folder = tmp_path_factory.mktemp("mutated")
    ignore = shutil.ignore_patterns("profiler", "*.pyc", "model_data")
    for name in ("hymell_jax", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copytree(ROOT / "hymell_jax" / "model_data", folder / "hymell_jax" / "model_data")
    (folder / "checkpoints").symlink_to(ROOT / "checkpoints")
    return folder


def run(folder: Path, *selected: str) -> subprocess.CompletedProcess:
    """pytest on a copy, in this folder alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    environment = kept | {"PYTHONPATH": str(folder), "XLA_FLAGS": " ".join(QUICK_FLAGS)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
               "-p", "no:xdist", "-p", "no:hypothesispytest", "-c", os.devnull,
               f"--rootdir={folder}"]  # fmt: skip
    return subprocess.run(
        [*command, *selected], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_the_package_as_it_is_passes(copy):
    files = sorted({entry[3] for entry in MUTATIONS.values()})
    names = " or ".join(entry[4] for entry in MUTATIONS.values())
    done = run(copy, *(f"tests/{name}" for name in files), "-k", names)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) >= len(MUTATIONS)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(copy, name):
    module, code, other, file, names = MUTATIONS[name]
    path = copy / "hymell_jax" / f"{module}.py"
    plain = path.read_text()
    assert plain.count(code) == 1
    caches = path.parent / "__pycache__"
    try:
        path.write_text(plain.replace(code, other))
        for old in caches.glob(f"{module}.*"):
            old.unlink()
        done = run(copy, f"tests/{file}", "-k", names)
    finally:
        path.write_text(plain)
        for old in caches.glob(f"{module}.*"):
            old.unlink()
    assert done.returncode == 1, done.stdout[-3000:]  # tests ran, and one of them failed
    assert " failed" in done.stdout and "ImportError" not in done.stdout
