"""Outputs of commands, checked against the schema that the package documents."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from hymell_jax.output_schema import output_schema


def check(command: str, content: Any) -> None:
    """Fail where the content is not what `hymell COMMAND --json` prints."""
    jsonschema.Draft202012Validator(output_schema(command)).validate(content)


def conforming(command: str, text: str) -> Any:
    """The content of an output that is as documented, without NaN or Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not a JSON number")

    content = json.loads(text, parse_constant=refuse)
    check(command, content)
    return content
