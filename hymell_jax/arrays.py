"""Trees of float32 arrays in one `.npz` file: no pickle, checked by size and hash on the way in."""

from __future__ import annotations

import hashlib
import io
import lzma
import stat
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hymell_jax.files import read_json, write_whole
from hymell_jax.types import reason

MAX_BYTES = 64 * 2**20
MAX_ARRAYS, MAX_DEPTH = 4096, 16
LARGEST = 1e6  # of a weight, a mean or a range: far beyond anything trained
SEPARATOR = "/"


def pack(tree: Mapping[str, Any]) -> bytes:
    """The file's content for nested dicts of arrays; the same tree gives the same bytes.

    Raises:
        ValueError: a name holds a slash.
    """
    flat: dict[str, Any] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, Mapping):
            for key in sorted(node):
                if SEPARATOR in key:
                    raise ValueError(f"A name must not hold {SEPARATOR!r}; got {key!r}.")
                walk(node[key], f"{path}{SEPARATOR}{key}" if path else key)
        else:
            flat[path] = np.asarray(node, np.float32)

    walk(tree, "")
    stream = io.BytesIO()
    np.savez(stream, **flat)
    return stream.getvalue()


def file_names(path: Path) -> tuple[str, str]:
    """Names that the arrays of a JSON file may have, beside it."""
    return f"{path.stem}.npz", f"{path.stem}.2.npz"


def free_name(path: Path) -> str:
    """The name for new arrays of a JSON file: never that of the arrays that it names now, so that
    the old pair stays whole until the JSON is replaced."""
    first, second = file_names(path)
    try:
        record = read_json(path)["arrays"]
        return second if record["file"] == first else first
    except (ValueError, KeyError, TypeError):
        return first


def write_pair(path: Path, text: str, packed: bytes | None, name: str) -> None:
    """Write a JSON file and the arrays that it names: the old pair or the new one, never a mix.

    Args:
        path: of the JSON file.
        text: its content.
        packed: the arrays; None where there are none.
        name: of their file, from `free_name`.

    Raises:
        ValueError: the folder cannot be written.
    """
    if packed is not None:
        write_whole(path.with_name(name), packed)
    write_whole(path, text)
    for other in file_names(path):
        if packed is None or other != name:
            path.with_name(other).unlink(missing_ok=True)


def checked_file(record: Any, path: Path, where: str) -> tuple[Path, str]:
    """(file of the arrays, SHA-256) that the record of a JSON file names, beside it.

    Raises:
        ValueError: another name, or no hash.
    """
    known = file_names(path)
    name, sha256 = (
        record.get(key) if isinstance(record, Mapping) else None for key in ("file", "sha256")
    )
    if name not in known or not isinstance(sha256, str):
        raise ValueError(f"{where}: arrays must name {known[0]!r}, beside it, and its SHA-256.")
    return path.with_name(name), sha256


def digest(content: bytes) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def read(path: Path, sha256: str, where: str) -> dict[str, Any]:
    """Nested dicts of float32 arrays from a file that `pack` made.

    Args:
        path: of the file.
        sha256: that its content must have.
        where: how error messages call it.

    Raises:
        ValueError: missing, too large, of another hash, not such a file, or with a number that is
            not finite or beyond `LARGEST`.
    """
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(f"{where} is not a regular file.")
        if info.st_size > MAX_BYTES:
            raise ValueError(f"{where} is larger than the {MAX_BYTES} bytes that are read.")
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}.") from None
    if digest(content) != sha256:
        raise ValueError(f"{where} is damaged: its SHA-256 is not the one on record.")
    return unpack(content, where)


def unpack(content: bytes, where: str) -> dict[str, Any]:
    """Nested dicts of float32 arrays from the bytes that `pack` made.

    Raises:
        ValueError: not such a file, too large once unpacked, or a number that is not finite or
            beyond `LARGEST`.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
        if sum(info.file_size for info in members) > MAX_BYTES or len(members) > MAX_ARRAYS:
            raise _Unusable(f"holds more than {MAX_BYTES} bytes or {MAX_ARRAYS} arrays.")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            found = [(path, arrays[path]) for path in arrays.files]
    except _Unusable as error:
        raise ValueError(f"{where} {error}") from None
    except _DAMAGE as error:
        raise ValueError(f"{where} is not a file of arrays: {reason(error)}.") from None
    tree: dict[str, Any] = {}
    for path, array in found:
        _insert(tree, path, array, where)
    return tree


class _Unusable(Exception):
    """A sound file with too much in it."""


_DAMAGE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, tokenize.TokenError, OSError,
    EOFError, KeyError, ValueError, TypeError, RuntimeError, SyntaxError, MemoryError,
    OverflowError,
)  # fmt: skip
"""What zipfile and NumPy raise at damaged or crafted files."""


def _insert(tree: dict[str, Any], path: str, array: Any, where: str) -> None:
    *folders, name = path.split(SEPARATOR)
    shown = repr(path[:60])
    if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.ndim > 4:
        raise ValueError(f"{where}: {shown} must be a float32 array of at most 4 axes.")
    if not (np.isfinite(array).all() and (np.abs(array) <= LARGEST).all()):
        raise ValueError(f"{where}: {shown} holds a number beyond {LARGEST:g} or none.")
    if len(folders) > MAX_DEPTH:
        raise ValueError(f"{where}: {shown} lies more than {MAX_DEPTH} groups deep.")
    node = tree
    for folder in folders:
        node = node.setdefault(folder, {})
        if not isinstance(node, dict):
            raise ValueError(f"{where}: {shown} is both an array and a group.")
    if name in node:
        raise ValueError(f"{where}: {shown} is there twice.")
    node[name] = array
