"""DeepSpeed's public names and module paths over zerofunc: ``import zerofunc.compat.deepspeed as deepspeed``."""

from zerofunc.compat.deepspeed import accelerator, comm, monitor, ops, runtime, utils
from zerofunc.compat.deepspeed.accelerator import get_accelerator
from zerofunc.compat.deepspeed.initialization import initialize
from zerofunc.compat.deepspeed.launch import add_config_arguments, init_distributed
from zerofunc.compat.deepspeed.on_device import OnDevice
from zerofunc.compat.deepspeed.runtime import zero
from zerofunc.compat.deepspeed.runtime.activation_checkpointing import checkpointing
from zerofunc.compat.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from zerofunc.compat.deepspeed.runtime.engine import DeepSpeedEngine
from zerofunc.compat.deepspeed.utils.logging import log_dist, logger

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "OnDevice",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "monitor",
    "ops",
    "runtime",
    "utils",
    "zero",
]
