"""The keys of DeepSpeed's JSON that have no field of their own in `zerofunc.config`, and what each one gets.

A value that leaves a feature off is always accepted in silence; the verdict speaks of the other values. `screen`
passes judgement on a whole configuration and leaves what the models of `zerofunc.config` have fields for.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, NamedTuple

__all__ = ["ALIASES", "DEPRECATED", "KNOWN_KEYS", "KnownKey", "Verdict", "is_off", "screen", "show"]

_logger = logging.getLogger("zerofunc.config")
_warned: set[str] = set()


class Verdict(Enum):
    """What happens when a known key is set to something other than its off value."""

    SILENT = "silent"
    """Accepted: the results do not depend on it."""
    IGNORE = "ignore"
    """Accepted with one warning that says why it does nothing."""
    REFUSE = "refuse"
    """Refused, because ignoring it would change what the user gets."""


class KnownKey(NamedTuple):
    """What one key gets, and which values leave it off."""

    verdict: Verdict
    reason: str = ""
    off: tuple[object, ...] = (False,)
    """Plain values that change nothing; null and "auto" always belong to them."""
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


_UNSUPPORTED = "not supported by this version"
_SILENT = KnownKey(Verdict.SILENT)


def _refuse(
    reason: str = _UNSUPPORTED, *, off: tuple[object, ...] = (False,), flags: tuple[str, ...] = ("enabled",)
) -> KnownKey:
    return KnownKey(Verdict.REFUSE, reason, off, flags)


def _ignore(reason: str, *, off: tuple[object, ...] = (False,), flags: tuple[str, ...] = ("enabled",)) -> KnownKey:
    return KnownKey(Verdict.IGNORE, reason, off, flags)


_TOP_LEVEL: dict[str, KnownKey] = {
    # batch sizes, optimizer
    "zero_force_ds_cpu_optimizer": _SILENT,
    "optimizer.legacy_fusion": _ignore("it chooses between fused kernels that are not used here"),
    # precision
    "amp": _refuse("Apex amp is not supported; use bf16 or fp16"),
    "data_types.keep_in_fp32_modules": _ignore("buffers keep their dtype anyway", off=([],)),
    "fp16.fp16_master_weights_and_grads": _refuse("master weights are float32"),
    "bf16.immediate_grad_update": _SILENT,
    # communication
    "prescale_gradients": _SILENT,
    "gradient_predivide_factor": _SILENT,
    "seq_parallel_communication_data_type": _ignore("there is no sequence parallelism", off=("fp32",)),
    "sparse_gradients": _refuse("gradients are reduced as dense flat pages; set sparse=False on the embedding"),
    "disable_allgather": _ignore("all-gather is how pages are fetched"),
    "comms_logger": _ignore("bytes moved are always counted; there is no separate log"),
    # logging, monitors, profiling
    "comet": _refuse(),
    "flops_profiler": _ignore("there is no profiler; use torch.utils.flop_counter"),
    "timers": _SILENT,
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
    "checkpoint.tag_validation": _refuse(
        f"{_UNSUPPORTED}: expected 'Ignore' or 'Warn'", off=("Warn", "Ignore", "WARN", "IGNORE", "warn", "ignore")
    ),
    "checkpoint.load_universal": _refuse(),
    "checkpoint.use_node_local_storage": _refuse(),
    "checkpoint.parallel_write": _ignore("every rank writes its own part anyway", flags=("pipeline_stage",)),
    "checkpoint.writer": _refuse(flags=()),
    "nebula": _refuse(),
    "datastates": _refuse(flags=("enabled", "config")),
    # other features
    "compile": _refuse(
        "deepcompile is not supported; call torch.compile on the loss function", flags=("deepcompile", "enabled")
    ),
    "tensor_parallel": _refuse(off=(0, 1), flags=("autotp_size", "enabled")),
    "expert_parallel": _refuse(),
    "pipeline": _refuse("pipeline parallelism is not supported", flags=()),
    "hybrid_engine": _refuse(),
    "sequence_parallel_size": _refuse("sequence parallelism is not supported", off=(1,)),
    "data_efficiency": _refuse(),
    "curriculum_learning": _refuse(),
    "progressive_layer_drop": _refuse(),
    "eigenvalue": _refuse(),
    "quantize_training": _refuse(),
    "compression_training": _refuse(),
    "weight_quantization": _refuse(),
    "sparse_attention": _refuse(flags=()),
    "elasticity": _refuse(),
    "autotuning": _refuse(),
    "graph_harvesting": _refuse(),
    "aio": _SILENT,
    "disable_python_gc": _ignore("Python's garbage collector is left alone"),
}

_ZERO: dict[str, KnownKey] = {
    # layout and scheduling of the same arithmetic
    "contiguous_gradients": _SILENT,
    "reduce_scatter": _SILENT,
    "allgather_partitions": _SILENT,
    "overlap_comm": _SILENT,
    "round_robin_gradients": _SILENT,
    "sub_group_size": _SILENT,
    "stage3_max_reuse_distance": _SILENT,
    "stage3_use_all_reduce_for_fetch_params": _SILENT,
    "stage3_allgather_sequential": _SILENT,
    "stage3_module_granularity_threshold": _SILENT,
    "use_multi_rank_bucket_allreduce": _SILENT,
    "grad_hooks": _SILENT,
    "memory_efficient_linear": _SILENT,
    "override_module_apply": _SILENT,
    "pipeline_loading_checkpoint": _SILENT,
    "log_trace_cache_warnings": _SILENT,
    "enable_sanity_checks": _SILENT,
    "parameter_alignment": _SILENT,
    "cpu_offload_use_pin_memory": _SILENT,
    "stage3_model_persistence_threshold": _ignore(
        "it bounds persistent parameters in total; zerofunc.persistence_bytes chooses them by size", off=()
    ),
    "compute_grad_norm": _ignore("the gradient norm is computed when it is asked for", off=(True,)),
    # what would change the outcome
    "load_from_fp32_weights": _refuse(off=(True,)),
    "legacy_stage1": _refuse("there is one implementation of stage 1"),
    "zero_hpz_partition_size": _refuse(off=(1,)),
    "zero_quantized_weights": _refuse(),
    "zero_quantized_nontrainable_weights": _refuse(),
    "zero_quantized_gradients": _refuse(),
    "zeropp_loco_param": _refuse(off=(), flags=()),
    "mics_shard_size": _refuse(off=(-1,)),
    "mics_hierarchical_params_gather": _refuse(),
    "zenflow": _refuse(off=(), flags=()),
    "save_muon_momentum_buffer_in_memory": _refuse(),
}

_OFFLOAD: dict[str, KnownKey] = dict.fromkeys(
    (
        "nvme_path",
        "pin_memory",
        "buffer_count",
        "buffer_size",
        "max_in_cpu",
        "fast_init",
        "ratio",
        "pipeline_read",
        "pipeline_write",
        "pipeline",
        "super_offload",
        "cpuadam_cores_perc",
    ),
    _SILENT,
)

KNOWN_KEYS: dict[str, KnownKey] = {
    **_TOP_LEVEL,
    **{f"zero_optimization.{key}": known for key, known in _ZERO.items()},
    **{
        f"zero_optimization.{block}.{key}": known
        for block in ("offload_optimizer", "offload_param")
        for key, known in _OFFLOAD.items()
    },
}
"""Dotted key to verdict, for every known key that is not a field of a model in `zerofunc.config`."""

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

_NAMED_CHOICES = ("optimizer", "scheduler")


def screen(
    block: Mapping[str, Any], sections: Mapping[str, Collection[str]], prefix: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of a block that have a field, under their first spellings, and a line per key to refuse.

    Keys to be ignored, and keys that nobody knows, are logged once per process.

    Args:
        block: The JSON object at `prefix`.
        sections: Dotted key of every section that is a model ("" for the top), with the names of its fields.
        prefix: Dotted key of the block.
    """
    kept: dict[str, Any] = {}
    problems: list[str] = []
    for given, given_value in block.items():
        dotted = f"{prefix}.{given}" if prefix else str(given)
        key, value = _first_spelling(dotted, given_value)
        name = key.rpartition(".")[2]
        if key != dotted and (name in block or name in kept):
            problems.append(f"{dotted}: another spelling of {key}, which is given as well; keep one")
        elif key in KNOWN_KEYS:
            problems += _judge(key, KNOWN_KEYS[key], value)
        elif isinstance(value, dict) and (key in sections or _is_container(key)):
            inside, found = screen(value, sections, key)
            problems += found
            kept |= {name: inside} if key in sections else {}
        elif _is_container(key) and key not in sections:
            problems += [] if value is None else [f"{key}: expected an object, found {show(value)}"]
        elif name not in sections.get(prefix, ()):
            _warn_unknown(key, sections)
        elif value is not None:
            found = [_auto_problem(place) for place in _find_auto(value, key)]
            kept |= {} if value == "auto" else {name: value}
            problems += found if prefix in ("", *_NAMED_CHOICES) else []
    return kept, problems


def _is_container(key: str) -> bool:
    """Return whether the key is a block that has known keys inside, and none of its own."""
    return any(known.startswith(f"{key}.") for known in KNOWN_KEYS)


def _first_spelling(key: str, value: object) -> tuple[str, object]:
    """Return the key and value that an alias or an old spelling stands for."""
    if key not in DEPRECATED:
        return ALIASES.get(key, key), value
    new = DEPRECATED[key]
    _warn_once(key, f"{key} is an old spelling; write {new}")
    if "offload" in new and isinstance(value, bool):
        value = {"device": "cpu" if value else "none"}
    return new, value


def _judge(key: str, known: KnownKey, value: object) -> list[str]:
    """Accept a known key, accept it with a warning, or return the line that refuses it."""
    if known.verdict is Verdict.SILENT or is_off(known, value):
        return []
    if known.verdict is Verdict.IGNORE:
        _warn_once(key, f"{key} is ignored: {known.reason}")
        return []
    return [f"{key}: {known.reason} (found {show(value)})"]


def _warn_unknown(key: str, sections: Mapping[str, Collection[str]]) -> None:
    """Warn once about a key that nobody knows, with the nearest one that somebody does."""
    prefix, _, name = key.rpartition(".")
    start = f"{prefix}." if prefix else ""
    spellings = [known.removeprefix(start) for known in (*KNOWN_KEYS, *ALIASES) if known.startswith(start)]
    neighbours = {*sections.get(prefix, ()), *(known.partition(".")[0] for known in spellings)}
    near = difflib.get_close_matches(name, sorted(neighbours), n=1)
    hint = f"; did you mean {start}{near[0]}?" if near else ""
    _warn_once(key, f"{key} is not a known key and is ignored{hint}")


def _warn_once(key: str, message: str) -> None:
    if key not in _warned:
        _warned.add(key)
        _logger.warning(message)


def _find_auto(value: object, key: str) -> list[str]:
    """Return the dotted keys at and below `key` whose value is "auto"."""
    if isinstance(value, dict):
        return [place for name, part in value.items() for place in _find_auto(part, f"{key}.{name}")]
    return [key] if value == "auto" else []


def _auto_problem(key: str) -> str:
    return f"{key}: 'auto' is resolved by the Hugging Face Trainer or Accelerate; give a number for {key}"


def show(value: object) -> str:
    """Return a value as JSON spells it, shortened."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
