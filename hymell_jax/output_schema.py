"""The one JSON Schema of everything that the commands print under `--json`."""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any

COMMANDS = (
    "predict", "report", "search", "front", "explain", "sweep", "compare", "rank", "evaluate",
    "fit", "import", "devices", "models", "profile",
)  # fmt: skip
"""Definitions that are a whole output; `front` is that of `hymell search --pareto`."""


@functools.cache
def _text() -> str:
    file = importlib.resources.files("hymell_jax") / "output.schema.json"
    return file.read_text(encoding="utf-8")


def output_schema(command: str | None = None) -> dict[str, Any]:
    """The schema of one command's output, or the whole document; JSON Schema 2020-12.

    Raises:
        ValueError: a command that prints no JSON.
    """
    document = json.loads(_text())
    if command is None:
        return document
    if command not in COMMANDS:
        raise ValueError(f"There is no output {command!r}; there are {', '.join(COMMANDS)}.")
    return document | {"$ref": f"#/$defs/{command}"}
