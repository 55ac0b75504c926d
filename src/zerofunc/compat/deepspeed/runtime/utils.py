"""``deepspeed.runtime.utils``."""

from __future__ import annotations

import resource
import sys

from zerofunc.compat.deepspeed.accelerator import get_accelerator
from zerofunc.compat.deepspeed.utils.logging import log_dist

__all__ = ["see_memory_usage"]


def see_memory_usage(message: str, force: bool = False) -> None:
    """Local. Log, on the first rank, bytes on the device and the most that the process has held; only if ``force``."""
    if force:
        device, unit = get_accelerator(), 1 if sys.platform == "darwin" else 1024
        log_dist(
            f"{message}: {device.memory_allocated() / 2**30:.2f} GiB on the device (at most "
            f"{device.max_memory_allocated() / 2**30:.2f}), the process at most "
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GiB",
            ranks=[0],
        )
