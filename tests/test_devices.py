"""hymell_jax.devices: shipped numbers against data sheets and arithmetic, custom descriptions."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from hymell_jax import types
from hymell_jax.devices import (
    UNITS,
    DeviceSpec,
    device_names,
    get_device,
    nearest_linked,
    nearest_measured,
)

NAMES = [
    *("a10-24gb", "a100-pcie-40gb", "a100-pcie-80gb", "a100-sxm-40gb", "a100-sxm-80gb"),
    *("a30-24gb", "a40-48gb", "a6000-48gb", "b200-sxm-180gb", "gh200-96gb", "h100-nvl-94gb"),
    *("h100-pcie-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "l4-24gb", "l40s-48gb"),
    *("p100-pcie-16gb", "p4-8gb", "t4-16gb", "v100-pcie-32gb", "v100-sxm-32gb"),
]
FIELDS = [field.name for field in dataclasses.fields(types.Device)]
# Data sheets: BF16 (FP16 before Ampere) dense TFLOP/s, memory GB/s, SMs, board power W.
SHEETS = {
    "a100-sxm-40gb": (312, 1555, 108, 400),
    "a100-sxm-80gb": (312, 2039, 108, 400),
    "a100-pcie-40gb": (312, 1555, 108, 250),
    "a100-pcie-80gb": (312, 1935, 108, 300),
    "h100-sxm-80gb": (989.4, 3350, 132, 700),
    "h100-pcie-80gb": (756.5, 2000, 114, 350),
    "h200-sxm-141gb": (989.4, 4800, 132, 700),
    "b200-sxm-180gb": (2250, 7700, 148, 1000),
    "l40s-48gb": (362.05, 864, 142, 350),
    "l4-24gb": (121, 300, 58, 72),
    "a40-48gb": (149.7, 696, 84, 300),
    "a6000-48gb": (154.8, 768, 84, 300),
    "a10-24gb": (125, 600, 72, 150),
    "a30-24gb": (165, 933, 56, 165),
    "v100-sxm-32gb": (125, 900, 80, 300),
    "v100-pcie-32gb": (112, 900, 80, 250),
    "t4-16gb": (65, 320, 40, 70),
}
SIMPLE = {
    "name": "mine",
    "peak_flops_per_s": 1e15,
    "peak_fp8_flops_per_s": 2e15,
    "peak_vector_flops_per_s": 6e13,
    "memory_bytes_per_s": 4e12,
    "memory_bytes": 1e11,
    "l2_bytes": 5e7,
    "n_sm": 132,
    "boost_clock_hz": 1.8e9,
    "power_limit_w": 700,
    "idle_power_w": 100,
    "link_bytes_per_s": 4.5e11,
}


def rich(**changes):
    fields = {
        name: {"value": value, "unit": UNITS[name][0], "source": "sheet"}
        for name, value in SIMPLE.items()
        if name != "name"
    }
    return {"name": "mine", "architecture": "Hopper", "fields": fields, **changes}


def sentence(source):
    with pytest.raises(ValueError) as caught:
        get_device(source)
    message = str(caught.value)
    assert message.endswith((".", "?")) and "\n" not in message
    return message


def test_the_shipped_devices_are_the_named_ones():
    assert device_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_field_has_a_value_a_unit_and_a_source(name):
    spec = get_device(name)
    assert spec.name == name
    assert spec.architecture in {
        *("pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"),
    }
    assert set(UNITS) == set(FIELDS)
    for field in FIELDS:
        value = getattr(spec.device, field)
        assert value.dtype == np.float32 and value.shape == () and value > 0
        assert len(spec.sources[field]) > 10
        if spec.sources[field].startswith("estimate"):
            assert ":" in spec.sources[field]
    assert spec.extras["vendor"] == "NVIDIA" and 2016 <= spec.extras["release_year"] <= 2026


@pytest.mark.parametrize("name", sorted(SHEETS))
def test_shipped_numbers_are_those_of_the_data_sheets(name):
    device = get_device(name).device
    given = [device.peak_flops_per_s, device.memory_bytes_per_s, device.n_sm, device.power_limit_w]
    peak, bandwidth, n_sm, power = SHEETS[name]
    np.testing.assert_allclose(given, [peak * 1e12, bandwidth * 1e9, n_sm, power], rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_matrix_rate_is_sms_times_flops_per_clock_times_clock(name):
    """Within 1.5 %: the L40S sheet gives BF16 at 2.49 and FP8 at 2.52 GHz, older sheets round."""
    spec = get_device(name)
    flops_per_clock = spec.extras["flops_per_clock_per_sm"]
    rate = float(spec.device.n_sm) * flops_per_clock * float(spec.device.boost_clock_hz)
    assert rate == pytest.approx(float(spec.device.peak_flops_per_s), rel=0.015)


@pytest.mark.parametrize("name", NAMES)
def test_the_vector_rate_is_64_or_128_fused_multiply_adds_per_clock_and_sm(name):
    spec = get_device(name)
    clock = spec.extras.get("max_clock_hz", float(spec.device.boost_clock_hz))
    lanes = float(spec.device.peak_vector_flops_per_s) / (2 * float(spec.device.n_sm) * clock)
    wide = spec.extras["chip"] not in ("GA100", "GV100", "TU104", "GP100")
    assert lanes == pytest.approx(128 if wide else 64, rel=0.015)


@pytest.mark.parametrize("name", NAMES)
def test_fp8_is_twice_bf16_where_there_are_fp8_units_and_equal_elsewhere(name):
    spec = get_device(name)
    has_fp8 = spec.architecture in ("ada", "hopper", "blackwell")
    ratio = float(spec.device.peak_fp8_flops_per_s) / float(spec.device.peak_flops_per_s)
    assert ratio == pytest.approx(2 if has_fp8 else 1, rel=0.015)
    if not has_fp8:
        assert "no FP8" in spec.sources["peak_fp8_flops_per_s"]


def test_memory_is_what_the_driver_lists():
    """nvidia-smi: 81559 MiB on H100 80GB, 143771 on H200, 81920 on A100 80GB."""
    for name, mib in (
        ("h100-sxm-80gb", 81559),
        ("h200-sxm-141gb", 143771),
        ("a100-sxm-80gb", 81920),
    ):
        assert float(get_device(name).device.memory_bytes) == pytest.approx(mib * 2**20, rel=1e-7)
    for name in NAMES:  # never far from the number in the name
        listed = float(name.rsplit("-", 1)[1].removesuffix("gb")) * 1e9
        assert 0.95 < float(get_device(name).device.memory_bytes) / listed < 1.08


def test_links_are_one_direction():
    """NVLink 3, 4, 5: 600, 900, 1800 GB/s both ways."""
    for name, one_way in (
        ("a100-sxm-80gb", 300e9),
        ("h100-sxm-80gb", 450e9),
        ("h200-sxm-141gb", 450e9),
        ("b200-sxm-180gb", 900e9),
    ):
        assert float(get_device(name).device.link_bytes_per_s) == pytest.approx(one_way)


def test_devices_without_matrix_units_say_so():
    for name in ("p100-pcie-16gb", "p4-8gb"):
        assert "no matrix units" in get_device(name).sources["peak_flops_per_s"]
    for name in ("v100-sxm-32gb", "v100-pcie-32gb", "t4-16gb"):
        assert "no BF16" in get_device(name).sources["peak_flops_per_s"]


def test_an_ambiguous_name_lists_the_exact_ones():
    message = sentence("h100")
    assert "h100-nvl-94gb, h100-pcie-80gb, h100-sxm-80gb" in message and "JSON" in message
    assert "a100" not in message
    assert "h200-sxm-141gb" in sentence("h200-sxm-140gb")
    assert "l40s-48gb" in sentence("unheard-of-thing")
    assert "JSON" in sentence("")


def test_case_and_spaces_around_a_name_do_not_matter():
    assert get_device(" H100-SXM-80GB ") is get_device("h100-sxm-80gb")


def test_the_simple_and_the_rich_form_give_the_same_device(tmp_path):
    path = tmp_path / "mine.json"
    for content in (SIMPLE, rich()):
        path.write_text(json.dumps(content))
        for source in (content, path, str(path)):
            spec = get_device(source)
            assert spec.name == "mine"
            for field in FIELDS:
                assert float(getattr(spec.device, field)) == pytest.approx(SIMPLE[field], rel=1e-6)
    assert get_device(SIMPLE).architecture == "unknown"
    assert get_device(rich()).architecture == "hopper"
    assert get_device(rich()).sources["n_sm"] == "sheet"
    assert get_device(get_device(SIMPLE)).name == "mine"


def test_a_shipped_name_stands_for_the_shipped_facts_alone(tmp_path):
    shipped = get_device("h100-sxm-80gb")
    facts = {field: getattr(shipped.device, field) for field in FIELDS}
    facts = {"name": shipped.name, **{field: float(x) for field, x in facts.items()}}
    assert get_device(facts).name == shipped.name
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**facts, "memory_bytes_per_s": 5e12}))
    for source in (path, str(path), json.loads(path.read_text())):
        message = sentence(source)
        assert "memory_bytes_per_s of h100-sxm-80gb" in message and "name of its own" in message


def test_extras_keep_their_values_and_sources():
    spec = get_device(
        rich(extras={"max_clock_hz": {"value": 2e9, "source": "s"}, "note": "x"}, vendor="V")
    )
    assert spec.extras == {"vendor": "V", "max_clock_hz": 2e9, "note": "x"}
    assert spec.sources["max_clock_hz"] == "s"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], ["must be an object"]),
        ({}, ["'name'"]),
        ({**SIMPLE, "name": 3}, ["'name'"]),
        ({"name": "x"}, ["Missing", "peak_flops_per_s"]),
        ({**SIMPLE, "peak_flop_per_s": 1}, ["unknown key", "peak_flops_per_s"]),
        ({**SIMPLE, "n_sm": "132"}, ["number for n_sm", "str"]),
        ({**SIMPLE, "n_sm": True}, ["number for n_sm", "bool"]),
        ({**SIMPLE, "n_sm": None}, ["number for n_sm"]),
        ({**SIMPLE, "n_sm": [1]}, ["number for n_sm", "list"]),
        ({**SIMPLE, "n_sm": -1}, ["n_sm", "between"]),
        ({**SIMPLE, "n_sm": 10**400}, ["n_sm", "inf"]),
        ({**SIMPLE, "n_sm": float("nan")}, ["n_sm", "nan"]),
        ({**SIMPLE, "memory_bytes": 80}, ["memory_bytes in B", "80"]),
        ({**SIMPLE, "peak_flops_per_s": 989}, ["peak_flops_per_s in FLOP/s"]),
        ({**SIMPLE, "idle_power_w": 800}, ["idle_power_w", "below", "power_limit_w"]),
        (rich(fields=[]), ["'fields'"]),
        (rich(fields={"n_sm": {"unit": "1"}}), ["no value for n_sm"]),
        (rich(fields={"n_ms": {"value": 1}}), ["n_ms", "n_sm"]),
        (rich(n_sm=1), ["n_sm", "inside 'fields'"]),
        (rich(extras=[1]), ["'extras'"]),
        (rich(architecture=7), ["'architecture'"]),
        (
            {"name": "x", "fields": {"memory_bytes_per_s": {"value": 3350, "unit": "GB/s"}}},
            ["'B/s'", "'GB/s'"],
        ),
    ],
)
def test_a_bad_description_gives_one_sentence_about_what_is_wrong(content, words, tmp_path):
    message = sentence(content) if isinstance(content, dict) else ""
    if not message:
        path = tmp_path / "d.json"
        path.write_text(json.dumps(content))
        message = sentence(path)
    for word in words:
        assert word in message


def test_a_bad_file_gives_one_sentence(tmp_path):
    path = tmp_path / "d.json"
    path.write_text('{"name": "x", "name": "y"}')
    assert "twice" in sentence(path)
    path.write_text('{"name": NaN}')
    assert "NaN" in sentence(str(path))
    path.write_text('{"a":' * 100_000)
    assert "nested" in sentence(path)
    assert "No such file" in sentence(tmp_path / "absent.json")
    assert "No such file" in sentence("h100.json")
    assert "int" in sentence(5)


def test_the_nearest_measured_device_shares_the_architecture_first():
    measured = [
        *("a100-sxm-80gb", "b200-sxm-180gb", "h100-sxm-80gb", "h200-sxm-141gb", "l40s-48gb"),
    ]
    assert nearest_measured("h100-pcie-80gb", measured) == "h100-sxm-80gb"
    assert nearest_measured("gh200-96gb", measured) == "h100-sxm-80gb"  # 4.0 TB/s, 900 W
    assert nearest_measured("a10-24gb", measured) == "a100-sxm-80gb"
    assert nearest_measured("l4-24gb", measured) == "l40s-48gb"
    for name in measured:
        assert nearest_measured(name, measured) == name


def test_without_kin_the_nearest_in_log_distance_wins():
    """T4 to L40S: ratios 5.6, 2.7, 3.6, 5; to A100: 4.8, 6.4, 2.7, 5.7; sums of squared logs."""
    assert nearest_measured("t4-16gb", ["a100-sxm-80gb", "l40s-48gb"]) == "l40s-48gb"
    assert nearest_measured(SIMPLE, ["t4-16gb", "h200-sxm-141gb"]) == "h200-sxm-141gb"


def test_links_are_taken_from_boards_with_links_alike():
    measured = ["a100-sxm-80gb", "b200-sxm-180gb", "h100-sxm-80gb", "l40s-48gb"]
    for name in ("a10-24gb", "a6000-48gb", "a100-pcie-80gb", "h100-pcie-80gb", "t4-16gb"):
        assert nearest_linked(name, measured) == "l40s-48gb"
    assert nearest_linked("v100-sxm-32gb", measured) == "a100-sxm-80gb"
    assert nearest_linked("gh200-96gb", measured) == "h100-sxm-80gb"
    assert nearest_linked("a100-sxm-80gb", measured[1:]) == "h100-sxm-80gb"
    with pytest.raises(ValueError, match="at least one"):
        nearest_linked("t4-16gb", [])
    unshipped = dataclasses.replace(get_device("l40s-48gb"), name="a-board-of-my-own")
    assert nearest_linked("a10-24gb", [unshipped, get_device("h100-sxm-80gb")]) == unshipped.name


def test_nearest_measured_refuses_no_or_unknown_candidates():
    with pytest.raises(ValueError, match="at least one"):
        nearest_measured("t4-16gb", [])
    with pytest.raises(ValueError, match="Unknown device"):
        nearest_measured("t4-16gb", ["h100"])


def test_a_spec_is_frozen_and_its_device_is_a_pytree_of_floats():
    spec = get_device("h100-sxm-80gb")
    assert isinstance(spec, DeviceSpec)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.name = "x"
    assert len(jax.tree.leaves(spec.device)) == len(FIELDS)


def test_importing_devices_does_not_import_pandas():
    code = "import sys, hymell_jax.devices; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
