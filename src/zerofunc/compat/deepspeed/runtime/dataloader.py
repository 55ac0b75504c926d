"""``deepspeed.runtime.dataloader``."""

from zerofunc.data.loaders import RankLoader as DeepSpeedDataLoader
from zerofunc.data.loaders import RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
