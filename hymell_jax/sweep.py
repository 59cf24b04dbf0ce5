"""Sweeps: a million predictions into one Parquet file, in parts that survive a kill.

Rows are evaluated in parts of fixed size; each part is written whole or not at all beside the
result, and joined into it at the end, again whole or not at all. A sweep that was killed finds its
parts and goes on; the file is the same as that of an undisturbed run, byte for byte. Memory holds
one part, whatever the number of rows. A part belongs to its specification and its fitted model:
both are hashed into it, and others are refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hymell_jax import checkpoint, models, operators, quantities, sharded, space, space_points
from hymell_jax.designs import Design, design_rows, make_design
from hymell_jax.files import read_json, write_whole
from hymell_jax.model import CostModel
from hymell_jax.notebook import Answer
from hymell_jax.pareto import non_dominated
from hymell_jax.quantities import QUANTITIES
from hymell_jax.types import Architecture, Workload, checked_number, shown, workload
from hymell_jax.version import __version__

PART_ROWS = 65536
DEFAULT_QUANTITIES = (
    "energy_per_token_j", "decode_energy_per_token_j", "prefill_energy_j", "latency_s",
    "latency_per_token_s", "prefill_time_s", "output_tokens_per_s", "parameters",
    "memory_bytes", "memory_share", "domain_distance",
)  # fmt: skip
DEFAULT_FRONT = ("energy_per_token_j", "latency_per_token_s")
TIMED_FRONT = ("memory_bytes", "latency_per_token_s")  # where energies are not known
PLOTTED_ROWS = 20_000

_KEYS = {
    "device", "runtime", "dtype", "base", "workload", "design", "fields", "rows", "seed", "tie",
    "quantities", "pareto", "part_rows",
}  # fmt: skip
_NEEDED = ("device", "base", "design", "fields")
EXAMPLE = (
    '{"device": "h100-sxm-80gb", "base": "llama-3.1-8b", "design": "grid", '
    '"fields": {"n_layers": [24, 32]}}'
)
_HASH = b"hymell_sweep"

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Sweep:
    """A checked specification with everything that it names."""

    model: CostModel
    base: Architecture
    work: Workload
    rules: space.Rules
    ratio: float
    design: Design
    names: tuple[str, ...]  # quantities
    front: tuple[str, str]
    structure: frozenset[str] | None
    part_rows: int
    digest: str

    @property
    def parts(self) -> int:
        """Parts of `part_rows` rows."""
        return -(-self.design.rows // self.part_rows)


def read_sweep(spec: str | os.PathLike[str] | Mapping[str, Any]) -> Sweep:
    """A checked sweep from a JSON file or its content.

    `{"device": ..., "base": model or fields, "workload": {...}, "design": "grid" | "random" |
    "latin_hypercube", "fields": {...}, "rows": n, "seed": n, "tie": "head_dim", "quantities":
    [...], "pareto": [a, b], "part_rows": n}`; docs/sweep.md tells every key, `designs.make_design`
    the fields.

    Raises:
        ValueError: another form, missing keys, unknown names, values out of range.
    """
    content = spec if isinstance(spec, Mapping) else read_json(spec, "sweep")
    if not isinstance(content, Mapping):
        raise ValueError("A sweep must be an object.")
    unknown = sorted(set(content) - _KEYS)
    if unknown:
        raise ValueError(f"A sweep holds {', '.join(sorted(_KEYS))}; got {shown(unknown[0])}.")
    _check_needed(content)
    base, dtype = _base(content["base"])
    dtype = content.get("dtype") or dtype
    model = checkpoint.load(content["device"], content.get("runtime"), dtype)
    work = _workload(content.get("workload"), dtype)
    design = make_design(
        content["design"], content["fields"], content.get("rows"), content.get("seed", 0)
    )
    moving = tuple(f.name for f in design.fields)
    known = tuple(name for name in DEFAULT_QUANTITIES if quantities.is_known(name, model))
    names = _names(content, "quantities", known)
    front = _names(content, "pareto", DEFAULT_FRONT if known == DEFAULT_QUANTITIES else TIMED_FRONT)
    if len(front) != 2:
        raise ValueError(f"pareto takes two quantities; got {shown(content['pareto'])}.")
    names = tuple(dict.fromkeys((*names, *front, "memory_share")))
    for name in names:
        quantities.check_known(name, model)
    rules = _rules(base, moving, content.get("tie"))
    ratio = float(base.n_heads) * float(base.head_dim) / float(base.d_model)
    return Sweep(
        model, base, work, rules, ratio, design, names, front,
        _structure(base, work, design), _part_rows(content), _digest(content, model),
    )  # fmt: skip


def _check_needed(content: Mapping[str, Any]) -> None:
    drawn = content.get("design") in ("random", "latin_hypercube")
    needed = (*_NEEDED, "rows") if drawn else _NEEDED
    missing = [name for name in needed if content.get(name) is None]
    if missing:
        raise ValueError(
            f"A sweep needs {', '.join(missing)}: {EXAMPLE} is the least that it can be."
        )


def _names(content: Mapping[str, Any], key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    """Names of quantities, each once."""
    given = content.get(key) or default
    if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"{key} must be a list of quantities; got {shown(given)}.")
    return tuple(dict.fromkeys(given))


def _workload(given: Any, dtype: str) -> Workload:
    allowed = sorted(workload.__kwdefaults__ or {})
    if given is not None and not (isinstance(given, Mapping) and set(given) <= set(allowed)):
        raise ValueError(f"workload must be an object of {', '.join(allowed)}; got {shown(given)}.")
    return workload(**({"dtype": dtype} | dict(given or {})))


def _part_rows(content: Mapping[str, Any]) -> int:
    rows = checked_number("part_rows", content.get("part_rows", PART_ROWS), 1024, 1e7)
    if rows % 1:
        raise ValueError(f"part_rows must be a whole number; got {rows:g}.")
    return int(rows)


def _base(given: Any) -> tuple[Architecture, str]:
    if isinstance(given, Mapping) and "d_model" in given:
        return space.base_from_fields(given), "bf16"
    hf = models.resolve_model(given)
    return hf.architecture, hf.dtype


def _rules(base: Architecture, moving: tuple[str, ...], tie: Any) -> space.Rules:
    if tie not in (None, *space.TIES) or tie in moving:
        raise ValueError(
            f"tie must be {' or '.join(space.TIES)}, and not be swept; got {shown(tie)}."
        )
    same_width = float(base.value_head_dim) == float(base.head_dim)
    multi_head = float(base.n_heads) == float(base.n_kv_heads)
    return space.Rules(
        moving, tie, same_width and "value_head_dim" not in moving,
        multi_head and "n_kv_heads" not in moving,
    )  # fmt: skip


def _structure(base: Architecture, work: Workload, design: Design) -> frozenset[str] | None:
    """Blocks that any row has."""
    greatest: dict[str, Any] = {
        f.name: np.float32(max(f.values or (f.high,))) for f in design.fields
    }
    archs = {f.name for f in dataclasses.fields(Architecture)}
    arch = dataclasses.replace(base, **{n: v for n, v in greatest.items() if n in archs})
    work = dataclasses.replace(work, **{n: v for n, v in greatest.items() if n not in archs})
    return operators.structure_of(arch, work)


def _digest(content: Mapping[str, Any], model: CostModel) -> str:
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
    digest.update(
        f"{__version__} {_part_rows(content)} {model.card.device} {model.card.runtime}".encode()
    )
    for leaf in jax.tree.leaves(quantities.bare(model)):
        digest.update(np.asarray(leaf, np.float32).tobytes())
    return digest.hexdigest()


def sweep_rows(sweep: Sweep, start: int, stop: int) -> tuple[dict, Architecture, Workload]:
    """(swept columns, architectures, workloads) of rows start .. stop, numpy float32 leaves."""
    columns = design_rows(sweep.design, start, stop)
    count = stop - start
    own = {f.name for f in dataclasses.fields(Architecture)}
    moving = {name: value for name, value in columns.items() if name in own}
    fields = space_points.follow(sweep.rules, sweep.base, sweep.ratio, moving)
    archs = dataclasses.replace(sweep.base, **fields)
    asked: dict[str, Any] = {name: value for name, value in columns.items() if name not in own}
    works = dataclasses.replace(sweep.work, **asked)
    if {"prompt_tokens", "output_tokens"} & set(columns):
        works = dataclasses.replace(
            works,
            context_start_tokens=works.prompt_tokens,
            context_end_tokens=works.prompt_tokens + works.output_tokens,
        )
    full = jax.tree.map(
        lambda leaf: np.broadcast_to(np.asarray(leaf, np.float32), (count,)), (archs, works)
    )
    return columns, *full


def legal_rows(archs: Architecture, works: Workload) -> np.ndarray:
    """Rows [n] that can be built and run: KV heads divide the heads, GPUs too, enough experts."""
    latent: Any = archs.latent_attention > 0
    heads = (archs.n_heads % np.maximum(archs.n_kv_heads, 1) == 0) | latent
    heads &= (archs.n_heads % 1 == 0) & (archs.n_heads % works.tensor_parallel == 0)
    experts = (archs.experts_per_token <= archs.n_experts) & (
        (archs.n_experts > 0) == (archs.moe_fraction > 0)
    )
    return heads & (archs.head_dim % 1 == 0) & experts


def part_table(sweep: Sweep, number: int) -> Any:
    """One part as an Arrow table: `row`, swept fields, quantities, `legal`.

    Raises:
        ValueError: sizes so large that a quantity is beyond float32.
    """
    import pyarrow as pa

    start = number * sweep.part_rows
    stop = min(start + sweep.part_rows, sweep.design.rows)
    columns, archs, works = sweep_rows(sweep, start, stop)
    values = sharded.measure_sharded(sweep.model, archs, works, sweep.names, sweep.structure)
    _check_finite(values, sweep, columns, start)
    arrays = {"row": np.arange(start, stop)}
    arrays |= {name: value.astype(np.float32) for name, value in columns.items()}
    arrays |= {name: values[:, i] for i, name in enumerate(sweep.names)}
    arrays["legal"] = legal_rows(archs, works)
    table = pa.table({name: np.ascontiguousarray(value) for name, value in arrays.items()})
    return table.replace_schema_metadata({_HASH: sweep.digest.encode()})


def _check_finite(values: np.ndarray, sweep: Sweep, columns: dict, start: int) -> None:
    finite = np.isfinite(values)
    if finite.all():
        return
    row, column = np.argwhere(~finite)[0]
    sizes = ", ".join(f"{name} {value[row]:g}" for name, value in columns.items())
    raise ValueError(
        f"Row {start + row}: {sweep.names[column]} is beyond float32 at {sizes}; reduce the "
        "largest sizes of the sweep."
    )


# Files -------------------------------------------------------------------------------------------


def _belongs(path: Path, sweep: Sweep) -> bool:
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is no Parquet file of a sweep: {error}.") from None
    return metadata.get(_HASH) == sweep.digest.encode()


def _open_parts(out: Path, sweep: Sweep) -> Path:
    """The folder of parts, made if it is missing.

    Raises:
        ValueError: it belongs to another sweep, or cannot be made.
    """
    folder = out.with_name(out.name + ".parts")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(f"Cannot write {str(folder)!r}: {error.strerror}.") from None
    owner = folder / "sweep.json"
    if not owner.exists():
        write_whole(owner, json.dumps({"sweep": sweep.digest}))
    elif read_json(owner, "sweep's mark").get("sweep") != sweep.digest:
        raise ValueError(
            f"{str(folder)!r} holds parts of another sweep, model or version; remove it, or give "
            "another --out."
        )
    return folder


def front_path(out: str | os.PathLike[str]) -> Path:
    """Where the Pareto front of a sweep into `out` is written."""
    return Path(out).with_suffix(".front.parquet")


def _part_path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}.parquet"


def _join(folder: Path, out: Path, sweep: Sweep) -> None:
    """All parts into one file, a part in memory at a time."""
    import pyarrow.parquet as pq

    draft = folder / "whole.tmp"
    with pq.ParquetWriter(draft, pq.read_schema(_part_path(folder, 0))) as writer:
        for number in range(sweep.parts):
            table = pq.read_table(_part_path(folder, number))
            writer.write_table(table, row_group_size=sweep.part_rows)
    with open(draft, "rb") as stream:
        os.fsync(stream.fileno())
    os.replace(draft, out)


def _better(sweep: Sweep, table: Any) -> Any:
    """The non-dominated rows among those that can be built and fit."""
    usable = table["legal"].to_numpy() & (table["memory_share"].to_numpy() <= 1.0)
    costs = np.stack(
        [
            table[name].to_numpy() * (-1.0 if QUANTITIES[name].higher_is_better else 1.0)
            for name in sweep.front
        ],
        1,
    )
    return table.take(non_dominated(np.where(usable[:, None], costs, np.inf)))


def run_sweep(
    spec: str | os.PathLike[str] | Mapping[str, Any],
    out: str | os.PathLike[str],
    progress: Progress | None = None,
    processes: tuple[str, int, int] | None = None,
) -> dict[str, Any]:
    """Evaluate a sweep into a Parquet file; goes on where a killed run of the same sweep stopped.

    Beside `out`, say x.parquet, it writes x.front.parquet, the rows that no other beats in both
    quantities of `pareto` among those that can be built and fit, and x.png, a plot of them, if
    matplotlib is there.

    Args:
        spec: as `read_sweep`; docs/sweep.md tells every key and column.
        out: ends in .parquet.
        progress: called with ("rows", done, all).
        processes: (coordinator host:port, number of processes, index of this one): every process
            computes each so-many-th part, the first joins them; `out` lies where all can see it.

    Returns:
        A plain dictionary: `rows`, `computed` (rows of this call), `time_s`, `first_part_s` (with
        compiling), `rows_per_s` (without the first part; 0 where there was no other) and `out`.

    Raises:
        ValueError: a bad specification, an existing file of another sweep, a folder that cannot be
            written, or pyarrow is missing.
    """
    begin = time.perf_counter()
    out = Path(out)
    if out.suffix != ".parquet":
        raise ValueError(
            f"A sweep writes Parquet: give a name that ends in .parquet, not {out.name!r}."
        )
    if not out.parent.is_dir():
        raise ValueError(f"There is no folder {str(out.parent)!r} to write into.")
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ValueError("A sweep writes Parquet with pyarrow: install the extra `data`.") from None
    if processes is not None:
        sharded.start_processes(*processes)
    sweep = read_sweep(spec)
    if out.exists() and not _belongs(out, sweep):
        raise ValueError(
            f"{str(out)!r} holds another sweep, or one of another model or version; remove it, or "
            "give another name."
        )
    seconds, computed, first = 0.0, 0, 0.0
    if not out.exists():
        seconds, computed, first = _compute_parts(sweep, out, progress)
    if jax.process_index() == 0:
        _finish(sweep, out)
    sharded.wait_for_all("joined")
    steady = max(seconds - first, 1e-9)
    content = {
        "rows": sweep.design.rows,
        "computed": computed,
        "time_s": time.perf_counter() - begin,
        "first_part_s": first,
        "rows_per_s": max(computed - sweep.part_rows, 0) / steady,
        "out": str(out),
    }
    return Answer("sweep", content)


def _compute_parts(sweep: Sweep, out: Path, progress: Progress | None) -> tuple[float, int, float]:
    """(seconds, rows computed, seconds of the first part with compiling) of this process."""
    import pyarrow.parquet as pq

    folder = _open_parts(out, sweep)
    begin = time.perf_counter()
    computed, first = 0, 0.0
    for number in range(jax.process_index(), sweep.parts, jax.process_count()):
        path = _part_path(folder, number)
        if not path.exists():
            buffer = io.BytesIO()
            table = part_table(sweep, number)
            pq.write_table(table, buffer)
            write_whole(path, buffer.getvalue())
            computed += table.num_rows
            first = first or time.perf_counter() - begin
        if progress is not None:
            progress(
                "rows", min((number + 1) * sweep.part_rows, sweep.design.rows), sweep.design.rows
            )
    seconds = time.perf_counter() - begin
    sharded.wait_for_all("computed")
    return seconds, computed, first


def _finish(sweep: Sweep, out: Path) -> None:
    """Join the parts, write front and plot, remove the parts; safe to repeat."""
    folder = out.with_name(out.name + ".parts")
    if not out.exists():
        _join(folder, out, sweep)
    if folder.exists():
        _write_front(sweep, out, *_front(sweep, out))
    shutil.rmtree(folder, ignore_errors=True)


def _front(sweep: Sweep, out: Path) -> tuple[Any, Any]:
    """(rows of the front, rows to plot) of a joined file, as tables."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    stride = max(1, sweep.design.rows // PLOTTED_ROWS)
    best, shown = None, []
    source = pq.ParquetFile(out)
    for group in range(source.num_row_groups):
        table = source.read_row_group(group)
        best = _better(sweep, table if best is None else pa.concat_tables([best, table]))
        some = np.flatnonzero(table["row"].to_numpy() % stride == 0)
        shown.append(table.select(list(sweep.front)).take(some))
    return best, pa.concat_tables(shown)


def _write_front(sweep: Sweep, out: Path, best: Any, shown: Any) -> None:
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(best, buffer)
    write_whole(front_path(out), buffer.getvalue())
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    (x, y), (fx, fy) = ([t[name].to_numpy() for name in sweep.front] for t in (shown, best))
    axes.plot(x, y, ",", color="0.6", label=f"{len(x)} of {sweep.design.rows} rows")
    axes.step(fx, fy, "o-", where="post", ms=3, color="C0", label="front")
    axes.set(xscale="log", yscale="log")
    for axis, name in ((axes.set_xlabel, sweep.front[0]), (axes.set_ylabel, sweep.front[1])):
        axis(f"{name.rpartition('_')[0].replace('_', ' ')} [{QUANTITIES[name].unit}]")
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_whole(out.with_suffix(".png"), buffer.getvalue())
