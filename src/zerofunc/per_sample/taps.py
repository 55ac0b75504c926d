"""Taps: a measure of each sample's gradient, parameter by parameter, without ever holding the gradients of all.

A tap is the identity of a parameter whose backward hands the gradient to a measure (its squared norm, a projection)
and passes nothing on. The measure goes to an accumulator, so that one reverse pass to the accumulator under vmap
gives the measure of every sample, with one parameter's per-sample gradients alive at a time, and those of all small
ones. A parameter used several times is tapped once, where autograd has summed the gradients of its uses.

Where the measure has a structured rule for a function (see ghost.py), a parameter used by that function alone does not
even have one per-sample gradient formed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import Function, forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Model = Callable[..., Any]
Call = Callable[[Mapping[str, torch.Tensor]], Model]
Loss = Callable[..., torch.Tensor]
IsOnly = Callable[[], bool]
FIRST = 2**64 - 1  # of what is ready, autograd runs the backward with the highest number
SMALL = 4096  # elements: less work than a tap takes
Rules = Mapping[Any, Callable[..., torch.Tensor | None]]


class Tap(Function):
    """``Tap.apply(accumulator, measure, *parameters)``: the parameters; their gradients' measure goes to the former.

    Gradients are None where a rule has measured them, or where there are none.
    """

    @staticmethod
    def forward(accumulator: torch.Tensor, measure: Any, *parameters: torch.Tensor) -> Any:  # noqa: D102
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: D102
        ctx.measure = inputs[1]
        ctx.set_materialize_grads(False)
        ctx._set_sequence_nr(FIRST)  # or autograd would keep all gradients until the end, as taps are made first

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # noqa: D102
        return ctx.measure(*gradients), None, *(None for _ in gradients)

    @staticmethod
    def jvp(ctx: Any, _: Any, __: None, *tangents: torch.Tensor | None) -> Any:  # noqa: D102
        return tuple(None if tangent is None else tangent.view_as(tangent) for tangent in tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:  # noqa: D102
        return Tap.apply(*inputs), in_dims[2:]


@dataclass(frozen=True)
class Measure:
    """What is asked of each sample's gradient; the sum over all parameters is the answer.

    Attributes:
        zero: The answer for no parameters: its shape, data type and device.
        of: From a parameter's name and one sample's gradient, in the parameter's shape, to the answer's shape.
        rules: Structured rules by function: called as that function with a :class:`Uses` before its arguments. They
            return the function's result, or None where they do not apply.
    """

    zero: torch.Tensor
    of: Callable[[str, torch.Tensor], torch.Tensor]
    rules: Rules = field(default_factory=dict)

    def of_all(self, names: Sequence[str], *gradients: torch.Tensor | None) -> torch.Tensor | None:
        """The sum over parameters with a gradient; None if there is none."""
        found = [self.of(name, g) for name, g in zip(names, gradients, strict=True) if g is not None]
        return functools.reduce(torch.add, found) if found else None


class Uses(TorchFunctionMode):
    """Counts how often each tapped parameter is used while a forward runs, and applies structured rules meanwhile.

    A rule is exact for a parameter's only use. Whether it was the only one is known when the context has ended.

    Attributes:
        accumulator: Where measures go.
    """

    def __init__(self, tapped: Mapping[str, torch.Tensor], accumulator: torch.Tensor, rules: Rules) -> None:
        super().__init__()
        self.accumulator = accumulator
        self._is_forward = True
        self._tapped = {id(tensor): tensor for tensor in tapped.values()}  # kept alive, or an id may be given again
        self._rules = rules
        self._counts: Counter[int] = Counter()
        self._level = _transform_level()

    def __exit__(self, *exception: Any) -> None:
        """End the forward."""
        self._is_forward = False
        super().__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` by its rule if it has one, and count what it uses."""
        kwargs = kwargs or {}
        used = [id(leaf) for leaf in _leaves((args, kwargs)) if id(leaf) in self._tapped]
        if not used:
            return func(*args, **kwargs)
        result = None
        if func in self._rules and _transform_level() == self._level:  # samples end where another transform begins
            result = self._rules[func](self, *args, **kwargs)
        if result is None:
            result = func(*args, **kwargs)
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):  # not for shape, dtype, …
            self._counts.update(used)
        return result

    def is_tapped(self, tensor: Any) -> bool:
        """Whether ``tensor`` is a tapped parameter itself."""
        return id(tensor) in self._tapped

    def only(self, tensor: torch.Tensor) -> IsOnly:
        """What tells, in a rule's backward, whether the tapped ``tensor`` has no other use, so that the rule is exact.

        A backward that runs within the forward is a derivative that the loss contains, and a use of its own.
        """
        key = id(tensor)

        def is_only() -> bool:
            self._counts[key] += self._is_forward
            return self._counts[key] == 1

        return is_only


def _transform_level() -> tuple[int | None, int]:
    return torch._C._functorch.maybe_current_level(), forward_ad._current_level


def _leaves(value: Any) -> Iterator[Any]:
    """The leaves of an operator's arguments; a faster ``tree_leaves``."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _groups(parameters: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The names that share a tap: those of small parameters, whose gradients may wait for each other."""
    small = [name for name, parameter in parameters.items() if parameter.numel() <= SMALL]
    return [[name] for name in parameters if name not in small] + [small] * bool(small)


def measure_gradients(
    loss: Loss,
    call: Call,
    parameters: Mapping[str, torch.Tensor],
    samples: Sequence[torch.Tensor],
    measure: Measure,
) -> torch.Tensor:
    """The measure of each sample's gradient with respect to ``parameters``, [B, *measure.zero.shape]. Local.

    Args:
        loss: From a model and one sample's tensors to a scalar.
        call: From tensors by parameter name to the model that uses them.
        parameters: What to differentiate with respect to; plain or paged.
        samples: Tensors [B, …].
        measure: What to ask of the gradients.
    """
    groups = _groups(parameters)

    def of_one(*sample: torch.Tensor) -> torch.Tensor:
        def tapped_loss(accumulator: torch.Tensor) -> torch.Tensor:
            tapped: dict[str, torch.Tensor] = {}
            for names in groups:
                taken = functools.partial(measure.of_all, names)
                tapped |= zip(names, Tap.apply(accumulator, taken, *(parameters[name] for name in names)), strict=True)
            with Uses(tapped, accumulator, measure.rules):
                return loss(call(tapped), *sample)

        value, pullback = torch.func.vjp(tapped_loss, measure.zero)[:2]
        # Not recorded, unlike torch.func.grad's backward: what a layer leaves behind is freed with the layer.
        (result,) = pullback(torch.ones_like(value), retain_graph=False, create_graph=False)
        return result

    with torch.no_grad():
        return torch.func.vmap(of_one, randomness="different")(*samples)
