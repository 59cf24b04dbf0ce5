"""Predictions of a table: one row a design, columns named after fields of model and workload."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from hymell_jax import designs, sharded
from hymell_jax.model import CostModel
from hymell_jax.quantities import check_quantity
from hymell_jax.sweep import DEFAULT_QUANTITIES
from hymell_jax.types import Architecture, Workload


def predict_table(
    model: CostModel,
    table: pd.DataFrame | str | os.PathLike[str],
    base: Architecture,
    work: Workload,
    quantities: Sequence[str] = DEFAULT_QUANTITIES,
) -> pd.DataFrame:
    """The table with a column for each quantity, in SI units.

    Args:
        model: of one device.
        table: a DataFrame, or a .parquet or .csv file; its columns are fields of `Architecture` or
            `Workload`, other columns are kept as they are.
        base, work: what the table does not say; leaves of shape ().
        quantities: names of `quantities.QUANTITIES`.

    Raises:
        ValueError: a file that cannot be read, no rows or no fields, values out of range, unknown
            quantities, or names that the table has already.
    """
    frame = table if isinstance(table, pd.DataFrame) else _read(table)
    taken = [check_quantity(name) for name in quantities if name in frame]
    if taken:
        raise ValueError(f"The table has a column {taken[0]!r} already.")
    own = {f.name for f in dataclasses.fields(Architecture)}
    known = [n for n in frame.columns if n in own or n in designs.WORKLOAD_RANGES]
    if not known or frame.empty:
        raise ValueError("The table needs rows, and a column that is a field such as d_model.")
    columns = {name: _column(name, frame[name]) for name in known}
    archs = dataclasses.replace(base, **{n: v for n, v in columns.items() if n in own})
    works = dataclasses.replace(work, **{n: v for n, v in columns.items() if n not in own})
    if {"prompt_tokens", "output_tokens"} & set(columns):
        works = dataclasses.replace(
            works,
            context_start_tokens=works.prompt_tokens,
            context_end_tokens=works.prompt_tokens + works.output_tokens,
        )
    values = sharded.measure_sharded(model, archs, works, tuple(map(check_quantity, quantities)))
    found = pd.DataFrame(values, columns=list(quantities), index=frame.index)
    return pd.concat([frame, found], axis=1)


def _read(path: Any) -> pd.DataFrame:
    read = pd.read_parquet if str(path).endswith(".parquet") else pd.read_csv
    try:
        return read(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"The table {str(path)!r} cannot be read: {error}.") from None


def _column(name: str, column: pd.Series) -> np.ndarray:
    least, greatest = designs.range_of(name)
    try:
        values = column.to_numpy(np.float32)
    except (TypeError, ValueError):
        raise ValueError(f"Column {name} must hold numbers.") from None
    if not ((values >= least) & (values <= greatest)).all():
        raise ValueError(f"Column {name} must lie between {least:g} and {greatest:g}.")
    return values
