"""Squared norms of per-sample gradients from activations and output gradients, without forming the gradients.

One sample's gradient of a linear layer's weight is G^T X, a sum over its T positions, with inputs X [T, in] and
output gradients G [T, out]. Its squared norm is the sum of (X X^T) * (G G^T) over pairs of positions, its "ghost" norm
(Goodfellow 2015, https://arxiv.org/abs/1510.01799; Li et al. 2021, https://arxiv.org/abs/2110.05679). Where T is large,
G^T X itself is cheaper. An embedding is a linear layer of one-hot inputs: X X^T tells which positions share an index.

Each rule is exact for a weight's only use. If there are others, its backward returns the ordinary gradient, which
goes to the tap.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from zerofunc.per_sample.convolution import convolution
from zerofunc.per_sample.group_norm import group_norm
from zerofunc.per_sample.products import of_product
from zerofunc.per_sample.taps import IsOnly, Measure, Rules, Uses


class Linear(Function):
    """``Linear.apply(x, weight, bias, accumulator, is_only)``: F.linear; its weight's squared norm, if the only use.

    ``x`` is [*, in], ``weight`` [out, in], both of one sample; ``is_only()`` tells in the backward.
    """

    @staticmethod
    def forward(  # noqa: D102
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        accumulator: torch.Tensor,
        is_only: IsOnly,
    ) -> torch.Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: D102
        x, weight, _, accumulator, ctx.is_only = inputs
        ctx.dtype = accumulator.dtype
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: D102
        x, weight = ctx.saved_tensors
        rows, gradients = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        by_x = gradient @ weight if ctx.needs_input_grad[0] else None
        by_bias = gradients.sum(0) if ctx.needs_input_grad[2] else None
        if not ctx.is_only():
            return by_x, gradients.mT @ rows, by_bias, None, None
        return by_x, None, by_bias, of_product(rows.to(ctx.dtype), gradients.to(ctx.dtype)), None

    @staticmethod
    def jvp(ctx: Any, x: Any, weight: Any, bias: Any, *_: Any) -> Any:  # noqa: D102
        saved_x, saved_weight = ctx.saved_tensors
        tangent = F.linear(x, saved_weight) + F.linear(saved_x, weight)
        return tangent if bias is None else tangent + bias

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, *_: Any) -> Any:  # noqa: D102
        if in_dims[0] is not None and in_dims[1:3] == (None, None):  # one product for all samples
            return F.linear(x.movedim(in_dims[0], 0), weight, bias), 0
        return torch.func.vmap(F.linear, in_dims[:3])(x, weight, bias), 0


class Embedding(Function):
    """``Embedding.apply(indices, weight, padding_idx, accumulator, is_only)``: F.embedding, likewise.

    ``indices`` is [*] of one sample, ``weight`` [entries, width].
    """

    @staticmethod
    def forward(  # noqa: D102
        indices: torch.Tensor, weight: torch.Tensor, padding_idx: int, accumulator: torch.Tensor, is_only: IsOnly
    ) -> torch.Tensor:
        return F.embedding(indices, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: D102
        indices, weight, ctx.padding_idx, accumulator, ctx.is_only = inputs
        ctx.num_entries, ctx.dtype = len(weight), accumulator.dtype
        ctx.save_for_backward(indices)
        ctx.save_for_forward(indices)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: D102
        indices = ctx.saved_tensors[0].reshape(-1)
        gradients = gradient.reshape(-1, gradient.shape[-1])
        gradients = gradients * (indices != ctx.padding_idx)[:, None]
        if ctx.is_only():
            same = indices[:, None] == indices
            gradients = gradients.to(ctx.dtype)
            return None, None, None, (same * (gradients @ gradients.mT)).sum(), None
        zeros = gradients.new_zeros(ctx.num_entries, gradients.shape[-1])
        return None, zeros.index_add(0, indices, gradients), None, None, None

    @staticmethod
    def jvp(ctx: Any, _: None, weight: torch.Tensor, *__: Any) -> Any:  # noqa: D102
        return F.embedding(ctx.saved_tensors[0], weight)

    @staticmethod
    def vmap(info: Any, in_dims: Any, indices: torch.Tensor, weight: torch.Tensor, *_: Any) -> Any:  # noqa: D102
        return torch.func.vmap(F.embedding, in_dims[:2])(indices, weight), 0


# -- squared norms ----------------------------------------------------------------------------------------------------


def _linear(uses: Uses, input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
    if not uses.is_tapped(weight) or weight.dim() != 2 or torch.is_autocast_enabled(weight.device.type):
        return None
    return Linear.apply(input, weight, bias, uses.accumulator, uses.only(weight))


def _addmm(uses: Uses, input: Any, mat1: Any, mat2: Any, **scales: Any) -> torch.Tensor | None:
    """A linear layer with the weight transposed, as ``transformers`` has it."""
    if scales or not uses.is_tapped(mat2) or input.dim() != 1 or torch.is_autocast_enabled(mat2.device.type):
        return None
    return Linear.apply(mat1, mat2.mT, input, uses.accumulator, uses.only(mat2))


def _embedding(
    uses: Uses,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor | None:
    if not uses.is_tapped(weight) or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    padding = -1 if padding_idx is None else padding_idx % len(weight)
    return Embedding.apply(input, weight, padding, uses.accumulator, uses.only(weight))


RULES: Rules = {
    F.linear: _linear,
    torch.addmm: _addmm,
    F.embedding: _embedding,
    F.conv1d: convolution,
    F.conv2d: convolution,
    F.conv3d: convolution,
    F.group_norm: group_norm,
    torch.group_norm: group_norm,
}


def squared_norm(like: torch.Tensor) -> Measure:
    """The measure that gives each sample's squared gradient norm, in the data type and on the device of ``like``."""

    def of(name: str, gradient: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(gradient, dtype=like.dtype).square()

    return Measure(like.new_zeros(()), of, RULES)
