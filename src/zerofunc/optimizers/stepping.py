"""An optimizer as a function of parameter groups and state, whatever it was built on."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import MutableMapping
from typing import Any

import torch
from torch.optim import Optimizer

State = MutableMapping[torch.Tensor, Any]
"""What an optimizer keeps of each parameter; must make an entry that is missing, as `defaultdict(dict)` does."""


def step_with(optimizer: Optimizer, groups: list[dict[str, Any]], state: State) -> None:
    """Local. Let an optimizer take a step with these groups and this state in place of its own.

    Hooks that were registered on it do not run.
    """
    own = dict(vars(optimizer))
    vars(optimizer).update(
        param_groups=groups,
        state=state,
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    try:
        optimizer.step()
    finally:
        replaced = ("param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        vars(optimizer).update({name: own[name] for name in replaced})


def twin_of(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and attributes, for :func:`step_with`; a schedule does not watch it."""
    twin = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name != "step":
            vars(twin)[name] = copy.copy(value) if isinstance(value, dict | list) else value
    return twin
