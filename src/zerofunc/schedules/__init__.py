"""Learning-rate schedules under DeepSpeed's names and with its numbers, and any of torch's by name."""

from zerofunc.schedules.building import build_scheduler
from zerofunc.schedules.cycles import LRRangeTest, OneCycle
from zerofunc.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "build_scheduler"]
