"""Pinned predictions: 25 models x 5 devices x 4 workloads. `python tests/golden.py` writes them.

Write them only with a new version and a line in CHANGELOG.md that says why they moved.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

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


def _rows(answers: hj.Prediction) -> np.ndarray:
    values = (
        answers.prefill.time_s,
        answers.decode.time_s,
        answers.decode_energy_per_token_j,
        answers.total_energy_j,
        answers.memory.total_bytes,
        answers.decode.log_half_widths[:, 0],
    )
    return np.stack(values, 1)


def compute() -> dict[str, list[float]]:
    """{"model device workload": numbers in the order of `QUANTITIES`}, a batch for each device."""
    pairs = list(itertools.product(models(), range(len(WORKLOADS))))
    archs = hj.stack([hj.preset(name).architecture for name, _ in pairs])
    works = hj.stack([hj.workload(**WORKLOADS[index]) for _, index in pairs])
    found = {}
    for device in DEVICES:
        rows = _rows(hj.predict_batch(hj.load(device), archs, works, once=True))
        for (name, index), row in zip(pairs, rows, strict=True):
            found[f"{name} {device} {index}"] = [float(value) for value in row]
    return {" ".join(map(str, key)): found[" ".join(map(str, key))] for key in keys()}


if __name__ == "__main__":
    content = {"version": hj.__version__, "quantities": QUANTITIES, "rows": compute()}
    lines = json.dumps(content).replace('], "', '],\n"')
    write_whole(FILE, lines + "\n")
    print(f"{len(content['rows'])} predictions of version {content['version']}")
