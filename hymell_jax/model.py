"""The cost model: a device with its fitted numbers, and `predict`, one call for every level."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hymell_jax import analytical, notebook, operators, parameters, serving
from hymell_jax.analytical import PassCosts
from hymell_jax.blocks import Block
from hymell_jax.compile_cache import FULL_OPTIONS, QUICK_OPTIONS
from hymell_jax.types import DTYPES, Architecture, Device, Workload

LARGEST_DISTANCE = np.float32(np.log(2.0))  # from what was measured, of an answer in domain
EMBEDDING_BYTES = 2.0  # embeddings and the LM head stay in 16 bits in quantised checkpoints


@dataclasses.dataclass(frozen=True)
class Card:
    """What a reader must know of a model; never traced. Compared and hashed by identity."""

    device: str
    runtime: str
    dtype: str
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    """Level 3: a serving engine on a device; leaves float32."""

    coefficients: dict[str, Any]  # as `serving.serve` takes them
    networks: dict[str, Any]  # of time and energy, as there
    quantiles: jax.Array  # [2, 2], (prefill, decode) by (time, energy): of `serving.error_scale`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Everything that `predict` needs; leaves float32."""

    device: Device
    coefficients: dict[str, Any]  # level 1, by operator
    domain: dict[str, Any]  # least and greatest fitted sizes, natural logs
    blocks: dict[str, Block] = dataclasses.field(default_factory=dict)  # level 2, by name
    engine: Engine | None = None  # level 3
    card: Card = dataclasses.field(metadata={"static": True})

    @property
    def level(self) -> int:
        """The highest level that this model answers with."""
        if self.engine is not None:
            return 3
        return 2 if self.blocks else 1

    def at_level(self, level: int) -> CostModel:
        """The same model without what lies above a level.

        Raises:
            ValueError: it does not hold that level.
        """
        if level not in range(1, self.level + 1):
            held = ", ".join(map(str, range(1, self.level + 1)))
            raise ValueError(
                f"The model of {self.card.device} holds level {held}; got level {level!r}."
            )
        if level == self.level:
            return self
        kept: dict[str, Any] = {"blocks": self.blocks if level > 1 else {}}
        kept["engine"] = self.engine if level > 2 else None
        return dataclasses.replace(self, **kept)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """One pass: the whole prefill, or the average decode step. Leaves float32, shape ()."""

    time_s: jax.Array
    energy_j: jax.Array  # of all GPUs
    power_w: jax.Array  # energy over time, all GPUs
    log_half_widths: jax.Array  # [2], of the 90 % intervals of ln time and ln energy; 0: none
    parts: PassCosts  # of level 1 or 2; level 3 adds what an engine does around them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one GPU. Leaves float32, shape ()."""

    weights_bytes: jax.Array
    kv_cache_bytes: jax.Array  # as reserved for prompt and output of every sequence
    activations_bytes: jax.Array
    capacity_bytes: jax.Array

    @property
    def total_bytes(self) -> jax.Array:
        """Weights, cache and activations."""
        return self.weights_bytes + self.kv_cache_bytes + self.activations_bytes

    @property
    def fits(self) -> jax.Array:
        """Whether the total is within the capacity, boolean."""
        return self.total_bytes <= self.capacity_bytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Latency, energy and memory of one workload. Leaves float32, shape () or [batch]."""

    prefill: Phase
    decode: Phase  # average step; each sequence gains one token
    decode_energy_per_token_j: jax.Array  # step energy over the sequences
    total_time_s: jax.Array
    total_energy_j: jax.Array
    output_tokens_per_s: jax.Array  # of all sequences, prefill included
    memory: Memory
    steady_time_per_token_s: jax.Array  # under continuous batching, prompts of newcomers mixed in
    steady_energy_per_token_j: jax.Array
    domain_distances: jax.Array  # [2 or 3], of levels 1, 2 and 3; see `domain_distance`

    @property
    def domain_distance(self) -> jax.Array:
        """How far the request leaves what was measured, natural log; 0 inside.

        The greatest of: ln of the factor by which a matrix is larger than any fitted one, and
        -ln of the share of a pass's time that lies within the range of the block networks, and -ln
        of how familiar the whole model is to the networks of level 3.
        """
        return self.domain_distances.max(axis=-1)

    @property
    def in_domain(self) -> jax.Array:
        """Whether `domain_distance` is at most ln 2: sizes within a factor of two, half known."""
        return self.domain_distance <= LARGEST_DISTANCE

    @property
    def decode_time_per_token_s(self) -> jax.Array:
        """Seconds between two tokens of a sequence: the average decode step."""
        return self.decode.time_s

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row for each workload, SI units, intervals where known."""
        return notebook.prediction_frame(self)

    def _repr_html_(self) -> str:
        return notebook.prediction_html(self)


def _phase(costs: PassCosts) -> Phase:
    """A pass as the sum of its parts."""
    time_s, energy_j = jnp.sum(costs.time_s), jnp.sum(costs.energy_j)
    return Phase(
        time_s=time_s,
        energy_j=energy_j,
        power_w=energy_j / time_s,
        log_half_widths=jnp.zeros(2),
        parts=costs,
    )


def _serve(engine: Engine, model, arch, work, phases) -> tuple[tuple[Phase, ...], serving.Served]:
    """Both passes as a serving engine runs them."""
    served = serving.serve(
        engine.coefficients, engine.networks, model.device, arch, work,
        phases[0].parts, phases[1].parts,
    )  # fmt: skip
    widths = serving.error_scale(served, engine.quantiles)
    totals = (
        (served.prefill_time_s, served.prefill_energy_j),
        (served.decode_time_s, served.decode_energy_j),
    )
    found = tuple(
        Phase(
            time_s=time_s,
            energy_j=energy_j,
            power_w=energy_j / time_s,
            log_half_widths=widths[index],
            parts=phases[index].parts,
        )
        for index, (time_s, energy_j) in enumerate(totals)
    )
    return found, served


def kv_shards(arch: Architecture, work: Workload, xp: Any = jnp) -> Any:
    """GPUs that a KV cache is split over: a KV head is never split, and a latent cache has only
    one, so that beyond that GPUs hold copies. `xp` is NumPy where nothing may be compiled."""
    return xp.where(
        arch.latent_attention > 0, 1.0, xp.minimum(work.tensor_parallel, arch.n_kv_heads)
    )


def memory_use(arch: Architecture, work: Workload, device: Device) -> Memory:
    """Bytes on one GPU of the tensor-parallel group.

    Weights at their stored width, embeddings and head in 16 bits; the cache as an engine reserves
    it without window paging; activations as the widest layer's inputs and outputs of one prefill
    pass, plus float32 logits of one row per sequence.
    """
    counts = parameters.parameter_counts(arch)
    linear = operators.weight_element_bytes(arch, work)
    expert = operators.expert_element_bytes(arch, work)
    plain = counts["embedding"] + counts["head"] + counts["norms"]
    experts = counts["routed_experts"]
    rest = sum(counts.values()) - plain - experts
    shards = jnp.maximum(work.tensor_parallel, work.expert_parallel)
    embedding = jnp.maximum(EMBEDDING_BYTES, work.activation_bytes)
    weights = (plain * embedding + rest * linear) / work.tensor_parallel
    weights = weights + experts * expert / shards
    tokens = jnp.maximum(work.prompt_tokens + work.output_tokens, work.context_end_tokens)
    cache = parameters.kv_cache_bytes(arch, tokens, work.kv_bytes)
    state = cache.recurrent_state / work.tensor_parallel
    kv = work.batch_size * (cache.reserved / kv_shards(arch, work) + state)
    rows = work.batch_size * work.prompt_tokens
    feed_forward = jnp.maximum(
        arch.n_ff_matrices * arch.d_ff,
        arch.experts_per_token * arch.n_ff_matrices * arch.d_expert,
    )
    attention = arch.n_heads * arch.head_dim + 2.0 * arch.n_kv_heads * arch.head_dim
    widest = jnp.maximum(feed_forward, attention) / work.tensor_parallel
    activations = rows * (2.0 * arch.d_model + widest) * work.activation_bytes
    logits = work.batch_size * arch.vocab_size / work.tensor_parallel * 4.0
    return Memory(
        weights_bytes=weights,
        kv_cache_bytes=kv,
        activations_bytes=activations + logits,
        capacity_bytes=device.memory_bytes * jnp.ones_like(weights),
    )


def domain_distance(domain: dict[str, Any], arch: Architecture, work: Workload) -> jax.Array:
    """How far the matrix products go beyond the fitted shapes, in natural-log units; 0 inside.

    The greatest excess of ln m, ln n or ln k over the fitted range, products that the model has.
    Sizes below the least fitted one (a router over eight experts) cost a launch and do not count.
    """
    worst = jnp.zeros(())
    for rows in (work.batch_size * work.prompt_tokens, work.batch_size):
        products = operators.matrix_products(arch, work, rows)
        here = products.count > 0
        for name in ("m", "n", "k"):
            size = jnp.log(getattr(products, name))
            outside = jnp.maximum(size - domain[f"gemm_log_{name}_max"], 0.0)
            worst = jnp.maximum(worst, jnp.max(jnp.where(here, outside, 0.0)))
    return worst


def _unfamiliarity(costs: tuple[PassCosts, PassCosts]) -> jax.Array:
    """-ln of the share of the time of a pass that lies within the networks' range; the worse."""
    shares = [jnp.sum(c.time_s * c.familiarity) / jnp.sum(c.time_s) for c in costs]
    return -jnp.log(jnp.maximum(jnp.minimum(*shares), 1e-6))


def _predict_one(
    model: CostModel, arch: Architecture, work: Workload, structure: frozenset[str] | None
) -> Prediction:
    costs = analytical.model_costs(
        model.coefficients, model.device, arch, work, structure, model.blocks
    )
    prefill, decode = map(_phase, costs)
    distances = [domain_distance(model.domain, arch, work), _unfamiliarity(costs)]
    steady = (decode.time_s, decode.energy_j)
    if model.engine is not None:
        (prefill, decode), served = _serve(model.engine, model, arch, work, (prefill, decode))
        steady = (served.steady_time_s, served.steady_energy_j)
        distances.append(-jnp.log(jnp.maximum(served.familiarity, 1e-6)))
    total_time = prefill.time_s + work.output_tokens * decode.time_s
    total_energy = prefill.energy_j + work.output_tokens * decode.energy_j
    return Prediction(
        prefill=prefill,
        decode=decode,
        decode_energy_per_token_j=decode.energy_j / work.batch_size,
        total_time_s=total_time,
        total_energy_j=total_energy,
        output_tokens_per_s=work.batch_size * work.output_tokens / total_time,
        memory=memory_use(arch, work, model.device),
        steady_time_per_token_s=steady[0],
        steady_energy_per_token_j=steady[1] / work.batch_size,
        domain_distances=jnp.stack(distances),
    )


def _predict_parts(parts, arch, work, structure):
    return _predict_one(_rebuilt(parts), arch, work, structure)


_predict_compiled = jax.jit(_predict_parts, static_argnames=("structure",))
_predict_once = jax.jit(
    _predict_parts,
    static_argnames=("structure",),
    compiler_options=QUICK_OPTIONS,
)


def _predict_rows(parts, arch, work, structure):
    run = functools.partial(_predict_one, _rebuilt(parts), structure=structure)
    return jax.vmap(run)(arch, work)


_predict_batch_compiled = jax.jit(
    _predict_rows, static_argnames=("structure",), compiler_options=FULL_OPTIONS
)
_predict_batch_once = jax.jit(
    _predict_rows, static_argnames=("structure",), compiler_options=QUICK_OPTIONS
)


_NO_CARD = Card("", "", "")


def _rebuilt(parts: dict[str, Any]) -> CostModel:
    """A model without its card, so that one compiled program serves every device."""
    return CostModel(**parts, card=_NO_CARD)


def _parts(model: CostModel) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(CostModel) if field.name != "card")
    return {name: getattr(model, name) for name in names}


def _check(model: CostModel, archs: Architecture, works: Workload) -> None:
    """Refuse what is not of the expected type, or computed in another format than was fitted."""
    for value, kind in ((model, CostModel), (archs, Architecture), (works, Workload)):
        if not isinstance(value, kind):
            inside = isinstance(getattr(value, "architecture", None), Architecture)
            hint = " Pass its .architecture." if inside else ""
            raise ValueError(f"Expected a {kind.__name__}; got {type(value).__name__}.{hint}")
    fitted, given = DTYPES.get(model.card.dtype), works.weight_bytes
    if fitted is None or isinstance(given, jax.core.Tracer) or (np.asarray(given) == fitted).all():
        return
    raise ValueError(
        f"The model was loaded for {model.card.dtype}, but the workload computes with "
        f"{float(jnp.max(jnp.abs(given))):g} bytes a weight: use load and workload with one dtype."
    )


def predict(model: CostModel, arch: Architecture, work: Workload) -> Prediction:
    """Latency, energy and memory of one workload on one device.

    Differentiable in every field of the architecture and the workload. Compiled once for each
    combination of optional blocks (experts, latent, linear and window attention, several GPUs),
    whatever the numbers; under a transformation of the caller all blocks are included.

    Raises:
        ValueError: an argument of another type, or a workload of another dtype than the model's.
    """
    _check(model, arch, work)
    structure = operators.structure_of(arch, work)
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((model, arch, work)))
    run = _predict_compiled if traced else _predict_once
    return run(_parts(model), arch, work, structure)


def predict_best(model: CostModel, arch: Architecture, work: Workload) -> tuple[int, Prediction]:
    """`predict` by the highest level whose domain covers the request, and which level that is.

    A level covers a request at a distance of at most ln 2; level 1 answers what none covers.

    Raises:
        ValueError: as `predict`.
    """
    prediction = predict(model, arch, work)
    level = covering_level(np.asarray(prediction.domain_distances)[: model.level])
    if level < model.level:
        prediction = predict(model.at_level(level), arch, work)
    return level, prediction


def covering_level(domain_distances: np.ndarray) -> int:
    """The highest level whose distance [n_levels] is at most ln 2; 1 where none is."""
    covered = np.flatnonzero(np.asarray(domain_distances) <= LARGEST_DISTANCE)
    return int(covered[-1]) + 1 if len(covered) else 1


def predict_batch(
    model: CostModel, archs: Architecture, works: Workload, once: bool = False
) -> Prediction:
    """`predict` over stacked architectures and workloads, leaves [batch] or ().

    Args:
        model: of one device.
        archs: leaves [batch], or () to hold one architecture for all workloads.
        works: leaves [batch], or () to hold one workload for all architectures.
        once: compile five times faster a program that is slower for many rows.

    Returns:
        A `Prediction` with leaves [batch, ...].

    Raises:
        ValueError: batches of different length, or no batch at all.
    """
    _check(model, archs, works)
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves((archs, works)) if jnp.ndim(leaf)}
    if len(sizes) != 1:
        raise ValueError(
            "predict_batch needs leaves of one common batch length; got "
            f"{sorted(sizes) or 'only scalars, use predict'}."
        )
    size = sizes.pop()
    archs, works = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (size,)), (archs, works))
    structure = operators.structure_of(archs, works)
    run = _predict_batch_once if once else _predict_batch_compiled
    return run(_parts(model), archs, works, structure)


def stack(values: list[Any]) -> Any:
    """One pytree with leaves [batch] from a list of architectures or workloads.

    Raises:
        ValueError: an empty list, or values of different types.
    """
    if not values:
        raise ValueError("stack needs at least one value; got an empty list.")
    kinds = sorted({type(value).__name__ for value in values})
    if len(kinds) > 1:
        raise ValueError(f"stack needs values of one type; got {', '.join(kinds)}.")
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *values)
