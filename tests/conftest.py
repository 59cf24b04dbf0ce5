"""Strict JAX settings and shared fixtures."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hymell_jax import compile_cache

# before JAX starts: most of a test's time is compilation, most programs run once
os.environ.setdefault("XLA_FLAGS", " ".join(compile_cache.QUICK_FLAGS))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # of the loader of compiled programs

import jax  # noqa: E402
import pytest  # noqa: E402

import hymell_jax as hj  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

if "PYTEST_XDIST_WORKER" not in os.environ:  # the process that starts the workers, or is alone
    os.environ["HYMELL_TEST_PROGRAMS"] = tempfile.mkdtemp(prefix="hymell-programs-")
    atexit.register(shutil.rmtree, os.environ["HYMELL_TEST_PROGRAMS"], ignore_errors=True)
# what one process has compiled, the others of the run, and itself after a while, need not
jax.config.update("jax_compilation_cache_dir", os.environ["HYMELL_TEST_PROGRAMS"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 20_000
"""Linux allows a process 65,530 mappings; every compiled program takes some, and XLA crashes where
none is left."""


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Programs of earlier files are dropped before there are too many of them."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def h100() -> hj.CostModel:
    """The shipped model of an H100 SXM in bf16."""
    return hj.load("h100-sxm-80gb")


@pytest.fixture(scope="session")
def llama() -> hj.Architecture:
    """Llama-3.1-8B."""
    return hj.preset("llama-3.1-8b").architecture


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Measured tables, where the environment names them."""
    folder = os.environ.get("HYMELL_DATA", "")
    if not folder:
        pytest.skip("HYMELL_DATA names no folder of measured tables")
    return Path(folder)
