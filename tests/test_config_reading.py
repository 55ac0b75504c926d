"""Tests of reading a configuration: where it comes from, what is lenient, and where an error is."""

from __future__ import annotations

import base64
import copy
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofunc.config import ConfigError, judgement, load_config
from zerofunc.config.reading import read_config

BATCH = {"train_batch_size": 8}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ds.json"


def test_a_path_json_text_base64_and_a_dict_give_the_same(path: Path) -> None:
    text = json.dumps({**BATCH, "fp16": {"enabled": True}})
    path.write_text(text, encoding="utf-8-sig")
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    expected = load_config(json.loads(text), 1)
    for spelled in (path, str(path), f"\n {text}", f"# {path}\n{text}", encoded):
        assert load_config(spelled, 1) == expected


def test_the_dict_of_the_user_is_not_changed() -> None:
    given_config = {
        **BATCH,
        "bfloat16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "cpu_offload": False, "prefetch_bucket_size": 5e7},
        "optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.99]}},
        "unknown": [1],
    }
    before = copy.deepcopy(given_config)
    config = load_config(given_config, 1)
    assert config.optimizer is not None
    config.optimizer.params["betas"].append(1)
    assert given_config == before


def test_comments_and_trailing_commas_are_read_over_and_strings_are_kept(path: Path) -> None:
    path.write_text(
        """// of a tutorial
        {
          "train_batch_size": 8,  # per step
          /* "fp16": {"enabled": true},
             // nested */
          "tensorboard": {"output_path": "s3://bucket/#1,}", "job_name": "a \\"b\\" /* c */",},
          "zerofunc": {"unsplit": ["moe", ], },
        }"""
    )
    config = load_config(path, 1)
    assert config.tensorboard.output_path == "s3://bucket/#1,}"
    assert config.tensorboard.job_name == 'a "b" /* c */'
    assert config.zerofunc.unsplit == ["moe"]
    assert not config.fp16.enabled


tricky = st.text('",:{}[]#/*\\ \na', max_size=8)


@settings(max_examples=50)
@given(values=st.dictionaries(tricky, tricky | st.lists(tricky, max_size=3), max_size=4), indent=st.booleans())
def test_any_json_is_read_as_json_is(values: dict[str, object], indent: bool) -> None:
    assert read_config(json.dumps(values, indent=1 if indent else None)).values == values


names = st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1, max_size=8)


@settings(max_examples=30)
@given(blocks=st.dictionaries(names, st.dictionaries(names, tricky, max_size=4), max_size=4))
def test_every_key_has_its_line(blocks: dict[str, dict[str, object]]) -> None:
    expected, line = {}, 1
    for name, block in blocks.items():
        expected[name] = line = line + 1
        for inner in block:
            expected[f"{name}.{inner}"] = line = line + 1
        line += bool(block)
    assert read_config(json.dumps(blocks, indent=1, ensure_ascii=False)).lines == expected


@pytest.mark.parametrize(
    ("text", "place", "excerpt"),
    [
        ('{\n  "train_batch_size": ,\n}', "line 2, column 23", '    "train_batch_size": ,\n                        ^'),
        ('{\n  "fp16": {"enabled": True}}', "line 2, column 23", '    "fp16": {"enabled": True}}'),
        ('{ // a comment\n"a": 1\n"b": 2}', "line 3, column 1", '  "b": 2}\n  ^'),
        ('{"a": 1,, }', "line 1, column 9", '  {"a": 1,, }\n          ^'),
        ('{"a": [,]}', "line 1, column 8", '  {"a": [,]}\n         ^'),
        ('{"a": /* never closed\n1}', "line 1, column 7", ""),
        ('{\n"a": 1,\n', "line 3, column 1", ""),
    ],
)
def test_a_syntax_error_names_file_line_and_column_and_shows_the_line(
    text: str, place: str, excerpt: str, path: Path
) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, 1)
    assert str(caught.value).startswith(f"{path}: {place}: ")
    assert excerpt in str(caught.value)


def test_of_a_long_line_the_part_around_the_error_is_shown() -> None:
    text = json.dumps({**{f"key{i}": i for i in range(99)}, "last": 1}).replace('"last": 1', '"last": oops')
    with pytest.raises(ConfigError) as caught:
        load_config(text, 1)
    _, shown, mark = str(caught.value).split("\n")
    assert len(shown) < 110
    assert shown[mark.index("^") :].startswith("oops")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"fp16": {}, "fp16": {}}', "config: line 1: duplicate key 'fp16', given on line 1 as well; keep one"),
        (
            '{"fp16": {\n"enabled": true,\n# off for now\n"enabled": false}}',
            "config: line 4: duplicate key 'fp16.enabled', given on line 2 as well; keep one",
        ),
    ],
)
def test_a_duplicate_key_is_refused_at_any_depth(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(text, 1)
    assert str(caught.value) == message


def test_the_same_key_in_two_objects_is_not_a_duplicate() -> None:
    assert read_config('{"a": [{"b": 1}, {"b": [2]}], "b": 3}').values == {"a": [{"b": 1}, {"b": [2]}], "b": 3}


@pytest.mark.parametrize("name", ["nowhere.json", "ds_config", "bm93aGVyZQ=="])  # the last is base64 of "nowhere"
def test_a_file_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: cannot be read: "):
        load_config(name, 1)


def test_what_is_not_an_object_is_refused(path: Path) -> None:
    path.write_text("[1]")
    with pytest.raises(ConfigError, match=r"ds.json: expected a JSON object, found \[1\]"):
        load_config(path, 1)
    with pytest.raises(ConfigError, match="expected a path, JSON text or a dict, found int"):
        load_config(3, 1)  # type: ignore[arg-type]


def test_every_problem_gets_a_line_with_file_and_line(path: Path) -> None:
    path.write_text(
        """{
          "train_batch_size": 3,
          "gradient_clipping": -1,
          "amp": {"enabled": true},
          "bfloat16": {
            "enabled": 1
          },
          "zero_optimization": {
            "prefetch_bucket_size": 0.5,
            "zenflow": {"topk_ratio": 0.1}
          },
          "optimizer": {
            "params": {"lr": "auto"}
          },
          "zerofunc": {"unsplit": [
            1
          ]}
        }"""
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, 2)
    lines = [line.removeprefix(f"{path}: ").split(": ")[:2] for line in str(caught.value).splitlines()]
    assert sorted(lines) == sorted(
        [
            ["line 2", "train_batch_size"],
            ["line 3", "gradient_clipping"],
            ["line 4", "amp"],
            ["line 6", "bf16.enabled"],
            ["line 9", "zero_optimization.stage3_prefetch_bucket_size"],
            ["line 10", "zero_optimization.zenflow"],
            ["line 12", "optimizer.type"],
            ["line 13", "optimizer.params.lr"],
            ["line 15", "zerofunc.unsplit.0"],
        ]
    )


def test_a_warning_names_file_and_line(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judgement, "_warned", set())
    path.write_text('{\n"train_batch_size": 8,\n"comms_config": {}}')
    with caplog.at_level(logging.WARNING, logger="zerofunc.config"):
        load_config(path, 1)
    assert caplog.messages[0].startswith(f"{path}: line 3: comms_config is not a known key and is ignored")


@pytest.mark.world_size(2)
def test_the_first_rank_alone_warns() -> None:
    from zerofunc.ranks.collectives import joined_ranks

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zerofunc.config")
    logger.addHandler(handler)
    try:
        load_config({**BATCH, "only_the_first_rank_says_this": 1}, 2)
    finally:
        logger.removeHandler(handler)
    joined = joined_ranks()
    assert joined is not None
    assert len(heard) == (1 if joined[0] == 0 else 0)
