"""Loss scaling for float16, and casts of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass
class LossScaler:
    """The factor on a float16 loss that keeps its gradients from underflow.

    A dynamic scale halves after ``hysteresis`` overflows and doubles after ``window`` steps without one; it never
    falls below ``minimum``. The same on every rank, as overflows are.

    Attributes:
        scale: The factor now.
        dynamic: Whether it changes.
    """

    scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0
    _good_steps: int = 0
    _overflows_left: int = -1

    def update(self, overflow: bool) -> None:
        """Learn whether the last gradient had an infinity or a NaN."""
        if not self.dynamic:
            return
        if self._overflows_left < 0:
            self._overflows_left = self.hysteresis
        if overflow:
            self._good_steps = 0
            if self._overflows_left > 1:
                self._overflows_left -= 1
            else:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self._good_steps += 1
        if self.consecutive_hysteresis:
            self._overflows_left = self.hysteresis
        if self._good_steps % self.window == 0:
            self._overflows_left = self.hysteresis
            self.scale *= 2


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """The tree with every floating-point tensor in ``dtype``; derivatives flow through the cast."""
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree
    )
