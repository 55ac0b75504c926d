"""The state of an optimizer over shards in full tensors, for who trains without an engine and saves by other means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zerofunc.module.sharding import Sharding, owner_of, sharding_of
from zerofunc.optimizers.logical import whole_optimizer
from zerofunc.space.trees import reshard, unshard


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Collective. What an optimizer over the shards of ``module`` keeps, in full tensors on the CPU, on every rank.

    It can be loaded on any number of ranks at any stage by :func:`load_optimizer_state`, and saved by ``torch.save`` or
    ``torch.distributed.checkpoint``; ``optimizer.state_dict()`` holds this rank's parts alone.

    Args:
        module: The sharded module.
        optimizer: An optimizer over its shards.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{setting: value, "params": [name, …]}]}``. A value that has
        one number for each element has the parameter's shape.

    Raises:
        ValueError: If a parameter of the optimizer is no shard of the module.
    """
    sharding = sharding_of(module)
    groups = [[(_name(sharding, shard), shard) for shard in group["params"]] for group in optimizer.param_groups]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    state = {name: _full_state(module, optimizer, name, shard) for group in groups for name, shard in group}
    return {
        "state": {name: entries for name, entries in state.items() if entries},
        "param_groups": [
            {**kept, "params": [name for name, _ in group]} for kept, group in zip(settings, groups, strict=True)
        ],
    }


def load_optimizer_state(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Local, the same on all ranks. Continue from what :func:`optimizer_state` gave, of any number of ranks and stage.

    Args:
        module: The sharded module.
        optimizer: An optimizer over its shards, with as many groups of the same parameters.
        state: What was saved.

    Raises:
        ValueError: If groups, names or shapes do not fit, before anything is changed.
    """
    sharding = sharding_of(module)
    groups = [{_name(sharding, shard): shard for shard in group["params"]} for group in optimizer.param_groups]
    found = [list(group) for group in groups]
    saved = [list(group["params"]) for group in state["param_groups"]]
    if found != saved:
        raise ValueError(
            f"the optimizer's groups are of {_short(found)}; the state that was saved is of {_short(saved)}"
        )
    shards = {name: shard for group in groups for name, shard in group.items()}
    parts = {
        name: _parts(module, name, entries) if whole_optimizer(optimizer, shards[name]) is None else entries
        for name, entries in state["state"].items()
    }
    for group, kept in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({name: value for name, value in kept.items() if name != "params"})
    for name, entries in parts.items():
        shard = shards[name]
        whole = whole_optimizer(optimizer, shard)
        if whole is None or whole.owns(shard):
            optimizer.state[shard] = _copied(entries, shard.device)


def _name(sharding: Sharding, shard: torch.Tensor) -> str:
    owner = owner_of(shard)
    if owner is None or owner.sharding() is not sharding or not owner.is_shard:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(shard.shape)} that is no shard of the module; build it on "
            "zerofunc.shards(module).values()"
        )
    return owner.name


def _full_state(module: nn.Module, optimizer: Optimizer, name: str, shard: torch.Tensor) -> dict[str, Any]:
    whole = whole_optimizer(optimizer, shard)
    if whole is not None:
        return _copied(whole.full_state(shard), torch.device("cpu"))
    entries = dict(optimizer.state.get(shard, {}))
    for key, value in entries.items():
        if key != "step" and isinstance(value, torch.Tensor) and value.shape == shard.shape:
            entries[key] = unshard(module, {name: value})[name]
    return _copied(entries, torch.device("cpu"))


def _parts(module: nn.Module, name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    sharding = sharding_of(module)
    shape = sharding.places[name].shape
    parts = dict(entries)
    for key, value in entries.items():
        if key != "step" and isinstance(value, torch.Tensor) and value.dim() > 0:
            if value.shape != shape and not (value.dim() == 1 and len(value) == 1):
                raise ValueError(
                    f"{key!r} of {name!r} has shape {tuple(value.shape)}; the parameter has {tuple(shape)}"
                )
            if value.shape == shape:
                parts[key] = reshard(module, {name: value})[name]
    return parts


def _copied(entries: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copies on a device; counts of steps stay where they are, which is on the CPU."""
    return {
        key: value.detach().clone() if key == "step" and isinstance(value, torch.Tensor)
        else value.detach().to(device, copy=True) if isinstance(value, torch.Tensor)
        else value
        for key, value in entries.items()
    }  # fmt: skip


def _short(groups: list[list[str]]) -> str:
    return "; ".join(f"{', '.join(names[:5])}{' …' if len(names) > 5 else ''}" for names in groups)
