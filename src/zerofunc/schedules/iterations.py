"""What DeepSpeed's schedules share: how they count, and what their arguments may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Rates = float | Sequence[float]
"""A number for all parameter groups, or one each."""


class IterationScheduler(LRScheduler):
    """A schedule that counts as DeepSpeed does: iteration i is in force after the call number i + 1 of `step`."""

    @property
    def last_batch_iteration(self) -> int:
        """Return the iteration in force, -1 until the first call of `step`."""
        return self.last_epoch - 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another one stood; DeepSpeed's state is the iteration alone."""
        if state_dict.keys() != {"last_batch_iteration"}:
            super().load_state_dict(state_dict)
            return
        self.last_epoch = state_dict["last_batch_iteration"] + 1
        self._step_count = self.last_epoch + 1
        self._last_lr = self.get_lr()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Put the next iteration into force, or the one that is given."""
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        super().step()


def per_group(optimizer: Optimizer, value: Rates, name: str) -> list[float]:
    """Return one number for each parameter group.

    Raises:
        ValueError: If it is neither a number nor as many numbers as there are groups.
    """
    num_groups = len(optimizer.param_groups)
    rates = [value] * num_groups if isinstance(value, int | float) else value
    if isinstance(rates, str) or not all(isinstance(rate, int | float) for rate in rates):
        raise ValueError(f"{name}: expected a number or a list of numbers, found {value!r}")
    if len(rates) != num_groups:
        raise ValueError(f"{name}: expected {num_groups} rates, one per parameter group, found {len(rates)}")
    return [float(rate) for rate in rates]


def whole_number(value: object, name: str, least: int = 1) -> int:
    """Return an integer, which JSON may have given as a float.

    Raises:
        ValueError: If it is not an integer, or less than ``least``.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not float(value).is_integer() or value < least:  # type: ignore[arg-type,operator]
        raise ValueError(f"{name}: expected an integer {'> 0' if least == 1 else f'>= {least}'}, found {value!r}")
    return int(value)  # type: ignore[call-overload]
