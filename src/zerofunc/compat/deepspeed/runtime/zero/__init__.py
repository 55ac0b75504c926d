"""``deepspeed.zero``."""

from zerofunc.compat.deepspeed.runtime.zero import config, partition_parameters, tiling
from zerofunc.compat.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    register_external_parameter,
)
from zerofunc.compat.deepspeed.runtime.zero.tiling import TiledLinear

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "ZeroParamStatus",
    "config",
    "partition_parameters",
    "register_external_parameter",
    "tiling",
]
