"""Activations, attention and sampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decomposition_table

from zerofunc.kernels.normalizations import exponentials_of, wide


def hardsigmoid(input: Tensor) -> Tensor:
    """``F.hardsigmoid``: no second derivative."""
    return F.relu6(input + 3) / 6


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """``F.glu``: no derivative of its jvp."""
    values, gates = input.chunk(2, dim)
    return values * gates.sigmoid()


def rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    """``torch.rrelu``: no vmap where it does not train."""
    return NotImplemented if training else F.leaky_relu(input, (lower + upper) / 2)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention``: fused kernels have no forward mode and no second derivative.

    Memory is quadratic in the sequence; :func:`zerofunc.attention` is not.
    """
    if is_causal and attn_mask is not None:
        return NotImplemented  # and PyTorch says what is wrong
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = wide((query * scale) @ key.mT)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = torch.where(attn_mask, scores, -math.inf)
        else:
            scores = scores + attn_mask
    exponentials, _ = exponentials_of(scores, -1)
    total = exponentials.sum(-1, keepdim=True)
    weights = exponentials / torch.where(total == 0, 1, total)  # a query that may see nothing gets zeros
    return F.dropout(weights.to(value.dtype), dropout_p) @ value


def grid_sampler(
    input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    """``torch.grid_sampler``: no forward mode. PyTorch's own decomposition, of images."""
    if input.ndim != 4:
        return NotImplemented
    decomposition: Callable[..., Tensor] = decomposition_table[torch.ops.aten.grid_sampler_2d.default]
    return decomposition(input, grid, interpolation_mode, padding_mode, align_corners)
