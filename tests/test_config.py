"""Tests of the configuration: what is accepted, warned about, refused, and in which words."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerofunc.config import Config, ConfigError, EngineConfig, judgement, load_config
from zerofunc.config.keys import ALIASES, DEPRECATED, KNOWN_KEYS, first_spelling
from zerofunc.config.records import SECTIONS

BATCH = {"train_batch_size": 8}
sizes = st.integers(1, 64)


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judgement, "_warned", set())


def load(ranks: int = 1, **keys: Any) -> Config:
    return load_config({**BATCH, **keys}, ranks)


def warnings_of(caplog: pytest.LogCaptureFixture, **keys: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="zerofunc.config"):
        load(**keys)
    return [message.removeprefix("config: ") for message in caplog.messages]


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
        ((32, 4, 2), "train_batch_size: 32 != micro 4 x accumulation 2 x ranks 2 = 16"),
        ((31, None, 2), "train_batch_size: 31 is not divisible by accumulation 2 x ranks 2 = 4"),
        ((32, 3, None), "train_batch_size: 32 is not divisible by micro 3 x ranks 2 = 6"),
        ((None, None, None), "train_batch_size or train_micro_batch_size_per_gpu: expected a number"),
        ((None, None, 4), "train_batch_size or train_micro_batch_size_per_gpu: expected a number"),
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
        "rounded_masters": True,
        "broadcast_buffers": True,
        "second_order": True,
        "timeout_s": 30,
        "unsplit": ["moe"],
        "checkpoint": {"asynchronous": True, "keep_last": 3},
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
        (
            "fp16",
            {"loss_scale_window": 0},
            "fp16.loss_scale_window: expected a number > 0 where loss_scale is 0 (dynamic), found 0",
        ),
        ("log_level", "loud", "log_level: expected 'debug', 'info', 'warning', 'error' or 'critical', found \"loud\""),
        (
            "communication_data_type",
            "int8",
            "communication_data_type: expected 'fp32', 'fp16' or 'bf16', found \"int8\"",
        ),
        (
            "torch_autocast",
            {"dtype": "fp32"},
            "torch_autocast.dtype: expected 'bfloat16' or 'float16', found \"float32\"",
        ),
        ("torch_autocast", {"dtype": ["bf16"]}, "torch_autocast.dtype: expected 'bfloat16' or 'float16', found"),
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


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
            "fp16.enabled: bf16.enabled is true as well; choose one",
        ),
        (
            {"bf16": {"bf16_master_weights_and_grads": True}},
            "bf16.bf16_optimizer_states: must be as bf16_master_weights",
        ),
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states: must be as bf16_master_weights_and"),
        (
            {"data_types": {"param_dtype": "bf16"}},
            "data_types.param_dtype: bf16.enabled and fp16.enabled choose 'fp32'",
        ),
        (
            {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}},
            "gradient_allreduce_op: 'sum' is not supported at stage 3; use 'mean'",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused_under_the_name_of_one(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**keys)
    assert str(caught.value).startswith(f"config: {message}")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "keys",
    [
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        {"bf16": {"enabled": True, "auto_cast": True}, "data_types": {"param_dtype": "bf16", "buffer_dtype": "bf16"}},
        {"fp16": {"enabled": True, "consecutive_hysteresis": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        {"communication_data_type": "bf16", "gradient_allreduce_op": "sum", "managed_gradient_accumulation": False},
        {"tensorboard": {"enabled": True, "output_path": "logs", "job_name": "run"}},
        {"csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "run"}},
        {"wandb": {"enabled": True, "group": "g", "team": "t", "project": "p"}},
        {"wall_clock_breakdown": True, "memory_breakdown": True, "dump_state": True, "log_level": "debug"},
        {"zero_allow_untested_optimizer": True, "dataloader_drop_last": True, "gradient_clipping": 0.5},
        {
            "zero_optimization": {
                "stage": 3,
                "leaf_module": {"classes": ["Block"], "names": ["moe"], "name_suffixes": ["experts"]},
                "stage3_model_persistence_threshold": 1000,
                "ignore_unused_parameters": False,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            }
        },
    ],
)
def test_what_is_honoured_is_found_at_its_path_in_silence(
    keys: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def assert_within(part: Any, whole: Any) -> None:
        if isinstance(part, dict):
            for name, value in part.items():
                assert_within(value, whole[name])
        else:
            assert part == whole

    assert warnings_of(caplog, **keys) == []
    assert_within(keys, load(**keys).model_dump())


@pytest.mark.parametrize(
    ("spelling", "short", "long"),
    [("torch.bfloat16", "bf16", "bfloat16"), ("BF16", "bf16", "bfloat16"), ("half", "fp16", "float16")],
)
def test_a_data_type_has_several_spellings(spelling: str, short: str, long: str) -> None:
    config = load(communication_data_type=spelling, torch_autocast={"dtype": spelling})
    assert config.communication_data_type == short
    assert config.torch_autocast.dtype == long


def test_defaults_of_the_caller_stand_for_what_is_absent_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    def defaults(given: Mapping[str, Any]) -> dict[str, object]:
        assert "gradient_clipping" in given or given["train_batch_size"] == 8
        return {"gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 2, "data_types.buffer_dtype": "bf16"}

    for absent in ({}, {"gradient_clipping": None}, {"gradient_clipping": "auto"}):
        config = load_config({"train_batch_size": 8, **absent}, 2, defaults)
        assert (config.gradient_clipping, config.gradient_accumulation_steps) == (1.0, 2)
        assert config.data_types.buffer_dtype == "bf16"
    assert caplog.messages == [
        "config: gradient_clipping is not given: 1.0 is taken",
        "config: train_micro_batch_size_per_gpu is not given: 2 is taken",
        'config: data_types.buffer_dtype is not given: "bf16" is taken',
    ]
    chosen = {"gradient_clipping": 0.5, "data_types": {"buffer_dtype": "fp32"}}
    config = load_config({**BATCH, **chosen}, 1, defaults)
    assert (config.gradient_clipping, config.data_types.buffer_dtype) == (0.5, "fp32")


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


def test_auto_at_the_top_means_the_default() -> None:
    assert load(gradient_clipping="auto", steps_per_print="auto", communication_data_type="auto", bf16="auto") == load()


@pytest.mark.parametrize(
    ("given_keys", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": 2}, (4, 2, 1)),
        ({"train_batch_size": 4}, (4, 2, 1)),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 2}, (8, 2, 2)),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, (8, 2, 2)),
    ],
)
def test_an_automatic_batch_key_follows_from_the_others(
    given_keys: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = load_config({**dict.fromkeys(names, "auto"), **given_keys}, 2)
    assert tuple(getattr(config, name) for name in names) == expected


def test_an_automatic_batch_key_that_does_not_follow_is_refused_by_name() -> None:
    message = "'auto' is resolved by the Hugging Face Trainer or Accelerate; give a number for"
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}, 1)
    assert str(caught.value) == f"config: train_batch_size: {message} train_batch_size"
    with pytest.raises(ConfigError) as caught:
        load_config({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}, 1)
    wanted = "train_micro_batch_size_per_gpu or train_batch_size"
    assert str(caught.value).splitlines() == [
        f"config: train_micro_batch_size_per_gpu: {message} {wanted}",
        f"config: train_batch_size: {message} {wanted}",
    ]
    with pytest.raises(ConfigError, match="train_batch_size or train_micro_batch_size_per_gpu: expected a number"):
        load_config({"gradient_accumulation_steps": "auto"}, 1)


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
def test_offload_goes_to_main_memory_and_not_to_disks(block: str, caplog: pytest.LogCaptureFixture) -> None:
    for device in ("none", "cpu"):
        section = {"device": device, "pin_memory": True, "buffer_count": 4, "nvme_path": "/x", "ratio": 0.5}
        assert warnings_of(caplog, zero_optimization={"stage": 3, block: section}) == []
        assert getattr(load(zero_optimization={block: section}).zero_optimization, block).device == device
    with pytest.raises(ConfigError, match=f"zero_optimization.{block}.device: 'nvme' is not supported .* use 'cpu'"):
        load(zero_optimization={block: {"device": "nvme"}})


def test_old_spellings_are_understood_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    old = {"cpu_offload": True, "cpu_offload_params": False, "stage3_gather_fp16_weights_on_model_save": True}
    assert warnings_of(caplog, zero_optimization=old) == [
        "zero_optimization.cpu_offload is an old spelling; write zero_optimization.offload_optimizer",
        "zero_optimization.cpu_offload_params is an old spelling; write zero_optimization.offload_param",
        "zero_optimization.stage3_gather_fp16_weights_on_model_save is an old spelling; "
        "write zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ]
    zero = load(zero_optimization=old).zero_optimization
    assert zero.offload_optimizer is not None and zero.offload_optimizer.device == "cpu"
    assert zero.offload_param is not None and zero.offload_param.device == "none"
    assert zero.stage3_gather_16bit_weights_on_model_save
    with pytest.raises(ConfigError, match="cpu_offload: another spelling of zero_optimization.offload_optimizer"):
        load(zero_optimization={"cpu_offload": True, "offload_optimizer": {"device": "none"}})


@pytest.mark.parametrize(("value", "stage"), [(True, 1), (False, 0)])
def test_a_boolean_zero_section_means_stage_1_or_0(value: bool, stage: int, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, zero_optimization=value) == [
        f'zero_optimization is an old spelling; write {{"stage": {stage}}}'
    ]
    assert load(zero_optimization=value).zero_optimization.stage == stage


# Unknown and unsupported keys


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"gradient_cliping": 1},
            "gradient_cliping is not a known key and is ignored; did you mean gradient_clipping?",
        ),
        ({"qqq": {"enabled": True}}, "qqq is not a known key and is ignored"),
        (
            {"fp16.enabled": True},
            "fp16.enabled is not a known key and is ignored; blocks are objects, not dotted names",
        ),
        (
            {"torch_autocast": {"enable": True}},
            "torch_autocast.enable is not a known key and is ignored; did you mean torch_autocast.enabled?",
        ),
        ({"optimizer": {"type": "Adam", "lr": 1}}, "optimizer.lr is not a known key and is ignored"),
        (
            {"checkpoint": {"tag_validatio": 1}},
            "checkpoint.tag_validatio is not a known key and is ignored; did you mean checkpoint.tag_validation?",
        ),
    ],
)
def test_a_key_that_upstream_ignores_warns_with_the_nearest_known_one(
    keys: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of(caplog, **keys) == [message]
    assert warnings_of(caplog, **keys) == [], "one warning a process is enough"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fp16": {"los_scale": 1}}, "fp16.los_scale: not a known key; did you mean fp16.loss_scale?"),
        (
            {"zero_optimization": {"overlap_com": True}},
            "zero_optimization.overlap_com: not a known key; did you mean zero_optimization.overlap_comm?",
        ),
        (
            {"zero_optimization": {"offload_param": {"devise": "cpu"}}},
            "zero_optimization.offload_param.devise: not a known key; did you mean "
            "zero_optimization.offload_param.device?",
        ),
        ({"zerofunc": {"page_byte": 1}}, "zerofunc.page_byte: not a known key; did you mean zerofunc.page_bytes?"),
        ({"wandb": {"qqq": 1}}, "wandb.qqq: not a known key; remove it"),
    ],
)
def test_an_unknown_key_in_a_section_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**keys)
    assert str(caught.value) == f"config: {message}"


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
        {"checkpoint": {"tag_validation": "Warn", "use_node_local_storage": False, "load_universal": True}},
        {"wall_clock_breakdown": False, "memory_breakdown": False, "dump_state": False, "sparse_gradients": False},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {"comms_logger": {"enabled": False}, "flops_profiler": {"enabled": False}, "aio": {}},
        {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True},
        {"bf16": {"enabled": True, "immediate_grad_update": False}},
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0, "$schema": "zerofunc.schema.json"},
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
        ({"bf16": {"immediate_grad_update": True}}, "bf16.immediate_grad_update is ignored: "),
        ({"optimizer": {"type": "Adam", "legacy_fusion": True}}, "optimizer.legacy_fusion is ignored: "),
        ({"zero_force_ds_cpu_optimizer": True}, "zero_force_ds_cpu_optimizer is ignored: any optimizer works on"),
        ({"aio": {"block_size": 1}}, "aio is ignored: nothing is written to NVMe"),
        ({"timers": {"throughput": {"enabled": True}}}, "timers is ignored: steps_per_print shows samples/s"),
        ({"data_types": {"keep_in_fp32_modules": ["norm"]}}, "data_types.keep_in_fp32_modules is ignored: buffers"),
        (
            {"zero_optimization": {"memory_efficient_linear": False}},
            "zero_optimization.memory_efficient_linear is ignored: no layer keeps a gathered weight",
        ),
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
        ({"amp": {"enabled": True}}, "amp: Apex amp is not supported; use torch_autocast, bf16 or fp16"),
        ({"comet": {"enabled": True}}, "comet: not supported by this version; use tensorboard, csv_monitor or wandb"),
        ({"sparse_gradients": True}, "sparse_gradients: gradients are reduced as dense pages"),
        ({"compression_training": {"a": {"b": {"enabled": True}}}}, "compression_training: it is not part"),
        ({"compile": {"deepcompile": True}}, "compile: deepcompile is not supported"),
        ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel: tensor parallelism is not supported"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention: it is not part of the engine"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size: sequence parallelism is not supported"),
        ({"checkpoint": {"use_node_local_storage": True}}, "checkpoint.use_node_local_storage: checkpoints go into a"),
        ({"nebula": {"enabled": True}}, "nebula: not supported; zerofunc.checkpoint.asynchronous"),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads: float16 masters"),
        ({"zero_optimization": {"mics_shard_size": 8}}, "zero_optimization.mics_shard_size: give initialize a mesh"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights: pages"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow: it changes when"),
    ],
)
def test_what_would_change_the_outcome_is_refused_when_it_is_on(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**keys)
    assert str(caught.value).startswith(f"config: {message}")
    assert len(str(caught.value).splitlines()) == 1


# The table of keys


def test_a_key_is_either_a_field_or_in_the_table_or_another_spelling_of_one() -> None:
    fields = {f"{path}.{name}".lstrip(".") for path, record in SECTIONS.items() for name in record.model_fields}
    assert not fields & set(KNOWN_KEYS)
    assert {*ALIASES.values(), *DEPRECATED.values()} <= fields | set(KNOWN_KEYS)
    assert not {*ALIASES, *DEPRECATED} & (fields | set(KNOWN_KEYS))


def test_the_first_spelling_holds_in_every_block_of_a_path() -> None:
    assert first_spelling("bfloat16.enabled") == "bf16.enabled"
    assert first_spelling("zero_optimization.cpu_offload.device") == "zero_optimization.offload_optimizer.device"
    assert first_spelling("zerofunc.page_bytes") == "zerofunc.page_bytes"
