"""A function of one sample that has a better way with a batch of them than operator by operator."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function


class Batched(Function):
    """``Batched.apply(one, many, *tensors)``: ``one(*tensors)``, or under vmap ``many`` of all samples' tensors.

    ``many`` takes and gives tensors with the samples in front, [B, …]. Derivatives are those of ``one``.
    """

    @staticmethod
    def forward(one: Any, many: Any, *tensors: torch.Tensor) -> Any:  # noqa: D102
        return one(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: D102
        ctx.one, _, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # noqa: D102
        outputs, pullback = torch.func.vjp(ctx.one, *ctx.saved_tensors)[:2]
        return None, None, *pullback(gradients if isinstance(outputs, tuple) else gradients[0])

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: torch.Tensor) -> Any:  # noqa: D102
        return torch.func.jvp(ctx.one, ctx.saved_tensors, tangents)[1]

    @staticmethod
    def vmap(info: Any, in_dims: Any, one: Any, many: Any, *tensors: torch.Tensor) -> Any:  # noqa: D102
        samples = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[2:], strict=True)
        ]
        outputs = many(*samples)
        return outputs, (0,) * len(outputs) if isinstance(outputs, tuple) else 0
