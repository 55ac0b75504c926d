"""Gradients of a group norm's weight and bias for each sample, by one fused kernel.

Samples do not meet in a group norm, and neither do the channels of different groups. So a batch of samples, with a
weight each, is one sample that has as many more groups, and the fused kernel gives its gradients channel by channel.
PyTorch's own rule for vmap passes through memory six times more.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from zerofunc.per_sample.batched import Batched
from zerofunc.per_sample.taps import Uses


class GroupNorm(Function):
    """``GroupNorm.apply(num_groups, eps, x, weight, bias)``: F.group_norm.

    ``x`` is [N, C, *] of one sample, ``weight`` and ``bias`` are [C].
    """

    @staticmethod
    def forward(  # noqa: D102
        num_groups: int, eps: float, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        return F.group_norm(x, num_groups, weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: D102
        ctx.sizes, tensors = inputs[:2], inputs[2:]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: D102
        one = functools.partial(_gradients_of_one, *ctx.sizes)
        many = functools.partial(_gradients_of_many, *ctx.sizes)
        return None, None, *Batched.apply(one, many, gradient, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: torch.Tensor) -> Any:  # noqa: D102
        return torch.func.jvp(functools.partial(GroupNorm.forward, *ctx.sizes), ctx.saved_tensors, tangents)[1]

    @staticmethod
    def vmap(info: Any, in_dims: Any, num_groups: int, eps: float, x: torch.Tensor, *affine: torch.Tensor) -> Any:  # noqa: D102
        if in_dims[2] is None or in_dims[3:] != (None, None):
            return torch.func.vmap(GroupNorm.forward, in_dims)(num_groups, eps, x, *affine), 0
        samples = x.movedim(in_dims[2], 0)
        return GroupNorm.forward(num_groups, eps, samples.flatten(0, 1), *affine).view_as(samples), 0


def _gradients_of_one(num_groups: int, eps: float, gradient: torch.Tensor, *inputs: torch.Tensor) -> Any:
    """Gradients of ``inputs``: x, weight and bias."""
    return torch.func.vjp(functools.partial(GroupNorm.forward, num_groups, eps), *inputs)[1](gradient)


def _gradients_of_many(
    num_groups: int, eps: float, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The same of samples x [B, N, C, *] and as many weights [B, C]: a sample [N, B * C, *] of B times the groups."""
    batch, num, channels = x.shape[:3]
    x, gradient = (tensor.transpose(0, 1).flatten(1, 2).contiguous() for tensor in (x, gradient))
    weight = weight.flatten()
    sizes = num, batch * channels, x[0, 0].numel(), batch * num_groups
    mean, rstd = torch.native_group_norm(x, None, None, *sizes, eps)[1:]
    by_x, *by_affine = torch.ops.aten.native_group_norm_backward(gradient, x, mean, rstd, weight, *sizes, [True] * 3)
    return by_x.unflatten(1, (batch, -1)).transpose(0, 1), *(g.view(batch, -1) for g in by_affine)


def group_norm(
    uses: Uses, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any, **__: Any
) -> torch.Tensor | None:
    """The rule of F.group_norm and torch.group_norm; None where weight and bias are not both tapped."""
    if not (uses.is_tapped(weight) and uses.is_tapped(bias)) or torch.is_autocast_enabled(weight.device.type):
        return None
    return GroupNorm.apply(num_groups, eps, input.contiguous(), weight, bias)
