"""The engine that DeepSpeed users know: ``engine(x)``, ``engine.backward(loss)``, ``engine.step()``.

It adds to a sharded module what a training loop needs: accumulation, clipping, loss scaling, optimizer and schedule.
Nothing of it happens in a forward or in a hook on an output, so that transforms of the engine are those of the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from zerofunc.config import Config
from zerofunc.kernels.selection import explain_second_order
from zerofunc.precision import LossScaler, cast_floating
from zerofunc.sharding import (
    Usage,
    sharding_of,
    shards,
)
from zerofunc.trees import clip_factor, grad_norm, scale_gradients

_engine_backwards: list[None] = []  # one entry per running one; of the process, as autograd has threads of its own


@contextmanager
def _expected_backward() -> Iterator[None]:
    """Backwards inside were started by an engine."""
    _engine_backwards.append(None)
    try:
        yield
    finally:
        _engine_backwards.pop()


class Engine(nn.Module):
    """A sharded module with what trains it. Made by :func:`zerofunc.initialize`.

    ``engine(...)`` is ``engine.module(...)``, to be transformed by torch.func as it is. Attributes that the engine
    does not have are the module's.

    Attributes:
        module: The user's module, sharded in place.
        optimizer: A ``torch.optim`` optimizer over this rank's shards, or None.
        lr_scheduler: The schedule, stepped by :meth:`step`, or None.
        training_dataloader: The loader of ``training_data``, or None.
        config: The resolved configuration.
        global_steps: Optimizer steps so far, skipped ones included.
        skipped_steps: Steps skipped because of an infinite or NaN gradient.
        micro_steps: Calls of :meth:`step` so far.
        global_samples: Samples seen by all ranks.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        optimizer: Optimizer | None,
        lr_scheduler: LRScheduler | None,
        training_dataloader: DataLoader[Any] | None,
    ) -> None:
        super().__init__()
        self.module = module
        self.config = config
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = training_dataloader
        self.global_steps = self.skipped_steps = self.micro_steps = self.global_samples = 0
        self.loss_scaler = _loss_scaler(config)
        self._sharding = sharding_of(module)
        self._reducer = self._sharding.reducer
        self._reducer.guard = self._guard
        self._boundary: bool | None = None
        self._is_scaled = False
        self._grad_norm: torch.Tensor | None = None
        self._step_applied = False
        self._plan_reduction()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own result: a function of this rank's data."""
        if self.config.fp16.enabled and self.config.fp16.auto_cast:
            args, kwargs = cast_floating((args, kwargs), torch.float16)
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """The module's attribute, where the engine has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" not in modules:
                raise
            return getattr(modules["module"], name)

    # -- backward -----------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Collective. Add the gradient of ``loss``, averaged over the ranks, to the gradients of the shards.

        It is divided by the accumulation steps; under float16 it is scaled meanwhile. Losses that contain derivatives
        of the engine, several losses, and several calls per step are fine.

        Args:
            loss: One element, this rank's loss.
            retain_graph: As in ``Tensor.backward``.
            scale_wrt_gas: Whether to divide by the accumulation steps.

        Returns:
            The loss, divided likewise, detached from the graph.

        Raises:
            ValueError: If the loss is not one element that depends on something differentiable.
            RuntimeError: If the loss contains a gradient of a fused kernel that has no second derivative.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"backward() takes a loss of one element, found {found}; use its mean or sum")
        if not loss.requires_grad:
            raise ValueError("backward() was given a loss that does not require a gradient (detached, or no_grad)")
        self._need_optimizer()
        share = 1.0 / self.gradient_accumulation_steps() if scale_wrt_gas else 1.0
        before = self._reducer.finished
        scale = self.loss_scaler.scale
        try:
            with _expected_backward(), self._reducer.settings(self._reducer.sync, share):
                (loss * scale if scale != 1.0 else loss).backward(retain_graph=retain_graph)
                if self._reducer.finished == before:
                    self._reducer.finish()
        except BaseException as error:
            self._reducer.discard()
            explain_second_order(error)
            raise
        return loss.detach() * share

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Local. The loss times the float16 loss scale, for one ``.backward()`` by hand."""
        self._is_scaled = True
        return loss * self.loss_scaler.scale

    def _guard(self) -> None:
        """Refuse a ``loss.backward()`` that would leave wrong gradients."""
        if _engine_backwards:  # of this engine, or of another one whose loss goes through this one's module
            return
        if self._is_scaled:
            self._is_scaled = False
            return
        if self.config.fp16.enabled:
            raise RuntimeError(
                "Loss scaling is required for this configuration (fp16), but backward() was called directly on a "
                "tensor. Use engine.backward(loss), or engine.scale(loss).backward()."
            )
        if self._sharding.stage == 0 and not self.config.zerofunc.direct_backward:
            raise RuntimeError(
                "Direct calls to tensor.backward() are not supported at ZeRO stage 0. Use engine.backward(loss), or "
                'allow them in the config: "zerofunc": {"direct_backward": true}.'
            )

    # -- step ---------------------------------------------------------------------------------------------------

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Collective at the accumulation boundary. Count a micro-step; at the boundary clip and update.

        A step whose gradient has an infinity or a NaN is skipped on all ranks under float16 and bfloat16.
        """
        optimizer = self._need_optimizer()
        if self.is_gradient_accumulation_boundary():
            if self._reducer.owed:
                with self._reducer.settings(True, 1.0):
                    self._reducer.finish()
            self._step_applied = self._clip()
            if self._step_applied:
                optimizer.step()
                if self.lr_scheduler is not None:
                    self.lr_scheduler.step(**(lr_kwargs or {}))
            else:
                self.skipped_steps += 1
            optimizer.zero_grad()
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
        self.micro_steps += 1
        self._plan_reduction()

    def _clip(self) -> bool:
        """Collective. Unscale and clip the gradients by their global norm; whether they are finite."""
        scale, limit = self.loss_scaler.scale, self.config.gradient_clipping
        self._grad_norm = grad_norm(self.module) / scale
        if self.config.fp16.enabled or (self.config.bf16.enabled and self.config.bf16.check_grad_overflow):
            finite = bool(torch.isfinite(self._grad_norm))
            self.loss_scaler.update(overflow=not finite)
            if not finite:
                return False
        if limit > 0:
            scale_gradients(self.module, clip_factor(self._grad_norm, limit) / scale)
        elif scale != 1.0:
            scale_gradients(self.module, torch.tensor(1.0 / scale))
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Local. Forget all gradients, those not reduced yet included."""
        self._reducer.discard()
        for part in shards(self.module).values():
            part.grad = None if set_to_none or part.grad is None else torch.zeros_like(part)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Local. Whether the next :meth:`step` updates the parameters."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Local, the same on all ranks. Say whether the next :meth:`step` updates, until called again."""
        self._boundary = is_boundary
        self._plan_reduction()

    def _plan_reduction(self) -> None:
        """Stages 0 and 1 reduce at the boundary; 2 and 3 keep no full gradient, so they reduce every time."""
        self._reducer.sync = self._sharding.stage >= 2 or self.is_gradient_accumulation_boundary()
        self._reducer.scale = 1.0 / self.gradient_accumulation_steps()

    def _need_optimizer(self) -> Optimizer:
        if self.optimizer is None:
            raise RuntimeError("this engine has no optimizer; give one to zerofunc.initialize to train")
        return self.optimizer

    # -- what one asks an engine ----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._sharding.pages[0].master.device

    def get_global_grad_norm(self) -> float | None:
        """Local. L2 norm of the averaged, unscaled gradient of the last step before clipping, over all shards."""
        return None if self._grad_norm is None else float(self._grad_norm)

    def was_step_applied(self) -> bool:
        """Local. Whether the last step at a boundary changed the parameters."""
        return self._step_applied

    def train_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro-step."""
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per step."""
        return self.config.gradient_accumulation_steps

    def gradient_clipping(self) -> float:
        """Largest global norm; 0 means no clipping."""
        return self.config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return self._sharding.stage

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._need_optimizer().param_groups]

    def usage(self) -> Usage:
        """Local. Memory and traffic on this rank, optimizer state included."""
        usage = self._sharding.usage()
        state = self.optimizer.state.values() if self.optimizer is not None else []
        tensors = [value for entry in state for value in entry.values() if isinstance(value, torch.Tensor)]
        return replace(usage, held_bytes=usage.held_bytes + sum(tensor.nbytes for tensor in tensors))


def _loss_scaler(config: Config) -> LossScaler:
    fp16 = config.fp16
    if not fp16.enabled:
        return LossScaler()
    if fp16.loss_scale:
        return LossScaler(fp16.loss_scale)
    return LossScaler(
        2.0**fp16.initial_scale_power, True, fp16.loss_scale_window, fp16.hysteresis, fp16.consecutive_hysteresis,
        float(fp16.min_loss_scale),
    )  # fmt: skip
