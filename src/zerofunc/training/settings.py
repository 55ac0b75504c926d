"""From a configuration to what :func:`zerofunc.shard` is told."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from zerofunc.config import Config, LeafModuleConfig
from zerofunc.gradients.policy import ReductionPolicy
from zerofunc.module.admission import is_inside
from zerofunc.module.sharding import DEFAULT_PAGE_BYTES, DEFAULT_RESIDENT_BYTES
from zerofunc.training.precision import DTYPES

LEAF_MARK = "_z3_leaf"
"""Attribute of a module that is to be kept whole, as DeepSpeed marks it."""


def shard_options(model: nn.Module, config: Config) -> dict[str, Any]:
    """Local. Arguments of :func:`zerofunc.shard` for a model, but for the mesh."""
    ours, zero = config.zerofunc, config.zero_optimization
    param_dtype = torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else None
    itemsize = 4 if param_dtype is None else 2
    page_bytes, resident_bytes = ours.page_bytes, ours.resident_bytes
    if page_bytes is None:
        buckets = [zero.reduce_bucket_size, zero.allgather_bucket_size]
        if zero.stage == 3:
            buckets = [zero.stage3_prefetch_bucket_size]
        page_bytes = min([DEFAULT_PAGE_BYTES, *(bucket * itemsize for bucket in buckets if bucket)])
    if resident_bytes is None:
        live = zero.stage3_max_live_parameters
        resident_bytes = DEFAULT_RESIDENT_BYTES if live is None else live * itemsize
    persistence_bytes = ours.persistence_bytes
    if persistence_bytes is None:
        persistence_bytes = (zero.stage3_param_persistence_threshold or 0) * itemsize
    limit = zero.stage3_model_persistence_threshold
    reduction = ReductionPolicy(
        average=config.gradient_allreduce_op == "mean",
        accumulate_in=DTYPES.get(config.data_types.grad_accum_dtype or ""),
        communicate_in=DTYPES.get(config.communication_data_type or ""),
        need_all=not zero.ignore_unused_parameters,
    )
    return {
        "stage": zero.stage,
        "reduction": reduction,
        "page_bytes": page_bytes,
        "resident_bytes": resident_bytes,
        "persistence_bytes": persistence_bytes,
        "persistence_limit_bytes": math.inf if limit is None else limit * itemsize,
        "prefetch": ours.prefetch and zero.stage3_prefetch_bucket_size != 0,
        "unsplit": [*ours.unsplit, *_leaf_modules(model, zero.leaf_module)],
        "timeout_s": ours.timeout_s,
        "param_dtype": param_dtype,
        "low_precision_masters": config.bf16.enabled and config.bf16.bf16_master_weights_and_grads,
        "masters_on_cpu": any(
            o is not None and o.device == "cpu" for o in (zero.offload_optimizer, zero.offload_param)
        ),
        "second_order": ours.second_order,
        "broadcast_buffers": ours.broadcast_buffers,
    }


def _leaf_modules(model: nn.Module, leaves: LeafModuleConfig) -> list[str]:
    """Names of the outermost modules to keep whole: by the configuration (name, end of name, class), or by a mark."""
    found: list[str] = []
    for name, module in model.named_modules():
        is_leaf = (
            name in leaves.names
            or any(name.endswith(suffix) for suffix in leaves.name_suffixes)
            or not class_names(type(module)).isdisjoint(leaves.classes)
            or module.__dict__.get(LEAF_MARK, False)
        )
        if is_leaf and not any(is_inside(name, outer) for outer in found):
            found.append(name)
    return found


def class_names(kind: type) -> set[str]:
    """What a configuration may call a class: its name, alone or with its module."""
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
