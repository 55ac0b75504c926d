"""What a rank holds of a parameter and of its gradient: tensors that know they are parts of something larger.

A part is a 1-D tensor like any other, and what is computed from it is a plain tensor. Norms of it are those of the
whole: ``torch.nn.utils.clip_grad_norm_`` over shards, or an optimizer that takes norms, must not see one rank's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from zerofunc.ranks.collectives import Axis

_STILL_PARTS = {torch.Tensor.detach, torch.Tensor.float, torch.Tensor.double, vars(torch._C.TensorBase)["data"].__get__}
_GRAD: Any = vars(torch._C.TensorBase)["grad"]
as_plain = torch._C.DisableTorchFunctionSubclass
OVER_RANKS: dict[Any, Callable[..., Any]] = {}
"""What is done in the place of a function, which it is given first."""


class Part(torch.Tensor):
    """This rank's 1-D part of a tensor that is split over the ranks of an axis.

    Collective: norms, and the search for infinities of ``torch.amp.GradScaler``. They are over all ranks' parts.
    """

    _axis: Axis

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As of a plain tensor, but for what needs the other ranks."""
        over_ranks = OVER_RANKS.get(func)
        if over_ranks is not None:
            return over_ranks(func, *args, **(kwargs or {}))
        with as_plain():
            result = func(*args, **(kwargs or {}))
        if func in _STILL_PARTS and type(result) is torch.Tensor:
            return as_part(result, args[0]._axis)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain tensor: it belongs to no module."""
        copied = memo[id(self)] = copy.deepcopy(plain(self), memo)
        if self.is_leaf and (gradient := self.grad) is not None:
            copied.grad = copy.deepcopy(plain(gradient), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor."""
        return plain(self).__reduce_ex__(protocol)


class Shard(Part):
    """This rank's part of a parameter: a leaf, which owns ``grad``.

    Attributes:
        assigned: This rank's own full gradient, which was given to the parameter's ``grad`` and awaits its reduction.
        reduce: Collective. Reduces what was assigned.
        generation: Number of times that the gradient was set by hand, to None for instance.
    """

    assigned: torch.Tensor | None = None
    generation: int = 0
    reduce: Callable[[], None]

    @property
    def data(self) -> torch.Tensor:
        """The same part without gradient; what is written into it counts as a change of the shard."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        take_values(self, value, "the parameter of this shard")

    @property
    def grad(self) -> torch.Tensor | None:
        """Local, but collective where a gradient was assigned to the parameter. The mean gradient, this rank's part."""
        if self.assigned is not None:
            self.reduce()
        return reduced_gradient(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.assigned = None
        self.generation += 1
        set_own_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def as_part(tensor: torch.Tensor, axis: Axis) -> Part:
    """The tensor itself, from now on a part of what is split over ``axis``."""
    tensor.__class__ = Part
    assert isinstance(tensor, Part)
    tensor._axis = axis
    return tensor


def as_shard(tensor: torch.Tensor, axis: Axis) -> Shard:
    """The tensor itself, from now on a shard of what is split over ``axis``."""
    tensor.__class__ = Shard
    assert isinstance(tensor, Shard)
    tensor._axis = axis
    return tensor


def plain(part: torch.Tensor) -> torch.Tensor:
    """A plain tensor over the part's memory, detached; a leaf that requires a gradient if the part does."""
    with as_plain():
        return part.detach().requires_grad_(part.requires_grad)


def own_grad(tensor: torch.Tensor) -> torch.Tensor | None:
    """What autograd holds as the tensor's gradient, whatever its class says ``grad`` is."""
    with as_plain():
        gradient: torch.Tensor | None = _GRAD.__get__(tensor)
    return gradient


def set_own_grad(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
    """Replace what autograd holds as the tensor's gradient."""
    with as_plain():
        _GRAD.__set__(tensor, value)


def reduced_gradient(shard: torch.Tensor) -> torch.Tensor | None:
    """Local. The gradient that the shard has now: a part, where the parameter is split."""
    gradient = own_grad(shard)
    if type(gradient) is torch.Tensor and isinstance(shard, Shard) and shard._axis.size > 1:
        gradient = as_part(gradient.detach(), shard._axis)  # an alias: the tensor itself may be the user's
        set_own_grad(shard, gradient)
    return gradient


def take_values(tensor: torch.Tensor, value: torch.Tensor, name: str) -> None:
    """Copy ``value`` into a tensor whose memory must stay where it is, as ``tensor.data = value`` asks.

    Raises:
        RuntimeError: If it has another shape, data type or device.
    """
    expected, found = ((tuple(t.shape), t.dtype, t.device) for t in (tensor, value))
    if found != expected:
        raise RuntimeError(
            f"{name} is sharded, and keeps its shape, data type and device {expected}; it was given .data of {found} "
            "(by assignment, .to(), .half() …). Convert the model before sharding it; to change values use .copy_() "
            "under torch.no_grad()."
        )
    with torch.no_grad():
        tensor.detach().copy_(value)


# What PyTorch asks of a tensor's exact type: whether fast kernels and tracers take it as a plain one.
proxy_tensor.HANDLED_TYPES += (Part, Shard)  # type: ignore[assignment]
torch_optimizer._foreach_supported_types += [Part, Shard]
_foreach_utils._foreach_supported_types += [Part, Shard]
