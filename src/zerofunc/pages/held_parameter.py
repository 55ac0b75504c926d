"""The ``grad`` of a sharded parameter, and the parameters of stages 0 to 2."""

from __future__ import annotations

import functools
import sys
from typing import Any, Protocol

import torch
from torch import nn
from torch._guards import TracingContext
from torch.fx.experimental import proxy_tensor

from zerofunc.pages.parts import own_grad, set_own_grad, take_values

_DATA: Any = vars(torch._C.TensorBase)["data"]


class GradientSource(Protocol):
    """What a sharded parameter asks for its gradient; a parameter is a page's number and a slot's."""

    def name(self, page: int, slot: int) -> str:
        """Local. The parameter's name."""

    def read(self, page: int, slot: int) -> torch.Tensor | None:
        """Local. The full mean gradient, which gathers itself when it is read."""

    def assign(self, page: int, slot: int, value: torch.Tensor | None) -> None:
        """Local, the same on all ranks. Replace it by this rank's own, which is averaged before it is used."""


def _read_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The mean gradient over all ranks in full shape, or None. Local, until its values are read."""
    source, *place = vars(parameter).get("_gradients", (_nobody,))
    found, own = source(), own_grad(parameter)
    is_compiled = TracingContext.try_get() is not None  # which asks to describe the parameter
    if own is not None or found is None or is_compiled:  # it has its own in a hook, until that is taken
        return own
    return found.read(*place)


def _assign_gradient(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    source, *place = vars(parameter).get("_gradients", (_nobody,))
    found = source()
    set_own_grad(parameter, value) if found is None else found.assign(*place, value)


def _name(parameter: torch.Tensor) -> str:
    source, *place = vars(parameter).get("_gradients", (_nobody,))
    found = source()
    return "a parameter" if found is None else f"parameter {found.name(*place)!r}"


def _nobody() -> None:
    return None


full_gradient = property(_read_gradient, _assign_gradient, lambda parameter: _assign_gradient(parameter, None))
"""``grad`` of a sharded parameter, whose attribute ``_gradients`` says where it is: (weak source, page, slot)."""


class HeldParameter(nn.Parameter):
    """A parameter of stages 0 to 2: an ordinary one over its page's memory, whose gradient is its shards'."""

    grad = full_gradient

    @property
    def data(self) -> torch.Tensor:
        """The parameter's memory, without gradient."""
        data: torch.Tensor = _DATA.__get__(self)
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.untyped_storage().data_ptr() != self.untyped_storage().data_ptr() or value.shape != self.shape:
            take_values(self, value, _name(self))

    def detach(self) -> torch.Tensor:
        """A plain tensor; ``nn.Parameter(parameter)``, which asks for one of the same class, makes an ordinary one."""
        detached = super().detach()
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            detached.__class__ = type(self)
        return detached

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """An ordinary parameter."""
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as an ordinary parameter, attributes included."""
        ordinary = nn.Parameter(self.detach(), self.requires_grad)
        vars(ordinary).update({name: value for name, value in vars(self).items() if name != "_gradients"})
        return ordinary.__reduce_ex__(protocol)


@functools.cache
def held_kind(kind: type[nn.Parameter]) -> type[HeldParameter]:
    """The class of parameters of some class when they are held: one of both."""
    if issubclass(kind, HeldParameter):
        return kind
    made = HeldParameter if kind is nn.Parameter else type(kind.__name__, (HeldParameter, kind), {})
    proxy_tensor.HANDLED_TYPES += (made,)  # type: ignore[assignment]  # as torch.func.linearize takes parameters
    return made
