"""Predictions do not move unnoticed."""

from __future__ import annotations

import json
from pathlib import Path

import golden
import numpy as np

import hymell_jax as hj

PINNED = json.loads(golden.FILE.read_text())
ROUNDING = 2e-4  # of float32 through some hundred operations, in whatever order XLA takes them


def test_every_prediction_is_the_pinned_one():
    found = golden.compute()
    assert list(found) == list(PINNED["rows"]) and len(found) == 25 * 5 * 4
    moved = {
        key: [f"{old:.5g} -> {new:.5g}" for old, new in zip(PINNED["rows"][key], row, strict=True)]
        for key, row in found.items()
        if not np.allclose(row, PINNED["rows"][key], rtol=ROUNDING)
    }
    assert not moved, f"{len(moved)} predictions moved, such as {next(iter(moved.items()))}"


def test_they_are_of_this_version_and_the_changelog_knows_it():
    assert PINNED["version"] == hj.__version__
    changes = (Path(__file__).parent.parent / "CHANGELOG.md").read_text()
    assert f"\n## {hj.__version__}\n" in changes


def test_they_differ_from_one_another_and_are_finite():
    rows = np.array(list(PINNED["rows"].values()))
    assert np.isfinite(rows).all() and (rows[:, :5] > 0).all()
    assert len(np.unique(rows[:, 1])) == len(rows)
