"""What a module is made of when it is sharded, and whether it still is."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import nn


class Structure:
    """The modules and parameters inside a module, remembered so that a change is noticed at little cost."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = _parts(module)
        self._names = [(name, id(p)) for name, p in module.named_parameters(remove_duplicate=False)]

    def is_same(self) -> bool:
        """Local. Whether every module inside has the children and the parameters that it had."""
        return all([len(held) == len(before) and all(map(is_, held.values(), before)) for held, before in self._parts])

    def refuse_changes(self, module: nn.Module) -> None:
        """Local. Take note of changes that concern no parameter, such as a module without any that was put in.

        Raises:
            RuntimeError: If a parameter was put in, replaced or taken out.
        """
        now = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
        before = dict(self._names)
        for name in {**before, **now}:
            if name not in before:
                raise RuntimeError(
                    f"parameter {name!r} was put into the module after the module was sharded, so that nothing would "
                    "train or save it. Put it in first, then shard the module."
                )
            if now.get(name) != before[name]:
                raise was_replaced(name)
        self._parts = _parts(module)


def was_replaced(name: str) -> RuntimeError:
    """The error to raise for a parameter that is not where its shards think that it is."""
    return RuntimeError(
        f"parameter {name!r} was replaced or moved after the module was sharded (by assignment, .to(), .half(), tying, "
        "taking its module out …), so that training its shards would train nothing. Change the module first, then "
        "shard it."
    )


def _parts(module: nn.Module) -> list[tuple[Any, tuple[Any, ...]]]:
    return [(held, tuple(held.values())) for inner in module.modules() for held in (inner._modules, inner._parameters)]
