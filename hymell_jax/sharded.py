"""Batches over several devices, and over several processes of a cluster.

Every device runs the same program on its own slice of a batch (`jax.sharding`); nothing is
exchanged, so rates add up. A slice holds a fixed number of designs a call, so results do not depend
on how many devices there are, but for the last bit or two between one and several: XLA orders a
partitioned program differently.

`start_processes` joins processes with `jax.distributed`; each then computes its share of the rows
on its own devices, and `predict_sharded` gives all of them the whole result.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hymell_jax import model as cost_model
from hymell_jax import operators, quantities
from hymell_jax.compile_cache import FULL_OPTIONS
from hymell_jax.model import CostModel, Prediction
from hymell_jax.types import Architecture, Workload

CHUNK = quantities.CHUNK
"""Designs that each device takes in one call."""


def start_processes(coordinator: str, count: int, index: int) -> None:
    """Join `count` processes, this one being number `index`; call before anything else uses JAX.

    Args:
        coordinator: host:port of process 0, reachable from all.

    Raises:
        ValueError: an index that is not below the count.
    """
    if not 0 <= index < count:
        raise ValueError(f"process {index} is not one of {count}; they count from 0.")
    jax.distributed.initialize(coordinator, count, index)


@functools.lru_cache(maxsize=32)
def _program(mesh: Mesh, structure: frozenset[str] | None, names: tuple[str, ...] | None):
    """(model, archs, works) -> Prediction, or quantities [..., n_names]; rows cut along `batch`."""
    rows = PartitionSpec("batch")

    def local(model, archs, works):
        def one(arch, work):
            found = cost_model._predict_one(model, arch, work, structure)
            if names is None:
                return found
            return jnp.stack(quantities.traced_quantities(names, found, arch, work))

        return jax.vmap(one)(archs, works)

    cut = jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(), rows, rows), out_specs=rows)
    return jax.jit(cut, compiler_options=FULL_OPTIONS)


def _call(program, mesh: Mesh, model: CostModel, rows: Any) -> Any:
    """One call: numpy leaves [n_devices x chunk] -> numpy leaves."""
    cut = NamedSharding(mesh, PartitionSpec("batch"))
    rows = jax.tree.map(lambda leaf: jax.device_put(leaf, cut), rows)
    return jax.tree.map(np.asarray, program(quantities.bare(model), *rows))


def _on_devices(model: CostModel, rows: Any, size: int, devices: Any, structure, names) -> Any:
    """Results of numpy rows [size] over devices of this process."""
    mesh = Mesh(np.asarray(devices), ("batch",))
    program = _program(mesh, structure, names)
    step = CHUNK * mesh.size

    def run(start: int) -> Any:
        return _call(program, mesh, model, quantities.padded(rows, start, step))

    threads = max(quantities.cores() // mesh.size, 1)
    parts = quantities.over_chunks(run, range(0, size, step), threads)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:size], *parts)


def measure_sharded(
    model: CostModel,
    archs: Architecture,
    works: Workload,
    names: tuple[str, ...],
    structure: frozenset[str] | None = None,
) -> np.ndarray:
    """`quantities.measure` over all devices of this process, float32 [n, n_names]."""
    size, rows = quantities.broadcast_rows(archs, works)
    if structure is None:
        structure = operators.structure_of(*rows)
    return _on_devices(model, rows, size, jax.local_devices(), structure, tuple(names))


def predict_sharded(
    model: CostModel, archs: Architecture, works: Workload, devices: Any = None
) -> Prediction:
    """`predict_batch` spread over devices and processes; numpy leaves [batch, ...].

    Args:
        model: of one device.
        archs, works: leaves [batch] or (); with several processes, the same on each.
        devices: of this process; by default all of them.

    Raises:
        ValueError: as `predict_batch`.
    """
    cost_model._check(model, archs, works)
    size, rows = quantities.broadcast_rows(archs, works)
    devices = jax.local_devices() if devices is None else devices
    count = jax.process_count()
    structure = operators.structure_of(*rows)
    if count == 1:
        return _on_devices(model, rows, size, devices, structure, None)
    share = -(-size // count)
    own = quantities.padded(rows, jax.process_index() * share, share)
    result = _on_devices(model, own, share, devices, structure, None)
    whole = multihost_utils.process_allgather(result, tiled=True)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:size], whole)


def wait_for_all(name: str) -> None:
    """Return when every process has come here; at once where there is one."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
