"""What scripts ask DeepSpeed's optimizer for beside what a ``torch.optim`` optimizer has."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer

from zerofunc.training.engine import Engine

__all__ = ["LossScaleViews", "with_loss_scale"]


class LossScaleViews:
    """Read-only views of the engine that an optimizer belongs to."""

    _engine: weakref.ref[Engine]

    @property
    def loss_scale(self) -> float:
        """Factor on the loss during backward."""
        return self._alive().loss_scale()

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether that factor changes."""
        return self._alive().dynamic_loss_scale()

    @property
    def loss_scaler(self) -> Any:
        """The object that changes it."""
        return self._alive().loss_scaler

    @property
    def overflow(self) -> bool:
        """Whether the last step at a boundary was skipped for an infinity or a NaN."""
        return self._alive().overflowed()

    def _alive(self) -> Engine:
        engine = self._engine()
        if engine is None:
            raise RuntimeError("the engine of this optimizer is gone")
        return engine


def with_loss_scale(optimizer: Optimizer, engine: Engine) -> None:
    """Give the optimizer these views; it stays an instance of its class, and the same object."""
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (LossScaleViews, kind), {"__module__": kind.__module__})
    optimizer._engine = weakref.ref(engine)  # type: ignore[attr-defined]
