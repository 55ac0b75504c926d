"""Normalisations over features and over probabilities, in float32 at least."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Dims = Sequence[int]


def wide(x: Tensor) -> Tensor:
    """Half precision as float32, in which PyTorch's kernels compute these operators."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The result in ``dtype``, except under CUDA's autocast, which leaves normalisations in float32."""
    keeps_float32 = x.device.type != "cpu" and torch.is_autocast_enabled(x.device.type)
    return x if keeps_float32 else x.to(dtype)


def _standardized(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` with mean 0 and variance 1 over ``dims``, the mean, and one over the standard deviation."""
    mean = x.mean(dims, keepdim=True)
    rstd = ((x - mean).square().mean(dims, keepdim=True) + eps).rsqrt()
    return (x - mean) * rstd, mean, rstd


def _last(normalized_shape: Dims) -> list[int]:
    return list(range(-len(normalized_shape), 0))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def native_layer_norm(
    input: Tensor, normalized_shape: Dims, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.native_layer_norm``: wrong for a backward through a jvp."""
    if tuple(input.shape[input.ndim - len(normalized_shape) :]) != tuple(normalized_shape):
        return NotImplemented  # and PyTorch says what is wrong
    x, mean, rstd = _standardized(wide(input), _last(normalized_shape), eps)
    return narrow(_affine(x, weight, bias), input.dtype), mean, rstd


def layer_norm(
    input: Tensor,
    normalized_shape: Dims,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """``torch.layer_norm``."""
    outputs = native_layer_norm(input, normalized_shape, weight, bias, eps)
    return outputs if outputs is NotImplemented else outputs[0]


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """``torch.group_norm``: no forward mode and no vmap of inputs that are not contiguous (channels_last)."""
    return torch.group_norm(input.contiguous(), num_groups, weight, bias, eps, cudnn_enabled)


def rms_norm(input: Tensor, normalized_shape: Dims, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """``torch.rms_norm``: one kernel on accelerators."""
    x = wide(input)
    mean_square = x.square().mean(_last(normalized_shape), keepdim=True)
    scale = (mean_square + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    return narrow(_affine(x * scale, weight, None), input.dtype)


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """``torch.batch_norm``: wrong for a backward through a jvp when it trains."""
    if not training:
        return NotImplemented
    dims = [0, *range(2, input.ndim)]
    x, mean, rstd = _standardized(wide(input), dims, eps)
    if running_mean is not None and running_var is not None:
        count = input.numel() // input.shape[1]
        var = (rstd.detach() ** -2 - eps) * (count / max(count - 1, 1))
        running_mean.lerp_(mean.detach().flatten().to(running_mean.dtype), momentum)
        running_var.lerp_(var.flatten().to(running_var.dtype), momentum)
    shape = [-1] + [1] * (input.ndim - 2)
    affine = [None if p is None else p.view(shape) for p in (weight, bias)]
    return narrow(_affine(x, *affine), input.dtype)


def instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """``torch.instance_norm``: wrong for a backward through a jvp."""
    if not use_input_stats or running_mean is not None:
        return NotImplemented
    x, _, _ = _standardized(wide(input), list(range(2, input.ndim)), eps)
    shape = [-1] + [1] * (input.ndim - 2)
    affine = [None if p is None else p.view(shape) for p in (weight, bias)]
    return narrow(_affine(x, *affine), input.dtype)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """``torch._weight_norm``: wrong second derivatives, no forward mode.

    The norm is written out: ``vector_norm`` has no third derivative in reverse over forward over reverse.
    """
    dims = [d for d in range(v.ndim) if d != dim % v.ndim] if dim != -1 else list(range(v.ndim))
    squares = v.to(torch.promote_types(v.dtype, torch.float32)).square()
    totals = squares.sum(dims, keepdim=dim != -1) if dims else squares  # over no dimension, sum() would take all
    return v * (g / totals.sqrt().to(v.dtype))


def exponentials_of(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """``exp(x - m)`` and ``m``: the largest along ``dim``, or 0 where that is infinite."""
    largest = x.detach().amax(dim, keepdim=True)
    largest = largest.masked_fill(largest.isinf(), 0)
    return (x - largest).exp(), largest


def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.softmax``: no backward through ``forward_ad``."""
    exponentials, _ = exponentials_of(wide(input if dtype is None else input.to(dtype)), dim)
    return narrow(exponentials / exponentials.sum(dim, keepdim=True), dtype or input.dtype)


def log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.log_softmax``: no backward through ``forward_ad``."""
    x = wide(input if dtype is None else input.to(dtype))
    return narrow(x - logsumexp(x, dim, keepdim=True), dtype or input.dtype)


def logsumexp(input: Tensor, dim: int | Dims, keepdim: bool = False) -> Tensor:
    """``torch.logsumexp``: no backward through ``forward_ad``."""
    if not isinstance(dim, int) or not input.is_floating_point():
        return NotImplemented
    exponentials, largest = exponentials_of(wide(input), dim)
    result = exponentials.sum(dim, keepdim=True).log() + largest
    return narrow(result if keepdim else result.squeeze(dim), input.dtype)
