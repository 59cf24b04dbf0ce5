"""Weights on disk: what goes in comes out, and what was tampered with does not."""

from __future__ import annotations

import dataclasses
import io
import zipfile

import jax
import numpy as np
import pytest

from hymell_jax import arrays, block_store, blocks, linear, mlp

TREE = {
    "blocks": {
        "experts": {"params": {"kernel": np.arange(6.0).reshape(2, 3)}, "bias": np.float32(0.1)},
        "linear": {"scale": np.array([1e-30, -3.5, 1e6])},
    }
}


def _npz(**named) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **named)
    return stream.getvalue()


def test_a_tree_survives_exactly():
    again = arrays.unpack(arrays.pack(TREE), "file")
    assert jax.tree.structure(again) == jax.tree.structure(TREE)
    for one, two in zip(jax.tree.leaves(TREE), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.float32(one), two)
        assert two.dtype == np.float32


def test_the_same_tree_gives_the_same_bytes():
    other = {"blocks": dict(reversed(TREE["blocks"].items()))}
    assert arrays.pack(TREE) == arrays.pack(other)


def test_names_with_slashes_are_refused():
    with pytest.raises(ValueError, match="slash|'/'"):
        arrays.pack({"../x": np.zeros(1)})


def test_a_file_is_read_by_its_hash(tmp_path):
    content = arrays.pack(TREE)
    path = tmp_path / "weights.npz"
    path.write_bytes(content)
    assert set(arrays.read(path, arrays.digest(content), "file")) == {"blocks"}
    with pytest.raises(ValueError, match="damaged"):
        arrays.read(path, "0" * 64, "file")


@pytest.mark.parametrize("place", [0, 40, -200, -1])
def test_one_flipped_byte_is_noticed(tmp_path, place):
    content = bytearray(arrays.pack(TREE))
    digest = arrays.digest(bytes(content))
    content[place] ^= 1
    path = tmp_path / "weights.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        arrays.read(path, digest, "file")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="Arrays 'x' cannot be read"):
        arrays.read(tmp_path / "none.npz", "0" * 64, "Arrays 'x'")


def test_too_large_a_file_is_not_read(tmp_path, monkeypatch):
    content = arrays.pack(TREE)
    path = tmp_path / "weights.npz"
    path.write_bytes(content)
    monkeypatch.setattr(arrays, "MAX_BYTES", len(content) - 1)
    with pytest.raises(ValueError, match="larger than"):
        arrays.read(path, arrays.digest(content), "file")


def test_what_unpacks_to_too_much_is_refused():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", bytes(arrays.MAX_BYTES + 1))
    assert len(stream.getvalue()) < arrays.MAX_BYTES / 100
    with pytest.raises(ValueError, match="more than"):
        arrays.unpack(stream.getvalue(), "file")


@pytest.mark.parametrize("content", [b"", b"not a zip", arrays.pack(TREE)[:200]])
def test_other_bytes_are_no_file_of_arrays(content):
    with pytest.raises(ValueError, match="not a file of arrays"):
        arrays.unpack(content, "file")


def test_pickled_objects_are_refused():
    poisoned = _npz(x=np.array([print], dtype=object))
    with pytest.raises(ValueError, match=r"pickle|float32|Object"):
        arrays.unpack(poisoned, "file")


@pytest.mark.parametrize(
    "bad",
    [np.zeros(2), np.zeros(2, np.int64), np.array(["x"]), np.zeros((1,) * 5, np.float32)],
    ids=["float64", "int64", "text", "five axes"],
)
def test_only_float32_arrays_of_few_axes_are_taken(bad):
    with pytest.raises(ValueError, match="float32 array of at most 4 axes"):
        arrays.unpack(_npz(x=bad), "file")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e6])
def test_numbers_beyond_reason_are_refused(bad):
    with pytest.raises(ValueError, match="beyond 1e\\+06"):
        arrays.unpack(_npz(x=np.array([0.0, bad], np.float32)), "file")


def test_a_name_cannot_be_an_array_and_a_group():
    one = np.zeros(1, np.float32)
    for names in (("a", "a/b"), ("a/b", "a")):
        with pytest.raises(ValueError, match="both|twice"):
            arrays.unpack(_npz(**{name: one for name in names}), "file")


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "C:\\x"])
def test_paths_in_a_file_stay_names(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    tree = arrays.unpack(_npz(**{name: np.ones(1, np.float32)}), "file")
    node = tree
    for part in name.split("/"):
        node = node[part]
    assert float(node[0]) == 1.0
    assert not list(tmp_path.iterdir())


SPEC = mlp.MLPSpec((6, 6), bound=0.5, n_monotone=2, embedding=5)


def _fitted(name="linear_rule_decode"):
    features, n_monotone = blocks.feature_names(name)
    spec = dataclasses.replace(SPEC, n_monotone=n_monotone)
    params = jax.tree.map(np.asarray, dict(mlp.init_ensemble(spec, len(features), (0, 1))))
    ones = np.ones(len(features), np.float32)
    return {
        "coefficients": {k: np.float32(v) for k, v in linear.DEFAULT_COEFFICIENTS.items()},
        "params": params,
        "normalizer": mlp.Normalizer(mean=ones, std=ones, low=-ones, high=ones),
        "spec": spec,
        "rows_train": 3,
        "errors": [],
    }


@pytest.fixture
def stored():
    """({name: entry}, {name: arrays}) of one block."""
    entry, tree = block_store.to_plain(_fitted())
    return {"linear_rule_decode": entry}, {"linear_rule_decode": tree}


def test_a_block_survives_the_store(stored):
    entries, trees = stored
    block = block_store.from_plain(entries, trees, "blocks")["linear_rule_decode"]
    fitted = _fitted()
    assert block.spec == fitted["spec"]
    assert block.coefficients == fitted["coefficients"]
    jax.tree.map(np.testing.assert_array_equal, block.params, fitted["params"])
    np.testing.assert_array_equal(block.normalizer.std, fitted["normalizer"].std)
    assert entries["linear_rule_decode"]["rows_train"] == 3


def _changed(tree, path, value):
    """A copy of nested dicts with one entry replaced, or removed where the value is None."""
    copy = {k: _changed(v, (), None) if isinstance(v, dict) else v for k, v in tree.items()}
    if path:
        node = copy
        for key in path[:-1]:
            node = node[key]
        node.pop(path[-1], None) if value is None else node.update({path[-1]: value})
    return copy


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("network", "hidden"), [6, 7], "multiples|shapes"),
        (("network", "hidden"), [6], "shapes"),
        (("network", "hidden"), [6] * 9, "whole numbers"),
        (("network", "hidden"), [4096, 6], "whole numbers"),
        (("network", "hidden"), [True, 6], "whole numbers"),
        (("network", "hidden"), "66", "whole numbers"),
        (("network", "n_monotone"), 1.5, "whole number"),
        (("network", "n_monotone"), 1, "shapes"),
        (("network", "bound"), "1", "number"),
        (("network", "bound"), 1e9, "bound"),
        (("network", "activation"), "eval", "activation"),
        (("network", "extra"), 1, "must have"),
        (("network",), None, "must have"),
        (("coefficients", "log_chain_s"), None, "coefficients must be"),
        (("coefficients", "extra"), 1.0, "coefficients must be"),
        (("coefficients", "log_chain_s"), 1e9, "within"),
        (("coefficients", "log_chain_s"), float("nan"), "within"),
        (("coefficients", "log_chain_s"), "1", "within"),
    ],
)
def test_settings_that_do_not_fit_are_named(stored, path, value, message):
    entries, trees = stored
    changed = _changed(entries, ("linear_rule_decode", *path), value)
    with pytest.raises(ValueError, match=message):
        block_store.from_plain(changed, trees, "blocks")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("normalizer", "std"), np.zeros(3, np.float32), "normaliser"),
        (("normalizer", "low"), None, "normaliser"),
        (("normalizer",), None, "no arrays"),
        (("params", "monotone_0"), np.zeros((2, 3, 6), np.float32), "shapes"),
        (("params", "monotone_0"), None, "shapes"),
        (("params",), {}, "networks"),
    ],
)
def test_arrays_that_do_not_fit_are_named(stored, path, value, message):
    entries, trees = stored
    changed = _changed(trees, ("linear_rule_decode", *path), value)
    with pytest.raises(ValueError, match=message):
        block_store.from_plain(entries, changed, "blocks")


def test_a_standard_deviation_of_zero_is_refused(stored):
    entries, trees = stored
    std = np.array(trees["linear_rule_decode"]["normalizer"]["std"])
    std[0] = 0.0
    changed = _changed(trees, ("linear_rule_decode", "normalizer", "std"), std)
    with pytest.raises(ValueError, match="positive"):
        block_store.from_plain(entries, changed, "blocks")


def test_unknown_blocks_and_missing_arrays_are_named(stored):
    entries, trees = stored
    with pytest.raises(ValueError, match="sparse"):
        block_store.from_plain({"sparse": entries["linear_rule_decode"]}, trees, "blocks")
    with pytest.raises(ValueError, match="no arrays"):
        block_store.from_plain(entries, {}, "blocks")
    with pytest.raises(ValueError, match="object"):
        block_store.from_plain([], trees, "blocks")
