"""``deepspeed.runtime.engine``."""

from zerofunc.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
