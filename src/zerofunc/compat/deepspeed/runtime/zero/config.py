"""``deepspeed.runtime.zero.config``."""

from __future__ import annotations

import enum

from zerofunc.config import OffloadConfig as DeepSpeedZeroOffloadOptimizerConfig
from zerofunc.config import OffloadConfig as DeepSpeedZeroOffloadParamConfig
from zerofunc.config import ZeroConfig as DeepSpeedZeroConfig

__all__ = [
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "ZeroStageEnum",
]


class ZeroStageEnum(enum.IntEnum):
    """What is sharded."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class OffloadDeviceEnum(str, enum.Enum):
    """Where a part of the state lives."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"
