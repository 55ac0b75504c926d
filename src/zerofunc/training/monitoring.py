"""Scalars of a run, written by the libraries that the config's ``tensorboard``, ``wandb`` and ``csv_monitor`` name.

The first rank writes; on the others a :class:`Monitor` does nothing. The x of every curve is the number of samples
that all ranks have seen.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from zerofunc.config import Config

Event = tuple[str, float, int]  # name, value, number of samples


class Writer(Protocol):
    """Where scalars go."""

    def write(self, events: Sequence[Event]) -> None:
        """Write scalars, so that they are there if the process dies."""

    def close(self) -> None:
        """Finish what was written."""


class TensorboardWriter:
    """Event files for TensorBoard in ``output_path/job_name``."""

    def __init__(self, section: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(os.path.join(section.output_path, section.job_name))

    def write(self, events: Sequence[Event]) -> None:
        """Write scalars and flush them."""
        for name, value, samples in events:
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        """End the thread that writes."""
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases: the one that is active, or else a new one."""

    def __init__(self, section: Any) -> None:
        import wandb

        self._is_ours = wandb.run is None
        self._run = wandb.run or wandb.init(project=section.project, group=section.group, entity=section.team)

    def write(self, events: Sequence[Event]) -> None:
        """Log scalars, those of equal x together."""
        for samples in sorted({samples for _, _, samples in events}):
            self._run.log({name: value for name, value, x in events if x == samples}, step=samples)

    def close(self) -> None:
        """Finish the run if it was made here."""
        if self._is_ours:
            self._run.finish()


class CsvWriter:
    """One CSV file with the columns step and value for each name, in ``output_path/job_name``."""

    def __init__(self, section: Any) -> None:
        self._folder = Path(section.output_path, section.job_name)
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, events: Sequence[Event]) -> None:
        """Append a line per scalar; a new file begins with a header."""
        for name, value, samples in events:
            with open(self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv", "a", newline="") as file:
                rows = csv.writer(file)
                if file.tell() == 0:
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([samples, value])

    def close(self) -> None:
        """Nothing is open."""


_WRITERS: dict[str, Callable[[Any], Writer]] = {
    "tensorboard": TensorboardWriter,
    "wandb": WandbWriter,
    "csv_monitor": CsvWriter,
}


class Monitor:
    """Every writer that a config enables.

    Attributes:
        enabled: Whether there is any, the same on all ranks.
    """

    def __init__(self, config: Config, rank: int) -> None:
        """Open the writers on the first rank.

        Args:
            config: Its sections ``tensorboard``, ``wandb`` and ``csv_monitor`` are read.
            rank: This process's place among all ranks.

        Raises:
            ImportError: On every rank, if a library is not installed.
        """
        sections = {name: getattr(config, name) for name in _WRITERS if getattr(config, name).enabled}
        missing = [name for name in sections if name != "csv_monitor" and not _is_installed(name)]
        if missing:
            raise ImportError(
                f"the config enables {' and '.join(missing)}, but the package is not installed: "
                "pip install 'zerofunc[monitor]', or set its enabled to false"
            )
        self.enabled = bool(sections)
        self._writers = [_WRITERS[name](section) for name, section in sections.items() if rank == 0]

    def write(self, events: Iterable[Event]) -> None:
        """Local. Write scalars: ``(name, value, samples)``."""
        listed = list(events)
        for writer in self._writers:
            writer.write(listed)

    def close(self) -> None:
        """Local. Finish all writers; later scalars are not written."""
        while self._writers:
            self._writers.pop().close()


def _is_installed(package: str) -> bool:
    """Whether it can be imported; a folder of its name, as ``wandb`` leaves behind, is not a package."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
