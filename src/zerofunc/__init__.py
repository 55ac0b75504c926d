"""ZeRO data-parallel training for PyTorch on which torch.func transforms simply work."""

from zerofunc.collectives import DivergenceError
from zerofunc.sharding import Usage, refresh, shard, shards, usage
from zerofunc.trees import full_gradients, gathered, reshard, unshard, vdot

__all__ = [
    "DivergenceError",
    "Usage",
    "full_gradients",
    "gathered",
    "refresh",
    "reshard",
    "shard",
    "shards",
    "unshard",
    "usage",
    "vdot",
]
__version__ = "0.1.0"
