"""The JSON schema of a configuration, for editors: from the records and the table of known keys."""

from __future__ import annotations

from typing import Any

from zerofunc.config.keys import ALIASES, BOOLEAN_SECTIONS, DEPRECATED, KNOWN_KEYS, LENIENT, KnownKey, Verdict
from zerofunc.config.records import SECTIONS, Config

__all__ = ["json_schema"]

_OFF = [None, "auto"]
_FALSE = [False, 0, "", *_OFF]


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12) of what `load_config` accepts, but for what depends on several keys.

    Any value may be null or "auto". A key that is refused accepts the values that leave it off.
    """
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema |= {"title": "zerofunc", "description": "Configuration of training, in DeepSpeed's format."}
    del schema["required"]  # batch keys follow from each other
    for block in (schema, *schema["$defs"].values()):
        required = block.get("required", ())
        for name, part in block["properties"].items():
            block["properties"][name] = part if name in required else _or_default(part)
    blocks = {path: schema["$defs"][record.__name__] if path else schema for path, record in SECTIONS.items()}
    for key, known in KNOWN_KEYS.items():
        path, _, name = key.rpartition(".")
        if path not in blocks:
            blocks[path] = schema["properties"][path] = {"type": ["object", "null"], "properties": {}}
        blocks[path]["properties"][name] = _known(known)
    for path, block in blocks.items():
        block["additionalProperties"] = path in LENIENT
    for key in BOOLEAN_SECTIONS:
        _property(blocks, key)["anyOf"].append({"type": "boolean"})
    for key, first in {**ALIASES, **DEPRECATED}.items():
        path, _, name = key.rpartition(".")
        old = {"deprecated": True, "description": f"Write {first}."} if key in DEPRECATED else {}
        blocks[path]["properties"][name] = _property(blocks, first) | old
    return schema


def _property(blocks: dict[str, dict[str, Any]], key: str) -> dict[str, Any]:
    path, _, name = key.rpartition(".")
    part: dict[str, Any] = blocks[path]["properties"][name]
    return part


def _or_default(part: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field that may be null or "auto" as well."""
    about: dict[str, Any] = {name: part.pop(name) for name in ("description", "default") if name in part}
    part.pop("title", None)
    if isinstance(about.get("default"), dict):
        del about["default"]  # its fields say it
    options = [option for option in part.get("anyOf", [part]) if option != {"type": "null"}]
    return {"anyOf": [*options, {"enum": _OFF}], **about}


def _known(known: KnownKey) -> dict[str, Any]:
    """Return the schema of a key without a field."""
    about: dict[str, Any] = {"description": f"{known.verdict.value}: {known.reason}"}
    if known.verdict is not Verdict.REFUSED:
        return about
    empty = {"properties": {flag: {"enum": _FALSE} for flag in known.flags}} if known.flags else {"maxProperties": 0}
    return {"anyOf": [{"enum": [*known.off, *_OFF]}, {"type": "object", **empty}], **about}
