"""``deepspeed.runtime``."""

from zerofunc.compat.deepspeed.runtime import (
    activation_checkpointing,
    config,
    dataloader,
    engine,
    lr_schedules,
    utils,
    zero,
)

__all__ = ["activation_checkpointing", "config", "dataloader", "engine", "lr_schedules", "utils", "zero"]
