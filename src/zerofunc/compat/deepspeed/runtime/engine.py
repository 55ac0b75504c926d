"""``deepspeed.runtime.engine``."""

from zerofunc.training.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
