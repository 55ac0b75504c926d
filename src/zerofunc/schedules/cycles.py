"""Schedules that sweep the learning rate: one cycle, and the range test (Smith 2018, arXiv:1803.09820)."""

from __future__ import annotations

import logging
import math

import torch
from torch.optim import Optimizer

from zerofunc.schedules.iterations import IterationScheduler, Rates, per_group, whole_number

_logger = logging.getLogger("zerofunc.schedules")

_SECOND_BETA = 0.99  # which DeepSpeed puts beside a momentum that it cycles


class LRRangeTest(IterationScheduler):
    """Raises each group's rate on a line without end, or in stairs, to find where training diverges.

    Args:
        optimizer: Whose groups get the rates.
        lr_range_test_min_lr: Rate at the start, one for all groups or one each.
        lr_range_test_step_size: Iterations in which the rate grows by `lr_range_test_step_rate` times the minimum.
        lr_range_test_step_rate: That factor.
        lr_range_test_staircase: Whether the rate stays where it is for `lr_range_test_step_size` iterations.
        last_batch_iteration: Iteration in force when training is resumed without a state_dict, -1 to start.

    Raises:
        ValueError: If a number is none of these.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = per_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = whole_number(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of each group, `min * (1 + rate * steps)`."""
        steps = self.last_epoch / self.step_size
        growth = 1 + self.step_rate * (math.floor(steps) if self.staircase else steps)
        return [low * growth for low in self.min_lrs]


class OneCycle(IterationScheduler):
    """Raises each group's rate from a minimum to a maximum and lowers it again, once; then lets it decay.

    The first beta of Adam and its kin runs the other way, from a maximum to a minimum and back; before the first call
    of `step` it is the minimum, as in DeepSpeed. The second one becomes 0.99. Afterwards the rate is
    `min / (1 + decay_lr_rate * n)` and the first beta `max * (1 + decay_mom_rate * n)`, after n times
    `decay_step_size` iterations.

    Args:
        optimizer: Whose groups get the rates and betas.
        cycle_min_lr: Rate at both ends of the cycle, one for all groups or one each.
        cycle_max_lr: Rate between, likewise.
        decay_lr_rate: Strength of the decay after the cycle.
        cycle_first_step_size: Iterations up.
        cycle_second_step_size: Iterations down; as many as up by default.
        cycle_first_stair_count: Number of stairs on the way up; 0 for a line.
        cycle_second_stair_count: Number of stairs on the way down; as many as up by default.
        decay_step_size: Unit of the iterations after the cycle; 0 for no decay.
        cycle_momentum: Whether betas change.
        cycle_min_mom: First beta where the rate is highest, one for all groups or one each.
        cycle_max_mom: First beta where the rate is lowest, likewise.
        decay_mom_rate: Strength of its change after the cycle.
        last_batch_iteration: Iteration in force when training is resumed without a state_dict, -1 to start.

    Raises:
        ValueError: If a number is none of these.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second_size = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        second_count = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.min_lrs = per_group(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = per_group(optimizer, cycle_max_lr, "cycle_max_lr")
        self.first_size = whole_number(cycle_first_step_size, "cycle_first_step_size")
        self.second_size = whole_number(second_size, "cycle_second_step_size", 0)
        self.first_stairs = whole_number(cycle_first_stair_count, "cycle_first_stair_count", 0)
        self.second_stairs = whole_number(second_count, "cycle_second_stair_count", 0)
        self.decay_step_size = whole_number(decay_step_size, "decay_step_size", 0)
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_moms = per_group(optimizer, cycle_min_mom, "cycle_min_mom")
        self.max_moms = per_group(optimizer, cycle_max_mom, "cycle_max_mom")
        self.cycle_momentum = cycle_momentum and _has_betas(optimizer)
        super().__init__(optimizer, last_batch_iteration)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Put the rates and betas of the next iteration into force, or of the one that is given."""
        super().step(last_batch_iteration)
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or [], strict=False):
            group["betas"] = betas

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of each group."""
        if self._is_over:
            return [low / (1 + self.decay_lr_rate * self._decays) for low in self.min_lrs]
        return [low + (high - low) * self._height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each group, or None if they do not change."""
        if not self.cycle_momentum:
            return None
        pairs = list(zip(self.min_moms, self.max_moms, strict=True))
        if self.last_epoch == 0:
            moms = self.min_moms
        elif self._is_over:
            moms = [high * (1 + self.decay_mom_rate * self._decays) for _, high in pairs]
        else:
            moms = [high - (high - low) * self._height for low, high in pairs]
        return [(mom, _SECOND_BETA) for mom in moms]

    @property
    def _is_over(self) -> bool:
        return self.last_epoch > self.first_size + self.second_size

    @property
    def _decays(self) -> float:
        """How often `decay_step_size` iterations have passed since the cycle."""
        past = self.last_epoch - self.first_size - self.second_size
        return past / self.decay_step_size if self.decay_step_size else 0.0

    @property
    def _height(self) -> float:
        """How far the rate is up, from 0 to 1."""
        done, size, stairs = self.last_epoch, self.first_size, self.first_stairs
        if done > size:
            done, size, stairs = self.first_size + self.second_size - done, self.second_size, self.second_stairs
        return math.floor(done * stairs / size) / stairs if stairs else done / size


def _has_betas(optimizer: Optimizer) -> bool:
    """Return whether the optimizer has betas to cycle; says so if not."""
    found = all("betas" in group for group in optimizer.param_groups)
    if not found:
        _logger.warning("cycle_momentum: nothing to cycle, %s has no betas", type(optimizer).__name__)
    return found
