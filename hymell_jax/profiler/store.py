"""What a profile leaves on disk: a journal of single lines, and the tables made from it.

A line is written in one piece and flushed to the disk before the next case starts, so that a kill
at any moment loses at most the case that was running. Tables are derived: they may be deleted and
come back with the next run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hymell_jax import files
from hymell_jax.profiler import schema, steadiness
from hymell_jax.profiler.cases import case_key

JOURNAL = "journal.jsonl"
IDENTITY = ("device", "runtime", "torch", "dtype", "threads")
MOST_STARTS = 3  # of a case that never ended, as when the kernel kills the process for memory
MOST_FAILURES = 2

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a journal says is done."""

    measured: frozenset[str]  # keys of cases with an undisturbed row, or measured twice
    disturbed: frozenset[str]  # measured once, and disturbed
    given_up: dict[str, str]  # key: reason
    interrupted: frozenset[str]  # started, never ended; to be tried last


class Journal:
    """An append-only file of JSON lines that one process at a time may write.

    Raises:
        ValueError: the folder cannot be written, another process profiles into it, or it holds the
            profile of another device, runtime, PyTorch, format or number of threads.
    """

    def __init__(self, folder: str | os.PathLike[str], identity: Record):
        self.folder = files.writable_folder(folder)
        self.path = self.folder / JOURNAL
        try:
            self._stream = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ValueError(
                f"The journal {str(self.path)!r} cannot be written: {error.strerror}."
            ) from None
        try:
            self._lock()
            self.records = _read(self._stream)
            self._check(identity)
        except BaseException:
            self._stream.close()
            raise
        self.identity = identity
        self.order = max((r["order"] for r in self.records if "order" in r), default=-1) + 1

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # no locks on this system: the user's own care
            return
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"Another process is profiling into {str(self.folder)!r}; wait for it or give "
                "another --out."
            ) from None

    def _check(self, identity: Record) -> None:
        for record in self.records:
            if record["kind"] != "session":
                continue
            other = [n for n in IDENTITY if record.get(n) != identity.get(n)]
            if other:
                shown = ", ".join(f"{n} {record.get(n)}, now {identity.get(n)}" for n in other)
                raise ValueError(
                    f"The folder {str(self.folder)!r} holds another profile ({shown}); give "
                    "another --out."
                )

    def append(self, record: Record, durable: bool = True) -> None:
        """One whole line; `durable` waits until the disk has it.

        Raises:
            ValueError: the disk is full or gone. Earlier lines are kept.
        """
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        size = os.fstat(self._stream.fileno()).st_size
        try:
            if self._stream.write(line) != len(line):
                raise OSError(28, "no space left")
            if durable:
                os.fsync(self._stream.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._stream.fileno(), size)
            raise ValueError(
                f"The journal {str(self.path)!r} cannot be written: {error.strerror}. What was "
                "measured before is kept; the same command goes on from there."
            ) from None
        self.records.append(record)

    def next_order(self) -> int:
        """The place of the next measurement."""
        self.order += 1
        return self.order - 1

    def progress(self) -> Progress:
        """What is done, by the records so far."""
        return progress(self.records)

    def close(self) -> None:
        """Give the folder free."""
        self._stream.close()


def _read(stream: Any) -> list[Record]:
    """All whole lines; a last line that was cut off is removed from the file."""
    stream.seek(0)
    content = stream.read()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.ftruncate(stream.fileno(), whole)
    stream.seek(0, os.SEEK_END)
    return [record for line in content[:whole].splitlines() for record in _parse(line)]


def _parse(line: bytes) -> Iterable[Record]:
    try:
        record = json.loads(line)
    except ValueError:  # a damaged line costs its own case only
        return ()
    return (record,) if isinstance(record, dict) and "kind" in record else ()


def read_journal(folder: str | os.PathLike[str]) -> list[Record]:
    """The records of a folder, without locking or repairing it.

    Raises:
        ValueError: there is no journal, or it cannot be read.
    """
    path = Path(folder) / JOURNAL
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"The journal {str(path)!r} cannot be read: {error.strerror}.") from None
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    return [record for line in lines for record in _parse(line)]


def progress(records: Iterable[Record]) -> Progress:
    """What is done, by the records of a journal."""
    records = list(records)
    starts = Counter(r["key"] for r in records if r["kind"] == "start")
    failures: dict[str, list[str]] = {}
    rows: dict[str, list[Record]] = {}
    ended: Counter[str] = Counter()
    for record in records:
        if record["kind"] == "row":
            rows.setdefault(row_key(record), []).append(record)
            ended[row_key(record)] += 1
        elif record["kind"] == "failed":
            failures.setdefault(record["key"], []).append(record["reason"])
            ended[record["key"]] += 1
    judge = steadiness.Judge(records)
    clean = {key for key, found in rows.items() if any(not judge.reasons(r) for r in found)}
    done = clean | {key for key, found in rows.items() if len(found) >= 2}
    given_up = {k: v[-1] for k, v in failures.items() if len(v) >= MOST_FAILURES}
    lost = {key: count - ended[key] for key, count in starts.items() if count > ended[key]}
    for key, count in lost.items():
        if count >= MOST_STARTS and key not in rows:
            given_up[key] = f"the process ended {count} times while it was measured"
    return Progress(
        measured=frozenset(done),
        disturbed=frozenset(set(rows) - done),
        given_up={k: v for k, v in given_up.items() if k not in rows},
        interrupted=frozenset(set(lost) - set(rows)),
    )


def row_key(record: Record) -> str:
    """The case of a row."""
    return case_key(record["table"], record)


def best_rows(records: Iterable[Record]) -> list[Record]:
    """One row a case: the last undisturbed one, else the last; in measured order."""
    records = list(records)
    judge = steadiness.Judge(records)
    best: dict[str, Record] = {}
    for record in records:
        if record["kind"] != "row":
            continue
        reasons = judge.reasons(record)
        row = record | {"disturbed": bool(reasons), "disturbed_by": ", ".join(reasons)}
        row["anchor_ratio"] = judge.ratio_at(record["order"])
        held = best.get(row_key(record))
        if held is None or held["disturbed"] or not row["disturbed"]:
            best[row_key(record)] = row
    return sorted(best.values(), key=lambda row: row["order"])


def write_tables(folder: Path, records: Iterable[Record]) -> dict[str, int]:
    """Make the Parquet tables of a journal; returns table: rows.

    Raises:
        ValueError: a table cannot be written, or pyarrow is missing.
    """
    pa, parquet = _arrow()
    rows = best_rows(records)
    counts: dict[str, int] = {}
    for table, own in schema.TABLES.items():
        found = [row for row in rows if row["table"] == table]
        if not found:
            continue
        names = ("device", "runtime", "dtype", *own)
        names += tuple(name for name in schema.COMMON if name not in names)
        kinds = schema.COMMON | own
        fields = pa.schema([(name, getattr(pa, _ARROW.get(kinds[name], kinds[name]))())
                            for name in names])  # fmt: skip
        content = pa.Table.from_pylist(
            [{name: row.get(name) for name in names} for row in found], fields
        )
        sink = pa.BufferOutputStream()
        parquet.write_table(content, sink)
        files.writable_folder((folder / table).parent)
        files.write_whole(folder / f"{table}.parquet", sink.getvalue().to_pybytes())
        counts[table] = len(found)
    return counts


_ARROW = {"double": "float64", "bool": "bool_"}


def check_arrow() -> None:
    """Before anything is measured: can tables be written?

    Raises:
        ValueError: pyarrow is missing.
    """
    _arrow()


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            "Profiling writes Parquet with pyarrow: install the extra `profile`."
        ) from error
    return pyarrow, pyarrow.parquet
