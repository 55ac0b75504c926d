"""Derivatives that are mended where PyTorch has them, in its dispatcher, so that nothing has to be announced.

A backward operator is replaced where autograd is about to record it, which is where a further derivative of it may be
taken. Everywhere else PyTorch's own kernel runs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

OPERATOR = torch.ops.aten.native_layer_norm_backward.default


@functools.cache
def install() -> torch.library.Library:
    """Local. Replace them, for all modules of this process: PyTorch 2.13 gives wrong third derivatives of LayerNorm.

    Its formula for the second one takes the mean and the standard deviation for constants.
    """
    library = torch.library.Library("aten", "IMPL")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    for device in ["CPU"] if accelerator is None else ["CPU", accelerator.type.upper()]:
        key = f"Autograd{device}"
        kernel = functools.partial(layer_norm_backward, torch.library.get_kernel(OPERATOR, key))
        library.impl(OPERATOR, kernel, key, with_keyset=True, allow_override=True)
    return library


def layer_norm_backward(
    original: Any,
    keyset: Any,
    gradient: Tensor,
    input: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of LayerNorm with respect to input, weight and bias, of elementary operators where recorded.

    Args:
        original: The kernel that is replaced.
        keyset: What is left to dispatch to.
        gradient: Of the output, [*batch, *shape].
        input: As the forward was given it.
        shape: The dimensions that are normalised.
        mean: Of the forward, [*batch, 1 for each of those], and so is ``rstd``.
        rstd: 1 / sqrt(variance + eps); its value stays, its dependence on the input is restored.
        weight: [*shape], or None.
        bias: [*shape], or None.
        mask: Which of the three are wanted.
    """
    given = (gradient, input, weight)
    if not (torch.is_grad_enabled() and any([tensor is not None and tensor.requires_grad for tensor in given])):
        return original.call_boxed(keyset, gradient, input, shape, mean, rstd, weight, bias, mask)
    num_batch = input.dim() - len(shape)
    dims, batch = tuple(range(num_batch, input.dim())), tuple(range(num_batch))
    wide = input.to(rstd.dtype)
    centered = wide - wide.mean(dims, keepdim=True)
    variance = centered.square().mean(dims, keepdim=True)
    eps = rstd.detach().pow(-2) - variance.detach()
    scale = (variance + eps).rsqrt()
    normed, above = centered * scale, gradient.to(rstd.dtype)
    scaled = above if weight is None else above * weight.to(rstd.dtype)
    projected = normed * (scaled * normed).mean(dims, keepdim=True)
    of_input = scale * (scaled - scaled.mean(dims, keepdim=True) - projected)
    return (
        of_input.to(input.dtype) if mask[0] else None,
        _summed(above * normed, batch).to(weight.dtype) if mask[1] and weight is not None else None,
        _summed(above, batch).to(bias.dtype) if mask[2] and bias is not None else None,
    )


def _summed(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    return tensor.sum(dims) if dims else tensor
