"""``deepspeed.runtime.dataloader``."""

from zerofunc.data import RankLoader as DeepSpeedDataLoader
from zerofunc.data import RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
