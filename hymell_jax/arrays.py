"""Trees of float32 arrays in one `.npz` file: no pickle, checked by size and hash on the way in."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

MAX_BYTES = 64 * 2**20
LARGEST = 1e6  # of a weight, a mean or a range: far beyond anything trained
SEPARATOR = "/"


def pack(tree: Mapping[str, Any]) -> bytes:
    """The file's content for nested dicts of arrays; the same tree gives the same bytes.

    Raises:
        ValueError: a name holds a slash.
    """
    flat: dict[str, np.ndarray] = {}

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
        if path.stat().st_size > MAX_BYTES:
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
    tree: dict[str, Any] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(info.file_size for info in archive.infolist()) > MAX_BYTES:
                raise ValueError(f"{where} holds more than {MAX_BYTES} bytes of arrays.")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            for path in arrays.files:
                _insert(tree, path, arrays[path], where)
    except (zipfile.BadZipFile, OSError, EOFError, KeyError, NotImplementedError) as error:
        raise ValueError(f"{where} is not a file of arrays: {error}.") from None
    return tree


def _insert(tree: dict[str, Any], path: str, array: np.ndarray, where: str) -> None:
    if array.dtype != np.float32 or array.ndim > 4:
        raise ValueError(f"{where}: {path} must be a float32 array of at most 4 axes.")
    if not (np.isfinite(array).all() and (np.abs(array) <= LARGEST).all()):
        raise ValueError(f"{where}: {path} holds a number beyond {LARGEST:g} or none.")
    *folders, name = path.split(SEPARATOR)
    node = tree
    for folder in folders:
        node = node.setdefault(folder, {})
        if not isinstance(node, dict):
            raise ValueError(f"{where}: {path} is both an array and a group.")
    if name in node:
        raise ValueError(f"{where}: {path} is there twice.")
    node[name] = array
