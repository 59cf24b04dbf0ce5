"""Scalar quantities of a design: what can be minimised, bounded, swept and explained.

Each is a pure function of a prediction, an architecture and a workload. Quality enters through
proxies, as no trained model is at hand: the parameter count, or the loss that the scaling law of
Hoffmann et al. 2022 (Chinchilla, arXiv 2203.15556, equation 10) expects,

    loss = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28    nats a token,

with N the parameters of the model without its embeddings, those that one token visits in a mixture
of experts (a lower bound of its quality), and D = `TRAINING_TOKENS`. The law says nothing of
shapes: depth, heads and width are free in it (Kaplan et al. 2020, arXiv 2001.08361, section 3.1,
finds the loss nearly flat in shape over a wide range, not beyond).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax import model as models
from hymell_jax import operators, parameters
from hymell_jax.compile_cache import FULL_OPTIONS
from hymell_jax.model import CostModel, Prediction
from hymell_jax.summary import check_power, knows_power
from hymell_jax.types import Architecture, Workload, near_names, shown

Proxy = Callable[[Architecture], jax.Array]

TRAINING_TOKENS = 15e12  # of the Llama 3 herd (arXiv 2407.21783)
CHUNK = 1024
"""Designs that one call of the compiled program evaluates: intermediate arrays stay in cache."""


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A positive number of a design; `higher_is_better` says which way a designer wants it."""

    unit: str
    meaning: str
    of: Callable[[Prediction, Architecture, Workload], jax.Array]
    higher_is_better: bool = False


def _energy_per_token(p: Prediction, _: Architecture, w: Workload) -> jax.Array:
    return p.total_energy_j / (w.batch_size * w.output_tokens)


def chinchilla_loss(arch: Architecture, training_tokens: float = TRAINING_TOKENS) -> Any:
    """Expected loss in nats a token, equation 10 of arXiv 2203.15556; shape of the leaves."""
    counts = parameters.active_parameter_counts(arch)
    body = sum(count for part, count in counts.items() if part not in ("embedding", "head"))
    return 1.69 + 406.4 / body**0.34 + 410.7 / training_tokens**0.28


QUANTITIES: dict[str, Quantity] = {
    "energy_per_token_j": Quantity(
        "J", "energy of a request over its output tokens, prefill included", _energy_per_token
    ),
    "energy_j": Quantity("J", "energy of the whole workload", lambda p, a, w: p.total_energy_j),
    "latency_s": Quantity("s", "prefill and all decode steps", lambda p, a, w: p.total_time_s),
    "energy_delay_j_s": Quantity(
        "J s", "energy per token times latency",
        lambda p, a, w: _energy_per_token(p, a, w) * p.total_time_s,
    ),
    "latency_per_token_s": Quantity("s", "one decode step", lambda p, a, w: p.decode.time_s),
    "prefill_time_s": Quantity("s", "time to the first token", lambda p, a, w: p.prefill.time_s),
    "decode_energy_per_token_j": Quantity(
        "J", "energy of a decode step over its sequences",
        lambda p, a, w: p.decode_energy_per_token_j,
    ),
    "prefill_energy_j": Quantity("J", "energy of the prefill", lambda p, a, w: p.prefill.energy_j),
    "output_tokens_per_s": Quantity(
        "1/s", "output tokens of all sequences", lambda p, a, w: p.output_tokens_per_s, True
    ),
    "parameters": Quantity(
        "1", "stored parameters", lambda p, a, w: parameters.total_parameters(a), True
    ),
    "active_parameters": Quantity(
        "1", "parameters that one token visits", lambda p, a, w: parameters.active_parameters(a),
        True,
    ),
    "loss": Quantity(
        "nats", "expected by Chinchilla's law", lambda p, a, w: chinchilla_loss(a)
    ),
    "aspect_ratio": Quantity("1", "d_model over layers", lambda p, a, w: a.d_model / a.n_layers),
    "memory_bytes": Quantity("B", "on one GPU", lambda p, a, w: p.memory.total_bytes),
    "memory_share": Quantity(
        "1", "memory over capacity", lambda p, a, w: p.memory.total_bytes / p.memory.capacity_bytes
    ),
    "kv_cache_bytes": Quantity("B", "on one GPU", lambda p, a, w: p.memory.kv_cache_bytes),
    "domain_distance": Quantity(
        "1", "ln of how far a size leaves the fitted range", lambda p, a, w: p.domain_distance
    ),
}  # fmt: skip
"""All built-in quantities by name."""

OBJECTIVES = {
    "energy": "energy_per_token_j",
    "latency": "latency_s",
    "energy_delay": "energy_delay_j_s",
}
"""Short names of what is usually minimised."""


def check_quantity(name: str, proxies: Mapping[str, Proxy] | None = None) -> str:
    """The name, if it is a quantity or a proxy of the caller.

    Raises:
        ValueError: neither.
    """
    known = [*QUANTITIES, *(proxies or {})]
    if name not in known:
        near = near_names(name, known) or known
        raise ValueError(f"There is no quantity {shown(name)}; did you mean {', '.join(near[:6])}?")
    return name


def is_known(name: str, model: CostModel) -> bool:
    """Whether a built-in quantity means something: no joules where the power is a placeholder."""
    return "J" not in QUANTITIES[name].unit.split() or knows_power(model)


def check_known(name: str, model: CostModel, proxies: Mapping[str, Proxy] | None = None) -> str:
    """The name, if it is a quantity known of this device, or a proxy of the caller.

    Raises:
        ValueError: neither, or an energy of a device whose power limit is a placeholder.
    """
    if check_quantity(name, proxies) in QUANTITIES and not is_known(name, model):
        check_power(model, name)
    return name


def traced_quantities(
    names: Sequence[str],
    prediction: Prediction,
    arch: Architecture,
    work: Workload,
    proxies: Sequence[tuple[str, Proxy]] = (),
) -> list[jax.Array]:
    """Values of the named quantities, in that order; traceable."""
    own = dict(proxies)
    return [
        own[name](arch) if name in own else QUANTITIES[name].of(prediction, arch, work)
        for name in names
    ]


_BARE = models.Card("", "", "")


def bare(model: CostModel) -> CostModel:
    """The model without its card, so that one compiled program serves every device."""
    return dataclasses.replace(model, card=_BARE)


@functools.partial(
    jax.jit, static_argnames=("names", "structure", "proxies"), compiler_options=FULL_OPTIONS
)
def _measure_chunk(model, archs, works, names, structure, proxies):
    def one(arch, work):
        prediction = models._predict_one(model, arch, work, structure)
        return jnp.stack(traced_quantities(names, prediction, arch, work, proxies))

    return jax.vmap(one)(archs, works)


def padded(tree: Any, start: int, size: int) -> Any:
    """Rows start .. start + size of numpy leaves [n]; the last row is repeated beyond the end."""
    index = np.minimum(np.arange(start, start + size), len(jax.tree.leaves(tree)[0]) - 1)
    return jax.tree.map(lambda leaf: leaf[index], tree)


def broadcast_rows(*trees: Any) -> tuple[int, Any]:
    """(n, trees with numpy leaves [n]) from leaves of shape () or [n].

    Raises:
        ValueError: leaves of different length.
    """
    leaves = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(trees)]
    sizes = {leaf.shape[0] for leaf in leaves if leaf.ndim}
    if len(sizes) > 1:
        raise ValueError(f"Leaves must share one batch length; got {sorted(sizes)}.")
    size = sizes.pop() if sizes else 1
    wide = [np.broadcast_to(leaf, (size,)) for leaf in leaves]
    return size, jax.tree.unflatten(jax.tree.structure(trees), wide)


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def over_chunks(run: Callable[[int], Any], starts: range, threads: int | None = None) -> list[Any]:
    """`run` of every start, in order: the first alone, as it compiles, the others in threads.

    Args:
        run: of a compiled program.
        starts: of the chunks.
        threads: by default as many as `cores`.
    """
    first, rest = [run(start) for start in starts[:1]], starts[1:]
    if not rest:
        return first
    with ThreadPoolExecutor(min(threads or cores(), len(rest))) as pool:
        return [*first, *pool.map(run, rest)]


def measure(
    model: CostModel,
    archs: Architecture,
    works: Workload,
    names: Sequence[str],
    proxies: Mapping[str, Proxy] | None = None,
    structure: frozenset[str] | None = None,
    chunk: int = CHUNK,
) -> np.ndarray:
    """Quantities of many designs, float32 [n, n_names], in chunks of one compiled program.

    Chunks run on all cores that the process may use; answers do not depend on how many there are.

    Args:
        model: of one device.
        archs, works: leaves [n] or ().
        names: of quantities, or of proxies.
        proxies: JAX functions of an `Architecture` with leaves of shape ().
        structure: optional blocks to compile; by default those that these designs have.
        chunk: designs a call.
    """
    own = tuple((proxies or {}).items())
    size, (archs, works) = broadcast_rows(archs, works)
    if structure is None:
        structure = operators.structure_of(archs, works)
    out = np.empty((size, len(names)), np.float32)
    stripped = bare(model)

    def fill(start: int) -> None:
        part = padded((archs, works), start, chunk)
        values = _measure_chunk(stripped, *part, tuple(names), structure, own)
        out[start : start + chunk] = np.asarray(values)[: size - start]

    over_chunks(fill, range(0, size, chunk))
    return out
