"""Measured whole models as arrays: block costs by the lower levels, rows of an engine.

The lower levels enter as models that the caller chooses, so that level 3 can be fitted on level 1
alone or on levels 1 and 2.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pandas as pd

from hymell_jax import analytical, checkpoint, devices, operators, serving, systems
from hymell_jax.compile_cache import QUICK_OPTIONS
from hymell_jax.mlp import Progress
from hymell_jax.model import CostModel
from hymell_jax.serving import Blocks
from hymell_jax.system_fit import TARGETS, Priors, Rows, Sizes
from hymell_jax.types import Device

GRID = (64.0, 256.0, 1024.0, 4096.0)
"""Prompt lengths at which blocks are computed where a source hides its own, tokens."""

EAGER_ENGINES = ("transformers-eager",)
HEADLESS_TABLES = ("energaizer_prefill",)
"""Tables of the bare model, without the product that makes logits."""

KERNELS: dict[tuple[str, str], str] = {("b200-sxm-180gb", "vllm-0.11.1"): "vllm-0.22.0"}
"""(device, engine): the checkpoint whose kernels are nearest to that engine's; else the newest."""

CLOCKED = (
    "peak_flops_per_s", "peak_fp8_flops_per_s", "peak_vector_flops_per_s", "boost_clock_hz",
)  # fmt: skip
_PAD = 64

Models = Callable[[str, str, str], CostModel]
"""(device, engine, dtype) -> the model whose lower levels cost the blocks."""


def shipped_models(folder: str | None = None, blocks: bool = True) -> Models:
    """The checkpoints in a folder, by default those shipped, each loaded once.

    Args:
        folder: of checkpoints.
        blocks: whether with their level-2 blocks.
    """

    @functools.cache
    def find(device: str, engine: str, dtype: str) -> CostModel:
        runtime = KERNELS.get((device, engine))
        model = checkpoint.load(device, runtime, dtype, folder)
        return model if blocks else dataclasses.replace(model, blocks={})

    return find


def _device_of(row: pd.Series) -> Device:
    """The data sheet at the clock that the row was measured at; its own where the row has one."""
    spec = devices.get_device(row["spec"] if "spec" in row else row["device"])
    device, share = spec.device, np.float32(row["clock_share"])
    return dataclasses.replace(device, **{n: getattr(device, n) * share for n in CLOCKED})


def stack_leaves(values: Sequence[Any]) -> Any:
    """One tree of float32 arrays with a leading axis from a list of trees."""
    return jax.tree.map(lambda *leaves: np.stack([np.float32(x) for x in leaves]), *values)


@functools.partial(jax.jit, static_argnames="structure", compiler_options=QUICK_OPTIONS)
def _costs(coefficients, blocks, device, arch, work, structure):
    def one(device, arch, work):
        return analytical.model_costs(coefficients, device, arch, work, structure, blocks)

    return jax.vmap(one)(device, arch, work)


def block_costs(
    rows: pd.DataFrame, models: Models, progress: Progress | None = None
) -> tuple[Blocks, Blocks]:
    """Blocks of the prefill pass and of the decode step, leaves [n_rows, n_grid, ...].

    Where the prompt is known, all points of the grid hold the same numbers.

    Args:
        rows: of `systems.read_systems`.
        models: whose lower levels to run.
        progress: called with (what, jobs done, jobs in all).
    """
    jobs: dict[Any, list] = {}
    for index, (_, row) in enumerate(rows.iterrows()):
        arch, known = systems.row_architecture(row), np.isfinite(row["prompt"])
        dtype = systems.row_dtype(row)
        for place, prompt in enumerate((row["prompt"],) if known else GRID):
            work = systems.row_workload(row, prompt)
            key = row["device"], row["engine"], dtype, operators.structure_of(arch, work)
            headless = row["table"] in HEADLESS_TABLES
            jobs.setdefault(key, []).append((index, place, known, headless, row, arch, work))
    found: dict[tuple[int, int], Any] = {}
    total, done = sum(map(len, jobs.values())), 0
    for (device, engine, dtype, structure), every in jobs.items():
        model = models(device, engine, dtype)
        for first in range(0, len(every), _PAD):
            part = every[first : first + _PAD]
            padded = part + part[:1] * (_PAD - len(part))
            inputs = (stack_leaves([job[k] for job in padded]) for k in (5, 6))
            device_of = stack_leaves([_device_of(job[4]) for job in padded])
            costs = _costs(model.coefficients, model.blocks, device_of, *inputs, structure)
            costs = jax.tree.map(np.asarray, costs)
            for at, (index, place, known, headless, *_) in enumerate(part):
                blocks = tuple(_blocks(one, at, headless) for one in costs)
                for cell in range(len(GRID)) if known else (place,):
                    found[index, cell] = blocks
            done += len(part)
            if progress is not None:
                progress("blocks of measured models", done, total)
    cells = [[found[i, j] for j in range(len(GRID))] for i in range(len(rows))]
    return tuple(
        stack_leaves([stack_leaves([cell[phase] for cell in row]) for row in cells])
        for phase in (0, 1)
    )


def _blocks(costs, at: int, headless: bool) -> Blocks:
    """The blocks of one row of a batch of costs."""
    keep = np.ones(len(operators.PARTS), np.float32)
    if headless:
        keep[operators.PARTS.index("lm_head")] = 0.0
    fields = ("time_s", "energy_j", "flops", "memory_bytes")
    parts = {name: getattr(costs, name)[at] * keep for name in fields}
    return serving.blocks_of(dataclasses.replace(costs, **parts))


@dataclasses.dataclass(frozen=True)
class Problem:
    """The rows of one engine as arrays, and what its indices stand for."""

    engine: str
    frame: pd.DataFrame
    rows: Rows
    sizes: Sizes
    tasks: tuple[str, ...]
    campaigns: tuple[str, ...]
    machines: tuple[str, ...]
    groups: tuple[str, ...]
    priors: Priors


def _campaigns(frame: pd.DataFrame) -> list[str]:
    several = np.where(frame["tensor_parallel"] > 1, "several GPUs", "one GPU")
    width = np.where(frame["quantised"], "quantised", "16 bits")
    parts = (frame["device"], frame["task"], several, width)
    return [", ".join(str(x) for x in row if x) for row in zip(*parts, strict=True)]


def _index(values: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    names = tuple(sorted(set(values)))
    return names, np.array([names.index(v) for v in values], np.int32)


def problem(
    engine: str,
    rows: pd.DataFrame,
    costs: tuple[Blocks, Blocks],
    keep: np.ndarray | None = None,
    priors: Priors | None = None,
) -> Problem:
    """The rows of one engine, with their blocks, ready to fit; by default with its usual priors."""
    here = np.flatnonzero((rows["engine"] == engine) & (True if keep is None else keep))
    frame = rows.iloc[here].reset_index(drop=True)
    prefill, decode = (jax.tree.map(lambda leaf: leaf[here], blocks) for blocks in costs)
    known = np.isfinite(frame["prompt"])
    tasks, task = _index(list(np.where(known, "", frame["task"])))
    campaigns, campaign = _index(_campaigns(frame))
    machines, machine = _index(list(frame["device"]))
    steady = frame["continuous"] > 0
    prefill_only = frame["prefill_time_s"].notna() & frame["decode_time_s"].isna()
    energy = frame["energy_j"].where(~steady, frame["energy_per_output_token_j"] * frame["batch"])
    measured = {
        "prefill": frame["prefill_time_s"],
        "decode": frame["decode_time_s"].where(~steady),
        "steady": frame["decode_time_s"].where(steady),
        "median": frame["decode_median_s"],
        "total": frame["total_time_s"],
        "energy": energy,
    }
    phase = np.stack([steady, prefill_only, ~steady & ~prefill_only], 1)
    found: dict[str, Any] = dict(
        task=task, campaign=campaign, machine=machine, phase=phase.astype(np.float32),
        measured=np.stack([measured[t].to_numpy(np.float32) for t in TARGETS], 1),
    )  # fmt: skip
    arrays = Rows(
        arch=stack_leaves([systems.row_architecture(row) for _, row in frame.iterrows()]),
        device=stack_leaves([_device_of(row) for _, row in frame.iterrows()]),
        work=stack_leaves([systems.row_workload(row) for _, row in frame.iterrows()]),
        prefill=prefill,
        decode=decode,
        prompt_known=known.to_numpy(np.float32),
        turns=frame["turns"].to_numpy(np.float32),
        **found,
    )
    sizes = Sizes(len(tasks), len(campaigns), len(machines), GRID)
    groups = tuple(sorted(frame["group"].unique()))
    priors = serving.priors(engine in EAGER_ENGINES) if priors is None else priors
    return Problem(engine, frame, arrays, sizes, tasks, campaigns, machines, groups, priors)
