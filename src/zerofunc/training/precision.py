"""Mixed precision: loss scaling for float16, autocast, and casts of inputs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zerofunc.config import Config, Fp16Config

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Data types by the names that configurations give them."""


@dataclass
class LossScaler:
    """The factor on a float16 loss that keeps its gradients from underflow.

    A dynamic scale halves after ``hysteresis`` overflows and doubles after ``window`` good steps, those without one. It
    never falls below ``minimum``. The same on every rank, as overflows are.

    Attributes:
        scale: The factor now.
        dynamic: Whether it changes.
        uncounted: Good steps after the start, and after an overflow, that the window leaves out.
    """

    scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0
    uncounted: int = 0
    _good_steps: int = 0
    _overflows_left: int = -1

    def __post_init__(self) -> None:
        self._good_steps = -self.uncounted

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
            self._good_steps = -self.uncounted
            if self._overflows_left > 1:
                self._overflows_left -= 1
            else:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self._good_steps += 1
        if self.consecutive_hysteresis:
            self._overflows_left = self.hysteresis
        if self._good_steps > 0 and self._good_steps % self.window == 0:
            self._overflows_left = self.hysteresis
            self.scale *= 2


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """The tree with every floating-point tensor in ``dtype``; derivatives flow through the cast."""
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree
    )


def needs_loss_scale(config: Config) -> bool:
    """Whether gradients are float16 ones, which a loss that is not scaled loses to underflow."""
    return config.fp16.enabled or autocast_dtype(config) == torch.float16


def loss_scaler(config: Config) -> LossScaler:
    """The loss scaling that a configuration asks for; a factor of 1 without float16.

    The scale of ``fp16`` moves in the steps in which DeepSpeed's does. Under autocast the section ``fp16`` counts for
    what it sets; the rest is as in ``torch.amp.GradScaler``.
    """
    fp16 = config.fp16
    if not needs_loss_scale(config):
        return LossScaler()
    if fp16.loss_scale:
        return LossScaler(fp16.loss_scale)
    given = fp16.model_fields_set if not fp16.enabled else Fp16Config.model_fields
    return LossScaler(
        2.0**fp16.initial_scale_power,
        dynamic=True,
        window=fp16.loss_scale_window if "loss_scale_window" in given else 2000,
        hysteresis=fp16.hysteresis if "hysteresis" in given else 1,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=float(fp16.min_loss_scale),
        uncounted=int(fp16.enabled),
    )


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
