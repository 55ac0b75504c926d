"""``deepspeed.ops.lion``."""

from zerofunc.optimizers import Lion

FusedLion = DeepSpeedCPULion = Lion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
