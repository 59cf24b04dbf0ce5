"""Predictions of a table: one row a design, columns named after fields of model and workload."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hymell_jax import data, designs, sharded
from hymell_jax import model as cost_model
from hymell_jax.files import check_regular
from hymell_jax.model import CostModel
from hymell_jax.quantities import broadcast_rows, check_known, check_quantity, is_known
from hymell_jax.sweep import DEFAULT_QUANTITIES, legal_rows
from hymell_jax.types import Architecture, Workload, reason, shown


def predict_table(
    model: CostModel,
    table: pd.DataFrame | str | os.PathLike[str],
    base: Architecture,
    work: Workload,
    quantities: Sequence[str] | None = None,
) -> pd.DataFrame:
    """The table with a column for each quantity, in SI units.

    Args:
        model: of one device.
        table: a DataFrame, or a .parquet or .csv file; its columns are fields of `Architecture` or
            `Workload`, other columns are kept as they are.
        base, work: what the table does not say; leaves of shape ().
        quantities: names of `quantities.QUANTITIES`; by default `sweep.DEFAULT_QUANTITIES` as far
            as they are known of the device.

    Raises:
        ValueError: a file that cannot be read, no rows or no fields, values out of range, rows that
            cannot be built, unknown quantities, or names that the table has already.
    """
    frame = table if isinstance(table, pd.DataFrame) else _read(table)
    if quantities is None:
        quantities = [name for name in DEFAULT_QUANTITIES if is_known(name, model)]
    twice = frame.columns[frame.columns.duplicated()]
    taken = [check_quantity(name) for name in quantities if name in frame]
    for name in (*twice, *taken):
        raise ValueError(f"The table has a column {shown(name)} already.")
    own = {f.name for f in dataclasses.fields(Architecture)}
    known = [n for n in frame.columns if n in own or n in designs.WORKLOAD_RANGES]
    if not known or frame.empty:
        raise ValueError("The table needs rows, and a column that is a field such as d_model.")
    columns: dict[str, Any] = {name: _column(name, frame[name]) for name in known}
    archs = dataclasses.replace(base, **{n: v for n, v in columns.items() if n in own})
    works = dataclasses.replace(work, **{n: v for n, v in columns.items() if n not in own})
    if {"prompt_tokens", "output_tokens"} & set(columns):
        works = dataclasses.replace(
            works,
            context_start_tokens=works.prompt_tokens,
            context_end_tokens=works.prompt_tokens + works.output_tokens,
        )
    cost_model._check(model, archs, works)
    _check_rows(legal_rows(*broadcast_rows(archs, works)[1]), "cannot be built: KV heads divide "
                "the heads, and GPUs too; a token visits at most all experts")  # fmt: skip
    values = sharded.measure_sharded(
        model, archs, works, tuple(check_known(name, model) for name in quantities)
    )
    _check_rows(np.isfinite(values).all(-1), "is beyond float32: reduce its sizes")
    found = pd.DataFrame(values, columns=list(quantities), index=frame.index)
    return pd.concat([frame, found], axis=1)


def _check_rows(good: np.ndarray, problem: str) -> None:
    if not good.all():
        raise ValueError(f"Row {int(np.argmin(good))} of the table, from 0, {problem}.")


def _read(path: Any) -> pd.DataFrame:
    """A local file, never an address."""
    try:
        place = Path(path)
        check_regular(place, "file")
        return (pd.read_parquet if place.suffix == ".parquet" else pd.read_csv)(place)
    except Exception as error:  # readers of files raise errors of many libraries
        raise ValueError(f"The table {shown(str(path))} cannot be read: {reason(error)}.") from None


def _column(name: str, column: pd.Series) -> np.ndarray:
    least, greatest = designs.range_of(name)
    numbers = data.numbers(column)
    if np.isnan(numbers).all():
        raise ValueError(f"Column {name} must hold numbers.")
    with np.errstate(over="ignore"):
        values = numbers.astype(np.float32)
    if not ((values >= least) & (values <= greatest)).all():
        raise ValueError(f"Column {name} must lie between {least:g} and {greatest:g}.")
    return values
