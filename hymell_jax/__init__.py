"""Latency and energy of LLM inference from a model's configuration: a differentiable cost model.

Public names are loaded on first use, so that `import hymell_jax` and the command line do not wait
for JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hymell_jax.version import __version__

if TYPE_CHECKING:
    from hymell_jax.checkpoint import available as available_checkpoints
    from hymell_jax.checkpoint import load, load_file
    from hymell_jax.devices import device_names, get_device
    from hymell_jax.frames import predict_table
    from hymell_jax.hf import HFModel, architecture_from_hf, read_hf
    from hymell_jax.model import CostModel, Prediction, predict, predict_batch, stack
    from hymell_jax.models import model_names, preset, resolve_model
    from hymell_jax.optimise import search
    from hymell_jax.parameters import (
        active_parameters,
        exact_parameters,
        kv_cache_bytes,
        total_parameters,
    )
    from hymell_jax.pareto import front
    from hymell_jax.sensitivity import elasticities, explain
    from hymell_jax.sharded import predict_sharded
    from hymell_jax.space import make_space
    from hymell_jax.summary import summarise
    from hymell_jax.sweep import run_sweep
    from hymell_jax.types import Architecture, Device, Workload, architecture, device, workload

__all__ = [
    "Architecture",
    "CostModel",
    "Device",
    "HFModel",
    "Prediction",
    "Workload",
    "__version__",
    "active_parameters",
    "architecture",
    "architecture_from_hf",
    "available_checkpoints",
    "device",
    "device_names",
    "elasticities",
    "exact_parameters",
    "explain",
    "front",
    "get_device",
    "kv_cache_bytes",
    "load",
    "load_file",
    "make_space",
    "model_names",
    "predict",
    "predict_batch",
    "predict_sharded",
    "predict_table",
    "preset",
    "read_hf",
    "resolve_model",
    "run_sweep",
    "search",
    "stack",
    "summarise",
    "total_parameters",
    "workload",
]

_ROOMS = {
    "checkpoint": ("load", "load_file"),
    "devices": ("device_names", "get_device"),
    "frames": ("predict_table",),
    "hf": ("HFModel", "architecture_from_hf", "read_hf"),
    "model": ("CostModel", "Prediction", "predict", "predict_batch", "stack"),
    "models": ("model_names", "preset", "resolve_model"),
    "optimise": ("search",),
    "parameters": (
        "active_parameters",
        "exact_parameters",
        "kv_cache_bytes",
        "total_parameters",
    ),
    "pareto": ("front",),
    "sensitivity": ("elasticities", "explain"),
    "sharded": ("predict_sharded",),
    "space": ("make_space",),
    "summary": ("summarise",),
    "sweep": ("run_sweep",),
    "types": ("Architecture", "Device", "Workload", "architecture", "device", "workload"),
}
_ROOM_OF = {name: (room, name) for room, names in _ROOMS.items() for name in names}
_ROOM_OF["available_checkpoints"] = ("checkpoint", "available")


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'hymell_jax' has no attribute {name!r}")
    room, attribute = _ROOM_OF[name]
    value = getattr(importlib.import_module(f"hymell_jax.{room}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
