"""``deepspeed.monitor.monitor``: the script's own scalars, to where the configuration sends the engine's."""

from __future__ import annotations

from collections.abc import Iterable

from zerofunc.compat.deepspeed.comm import get_rank
from zerofunc.config import Config
from zerofunc.training.monitoring import Event, Monitor

__all__ = ["MonitorMaster"]


class MonitorMaster(Monitor):
    """Every writer that a configuration (``engine.config``) enables; the first rank writes."""

    def __init__(self, monitor_config: Config) -> None:
        super().__init__(monitor_config, get_rank())

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Local. Write scalars: ``(name, value, samples)``."""
        self.write(event_list)
