"""``deepspeed.utils.logging``: the logger of zerofunc."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from zerofunc.compat.deepspeed.comm import get_rank

__all__ = ["log_dist", "logger"]

logger = logging.getLogger("zerofunc")


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Local. Log on some ranks; on all of them where ``ranks`` is None, empty or contains -1."""
    wanted, rank = list(ranks or [-1]), get_rank()
    if rank in wanted or -1 in wanted:
        logger.log(level, "[rank %d] %s", rank, message)
