"""Devices, checkpoints, arrays and level 3 from files that others wrote, whole or damaged."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import struct
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from fuzzing import (
    answered,
    cases,
    clear,
    damaged,
    edited,
    edits,
    odd_values,
    random_edits,
    seeds,
)  # fmt: skip
from hypothesis import given, note
from hypothesis import strategies as st

import hymell_jax as hj
from hymell_jax import arrays, block_store, checkpoint, devices, engines, mlp, summary, system_store

SHIPPED = checkpoint.shipped_folder()
SOURCE = SHIPPED / "l40s-48gb" / "vllm-0.24.0--bf16.json"


# Devices -----------------------------------------------------------------------------------------

SHEET = {
    name: float(getattr(devices.get_device("l40s-48gb").device, name)) for name in devices.UNITS
}
PLAIN = {"name": "mine", "architecture": "ada", "title": "Mine", "extras": {"a": 1}} | SHEET
RICH = {
    "name": "mine",
    "fields": {
        name: {"value": value, "unit": devices.UNITS[name][0], "source": "sheet"}
        for name, value in SHEET.items()
    },
    "extras": {"memory_type": {"value": "GDDR6", "source": "sheet"}},
}
DEVICE_PATHS = [
    *PLAIN, *(f"fields.{name}" for name in SHEET), *(f"fields.{name}.value" for name in SHEET),
    *(f"fields.{name}.unit" for name in SHEET), "fields", "extras.memory_type", "notes", "\x1b",
]  # fmt: skip


@cases(500)
@given(st.sampled_from([PLAIN, RICH]), edits(DEVICE_PATHS, 2), seeds)
def test_descriptions_of_devices_are_plausible_or_refused(base, changes, seed):
    rng = random.Random(seed)
    for some in (changes, *(random_edits(rng, DEVICE_PATHS, 2) for _ in range(5))):
        note(repr(some))
        spec = answered(lambda c=some: devices.get_device(edited(base, c)))
        if spec is None:
            continue
        for name, (_, least, greatest) in devices.UNITS.items():
            value = float(getattr(spec.device, name))
            assert least * 0.999 <= value <= greatest * 1.001
        clear(f"{spec.name} {spec.architecture} {spec.title}.")


@cases(100)
@given(seeds)
def test_damaged_device_files_are_plausible_or_refused(folder, seed):
    path = folder / "device.json"
    for number in range(seed, seed + 5):
        path.write_bytes(damaged(json.dumps(RICH).encode(), number))
        spec = answered(lambda: devices.get_device(path))
        if spec is not None:
            assert all(np.isfinite(leaf) and leaf > 0 for leaf in jax.tree.leaves(spec.device))


@cases(400)
@given(odd_values() | st.text(max_size=400))
def test_whatever_is_asked_for_is_no_device(name):
    if name != "/etc/passwd.json":
        assert answered(lambda: checkpoint.device_spec(name)) is None


# Checkpoints -------------------------------------------------------------------------------------


def _small() -> dict:
    """A shipped checkpoint without networks and tables of errors, so that it reads quickly."""
    content = json.loads(SOURCE.read_text())
    return {k: v for k, v in content.items() if k not in ("blocks", "arrays", "errors", "replay")}


SMALL = _small()
CHECKPOINT_PATHS = [
    *SMALL, "level", "metered", "energy_note", "blocks", "arrays", "device_file", "engine",
    *(f"coefficients.{group}" for group in SMALL["coefficients"]),
    *(f"coefficients.{group}.{name}" for group, entry in SMALL["coefficients"].items()
      for name in entry),
    *(f"coefficients.stream.rope.{name}" for name in SMALL["coefficients"]["stream"]["rope"]),
    *(f"domain.{name}" for name in SMALL["domain"]), "domain.extra",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


def usable(model: hj.CostModel) -> None:
    """All leaves are finite float32, and what the model says of itself can be shown."""
    for leaf in jax.tree.leaves(model):
        assert np.asarray(leaf).dtype == np.float32 and np.isfinite(leaf).all()
    said = summary.warnings_of(model, hj.preset("gpt2"), _PREDICTION)
    for sentence in said:
        clear(sentence)


class _Prediction:
    """As far as warnings look at one."""

    domain_distance = np.float32(0)
    domain_distances = np.zeros(3, np.float32)

    class memory:  # noqa: N801
        fits = True


_PREDICTION = _Prediction()


@cases(800)
@given(edits(CHECKPOINT_PATHS, 2))
def test_changed_checkpoints_are_usable_or_refused(folder, changes):
    path = folder / SOURCE.name
    path.write_text(json.dumps(edited(SMALL, changes)))
    model = answered(lambda: hj.load_file(path))
    if model is not None:
        usable(model)


@cases(300)
@given(seeds)
def test_damaged_checkpoints_are_usable_or_refused(folder, seed):
    path = folder / SOURCE.name
    path.write_bytes(damaged(json.dumps(SMALL).encode(), seed))
    model = answered(lambda: hj.load_file(path))
    if model is not None:
        usable(model)


@pytest.fixture
def own_folder(tmp_path):
    """A folder of checkpoints with one device, its networks and level 3."""
    (tmp_path / "l40s-48gb").mkdir()
    for path in (SOURCE, SOURCE.with_suffix(".npz")):
        shutil.copy(path, tmp_path / "l40s-48gb" / path.name)
    shutil.copytree(SHIPPED / "systems", tmp_path / "systems")
    return tmp_path


@pytest.mark.parametrize("place", ["l40s-48gb/vllm-0.24.0--bf16.npz", "systems/level3.npz"])
@pytest.mark.parametrize("damage", ["cut", "flip", "other", "missing", "pipe", "folder"])
def test_damaged_weights_are_noticed(own_folder, place, damage):
    path = own_folder / place
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[len(content) // 3] ^= 1
        path.write_bytes(content)
    elif damage == "other":
        path.write_bytes(next(SHIPPED.glob("b200*/*.npz")).read_bytes())
    elif damage == "pipe":
        os.mkfifo(path)
    elif damage == "folder":
        path.mkdir()
    assert answered(lambda: hj.load("l40s-48gb", folder=own_folder)) is None


@pytest.mark.parametrize(
    "record",
    [
        {"file": "../systems/level3.npz"},
        {"file": "/etc/passwd"},
        {"file": None},
        {"sha256": "0" * 64},
        {"sha256": None},
        {"sha256": ["x"]},
    ],
)
def test_weights_are_taken_from_beside_the_checkpoint_only(own_folder, record):
    path = own_folder / "l40s-48gb" / SOURCE.name
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"arrays": content["arrays"] | record}))
    assert answered(lambda: hj.load("l40s-48gb", folder=own_folder)) is None


def test_weights_of_another_checkpoint_are_refused(own_folder):
    other = json.loads((SHIPPED / "l40s-48gb" / "vllm-0.24.0--fp8.json").read_text())
    path = own_folder / "l40s-48gb" / SOURCE.name
    path.write_text(json.dumps(json.loads(path.read_text()) | {"arrays": other["arrays"]}))
    assert answered(lambda: hj.load("l40s-48gb", folder=own_folder)) is None


def test_a_checkpoint_names_a_device_and_never_a_file(tmp_path):
    other = tmp_path / "device.json"
    other.write_text(json.dumps(PLAIN))
    for name in (str(other), "./device.json", "L40S-48gb/../x.json"):
        path = tmp_path / "x--bf16.json"
        path.write_text(json.dumps(SMALL | {"device": name}))
        assert answered(lambda p=path: hj.load_file(p)) is None


@pytest.mark.parametrize("name", ["", "..", ".", "../up", "a/../../b", "/abs", "~", "x\x00y", "…"])
def test_a_device_of_any_name_is_saved_inside_the_folder(tmp_path, name):
    folder = tmp_path / "one" / "two"
    content = SMALL | {"device": name, "coefficients": {}, "domain": {}}
    path = checkpoint.save(content, folder)
    assert folder.resolve() in path.resolve().parents
    assert path.parent.parent == folder and path.parent == checkpoint.device_folder(name, folder)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]


@pytest.mark.parametrize("content", ["[]", "7", "null", '{"coefficients": 3}', "{}"])
def test_a_neighbour_that_is_no_checkpoint_is_named(own_folder, content):
    (own_folder / "h100-sxm-80gb").mkdir()
    (own_folder / "h100-sxm-80gb" / "vllm-0.24.0--bf16.json").write_text(content)
    for device in ("h100-sxm-80gb", "h100-nvl-94gb"):
        assert answered(lambda d=device: hj.load(d, folder=own_folder)) is None
    model = answered(lambda: hj.load("v100-sxm-32gb", folder=own_folder))  # kin of the sound one
    assert model is None or model.card.provenance["transferred_from"] == "l40s-48gb"


# Arrays ------------------------------------------------------------------------------------------

TREE = {"a": {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "c": np.float32(1)},
        "d": np.ones(5, np.float32)}  # fmt: skip
PACKED = arrays.pack(TREE)


@cases(300)
@given(seeds)
def test_damaged_arrays_are_float32_or_refused(seed):
    for number in range(seed, seed + 10):
        content = damaged(PACKED, number)
        tree = answered(lambda c=content: arrays.unpack(c, "Arrays"))
        for leaf in jax.tree.leaves(tree):
            assert leaf.dtype == np.float32 and np.isfinite(leaf).all()


def member(array) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as found:
        for name, content in members.items():
            found.writestr(name, content)
    return stream.getvalue()


def header(shape: str, kind: str = "<f4") -> bytes:
    """A .npy file that says more than it holds."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(16)


class Bomb:
    """Pickled code that leaves a trace."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def broken_deflate() -> bytes:
    whole = bytearray(archive({"a.npy": member(np.ones(999, np.float32))}, zipfile.ZIP_DEFLATED))
    whole[60:70] = bytes(10)
    return bytes(whole)


def encrypted() -> bytes:
    whole = bytearray(PACKED)
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = 0
        while (start := whole.find(mark, start) + 1) > 0:
            whole[start - 1 + offset] |= 1
    return bytes(whole)


CRAFTED = {
    "not arrays": lambda: archive({"a.txt": b"hello", "b": b"\x93NUMPY"}),
    "a code member": lambda: archive({"__init__.py": b"import os"}),
    "more than memory": lambda: archive({"a.npy": header("(4398046511104,)")}),
    "a negative shape": lambda: archive({"a.npy": header("(-1, 3)")}),
    "a shape of code": lambda: archive({"a.npy": header("__import__('os').getpid()")}),
    "a shape cut off": lambda: archive({"a.npy": header("((((")}),
    "objects": lambda: archive({"a.npy": header("(1,)", "|O")}),
    "other numbers": lambda: archive({"a.npy": member(np.ones(3))}),
    "other bytes": lambda: archive({"a.npy": member(np.ones(3, ">f4"))}),
    "not finite": lambda: archive({"a.npy": member(np.float32([1, np.inf]))}),
    "a bomb": lambda: archive({"a.npy": bytes(65 * 2**20)}, zipfile.ZIP_DEFLATED),
    "too many": lambda: archive({f"{i}.npy": member(np.float32(1)) for i in range(20_000)}),
    "too deep": lambda: archive({"a/" * 5000 + "a.npy": member(np.float32(1))}),
    "damaged deflate": broken_deflate,
    "a password": encrypted,
    "another method": lambda: archive({"a.npy": member(np.ones(9, np.float32))}, zipfile.ZIP_LZMA)
    .replace(b"\x0e\x00", b"\x63\x00"),
    "nothing": lambda: b"",
    "half a directory": lambda: PACKED[-60:],
}  # fmt: skip


@pytest.mark.parametrize("kind", CRAFTED)
def test_crafted_arrays_are_refused(kind):
    assert answered(lambda: arrays.unpack(CRAFTED[kind](), "Arrays")) is None


def test_pickled_code_is_never_run(tmp_path):
    stream = io.BytesIO()
    np.savez(stream, a=np.array([Bomb(tmp_path / "ran")], object))
    assert answered(lambda: arrays.unpack(stream.getvalue(), "Arrays")) is None
    path = tmp_path / "x.npz"
    path.write_bytes(stream.getvalue())
    sha = hashlib.sha256(stream.getvalue()).hexdigest()
    assert answered(lambda: arrays.read(path, sha, "Arrays")) is None
    assert [item.name for item in tmp_path.iterdir()] == ["x.npz"]


@pytest.mark.parametrize("name", ["../a.npy", "/a.npy", "C:/a.npy", "a/../../a.npy", "\x1b.npy"])
def test_names_in_an_archive_are_never_paths(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    content = archive({name: member(np.float32(1))})
    answered(lambda: arrays.unpack(content, "Arrays"))
    assert list(tmp_path.iterdir()) == []


# Blocks ------------------------------------------------------------------------------------------

SPEC = mlp.MLPSpec(hidden=(3, 3), n_monotone=1, embedding=4)
N_FEATURES = 3


def _network() -> tuple[dict, dict]:
    params = mlp.init_ensemble(SPEC, N_FEATURES, range(2))
    normalizer = mlp.fit_normalizer(np.random.default_rng(0).normal(size=(20, N_FEATURES)))
    return block_store.spec_to_plain(SPEC), block_store.network_arrays(params, normalizer)


SETTINGS, WEIGHTS = _network()


def array_paths(tree, path="") -> list[str]:
    found = [path] if path else []
    if isinstance(tree, dict):
        for name, inner in tree.items():
            found += array_paths(inner, f"{path}.{name}".strip("."))
    return found


WEIGHT_PATHS = array_paths(WEIGHTS)
ODD_ARRAYS = st.sampled_from(
    [np.float32(1), np.ones((2, 3), np.float32), np.zeros(N_FEATURES, np.float32),
     np.ones((0, 4), np.float32), {}, {"w": np.float32(1)}]
)  # fmt: skip


@cases(100)
@given(
    st.lists(st.tuples(st.sampled_from(list(SETTINGS)), st.just("set"), odd_values()), max_size=1),
    st.lists(
        st.tuples(st.sampled_from(WEIGHT_PATHS), st.sampled_from(["set", "drop"]), ODD_ARRAYS),
        max_size=2,
    ),
)
def test_networks_have_the_shapes_of_their_settings_or_are_refused(changes, others):
    settings, weights = edited(SETTINGS, changes), edited(WEIGHTS, others)
    found = answered(lambda: block_store.read_network(settings, weights, N_FEATURES, "Block"))
    if found is not None:
        spec, params, normalizer = found
        mean, spread = mlp.correction(params, spec, normalizer, np.ones((1, N_FEATURES)))
        assert np.isfinite(mean).all() and np.isfinite(spread).all()


@pytest.mark.parametrize("groups", [{"experts": np.float32(1)}, np.float32(1), {}])
@pytest.mark.parametrize("entries", [{"experts": {}}, {"experts": 3}, [], {"\x1b": {}}])
def test_blocks_without_weights_are_refused(groups, entries):
    assert answered(lambda: block_store.from_plain(entries, groups, "Checkpoint: blocks")) is None


# Level 3 -----------------------------------------------------------------------------------------


def _level3() -> dict:
    """The shipped level 3 with few machines and nothing of its card but the sources."""
    content = json.loads((SHIPPED / "systems" / "level3.json").read_text())
    engines_kept = {}
    for name in (engines.DEFAULT_ENGINE,):
        entry = content["engines"][name]
        kept = sorted(entry["machines"])[:2]
        engines_kept[name] = {k: {m: entry[k][m] for m in kept} for k in ("machines", "quantiles")}
    return content | {"engines": engines_kept, "card": {"sources": content["card"]["sources"]}}


LEVEL3 = _level3()
ENGINE = LEVEL3["engines"][engines.DEFAULT_ENGINE]
MACHINE = next(iter(ENGINE["machines"]))


def _flat_paths() -> list[str]:
    """Paths without dots inside their names: the engine's own name has some."""
    return [*LEVEL3, "card.sources", "arrays.file", "arrays.sha256", "network.hidden",
            "transferred.quantised", "transferred.quantised.time"]  # fmt: skip


@cases(60)
@given(st.booleans(), edits(_flat_paths(), 1), edits(
    ["machines", "quantiles", f"machines.{MACHINE}", f"quantiles.{MACHINE}", "machines.x",
     *(f"machines.{MACHINE}.{name}" for name in ENGINE["machines"][MACHINE]),
     f"quantiles.{MACHINE}.quantised", f"quantiles.{MACHINE}.quantised.time"], 2))  # fmt: skip
def test_level_3_is_usable_or_refused(level3_folder, outside, changes, inner):
    content = edited(LEVEL3, changes) if outside else dict(LEVEL3)
    if not outside:
        content["engines"] = {engines.DEFAULT_ENGINE: edited(ENGINE, inner)}
    system_store.file_of(level3_folder).write_text(json.dumps(content))
    found = answered(lambda: system_store.load(level3_folder))
    if found is not None:
        terms = answered(lambda: engines.terms_for(found, "h100-sxm-80gb"))
        if terms is not None:
            assert all(np.isfinite(v) for v in terms.coefficients.values())
            assert np.isfinite(terms.quantiles).all() and (terms.quantiles > 0).all()
        assert isinstance(found["card"]["sources"], list)


@pytest.fixture(scope="module")
def level3_folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("level3")
    (found / "systems").mkdir()
    shutil.copy(SHIPPED / "systems" / "level3.npz", found / "systems" / "level3.npz")
    return found


@pytest.mark.parametrize("card", [None, [], {"sources": 3}, {}])
def test_level_3_without_its_sources_is_refused(own_folder, card):
    path = own_folder / "systems" / "level3.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"card": card}))
    assert answered(lambda: hj.load("l40s-48gb", folder=own_folder)) is None
