"""Whether elements of parameters meet in an optimizer's step, by watching its operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_Sources = frozenset[int]
_NOWHERE: _Sources = frozenset()

# Elementwise, though torch does not tag them so.
_ELEMENTWISE = {"copy_", "_to_copy", "fill_", "zero_", "masked_fill_", "clamp", "where", "div", "_fused_adam_",
                "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_", "zero", "fill", "copy", "max", "min"}  # fmt: skip
# New tensors that have the shape of another, and none of its values.
_NEW = ("_like", "new_empty", "new_full", "new_ones", "new_zeros", "new_empty_strided")


class DataFlow(TorchDispatchMode):
    """Follows the values of parameters and gradients through steps of an optimizer; used as a context.

    Attributes:
        mixes: Whether an element was computed from others of its parameter, or a value left for Python. So a norm
            counts from the first step on, whatever it does then; a count of steps does not.
        couples: Whether a tensor was computed from several parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mixes = self.couples = False
        self._sources: dict[int, _Sources] = {}
        self._alive: list[torch.Tensor] = []  # so that no address is used again

    def follow(self, parameter: int, tensors: Iterable[torch.Tensor]) -> None:
        """Take the values of these tensors for those of a parameter, by its number."""
        for tensor in tensors:
            self._mark(tensor, frozenset({parameter}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs = [*args, *(kwargs or {}).values()]
        if name.startswith(("_foreach_", "_fused_")):
            self._follow_lists(name, inputs, result)
        elif not name.endswith(_NEW):
            self._follow_one(func, name, tree_leaves(inputs), result)
        return result

    def _follow_lists(self, name: str, inputs: Sequence[Any], result: Any) -> None:
        """An operator on lists is one on each of their places."""
        lists = [value for value in inputs if _is_list_of_tensors(value)]
        single = self._sources_of(tensor for tensor in inputs if isinstance(tensor, torch.Tensor))
        for index in range(max(map(len, lists), default=0)):
            here = [one[index] for one in lists if index < len(one)]
            sources = self._sources_of(here) | single
            self._note(sources, is_mixing=not _is_elementwise_list(name) or bool(single))
            written = [result[index]] if _is_list_of_tensors(result) else here
            for tensor in written:
                self._mark(tensor, sources)

    def _follow_one(self, func: Any, name: str, inputs: list[Any], result: Any) -> None:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        sources = self._sources_of(tensors)
        if not sources:
            return
        results = tree_leaves(result)
        outputs = [value for value in results if isinstance(value, torch.Tensor)]
        if name == "index_put_" and all(t.shape == tensors[0].shape or t.numel() == 1 for t in tensors):
            name = "masked_fill_"  # tensor[mask] = number
        is_elementwise = func.is_view or torch.Tag.pointwise in func.tags or (name in _ELEMENTWISE and len(outputs) < 2)
        if is_elementwise and not func.is_view:  # neither spread over others, nor the number of a tensor with one
            largest = max((tensor.numel() for tensor in outputs), default=0)
            spread = any(tensor.numel() < largest and self._sources_of([tensor]) for tensor in tensors)
            is_elementwise = not spread and len(outputs) == len(results) and self._keep_size(tensors, largest)
        self._note(sources, is_mixing=not is_elementwise)
        for tensor in outputs:
            self._mark(tensor, sources)

    def _keep_size(self, tensors: list[torch.Tensor], largest: int) -> bool:
        """Whether the result has as many elements as the largest that is followed: a maximum over it has not."""
        return all(tensor.numel() <= largest for tensor in tensors if self._sources_of([tensor]))

    def _note(self, sources: _Sources, is_mixing: bool) -> None:
        self.mixes |= bool(sources) and is_mixing
        self.couples |= len(sources) > 1

    def _sources_of(self, tensors: Iterable[torch.Tensor]) -> _Sources:
        return frozenset().union(*(self._sources.get(_address(tensor), _NOWHERE) for tensor in tensors))

    def _mark(self, tensor: torch.Tensor, sources: _Sources) -> None:
        if sources:
            address = _address(tensor)
            self._sources[address] = self._sources.get(address, _NOWHERE) | sources
            self._alive.append(tensor)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value)


def _is_elementwise_list(name: str) -> bool:
    """Whether an operator on lists does to each tensor what an elementwise operator does."""
    base = name.removeprefix("_foreach_").rstrip("_")
    if name in _ELEMENTWISE or base in _ELEMENTWISE - {"max", "min"}:
        return True
    packet = getattr(torch.ops.aten, base, None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
