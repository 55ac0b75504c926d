"""What a run says of itself: progress lines, times of its phases, scalars for the monitors, and its state at the start.

Phases of a step (forward, backward, reduce, step) are ``record_function`` ranges, which torch.profiler shows. Lines go
to the logger ``zerofunc``, which shows nothing until the user sets up logging, or calls :func:`log_to_console`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from zerofunc.config import Config
from zerofunc.module.sharding import Usage
from zerofunc.pages.page import Page
from zerofunc.ranks.collectives import joined_ranks
from zerofunc.training.monitoring import Event, Monitor

_logger = logging.getLogger(__name__)


class Timers:
    """Times of named phases on this rank.

    A phase is a range for torch.profiler where that runs, and is timed where ``enabled``: by the clock on a CPU, by
    events in the stream on an accelerator, so that nothing waits. Otherwise it costs nothing and leaves no trace in a
    graph that is traced.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.enabled = enabled
        self._device = device
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    def phase(self, name: str) -> AbstractContextManager[object]:
        """A context for one run of a phase; phases may lie inside others and inside transforms."""
        if torch.compiler.is_compiling() or not (self.enabled or _profiler_enabled()):
            return nullcontext()
        return self._measured(name)

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        with record_function(f"zerofunc.{name}"):
            start = self._now()
            try:
                yield
            finally:
                if self.enabled:
                    self._spans.setdefault(name, []).append((start, self._now()))

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def take(self) -> dict[str, float]:
        """Milliseconds spent in each phase since they were last taken. Waits for an accelerator to get there."""
        spans, self._spans = self._spans, {}
        return {name: sum(_elapsed_ms(*span) for span in runs) for name, runs in spans.items()}


def _elapsed_ms(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return 1000 * (end - start)
    end.synchronize()
    return float(start.elapsed_time(end))


@dataclass(frozen=True)
class Step:
    """What is known after an optimizer step; the same on all ranks.

    Attributes:
        number: Optimizer steps so far, this one included.
        skipped: Those that were skipped.
        samples: Samples that all ranks have seen so far.
        batch: Those of this step.
        lr: Learning rate of each parameter group; None where the optimizer chooses it by itself.
        momentum: Momentum, or betas, of each parameter group.
        grad_norm: Global norm of the gradient before clipping, where it was computed.
        loss_scale: The float16 loss scale, where there is one.
    """

    number: int
    skipped: int
    samples: int
    batch: int
    lr: list[float | None]
    momentum: list[Any]
    grad_norm: torch.Tensor | None = None
    loss_scale: float | None = None


class Progress:
    """Reports the steps of a run from its first rank: lines every ``steps_per_print`` steps, scalars at every step."""

    def __init__(self, config: Config, rank: int, device: torch.device) -> None:
        self.monitor = Monitor(config, rank)
        self._every = config.steps_per_print
        self._with_memory = config.memory_breakdown
        self._is_active = rank == 0 and (self.monitor.enabled or self._every is not None)
        self.timers = Timers(device, self._is_active and config.wall_clock_breakdown)
        if rank == 0 and config.wall_clock_breakdown and not self._is_active:
            _logger.warning("wall_clock_breakdown needs steps_per_print or a monitor to show its times; it is off")
        self._loss: torch.Tensor | None = None
        self._times: dict[str, float] = {}
        self._steps = self._samples = 0  # since the last line
        self._since: float | None = None

    def add_loss(self, loss: torch.Tensor) -> None:
        """Local. Add a loss, detached, as divided by the accumulation steps, to what this step reports."""
        if self._is_active:
            self._loss = loss if self._loss is None else self._loss + loss

    def finish_step(self, step: Step, usage: Callable[[], Usage]) -> None:
        """Local. Report a step, where it is due; reading its loss and norm then waits for an accelerator.

        Args:
            step: What the engine knows.
            usage: Asked for memory, where ``memory_breakdown`` wants it.
        """
        if not self._is_active:
            return
        is_due = self._every is not None and step.number % self._every == 0
        self._steps += 1
        if self._since is None:  # the first step, which warms up, is not timed
            self._since = time.perf_counter()
        else:
            self._samples += step.batch
        if is_due or self.monitor.enabled:
            loss, times = None if self._loss is None else float(self._loss), self.timers.take()
            for name, spent_ms in times.items():
                self._times[name] = self._times.get(name, 0.0) + spent_ms
            self.monitor.write(scalars(step, loss, times))
            if is_due:
                memory = f", {_memory(usage())}" if self._with_memory else ""
                _logger.info("%s%s", self._line(step, loss), memory)
        self._loss = None

    def _line(self, step: Step, loss: float | None) -> str:
        """The line of a step, with averages since the last line, which begin anew."""
        now = time.perf_counter()
        parts = [f"step={step.number}, skipped={step.skipped}, lr={step.lr}, mom={step.momentum}"]
        parts += [] if loss is None else [f"loss={loss:.6g}"]
        parts += [f"samples/s={self._samples / (now - self._since):.4g}"] if self._since and self._samples else []
        parts += [f"{name}={spent_ms / self._steps:.3g} ms" for name, spent_ms in self._times.items()]
        self._times, self._steps, self._samples, self._since = {}, 0, 0, now
        return ", ".join(parts)

    def close(self) -> None:
        """Local. Finish the monitors."""
        self.monitor.close()


def scalars(step: Step, loss: float | None, times_ms: dict[str, float]) -> list[Event]:
    """The scalars of a step, under DeepSpeed's names."""
    norm = None if step.grad_norm is None else float(step.grad_norm)
    values = {"lr": step.lr[0], "train_loss": loss, "loss_scale": step.loss_scale, "grad_norm": norm}
    values |= {f"elapsed_time_ms_{phase}": spent_ms for phase, spent_ms in times_ms.items()}
    return [(f"Train/Samples/{name}", value, step.samples) for name, value in values.items() if value is not None]


def _memory(usage: Usage) -> str:
    """Every kind of memory of :class:`Usage` in MB, and the accelerator's peak."""
    sizes = {field.name: getattr(usage, field.name) for field in fields(usage) if field.name.endswith("_bytes")}
    if torch.accelerator.is_available():
        sizes["accelerator_peak_bytes"] = torch.accelerator.max_memory_allocated()
    return ", ".join(f"{name.removesuffix('_bytes')}={size / 1e6:.1f} MB" for name, size in sizes.items())


def page_table(pages: Iterable[Page]) -> str:
    """One line per page: its data type, its elements in all and on each rank, and its parameters."""
    lines = ["page  dtype     elements  per rank  parameters"]
    for page in pages:
        layout, names = page.layout, ", ".join(slot.name for slot in page.layout.slots)
        dtype = str(page.dtype).removeprefix("torch.")
        lines.append(f"{layout.index:>4}  {dtype:<8} {layout.numel:>9} {layout.shard_numel:>9}  {names}")
    return "\n".join(lines)


def log_state(config: Config, pages: Iterable[Page]) -> None:
    """Local. Log the resolved config as JSON, and the pages, as ``dump_state`` wants on the first rank."""
    _logger.info("config: %s", config.model_dump_json(indent=2))
    _logger.info("pages:\n%s", page_table(pages))


class RankFilter(logging.Filter):
    """Gives each record the attribute ``rank``, for a handler's format: ``%(rank)d``."""

    def filter(self, record: logging.LogRecord) -> bool:
        """True: every record passes."""
        joined = joined_ranks()
        record.rank = joined[0] if joined else int(os.environ.get("RANK") or 0)
        return True


def log_to_console(level: int | str = logging.INFO) -> None:
    """Local. Show zerofunc's own log from ``level`` on: on standard error, unless handlers are set up already.

    Args:
        level: A number or name of :mod:`logging`, in any case.
    """
    logger = logging.getLogger("zerofunc")
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.addFilter(RankFilter())
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [rank %(rank)d] %(message)s"))
        logger.addHandler(handler)
