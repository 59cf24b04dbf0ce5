"""A search space of architectures: what may move, how far, and which combinations can be built.

A free variable moves on a ladder of legal values (multiples of 64 or 128, whole layers, divisors);
its relaxed coordinate x in [0, 1] is linear in ln(value) between the ends of the ladder. What the
ladders cannot say alone is checked jointly: KV heads divide the heads, heads and widths divide
among the GPUs, no more experts a token than experts. `tie` keeps n_heads x head_dim / d_model at
the ratio of the base by letting heads or head_dim follow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hymell_jax.types import (
    ARCHITECTURE_FIELDS,
    Architecture,
    Workload,
    architecture,
    checked_number,
    near_names,
    shown,
)

MULTIPLES = {"d_model": 128, "d_ff": 128, "d_expert": 64, "head_dim": 16, "vocab_size": 128}
"""Steps of the ladders of widths; counts step by one, KV heads and experts a token as below."""

FREE_FIELDS = (
    "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "n_experts",
    "experts_per_token", "d_expert", "vocab_size",
)  # fmt: skip
ALIASES = {
    "layers": "n_layers",
    "heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "experts": "n_experts",
    "top_k": "experts_per_token",
    "expert_width": "d_expert",
    "vocabulary": "vocab_size",
}
TIES = ("n_heads", "head_dim")

_DENSE = ("d_model", "n_layers", "n_kv_heads", "d_ff")
_MIXTURE = ("d_model", "n_layers", "n_kv_heads", "n_experts", "experts_per_token", "d_expert")
_MAX_LEVELS = 4096


@dataclasses.dataclass(frozen=True)
class Variable:
    """One free field and its ladder of legal values, ascending."""

    name: str
    values: tuple[float, ...]

    @property
    def log_range(self) -> tuple[float, float]:
        """ln of the least and the greatest value."""
        return math.log(self.values[0]), math.log(self.values[-1])


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which fields follow those that move; hashable, part of a compiled program."""

    names: tuple[str, ...]  # free fields
    tie: str | None  # follows so that n_heads x head_dim keeps its share of d_model
    value_width_follows: bool  # value_head_dim is head_dim
    kv_heads_follow: bool  # multi-head attention stays multi-head


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Box:
    """The relaxed space: everything that a compiled program needs of it. Leaves float32."""

    base: Architecture
    ratio: jax.Array  # n_heads x head_dim / d_model of the base
    log_low: jax.Array  # [n_variables]
    log_high: jax.Array
    rules: Rules = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, eq=False)
class Space:
    """A base architecture, the variables that move, and what follows them."""

    base: Architecture
    variables: tuple[Variable, ...]
    rules: Rules
    ratio: float  # n_heads x head_dim / d_model of the base
    tensor_parallel: int
    expert_parallel: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the free variables."""
        return tuple(v.name for v in self.variables)

    @property
    def size(self) -> int:
        """Points of the grid, those that cannot be built included."""
        return math.prod(len(v.values) for v in self.variables)

    @property
    def box(self) -> Box:
        """The relaxed space."""
        low, high = zip(*(v.log_range for v in self.variables), strict=True)
        sizes: dict[str, Any] = {"ratio": self.ratio, "log_low": low, "log_high": high}
        leaves: dict[str, Any] = {name: np.float32(size) for name, size in sizes.items()}
        return Box(base=self.base, rules=self.rules, **leaves)


def canonical(name: str) -> str:
    """The field's name of a name or an alias such as `heads`.

    Raises:
        ValueError: not a field that can be free.
    """
    field = ALIASES.get(name, name)
    if field not in FREE_FIELDS:
        near = near_names(name, [*FREE_FIELDS, *ALIASES]) or list(FREE_FIELDS)
        raise ValueError(f"{shown(name)} cannot be free; it could be {', '.join(near)}.")
    return field


def _by_field(given: Mapping[str, Any] | None) -> dict[str, Any]:
    return {canonical(name): value for name, value in (given or {}).items()}


def make_space(
    base: Architecture,
    work: Workload,
    *,
    free: Sequence[str] | None = None,
    fix: Sequence[str] = (),
    ranges: Mapping[str, tuple[float, float]] | None = None,
    multiples: Mapping[str, float] | None = None,
    levels: Mapping[str, Sequence[float]] | None = None,
    tie: str | None = "auto",
) -> Space:
    """A checked search space.

    Args:
        base: where it starts; fields that are not free keep its values. Leaves of shape ().
        work: tells how many GPUs share the widths.
        free: names; by default widths, layers, KV heads and the sizes of experts.
        fix: names to take out of the default ones.
        ranges: (least, greatest) by name; by default a factor of two to either side of the base.
        multiples: steps of widths by name, over `MULTIPLES`.
        levels: whole ladders by name, instead of ranges and multiples.
        tie: "n_heads" or "head_dim" follows d_model, None lets heads and widths move apart. By
            default heads follow, unless both heads and head_dim are free.

    Raises:
        ValueError: unknown names, empty ladders, or nothing free.
    """
    ends, steps, ladders = (_by_field(given) for given in (ranges, multiples, levels))
    names = _free_names(base, free, fix, (*ends, *ladders))
    tie = _tie(base, names, tie)
    names = [name for name in names if name != tie]
    if not names:
        raise ValueError("Nothing is free: give at least one of " + ", ".join(FREE_FIELDS) + ".")
    gpus = _whole("tensor_parallel", work.tensor_parallel)
    groups = _whole("expert_parallel", work.expert_parallel)
    variables = []
    for name in names:
        if name in ladders:
            ladder = _given_levels(name, ladders[name])
        else:
            start = float(getattr(base, name))
            between = ends.get(name, (start / 2, start * 2))
            ladder = _ladder(name, between, steps.get(name), gpus)
        variables.append(Variable(name, ladder))
    same_width = float(base.value_head_dim) == float(base.head_dim)
    multi_head = float(base.n_kv_heads) == float(base.n_heads)
    rules = Rules(tuple(names), tie, same_width, multi_head and "n_kv_heads" not in names)
    ratio = float(base.n_heads) * float(base.head_dim) / float(base.d_model)
    found = Space(base, tuple(variables), rules, ratio, gpus, groups)
    return _only_divisors(found)


def _only_divisors(space: Space) -> Space:
    """KV heads that do not divide heads that stay as they are leave the ladder."""
    if space.rules.tie == "n_heads" or "n_heads" in space.names:
        return space
    heads = float(space.base.n_heads)
    variables = [
        Variable(v.name, tuple(x for x in v.values if heads % x == 0) or v.values)
        if v.name == "n_kv_heads"
        else v
        for v in space.variables
    ]
    return dataclasses.replace(space, variables=tuple(variables))


def space_from_json(content: Any, base: Architecture, work: Workload) -> Space:
    """A space from the parsed text of a space file.

    `{"base": ..., "free": {"d_model": {"range": [2048, 8192], "multiple": 128}, "n_kv_heads":
    {"values": [1, 2, 4, 8]}, "n_layers": {}}, "tie": "n_heads"}`; `base` is read by the caller.

    Raises:
        ValueError: another form, or as `make_space`.
    """
    allowed = {"base", "free", "tie"}
    unknown = sorted(set(content) - allowed)
    if unknown:
        raise ValueError(f"A space holds {', '.join(sorted(allowed))}; got {shown(unknown[0])}.")
    free = content.get("free")
    if not isinstance(free, Mapping) or not free:
        raise ValueError("A space needs `free`: an object of fields and their ranges.")
    picked: dict[str, dict[str, Any]] = {"range": {}, "multiple": {}, "values": {}}
    for name, entry in free.items():
        if not isinstance(entry, Mapping) or set(entry) - set(picked):
            raise ValueError(f"free.{canonical(name)} must be an object of {', '.join(picked)}.")
        for key, value in entry.items():
            picked[key][name] = value
    return make_space(
        base,
        work,
        free=tuple(free),
        ranges=picked["range"],
        multiples=picked["multiple"],
        levels=picked["values"],
        tie=content.get("tie", "auto"),
    )


def _free_names(base, free, fix, named) -> list[str]:
    mixture = float(base.n_experts) > 0
    if free is None:
        chosen = list(_MIXTURE if mixture else _DENSE)
        if mixture and float(base.moe_fraction) < 1:
            chosen.append("d_ff")
    else:
        chosen = [canonical(name) for name in free]
    chosen += [name for name in named if name not in chosen]
    for name in chosen:
        if not float(getattr(base, name)) > 0:
            raise ValueError(f"{name} is 0 in the base model and cannot be free.")
    if float(base.latent_attention) > 0 and "n_kv_heads" in chosen:
        if free is not None and "n_kv_heads" in map(canonical, free):
            raise ValueError("Latent attention has no KV heads of its own to be free.")
        chosen.remove("n_kv_heads")
    fixed = {canonical(name) for name in fix}
    return [name for name in dict.fromkeys(chosen) if name not in fixed]


def _tie(base, names, tie) -> str | None:
    if tie not in (None, "auto", *TIES):
        raise ValueError(f"tie must be one of {', '.join(TIES)} or nothing; got {shown(tie)}.")
    if float(base.latent_attention) > 0:
        return None  # its heads are not cut out of d_model
    if tie != "auto":
        return tie
    if "n_heads" in names:
        return None if "head_dim" in names else "head_dim"
    return "n_heads"


def _whole(name: str, value: Any) -> int:
    number = float(np.asarray(value))
    if number % 1:
        raise ValueError(f"{name} must be a whole number; got {number:g}.")
    return int(number)


def _given_levels(name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) == 0:
        raise ValueError(f"values of {name} must be a list of numbers.")
    _, _, greatest = ARCHITECTURE_FIELDS[name]
    found = sorted({checked_number(name, value, 1, greatest) for value in values})
    if any(value % 1 for value in found):
        raise ValueError(f"values of {name} must be whole numbers.")
    return tuple(found)


def _ladder(name, ends, multiple, gpus) -> tuple[float, ...]:
    _, _, greatest = ARCHITECTURE_FIELDS[name]
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        raise ValueError(f"range of {name} must be two numbers; got {shown(ends)}.")
    low, high = (checked_number(name, value, 1e-9, greatest) for value in ends)
    low = max(low, 1.0)
    if name in ("n_kv_heads", "experts_per_token"):
        step = 1.0
    else:
        many = 8 if name == "n_experts" and low >= 16 else 1
        given = MULTIPLES.get(name, many) if multiple is None else multiple
        step = checked_number(f"multiple of {name}", given, 1, greatest)
        if step % 1:
            raise ValueError(f"multiple of {name} must be a whole number; got {step:g}.")
    if name in ("d_ff", "n_heads"):
        step = math.lcm(int(step), gpus)
    first, last = math.ceil(low / step), math.floor(high / step)
    if first > last:
        raise ValueError(f"There is no multiple of {step:g} for {name} in {low:g} .. {high:g}.")
    if last - first >= _MAX_LEVELS:
        raise ValueError(
            f"{name} would have {last - first + 1} values; at most {_MAX_LEVELS} are searched: "
            "narrow its range or give a larger multiple."
        )
    return tuple(step * i for i in range(first, last + 1))


def architecture_fields(arch: Architecture) -> dict[str, float]:
    """All fields of one architecture as Python floats, for `types.architecture`."""
    return {f.name: float(np.asarray(getattr(arch, f.name))) for f in dataclasses.fields(arch)}


def base_from_fields(fields: Mapping[str, Any]) -> Architecture:
    """A base given by its fields in a space file.

    Raises:
        ValueError: as `types.architecture`.
    """
    return architecture(**fields)
