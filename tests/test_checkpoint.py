"""Checkpoints: what ships, that it replays, and that damage is noticed."""

from __future__ import annotations

import copy
import json
import shutil

import chex
import numpy as np
import pytest

import hymell_jax as hj
from hymell_jax import checkpoint, data, devices, fit
from hymell_jax.types import DTYPES

SHIPPED = checkpoint.available()


def test_every_measured_device_ships_in_bf16():
    bf16 = {device for device, _, dtype in SHIPPED if dtype == "bf16"}
    assert bf16 == {
        "a100-sxm-80gb", "b200-sxm-180gb", "h100-sxm-80gb", "h200-sxm-141gb", "l40s-48gb",
    }  # fmt: skip


def test_shipped_checkpoints_are_small():
    sizes = [p.stat().st_size for p in checkpoint.shipped_folder().rglob("*.json")]
    assert sum(sizes) < 2_000_000


@pytest.mark.parametrize("entry", SHIPPED, ids="/".join)
def test_shipped_checkpoints_repeat_their_stored_answers(entry):
    content = checkpoint.read(*entry)
    device = devices.get_device(content.get("device_file") or content["device"]).device
    element = DTYPES[content["dtype"]]
    rows = {name: np.float32([r[name] for r in content["replay"]]) for name in content["replay"][0]}
    c = content["coefficients"]
    shape = rows["m"], rows["n"], rows["k"]
    time_s = np.exp(fit.gemm_log_time(c["gemm"], device, *shape, element))
    watts = np.exp(fit.gemm_log_power(c["power"], device, *shape, rows["time_s"], element))
    assert len(rows["m"]) == 5
    np.testing.assert_allclose(time_s, rows["time_s"], rtol=1e-4)
    np.testing.assert_allclose(watts, rows["power_w"], rtol=1e-4)


@pytest.mark.parametrize("entry", SHIPPED, ids="/".join)
def test_shipped_checkpoints_name_their_sources_and_errors(entry):
    content = checkpoint.read(*entry)
    assert all(source["licence"] in ("Apache-2.0", "MIT") for source in content["sources"])
    assert content["energy"] in ("fitted", "transferred")
    assert {row["split"] for row in content["errors"]} == {"train", "test"}


def test_numbers_survive_the_file_exactly(tmp_path):
    content = checkpoint.read(*SHIPPED[0])
    path = checkpoint.save(content, tmp_path)
    again = json.loads(path.read_text())["coefficients"]["gemm"]
    for name, value in content["coefficients"]["gemm"].items():
        np.testing.assert_array_equal(np.float32(again[name]), value)


def _damaged(change):
    content = json.loads(
        (checkpoint.shipped_folder() / checkpoint.file_name(*SHIPPED[0])).read_text()
    )
    content = copy.deepcopy(content)
    change(content)
    return content


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.update(format_version=99), "format_version"),
        (lambda c: c.pop("coefficients"), "coefficients"),
        (lambda c: c["coefficients"]["gemm"].pop("log_launch_s"), "log_launch_s"),
        (lambda c: c["coefficients"]["gemm"].update(log_launch_s="fast"), "log_launch_s"),
        (lambda c: c["coefficients"]["gemm"].update(log_launch_s=1e300), "log_launch_s"),
        (lambda c: c["coefficients"]["gemm"]["log_prologue_s"].pop(), "log_prologue_s"),
        (lambda c: c["coefficients"]["power"].update(extra=1.0), "extra"),
        (lambda c: c["coefficients"]["gemm"].update(log_launch_s=10**350), "log_launch_s"),
        (lambda c: c["coefficients"]["stream"]["rope"].update(log_wave_s=-60.0), "log_wave_s"),
        (lambda c: c["domain"].update(gemm_log_m_min=50.0), "minimum above"),
        (lambda c: c.update(dtype="int3"), "dtype"),
        (lambda c: c.update(device=7), "device"),
        (lambda c: c.update(device="../../elsewhere"), "elsewhere"),
    ],
)
def test_a_damaged_checkpoint_is_named_not_used(tmp_path, change, said):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(_damaged(change)))
    with pytest.raises(ValueError, match=said):
        hj.load_file(path)


def test_a_truncated_checkpoint_is_refused(tmp_path):
    source = checkpoint.shipped_folder() / checkpoint.file_name(*SHIPPED[0])
    path = tmp_path / "short.json"
    path.write_bytes(source.read_bytes()[:1000])
    with pytest.raises(ValueError, match="short.json"):
        hj.load_file(path)


def test_load_takes_the_newest_runtime():
    assert hj.load("h200-sxm-141gb").card.runtime == "vllm-0.24.0"
    assert hj.load("h200-sxm-141gb", "vllm-0.22.0").card.runtime == "vllm-0.22.0"


def test_an_unmeasured_device_borrows_from_its_own_architecture():
    card = hj.load("h100-pcie-80gb").card
    assert card.device == "h100-pcie-80gb"
    assert card.provenance["transferred_from"] in ("h100-sxm-80gb", "h200-sxm-141gb")
    assert card.provenance["energy"] == "transferred"


def test_a_folder_of_checkpoints_can_be_given(tmp_path):
    shutil.copytree(checkpoint.shipped_folder() / "l40s-48gb", tmp_path / "l40s-48gb")
    assert hj.load("l40s-48gb", folder=tmp_path).card.device == "l40s-48gb"
    with pytest.raises(ValueError, match="no checkpoints"):
        hj.load("l40s-48gb", folder=tmp_path / "empty")


def test_sources_are_known_by_runtime():
    assert data.source_of("vllm-0.24.0")[1] == "Apache-2.0"
    assert data.source_of("my-engine")[0] == "measured by the user"


def test_a_transferred_device_takes_collectives_from_a_link_alike():
    """NVLink's coefficients on a PCIe board would be ten times too quick, the reverse too slow."""
    for name, source, linked in (
        ("v100-sxm-32gb", "l40s-48gb", "a100-sxm-80gb"),
        ("h100-pcie-80gb", "h100-sxm-80gb", "l40s-48gb"),
    ):
        model = hj.load(name)
        provenance = model.card.provenance
        assert (provenance["transferred_from"], provenance["collectives_from"]) == (source, linked)
        for part, origin in (("collectives", linked), ("attention", source)):
            chex.assert_trees_all_equal(
                model.coefficients[part], hj.load(origin).coefficients[part]
            )


def test_only_boards_of_one_chip_take_joules_and_cache_rates_from_each_other():
    moved = {"log_cache_cost", "log_power_flops", "log_power_bytes"}
    for name, source, changed in (
        ("h100-nvl-94gb", "h100-sxm-80gb", moved),
        ("v100-sxm-32gb", "l40s-48gb", set()),
    ):
        own, other = (hj.load(n).coefficients for n in (name, source))
        pairs = {k: (own["gemm"][k], other["gemm"][k]) for k in own["gemm"]}
        assert {k for k, (a, b) in pairs.items() if np.any(a != b)} == changed
        assert (own["power"] == other["power"]) is not bool(changed)
