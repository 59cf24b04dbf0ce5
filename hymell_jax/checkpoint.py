"""Fitted models on disk: one readable JSON per device, runtime and compute format. No pickle.

A checkpoint holds the level-1 coefficients by operator, the ranges that they were fitted on, where
the rows came from, how the fit was made, its errors on train and test, and five rows of input and
output that the tests replay. Numbers are float32 and survive the text exactly. The weights of the
level-2 networks lie beside it in an `.npz` whose SHA-256 the JSON records. Shipped files lie in
`checkpoints/` at the top of the repository and inside the wheel.

A device that the package does not know by name brings its facts along: `device.json` beside its
checkpoints, and a level 3 of its own where whole models were measured on it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from hymell_jax import (
    arrays,
    attention,
    block_store,
    collectives,
    devices,
    engines,
    gemm,
    power,
    rowwise,
    system_store,
)
from hymell_jax.files import read_json, write_whole
from hymell_jax.model import Card, CostModel, Engine
from hymell_jax.operators import STREAM_PARTS
from hymell_jax.types import DTYPES, shown

FORMAT_VERSION = 1
DEVICE_FILE = "device.json"
HOST = "cpu"
"""Architecture of devices that neither give coefficients to the others nor take theirs."""

PLACEHOLDER = "not known: a placeholder"
WITHOUT_BF16 = ("pascal", "volta", "turing")  # architectures; bf16 stands for fp16 there
"""How the source of a fact begins that nobody knows, as `hymell profile` writes it."""

LARGEST = 80.0  # of a coefficient: natural logs and logits, so far beyond anything physical

_LINEAR_COEFFICIENTS = ("log_launch_s", "log_compute_excess", "log_memory_excess")
_NOT_PROVENANCE = (
    "coefficients", "domain", "published", "replay", "errors", "device_file", "blocks", "arrays",
    "ffn", "experts",
)  # fmt: skip
_IDENTITY = ("device", "runtime", "dtype")
_TEXTS = ("time", "energy", "energy_from", "energy_note", "transferred_from")
"""What of the provenance is shown in sentences."""

DOMAIN_FIELDS = tuple(f"gemm_log_{name}_{end}" for name in "mnk" for end in ("min", "max"))


def default_linear_coefficients() -> dict[str, Any]:
    """Gated delta net: a tenth of the tensor peak, two thirds of the bandwidth; not fitted."""
    return {
        "log_launch_s": np.float32(math.log(8e-6)),
        "log_compute_excess": np.float32(math.log(9.0)),
        "log_memory_excess": np.float32(math.log(0.5)),
    }


def schema() -> dict[str, Any]:
    """Names and shapes of all coefficients, a tree of zero arrays."""
    kernels = {name: np.zeros(len(gemm.KERNELS), np.float32) for name in gemm.KERNEL_COEFFICIENTS}
    scalars = {name: np.float32(0) for name in gemm.SCALAR_COEFFICIENTS}
    stream = {part: {name: np.float32(0) for name in rowwise.COEFFICIENTS} for part in STREAM_PARTS}
    return {
        "gemm": {**kernels, **scalars},
        "stream": {**stream, "residual_fused": np.float32(0)},
        "attention": {name: np.float32(0) for name in attention.DEFAULT_COEFFICIENTS},
        "linear": {name: np.float32(0) for name in _LINEAR_COEFFICIENTS},
        "collectives": {name: np.float32(0) for name in collectives.COLLECTIVE_COEFFICIENTS},
        "power": {name: np.float32(0) for name in power.POWER_COEFFICIENTS},
    }


def _plain(tree: Any) -> Any:
    """Arrays to numbers and lists; each float32 as its shortest text that reads back exactly."""
    if isinstance(tree, Mapping):
        return {key: _plain(value) for key, value in tree.items()}
    values = np.asarray(tree, np.float32)
    if values.ndim == 0:
        return float(str(values[()]))
    return [_plain(value) for value in values]


def file_name(device: str, runtime: str, dtype: str) -> str:
    """Relative path of a checkpoint: device/runtime--dtype.json."""
    return f"{_safe(device)}/{_safe(f'{runtime}--{dtype}')}.json"


def _safe(name: str) -> str:
    """A name as that of a file: nothing that leads out of a folder, or hides it."""
    return re.sub(r"^\.|[^A-Za-z0-9._-]", "_", name)[:200] or "_"


def device_folder(device: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Where the checkpoints of a device lie in a folder, by default in the shipped one."""
    root = root_folder(folder)
    return root / _safe(device)


def device_spec(
    device: str | os.PathLike[str] | Mapping[str, Any] | devices.DeviceSpec,
    folder: str | os.PathLike[str] | None = None,
) -> devices.DeviceSpec:
    """A device as `devices.get_device` takes it, or by a name that a folder of checkpoints knows.

    Raises:
        ValueError: unknown, or a description that cannot be used.
    """
    if isinstance(device, str) and device.strip():
        own = device_folder(device.strip(), folder) / DEVICE_FILE
        if own.is_file():
            return devices.get_device(own)
    return devices.get_device(device)


def save(content: Mapping[str, Any], folder: str | os.PathLike[str]) -> Path:
    """Write a checkpoint whole or not at all; returns its path.

    Args:
        content: as `fit_level1` returns it; coefficients and domain may hold arrays.
        folder: of all checkpoints; the device's folder is made inside it.

    Raises:
        ValueError: the folder cannot be written.
    """
    path = Path(folder) / file_name(content["device"], content["runtime"], content["dtype"])
    plain = dict(content)
    described = content.get("device_file")
    if described is not None:
        plain["device_file"] = DEVICE_FILE
    for field in ("coefficients", "domain"):
        plain[field] = _plain(content[field])
    packed, name = None, arrays.free_name(path)
    if content.get("blocks"):
        stored = {name: block_store.to_plain(b) for name, b in content["blocks"].items()}
        plain["blocks"] = {block: entry for block, (entry, _) in stored.items()}
        packed = arrays.pack({"blocks": {block: tree for block, (_, tree) in stored.items()}})
        plain["arrays"] = {"file": name, "sha256": arrays.digest(packed)}
    text = json.dumps(plain, indent=1, allow_nan=False)
    text = re.sub(r"\[\s+([-0-9.e+,\s]+?)\s+\]", _one_line, text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"The folder {str(path.parent)!r} cannot be made: {error}.") from error
    if described is not None:
        write_whole(path.parent / DEVICE_FILE, json.dumps(described, indent=1) + "\n")
    arrays.write_pair(path, text + "\n", packed, name)
    return path


def _one_line(match: re.Match[str]) -> str:
    return "[" + " ".join(match.group(1).split()) + "]"


def _checked(expected: Any, found: Any, where: str) -> Any:
    """The found tree as float32 arrays of the expected names and shapes."""
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping):
            raise ValueError(f"{where} must be an object.")
        if where.endswith(".attention"):  # the only coefficients that not every device has
            expected = {**expected, **{n: np.float32(0) for n in attention.TILING if n in found}}
        missing = [name for name in expected if name not in found]
        unknown = [name for name in found if name not in expected]
        if missing or unknown:
            problem = f"lacks {missing[0]!r}" if missing else f"has an unknown {unknown[0]!r}"
            raise ValueError(f"{where} {problem}.")
        return {n: _checked(expected[n], found[n], f"{where}.{n}") for n in expected}
    shape = np.shape(expected)
    items = found if isinstance(found, list) else [found]
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in items)
    if not numbers or np.shape(found) != shape:
        raise ValueError(f"{where} must be numbers of shape {shape}.")
    try:
        with np.errstate(over="ignore"):
            values = np.asarray(found, np.float32)
    except OverflowError:
        values = np.full(shape, np.inf)
    name = where.rpartition(".")[2]
    low, high = -LARGEST, LARGEST
    if ".stream." in where:
        low, high = rowwise.BOUNDS.get(name, (low, high))
    if not ((values >= low - 1e-3) & (values <= high + 1e-3)).all():
        raise ValueError(f"{where} must lie between {low:.4g} and {high:.4g}.")
    return values


def _blocks(content: Mapping[str, Any], path: Path, where: str) -> dict[str, Any]:
    """The level-2 blocks of a checkpoint at a path; none where it records none."""
    if "blocks" not in content:
        return {}
    file, sha256 = arrays.checked_file(content.get("arrays"), path, where)
    tree = arrays.read(file, sha256, f"Arrays {file.name!r}")
    groups = tree.get("blocks", {})
    return block_store.from_plain(content["blocks"], groups, f"{where}: blocks")


def _described(content: Mapping[str, Any], path: Path, where: str) -> Any:
    """The device's own facts, read from beside the checkpoint; None where it brings none."""
    given = content.get("device_file")
    if given is None:
        return None
    if given != DEVICE_FILE:
        raise ValueError(f"{where}: device_file must be {DEVICE_FILE!r}, beside it.")
    return read_json(path.parent / DEVICE_FILE, "device file")


def _device_of(content: Mapping[str, Any], path: Path, where: str) -> devices.DeviceSpec:
    """The device that a checkpoint brings along, or names; a name is never a path."""
    described = _described(content, path, where)
    if described is not None:
        return devices.get_device(described)
    if content["device"] not in devices.device_names():
        raise ValueError(f"{where} is of the unknown device {content['device'][:200]!r}.")
    return devices.get_device(content["device"])


def _model(content: Any, path: Path, spec: devices.DeviceSpec | None = None) -> CostModel:
    where = f"Checkpoint {path.name!r}"
    if not isinstance(content, dict):
        raise ValueError(f"{where} is not a checkpoint: it holds no object.")
    version = content.get("format_version")
    if isinstance(version, bool) or version != FORMAT_VERSION:
        raise ValueError(
            f"{where} has format_version {content.get('format_version')!r}; this version of the "
            f"package reads {FORMAT_VERSION}."
        )
    for field in (*_IDENTITY, "coefficients", "domain"):
        if field not in content:
            raise ValueError(f"{where} is not a checkpoint: it lacks {field!r}.")
    for field in _IDENTITY:
        if not isinstance(content[field], str):
            raise ValueError(f"{where}: {field} must be a string.")
    coefficients = _checked(schema(), content["coefficients"], f"{where}: coefficients")
    domain = _checked(
        {name: np.float32(0) for name in DOMAIN_FIELDS}, content["domain"], f"{where}: domain"
    )
    if content["dtype"] not in DTYPES:
        raise ValueError(f"{where}: dtype must be one of {', '.join(DTYPES)}.")
    if any(domain[f"gemm_log_{x}_min"] > domain[f"gemm_log_{x}_max"] for x in "mnk"):
        raise ValueError(f"{where}: domain has a minimum above its maximum.")
    if spec is None:
        spec = _device_of(content, path, where)
    provenance = {key: value for key, value in content.items() if key not in _NOT_PROVENANCE}
    for field in _TEXTS:
        text = provenance.get(field, "")
        if not isinstance(text, str) or not text.isprintable():
            raise ValueError(f"{where}: {field} must be a text that can be shown.")
    if not provenance.get("metered", True) and "energy_note" not in provenance:
        raise ValueError(f"{where}: energy that was not metered needs an energy_note.")
    if spec.sources["power_limit_w"].startswith(PLACEHOLDER):
        provenance["placeholder_power"] = True
    card = Card(spec.name, content["runtime"], content["dtype"], provenance)
    return CostModel(
        device=spec.device,
        coefficients=coefficients,
        domain=domain,
        blocks=_blocks(content, path, where),
        card=card,
    )


def read(
    device: str, runtime: str, dtype: str, folder: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """The content of one checkpoint, checked, its coefficients as float32 arrays.

    Raises:
        ValueError: missing or damaged.
    """
    root = root_folder(folder)
    path = root / file_name(device, runtime, dtype)
    content = read_json(path, "checkpoint")
    model = _model(content, path)
    found = {**content, "coefficients": model.coefficients, "domain": model.domain}
    if content.get("device_file"):
        found["device_file"] = _described(content, path, path.name)
    if model.blocks:
        entries = content["blocks"].items()
        found["blocks"] = {n: block_store.to_fitted(e, model.blocks[n]) for n, e in entries}
    return found


def load_file(path: str | os.PathLike[str]) -> CostModel:
    """A model from one checkpoint file.

    Raises:
        ValueError: the file is missing, damaged, of another version, or a number in it is not one.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"load_file takes a path; got {type(path).__name__}.")
    return _model(read_json(path, "checkpoint"), Path(path))


def shipped_folder() -> Path:
    """The folder of shipped checkpoints: inside the installed package, or of the repository."""
    inside = Path(str(resources.files("hymell_jax"))) / "checkpoints"
    return inside if inside.is_dir() else Path(__file__).resolve().parent.parent / "checkpoints"


def root_folder(folder: str | os.PathLike[str] | None) -> Path:
    """The folder of checkpoints that is meant: the given one, else the shipped one.

    Raises:
        ValueError: an empty path.
    """
    if folder is None:
        return shipped_folder()
    if not str(folder):
        raise ValueError("The folder of checkpoints is an empty path.")
    return Path(folder)


def available(folder: str | os.PathLike[str] | None = None) -> list[tuple[str, str, str]]:
    """(device, runtime, dtype) of the checkpoints in a folder, sorted; by default those shipped."""
    root = root_folder(folder)
    found = []
    for path in sorted(root.glob("*/*--*.json")):
        runtime, _, dtype = path.stem.rpartition("--")
        found.append((path.parent.name, runtime, dtype))
    return found


def version_key(runtime: str) -> tuple[int, ...]:
    """Order of the versions of a runtime: the numbers in its name."""
    return tuple(int(x) for x in re.findall(r"\d+", runtime))


def _choose_runtime(runtimes: list[str], device: str, dtype: str, runtime: str | None) -> str:
    if runtime is None:
        serving = [r for r in runtimes if r.startswith("vllm")]
        return max(serving or runtimes, key=version_key)
    if runtime in runtimes:
        return runtime
    raise ValueError(
        f"No checkpoint of {device} in {dtype} for the runtime {shown(runtime)}; there are: "
        f"{', '.join(sorted(runtimes))}."
    )


def load(
    device: str | os.PathLike[str] | Mapping[str, Any] | devices.DeviceSpec,
    runtime: str | None = None,
    dtype: str = "bf16",
    folder: str | os.PathLike[str] | None = None,
    engine: str | None = None,
) -> CostModel:
    """The cost model of a device.

    A device without measurements of its own takes the coefficients of the most alike measured one
    (they are relative to the data sheet), those of collectives of the one whose link is most alike,
    and says so: `card.provenance["time"]` and `["energy"]` are then "transferred".

    Args:
        device: exact name, a JSON file or dict of data-sheet facts, or a `DeviceSpec`.
        runtime: such as "vllm-0.24.0"; by default the newest that was measured.
        dtype: one of `types.DTYPES`; "fp32" only where it was measured.
        folder: of checkpoints; by default those shipped, or the one that a `device.json` lies in or
            beside.
        engine: serving engine of level 3; by default the one measured on the device with this
            runtime, else vLLM.

    Raises:
        ValueError: an unknown device, runtime, dtype or engine, or a damaged checkpoint.
    """
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {shown(dtype)}.")
    device, folder = _fitted_beside(device, folder)
    spec = device_spec(device, folder)
    if dtype == "fp8" and spec.device.peak_fp8_flops_per_s <= spec.device.peak_flops_per_s:
        raise ValueError(f"{spec.name} has no fp8 matrix units; take bf16.")
    here = [entry for entry in available(folder) if entry[2] == dtype]
    if not here:
        raise ValueError(f"There are no checkpoints for {dtype} in {str(folder or 'the package')}.")
    measured = {name for name, _, _ in here}
    source, transferred = spec.name, spec.name not in measured
    if transferred:
        likely = _alike(spec, measured, dtype, folder)
        source = devices.nearest_measured(spec, likely)
    runtimes = [r for name, r, _ in here if name == source]
    chosen = _choose_runtime(runtimes, source, dtype, runtime)
    root = root_folder(folder)
    path = root / file_name(source, chosen, dtype)
    content = read_json(path, "checkpoint")
    _check_place(content, path)
    if transferred:
        linked = devices.nearest_linked(spec, likely)
        if linked != source and isinstance(_coefficients_of(content), dict):
            content["coefficients"]["collectives"] = _collectives_of(root, linked, dtype)
    model = _model(content, path, spec)
    if transferred:
        model = _carried(model, device_spec(source, folder), spec)
        model.card.provenance.update(
            time="transferred",
            energy="transferred",
            transferred_from=source,
            collectives_from=linked,
        )  # of this format; another one may have been measured here
    if dtype == "bf16" and spec.architecture in WITHOUT_BF16:
        model.card.provenance["no_bf16_units"] = True
    return _served(model, spec, dtype, root, engine)


def _carried(model: CostModel, source: devices.DeviceSpec, target: devices.DeviceSpec) -> CostModel:
    """Between boards of one chip: equal joules an operation, equal bytes a cycle through L2."""
    if not devices.same_chip(source, target):
        return model
    pair = source.device, target.device
    moved = {name: power.carried(model.coefficients[name], *pair) for name in ("power", "gemm")}
    moved["gemm"] = gemm.carried(moved["gemm"], *pair)
    return dataclasses.replace(model, coefficients=model.coefficients | moved)


def _check_place(content: Any, path: Path) -> None:
    """Refuse the checkpoint of another device, runtime or format under this one's name."""
    named: list[Any] = [None]
    if isinstance(content, dict):
        named = [content.get(key) for key in _IDENTITY]
    if all(isinstance(name, str) for name in named):
        if Path(file_name(*named)) != Path(path.parent.name, path.name):
            raise ValueError(
                f"Checkpoint {path.name!r} in {path.parent.name!r} is of {', '.join(named)[:200]}; "
                "each lies under its own name."
            )


def _fitted_beside(device: Any, folder: Any) -> tuple[Any, Any]:
    """The device and its folder of checkpoints: the one given, else what lies beside its file.

    A `device.json` lies among the checkpoints of the device, or is that of a profile whose fit lies
    in `checkpoints` beside it and describes the device by what it measured.
    """
    if folder is not None or not isinstance(device, str | os.PathLike):
        return device, folder
    path = Path(device)
    if path.name != DEVICE_FILE or not path.is_file():
        return device, None
    if any(path.parent.glob("*--*.json")):
        return device, path.parent.parent
    beside = path.parent / "checkpoints"
    own = device_folder(devices.get_device(path).name, beside)
    if any(own.glob("*--*.json")):
        return own / DEVICE_FILE, beside
    return device, None


def _alike(spec, measured: set[str], dtype: str, folder) -> list[devices.DeviceSpec]:
    """The measured devices whose coefficients a device may take."""
    known = [device_spec(name, folder) for name in sorted(measured)]
    found = [other for other in known if other.architecture != HOST]
    if spec.architecture == HOST or dtype == "fp32" or not found:
        formats = sorted({d for name, _, d in available(folder) if name == spec.name})
        there = f"; there is {', '.join(formats)}" if formats else ""
        raise ValueError(
            f"{spec.name} was not measured in {dtype}, and no other device's coefficients carry "
            f"over to it{there}. `hymell profile --fit` measures a machine; of one that was fitted "
            "give the device.json that lies beside its checkpoints."
        )
    return found


def default_dtype(
    device: str | os.PathLike[str] | Mapping[str, Any],
    wanted: str,
    folder: str | os.PathLike[str] | None = None,
) -> str:
    """The format that a model asks for, or the one that the device was measured in instead.

    Raises:
        ValueError: an unknown device.
    """
    device, folder = _fitted_beside(device, folder)
    name = device_spec(device, folder).name
    formats = sorted({d for other, _, d in available(folder) if other == name})
    return formats[0] if formats and wanted not in formats else wanted


def _collectives_of(root: Path, device: str, dtype: str) -> Any:
    """Unchecked coefficients of a device's collectives: its newest checkpoint's."""
    runtimes = [r for name, r, d in available(root) if (name, d) == (device, dtype)]
    path = root / file_name(device, _choose_runtime(runtimes, device, dtype, None), dtype)
    coefficients = _coefficients_of(read_json(path, "checkpoint"))
    return coefficients.get("collectives") if isinstance(coefficients, dict) else None


def _coefficients_of(content: Any) -> Any:
    """Unchecked coefficients of a file that may be no checkpoint."""
    return content.get("coefficients") if isinstance(content, dict) else None


def _served(model: CostModel, spec, dtype: str, root: Path, engine: str | None) -> CostModel:
    """The model with level 3, where the folder holds it: the device's own, or that of all."""
    own = system_store.load(root, device_folder(spec.name, root).name)
    asked = engine or model.card.runtime
    content = own if own is not None and asked in own["engines"] else None
    if content is not None:
        engine = asked
    elif spec.architecture != HOST:
        content = system_store.load(root)
    if content is None:
        if engine is not None:
            raise ValueError(f"The folder {str(root)!r} holds no level 3, so no engine {engine!r}.")
        return model
    terms = engines.terms_for(
        content, spec, engine or engines.DEFAULT_ENGINE, quantised=dtype == "fp8"
    )
    model.card.provenance.update(
        engine=terms.engine,
        engine_terms="transferred" if terms.transferred else "fitted",
        engine_terms_from=terms.machine,
        engine_sources=content["card"]["sources"],
    )
    quantiles: Any = terms.quantiles
    served = Engine(
        coefficients=terms.coefficients,
        networks=engines.networks_of(content),
        quantiles=quantiles,
    )
    return dataclasses.replace(model, engine=served)
