"""What is found about one key of a configuration, and how it is said."""

from __future__ import annotations

import difflib
from typing import NamedTuple

from pydantic import ValidationError

from zerofunc.config.keys import ALIASES, KNOWN_KEYS, LENIENT, Verdict, is_off
from zerofunc.config.reading import show
from zerofunc.config.records import SECTIONS

__all__ = ["Finding", "auto_refusal", "by_table", "refusals", "sentence", "unknown"]


class Finding(NamedTuple):
    """The verdict on one key."""

    key: str
    """Dotted, in the spelling given."""
    value: object
    """As given."""
    verdict: Verdict
    note: str = ""
    """Why, and what to do."""


_SENTENCES = {
    Verdict.OLD: "{key} is an old spelling; {note}",
    Verdict.DEFAULT: "{key} is not given: {note}",
    Verdict.IGNORED: "{key} is ignored: {note}",
    Verdict.UNKNOWN: "{key} is not a known key and is ignored; {note}",
    Verdict.REFUSED: "{key}: {note}",
}


def sentence(finding: Finding) -> str:
    """Return what a warning or an error says; "" where nothing needs saying."""
    text = _SENTENCES.get(finding.verdict, "").format(key=finding.key, note=finding.note)
    return text.removesuffix("; ")


def by_table(key: str, first_key: str, value: object) -> Finding:
    """Return what `KNOWN_KEYS` says of a key, given its first spelling and its value."""
    known = KNOWN_KEYS[first_key]
    if known.verdict is not Verdict.HONOURED and is_off(known, value):
        return Finding(key, value, Verdict.HONOURED, "changes nothing")
    found = f" (found {show(value)})" if known.verdict is Verdict.REFUSED else ""
    return Finding(key, value, known.verdict, f"{known.reason}{found}")


def unknown(key: str, value: object) -> Finding:
    """Return what a key gets that nobody knows, with the nearest one that somebody does."""
    prefix, _, name = key.rpartition(".")
    start = f"{prefix}." if prefix else ""
    spellings = [known.removeprefix(start) for known in (*KNOWN_KEYS, *ALIASES) if known.startswith(start)]
    fields = SECTIONS[prefix].model_fields if prefix in SECTIONS else ()
    neighbours = {*fields, *(known.partition(".")[0] for known in spellings)}
    near = difflib.get_close_matches(name, sorted(neighbours), n=1)
    hint = f"did you mean {start}{near[0]}?" if near else ""
    if prefix in LENIENT:
        return Finding(key, value, Verdict.UNKNOWN, hint)
    return Finding(key, value, Verdict.REFUSED, f"not a known key; {hint or 'remove it'}")


def auto_refusal(key: str, wanted: str) -> Finding:
    """Return what "auto" gets where it stands for a value that nobody here knows."""
    note = f"'auto' is resolved by the Hugging Face Trainer or Accelerate; give a number for {wanted}"
    return Finding(key, "auto", Verdict.REFUSED, note)


_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
    "greater_than": "a number > {gt:g}",
    "greater_than_equal": "a number >= {ge:g}",
    "less_than_equal": "a number <= {le:g}",
    "literal_error": "{expected}",
}


def refusals(error: ValidationError) -> list[Finding]:
    """Return a finding per error of pydantic: dotted key, what was expected, what was found."""
    findings = []
    for detail in error.errors(include_url=False):
        kind, path, value, context = detail["type"], detail["loc"], detail["input"], detail.get("ctx", {})
        if kind == "value_error":
            note = str(context["error"])
            if isinstance(value, dict):  # keys that contradict each other; the message begins with one of them
                name, _, note = note.partition(": ")
                path, value = (*path, name), value.get(name)
        elif kind == "missing":
            note, value = "expected a value, found none", None
        else:
            expected = _EXPECTED[kind].format_map(context) if kind in _EXPECTED else detail["msg"]
            note = f"expected {expected}, found {show(value)}"
        findings.append(Finding(".".join(map(str, path)), value, Verdict.REFUSED, note))
    return findings
