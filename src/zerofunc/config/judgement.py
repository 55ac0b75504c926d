"""The verdict on every key of a configuration, and the resolved configuration if none is refused."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from zerofunc.config.batch import BatchSizes, resolve_batch
from zerofunc.config.findings import Finding, auto_refusal, by_table, refusals, sentence, unknown
from zerofunc.config.keys import ALIASES, BOOLEAN_SECTIONS, DEPRECATED, KNOWN_KEYS, Verdict, first_spelling
from zerofunc.config.reading import ConfigError, Document, read_config, show
from zerofunc.config.records import SECTIONS, Config
from zerofunc.ranks.collectives import joined_ranks

__all__ = ["Defaults", "Judgement", "judge", "load_config"]

M = TypeVar("M", bound=BaseModel)
Defaults = Callable[[Mapping[str, Any]], Mapping[str, object]]
"""From the values that are given to those of keys, dotted, that are absent."""
_logger = logging.getLogger("zerofunc.config")
_warned: set[str] = set()
_CONTAINERS = {key.rpartition(".")[0] for key in KNOWN_KEYS} - SECTIONS.keys()
"""Blocks that have known keys inside, but no record."""
_NAMED_CHOICES = ("optimizer", "scheduler")


@dataclass(frozen=True)
class Judgement:
    """What `judge` found out."""

    document: Document
    """The configuration as it was written."""
    findings: list[Finding]
    """One for every key, in the order of the document where it gives them; refusals come last."""
    config: Config | None
    """The resolved configuration; None if anything is refused."""

    def line_of(self, key: str) -> int | None:
        """Return the line of a key or else of the block around it, from 1; None where the document has no lines."""
        lines = {first_spelling(given): line for given, line in self.document.lines.items()} | self.document.lines
        while key and key not in lines:
            key = key.rpartition(".")[0]
        return lines.get(key)

    def message(self, finding: Finding) -> str:
        """Return what a warning or an error says of a finding, with file and line."""
        line = self.line_of(finding.key)
        return f"{self.document.name}: {'' if line is None else f'line {line}: '}{sentence(finding)}"


def load_config(
    config: str | os.PathLike[str] | dict[str, Any], world_size: int, defaults: Defaults | None = None
) -> Config:
    """Return the resolved configuration; local, the same on every rank that reads the same input.

    What is ignored, unknown or spelled in an old way is logged by the first rank, once per process.

    Args:
        config: Path of a JSON file, JSON text, the same in urlsafe base64, or a dict, which is not changed. Comments
            and trailing commas are allowed.
        world_size: Number of data-parallel ranks, for the batch arithmetic.
        defaults: What is taken for keys that are absent, null or "auto"; each one taken is logged.

    Raises:
        ConfigError: With one line for every problem found, each naming file and line, the dotted key, what was
            expected and what was found.
    """
    judgement = judge(config, world_size, defaults)
    refused = [finding for finding in judgement.findings if finding.verdict is Verdict.REFUSED]
    if judgement.config is None:
        raise ConfigError("\n".join(map(judgement.message, refused)))
    is_first = (joined_ranks() or (0, 1))[0] == 0
    for finding in judgement.findings:
        if sentence(finding) and finding.key not in _warned and is_first:
            _warned.add(finding.key)
            _logger.warning(judgement.message(finding))
    return judgement.config


def judge(
    config: str | os.PathLike[str] | dict[str, Any], world_size: int, defaults: Defaults | None = None
) -> Judgement:
    """Return the verdict on every key; arguments as `load_config`, without its warnings and errors.

    Raises:
        ConfigError: If the configuration cannot be read at all.
        ValueError: If there is no rank.
    """
    if world_size < 1:
        raise ValueError(f"world_size: expected an integer > 0, found {world_size}")
    document = read_config(config)
    values, findings = _screen(document.values)
    for key, value in (defaults(values) if defaults is not None else {}).items():
        prefix, _, name = key.rpartition(".")
        block = values.setdefault(prefix, {}) if prefix else values
        if isinstance(block, dict) and name not in block:
            block[name] = value
            findings.append(Finding(key, None, Verdict.DEFAULT, f"{show(value)} is taken"))
    given = {key: values.pop(key) for key in BatchSizes.model_fields if key in values}
    sizes, refused = _batch(given, findings, world_size)
    # Other problems are found even where the batch sizes are wrong.
    resolved, more = _validated(Config, values | (sizes or dict.fromkeys(BatchSizes.model_fields, 1)))
    refused += more
    replaced = {first_spelling(finding.key) for finding in refused}
    kept = [
        finding
        for finding in findings
        if finding.verdict is not Verdict.HONOURED or first_spelling(finding.key) not in replaced
    ]
    findings = kept + refused
    is_refused = any(finding.verdict is Verdict.REFUSED for finding in findings)
    return Judgement(document, findings, None if is_refused else resolved)


def _batch(given: dict[str, Any], findings: list[Finding], ranks: int) -> tuple[dict[str, int] | None, list[Finding]]:
    """Return the three batch keys, or None and what is wrong with those given."""
    sizes, refused = _validated(BatchSizes, given)
    if sizes is None:
        return None, refused
    try:
        return resolve_batch(sizes, ranks), []
    except ConfigError as error:
        wanted = {"train_batch_size", "train_micro_batch_size_per_gpu"}
        autos = [finding.key for finding in findings if finding.value == "auto" and finding.key in wanted]
        if autos and not wanted & given.keys():
            return None, [auto_refusal(key, " or ".join(autos)) for key in autos]
        key, _, note = str(error).partition(": ")
        return None, [Finding(key, given.get(key), Verdict.REFUSED, note)]


def _validated(model: type[M], values: dict[str, Any]) -> tuple[M | None, list[Finding]]:
    """Return the record of these values, or None and what is wrong with them."""
    try:
        return model.model_validate(values), []
    except ValidationError as error:
        return None, refusals(error)


def _screen(block: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[Finding]]:
    """Return the keys of a block that have a field and a value, under their first spellings, and every finding."""
    kept: dict[str, Any] = {}
    findings: list[Finding] = []
    for given, given_value in block.items():
        key = f"{prefix}.{given}" if prefix else str(given)
        first, value = _first(key, given_value)
        name = first.removeprefix(f"{prefix}.")
        if first != key and (name in block or name in kept):
            note = f"another spelling of {first}, which is given as well; keep one"
            findings.append(Finding(key, given_value, Verdict.REFUSED, note))
        elif "." in name:
            findings.append(Finding(key, given_value, Verdict.UNKNOWN, "blocks are objects, not dotted names"))
        else:
            if key in DEPRECATED or value is not given_value:
                note = f"write {first if key in DEPRECATED else show(value)}"
                findings.append(Finding(key, given_value, Verdict.OLD, note))
            part, found = _screen_key(key, first, value)
            findings += found
            kept |= {} if part is None else {name: part}
    return kept, findings


def _first(key: str, value: object) -> tuple[str, object]:
    """Return the first spelling of a key in a block that has its own, and of a boolean in place of a section."""
    first = ALIASES.get(key) or DEPRECATED.get(key) or key
    return first, BOOLEAN_SECTIONS[first][value] if isinstance(value, bool) and first in BOOLEAN_SECTIONS else value


def _screen_key(key: str, first: str, value: Any) -> tuple[Any, list[Finding]]:
    """Return the value to keep, None for none, and the findings at and below a key, given its first spelling too."""
    if first in KNOWN_KEYS:
        return None, [by_table(key, first, value)]
    prefix, _, name = first.rpartition(".")
    if first in SECTIONS or first in _CONTAINERS:
        if isinstance(value, dict):
            inside, findings = _screen(value, first)
            return inside if first in SECTIONS else None, findings
        if first in _CONTAINERS and value is not None:
            return None, [Finding(key, value, Verdict.REFUSED, f"expected an object, found {show(value)}")]
    elif prefix not in SECTIONS or name not in SECTIONS[prefix].model_fields:
        return None, [unknown(key, value)]
    autos = [auto_refusal(place, place) for place in _autos(value, key)] if prefix in _NAMED_CHOICES else []
    if autos or value is None or value == "auto":
        return None, autos or [Finding(key, value, Verdict.HONOURED, "as if absent")]
    return value, [Finding(key, value, Verdict.HONOURED, "" if key == first else f"the same as {first}")]


def _autos(value: object, key: str) -> list[str]:
    """Return the dotted keys at and below `key` whose value is "auto"."""
    if isinstance(value, dict):
        return [place for name, part in value.items() for place in _autos(part, f"{key}.{name}")]
    return [key] if value == "auto" else []
