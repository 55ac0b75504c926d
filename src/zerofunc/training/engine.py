"""The engine that DeepSpeed users know: ``engine(x)``, ``engine.backward(loss)``, ``engine.step()``.

It adds to a sharded module what a training loop needs: accumulation, clipping, loss scaling, optimizer and schedule.
Nothing of it happens in a forward or in a hook on an output, so that transforms of the engine are those of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler

from zerofunc.config import Config
from zerofunc.data.batch_losses import LossFunction, loss_of, on_device
from zerofunc.data.loaders import RankLoader, RepeatingLoader, rank_loader
from zerofunc.gradients.policy import Conductor
from zerofunc.kernels.selection import explain_second_order
from zerofunc.module.full_values import full_state
from zerofunc.module.sharding import Usage, sharding_of, shards
from zerofunc.space.trees import mean
from zerofunc.training.accumulation import Accumulation
from zerofunc.training.checkpointing import Resumable
from zerofunc.training.conductor import EngineConductor
from zerofunc.training.precision import autocast, cast_floating, input_dtype, loss_scaler
from zerofunc.training.progress import Progress, Step, log_state
from zerofunc.training.readings import Readings
from zerofunc.training.updates import forget_together, unscale_and_clip


def _check_loss(loss: torch.Tensor, method: str) -> None:
    """Raise ValueError unless a backward can start from it."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"{method}() takes a loss of one element, found {found}; use its mean or sum")
    if not loss.requires_grad:
        raise ValueError(f"{method}() was given a loss that does not require a gradient (detached, or no_grad)")


class Engine(Readings, Resumable, nn.Module):
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
        global_samples: Samples seen by all ranks.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        optimizer: Optimizer | None,
        lr_scheduler: LRScheduler | None,
        training_dataloader: RankLoader | None,
    ) -> None:
        super().__init__()
        self.module = module
        self.config = config
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = training_dataloader
        self.global_steps = self.skipped_steps = self.global_samples = 0
        self.loss_scaler = loss_scaler(config)
        self._sharding = sharding_of(module)
        self._reducer = self._sharding.reducer
        stage, num_steps = self._sharding.stage, config.gradient_accumulation_steps
        self._accumulation = Accumulation(stage, num_steps, config.managed_gradient_accumulation)
        self._grad_norm: torch.Tensor | None = None
        self._step_applied = self._overflowed = False
        self._batches: Iterator[Any] | None = None
        if optimizer is not None:
            forget_together(optimizer, self._reducer)
        self._progress = Progress(config, self.global_rank, self.device)
        self._phase = self._progress.timers.phase
        self._conductor = EngineConductor(config, stage, self._accumulation, self._phase)
        self._reducer.conductor = self._conductor
        if config.dump_state and self.global_rank == 0:
            log_state(config, self._sharding.pages)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own result: a function of this rank's data. Autocast and casts of inputs as configured."""
        dtype = input_dtype(self.config)
        if dtype is not None:
            args, kwargs = cast_floating((args, kwargs), dtype)
        with self._phase("forward"), autocast(self.config, self.device):
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
        _check_loss(loss, "backward")
        self._need_optimizer()
        share = 1.0 / self.gradient_accumulation_steps() if scale_wrt_gas else 1.0
        scale = self.loss_scaler.scale
        try:
            with self._phase("backward"), self._conductor.counting(share), self._reducer.backward():
                (loss * scale if scale != 1.0 else loss).backward(retain_graph=retain_graph)
        except BaseException as error:
            self._reducer.forget_failed()
            explain_second_order(error)
            raise
        shown = loss.detach() * share
        self._progress.add_loss(shown)
        self._accumulation.backwards += 1
        return shown

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Local. The loss times the float16 loss scale, for backwards by hand: ``engine.scale(loss).backward()``.

        Args:
            loss: One element, this rank's loss.

        Raises:
            ValueError: If the loss is not one element that depends on something differentiable.
        """
        _check_loss(loss, "scale")
        self._need_optimizer()
        scaled = loss * self.loss_scaler.scale
        self._conductor.let_pass(scaled)
        return scaled

    # -- step ---------------------------------------------------------------------------------------------------

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Collective at the accumulation boundary. Count a micro-step; at the boundary clip and update.

        A step whose gradient has an infinity or a NaN is skipped on all ranks under float16 and bfloat16, and under
        autocast to float16. The first such parameter is named in the log.

        Raises:
            RuntimeError: Inside :meth:`no_sync` or :meth:`coalesce_grad_reduction`.
        """
        if self._accumulation.context:
            context = self._accumulation.context
            raise RuntimeError(f"It is illegal to call Engine.step() inside {context} context manager")
        optimizer = self._need_optimizer()
        self._step_applied = self._conductor.is_scaled = False
        is_due = self._accumulation.is_due_in_step
        if is_due:
            with self._phase("step"):
                self._update(optimizer, lr_kwargs or {})
            samples = self._samples_of_step()
            self.global_steps += 1
            self.global_samples += samples
            self._progress.finish_step(self._report_of(samples), self.usage)
        self._accumulation.count(is_due)
        if is_due:
            self._exit_if_asked()

    def _update(self, optimizer: Optimizer, lr_kwargs: dict[str, Any]) -> None:
        """Collective. Reduce what is owed, clip, and let optimizer and schedule step unless the gradient overflows."""
        self._reducer.reduce_owed()
        self._grad_norm, is_finite = unscale_and_clip(
            self.module, optimizer, self.config, self.loss_scaler, self.global_steps
        )
        self._overflowed = not is_finite
        if self._overflowed:
            self.skipped_steps += 1
        else:
            optimizer.step()
            self._step_applied = True
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
        optimizer.zero_grad()

    def _report_of(self, samples: int) -> Step:
        return Step(
            self.global_steps, self.skipped_steps, self.global_samples, samples, self.get_lr(), self.get_mom(),
            self._grad_norm, self.loss_scaler.scale if self.loss_scaler.scale != 1.0 else None,
        )  # fmt: skip

    def _samples_of_step(self) -> int:
        if self.config.managed_gradient_accumulation:
            return self.train_batch_size()
        return self._accumulation.backwards * self.train_micro_batch_size_per_gpu() * self.world_size

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Local. Forget all gradients, those not reduced yet included."""
        self._conductor.is_scaled = False  # if a scaled backward failed
        self._reducer.discard()
        for part in shards(self.module, frozen=True).values():
            part.grad = None if set_to_none or part.grad is None else torch.zeros_like(part)

    # -- accumulation ---------------------------------------------------------------------------------------------

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Local, the same on all ranks. Say whether the next :meth:`step` updates, until called again."""
        self._accumulation.set_boundary(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Local. Gradients of backwards inside stay on this rank, in full, and are reduced by the next one outside.

        Raises:
            RuntimeError: At stages 2 and 3, which keep no full gradient.
        """
        if self._sharding.stage >= 2:
            raise RuntimeError(
                "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage "
                f"{self._sharding.stage}; use coalesce_grad_reduction(), which reduces once at its end"
            )
        with self._accumulation.held_back("no_sync"):
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Collective at its end. One reduction for all backwards inside, whose full gradients stay here meanwhile."""
        self._accumulation.need_managed("coalesce_grad_reduction")
        with self._accumulation.held_back("coalesce_grad_reduction"):
            yield
        self._reducer.reduce_owed()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Local, the same on all ranks. Change the samples per step by changing the number of micro-steps.

        Raises:
            ValueError: If it is not a multiple of the micro-batch over all ranks.
        """
        micro = self.train_micro_batch_size_per_gpu() * self.world_size
        if train_batch_size < 1 or train_batch_size % micro:
            raise ValueError(
                f"train_batch_size is {train_batch_size}; expected a multiple of micro-batch x ranks = {micro}"
            )
        self._resize(train_batch_size, self.train_micro_batch_size_per_gpu(), train_batch_size // micro)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Local, the same on all ranks. Change the samples per rank and micro-step; the number of these stays."""
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size}; expected an integer > 0")
        steps = self.gradient_accumulation_steps()
        self._resize(micro_batch_size * steps * self.world_size, micro_batch_size, steps)

    def _resize(self, total: int, micro: int, steps: int) -> None:
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        self.config = self.config.model_copy(update=dict(zip(names, (total, micro, steps), strict=True)))
        self._accumulation.num_steps = steps

    # -- whole batches --------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """Collective. One optimizer step over the next micro-batches; their mean loss over all ranks, a scalar.

        Args:
            data_iter: Where the micro-batches come from; by default the training loader, over and over.
            loss_fn: ``(engine, batch) -> loss``; see :func:`zerofunc.data.batch_losses.loss_of` for the default.

        Raises:
            StopIteration: If ``data_iter`` ends.
        """
        losses = []
        num_steps = self.gradient_accumulation_steps()
        for place in range(num_steps):
            loss = loss_of(self, self._next_batch(data_iter), loss_fn)
            self.backward(loss)
            losses.append(loss.detach())
            if place + 1 == num_steps or self.config.managed_gradient_accumulation:
                self.step()
        return mean(torch.stack(losses).mean(), self.module)

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any] | None = None, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """Collective. The mean loss of the next micro-batches over all ranks, in evaluation mode; as train_batch."""
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            batches = [self._next_batch(data_iter) for _ in range(self.gradient_accumulation_steps())]
            losses = [loss_of(self, batch, loss_fn) for batch in batches]
        finally:
            for module, is_training in modes.items():
                module.training = is_training
        return mean(torch.stack(losses).mean(), self.module)

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> RankLoader:
        """Local. A loader of this rank's part of a dataset; see :func:`zerofunc.data.loaders.rank_loader`.

        Args:
            dataset: Any dataset.
            batch_size: The micro-batch of the config by default.
            route: "train" shuffles; "eval" and "predict" do not, and drop no batch.
            pin_memory: Where there is an accelerator.
            data_sampler: Indices for this rank.
            collate_fn: From a list of samples to a batch.
            num_local_io_workers: Processes that load.
        """
        is_training = route == "train"
        return rank_loader(
            dataset, batch_size or self.train_micro_batch_size_per_gpu(), self.world_size, self.global_rank,
            sampler=data_sampler, shuffle=is_training, collate_fn=collate_fn, num_workers=num_local_io_workers or 0,
            drop_last=is_training and self.config.dataloader_drop_last,
            pin_memory=pin_memory and torch.accelerator.is_available(),
        )  # fmt: skip

    def _next_batch(self, data_iter: Iterator[Any] | None) -> Any:
        if data_iter is None:
            if self.training_dataloader is None:
                raise ValueError("there is no data_iter, and initialize() was given no training_data")
            self._batches = data_iter = self._batches or iter(RepeatingLoader(self.training_dataloader))
        return on_device(next(data_iter), self.device)

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, rank: int | None = None, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Collective at stage 3. Copies of the module's state in full, on the CPU; names begin with ``module.``.

        :meth:`load_state_dict` takes them. :meth:`module_state_dict` has the names that a plain module takes.

        Args:
            *args: With these, or keywords of ``nn.Module.state_dict``, entries are those of ``module.state_dict()``:
                live, and gathered when they are read.
            rank: The one rank that gets it, the others an empty dict; by default all do.
            **kwargs: See ``args``.

        Raises:
            ValueError: If there is no such rank.
        """
        if args or kwargs:
            return super().state_dict(*args, **kwargs)
        return {f"module.{name}": value for name, value in full_state(self.module, rank).items()}

    def module_state_dict(
        self, exclude_frozen_parameters: bool = False, *, rank: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Collective at stage 3. Likewise, with the module's own names, and without frozen parameters if asked."""
        return full_state(self.module, rank, with_frozen=not exclude_frozen_parameters)

    # -- what one asks an engine; more in readings.py ---------------------------------------------------------------

    def empty_partition_cache(self) -> None:
        """Local, the same on all ranks. Give up the gathered pages of stage 3; reading gathers them again."""
        self._sharding.pager.release()

    def destroy(self) -> None:
        """Local. Finish the monitors and a save in the background. The module may be used without the engine."""
        if self._saver is not None:
            self._saver.close()
        self._progress.close()
        if self._reducer.conductor is self._conductor:
            self._reducer.conductor = Conductor()

    def usage(self) -> Usage:
        """Local. Memory and traffic on this rank, optimizer state included."""
        usage = self._sharding.usage()
        state = self.optimizer.state.values() if self.optimizer is not None else []
        tensors = [value for entry in state for value in entry.values() if isinstance(value, torch.Tensor)]
        return replace(usage, held_bytes=usage.held_bytes + sum(tensor.nbytes for tensor in tensors))
