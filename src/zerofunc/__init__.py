"""ZeRO data-parallel training for PyTorch on which torch.func transforms simply work."""

from zerofunc import curvature
from zerofunc.collectives import DivergenceError
from zerofunc.config import ConfigError
from zerofunc.engine import Engine
from zerofunc.initialization import initialize
from zerofunc.kernels.selection import second_order
from zerofunc.parameter_space import functional_call, jacfwd
from zerofunc.per_sample.functions import (
    clipped_grad,
    per_sample_dots,
    per_sample_grad_norms,
    per_sample_projections,
)
from zerofunc.per_sample.seeded import Projector
from zerofunc.recompute.attention import attention
from zerofunc.recompute.checkpoint import checkpoint, checkpoint_module
from zerofunc.sharding import Usage, refresh, shard, shards, usage
from zerofunc.trees import clip_grad_norm_, draw, full_gradients, gathered, mean, reshard, unshard, vdot

__all__ = [
    "ConfigError",
    "DivergenceError",
    "Engine",
    "Projector",
    "Usage",
    "attention",
    "checkpoint",
    "checkpoint_module",
    "clip_grad_norm_",
    "clipped_grad",
    "curvature",
    "draw",
    "full_gradients",
    "functional_call",
    "gathered",
    "initialize",
    "jacfwd",
    "mean",
    "per_sample_dots",
    "per_sample_grad_norms",
    "per_sample_projections",
    "refresh",
    "reshard",
    "second_order",
    "shard",
    "shards",
    "unshard",
    "usage",
    "vdot",
]
__version__ = "0.1.0"
