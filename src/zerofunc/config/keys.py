"""The keys of DeepSpeed's JSON that have no field of their own in `zerofunc.config.records`, and what each one gets."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = [
    "ALIASES",
    "BOOLEAN_SECTIONS",
    "DEPRECATED",
    "KNOWN_KEYS",
    "LENIENT",
    "KnownKey",
    "Verdict",
    "first_spelling",
    "is_off",
]


class Verdict(Enum):
    """What a key of a configuration gets."""

    HONOURED = "honoured"
    """It has its effect, or the results do not depend on it."""
    OLD = "honoured, old spelling"
    """As honoured, with one warning that names the new spelling."""
    DEFAULT = "not given"
    """The caller of `load_config` has a default for it; one warning says which."""
    IGNORED = "ignored"
    """Accepted with one warning that says why it does nothing."""
    UNKNOWN = "unknown"
    """Nobody knows it: ignored with one warning, which names the nearest key."""
    REFUSED = "refused"
    """An error, because ignoring it would change what the user gets."""


class KnownKey(NamedTuple):
    """What one key gets, and which values leave it off."""

    verdict: Verdict
    reason: str
    off: tuple[object, ...] = (False,)
    """Plain values that change nothing, so that nothing is said; null and "auto" always belong to them."""
    flags: tuple[str, ...] = ("enabled",)
    """For a block: the sub-keys that turn it on; empty when any content does."""


def is_off(known: KnownKey, value: object) -> bool:
    """Return whether `value` leaves the feature of `known` off, so that nothing needs saying."""
    if value is None or value == "auto":
        return True
    if isinstance(value, dict):
        return _is_block_off(value, known.flags) if known.flags else not value
    return value in known.off


def _is_block_off(block: dict[str, object], flags: tuple[str, ...]) -> bool:
    """Return whether a block is off: by its own flag, or, where it has none, by those of its sub-blocks."""
    values = [block[flag] for flag in flags if flag in block]
    if values:
        return all(not value or value == "auto" for value in values)
    return all(_is_block_off(part, flags) for part in block.values() if isinstance(part, dict))


def _same(reason: str) -> KnownKey:
    return KnownKey(Verdict.HONOURED, f"the results do not depend on it: {reason}")


def _ignore(reason: str, *, off: tuple[object, ...] = (False,), flags: tuple[str, ...] = ("enabled",)) -> KnownKey:
    return KnownKey(Verdict.IGNORED, reason, off, flags)


def _refuse(reason: str, *, off: tuple[object, ...] = (False,), flags: tuple[str, ...] = ("enabled",)) -> KnownKey:
    return KnownKey(Verdict.REFUSED, reason, off, flags)


_ASYNCHRONOUS = "not supported; zerofunc.checkpoint.asynchronous saves in the background"
_ONE_WAY = "there is one way to fetch pages"
_PLAIN_PAGES = "pages travel in the data type of the parameters; choose it by bf16, fp16 or communication_data_type"
_MESH = "give initialize a mesh of two axes (replicate, shard) to shard over fewer ranks"
_ON_THE_MODEL = "it is not part of the engine; change the model before initialize"

_TOP_LEVEL: dict[str, KnownKey] = {
    "$schema": _same("it is for editors"),
    # batch sizes, optimizer
    "zero_force_ds_cpu_optimizer": _ignore("any optimizer works on offloaded state"),
    "optimizer.legacy_fusion": _ignore("it chooses between fused kernels that are not used here"),
    # precision
    "amp": _refuse("Apex amp is not supported; use torch_autocast, bf16 or fp16"),
    "torch_autocast.lower_precision_safe_modules": _ignore(
        "parameters travel in their own data type; communication_data_type says what gradients travel in", off=([],)
    ),
    "data_types.keep_in_fp32_modules": _ignore("buffers keep their data type unless buffer_dtype is given", off=([],)),
    "fp16.fp16_master_weights_and_grads": _refuse("float16 masters lose updates; masters are float32, remove it"),
    "bf16.immediate_grad_update": _ignore("gradients are accumulated where they are reduced"),
    # communication
    "prescale_gradients": _same("the engine divides before it sums"),
    "gradient_predivide_factor": _same("the engine divides before it sums"),
    "seq_parallel_communication_data_type": _ignore("there is no sequence parallelism", off=("fp32",)),
    "sparse_gradients": _refuse("gradients are reduced as dense pages; set sparse=False on the embedding"),
    "disable_allgather": _ignore("all-gather is how pages are fetched"),
    "comms_logger": _ignore("bytes moved are always counted; there is no separate log"),
    # logging, monitors, profiling
    "comet": _refuse("not supported by this version; use tensorboard, csv_monitor or wandb"),
    "flops_profiler": _ignore("there is no profiler; use torch.utils.flop_counter"),
    "timers": _ignore("steps_per_print shows samples/s without waiting for the device"),
    "activation_checkpointing": _ignore(
        "zerofunc.checkpoint and zerofunc.checkpoint_module need no settings, and keep inputs whole and where they are",
        flags=(
            "partition_activations",
            "cpu_checkpointing",
            "contiguous_memory_optimization",
            "synchronize_checkpoint_boundary",
            "profile",
            "number_checkpoints",
        ),
    ),
    # checkpoints
    "checkpoint.load_universal": _same("every checkpoint is read at any stage and on any number of ranks"),
    "checkpoint.use_node_local_storage": _refuse("checkpoints go into a folder that all ranks share; remove it"),
    "checkpoint.parallel_write": _ignore("every rank writes its own part anyway", flags=("pipeline_stage",)),
    "checkpoint.writer": _refuse("files are written by torch.distributed.checkpoint; remove it", flags=()),
    "nebula": _refuse(_ASYNCHRONOUS),
    "datastates": _refuse(_ASYNCHRONOUS, flags=("enabled", "config")),
    # other features
    "compile": _refuse(
        "deepcompile is not supported; call torch.compile on the loss function", flags=("deepcompile", "enabled")
    ),
    "tensor_parallel": _refuse(
        "tensor parallelism is not supported; use stage 3", off=(0, 1), flags=("autotp_size", "enabled")
    ),
    "expert_parallel": _refuse("expert parallelism is not supported; keep experts whole by leaf_module"),
    "pipeline": _refuse("pipeline parallelism is not supported; use stage 3", flags=()),
    "hybrid_engine": _refuse("not supported; call generate inside zerofunc.gathered(module)"),
    "sequence_parallel_size": _refuse("sequence parallelism is not supported; use zerofunc.attention", off=(1,)),
    "data_efficiency": _refuse("it is not part of the engine; order the data in a sampler of your own"),
    "curriculum_learning": _refuse("it is not part of the engine; order the data in a sampler of your own"),
    "progressive_layer_drop": _refuse("it is not part of the engine; skip layers in the module's forward"),
    "eigenvalue": _refuse("it is not part of training; use zerofunc.curvature.lanczos"),
    "quantize_training": _refuse(_ON_THE_MODEL),
    "compression_training": _refuse(_ON_THE_MODEL),
    "weight_quantization": _refuse(_ON_THE_MODEL),
    "sparse_attention": _refuse(_ON_THE_MODEL, flags=()),
    "elasticity": _refuse("the number of ranks is fixed; give batch sizes, and restart with torchrun"),
    "autotuning": _refuse("not supported; choose zerofunc.page_bytes and zerofunc.resident_bytes"),
    "graph_harvesting": _refuse("not supported; call torch.compile on the loss function"),
    "aio": _ignore("nothing is written to NVMe", flags=()),
    "disable_python_gc": _ignore("Python's garbage collector is left alone"),
}

_ZERO: dict[str, KnownKey] = {
    # layout and scheduling of the same arithmetic
    "contiguous_gradients": _same("pages are contiguous"),
    "reduce_scatter": _same("each rank gets its part of the sum either way"),
    "allgather_partitions": _same(_ONE_WAY),
    "overlap_comm": _same("pages are fetched ahead anyway"),
    "round_robin_gradients": _same("every page is split evenly over the ranks"),
    "sub_group_size": _same("the optimizer takes one step over all shards"),
    "stage3_max_reuse_distance": _same("stage3_max_live_parameters bounds what stays gathered"),
    "stage3_use_all_reduce_for_fetch_params": _same(_ONE_WAY),
    "stage3_allgather_sequential": _same(_ONE_WAY),
    "override_module_apply": _same("module.apply sees whole parameters, and writes to them reach the shards"),
    "use_multi_rank_bucket_allreduce": _ignore("a page is reduced for all ranks at once", off=(True,)),
    "stage3_module_granularity_threshold": _ignore("pages do not follow modules; use leaf_module", off=(0,)),
    "grad_hooks": _ignore("gradients are always reduced during backward", off=(True,)),
    "memory_efficient_linear": _ignore("no layer keeps a gathered weight", off=(True,)),
    "pipeline_loading_checkpoint": _ignore("each rank reads its own part"),
    "log_trace_cache_warnings": _ignore("pages are fetched on demand, so there is no trace to go wrong"),
    "enable_sanity_checks": _ignore("ranks that diverge are always noticed"),
    "parameter_alignment": _ignore("the engine aligns pages itself"),
    "cpu_offload_use_pin_memory": _ignore("an old spelling of offload_optimizer.pin_memory, which needs no setting"),
    "compute_grad_norm": _ignore("the gradient norm is computed when it is asked for", off=(True,)),
    # what would change the outcome
    "load_from_fp32_weights": _refuse("checkpoints hold float32 masters, which are loaded; remove it", off=(True,)),
    "legacy_stage1": _refuse("there is one implementation of stage 1; remove it"),
    "zero_hpz_partition_size": _refuse(f"secondary partitions are not supported; {_MESH}", off=(1,)),
    "zero_quantized_weights": _refuse(_PLAIN_PAGES),
    "zero_quantized_nontrainable_weights": _refuse(_PLAIN_PAGES),
    "zero_quantized_gradients": _refuse(_PLAIN_PAGES),
    "zeropp_loco_param": _refuse(_PLAIN_PAGES, off=(), flags=()),
    "mics_shard_size": _refuse(_MESH, off=(-1,)),
    "mics_hierarchical_params_gather": _refuse(_MESH),
    "zenflow": _refuse("it changes when parameters are updated; use offload_optimizer alone", off=(), flags=()),
    "save_muon_momentum_buffer_in_memory": _refuse("optimizer state is always in memory; remove it"),
}

_OFFLOAD: dict[str, KnownKey] = {
    **dict.fromkeys(
        ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "pipeline"),
        _same("it is for NVMe"),
    ),
    **dict.fromkeys(
        ("pin_memory", "fast_init", "ratio", "super_offload", "cpuadam_cores_perc"),
        _same("it tunes the same transfers and steps"),
    ),
}

KNOWN_KEYS: dict[str, KnownKey] = {
    **_TOP_LEVEL,
    **{f"zero_optimization.{key}": known for key, known in _ZERO.items()},
    **{
        f"zero_optimization.{block}.{key}": known
        for block in ("offload_optimizer", "offload_param")
        for key, known in _OFFLOAD.items()
    },
}
"""Dotted key to verdict, for every known key that is not a field of a record."""

LENIENT = frozenset({"", "optimizer", "scheduler", "torch_autocast", "data_types", "checkpoint"})
"""Blocks in which DeepSpeed ignores unknown keys; they are errors in all others."""

ALIASES: dict[str, str] = {
    "bfloat16": "bf16",
    **{
        f"zero_optimization.{key}": f"zero_optimization.stage3_{key}"
        for key in (
            "max_live_parameters",
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "max_reuse_distance",
            "model_persistence_threshold",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
            "gather_16bit_weights_on_model_save",
        )
    },
}
"""Second spellings that are as good as the first."""

DEPRECATED: dict[str, str] = {
    f"zero_optimization.{old}": f"zero_optimization.{new}"
    for old, new in (
        ("stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"),
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_params", "offload_param"),
    )
}
"""Old spellings, accepted with a warning that names the new one."""


BOOLEAN_SECTIONS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "zero_optimization": ({"stage": 0}, {"stage": 1}),
    "zero_optimization.offload_optimizer": ({"device": "none"}, {"device": "cpu"}),
    "zero_optimization.offload_param": ({"device": "none"}, {"device": "cpu"}),
}
"""Sections for which old configurations have a boolean, with what false and true stand for."""


def first_spelling(key: str) -> str:
    """Return the dotted key that one stands for, with every block of it under its first spelling."""
    prefix, _, name = key.rpartition(".")
    dotted = f"{first_spelling(prefix)}.{name}" if prefix else name
    return ALIASES.get(dotted) or DEPRECATED.get(dotted) or dotted
