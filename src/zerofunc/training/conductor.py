"""What an engine says to its module's backwards: which may run, what their gradients count, when they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from zerofunc.config import Config
from zerofunc.gradients.backwards import is_collecting
from zerofunc.gradients.policy import BackwardPlan, Conductor
from zerofunc.training.accumulation import Accumulation
from zerofunc.training.precision import needs_loss_scale


class EngineConductor(Conductor):
    """Refuses a ``loss.backward()`` that would leave wrong gradients, and plans backwards by the accumulation.

    Attributes:
        is_scaled: Whether the backward that runs came through a scaled loss.
    """

    def __init__(
        self,
        config: Config,
        stage: int,
        accumulation: Accumulation,
        phase: Callable[[str], AbstractContextManager[object]],
    ) -> None:
        self.is_scaled = False
        self._config = config
        self._stage = stage
        self._accumulation = accumulation
        self._phase = phase
        self._share: float | None = None

    def phase(self, name: str) -> AbstractContextManager[object]:
        """The engine's timer."""
        return self._phase(name)

    def plan(self) -> BackwardPlan:
        """Reduced where a step is due, or no full gradient is kept; divided by the number of micro-steps."""
        share = 1.0 / self._accumulation.num_steps if self._share is None else self._share
        return BackwardPlan(self._accumulation.is_reduced, share)

    @contextmanager
    def counting(self, share: float) -> Iterator[None]:
        """Local. Gradients of backwards inside count this much, whatever the number of micro-steps."""
        before, self._share = self._share, share
        try:
            yield
        finally:
            self._share = before

    def admit(self) -> None:
        """Refuse a ``loss.backward()`` without the loss scale that it needs, or at stage 0 unless it is allowed.

        Raises:
            RuntimeError: With what to do instead.
        """
        if is_collecting():  # of this engine, or of another one whose loss goes through this one's module
            return
        if needs_loss_scale(self._config) and not self.is_scaled:
            cause = "fp16" if self._config.fp16.enabled else "torch_autocast to float16"
            raise RuntimeError(
                f"Loss scaling is required for this configuration ({cause}), but backward() was called directly on a "
                "tensor. Use engine.backward(loss), or engine.scale(loss).backward()."
            )
        if self._stage == 0 and not self.is_scaled and not self._config.zerofunc.direct_backward:
            raise RuntimeError(
                "Direct calls to tensor.backward() are not supported at ZeRO stage 0. Use engine.backward(loss), or "
                'allow them in the config: "zerofunc": {"direct_backward": true}.'
            )
        self._accumulation.backwards += 1

    def let_pass(self, scaled: torch.Tensor) -> None:
        """Local. Let the backward of a scaled loss, and those inside it, pass :meth:`admit`."""
        scaled.register_hook(self._note_scaled)

    def _note_scaled(self, gradient: torch.Tensor) -> None:
        self.is_scaled = True
        torch.autograd.Variable._execution_engine.queue_callback(self._forget_scaled)

    def _forget_scaled(self) -> None:
        self.is_scaled = False
