"""ZeRO data-parallel training for PyTorch on which torch.func transforms simply work."""

import importlib
from typing import TYPE_CHECKING, Any

from zerofunc import curvature
from zerofunc.config import ConfigError
from zerofunc.data.loaders import RepeatingLoader
from zerofunc.gradients.policy import ReductionPolicy
from zerofunc.kernels.selection import second_order
from zerofunc.module.full_values import gathered
from zerofunc.module.init import Init
from zerofunc.module.sharding import Usage, refresh, shard, shards, usage
from zerofunc.module.weights import load_safetensors
from zerofunc.optimizers.parameter_state import (
    GatheredParameters,
    register_external_parameter,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from zerofunc.optimizers.sharded import shard_optimizer
from zerofunc.optimizers.state import load_optimizer_state, optimizer_state
from zerofunc.per_sample.functions import (
    clipped_grad,
    per_sample_dots,
    per_sample_grad_norms,
    per_sample_projections,
)
from zerofunc.per_sample.seeded import Projector
from zerofunc.ranks.collectives import DivergenceError
from zerofunc.ranks.launch import init_distributed
from zerofunc.recompute.attention import attention
from zerofunc.recompute.checkpoint import checkpoint, checkpoint_module
from zerofunc.saving.export import export
from zerofunc.saving.foreign import import_checkpoint
from zerofunc.saving.manifest import CheckpointError
from zerofunc.space.functional import functional_call, jacfwd
from zerofunc.space.inner_products import gramian, vdot
from zerofunc.space.trees import clip_grad_norm_, draw, full_gradients, mean, reshard, unshard
from zerofunc.training.engine import Engine
from zerofunc.training.initialization import initialize
from zerofunc.training.join import Join, join
from zerofunc.training.progress import log_to_console
from zerofunc.version import __version__ as __version__

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DivergenceError",
    "Engine",
    "GatheredParameters",
    "Init",
    "Join",
    "Projector",
    "ReductionPolicy",
    "RepeatingLoader",
    "Usage",
    "attention",
    "checkpoint",
    "checkpoint_module",
    "clip_grad_norm_",
    "clipped_grad",
    "curvature",
    "draw",
    "export",
    "full_gradients",
    "functional_call",
    "gathered",
    "gramian",
    "import_checkpoint",
    "init_distributed",
    "initialize",
    "jacfwd",
    "join",
    "load_safetensors",
    "log_to_console",
    "mean",
    "load_optimizer_state",
    "optimizer_state",
    "per_sample_dots",
    "per_sample_grad_norms",
    "per_sample_projections",
    "refresh",
    "register_external_parameter",
    "reshard",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "second_order",
    "shard",
    "shard_optimizer",
    "shards",
    "unshard",
    "usage",
    "vdot",
]

_DEEPSPEED = {
    "DeepSpeedConfig", "DeepSpeedConfigError", "DeepSpeedEngine", "OnDevice", "accelerator", "add_config_arguments",
    "checkpointing", "comm", "get_accelerator", "log_dist", "logger", "monitor", "ops", "runtime",
    "utils", "zero",
}  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Names that only DeepSpeed has, for ``import zerofunc as deepspeed``."""
        if name not in _DEEPSPEED:
            raise AttributeError(f"module 'zerofunc' has no attribute {name!r}")
        return getattr(importlib.import_module("zerofunc.compat.deepspeed"), name)
