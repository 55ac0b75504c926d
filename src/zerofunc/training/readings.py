"""What one asks an engine: its sizes, rates, scales and ranks, under DeepSpeed's names."""

from __future__ import annotations

import os

import torch
from torch.optim import Optimizer

from zerofunc.config import Config
from zerofunc.module.sharding import Sharding
from zerofunc.training.accumulation import Accumulation
from zerofunc.training.precision import LossScaler


class Readings:
    """The part of :class:`zerofunc.Engine` that only reads. All local."""

    config: Config
    optimizer: Optimizer | None
    loss_scaler: LossScaler
    global_steps: int
    skipped_steps: int
    global_samples: int
    _sharding: Sharding
    _accumulation: Accumulation
    _grad_norm: torch.Tensor | None
    _step_applied: bool
    _overflowed: bool

    # -- sizes ----------------------------------------------------------------------------------------------------

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

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self._sharding.stage > 0

    def zero_optimization_stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return self._sharding.stage

    # -- progress -------------------------------------------------------------------------------------------------

    @property
    def micro_steps(self) -> int:
        """Calls of ``step`` so far."""
        return self._accumulation.micro_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step`` updates the parameters."""
        return self._accumulation.is_due

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the averaged, unscaled gradient of the last step before clipping, over all shards."""
        return None if self._grad_norm is None else float(self._grad_norm)

    def was_step_applied(self) -> bool:
        """Whether the last :meth:`step` changed the parameters: at a boundary, and the gradient was finite."""
        return self._step_applied

    def overflowed(self) -> bool:
        """Whether the last update, at a boundary, was skipped for an infinity or a NaN."""
        return self._overflowed

    def get_lr(self) -> list[float | None]:
        """Learning rate of each parameter group; None where the optimizer chooses it by itself."""
        rates = [group.get("lr") for group in self._need_optimizer().param_groups]
        return [None if rate is None else float(rate) for rate in rates]

    def get_mom(self) -> list[float | tuple[float, float]]:
        """Momentum, or betas, of each parameter group; 0 where there is none."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._need_optimizer().param_groups]

    def get_type(self) -> list[str | None]:
        """The ``type`` that the user gave each parameter group."""
        return [group.get("type") for group in self._need_optimizer().param_groups]

    def _need_optimizer(self) -> Optimizer:
        if self.optimizer is None:
            raise RuntimeError("this engine has no optimizer; give one to zerofunc.initialize to train")
        return self.optimizer

    # -- precision ------------------------------------------------------------------------------------------------

    def fp16_enabled(self) -> bool:
        """Whether the module computes in float16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether the module computes in bfloat16."""
        return self.config.bf16.enabled

    def torch_autocast_enabled(self) -> bool:
        """Whether forwards run under autocast."""
        return self.config.torch_autocast.enabled

    def loss_scale(self) -> float:
        """Factor on the loss during backward; 1 without float16."""
        return self.loss_scaler.scale

    def dynamic_loss_scale(self) -> bool:
        """Whether that factor changes."""
        return self.loss_scaler.dynamic

    # -- places ---------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the module computes."""
        return self._sharding.pages[0].device

    @property
    def local_rank(self) -> int:
        """This process's place on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def global_rank(self) -> int:
        """This process's place among the data-parallel ranks."""
        return self._sharding.axes.rank

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self._sharding.axes.num_ranks

    dp_world_size = world_size
