"""Tests of the configuration: what is accepted, warned about, refused, and in which words."""

from __future__ import annotations

import copy
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from zerofunc import config_keys
from zerofunc.config import Config, ConfigError, EngineConfig, load_config
from zerofunc.config_keys import ALIASES, DEPRECATED, KNOWN_KEYS, Verdict

BATCH = {"train_batch_size": 8}
sizes = st.integers(1, 64)


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_keys, "_warned", set())


def load(ranks: int = 1, **keys: Any) -> Config:
    return load_config({**BATCH, **keys}, ranks)


def warnings_of(caplog: pytest.LogCaptureFixture, **keys: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="zerofunc.config"):
        load(**keys)
    return caplog.messages


# Batch arithmetic


@given(micro=sizes, steps=sizes, ranks=sizes)
def test_any_two_batch_keys_give_the_third(micro: int, steps: int, ranks: int) -> None:
    full = {
        "train_batch_size": micro * steps * ranks,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    for left_out in (None, *full):
        config = load_config({key: value for key, value in full.items() if key != left_out}, ranks)
        assert {key: getattr(config, key) for key in full} == full


@given(micro=sizes, ranks=sizes)
def test_one_batch_key_gives_the_rest_with_one_accumulation_step(micro: int, ranks: int) -> None:
    for only in ({"train_batch_size": micro * ranks}, {"train_micro_batch_size_per_gpu": micro}):
        config = load_config(only, ranks)
        assert config.train_batch_size == micro * ranks
        assert config.train_micro_batch_size_per_gpu == micro
        assert config.gradient_accumulation_steps == 1


@given(total=sizes, micro=sizes, steps=sizes, ranks=sizes)
def test_what_is_accepted_always_multiplies_out(total: int, micro: int, steps: int, ranks: int) -> None:
    keys = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    for left_out in (None, *keys):
        try:
            config = load_config({key: value for key, value in keys.items() if key != left_out}, ranks)
        except ConfigError as error:
            assert "!=" in str(error) or "not divisible" in str(error)
        else:
            product = config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * ranks
            assert config.train_batch_size == product


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ((32, 4, 2), "train_batch_size 32 != micro 4 x accumulation 2 x ranks 2 = 16"),
        ((31, None, 2), "train_batch_size 31 is not divisible by accumulation 2 x ranks 2 = 4"),
        ((32, 3, None), "train_batch_size 32 is not divisible by micro 3 x ranks 2 = 6"),
        ((None, None, None), "train_batch_size or train_micro_batch_size_per_gpu: expected at least one"),
        ((None, None, 4), "train_batch_size or train_micro_batch_size_per_gpu: expected at least one"),
        ((0, None, None), "train_batch_size: expected a number > 0, found 0"),
        ((True, None, None), "train_batch_size: expected an integer, found true"),
        (("8", None, None), 'train_batch_size: expected an integer, found "8"'),
    ],
)
def test_a_batch_that_does_not_work_out_shows_its_arithmetic(keys: tuple[Any, ...], message: str) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    with pytest.raises(ConfigError) as caught:
        load_config(dict(zip(names, keys, strict=True)), 2)
    assert message in str(caught.value)


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size: expected an integer > 0, found 0"):
        load_config(BATCH, 0)


# Reading


def test_a_path_a_string_of_json_and_a_dict_give_the_same(tmp_path: Path) -> None:
    text = json.dumps({**BATCH, "fp16": {"enabled": True}})
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    assert load_config(path, 1) == load_config(str(path), 1) == load_config(f"\n {text}", 1)
    assert load_config(path, 1) == load_config(json.loads(text), 1)


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


def test_a_syntax_error_names_file_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{\n  "train_batch_size": ,\n}')
    with pytest.raises(ConfigError, match=r"broken\.json: line 2, column 23: "):
        load_config(path, 1)


@pytest.mark.parametrize("text", ['{"fp16": {}, "fp16": {}}', '{"fp16": {"enabled": true, "enabled": true}}'])
def test_a_duplicate_key_is_refused_at_any_depth(text: str) -> None:
    with pytest.raises(ConfigError, match=r"config: duplicate key '(fp16|enabled)'"):
        load_config(text, 1)


def test_a_file_that_is_not_there_or_not_an_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.json: cannot be read"):
        load_config(tmp_path / "nowhere.json", 1)
    path = tmp_path / "list.json"
    path.write_text("[1]")
    with pytest.raises(ConfigError, match=r"list.json: expected a JSON object, found \[1\]"):
        load_config(path, 1)
    with pytest.raises(ConfigError, match="expected a path, JSON text or a dict, found int"):
        load_config(3, 1)  # type: ignore[arg-type]


def test_every_problem_gets_a_line_with_the_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"train_batch_size": 3, "gradient_clipping": -1, "amp": {"enabled": true}, "fp16": {"enabled": 1}}'
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, 2)
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert all(line.startswith(f"{path}: ") for line in lines)


# Values


def test_defaults_are_those_of_a_plain_float32_run() -> None:
    config = load()
    assert config.optimizer is None and config.scheduler is None and config.steps_per_print is None
    assert config.gradient_clipping == 0.0 and not config.dataloader_drop_last
    assert config.zero_optimization.stage == 0 and config.zero_optimization.reduce_bucket_size is None
    assert not config.bf16.enabled and config.bf16.check_grad_overflow
    fp16 = config.fp16
    assert (fp16.enabled, fp16.loss_scale, fp16.initial_scale_power) == (False, 0, 16)
    assert (fp16.loss_scale_window, fp16.hysteresis, fp16.min_loss_scale) == (1000, 2, 1)
    assert not fp16.consecutive_hysteresis and not fp16.auto_cast
    assert config.zerofunc == EngineConfig()
    assert config.zerofunc.prefetch and not config.zerofunc.direct_backward and config.zerofunc.unsplit == []


def test_the_own_section_is_read() -> None:
    given_section = {
        "direct_backward": True,
        "page_bytes": 1e6,
        "resident_bytes": 0,
        "persistence_bytes": 4,
        "prefetch": False,
        "second_order": True,
        "timeout_s": 30,
        "unsplit": ["moe"],
    }
    assert load(zerofunc=given_section).zerofunc.model_dump() == given_section


def test_integral_floats_are_integers_and_others_are_refused() -> None:
    zero = load(zero_optimization={"stage": 3, "reduce_bucket_size": 5e8, "stage3_max_live_parameters": 1e14})
    assert zero.zero_optimization.reduce_bucket_size == 500_000_000
    assert type(zero.zero_optimization.stage3_max_live_parameters) is int
    with pytest.raises(ConfigError, match="reduce_bucket_size: expected an integer, found 0.5"):
        load(zero_optimization={"reduce_bucket_size": 0.5})


def test_zero_is_a_bucket_size() -> None:
    assert load(zero_optimization={"reduce_bucket_size": 0}).zero_optimization.reduce_bucket_size == 0


@pytest.mark.parametrize("stage", [4, -1, 1.5, True, "2"])
def test_a_stage_beyond_0_to_3_is_refused(stage: object) -> None:
    with pytest.raises(ConfigError, match="zero_optimization.stage: expected "):
        load(zero_optimization={"stage": stage})


@pytest.mark.parametrize(("value", "stage"), [(True, 1), (False, 0)])
def test_a_boolean_zero_section_means_stage_1_or_0(value: bool, stage: int) -> None:
    assert load(zero_optimization=value).zero_optimization.stage == stage


@pytest.mark.parametrize("key", ["max_live_parameters", "prefetch_bucket_size", "param_persistence_threshold"])
def test_a_stage3_key_may_leave_out_its_prefix(key: str) -> None:
    zero = load(zero_optimization={key: 7}).zero_optimization
    assert getattr(zero, f"stage3_{key}") == 7
    with pytest.raises(ConfigError, match=f"{key}: another spelling of zero_optimization.stage3_{key}"):
        load(zero_optimization={key: 7, f"stage3_{key}": 7})


def test_bfloat16_is_another_name_of_bf16() -> None:
    assert load(bfloat16={"enabled": True}).bf16.enabled
    with pytest.raises(ConfigError, match="bfloat16: another spelling of bf16"):
        load(bfloat16={"enabled": True}, bf16={"enabled": True})


def test_null_stands_for_the_default() -> None:
    config = load(gradient_clipping=None, fp16=None, zero_optimization={"offload_param": None}, data_types=None)
    assert config == load()


def test_infinite_steps_per_print_means_never() -> None:
    assert load(steps_per_print=math.inf).steps_per_print is None
    assert load(steps_per_print=1e5).steps_per_print == 100_000


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("gradient_clipping", -0.5, "gradient_clipping: expected a number >= 0, found -0.5"),
        ("gradient_clipping", True, "gradient_clipping: expected a number, found true"),
        ("gradient_clipping", math.nan, "gradient_clipping: expected a finite number, found NaN"),
        ("fp16", True, "fp16: expected an object, found true"),
        ("checkpoint", True, "checkpoint: expected an object, found true"),
        ("fp16", {"enabled": "yes"}, 'fp16.enabled: expected true or false, found "yes"'),
        ("fp16", {"loss_scale": True}, "fp16.loss_scale: expected a number, found true"),
        ("fp16", {"loss_scale": math.inf}, "fp16.loss_scale: expected a finite number, found Infinity"),
        ("fp16", {"loss_scale": -1}, "fp16.loss_scale: expected a number >= 0, found -1"),
        ("fp16", {"loss_scale_window": True}, "fp16.loss_scale_window: expected an integer, found true"),
        ("fp16", {"min_loss_scale": True}, "fp16.min_loss_scale: expected an integer, found true"),
        ("fp16", {"loss_scale_window": 0}, "fp16: loss_scale_window must be > 0 when loss_scale is 0 (dynamic)"),
        ("optimizer", {"params": {}}, "optimizer.type: expected a value, found none"),
        ("scheduler", {"type": 3}, "scheduler.type: expected a string, found 3"),
        ("scheduler", {"type": "a", "params": []}, "scheduler.params: expected an object, found []"),
        ("zerofunc", {"page_bytes": 0}, "zerofunc.page_bytes: expected a number > 0, found 0"),
        ("zerofunc", {"unsplit": "moe"}, 'zerofunc.unsplit: expected a list, found "moe"'),
        ("zerofunc", {"unsplit": [1]}, "zerofunc.unsplit.0: expected a string, found 1"),
        (
            "zero_optimization",
            {"offload_param": {"device": "tape"}},
            "zero_optimization.offload_param.device: expected 'none', 'cpu' or 'nvme', found \"tape\"",
        ),
    ],
)
def test_an_error_names_the_key_what_was_expected_and_what_was_found(key: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**{key: value})
    assert str(caught.value).startswith(f"config: {expected}")
    assert "pydantic" not in str(caught.value)


def test_a_static_loss_scale_needs_no_window() -> None:
    assert load(fp16={"loss_scale": 128, "loss_scale_window": 0}).fp16.loss_scale == 128.0


def test_bf16_and_fp16_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="bf16.enabled and fp16.enabled are both true: choose one"):
        load(bf16={"enabled": True}, fp16={"enabled": True})


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().gradient_clipping = 1.0


# "auto"


def test_auto_inside_a_section_means_the_default() -> None:
    config = load(
        fp16={"enabled": "auto", "loss_scale": "auto"},
        zero_optimization={"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": "auto", "leaf_module": "auto"},
    )
    assert config == load(zero_optimization={"stage": 2})


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"])
def test_auto_for_a_number_is_refused_with_its_key_alone(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({key: "auto"} if key.startswith("train") else {**BATCH, key: "auto"}, 1)
    message = f"'auto' is resolved by the Hugging Face Trainer or Accelerate; give a number for {key}"
    assert str(caught.value) == f"config: {key}: {message}"


def test_auto_is_refused_among_optimizer_and_scheduler_params() -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            optimizer={"type": "AdamW", "params": {"lr": "auto", "eps": 1e-8, "betas": "auto"}},
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        )
    keys = ["optimizer.params.lr", "optimizer.params.betas", "scheduler.params.warmup_num_steps"]
    assert [line.rpartition(" ")[2] for line in str(caught.value).splitlines()] == keys


# Offload


@pytest.mark.parametrize("block", ["offload_optimizer", "offload_param"])
def test_offload_is_accepted_where_it_changes_nothing(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_device(device: str) -> Config:
        return load(zero_optimization={"stage": 3, block: {"device": device, "pin_memory": True, "nvme_path": "/x"}})

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert getattr(load_device("none").zero_optimization, block).device == "none"
    assert getattr(load_device("cpu").zero_optimization, block).device == "cpu"
    with pytest.raises(ConfigError, match=f"zero_optimization.{block}.device: 'nvme' is not supported"):
        load_device("nvme")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert getattr(load_device("none").zero_optimization, block).device == "none"
    with pytest.raises(ConfigError, match=f"zero_optimization.{block}.device: 'cpu' .* accelerator is present"):
        load_device("cpu")


def test_old_spellings_are_understood_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    old = {"cpu_offload": True, "cpu_offload_params": False, "stage3_gather_fp16_weights_on_model_save": True}
    messages = warnings_of(caplog, zero_optimization=old)
    assert [message.rpartition(" ")[2].removeprefix("zero_optimization.") for message in messages] == [
        "offload_optimizer",
        "offload_param",
        "stage3_gather_16bit_weights_on_model_save",
    ]
    zero = load(zero_optimization=old).zero_optimization
    assert zero.offload_optimizer is not None and zero.offload_optimizer.device == "cpu"
    assert zero.offload_param is not None and zero.offload_param.device == "none"
    assert zero.stage3_gather_16bit_weights_on_model_save
    with pytest.raises(ConfigError, match="cpu_offload: another spelling of zero_optimization.offload_optimizer"):
        load(zero_optimization={"cpu_offload": True, "offload_optimizer": {"device": "none"}})


# Unknown and unsupported keys


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"gradient_cliping": 1},
            "gradient_cliping is not a known key and is ignored; did you mean gradient_clipping?",
        ),
        ({"qqq": {"enabled": True}}, "qqq is not a known key and is ignored"),
        ({"fp16": {"los_scale": 1}}, "fp16.los_scale is not a known key and is ignored; did you mean fp16.loss_scale?"),
        (
            {"zero_optimization": {"overlap_com": True}},
            "zero_optimization.overlap_com is not a known key and is ignored; "
            "did you mean zero_optimization.overlap_comm?",
        ),
        (
            {"zerofunc": {"page_byte": 1}},
            "zerofunc.page_byte is not a known key and is ignored; did you mean zerofunc.page_bytes?",
        ),
        (
            {"checkpoint": {"tag_validatio": 1}},
            "checkpoint.tag_validatio is not a known key and is ignored; did you mean checkpoint.tag_validation?",
        ),
    ],
)
def test_an_unknown_key_warns_with_the_nearest_known_one(
    keys: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of(caplog, **keys) == [message]
    assert warnings_of(caplog, **keys) == [], "one warning a process is enough"


@pytest.mark.parametrize(
    "keys",
    [
        {"amp": {"enabled": False}},
        {"torch_autocast": {"enabled": False, "dtype": "bfloat16"}},
        {"data_types": {"grad_accum_dtype": "fp32", "param_dtype": None}},
        {"tensorboard": {"enabled": False, "output_path": "x"}},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
        {"compile": {"deepcompile": False}},
        {"tensor_parallel": {"autotp_size": 0}},
        {"sequence_parallel_size": 1, "gradient_predivide_factor": 1.0, "gradient_allreduce_op": "mean"},
        {"checkpoint": {"tag_validation": "Warn", "use_node_local_storage": False, "load_universal": False}},
        {"wall_clock_breakdown": False, "memory_breakdown": False, "dump_state": False, "sparse_gradients": False},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {"comms_logger": {"enabled": False}, "flops_profiler": {"enabled": False}, "aio": {"block_size": 1}},
        {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True},
        {"bf16": {"enabled": True, "immediate_grad_update": True}},
        {
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": False,
                "reduce_scatter": True,
                "allgather_partitions": False,
                "round_robin_gradients": True,
                "sub_group_size": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
                "mics_shard_size": -1,
                "zero_hpz_partition_size": 1,
                "zenflow": None,
                "ignore_unused_parameters": True,
            }
        },
    ],
)
def test_a_known_key_that_changes_nothing_is_accepted_in_silence(
    keys: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of(caplog, **keys) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown is ignored: there are no timers; use torch.profiler"),
        ({"memory_breakdown": True}, "memory_breakdown is ignored: "),
        ({"dump_state": True}, "dump_state is ignored: "),
        ({"log_level": "info"}, "log_level is ignored: set the level of the logger 'zerofunc'"),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler is ignored: "),
        ({"activation_checkpointing": {"profile": True}}, "activation_checkpointing is ignored: "),
        ({"checkpoint": {"parallel_write": {"pipeline_stage": True}}}, "checkpoint.parallel_write is ignored: "),
    ],
)
def test_a_known_key_that_is_not_needed_warns_once_with_the_reason(
    keys: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    messages = warnings_of(caplog, **keys)
    assert len(messages) == 1 and messages[0].startswith(message)
    assert warnings_of(caplog, **keys) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"amp": {"enabled": True}}, "amp: Apex amp is not supported; use bf16 or fp16"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast: not supported by this version"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype: not supported by this version"),
        ({"communication_data_type": "fp16"}, "communication_data_type: not supported by this version"),
        ({"tensorboard": {"enabled": True}}, "tensorboard: not supported by this version"),
        ({"csv_monitor": {"enabled": True}}, "csv_monitor: not supported by this version"),
        ({"wandb": {"enabled": True}}, "wandb: not supported by this version"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op: not supported by this version"),
        ({"prescale_gradients": True}, "prescale_gradients: not supported"),
        ({"sparse_gradients": True}, "sparse_gradients: gradients are reduced as dense flat pages"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation: not supported"),
        ({"compression_training": {"a": {"b": {"enabled": True}}}}, "compression_training: not supported"),
        ({"compile": {"deepcompile": True}}, "compile: deepcompile is not supported"),
        ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel: not supported"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention: not supported"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size: sequence parallelism is not supported"),
        ({"checkpoint": {"tag_validation": "Fail"}}, "checkpoint.tag_validation: not supported by this version"),
        ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal: not supported"),
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states: not supported"),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads: master weights"),
        ({"zero_optimization": {"mics_shard_size": 8}}, "zero_optimization.mics_shard_size: not supported"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights: not"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow: not supported"),
        ({"zero_optimization": {"leaf_module": {"names": ["a"]}}}, "zero_optimization.leaf_module: name the modules"),
        ({"zero_optimization": {"ignore_unused_parameters": False}}, "zero_optimization.ignore_unused_parameters: not"),
        (
            {"zero_optimization": {"stage": 3, "elastic_checkpoint": True}},
            "zero_optimization: elastic_checkpoint is not supported at stage 3",
        ),
    ],
)
def test_what_would_change_the_outcome_is_refused_when_it_is_on(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**keys)
    assert str(caught.value).startswith(f"config: {message}")
    assert len(str(caught.value).splitlines()) == 1


# The table of keys


def _field_names(model: type[BaseModel], prefix: str = "") -> set[str]:
    names = set()
    for name, field in model.model_fields.items():
        names.add(f"{prefix}{name}")
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names |= _field_names(kind, f"{prefix}{name}.")
    return names


def test_a_key_is_either_a_field_or_in_the_table_or_another_spelling_of_one() -> None:
    fields = _field_names(Config)
    assert not fields & set(KNOWN_KEYS)
    assert {*ALIASES.values(), *DEPRECATED.values()} <= fields | set(KNOWN_KEYS)
    assert not {*ALIASES, *DEPRECATED} & (fields | set(KNOWN_KEYS))


def test_every_verdict_that_is_spoken_has_a_reason() -> None:
    assert all(known.reason or known.verdict is Verdict.SILENT for known in KNOWN_KEYS.values())


def test_a_typical_template_with_numbers_filled_in_loads(caplog: pytest.LogCaptureFixture) -> None:
    template = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.999], "eps": 1e-8}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none"},
            "overlap_comm": True,
            "reduce_bucket_size": 1e6,
            "sub_group_size": 1e9,
            "stage3_max_live_parameters": 1e9,
        },
    }
    with caplog.at_level(logging.WARNING):
        config = load_config(template, 4)
    assert not caplog.messages
    assert config.train_batch_size == 32
    assert config.optimizer is not None and config.optimizer.params["betas"] == [0.9, 0.999]
    assert config.scheduler is not None and config.scheduler.type == "WarmupLR"
