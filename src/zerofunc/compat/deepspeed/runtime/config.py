"""``deepspeed.runtime.config``."""

from zerofunc.config import Config as DeepSpeedConfig
from zerofunc.config import ConfigError as DeepSpeedConfigError

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
