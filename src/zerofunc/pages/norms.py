"""Norms of parts over all ranks, under PyTorch's own names: for clipping by others, and optimizers that take norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.nn import functional as F

from zerofunc.pages.parts import OVER_RANKS, Part, as_plain
from zerofunc.ranks.buffers import outside_transforms, uncompiled
from zerofunc.ranks.collectives import Axis

Function = Callable[..., Any]


def norms(parts: Sequence[torch.Tensor], axis: Axis, ord: float, dtype: torch.dtype | None = None) -> list[Any]:
    """Collective, one exchange. The p-norm over all ranks' parts of each of some tensors, 0-dim; no derivative."""
    if any(part.requires_grad for part in parts) and torch.is_grad_enabled():
        raise RuntimeError(
            "the norm of a shard is over all ranks, and no derivative goes through it; use zerofunc.vdot for a "
            "differentiable one, or torch.no_grad()"
        )
    with as_plain(), outside_transforms():
        own = [_own_norm(part, ord, dtype) for part in parts]
        label = f"norm of {len(parts)} tensors"
        axis.agree(label)
        if ord in (torch.inf, -torch.inf):
            rows = torch.zeros(axis.size, len(own), dtype=torch.float64, device=own[0].device)
            rows[axis.rank] = torch.stack(own)
            rows = axis.sum(rows, label)
            total = rows.amax(0) if ord > 0 else rows.amin(0)
        else:
            power = torch.stack(own).double() ** (ord or 1.0)
            total = axis.sum(power, label) ** (1 / (ord or 1.0))
        return [value.to(norm.dtype) for value, norm in zip(total, own, strict=True)]


def _own_norm(part: torch.Tensor, ord: float, dtype: torch.dtype | None) -> torch.Tensor:
    """The norm of this rank's part; what adds nothing to the others' where it is empty."""
    if part.numel():
        norm: torch.Tensor = torch.linalg.vector_norm(part, ord, dtype=dtype)
        return norm
    return part.new_full((), torch.inf if ord < 0 else 0.0, dtype=dtype)


def share_infinities(found: torch.Tensor, axis: Axis) -> None:
    """Collective. Let ``found``, of one element, be 1 on all ranks if it is so on any."""
    with as_plain(), outside_transforms():
        axis.agree("search for infinities in gradients")
        found.copy_(axis.sum(found.clone(), "search for infinities in gradients") > 0)


@uncompiled
def _vector_norm(
    func: Function,
    x: torch.Tensor,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    axis = _axis_of(x)
    if axis is None:
        with as_plain():
            result: torch.Tensor = func(x, ord, dim, keepdim, dtype=dtype, out=out)
            return result
    if out is not None:
        _refuse(func)
    (norm,) = norms([x], axis, float(ord), dtype)
    return norm.reshape(1) if keepdim else norm


def _norm(
    func: Function,
    input: torch.Tensor,
    p: float | str | None = "fro",
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    ord = 2.0 if p is None or p == "fro" else float(p)
    return _vector_norm(torch.linalg.vector_norm, input, ord, dim, keepdim, dtype=dtype, out=out)


def _linalg_norm(func: Function, A: torch.Tensor, ord: float | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _vector_norm(torch.linalg.vector_norm, A, 2.0 if ord is None else ord, *args, **kwargs)


@uncompiled
def foreach_norm(tensors: Sequence[torch.Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Any]:
    """Collective where some are parts, one exchange for each axis. The p-norm of each of some tensors."""
    found: dict[int, torch.Tensor] = {}
    groups: dict[int, tuple[Axis | None, list[int]]] = {}
    for number, tensor in enumerate(tensors):
        axis = _axis_of(tensor)
        groups.setdefault(id(axis), (axis, []))[1].append(number)
    for axis, numbers in groups.values():
        several = [tensors[number] for number in numbers]
        if axis is None:
            with as_plain():
                values = list(torch._foreach_norm(several, ord, dtype=dtype))
        else:
            values = norms(several, axis, float(ord), dtype)
        found.update(zip(numbers, values, strict=True))
    return [found[number] for number in range(len(tensors))]


def _foreach_norm(func: Function, *args: Any, **kwargs: Any) -> list[Any]:
    return foreach_norm(*args, **kwargs)


@uncompiled
def unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Collective where some are parts. Multiply gradients in place; ``found_inf`` is 1 if any rank's are not finite."""
    with as_plain():
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found_inf, inverse_scale)
    axes = {id(axis): axis for gradient in gradients if (axis := _axis_of(gradient)) is not None}
    for axis in axes.values():
        share_infinities(found_inf, axis)


def _unscale(func: Function, *args: Any) -> None:
    unscale(*args)


def _axis_of(tensor: torch.Tensor) -> Axis | None:
    """The axis that a tensor is split over, if it has several ranks."""
    return tensor._axis if isinstance(tensor, Part) and tensor._axis.size > 1 else None


def _refuse_split(func: Function, *args: Any, **kwargs: Any) -> Any:
    if any(_axis_of(tensor) is not None for tensor in args):
        _refuse(func)
    with as_plain():
        return func(*args, **kwargs)


def _refuse(func: Function) -> NoReturn:
    raise RuntimeError(
        f"{func.__name__} of a shard, or of its gradient, would see this rank's part alone. Norms without `out` are "
        "over all ranks, and so is zerofunc.vdot; zerofunc.unshard gives full tensors."
    )


def _refuse_memory(func: Function, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(f"{func.__name__} of a shard: its memory must stay where it is; use .copy_() to change values")


OVER_RANKS |= {
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _linalg_norm,
    torch.norm: _norm,
    torch.Tensor.norm: _norm,
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    **dict.fromkeys((F.normalize, F.cosine_similarity, torch.dist, torch.Tensor.dist), _refuse_split),
    **dict.fromkeys((torch.Tensor.set_, torch.Tensor.resize_), _refuse_memory),
}
