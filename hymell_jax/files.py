"""Reading JSON that a user supplies and writing results whole, for every module with files.

`read_json` answers any bad file with one sentence; `write_whole` leaves the old file or the new
one, never a part of either.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 8 * 1024 * 1024
"""The largest JSON file that is read."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise ValueError(f"it gives the key {_short(twice)} twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"it holds the number {_short(text)}, which is too large")
    return value


def _whole(text: str) -> int:
    if len(text) > 400:  # beyond the range of a float, and slow to parse
        raise ValueError(f"it holds a whole number of {len(text)} digits, which is too large")
    return int(text)


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _is_of_path(error: ValueError) -> bool:
    """Whether the system refuses the path itself: a NUL, or half a letter, is in it."""
    return isinstance(error, UnicodeError) or "null" in str(error)


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def parse_json(text: str, what: str) -> Any:
    """The value of one JSON text; `what` names it in messages, such as "device file x.json".

    Raises:
        ValueError: not JSON, a key given twice, NaN or Infinity, nested too deeply.
    """
    if not text.strip():
        raise ValueError(f"The {what} is empty.")
    try:
        return json.loads(
            text,
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_whole,
        )
    except json.JSONDecodeError as error:
        raise ValueError(
            f"The {what} is not valid JSON: {error.msg} at line {error.lineno}, "
            f"column {error.colno}."
        ) from None
    except RecursionError:
        raise ValueError(f"The {what} is nested too deeply.") from None
    except ValueError as error:
        raise ValueError(f"The {what} cannot be used: {error}.") from None


def check_regular(path: str | os.PathLike[str], name: str) -> os.stat_result:
    """What the system knows of a file, which is no pipe, device or folder: these may never end.

    Args:
        path: the file.
        name: for the message, such as "table 'x.csv'".

    Raises:
        ValueError: missing, not to be reached, or not a regular file.
    """
    try:
        info = os.stat(path)
    except OSError as error:
        raise ValueError(f"The {name} cannot be read: {_reason(error)}.") from None
    except ValueError:
        raise ValueError(f"The {name} cannot be read: the path is not valid.") from None
    if not stat.S_ISREG(info.st_mode):
        raise ValueError(f"The {name} is not a regular file.")
    return info


def read_json(path: str | os.PathLike[str], what: str = "JSON file") -> Any:
    """The value of one UTF-8 JSON file of at most `MAX_JSON_BYTES`.

    Args:
        path: the file.
        what: what it is, for messages: "device file", "model configuration".

    Raises:
        ValueError: missing, unreadable, not a regular file, too large, not UTF-8, not JSON, a key
            given twice, NaN or Infinity, nested too deeply.
    """
    name = f"{what} {str(path)!r}"
    info = check_regular(path, name)
    if info.st_size > MAX_JSON_BYTES:
        raise ValueError(f"The {name} is {info.st_size} bytes; at most {MAX_JSON_BYTES} are read.")
    try:
        with open(path, "rb") as stream:
            raw = stream.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ValueError(f"The {name} cannot be read: {_reason(error)}.") from None
    if len(raw) > MAX_JSON_BYTES:
        raise ValueError(f"The {name} is larger than the {MAX_JSON_BYTES} bytes that are read.")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"The {name} is not UTF-8 text (byte {error.start}).") from None
    return parse_json(text, name)


def writable_folder(path: str | os.PathLike[str]) -> Path:
    """The folder, made if it is missing, checked before long work starts.

    Raises:
        ValueError: it cannot be made or written.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:
        reason = _reason(error) if isinstance(error, OSError) else "the path is not valid"
        raise ValueError(f"The folder {str(path)!r} cannot be written: {reason}.") from None
    return folder


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    The bytes go to a temporary file in the same folder, are flushed to the disk and renamed over
    the target. The folder must exist. A symbolic link stays and its target is replaced.

    Args:
        path: the file to create or replace; a file without write permission is left alone.
        content: text is written as UTF-8.

    Raises:
        ValueError: the target is a folder or a special file, is read-only, or its folder is
            missing or not writable, or the disk is full.
    """
    data = content.encode("utf-8") if isinstance(content, str) else bytes(content)
    shown = str(path)
    temporary = None
    try:
        target = Path(os.path.realpath(path))
        mode = _mode_of(target, shown)
        draft, handle = _draft_of(target, mode)
        temporary = draft
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if mode is not None:
            os.chmod(draft, mode)
        os.replace(draft, target)
        temporary = None
    except OSError as error:
        raise ValueError(f"Cannot write {shown!r}: {_reason(error)}.") from None
    except ValueError as error:
        if _is_of_path(error):
            raise ValueError(f"Cannot write {shown!r}: the path is not valid.") from None
        raise
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    with contextlib.suppress(OSError):  # the rename itself, where folders can be flushed
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _draft_of(target: Path, mode: int | None) -> tuple[str, int]:
    """(path, handle) of a new file beside the target, with its permissions or the usual ones."""
    name = os.fsdecode(os.fsencode(target.name)[:100])
    draft = os.path.join(target.parent, f".{name}.{secrets.token_hex(6)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return draft, os.open(draft, flags, 0o666 if mode is None else mode | stat.S_IWUSR)


def _mode_of(target: Path, shown: str) -> int | None:
    """Permissions of the file that is replaced, None where there is none."""
    try:
        info = os.stat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(info.st_mode):
        raise ValueError(f"Cannot write {shown!r}: it is a folder.")
    if not stat.S_ISREG(info.st_mode):
        raise ValueError(f"Cannot write {shown!r}: it is not a regular file.")
    if not info.st_mode & 0o222:
        raise ValueError(f"Cannot write {shown!r}: the file is read-only.")
    return stat.S_IMODE(info.st_mode)
