"""The tensors that a function reads besides its arguments, and running it with others in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class Reference(NamedTuple):
    """A place that holds a tensor: a module's parameter or buffer, a variable closed over, an item of a list."""

    get: Callable[[], Any]
    put: Callable[[Any], None]


def slots_of(*values: Any) -> dict[Reference, torch.Tensor]:
    """The places from which calling ``values`` would read tensors, and what they hold now.

    Found are modules (their parameters, buffers and other tensors), functions (what they close over, their defaults,
    and the modules, tensors and functions of their file that they name), bound methods, partials, and lists, tuples and
    dicts of all these.
    """
    found: dict[Reference, torch.Tensor] = {}
    seen: set[int] = set()
    pending: list[tuple[Any, Reference | None]] = [(value, None) for value in values]
    while pending:
        value, slot = pending.pop()
        if isinstance(value, torch.Tensor):
            if slot is not None:
                found[slot] = value
        elif id(value) not in seen:
            seen.add(id(value))
            pending += _inside(value)
    return found


def _inside(value: Any) -> Iterator[tuple[Any, Reference | None]]:
    """What ``value`` refers to, with the place where it does; None where nothing else can be put there."""
    if isinstance(value, nn.Module):
        for module in value.modules():
            for holder in (module._parameters, module._buffers, vars(module)):
                yield from _items(holder, [pair for pair in holder.items() if isinstance(pair[1], torch.Tensor)])
    elif isinstance(value, list):
        yield from _items(value, enumerate(value))
    elif isinstance(value, dict):
        yield from _items(value, value.items())
    elif isinstance(value, tuple):
        yield from ((item, None) for item in value)
    elif isinstance(value, partial):
        yield from ((item, None) for item in (value.func, value.args, value.keywords))
    elif isinstance(value, MethodType):
        yield from ((item, None) for item in (value.__self__, value.__func__))
    elif isinstance(value, FunctionType):
        yield from _inside_function(value)


def _inside_function(function: FunctionType) -> Iterator[tuple[Any, Reference | None]]:
    for cell in function.__closure__ or ():
        if _is_filled(cell):
            slot = Reference(partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents"))
            yield cell.cell_contents, slot
    yield function.__defaults__, None
    yield function.__kwdefaults__, None
    named = [(name, function.__globals__.get(name)) for name in _names(function.__code__)]
    yield from _items(function.__globals__, [pair for pair in named if _is_own(pair[1], function)])


def _names(code: CodeType) -> set[str]:
    """The globals and attributes that a function and those inside it name."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _is_own(item: Any, function: FunctionType) -> bool:
    """Whether a global may hold what a function reads: a tensor, a module, or a function of the same file."""
    if isinstance(item, FunctionType):
        return item.__globals__ is function.__globals__
    return isinstance(item, torch.Tensor | nn.Module)


def _items(holder: Any, items: Any) -> Iterator[tuple[Any, Reference]]:
    for key, item in items:
        yield item, Reference(partial(holder.__getitem__, key), partial(holder.__setitem__, key))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - it raises where the variable has no value yet
    except ValueError:
        return False
    return True


@contextmanager
def filled(slots: Iterable[Reference], tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """A context in which the places hold these tensors."""
    before = [(slot, slot.get()) for slot in slots]
    try:
        for (slot, _), tensor in zip(before, tensors, strict=True):
            slot.put(tensor)
        yield
    finally:
        for slot, tensor in before:
            slot.put(tensor)


# -- what was not found ------------------------------------------------------------------------------------------------

_METADATA = {"__get__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex"}


def run_alone(call: Callable[[], Any], operands: Sequence[torch.Tensor], transformed: bool) -> Any:
    """What ``call`` gives, without history. Operands have none here, so a result that has one read something else.

    Args:
        call: What to run, on ``operands``.
        operands: Plain tensors, or batched ones under the levels of vmap that are active.
        transformed: Whether tensors of transforms that are not active here may be about.

    Raises:
        RuntimeError: If ``call`` reads a tensor of such a transform, or one that requires grad, that is no operand.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
        if transformed:
            stack.enter_context(_Outsiders())
        result = call()
        own = {id(operand) for operand in operands}
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                _refuse_history(tensor, own)
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)


class _Outsiders(TorchFunctionMode):
    """Refuses tensors of levels of functorch that are not active, which operators would take for plain ones."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """``func(*args, **kwargs)``, PyTorch having left the mode meanwhile."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _METADATA:
            for value in pytree.tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(value):
                    if _is_outside(value):
                        raise _lost(value, "belongs to a transform around the checkpoint")
        return func(*args, **kwargs)


def _is_outside(tensor: torch.Tensor) -> bool:
    if _functorch.unwrap_if_dead(tensor) is not tensor:
        return False
    levels = _functorch.get_interpreter_stack() or []
    number = _functorch.maybe_get_level(tensor)
    if number > len(levels):
        return True
    return _functorch.is_batchedtensor(tensor) != (levels[number - 1].key() == _functorch.TransformType.Vmap)


def _refuse_history(result: torch.Tensor, own: set[int]) -> None:
    plain = unwrapped(result)
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(plain).tangent is not None:
        raise _lost(result, "has a tangent")
    nodes, seen = [result.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in own:
            raise _lost(leaf, "requires grad")
        nodes += [following for following, _ in node.next_functions]


def _lost(tensor: torch.Tensor, why: str) -> RuntimeError:
    return RuntimeError(
        f"checkpoint: fn reads a tensor of shape {tuple(tensor.shape)} that {why} and is neither an argument nor in a "
        "module, closure or partial that was found; its derivative would be lost. Pass it as an argument of checkpoint"
    )


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor inside all wrappers of functorch."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
