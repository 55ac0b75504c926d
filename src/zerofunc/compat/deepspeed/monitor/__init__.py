"""``deepspeed.monitor``."""

from zerofunc.compat.deepspeed.monitor import monitor

__all__ = ["monitor"]
