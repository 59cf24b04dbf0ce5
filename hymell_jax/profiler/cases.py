"""One thing to measure: its table, its sizes, what it costs, and whether it is held out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from hymell_jax.profiler import schema

Sizes = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of a table before it is measured."""

    table: str
    sizes: Sizes  # the table's own columns
    split: str  # "train" or "test"
    flops: float  # of one call, rough
    bytes_moved: float  # of one call, rough
    bytes_held: float  # memory that measuring needs, rough
    metered: bool = False  # energy is wanted where there is a meter

    @property
    def level(self) -> int:
        """1 operators, 2 blocks, 3 whole models."""
        return schema.level_of(self.table)

    @property
    def key(self) -> str:
        """Same key, same case: what a resumed run recognises."""
        return case_key(self.table, self.sizes)

    def title(self) -> str:
        """Short text for messages."""
        shown = " ".join(f"{k}={v}" for k, v in self.sizes.items() if v is not None)
        return f"{self.table} {shown}"[:160]


def case_key(table: str, sizes: Sizes) -> str:
    """The canonical text of a table and its own columns."""
    own = {name: sizes.get(name) for name in schema.TABLES[table]}
    return json.dumps([table, own], sort_keys=True, separators=(",", ":"))


HELD_OUT_SHARE = 0.25
SALT = 1681  # of the draws tried, the one whose share is nearest to a quarter in every table


def split_of(*group: Any) -> str:
    """Whether a group is for "train" or "test": by a hash, the same in every plan and run."""
    digest = hashlib.sha256(f"{SALT} {json.dumps(group)}".encode()).digest()
    return "test" if int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32 else "train"
