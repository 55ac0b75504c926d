"""Schedules that begin with a warmup."""

from __future__ import annotations

import logging
import math
from typing import Literal

import torch
from torch.optim import Optimizer

from zerofunc.schedules.iterations import IterationScheduler, Rates, per_group, whole_number

_logger = logging.getLogger("zerofunc.schedules")

WarmupType = Literal["log", "linear"]


def warmup(iteration: int, num_steps: int, kind: WarmupType) -> float:
    """Return how far warmup has come at an iteration (from 0): log(iteration + 1) / log(num_steps), or linear."""
    return math.log(iteration + 1) / math.log(num_steps) if kind == "log" else iteration / num_steps


def linear_decay(iteration: int, start: int, stop: int) -> float:
    """Return the factor that falls from 1 at `start` to 0 at `stop` and stays there."""
    return max(0.0, (stop - iteration) / max(1.0, stop - start))


def cosine_decay(iteration: int, start: int, stop: int, floor: float) -> float:
    """Return the factor that falls along half a cosine from 1 just before `start` to `floor`, and stays there."""
    progress = min(1.0, (iteration - start + 1) / max(1, stop - start))
    return max(0.0, floor + (1.0 - floor) * (1 + math.cos(math.pi * progress)) / 2)


class WarmupLR(IterationScheduler):
    """Raises each group's rate from a minimum to a maximum, then keeps it there.

    As in DeepSpeed, iteration i is in force after the call number i + 1 of `step`; until the first call the rate
    is the minimum. Warmup by "log" puts the same minimum into iteration 0.

    Args:
        optimizer: Whose groups get the rates.
        warmup_min_lr: Rate at the start, one for all groups or one each.
        warmup_max_lr: Rate after warmup, one for all groups or one each; each group's own by default.
        warmup_num_steps: Iterations of warmup; 1 counts as 2, as upstream.
        warmup_type: "log" or "linear".
        last_batch_iteration: Iteration in force when training is resumed without a state_dict, -1 to start.

    Raises:
        ValueError: If a number or a name is none of these.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = per_group(optimizer, warmup_min_lr, "warmup_min_lr")
        own_lrs = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.max_lrs = own_lrs if warmup_max_lr is None else per_group(optimizer, warmup_max_lr, "warmup_max_lr")
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _checked_type(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of each group, `min + (max - min) * factor`."""
        iteration = self.last_batch_iteration
        factor = self._factor(iteration) if iteration >= 0 else 0.0
        return [low + (high - low) * factor for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _factor(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return warmup(iteration, self.warmup_num_steps, self.warmup_type)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Raises each group's rate from a minimum to a maximum, then lowers it linearly to the minimum.

    Args:
        optimizer: Whose groups get the rates.
        total_num_steps: Iteration at which the minimum is reached again.
        warmup_min_lr: As in `WarmupLR`.
        warmup_max_lr: As in `WarmupLR`.
        warmup_num_steps: As in `WarmupLR`.
        warmup_type: As in `WarmupLR`.
        last_batch_iteration: As in `WarmupLR`.

    Raises:
        ValueError: As in `WarmupLR`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _total_steps(total_num_steps, warmup_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _factor(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return warmup(iteration, self.warmup_num_steps, self.warmup_type)
        return linear_decay(iteration, self.warmup_num_steps, self.total_num_steps)


class WarmupCosineLR(IterationScheduler):
    """Scales each group's own rate: up from a ratio to 1, then down along a cosine to another ratio.

    As in DeepSpeed, iteration i is in force after the call number i + 1 of `step`; until the first call the rate
    is 0, whatever `warmup_min_ratio` says.

    Args:
        optimizer: Whose groups' rates are scaled.
        total_num_steps: Iterations until `cos_min_ratio` is reached.
        warmup_min_ratio: Ratio at iteration 0.
        warmup_num_steps: Iterations of warmup; 1 counts as 2, as upstream.
        cos_min_ratio: Ratio at the end.
        warmup_type: "log" or "linear".
        last_batch_iteration: Iteration in force when training is resumed without a state_dict, -1 to start.

    Raises:
        ValueError: If a number or a name is none of these.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _total_steps(total_num_steps, warmup_num_steps)
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type = _checked_type(warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of each group, its initial rate times the ratio."""
        iteration = self.last_batch_iteration
        ratio = self._ratio(iteration) if iteration >= 0 else 0.0
        return [base * ratio for base in self.base_lrs]

    def _ratio(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            done = warmup(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * done
        return cosine_decay(iteration, self.warmup_num_steps, self.total_num_steps, self.cos_min_ratio)


def _warmup_steps(value: object) -> int:
    """Return the checked number of warmup steps, at least 2 because log(1) is 0."""
    return max(2, whole_number(value, "warmup_num_steps"))


def _total_steps(total: object, num_warmup: object) -> int:
    steps = whole_number(total, "total_num_steps")
    if steps < _warmup_steps(num_warmup):
        _logger.warning("total_num_steps %s is less than warmup_num_steps %s: there is no decay", steps, num_warmup)
    return steps


def _checked_type(kind: WarmupType) -> WarmupType:
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type: expected 'log' or 'linear', found {kind!r}")
    return kind
