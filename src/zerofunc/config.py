"""The DeepSpeed JSON as typed, frozen records: `load_config` reads, checks and resolves it."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StrictBool,
    ValidationError,
    field_validator,
    model_validator,
)

from zerofunc.config_keys import screen, show

__all__ = [
    "Bf16Config",
    "Config",
    "ConfigError",
    "EngineConfig",
    "Fp16Config",
    "OffloadConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "ZeroConfig",
    "load_config",
]

M = TypeVar("M", bound=BaseModel)


class ConfigError(ValueError):
    """A configuration that cannot be honoured; one line per problem, each naming its dotted key."""


def _integral(value: object) -> object:
    """Return 500000000 for the JSON float 5e8, anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _finite_or_none(value: object) -> object:
    """Return None for infinity, which launchers write to say "never"."""
    return None if isinstance(value, float) and math.isinf(value) else value


Integer = Annotated[int, Strict(), BeforeValidator(_integral)]
Count = Annotated[Integer, Field(ge=0)]
Positive = Annotated[Integer, Field(gt=0)]
Number = Annotated[float, Strict(), AllowInfNan(False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class OptimizerConfig(_Section):
    """Which optimizer to build over the shards."""

    type: str
    """Name, as `zerofunc.optimizers.build_optimizer` takes it."""
    params: dict[str, Any] = {}
    """Its keyword arguments."""


class SchedulerConfig(_Section):
    """Which learning-rate schedule to build."""

    type: str
    """Name, as `zerofunc.schedules.build_scheduler` takes it."""
    params: dict[str, Any] = {}
    """Its keyword arguments."""


class OffloadConfig(_Section):
    """Where a part of the state lives; only places that this version has are accepted."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """"none" (with the parameters), or "cpu" where that is the same place."""

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if device == "nvme":
            raise ValueError("'nvme' is not supported by this version: all state stays in memory; use 'none'")
        return device


class LeafModuleConfig(_Section):
    """Modules whose parameters share pages, so that ranks may use different parts of them."""

    classes: list[str] = [
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    ]
    """Names of classes, alone or with their modules."""
    names: list[str] = []
    """Names of modules in the model."""
    name_suffixes: list[str] = []
    """Ends of names of modules in the model."""


class ZeroConfig(_Section):
    """What is sharded, and how much travels at a time. Sizes are in elements; None leaves the choice to the engine."""

    stage: Annotated[Integer, Field(ge=0, le=3)] = 0
    """0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters are sharded."""
    reduce_bucket_size: Count | None = None
    """Elements reduced at a time."""
    allgather_bucket_size: Count | None = None
    """Elements gathered at a time."""
    stage3_max_live_parameters: Count | None = None
    """Elements of gathered parameters resident at a time."""
    stage3_prefetch_bucket_size: Count | None = None
    """Elements fetched ahead of use; 0 means no prefetch."""
    stage3_param_persistence_threshold: Count | None = None
    """Parameters with fewer elements stay gathered; 0 means none does."""
    stage3_gather_16bit_weights_on_model_save: StrictBool = False
    """Whether saving 16-bit weights may gather them at stage 3."""
    leaf_module: LeafModuleConfig = LeafModuleConfig()
    """Modules that are kept whole."""
    ignore_unused_parameters: StrictBool = True
    """Whether a trainable parameter may get no gradient."""
    elastic_checkpoint: StrictBool = False
    """Accepted below stage 3, where a checkpoint can be read on another number of ranks anyway."""
    offload_optimizer: OffloadConfig | None = None
    """Where masters and optimizer state live."""
    offload_param: OffloadConfig | None = None
    """Where shards live."""

    @model_validator(mode="after")
    def _check_elastic(self) -> ZeroConfig:
        if self.elastic_checkpoint and self.stage == 3:
            raise ValueError("elastic_checkpoint is not supported at stage 3; remove it")
        return self


class TorchAutocastConfig(_Section):
    """torch.autocast around forwards; parameters stay float32."""

    enabled: StrictBool = False
    """Whether forwards run under autocast."""
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """What it casts to; float16 adds loss scaling."""


DataTypeName = Literal["fp32", "fp16", "bf16"]


class DataTypesConfig(_Section):
    """Data types of what is not computed in."""

    grad_accum_dtype: DataTypeName | None = None
    """What unreduced gradients are kept in; None means the shards' own type."""
    param_dtype: DataTypeName | None = None
    """Must be what bf16 or fp16 says."""
    buffer_dtype: DataTypeName | None = None
    """What floating-point buffers are cast to; None leaves them."""


class FileMonitorConfig(_Section):
    """A monitor that writes files."""

    enabled: StrictBool = False
    """Whether scalars are written."""
    output_path: str = ""
    """Folder of the files."""
    job_name: str = "DeepSpeedJobName"
    """Name of the run, a folder in it."""


class WandbConfig(_Section):
    """Weights & Biases."""

    enabled: StrictBool = False
    """Whether scalars are written."""
    group: str | None = None
    """Group of runs."""
    team: str | None = None
    """Entity that owns the run."""
    project: str = "deepspeed"
    """Project of the run."""


class Bf16Config(_Section):
    """bfloat16 parameters with float32 masters."""

    enabled: StrictBool = False
    """Whether parameters are gathered in bfloat16."""
    check_grad_overflow: StrictBool = True
    """Whether a step whose gradient has an infinity or a NaN is skipped."""
    auto_cast: StrictBool = False
    """Whether floating inputs of forward are cast to bfloat16."""
    bf16_master_weights_and_grads: StrictBool = False
    """Whether shards are bfloat16 too."""
    bf16_optimizer_states: StrictBool = False
    """Must be as bf16_master_weights_and_grads."""


class Fp16Config(_Section):
    """float16 parameters with float32 masters and loss scaling."""

    enabled: StrictBool = False
    """Whether parameters are gathered in float16."""
    loss_scale: Annotated[Number, Field(ge=0)] = 0.0
    """The static loss scale; 0 means dynamic."""
    initial_scale_power: Count = 16
    """The dynamic scale starts at two to this power."""
    loss_scale_window: Count = 1000
    """Good steps after which the dynamic scale doubles."""
    hysteresis: Count = 2
    """Overflows after which the dynamic scale halves."""
    consecutive_hysteresis: StrictBool = False
    """Whether every good step refills the hysteresis."""
    min_loss_scale: Count = 1
    """Floor of the dynamic scale."""
    auto_cast: StrictBool = False
    """Whether floating inputs of forward are cast to float16."""

    @model_validator(mode="after")
    def _check_window(self) -> Fp16Config:
        if self.loss_scale == 0 and self.loss_scale_window == 0:
            raise ValueError("loss_scale_window must be > 0 when loss_scale is 0 (dynamic), found 0")
        return self


class EngineConfig(_Section):
    """The section `zerofunc`: what DeepSpeed's JSON has no word for."""

    direct_backward: StrictBool = False
    """Whether `loss.backward()` may be called without the engine."""
    page_bytes: Positive | None = None
    """Size of a page; None lets the engine choose."""
    resident_bytes: Count | None = None
    """Bound on gathered pages at stage 3; None lets the engine choose."""
    persistence_bytes: Count | None = None
    """Pages of at most this size stay gathered at stage 3; None lets the engine choose."""
    prefetch: StrictBool = True
    """Whether pages are fetched ahead of use."""
    timeout_s: Annotated[Number, Field(gt=0)] | None = None
    """Seconds after which a collective gives up; None takes the process group's."""
    unsplit: list[str] = []
    """Names of modules whose parameters share one page."""
    second_order: StrictBool = False
    """Whether plain forwards use kernels that have a second derivative, as `zerofunc.second_order()` does."""


class Config(BaseModel):
    """A resolved configuration: every number is known, every feature in it is one that this version has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train_batch_size: Positive
    """Samples per optimizer step over all ranks: micro x accumulation x ranks."""
    train_micro_batch_size_per_gpu: Positive
    """Samples per rank and backward pass."""
    gradient_accumulation_steps: Positive
    """Backward passes per optimizer step."""
    optimizer: OptimizerConfig | None = None
    """The optimizer to build, unless the caller brings one."""
    scheduler: SchedulerConfig | None = None
    """The schedule to build, unless the caller brings one."""
    gradient_clipping: Annotated[Number, Field(ge=0)] = 0.0
    """Largest global L2 norm of the averaged gradient; 0 means no clipping."""
    steps_per_print: Annotated[Positive | None, BeforeValidator(_finite_or_none)] = None
    """Steps between progress lines; None means none."""
    zero_optimization: ZeroConfig = ZeroConfig()
    """What is sharded."""
    bf16: Bf16Config = Bf16Config()
    """bfloat16 mode."""
    fp16: Fp16Config = Fp16Config()
    """float16 mode."""
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    """Autocast mode."""
    data_types: DataTypesConfig = DataTypesConfig()
    """Data types of gradients and buffers."""
    communication_data_type: DataTypeName | None = None
    """What gradients are reduced in; None means what they are kept in."""
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    """How gradients of the ranks are put together."""
    managed_gradient_accumulation: StrictBool = True
    """Whether the engine counts micro-batches; otherwise every step updates."""
    wall_clock_breakdown: StrictBool = False
    """Whether phases are timed."""
    memory_breakdown: StrictBool = False
    """Whether progress lines show memory."""
    dump_state: StrictBool = False
    """Whether the resolved configuration and the pages are logged at the start."""
    log_level: str | None = None
    """Level from which zerofunc's log is shown on the console."""
    tensorboard: FileMonitorConfig = FileMonitorConfig()
    """TensorBoard."""
    csv_monitor: FileMonitorConfig = FileMonitorConfig()
    """CSV files."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    zerofunc: EngineConfig = EngineConfig()
    """Our own settings."""
    dataloader_drop_last: StrictBool = False
    """Whether the loader drops a last, incomplete batch."""
    zero_allow_untested_optimizer: StrictBool = False
    """Whether a client optimizer that is not known to be elementwise is taken at stage 1 and above."""

    @model_validator(mode="after")
    def _check_precision(self) -> Config:
        if self.bf16.enabled and self.fp16.enabled:
            raise ValueError("bf16.enabled and fp16.enabled are both true: choose one")
        if self.bf16.bf16_master_weights_and_grads != self.bf16.bf16_optimizer_states:
            raise ValueError("bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states go together")
        if self.gradient_allreduce_op == "sum" and self.zero_optimization.stage == 3:
            raise ValueError("gradient_allreduce_op: 'sum' is not supported at stage 3; use 'mean'")
        return self


class _BatchSizes(BaseModel):
    """The three batch keys as given."""

    train_batch_size: Positive | None = None
    train_micro_batch_size_per_gpu: Positive | None = None
    gradient_accumulation_steps: Positive | None = None


_BATCH_KEYS = tuple(_BatchSizes.model_fields)
_SECTIONS: dict[str, Collection[str]] = {
    "": Config.model_fields,
    "optimizer": OptimizerConfig.model_fields,
    "scheduler": SchedulerConfig.model_fields,
    "zero_optimization": ZeroConfig.model_fields,
    "zero_optimization.offload_optimizer": OffloadConfig.model_fields,
    "zero_optimization.offload_param": OffloadConfig.model_fields,
    "bf16": Bf16Config.model_fields,
    "fp16": Fp16Config.model_fields,
    "zerofunc": EngineConfig.model_fields,
    "zero_optimization.leaf_module": LeafModuleConfig.model_fields,
    "torch_autocast": TorchAutocastConfig.model_fields,
    "data_types": DataTypesConfig.model_fields,
    "tensorboard": FileMonitorConfig.model_fields,
    "csv_monitor": FileMonitorConfig.model_fields,
    "wandb": WandbConfig.model_fields,
}


def load_config(config: str | os.PathLike[str] | dict[str, Any], world_size: int) -> Config:
    """Return the resolved configuration; local, the same on every rank that reads the same input.

    Args:
        config: Path of a JSON file, JSON text that starts with `{`, or a dict, which is not changed.
        world_size: Number of data-parallel ranks, for the batch arithmetic.

    Raises:
        ConfigError: With one line for every problem found, each naming the dotted key, what was expected and what
            was found.
    """
    if world_size < 1:
        raise ValueError(f"world_size: expected an integer > 0, found {world_size}")
    raw, source = _read(config)
    screened, problems = screen(_expand_stage(raw), _SECTIONS)
    given = _validated(_BatchSizes, {key: screened.pop(key) for key in _BATCH_KEYS if key in screened}, problems)
    sizes = dict.fromkeys(_BATCH_KEYS, 1)
    if given is not None and not any(problem.startswith(_BATCH_KEYS) for problem in problems):
        try:
            sizes = _resolve_batch(given, world_size)
        except ConfigError as error:
            problems.append(str(error))
    resolved = _validated(Config, screened | sizes, problems)
    if problems or resolved is None:
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in problems))
    return resolved


def _validated(model: type[M], values: dict[str, Any], problems: list[str]) -> M | None:
    """Return the model of these values, or None after adding a line per error to `problems`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems += _readable(error)
        return None


def _read(config: object) -> tuple[dict[str, Any], str]:
    """Return the configuration as a dict of our own, and the name that errors give it."""
    if isinstance(config, dict):
        return copy.deepcopy(config), "config"
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"config: expected a path, JSON text or a dict, found {type(config).__name__}")
    if isinstance(config, str) and config.lstrip().startswith("{"):
        return _parse(config, "config"), "config"
    source = os.fspath(config)
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from error
    return _parse(text, source), source


def _parse(text: str, source: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError(f"{source}: duplicate key {', '.join(map(repr, twice))}; keep one")
        return dict(pairs)

    try:
        parsed = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}: line {error.lineno}, column {error.colno}: {error.msg}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{source}: expected a JSON object, found {show(parsed)}")
    return parsed


def _expand_stage(raw: dict[str, Any]) -> dict[str, Any]:
    """Return `raw` with the old boolean spelling of `zero_optimization` written out."""
    value = raw.get("zero_optimization")
    return {**raw, "zero_optimization": {"stage": int(value)}} if isinstance(value, bool) else raw


def _resolve_batch(given: _BatchSizes, ranks: int) -> dict[str, int]:
    """Return the three batch keys, the missing ones computed from `total = micro x accumulation x ranks`."""
    total, micro, steps = (
        given.train_batch_size,
        given.train_micro_batch_size_per_gpu,
        given.gradient_accumulation_steps,
    )
    if total is None and micro is None:
        raise ConfigError(
            "train_batch_size or train_micro_batch_size_per_gpu: expected at least one of them, found neither"
        )
    if micro is None:
        assert total is not None
        steps = steps or 1
        micro = _divide("train_batch_size", total, f"accumulation {steps} x ranks {ranks}", steps * ranks)
    elif total is None:
        steps = steps or 1
        total = micro * steps * ranks
    elif steps is None:
        steps = _divide("train_batch_size", total, f"micro {micro} x ranks {ranks}", micro * ranks)
    product = micro * steps * ranks
    if total != product:
        raise ConfigError(
            f"train_batch_size {total} != micro {micro} x accumulation {steps} x ranks {ranks} = {product}"
        )
    return dict(zip(_BATCH_KEYS, (total, micro, steps), strict=True))


def _divide(key: str, total: int, product: str, divisor: int) -> int:
    quotient, rest = divmod(total, divisor)
    if rest:
        raise ConfigError(f"{key} {total} is not divisible by {product} = {divisor}")
    return quotient


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


def _readable(error: ValidationError) -> list[str]:
    """Return one line per error of pydantic: dotted key, what was expected, what was found."""
    lines = []
    for detail in error.errors(include_url=False):
        key = ".".join(map(str, detail["loc"]))
        kind, context = detail["type"], detail.get("ctx", {})
        if kind == "value_error":
            lines.append(f"{key}: {context['error']}" if key else str(context["error"]))
        elif kind == "missing":
            lines.append(f"{key}: expected a value, found none")
        else:
            expected = _EXPECTED[kind].format_map(context) if kind in _EXPECTED else detail["msg"]
            lines.append(f"{key}: expected {expected}, found {show(detail['input'])}")
    return lines
