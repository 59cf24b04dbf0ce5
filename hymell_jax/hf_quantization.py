"""Stored bits a weight and compute format, from `quantization_config` and the dtype keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from hymell_jax.hf_file import Config, shown


@dataclasses.dataclass(frozen=True)
class Quantization:
    method: str | None
    dtype: str
    fields: Mapping[str, float]


_DTYPES = {
    "auto": (16, "bf16"),
    "bfloat16": (16, "bf16"),
    "float16": (16, "bf16"),
    "half": (16, "bf16"),
    "float32": (16, "bf16"),
    "float": (16, "bf16"),
    "float8_e4m3fn": (8, "fp8"),
    "float8_e5m2": (8, "fp8"),
}

# bits and compute format of methods with one fixed format; a block scale that belongs to the
# format counts: 8 bits for 32 values in MXFP4 (OCP MX 1.0), 8 bits for 16 values in NVFP4.
_MXFP4_BITS, _NVFP4_BITS = 4 + 8 / 32, 4 + 8 / 16
_FIXED = {
    "fp8": (8, "fp8"),
    "fbgemm_fp8": (8, "fp8"),
    "modelopt_fp8": (8, "fp8"),
    "modelopt_fp4": (_NVFP4_BITS, "fp8"),
    "mxfp4": (_MXFP4_BITS, "bf16"),
    "eetq": (8, "bf16"),
}
_MODELOPT = {
    "FP8": (8, "fp8"),
    "FP8_PB_WO": (8, "fp8"),
    "FP8_PER_CHANNEL_PER_TOKEN": (8, "fp8"),
    "NVFP4": (_NVFP4_BITS, "fp8"),
    "NVFP4_AWQ": (_NVFP4_BITS, "fp8"),
    "W4A16_NVFP4": (_NVFP4_BITS, "bf16"),
    "MXFP8": (8 + 8 / 32, "fp8"),
    "W4A16_AWQ": (4, "bf16"),
    "INT4_AWQ": (4, "bf16"),
    "W4A8_AWQ": (4, "fp8"),
    "INT8_SQ": (8, "fp8"),
}


def read_quantization(cfg: Config, mixture: bool) -> Quantization:
    """Stored bits a weight and the compute format they suggest.

    Scales of group-wise integer formats (at most a few percent) are left out of the bits. Files
    in float32 count as 16 bits, since engines load them so. MXFP4 leaves all but the experts of a
    mixture at 16 bits.
    """
    stored = _stored_dtype(cfg)
    quant = cfg.sub("quantization_config")
    if not quant.values:
        return Quantization(None, stored[1], {"weight_bits": stored[0]})
    method = quant.get("quant_method")
    if method is None and (_loads(quant, 4) or _loads(quant, 8)):
        method = "bitsandbytes"
    if method is None and quant.get("quant_algo") is not None:
        method = "modelopt"
    name = method.lower().replace("_", "-") if isinstance(method, str) else ""
    if name.replace("-", "_") in _FIXED:
        bits, dtype = _FIXED[name.replace("-", "_")]
    elif name in _QUANT_READERS:
        bits, dtype = _QUANT_READERS[name](quant)
    else:
        known = sorted({*_FIXED, *_QUANT_READERS})
        raise ValueError(
            f"{cfg.where} has the quantization method {shown(method)}, which is not known; known "
            f"are {', '.join(known)}. Remove quantization_config to read it as 16 bits."
        )
    if bits == _NVFP4_BITS and dtype == "fp8":
        cfg.notes.append("Four-bit arithmetic is not modelled; it is priced as fp8.")
    fields = {"weight_bits": bits}
    if name == "mxfp4" and mixture:
        fields = {"weight_bits": stored[0], "expert_weight_bits": bits}
    return Quantization(method, dtype, fields)


def _stored_dtype(cfg: Config) -> tuple[float, str]:
    name = cfg.get("torch_dtype", cfg.get("dtype", "auto"))
    short = name.removeprefix("torch.") if isinstance(name, str) else name
    if not isinstance(short, str) or short not in _DTYPES:
        raise ValueError(
            f"{cfg.where} gives the dtype {shown(name)}; known are {', '.join(_DTYPES)}."
        )
    return _DTYPES[short]


def _loads(quant: Config, bits: int) -> bool:
    return quant.flag(f"load_in_{bits}bit") or quant.flag(f"_load_in_{bits}bit")


def _bits(quant: Config, *keys: str) -> int:
    return quant.required(*keys, greatest=64)


def _bitsandbytes(quant: Config) -> tuple[float, str]:
    if not (_loads(quant, 4) or _loads(quant, 8)):
        raise ValueError(
            f"{quant.where} has bitsandbytes quantization without load_in_4bit or load_in_8bit "
            "true; set one."
        )
    return (4 if _loads(quant, 4) else 8), "bf16"


def _modelopt(quant: Config) -> tuple[float, str]:
    if quant.get("quant_algo") is None and quant.get("config_groups") is not None:
        return _compressed_tensors(quant)
    algorithm = quant.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm.upper() not in _MODELOPT:
        raise ValueError(
            f"{quant.where} has the modelopt algorithm {shown(algorithm)}, which is not known; "
            f"known are {', '.join(_MODELOPT)}."
        )
    return _MODELOPT[algorithm.upper()]


def _compressed_tensors(quant: Config) -> tuple[float, str]:
    """Bits and compute format of the config groups; the widest where groups differ."""
    groups = quant.sub("config_groups")
    if not groups.values:
        raise ValueError(
            f"{quant.where} has compressed-tensors quantization without config_groups; add them."
        )
    read = [_config_group(groups.sub(name)) for name in groups.values]
    if len(set(read)) > 1:
        quant.notes.append(
            "Groups of layers are quantized differently; all are priced as the widest."
        )
    return max(read)


def _config_group(group: Config) -> tuple[float, str]:
    weights, inputs = group.sub("weights"), group.sub("input_activations")
    bits: float = _bits(weights, "num_bits")
    input_bits = _bits(inputs, "num_bits") if inputs.values else 16
    kind = weights.get("type", "int")
    if kind == "float" and bits == 4:
        block = weights.size("group_size") or 16
        bits = bits + 8 / block
    if kind == "int" and input_bits == 8 and bits == 8:
        group.notes.append("Integer 8-bit arithmetic is priced as fp8.")
    return bits, "fp8" if input_bits <= 8 else "bf16"


def _integer_weights(quant: Config) -> tuple[float, str]:
    return _bits(quant, "bits", "w_bit", "nbits"), "bf16"


_QUANT_READERS: dict[str, Callable[[Config], tuple[float, str]]] = {
    "gptq": _integer_weights,
    "awq": _integer_weights,
    "auto-round": _integer_weights,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}
