"""Bags of embeddings, and reductions by index as in message passing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``torch.embedding_bag``: no forward mode. Of its four results the first alone is meant to be used."""
    if scale_grad_by_freq:
        return NotImplemented
    starts = offsets[:-1] if include_last_offset else offsets
    bags = torch.bucketize(torch.arange(len(indices), device=indices.device), starts.long(), right=True) - 1
    if padding_idx is not None and padding_idx >= 0:
        kept = (indices != padding_idx).nonzero().flatten()
        indices, bags = indices[kept], bags[kept]
        per_sample_weights = None if per_sample_weights is None else per_sample_weights[kept]
    rows = F.embedding(indices, weight)
    rows = rows if per_sample_weights is None else rows * per_sample_weights[:, None]
    how = ("sum", "mean", "amax")[mode]
    empty = rows.new_zeros(len(starts), rows.shape[-1])
    output = empty.scatter_reduce(0, bags[:, None].expand_as(rows), rows, how, include_self=False)
    return output, bags, torch.bincount(bags, minlength=len(starts)), bags.new_empty(0)


def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """``torch.scatter_reduce`` with ``prod``: wrong in forward mode.

    Multiplies by the first source of every place, then by the second, and so on: each a plain scatter.
    """
    if reduce != "prod" or input.ndim == 0:
        return NotImplemented
    last = input.movedim(dim, -1)
    index, src = index.movedim(dim, -1), src.movedim(dim, -1)
    src = src[tuple(slice(size) for size in index.shape)]
    turn = _turns(index)
    result = last if include_self else last.scatter(-1, index, 1.0)
    spare = last.shape[-1]  # a place for the sources whose turn it is not
    ones = last.new_ones(*last.shape[:-1], spare + 1)
    for i in range(int(turn.max()) + 1 if turn.numel() else 0):
        result = result * ones.scatter(-1, torch.where(turn == i, index, spare), src)[..., :spare]
    return result.movedim(-1, dim)


def _turns(index: Tensor) -> Tensor:
    """How many equal indices stand before each one along the last dim."""
    ordered, order = torch.sort(index, dim=-1, stable=True)
    count = torch.arange(index.shape[-1], device=index.device).expand_as(index)
    is_first = torch.cat([torch.ones_like(ordered[..., :1], dtype=torch.bool), ordered.diff(dim=-1) != 0], -1)
    since_first = count - torch.where(is_first, count, 0).cummax(-1).values
    return torch.zeros_like(index).scatter(-1, order, since_first)


def index_reduce(
    input: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """``torch.index_reduce``: no forward mode."""
    shape = [1] * source.ndim
    shape[dim] = -1
    places = index.long().view(shape).expand_as(source)
    if reduce == "prod":
        return scatter_reduce(input, dim, places, source, reduce, include_self=include_self)
    return input.scatter_reduce(dim, places, source, reduce, include_self=include_self)


def segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Tensor:
    """``torch.segment_reduce``: no forward mode, no second derivative."""
    if lengths is None or lengths.ndim != 1 or axis != 0 or initial is not None or bool((lengths == 0).any()):
        return NotImplemented
    segments = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    how = {"max": "amax", "min": "amin"}.get(reduce, reduce)
    empty = data.new_zeros(len(lengths), *data.shape[1:])
    return (
        index_reduce(empty, 0, segments, data, how, include_self=False)
        if how != "sum"
        else (empty.index_add(0, segments, data))
    )
