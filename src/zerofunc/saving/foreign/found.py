"""What was found in another library's files, under our names, to be read when it is written."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

_logger = logging.getLogger("zerofunc.saving")

_NOT_SETTINGS = {"params", "param_names", "step", "bias_correction"}


@dataclass(frozen=True)
class Lazy:
    """A tensor that is read when it is needed.

    Attributes:
        dtype: Its data type.
        shape: Its shape.
        read: Gives it; it need not have that shape yet.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Lazy:
        """Of a tensor that is there, or over a mapped file."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor.detach())


class Joined:
    """1-D tensors one after the other, of which ranges are read."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self.parts = [part.reshape(-1) for part in parts]

    def range(self, start: int, stop: int) -> torch.Tensor:
        """The elements from ``start`` to ``stop``; fewer if there are no more."""
        found, first = [], 0
        for part in self.parts:
            found.append(part[max(start - first, 0) : max(stop - first, 0)])
            first += part.numel()
        return torch.cat(found)

    def lazy(self, start: int, shape: tuple[int, ...]) -> Lazy:
        """The tensor of that shape that begins at ``start``."""
        return Lazy(self.parts[0].dtype, shape, lambda: self.range(start, start + math.prod(shape)))


@dataclass
class Found:
    """The content of a checkpoint, but for who wrote it.

    Attributes:
        tag: What it is called.
        tensors: ``model/NAME``, ``buffer/NAME``, ``optimizer/KEY/NAME``.
        ties: Names of tied parameters, each with the one under which it is stored.
        optimizer: Class of the optimizer; None if it has no state, or none that is understood.
        groups: Its parameter groups: ``{"names": …, "settings": …}``.
        values: Its state that is not one value per element, by parameter and key.
        scheduler: State of the schedule, or None.
        steps: ``global_steps``, ``skipped_steps``, ``global_samples``.
        micro_steps: How many there were.
        loss_scale: Where a dynamic loss scale stands, as ``vars`` of our scaler, or None.
        extra: States of modules that have one of their own, by path.
        client_state: Plain data.
        config: What the run was configured with, or None.
    """

    tag: str
    tensors: dict[str, Lazy] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    optimizer: str | None = None
    groups: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    scheduler: Any = None
    steps: dict[str, int] = field(default_factory=lambda: {"global_steps": 0, "skipped_steps": 0, "global_samples": 0})
    micro_steps: int = 0
    loss_scale: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    client_state: dict[str, Any] = field(default_factory=dict)
    config: Any = None

    def add_weights(self, state: dict[str, Any], buffers: Set[str] = frozenset()) -> None:
        """Take over a ``state_dict``: tensors that share memory are tied, other entries are extra state."""
        first: dict[tuple[int, tuple[int, ...]], str] = {}
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                path, _, key = name.rpartition(".")
                if key == "_extra_state" or name == "_extra_state":
                    self.extra[path] = value
                else:
                    _logger.warning("%s is a %s, no tensor: it is left out", name, type(value).__name__)
                continue
            kept = first.setdefault((value.data_ptr(), tuple(value.shape)), name) if value.numel() else name
            if kept != name:
                self.ties[name] = kept
            else:
                self.tensors[f"{'buffer' if name in buffers else 'model'}/{name}"] = Lazy.of(value)

    def add_optimizer(self, keys: set[str], groups: list[tuple[list[str], dict[str, Any]]], kind: str | None) -> None:
        """Take over the settings of groups; ``keys`` are those of the state, ``kind`` what a config says, or None."""
        settings = groups[0][1] if groups else {}
        self.optimizer = _class_of(keys, settings, kind)
        if self.optimizer is None:
            _logger.warning(
                "state of %s is of no known optimizer: it is left out", ", ".join(sorted(keys)) or "nothing"
            )
            self.tensors = {name: one for name, one in self.tensors.items() if not name.startswith("optimizer/")}
            self.values = {}
            return
        for names, found in groups:
            kept = {key: value for key, value in found.items() if key not in _NOT_SETTINGS}
            self.groups.append({"names": names, "settings": kept})


def _class_of(keys: set[str], settings: dict[str, Any], kind: str | None) -> str | None:
    """The class in torch.optim, or ours, whose state has these keys."""
    keys = keys - {"step"}
    if keys in ({"exp_avg", "exp_avg_sq"}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}):
        if kind is not None:
            return {"adam": "Adam", "adamw": "AdamW"}.get(kind)
        is_decoupled = settings.get("decoupled_weight_decay", "bias_correction" in settings)
        return "AdamW" if is_decoupled else "Adam"
    known = {"exp_avg": "Lion", "momentum_buffer": "SGD", "sum": "Adagrad"}
    if len(keys) == 1:
        return known.get(next(iter(keys)))
    return "SGD" if not keys and kind == "sgd" else None
