"""Blocks as a checkpoint holds them: settings in its JSON, weights in its arrays file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from hymell_jax import blocks, mlp

SPEC_FIELDS = tuple(field.name for field in dataclasses.fields(mlp.MLPSpec))
NORMALIZER_FIELDS = tuple(field.name for field in dataclasses.fields(mlp.Normalizer))
LARGEST = 80.0  # of a level-1 coefficient, a natural log
MAX_WIDTH, MAX_LAYERS, MAX_MEMBERS = 1024, 8, 64


def to_plain(fitted: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(JSON entry, tree of arrays) of one fitted block."""
    entry = {
        "coefficients": {n: float(str(np.float32(v))) for n, v in fitted["coefficients"].items()},
        "network": spec_to_plain(fitted["spec"]),
        **{k: fitted[k] for k in ("rows_train", "rows_test", "errors", "origin") if k in fitted},
    }
    return entry, network_arrays(fitted["params"], fitted["normalizer"])


def spec_to_plain(spec: mlp.MLPSpec) -> dict[str, Any]:
    """The fields of a network's shape as JSON values."""
    plain = dataclasses.asdict(spec)
    return {**plain, "hidden": list(spec.hidden)}


def network_arrays(params: mlp.Params, normalizer: mlp.Normalizer) -> dict[str, Any]:
    """Weights and normaliser as one tree of arrays."""
    return {
        "params": jax.tree.map(np.asarray, params),
        "normalizer": {name: np.asarray(getattr(normalizer, name)) for name in NORMALIZER_FIELDS},
    }


def from_plain(entries: Any, arrays: Mapping[str, Any], where: str) -> dict[str, blocks.Block]:
    """Checked blocks by name.

    Raises:
        ValueError: an unknown block, or settings and arrays that do not belong together.
    """
    if not isinstance(entries, Mapping) or not isinstance(arrays, Mapping):
        raise ValueError(f"{where} must be an object, with arrays for each block.")
    found = {}
    for name, entry in entries.items():
        try:
            features, _ = blocks.feature_names(name)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        here = f"{where}.{name}"
        if not isinstance(entry, Mapping):
            raise ValueError(f"{here} must be an object.")
        spec, params, normalizer = read_network(
            entry.get("network"), arrays.get(name), len(features), here
        )
        found[name] = blocks.Block(
            coefficients=_coefficients(entry.get("coefficients"), blocks.level1_names(name), here),
            params=params,
            normalizer=normalizer,
            spec=spec,
        )
    return found


def to_fitted(entry: Mapping[str, Any], block: blocks.Block) -> dict[str, Any]:
    """A block read from a checkpoint in the form that `to_plain` takes."""
    known = {key: value for key, value in entry.items() if key != "network"}
    fields = ("coefficients", "spec", "params", "normalizer")
    return {**known, **{field: getattr(block, field) for field in fields}}


def _coefficients(given: Any, names: tuple[str, ...], where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping) or sorted(given) != sorted(names):
        raise ValueError(f"{where}.coefficients must be {', '.join(names) or 'empty'}.")
    for name, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) <= LARGEST:
            raise ValueError(f"{where}.coefficients.{name} must be within +-{LARGEST:g}.")
    return {name: np.float32(given[name]) for name in names}


def read_network(
    settings: Any, arrays: Any, n_features: int, where: str
) -> tuple[mlp.MLPSpec, mlp.Params, mlp.Normalizer]:
    """A network whose arrays have the shapes that its settings ask for.

    Raises:
        ValueError: anything missing, unknown, too large or of another shape.
    """
    if not isinstance(settings, Mapping) or sorted(settings) != sorted(SPEC_FIELDS):
        raise ValueError(f"{where}.network must have {', '.join(SPEC_FIELDS)}.")
    spec = _spec(settings, where)
    if not isinstance(arrays, Mapping) or sorted(arrays) != ["normalizer", "params"]:
        raise ValueError(f"{where} has no arrays.")
    if not all(isinstance(group, Mapping) for group in arrays.values()):
        raise ValueError(f"{where}: params and normalizer must be groups of arrays.")
    normalizer, params = arrays["normalizer"], arrays["params"]
    if spec.n_monotone > n_features:
        raise ValueError(f"{where}: n_monotone must be at most {n_features}.")
    shapes = {name: np.shape(normalizer.get(name)) for name in NORMALIZER_FIELDS}
    if set(normalizer) != set(NORMALIZER_FIELDS) or set(shapes.values()) != {(n_features,)}:
        raise ValueError(f"{where}: its normaliser must hold {n_features} features.")
    if not (np.asarray(normalizer["std"]) > 0).all():
        raise ValueError(f"{where}: a standard deviation must be positive.")
    leaves = jax.tree.leaves(params)
    members = np.shape(leaves[0])[0] if leaves and np.ndim(leaves[0]) else 0
    if not 1 <= members <= MAX_MEMBERS:
        raise ValueError(f"{where} must have 1 to {MAX_MEMBERS} networks.")
    if mlp.ensemble_shapes(spec, n_features, members) != jax.tree.map(np.shape, params):
        raise ValueError(f"{where}: the weights do not have the shapes of its network.")
    return spec, params, mlp.Normalizer(**normalizer)


def _spec(settings: Mapping[str, Any], where: str) -> mlp.MLPSpec:
    hidden = settings["hidden"]
    whole = isinstance(hidden, list) and len(hidden) <= MAX_LAYERS
    counts = [*hidden, settings["embedding"]] if whole else []
    if not counts or not all(
        isinstance(w, int) and not isinstance(w, bool) and 0 < w <= MAX_WIDTH for w in counts
    ):
        raise ValueError(f"{where}.network: widths must be whole numbers up to {MAX_WIDTH}.")
    if not isinstance(settings["n_monotone"], int) or isinstance(settings["n_monotone"], bool):
        raise ValueError(f"{where}.network: n_monotone must be a whole number.")
    bound = settings["bound"]
    number = isinstance(bound, int | float) and not isinstance(bound, bool)
    if not number or not -math.inf < bound < math.inf:
        raise ValueError(f"{where}.network: bound must be a number.")
    if settings["activation"] not in list(mlp.ACTIVATIONS):
        known = ", ".join(mlp.ACTIVATIONS)
        raise ValueError(f"{where}.network: activation must be one of {known}.")
    try:
        return mlp.MLPSpec(**{**settings, "hidden": tuple(hidden)})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}.network: {error}") from None
