"""Designs of sweeps: row i of a grid, of random draws, or of a Latin hypercube, from i alone.

No row depends on another, so a sweep can start anywhere, in any order, on any machine, with no more
memory than the rows at hand. Random numbers are SplitMix64 hashes of (seed, field, row) (Steele et
al. 2014, Fast splittable pseudorandom number generators). The strata of a Latin hypercube of N rows
are a permutation of 0 .. N - 1 for each field: a four-round Feistel network on the next power of
four, walked until it falls below N (Black and Rogaway 2002, Ciphers with arbitrary finite domains).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hymell_jax.types import ARCHITECTURE_FIELDS, checked_number, near_names, shown

KINDS = ("grid", "random", "latin_hypercube")
WORKLOAD_RANGES = {
    "batch_size": (1, 1e7),
    "prompt_tokens": (1, 1e8),
    "output_tokens": (1, 1e8),
    "kv_bytes": (1, 2),
    "tensor_parallel": (1, 1024),
    "expert_parallel": (1, 4096),
}
MAX_ROWS = 10**10
LEAST = 1e-6
"""Of a step, and of a range that is divided in equal ratios."""

_FIELD_KEYS = {"values", "low", "high", "log", "multiple", "steps"}
_ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class Field:
    """What one field of a sweep may be: listed values, or a range in multiples of a step."""

    name: str
    values: tuple[float, ...] | None
    low: float
    high: float
    log: bool
    multiple: float

    def at(self, share: np.ndarray) -> np.ndarray:
        """Values at shares in [0, 1) of the range."""
        if self.values is not None:
            position = np.minimum((share * len(self.values)).astype(int), len(self.values) - 1)
            return np.asarray(self.values)[position]
        if self.log:
            value = self.low * np.exp(share * math.log(self.high / self.low))
        else:
            value = self.low + share * (self.high - self.low)
        if self.multiple:
            value = np.round(value / self.multiple) * self.multiple
            first = math.ceil(self.low / self.multiple) * self.multiple
            last = math.floor(self.high / self.multiple) * self.multiple
            value = np.clip(value, first, last)
        return value


@dataclasses.dataclass(frozen=True)
class Design:
    """A checked design; `rows` is its length."""

    kind: str
    fields: tuple[Field, ...]
    rows: int
    seed: int


def make_design(kind: Any, fields: Any, rows: Any = None, seed: Any = 0) -> Design:
    """A checked design.

    Args:
        kind: one of `KINDS`.
        fields: by name, a list of values, or {"low", "high", "log", "multiple"} (log by default,
            multiple 1 by default, 0 for any number); a grid takes "steps" of a range as well.
        rows: of a random design or a Latin hypercube; a grid has as many as its fields make.
        seed: whole number.

    Raises:
        ValueError: another form, unknown fields, values out of range, too many rows.
    """
    if kind not in KINDS:
        raise ValueError(f"design must be one of {', '.join(KINDS)}; got {shown(kind)}.")
    if not isinstance(fields, Mapping) or not fields:
        raise ValueError("A sweep needs `fields`: an object of fields and their values.")
    found = tuple(_field(name, entry, kind) for name, entry in fields.items())
    if kind == "grid":
        if rows is not None:
            raise ValueError("A grid has as many rows as its fields make; leave `rows` out.")
        count = math.prod(_lengths(found))
    else:
        count = int(_whole("rows", rows, 1, MAX_ROWS))
    if count > MAX_ROWS:
        raise ValueError(f"The grid has {count} rows; at most {MAX_ROWS} are swept.")
    return Design(kind, found, count, int(_whole("seed", seed, 0, 2**53)))


def _lengths(fields: tuple[Field, ...]) -> tuple[int, ...]:
    """Values of each field of a grid, which lists them all."""
    return tuple(len(f.values or ()) for f in fields)


def _whole(name: str, value: Any, low: float, high: float) -> float:
    number = checked_number(name, value, low, high)
    if number % 1:
        raise ValueError(f"{name} must be a whole number; got {shown(value)}.")
    return number


def range_of(name: str) -> tuple[float, float]:
    """(least, greatest) value of a field that can be swept.

    Raises:
        ValueError: no such field.
    """
    if name in ARCHITECTURE_FIELDS:
        return ARCHITECTURE_FIELDS[name][1:]
    if name in WORKLOAD_RANGES:
        return WORKLOAD_RANGES[name]
    near = near_names(name, [*ARCHITECTURE_FIELDS, *WORKLOAD_RANGES])
    hint = f" Did you mean {', '.join(near[:4])}?" if near else ""
    raise ValueError(f"A sweep has no field {shown(name)}.{hint}")


def _field(name: str, entry: Any, kind: str) -> Field:
    least, greatest = range_of(name)
    if isinstance(entry, list):
        entry = {"values": entry}
    if not isinstance(entry, Mapping) or set(entry) - _FIELD_KEYS:
        raise ValueError(f"fields.{name} must be a list, or an object of {sorted(_FIELD_KEYS)}.")
    if "values" in entry:
        values = entry["values"]
        if len(entry) > 1 or not isinstance(values, list) or not values:
            raise ValueError(f"fields.{name}.values must be a list of numbers, and stand alone.")
        numbers = tuple(checked_number(name, value, least, greatest) for value in values)
        return Field(name, numbers, 0.0, 0.0, False, 0.0)
    if "low" not in entry or "high" not in entry:
        raise ValueError(f"fields.{name} needs values, or low and high.")
    low, high = (checked_number(f"{name}.{k}", entry[k], least, greatest) for k in ("low", "high"))
    multiple = checked_number(f"{name}.multiple", entry.get("multiple", 1), 0, greatest)
    if 0 < multiple < LEAST:
        raise ValueError(f"{name}.multiple must be 0 or at least {LEAST:g}; got {multiple:g}.")
    log = entry.get("log", low >= LEAST)
    if not isinstance(log, bool) or (log and low < LEAST):
        raise ValueError(
            f"{name}.log must be true or false, and false where low is below {LEAST:g}."
        )
    if low > high or (multiple and math.ceil(low / multiple) > math.floor(high / multiple)):
        raise ValueError(f"{name} has nothing between {low:g} and {high:g}.")
    ranged = Field(name, None, low, high, log, multiple)
    if kind != "grid":
        if "steps" in entry:
            raise ValueError(f"{name}.steps is for grids.")
        return ranged
    if "steps" not in entry:
        raise ValueError(f"A grid needs values of {name}, or low, high and steps.")
    steps = int(_whole(f"{name}.steps", entry["steps"], 1, 1e6))
    # `at` is for shares below one; the last step is the upper end
    shares = np.arange(steps) / max(steps - 1, 1)
    values = tuple(dict.fromkeys(map(float, ranged.at(shares))))
    return Field(name, values, 0.0, 0.0, False, 0.0)


def design_rows(design: Design, start: int, stop: int) -> dict[str, np.ndarray]:
    """Columns of rows start .. stop, float64."""
    rows = np.arange(start, stop, dtype=np.uint64)
    if design.kind == "grid":
        shape = _lengths(design.fields)
        positions = np.unravel_index(rows.astype(np.int64), shape)
        return {
            f.name: np.asarray(f.values)[p] for f, p in zip(design.fields, positions, strict=True)
        }
    columns = {}
    for number, field in enumerate(design.fields):
        share = _uniform(design.seed, number, rows)
        if design.kind == "latin_hypercube":
            stratum = _permuted(rows, design.rows, _mix(design.seed, 1000 + number))
            share = np.minimum((stratum + share) / design.rows, 1.0 - 2.0**-53)
        columns[field.name] = field.at(share)
    return columns


def _splitmix(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _mix(seed: int, stream: int) -> np.uint64:
    return _splitmix(_splitmix(np.array([seed], np.uint64)) + np.uint64(stream))[0]


def _uniform(seed: int, stream: int, rows: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) of rows, float64."""
    with np.errstate(over="ignore"):
        bits = _splitmix(_splitmix(rows + _mix(seed, stream)))
    return (bits >> np.uint64(11)) * 2.0**-53


def _permuted(rows: np.ndarray, count: int, key: np.uint64) -> np.ndarray:
    """A permutation of 0 .. count - 1 at the given rows, float64."""
    half = np.uint64(max((max(count - 1, 1).bit_length() + 1) // 2, 1))
    mask = np.uint64(2 ** int(half) - 1)

    def shuffle(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for number in range(_ROUNDS):
            with np.errstate(over="ignore"):
                salt = _splitmix(right + key + np.uint64(number) * np.uint64(0x632BE59BD9B4E019))
            left, right = right, left ^ (salt & mask)
        return (left << half) | right

    found = shuffle(rows)
    while (outside := found >= count).any():
        found[outside] = shuffle(found[outside])
    return found.astype(float)
