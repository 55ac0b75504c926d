"""Tests of whole configurations as trainers ship them, of `zerofunc config` and of the schema for editors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from config_templates import TEMPLATES, autos, filled
from zerofunc.config import ConfigError, judge, judgement, load_config
from zerofunc.config.keys import ALIASES, DEPRECATED, KNOWN_KEYS, Verdict
from zerofunc.config.records import SECTIONS
from zerofunc.config.schema import json_schema
from zerofunc.tools.cli import app

templates = pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judgement, "_warned", set())


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json_schema())


def nested(key: str, value: object) -> dict[str, Any]:
    """A configuration that gives this dotted key, and what else is required."""
    for name in reversed(key.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    needed = {"type": "AdamW"} if key.startswith(("optimizer.", "scheduler.")) else {}
    block = key.partition(".")[0]
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 8,
        **value,
        **({block: {**needed, **value[block]}} if needed else {}),
    }


def is_accepted(config: dict[str, Any]) -> bool:
    try:
        load_config(config, 1)
    except ConfigError:
        return False
    return True


# Templates


@templates
def test_a_template_that_a_trainer_filled_in_loads_in_silence(
    template: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = load_config(filled(template), 2)
    assert not caplog.messages
    product = config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * 2
    assert config.train_batch_size == product
    assert config.zero_optimization.stage == template["zero_optimization"]["stage"]
    assert (config.optimizer is not None) == ("optimizer" in template)
    offloads = [config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param]
    given = [template["zero_optimization"].get(name) for name in ("offload_optimizer", "offload_param")]
    assert [o and o.device for o in offloads] == [g and g["device"] for g in given]


@templates
def test_a_raw_template_is_refused_for_what_only_a_trainer_knows(template: dict[str, Any]) -> None:
    refused = {finding.key for finding in judge(template, 2).findings if finding.verdict is Verdict.REFUSED}
    unknowable = {"train_batch_size", "train_micro_batch_size_per_gpu"}
    unknowable |= autos(template, "optimizer.params", "scheduler.params")
    assert refused == unknowable


@templates
def test_a_raw_template_loads_once_batch_and_optimizer_are_given(template: dict[str, Any]) -> None:
    rest = {key: value for key, value in template.items() if key not in ("optimizer", "scheduler")}
    config = load_config(rest, 2, lambda given: {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0})
    assert (config.train_micro_batch_size_per_gpu, config.gradient_clipping) == (2, 1.0)


# The command


def check(path: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["config", "check", str(path), *options])
    return result.exit_code, result.output


def test_check_shows_each_key_with_its_line_its_verdict_and_the_resolved_values(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        """{
          // for two ranks
          "train_batch_size": "auto",
          "train_micro_batch_size_per_gpu": 4,
          "bfloat16": {"enabled": true, "immediate_grad_update": true},
          "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "cpu_offload": true},
          "gradient_cliping": 1,
        }"""
    )
    code, output = check(path, "--world-size", "2")
    rows = {words[1]: " ".join(words) for words in map(str.split, output.splitlines()) if len(words) > 3}
    assert code == 0
    assert rows["train_batch_size"] == '3 train_batch_size "auto" honoured as if absent: 8'
    assert rows["bf16.enabled"] == "5 bf16.enabled true honoured"
    assert rows["bf16.immediate_grad_update"].startswith("5 bf16.immediate_grad_update true ignored gradients are")
    assert rows["zero_optimization.cpu_offload"].startswith(
        "6 zero_optimization.cpu_offload true honoured, old spelling"
    )
    assert rows["zero_optimization.offload_optimizer.device"].endswith('"cpu" honoured')
    assert rows["gradient_cliping"] == "7 gradient_cliping 1 unknown did you mean gradient_clipping?"
    resolved = json.loads(output[output.index("\n{") :])
    assert resolved == load_config(path, 2).model_dump(exclude_defaults=True)
    assert resolved["zero_optimization"]["reduce_bucket_size"] == 500_000_000


def test_check_ends_with_exit_code_1_if_anything_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 3, "amp": {"enabled": true},\n "fp16": {"loss_scale": -1}}')
    code, output = check(path, "--world-size", "2")
    text = " ".join(output.split())
    assert code == 1
    assert "1 train_batch_size 3 refused 3 is not divisible by accumulation 1 x ranks 2 = 2" in text
    assert '1 amp {"enabled": true} refused Apex amp is not supported' in text
    assert "2 fp16.loss_scale -1 refused expected a number >= 0, found -1" in text
    assert "Resolved" not in text


def test_check_of_what_cannot_be_read_says_where(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    assert check(path)[0] == 1
    path.write_text('{"train_batch_size": 8,\n "fp16": oops}')
    code, output = check(path)
    assert code == 1
    assert "line 2, column 10: Expecting value" in " ".join(output.split())
    assert output.endswith(' "fp16": oops}\n           ^\n')


# The schema


def test_the_command_prints_a_valid_schema() -> None:
    result = CliRunner().invoke(app, ["config", "schema"])
    assert result.exit_code == 0
    printed = json.loads(result.output)
    jsonschema.Draft202012Validator.check_schema(printed)
    assert printed == json_schema()


@templates
def test_the_schema_accepts_templates_raw_and_filled(
    template: dict[str, Any], validator: jsonschema.Draft202012Validator
) -> None:
    for config in (template, filled(template)):
        in_json = {key: value for key, value in config.items() if value != float("inf")}  # JSON has no infinity
        validator.validate(json.loads(json.dumps(in_json)))


def test_the_schema_accepts_every_default(validator: jsonschema.Draft202012Validator) -> None:
    validator.validate(load_config({"train_batch_size": 8}, 1).model_dump())


def part_of(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """What the schema says of a dotted key."""
    path, _, name = key.rpartition(".")
    block = schema["$defs"][SECTIONS[path].__name__] if path in SECTIONS and path else schema
    part = block if path in SECTIONS else block["properties"][path]
    return part["properties"][name]


FIELDS = [f"{path}.{name}".lstrip(".") for path, record in SECTIONS.items() for name in record.model_fields]


@pytest.mark.parametrize("key", FIELDS)
def test_schema_and_loader_agree_on_fields(key: str, validator: jsonschema.Draft202012Validator) -> None:
    assert part_of(validator.schema, key)["description"]
    for value in (None, [[]]):
        config = nested(key, value)
        expected = value is None and key not in ("optimizer.type", "scheduler.type")
        assert (validator.is_valid(config), is_accepted(config)) == (expected, expected), config


@pytest.mark.parametrize("key", KNOWN_KEYS)
def test_schema_and_loader_agree_on_keys_without_a_field(key: str, validator: jsonschema.Draft202012Validator) -> None:
    known = KNOWN_KEYS[key]
    assert known.reason in part_of(validator.schema, key)["description"]
    for value in (12345, {(known.flags or ("anything",))[0]: True}):
        config = nested(key, value)
        expected = known.verdict is not Verdict.REFUSED
        assert (validator.is_valid(config), is_accepted(config)) == (expected, expected), config
    for value in (*known.off, None, "auto"):
        config = nested(key, value)
        assert validator.is_valid(config) and is_accepted(config), config


@pytest.mark.parametrize("old", [*ALIASES, *DEPRECATED])
def test_a_second_spelling_has_the_schema_of_the_first(old: str, validator: jsonschema.Draft202012Validator) -> None:
    first = ALIASES.get(old) or DEPRECATED[old]
    part = part_of(validator.schema, old)
    assert part.get("anyOf") == part_of(validator.schema, first).get("anyOf")
    assert part.get("deprecated", False) == (old in DEPRECATED)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"zero_optimization": {"overlap_com": True}}, False),
        ({"zero_optimization": {"offload_param": {"device": "tape"}}}, False),
        ({"zero_optimization": {"stage": 4}}, False),
        ({"zero_optimization": True}, True),
        ({"zero_optimization": {"cpu_offload": True}}, True),
        ({"comms_config": {}, "$schema": "zerofunc.schema.json"}, True),
        ({"torch_autocast": {"enabled": True, "dtype": "half", "unknown": 1}}, True),
        ({"torch_autocast": {"dtype": "fp32"}}, False),
        ({"fp16": {"loss_scale": True}}, False),
        ({"optimizer": {"type": "Muon", "params": {"lr": [1, {}]}}}, True),
        ({"optimizer": {"params": {}}}, False),
    ],
)
def test_schema_and_loader_agree_on_blocks(
    config: dict[str, Any], expected: bool, validator: jsonschema.Draft202012Validator
) -> None:
    assert (validator.is_valid(config), is_accepted({"train_batch_size": 8, **config})) == (expected, expected)
