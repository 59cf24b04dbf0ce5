"""Pinned predictions: 25 models x 5 devices x 4 workloads. `python tests/golden.py` writes them.

Write them only with a new version and a line in CHANGELOG.md that says why they moved.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import hymell_jax as hj
from hymell_jax.files import write_whole

FILE = Path(__file__).parent / "golden.json"
DEVICES = ("a100-sxm-80gb", "b200-sxm-180gb", "h100-sxm-80gb", "h200-sxm-141gb", "l40s-48gb")
WORKLOADS = (
    {"batch_size": 1, "prompt_tokens": 128, "output_tokens": 128},
    {"batch_size": 8, "prompt_tokens": 1024, "output_tokens": 256},
    {"batch_size": 64, "prompt_tokens": 4096, "output_tokens": 1024},
    {"batch_size": 16, "prompt_tokens": 512, "output_tokens": 128, "tensor_parallel": 2},
)
QUANTITIES = ("prefill_s", "decode_s", "decode_token_j", "total_j", "memory_bytes", "half_width")


def models() -> tuple[str, ...]:
    """25 presets, every kind of attention and feed-forward among them."""
    names = hj.model_names()
    return tuple(names[round(i * (len(names) - 1) / 24)] for i in range(25))


def keys() -> Iterable[tuple[str, str, int]]:
    """(model, device, index of the workload) of every row, in order."""
    return itertools.product(models(), DEVICES, range(len(WORKLOADS)))


def _row(answer: hj.Prediction) -> list[float]:
    values = (
        answer.prefill.time_s,
        answer.decode.time_s,
        answer.decode_energy_per_token_j,
        answer.total_energy_j,
        answer.memory.total_bytes,
        answer.decode.log_half_widths[0],
    )
    return [float(value) for value in values]


def compute() -> dict[str, list[float]]:
    """{"model device workload": numbers in the order of `QUANTITIES`}."""
    costs = {device: hj.load(device) for device in DEVICES}
    works = [hj.workload(**work) for work in WORKLOADS]
    archs = {name: hj.preset(name).architecture for name in models()}
    return {
        f"{name} {device} {index}": _row(hj.predict(costs[device], archs[name], works[index]))
        for name, device, index in keys()
    }


if __name__ == "__main__":
    content = {"version": hj.__version__, "quantities": QUANTITIES, "rows": compute()}
    lines = json.dumps(content).replace('], "', '],\n"')
    write_whole(FILE, lines + "\n")
    print(f"{len(content['rows'])} predictions of version {content['version']}")
