"""ZeRO data-parallel training for PyTorch on which torch.func transforms simply work."""

from zerofunc.collectives import DivergenceError
from zerofunc.config import ConfigError
from zerofunc.engine import Engine
from zerofunc.initialization import initialize
from zerofunc.parameter_space import functional_call, jacfwd
from zerofunc.sharding import Usage, refresh, shard, shards, usage
from zerofunc.trees import clip_grad_norm_, draw, full_gradients, gathered, mean, reshard, unshard, vdot

__all__ = [
    "ConfigError",
    "DivergenceError",
    "Engine",
    "Usage",
    "clip_grad_norm_",
    "draw",
    "full_gradients",
    "functional_call",
    "gathered",
    "initialize",
    "jacfwd",
    "mean",
    "refresh",
    "reshard",
    "shard",
    "shards",
    "unshard",
    "usage",
    "vdot",
]
__version__ = "0.1.0"
