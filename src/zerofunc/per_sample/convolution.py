"""Squared norms of the gradients of convolutions' weights for each sample, a few samples at a time.

A convolution is a linear layer of patches of its input, so that its weight's gradient has a ghost norm too. That is
the cheaper one for few positions and many channels, as in a network's last layers; where there are many positions, the
gradient is, as in its first (Bu et al. 2022, https://arxiv.org/abs/2205.10683).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from zerofunc.per_sample.batched import Batched
from zerofunc.per_sample.products import is_short, of_gram, square
from zerofunc.per_sample.taps import IsOnly, Uses


@dataclass(frozen=True)
class Geometry:
    """Where a convolution's kernel goes; all but the last by spatial dimension."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As torch.convolution takes them after the tensors; not transposed."""
        return self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups


class Convolution(Function):
    """``Convolution.apply(x, weight, bias, geometry, accumulator, is_only)``: torch.convolution, likewise.

    ``x`` is [N, C, *S] of one sample, ``weight`` [O, C / groups, *K].
    """

    @staticmethod
    def forward(  # noqa: D102
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        geometry: Geometry,
        accumulator: torch.Tensor,
        is_only: IsOnly,
    ) -> torch.Tensor:
        return torch.convolution(x, weight, bias, *geometry.arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: D102
        x, weight, _, ctx.geometry, accumulator, ctx.is_only = inputs
        ctx.dtype = accumulator.dtype
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: D102
        x, weight = ctx.saved_tensors
        is_only = ctx.is_only()
        needed = [ctx.needs_input_grad[0], not is_only, ctx.needs_input_grad[2]]
        arguments = gradient, x, weight, [len(weight)], *ctx.geometry.arguments
        found = torch.ops.aten.convolution_backward(*arguments, needed)
        norm = _of_convolution(x.to(ctx.dtype), gradient.to(ctx.dtype), weight.shape, ctx.geometry) if is_only else None
        return *found, None, norm, None

    @staticmethod
    def jvp(ctx: Any, x: Any, weight: Any, bias: Any, *_: Any) -> Any:  # noqa: D102
        saved_x, saved_weight = ctx.saved_tensors
        arguments = ctx.geometry.arguments
        by_x = torch.convolution(x, saved_weight, bias, *arguments)
        return by_x + torch.convolution(saved_x, weight, None, *arguments)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:  # noqa: D102
        return torch.func.vmap(Convolution.forward, in_dims)(*inputs), 0


def convolution(
    uses: Uses,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor | None:
    """The rule of F.conv1d, F.conv2d and F.conv3d."""
    if not uses.is_tapped(weight) or torch.is_autocast_enabled(weight.device.type):
        return None
    kernel = weight.shape[2:]
    strides, dilations = _of_each_dim(stride, kernel), _of_each_dim(dilation, kernel)
    if padding == "same":
        twice = [spread * (size - 1) for size, spread in zip(kernel, dilations, strict=True)]
        if any(size % 2 for size in twice):  # one side is padded more than the other
            return None
        padding = [size // 2 for size in twice]
    geometry = Geometry(strides, _of_each_dim(0 if padding == "valid" else padding, kernel), dilations, groups)
    is_batch = input.dim() == weight.dim()
    x = input if is_batch else input[None]
    result: torch.Tensor = Convolution.apply(x, weight, bias, geometry, uses.accumulator, uses.only(weight))
    return result if is_batch else result[0]


def _of_each_dim(value: Any, kernel: torch.Size) -> list[int]:
    """An argument of a convolution for each spatial dimension, from one number or as many."""
    values = [value] if isinstance(value, int) else list(value)
    return values * len(kernel) if len(values) == 1 else values


def _of_convolution(x: torch.Tensor, gradient: torch.Tensor, shape: torch.Size, geometry: Geometry) -> torch.Tensor:
    """Squared norm of the gradient of a weight of ``shape`` for x [N, C, *S] and gradient [N, O, *L], the cheaper way.

    Under vmap of as many samples at once as have patches or weight gradients no larger than these two.
    """
    num, width, height = gradient[:, 0].numel(), math.prod(shape[1:]), shape[0] // geometry.groups
    by_gram = is_short(num, width, height)

    def one(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if by_gram:
            rows = (_rows(tensor, num, geometry) for tensor in (_patches(x, shape[2:], geometry), gradient))
            return of_gram(*rows)
        weight = gradient.new_empty(1).expand(shape)  # of which only the shape is read
        arguments = gradient, x, weight, None, *geometry.arguments
        return square(torch.ops.aten.convolution_backward(*arguments, [False, True, False])[1])

    def many(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        size = geometry.groups * width * (num if by_gram else height)
        return torch.func.vmap(one, chunk_size=max(1, (x.numel() + gradient.numel()) // size))(x, gradient)

    return Batched.apply(one, many, x, gradient)


def _patches(x: torch.Tensor, kernel: torch.Size, geometry: Geometry) -> torch.Tensor:
    """What the kernel meets at each of its positions, [N, C, *L, *kernel]; a view of padded x [N, C, *S]."""
    x = F.pad(x, [size for size in reversed(geometry.padding) for _ in range(2)])
    for dim, (size, stride, dilation) in enumerate(zip(kernel, geometry.stride, geometry.dilation, strict=True), 2):
        x = x.unfold(dim, dilation * (size - 1) + 1, stride)[..., ::dilation]
    return x


def _rows(patches: torch.Tensor, num: int, geometry: Geometry) -> torch.Tensor:
    """Patches [N, C, *L, *kernel] by group and position, [groups, num, C / groups * kernel]."""
    by_group = patches.unflatten(1, (geometry.groups, -1))
    return by_group.movedim((1, 2), (0, 2 + len(geometry.stride))).reshape(geometry.groups, num, -1)
