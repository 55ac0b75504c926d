"""``deepspeed.checkpointing``: zerofunc.checkpoint, which has nothing to configure."""

from __future__ import annotations

import logging
from typing import Any

from zerofunc.recompute.checkpoint import checkpoint

__all__ = ["checkpoint", "configure", "is_configured", "reset"]

_logger = logging.getLogger(__name__)
_is_configured = False


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Local. Accept DeepSpeed's settings, and say which of them do nothing here."""
    global _is_configured
    settings = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    given = [name for name, value in settings.items() if value]
    if given:
        _logger.warning("checkpointing.configure ignores %s: inputs are kept whole, on the device", ", ".join(given))
    _is_configured = True


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return _is_configured


def reset() -> None:
    """Local. Nothing: a checkpoint keeps no state from one iteration to the next."""
