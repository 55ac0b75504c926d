"""From a path, JSON text or a dict to plain values, with the line of every key.

JSON may have comments (`//`, `#`, `/* */`) and trailing commas, as hand-written configurations do. Both are blanked
out, so that line and column of an error are those of the file.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["ConfigError", "Document", "read_config", "show"]

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"({_STRING}|[:{{\[,]\s*,)|,(?=\s*[}}\]])", re.DOTALL)  # after a value, before a bracket
_KEY_OR_BRACKET = re.compile(rf"({_STRING})\s*:|{_STRING}|[{{}}\[\]]", re.DOTALL)


class ConfigError(ValueError):
    """A configuration that cannot be honoured; one line per problem, each naming its dotted key."""


def show(value: object) -> str:
    """Return a value as JSON spells it, shortened."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Document(NamedTuple):
    """A configuration as it was written."""

    name: str
    """What errors call it."""
    values: dict[str, Any]
    """Its content, for the reader to keep."""
    lines: dict[str, int]
    """Line of each dotted key, from 1; empty for a dict."""


def read_config(config: str | os.PathLike[str] | dict[str, Any]) -> Document:
    """Return what a path, JSON text (plain or in urlsafe base64) or a dict, which is copied, holds.

    Raises:
        ConfigError: If it cannot be read, is not a JSON object, or gives a key twice.
    """
    if isinstance(config, dict):
        return Document("config", copy.deepcopy(config), {})
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"config: expected a path, JSON text or a dict, found {type(config).__name__}")
    text = _text_of(config) if isinstance(config, str) else None
    if text is not None:
        return _parse(text, "config")
    name = os.fspath(config)
    try:
        return _parse(Path(name).read_text(encoding="utf-8-sig"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from error


def _text_of(config: str) -> str | None:
    """Return the JSON text that a string is or encodes; None for a path."""
    if "\n" in config or config.lstrip().startswith("{"):
        return config
    if os.path.exists(config):
        return None
    try:
        text = base64.urlsafe_b64decode(config).decode()
    except ValueError:
        return None
    return text if text.lstrip().startswith("{") else None


def _parse(text: str, name: str) -> Document:
    plain = _COMMENT.sub(lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]), text)
    plain = _TRAILING_COMMA.sub(lambda found: found[1] or " ", plain)
    try:
        values = json.loads(plain)
    except json.JSONDecodeError as error:
        place = f"{name}: line {error.lineno}, column {error.colno}: {error.msg}"
        raise ConfigError(f"{place}\n{_excerpt(text.split(chr(10))[error.lineno - 1], error.colno)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected a JSON object, found {show(values)}")
    return Document(name, values, _lines_of_keys(plain, name))


def _excerpt(line: str, column: int, width: int = 100) -> str:
    """Return the part of a line around a column, from 1, and a mark under it."""
    start = max(0, column - width // 2)
    return f"  {line[start : start + width].expandtabs(1)}\n  {' ' * (column - 1 - start)}^"


def _lines_of_keys(text: str, name: str) -> dict[str, int]:
    """Return the line of every dotted key of valid JSON; elements of a list share the key of the list."""
    lines: dict[str, int] = {}
    blocks: list[tuple[str, dict[str, int]]] = []  # those that are open, with the lines of their keys so far
    key = ""
    for token in _KEY_OR_BRACKET.finditer(text):
        if token[0] in ("{", "["):
            blocks.append((key, {}))
        elif token[0] in ("}", "]"):
            key, _ = blocks.pop()
        elif token[1]:
            prefix, siblings = blocks[-1]
            last = json.loads(token[1])
            key = f"{prefix}.{last}" if prefix else last
            line = text.count("\n", 0, token.start()) + 1
            if last in siblings:
                raise ConfigError(
                    f"{name}: line {line}: duplicate key '{key}', given on line {siblings[last]} as well; keep one"
                )
            siblings[last] = lines[key] = line
    return lines
