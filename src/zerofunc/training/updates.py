"""What an engine does with gradients before its optimizer steps: the loss scale taken out, infinities seen, clipped."""

from __future__ import annotations

import logging
import weakref

import torch
from torch import nn
from torch.optim import Optimizer

from zerofunc.config import Config
from zerofunc.gradients.reduction import Reducer
from zerofunc.module.sharding import Sharding, sharding_of
from zerofunc.space.trees import clip_factor, grad_norm, overflowing, scale_gradients
from zerofunc.training.precision import LossScaler, needs_loss_scale

_logger = logging.getLogger(__name__)


def unscale_and_clip(
    module: nn.Module, optimizer: Optimizer, config: Config, scaler: LossScaler, step: int
) -> tuple[torch.Tensor, bool]:
    """Collective. Take the loss scale out of the gradients and clip their norm; tell the scaler of an overflow.

    Args:
        module: The sharded module.
        optimizer: What steps its shards. Gradients of other parameters are left alone.
        config: Says what is an overflow, and the largest norm.
        scaler: The loss scale of the gradients.
        step: Its number, for the log.

    Returns:
        The global norm before clipping, unscaled, and whether the step may be made: False if it is skipped.
    """
    scale, limit = scaler.scale, config.gradient_clipping
    trained = _trained(sharding_of(module), optimizer)
    norm = grad_norm(module, trained) / scale
    if needs_loss_scale(config) or (config.bf16.enabled and config.bf16.check_grad_overflow):
        is_finite = bool(torch.isfinite(norm))
        scaler.update(overflow=not is_finite)
        if not is_finite:
            _report_overflow(module, trained, scale, scaler, step)
            return norm, False
    if limit > 0:
        scale_gradients(module, clip_factor(norm, limit) / scale, trained)
    elif scale != 1.0:
        scale_gradients(module, torch.tensor(1.0 / scale), trained)
    return norm, True


def _trained(sharding: Sharding, optimizer: Optimizer) -> list[str]:
    """Names of the parameters that an optimizer steps; all, where it has tensors of its own in their place."""
    stepped = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    names = [name for name in sharding.places if id(sharding.shard(name)) in stepped]
    return names if len(names) == len(stepped) else list(sharding.places)


def _report_overflow(module: nn.Module, trained: list[str], before: float, scaler: LossScaler, step: int) -> None:
    """Collective. Log which parameter's gradient overflowed first, on the first rank."""
    names = overflowing(module, trained)
    if sharding_of(module).axes.rank == 0:
        _logger.warning(
            "step %d is skipped: the gradient of %s is infinite or NaN%s; loss scale %g -> %g%s",
            step,
            f"parameter {names[0]!r}" if names else "some parameter, in its square,",
            f" (and of {len(names) - 1} more)" if len(names) > 1 else "",
            before,
            scaler.scale,
            ", its minimum" if scaler.is_at_minimum else "",
        )


def forget_together(optimizer: Optimizer, reducer: Reducer) -> None:
    """Local. Let ``optimizer.zero_grad()`` forget what is not reduced yet as well, and so in no shard's ``grad``."""
    trainer, gradients = weakref.ref(optimizer), weakref.ref(reducer)

    def zero_grad(set_to_none: bool = True) -> None:
        alive, unreduced = trainer(), gradients()
        if unreduced is not None:
            unreduced.discard()
        if alive is not None:
            type(alive).zero_grad(alive, set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
