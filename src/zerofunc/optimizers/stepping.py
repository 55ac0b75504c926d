"""An optimizer as a function of parameter groups and state, whatever it was built on."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from typing import Any, TypeGuard

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

State = MutableMapping[torch.Tensor, Any]
"""What an optimizer keeps of each parameter; must make an entry that is missing, as `defaultdict(dict)` does."""


def step_with(optimizer: Any, groups: list[dict[str, Any]], state: State, method: str = "step") -> None:
    """Local. Let an optimizer take a step with these groups and this state in place of its own.

    Hooks that were registered on it do not run.

    Args:
        optimizer: An optimizer, or what wraps one and steps it.
        groups: Its parameter groups meanwhile.
        state: Its state meanwhile.
        method: What is called: ``step``, or ``train`` of one that has such a mode.
    """
    replacement = {
        "param_groups": groups,
        "state": state,
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    layers = list(layers_of(optimizer))
    own = [{name: vars(layer)[name] for name in replacement if name in vars(layer)} for layer in layers]
    for layer, names in zip(layers, own, strict=True):
        vars(layer).update({name: replacement[name] for name in names})
    try:
        getattr(optimizer, method)()
    finally:
        for layer, values in zip(layers, own, strict=True):
            vars(layer).update(values)


def layers_of(optimizer: Any) -> Iterator[Any]:
    """Local. An optimizer, and those that it wraps: attributes that are optimizers of the same groups."""
    yield optimizer
    for value in list(vars(optimizer).values()):
        if isinstance(value, Optimizer) and value.param_groups is optimizer.param_groups:
            yield from layers_of(value)


def is_optimizer(value: Any) -> TypeGuard[Optimizer]:
    """Whether something steps parameter groups, if not as a torch.optim.Optimizer."""
    return isinstance(value, Optimizer) or (
        not isinstance(value, type)
        and all(hasattr(value, name) for name in ("step", "zero_grad", "param_groups", "state"))
    )


def twin_of(optimizer: Any) -> Any:
    """An optimizer of the same class and attributes, for :func:`step_with`; a schedule does not watch it."""
    twin, inner = object.__new__(type(optimizer)), []
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer) and value.param_groups is optimizer.param_groups:
            inner.append(twin_of(value))
            vars(twin)[name] = inner[-1]
        elif name != "step":
            is_container = isinstance(value, dict | list)  # whose containers are copied, and not what they hold
            vars(twin)[name] = pytree.tree_map(lambda held: held, copy.copy(value)) if is_container else value
    for layer in inner:  # one list, as in the original
        layer.param_groups = twin.param_groups
    return twin
