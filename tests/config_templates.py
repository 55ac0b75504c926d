"""Configurations in the style of those that trainers ship: most values are left for the trainer to fill in."""

from __future__ import annotations

import copy
from typing import Any

BATCH = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
FP16 = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
PRECISION: dict[str, Any] = {"fp16": {"enabled": "auto", **FP16}, "bf16": {"enabled": "auto"}}
OPTIMIZER: dict[str, Any] = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    }
}
CPU = {"device": "cpu", "pin_memory": True}
STAGE_2: dict[str, Any] = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
}
STAGE_3: dict[str, Any] = {
    "stage": 3,
    "overlap_comm": False,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}


def scheduler(kind: str, *more: str) -> dict[str, Any]:
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", *more)
    return {"scheduler": {"type": kind, "params": dict.fromkeys(names, "auto")}}


TEMPLATES: dict[str, dict[str, Any]] = {
    "trainer, stage 2": {
        **PRECISION,
        **OPTIMIZER,
        **scheduler("WarmupLR"),
        "zero_optimization": {**STAGE_2, "allgather_bucket_size": 2e8, "offload_optimizer": CPU},
        **BATCH,
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "trainer, stage 3": {
        **PRECISION,
        **OPTIMIZER,
        **scheduler("WarmupDecayLR", "total_num_steps"),
        "zero_optimization": {
            **STAGE_3,
            "offload_optimizer": CPU,
            "offload_param": {**CPU, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
        },
        **BATCH,
        "gradient_clipping": "auto",
        "steps_per_print": 1e5,
        "wall_clock_breakdown": False,
        "checkpoint": {"use_node_local_storage": False},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    },
    "launcher, buckets of 0": {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "fp16": {"enabled": True, "auto_cast": True, **FP16},
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "reduce_bucket_size": 0,
            "sub_group_size": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_gather_16bit_weights_on_model_save": False,
        },
    },
    "fine-tuning, stage 0": {
        **BATCH,
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        **PRECISION,
        "zero_optimization": {**STAGE_2, "stage": 0, "round_robin_gradients": True},
    },
    "fine-tuning, stage 3 with offload": {
        **BATCH,
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        **PRECISION,
        "zero_optimization": {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU},
    },
    "recipe, stage 1": {
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "auto_cast": False, **FP16, "initial_scale_power": 32},
        **BATCH,
        "wall_clock_breakdown": False,
    },
    "recipe, stage 3 in bfloat16": {
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 0,
            "reduce_bucket_size": "auto",
            "prefetch_bucket_size": "auto",
            "param_persistence_threshold": "auto",
            "max_live_parameters": 0,
            "max_reuse_distance": 0,
            "gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        **BATCH,
        "gradient_clipping": "auto",
        "wall_clock_breakdown": False,
    },
}

NUMBERS: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "lr": 3e-5,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.01,
    "warmup_min_lr": 0,
    "warmup_max_lr": 3e-5,
    "warmup_num_steps": 100,
    "total_num_steps": 1000,
    "enabled": False,
    "reduce_bucket_size": 4096,
    "stage3_prefetch_bucket_size": 3686.4e1,
    "prefetch_bucket_size": 36864,
    "stage3_param_persistence_threshold": 640,
    "param_persistence_threshold": 640,
}
"""What a trainer puts in place of "auto", by the last part of the key."""


def filled(template: dict[str, Any]) -> dict[str, Any]:
    """The template with a number for each "auto", for 2 ranks; what `gradient_accumulation_steps` says holds."""
    result = copy.deepcopy(template)
    for key, value in template.items():
        if isinstance(value, dict):
            result[key] = filled(value)
        elif value == "auto":
            result[key] = NUMBERS[key]
    if template.get("gradient_accumulation_steps") == 1:
        result["train_batch_size"] = 8
    return result


def autos(template: dict[str, Any], *blocks: str) -> set[str]:
    """The dotted keys in these blocks ("" for the top) whose value is "auto"."""
    found: set[str] = set()
    for block in blocks:
        part: Any = template
        for name in block.split(".") if block else ():
            part = part.get(name, {})
        found |= {f"{block}.{name}".lstrip(".") for name, value in part.items() if value == "auto"}
    return found
