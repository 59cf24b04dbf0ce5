"""How commands compile: once per machine, and no harder than one answer is worth.

Compiled programs are kept on disk. Commands that answer one question compile without optimisation:
a few milliseconds are lost in the answer, seconds are won in the first compilation.

JAX reads its settings from the environment when it is first imported, so this needs no JAX.
`HYMELL_COMPILE_CACHE` names the folder, or is `off`; JAX's own variables win. By default it is
`hymell/jax` in the user's cache folder. Machines that share a home keep to folders of their own:
compiled code is for one kind of processor.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path

VARIABLE = "HYMELL_COMPILE_CACHE"
LEAST_COMPILE_S = "0.2"
ONE_ANSWER = ("predict", "compare", "report")
"""Commands that run a compiled program once."""

QUICK_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
"""Options of XLA that compile five times faster; one workload runs as fast."""

FULL_OPTIONS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_use_fusion_emitters": True,
}
"""Options of programs over thousands of designs, whatever flags the process has: compiled quickly,
such loops run a hundred times slower."""

LIGHT_OPTIONS = {
    "xla_backend_optimization_level": 1,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
"""Options of a descent from some tens of starts: it runs as fast as with `FULL_OPTIONS`, and is
compiled in half the time. Loops over thousands of designs take minutes to compile with them."""

QUICK_FLAGS = tuple(f"--{name}={str(value).lower()}" for name, value in QUICK_OPTIONS.items())


def cache_folder() -> Path | None:
    """Where compiled programs are kept, None where they are not."""
    given = os.environ.get(VARIABLE, "")
    if given.lower() in ("off", "0", "false", "no"):
        return None
    if given:
        return Path(given).expanduser()
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "hymell" / "jax"


def _processor() -> str:
    """A short name of this kind of processor: its architecture and instruction sets."""
    features = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            features = next((line for line in stream if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def configure(command: str | None) -> None:
    """Set JAX up for this command, unless JAX is there already or the user said otherwise.

    A folder that cannot be made means no cache: the command works, and compiles again.
    """
    if "jax" in sys.modules:
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if command in ONE_ANSWER and "xla_backend_optimization_level" not in flags:
        os.environ["XLA_FLAGS"] = " ".join((*QUICK_FLAGS, flags)).strip()
        os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # nobody reads them
    folder = cache_folder()
    if folder is None or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = folder / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder, os.W_OK):
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", LEAST_COMPILE_S)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    # XLA takes tuning hints in its own files for missing instructions, and says so at every load;
    # "1" is what a parent process that has imported JAX leaves behind
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
