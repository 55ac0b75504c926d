"""The sections of a configuration as typed, frozen records; an attribute's path is its path in the JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictBool, field_validator, model_validator

from zerofunc.config.field_types import (
    AutocastType,
    Count,
    DataType,
    LogLevel,
    Number,
    Positive,
    ReduceOp,
    Stage,
    Steps,
    TagValidation,
)

__all__ = [
    "SECTIONS",
    "Bf16Config",
    "Config",
    "DataTypesConfig",
    "EngineConfig",
    "FileMonitorConfig",
    "Fp16Config",
    "LeafModuleConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "TorchAutocastConfig",
    "WandbConfig",
    "ZeroConfig",
]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


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
    """Where a part of the state lives."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """"none" is with the parameters; "cpu" is main memory; "nvme" is refused."""

    @field_validator("device")
    @classmethod
    def _refuse_nvme(cls, device: str) -> str:
        if device == "nvme":
            raise ValueError("'nvme' is not supported by this version: all state stays in memory; use 'cpu' or 'none'")
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
    """What is sharded, and how much travels at a time. Sizes are in elements; null leaves the choice to the engine."""

    stage: Stage = 0
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
    stage3_model_persistence_threshold: Count | None = None
    """Elements that may stay gathered in all; null means no limit."""
    stage3_gather_16bit_weights_on_model_save: StrictBool = False
    """Accepted: saving 16-bit weights gathers a page at a time, at every stage."""
    leaf_module: LeafModuleConfig = LeafModuleConfig()
    """Modules that are kept whole."""
    ignore_unused_parameters: StrictBool = True
    """Whether a trainable parameter may get no gradient."""
    elastic_checkpoint: StrictBool = False
    """Accepted: every checkpoint can be read on another number of ranks."""
    offload_optimizer: OffloadConfig | None = None
    """Where masters and optimizer state live."""
    offload_param: OffloadConfig | None = None
    """Where shards live."""


class TorchAutocastConfig(_Section):
    """torch.autocast around forwards; parameters stay float32."""

    enabled: StrictBool = False
    """Whether forwards run under autocast."""
    dtype: AutocastType = "bfloat16"
    """What it casts to; float16 adds a loss scale, that of torch.amp.GradScaler where the section fp16 says nothing."""


class DataTypesConfig(_Section):
    """Data types of what is not computed in."""

    grad_accum_dtype: DataType | None = None
    """What gradients are added up in, over micro-steps too; null means the shards' own type."""
    param_dtype: DataType | None = None
    """Must be what bf16 or fp16 says, and fp32 without them."""
    buffer_dtype: DataType | None = None
    """What floating-point buffers are cast to; null leaves them."""


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

    @model_validator(mode="after")
    def _check_masters(self) -> Bf16Config:
        if self.bf16_master_weights_and_grads != self.bf16_optimizer_states:
            raise ValueError(
                "bf16_optimizer_states: must be as bf16_master_weights_and_grads, as optimizer state has the data type "
                "of the masters; set both to true or both to false"
            )
        return self


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
            raise ValueError("loss_scale_window: expected a number > 0 where loss_scale is 0 (dynamic), found 0")
        return self


class CheckpointConfig(_Section):
    """Checkpoints, in DeepSpeed's words."""

    tag_validation: TagValidation = "warn"
    """What happens where ranks give different tags: nothing, a warning, an error; the first rank's is taken."""


class SavingConfig(_Section):
    """Checkpoints, where DeepSpeed has no word."""

    asynchronous: StrictBool = False
    """Whether `save_checkpoint` returns when a copy is in memory, which is saved in the background."""
    keep_last: Positive | None = None
    """How many checkpoints stay in a folder; null means all."""


class EngineConfig(_Section):
    """The section `zerofunc`: what DeepSpeed's JSON has no word for."""

    direct_backward: StrictBool = False
    """Whether `loss.backward()` may be called without the engine."""
    page_bytes: Positive | None = None
    """Size of a page; null lets the engine choose."""
    resident_bytes: Count | None = None
    """Bound on gathered pages at stage 3; null lets the engine choose."""
    persistence_bytes: Count | None = None
    """Pages of at most this size stay gathered at stage 3; null lets the engine choose."""
    prefetch: StrictBool = True
    """Whether pages are fetched ahead of use."""
    timeout_s: Annotated[Number, Field(gt=0)] | None = None
    """Seconds after which a collective gives up; null takes the process group's."""
    unsplit: list[str] = []
    """Names of modules whose parameters share one page."""
    rounded_masters: StrictBool = False
    """Whether masters start from the parameters as bf16 or fp16 rounds them; otherwise from all their digits."""
    checkpoint: SavingConfig = SavingConfig()
    """How checkpoints are saved."""
    broadcast_buffers: StrictBool = False
    """Whether a forward in training mode begins with the first rank's buffers, as DDP's does."""
    second_order: StrictBool = False
    """Whether plain forwards use kernels that have a second derivative, as `zerofunc.second_order()` does."""


class Config(_Section):
    """A resolved configuration: every number is known, every feature in it is one that this version has."""

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
    steps_per_print: Steps = None
    """Steps between progress lines; null means none."""
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
    communication_data_type: DataType | None = None
    """What gradients are reduced in; null means what they are kept in."""
    gradient_allreduce_op: ReduceOp = "mean"
    """How gradients of the ranks are put together."""
    managed_gradient_accumulation: StrictBool = True
    """Whether the engine counts micro-batches; otherwise every step updates."""
    wall_clock_breakdown: StrictBool = False
    """Whether phases are timed."""
    memory_breakdown: StrictBool = False
    """Whether progress lines show memory."""
    dump_state: StrictBool = False
    """Whether the resolved configuration and the pages are logged at the start."""
    log_level: LogLevel | None = None
    """Level from which zerofunc's log is shown on the console."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    tensorboard: FileMonitorConfig = FileMonitorConfig()
    """Event files for TensorBoard."""
    csv_monitor: FileMonitorConfig = FileMonitorConfig()
    """A CSV file for each scalar."""
    wandb: WandbConfig = WandbConfig()
    """The run at Weights & Biases that scalars go to."""
    zerofunc: EngineConfig = EngineConfig()
    """Our own settings."""
    dataloader_drop_last: StrictBool = False
    """Whether the loader drops a last, incomplete batch."""
    zero_allow_untested_optimizer: StrictBool = False
    """Whether a client optimizer that is not known to be elementwise is taken at stage 1 and above."""

    @model_validator(mode="after")
    def _check_together(self) -> Config:
        if self.bf16.enabled and self.fp16.enabled:
            raise ValueError("fp16.enabled: bf16.enabled is true as well; choose one")
        computed_in = "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"
        if self.data_types.param_dtype not in (None, computed_in):
            raise ValueError(
                f"data_types.param_dtype: bf16.enabled and fp16.enabled choose '{computed_in}', found "
                f"'{self.data_types.param_dtype}'; remove it, or make them agree"
            )
        if self.gradient_allreduce_op == "sum" and self.zero_optimization.stage == 3:
            raise ValueError("gradient_allreduce_op: 'sum' is not supported at stage 3; use 'mean'")
        return self


def _sections(model: type[BaseModel], prefix: str = "") -> dict[str, type[BaseModel]]:
    """Return the records in a record, by dotted key."""
    found = {prefix: model}
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= _sections(kind, f"{prefix}.{name}" if prefix else name)
    return found


SECTIONS: dict[str, type[BaseModel]] = _sections(Config)
"""Dotted key of every section ("" for the whole), with its record."""
