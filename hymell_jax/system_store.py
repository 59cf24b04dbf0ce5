"""Level 3 on disk: `systems/level3.json` with its weights in `systems/level3.npz`, for all devices.

One file serves every checkpoint, because its networks and the host terms of an engine are shared by
all devices (`hymell_jax.engines` picks what belongs to one). A device whose engine was measured on
it alone has a file of its own, `<device>/level3.json`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from hymell_jax import arrays, block_store, serving
from hymell_jax.files import read_json

FORMAT_VERSION = 1
FOLDER, STEM = "systems", "level3"
LARGEST = 80.0  # of a coefficient, a natural log
TARGETS = ("time", "energy")
WIDTHS = ("16 bits", "quantised")
COEFFICIENTS = tuple(serving.ENGINE_COEFFICIENTS | serving.ENERGY_COEFFICIENTS)


def file_of(folder: str | os.PathLike[str], device: str = FOLDER) -> Path:
    """Path of level 3 in a folder of checkpoints: of all devices, or of one alone."""
    return Path(folder) / device / f"{STEM}.json"


def save(content: Mapping[str, Any], folder: str | os.PathLike[str], device: str = FOLDER) -> Path:
    """Write level 3 as `system_recipes.fit_level3` returns it, whole or not at all.

    Args:
        content: of `fit_level3`.
        folder: of checkpoints.
        device: whose alone it is; by default that of all.

    Raises:
        ValueError: the folder cannot be written.
    """
    path = file_of(folder, device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"The folder {str(path.parent)!r} cannot be made: {error}.") from error
    packed, name = arrays.pack(content["network"]), arrays.free_name(path)
    plain = {
        "format_version": FORMAT_VERSION,
        **{key: content[key] for key in ("engines", "transferred", "card")},
        "network": block_store.spec_to_plain(serving.NETWORK),
        "arrays": {"file": name, "sha256": arrays.digest(packed)},
    }
    text = json.dumps(_rounded(plain), indent=1, allow_nan=False)
    arrays.write_pair(path, text + "\n", packed, name)
    return path


def _rounded(tree: Any) -> Any:
    """Numbers of NumPy as Python's; float32 by its shortest text."""
    if isinstance(tree, Mapping):
        return {str(key): _rounded(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_rounded(value) for value in tree]
    if isinstance(tree, np.floating | np.ndarray):
        return float(str(np.float32(tree)))
    return int(tree) if isinstance(tree, np.integer) else tree


def load(folder: str | os.PathLike[str], device: str = FOLDER) -> dict[str, Any] | None:
    """Level 3 as `engines.terms_for` and `engines.networks_of` take it; None where there is none.

    Raises:
        ValueError: damaged, of another version, or with numbers out of range.
    """
    path = file_of(folder, device)
    if not path.is_file():
        return None
    where = f"Level 3 {path.name!r}"
    content = read_json(path, where)
    if not isinstance(content, dict) or content.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{where} is not of format_version {FORMAT_VERSION}.")
    if content.get("network") != block_store.spec_to_plain(serving.NETWORK):
        raise ValueError(f"{where}: its network is not the one of this version of the package.")
    file, sha256 = arrays.checked_file(content.get("arrays"), path, where)
    tree = arrays.read(file, sha256, f"{where}: arrays")
    for target in TARGETS:
        block_store.read_network(
            content["network"], tree.get(target), len(serving.FEATURES), f"{where}: {target}"
        )
    card = content.get("card")
    if not isinstance(card, Mapping) or not isinstance(card.get("sources"), list):
        raise ValueError(f"{where}: its card must list its sources.")
    _check_engines(content.get("engines"), where)
    _check_widths(content.get("transferred"), f"{where}: transferred")
    return {**content, "network": tree}


def _check_engines(engines: Any, where: str) -> None:
    if not isinstance(engines, Mapping) or not engines:
        raise ValueError(f"{where}: engines must be an object.")
    for engine, entry in engines.items():
        here = f"{where}: {engine}"
        machines, quantiles = (
            entry.get(field) if isinstance(entry, Mapping) else None
            for field in ("machines", "quantiles")
        )
        if not isinstance(machines, Mapping) or not isinstance(quantiles, Mapping) or not machines:
            raise ValueError(f"{here} must hold machines and quantiles.")
        for machine, terms in machines.items():
            full = {**serving.ABSENT, **terms} if isinstance(terms, Mapping) else {}
            for name in COEFFICIENTS:
                value = full.get(name)
                if not _number(value) or abs(value) > LARGEST:
                    raise ValueError(f"{here}, {machine}: {name} must be within +-{LARGEST:g}.")
            _check_widths(quantiles.get(machine), f"{here}, {machine}")


def _check_widths(given: Any, where: str) -> None:
    for width in WIDTHS:
        row = given.get(width) if isinstance(given, Mapping) else None
        for target in TARGETS:
            value = row.get(target) if isinstance(row, Mapping) else None
            if not _number(value) or not 0 < value < 1e4:
                raise ValueError(f"{where}: the quantile of {width} {target} must be positive.")


def _number(value: Any) -> TypeGuard[float]:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and -math.inf < value < math.inf
