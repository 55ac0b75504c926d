"""``deepspeed.runtime.activation_checkpointing``."""

from zerofunc.compat.deepspeed.runtime.activation_checkpointing import checkpointing

__all__ = ["checkpointing"]
