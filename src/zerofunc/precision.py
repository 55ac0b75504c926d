"""Mixed precision: loss scaling for float16, autocast, and casts of inputs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zerofunc.config import Config

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Data types by the names that configurations give them."""


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

    @property
    def is_at_minimum(self) -> bool:
        """Whether the scale can fall no further."""
        return self.dynamic and self.scale <= self.minimum

    def restore(self, state: dict[str, Any]) -> None:
        """Stand where another one stood, whose ``vars`` are given; a constant scale stays."""
        if self.dynamic and state["dynamic"]:
            self.scale, self._good_steps = state["scale"], state["_good_steps"]
            self._overflows_left = state["_overflows_left"]

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
        if self._good_steps and self._good_steps % self.window == 0:  # DeepSpeed's may stand one step before the first
            self._overflows_left = self.hysteresis
            self.scale *= 2


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """The tree with every floating-point tensor in ``dtype``; derivatives flow through the cast."""
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree
    )


def loss_scaler(config: Config) -> LossScaler:
    """The loss scaling that a configuration asks for; a factor of 1 without float16."""
    fp16 = config.fp16
    if fp16.enabled and fp16.loss_scale:
        return LossScaler(fp16.loss_scale)
    if not fp16.enabled and autocast_dtype(config) != torch.float16:
        return LossScaler()
    return LossScaler(
        2.0**fp16.initial_scale_power, True, fp16.loss_scale_window, fp16.hysteresis, fp16.consecutive_hysteresis,
        float(fp16.min_loss_scale),
    )  # fmt: skip


def input_dtype(config: Config) -> torch.dtype | None:
    """What floating-point inputs of a forward are cast to, or None."""
    if config.fp16.enabled and config.fp16.auto_cast:
        return torch.float16
    return torch.bfloat16 if config.bf16.enabled and config.bf16.auto_cast else None


def autocast_dtype(config: Config) -> torch.dtype | None:
    """What operators of a forward are cast to by torch.autocast, or None."""
    return getattr(torch, config.torch_autocast.dtype) if config.torch_autocast.enabled else None


def autocast(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward."""
    dtype = autocast_dtype(config)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
