"""Distances and losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zerofunc.kernels.normalizations import log_softmax

_MEAN, _SUM = 1, 2  # reductions, as PyTorch numbers them


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "") -> Tensor:
    """``torch.cdist``: no forward mode, no second derivative. Memory is that of all differences."""
    return _norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """``torch.pdist``: no forward mode, no second derivative."""
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return _norm(input[first] - input[second], p)


def _norm(x: Tensor, p: float) -> Tensor:
    """The norm over the last dim, with all derivatives zero where it is zero, as for a point's distance to itself."""
    zero = (x == 0).all(-1)
    x = torch.where(zero.unsqueeze(-1), 1.0, x)
    length = x.abs().sum(-1) if p == 1 else torch.linalg.vector_norm(x, p, dim=-1)
    return length.masked_fill(zero, 0)


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    return loss.mean() if reduction == _MEAN else loss.sum() if reduction == _SUM else loss


def mse_loss(input: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    """``F.mse_loss``: no jvp of its vjp where the target has no tangent."""
    return _reduced((input - target).square(), reduction)


def huber_loss(input: Tensor, target: Tensor, reduction: int = _MEAN, delta: float = 1.0) -> Tensor:
    """``F.huber_loss``: no jvp of its vjp."""
    error = (input - target).abs()
    return _reduced(torch.where(error <= delta, 0.5 * error.square(), delta * (error - 0.5 * delta)), reduction)


def soft_margin_loss(input: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    """``F.soft_margin_loss``: no jvp of its vjp."""
    return _reduced(F.softplus(-target * input), reduction)


def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """``F.multi_margin_loss``: no forward mode, no second derivative."""
    chosen = target.unsqueeze(-1)
    loss = F.relu(margin - input.gather(-1, chosen) + input) ** p
    loss = loss if weight is None else loss * weight[chosen]
    return _reduced(loss.scatter(-1, chosen, 0).mean(-1), reduction)


def cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy``: no backward through ``forward_ad``."""
    dim = 0 if input.ndim == 1 else 1
    log_p = log_softmax(input, dim)
    if target.is_floating_point():
        target = target * (1 - label_smoothing) + label_smoothing / input.shape[dim]
        loss = -(_weighted(log_p, weight, dim) * target).sum(dim)
        return loss.sum() / max(loss.numel(), 1) if reduction == _MEAN else _reduced(loss, reduction)
    loss = torch._C._nn.nll_loss_nd(log_p, target, weight, reduction, ignore_index)  # type: ignore[arg-type]
    if not label_smoothing:
        return loss
    ignored = target == ignore_index
    smooth = -_weighted(log_p, weight, dim).sum(dim).masked_fill(ignored, 0)
    if reduction == _MEAN:
        safe = target.masked_fill(ignored, 0)
        counts = torch.ones_like(smooth) if weight is None else weight[safe]
        smooth = smooth.sum() / counts.masked_fill(ignored, 0).sum()
    else:
        smooth = _reduced(smooth, reduction)
    return (1 - label_smoothing) * loss + label_smoothing / input.shape[dim] * smooth


def _weighted(log_p: Tensor, weight: Tensor | None, dim: int) -> Tensor:
    return log_p if weight is None else log_p * weight.view([-1] + [1] * (log_p.ndim - 1 - dim))
