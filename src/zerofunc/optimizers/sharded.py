"""From what the user gives as optimizer to one over shards: an instance, a function, or a name."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zerofunc.config import OptimizerConfig
from zerofunc.module.sharding import Sharding, owner_of, sharding_of
from zerofunc.optimizers import (
    build_optimizer,
    is_optimizer,
    muon_optimizer,
    needs_whole_parameters,
    refuse_known,
    scope_of,
)
from zerofunc.optimizers.logical import LogicalOptimizer, whole_optimizer

_logger = logging.getLogger(__name__)

OptimizerFactory = Callable[[list[Any]], Optimizer]


def shard_optimizer(
    optimizer: Optimizer, module: nn.Module | None = None, *, allow_untested: bool = False
) -> Optimizer:
    """Local, the same on all ranks. An optimizer over shards, from one over the parameters of a sharded module.

    Groups and their settings are kept, and so is state: a tensor of a parameter's shape becomes this rank's part.

    Args:
        optimizer: Built on the module's parameters, before or after the module was sharded.
        module: The sharded module, if all parameters shall be its own.
        allow_untested: Take an optimizer for elementwise that is unknown and cannot be tried.

    Returns:
        ``optimizer`` itself, now over shards, if it is elementwise; otherwise a :class:`LogicalOptimizer` around it.

    Raises:
        ValueError: If a parameter is not sharded, or given twice, or the optimizer cannot train sharded parameters.
    """
    refuse_known(optimizer)
    expected = sharding_of(module) if module is not None else None
    places = [
        [_place(param, expected, f"optimizer.param_groups[{number}]") for param in group["params"]]
        for number, group in enumerate(optimizer.param_groups)
    ]
    _refuse_duplicates([place for group in places for place in group])
    is_elementwise = _is_elementwise(optimizer, [place for group in places for place in group], allow_untested)
    before = dict(optimizer.state)
    optimizer.state.clear()
    pairs = []
    for group, found in zip(optimizer.param_groups, places, strict=True):
        moved = [sharding.shard(name) for sharding, name in found]
        pairs += list(zip(group["params"], moved, strict=True))
        group["params"] = moved
    if not is_elementwise and not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} wraps one that needs whole parameters, which one rank would have "
            "to step; give the optimizer that it wraps, or use stage 0"
        )
    made = optimizer if is_elementwise else LogicalOptimizer(optimizer)
    for param, shard in pairs:
        if before.get(param):
            _move_state(made, shard, before.pop(param))
    made.state.update(before)
    if not isinstance(optimizer, Optimizer):
        _refresh_after_steps(optimizer, dict.fromkeys(sharding for group in places for sharding, _ in group))
    return made


def _refresh_after_steps(wrapper: Any, shardings: Iterable[Sharding]) -> None:
    """Local. Let parameters show what a wrapper does after the step of the optimizer inside, which alone is seen."""
    step = wrapper.step

    @functools.wraps(step)
    def seen(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        for sharding in shardings:
            sharding.refresh()
        return result

    wrapper.step = seen


def _is_elementwise(optimizer: Optimizer, places: list[tuple[Sharding, str]], allow_untested: bool) -> bool:
    """Whether it may step each rank's shards as they are. Raises ValueError if it cannot train them at all."""
    try:
        scopes = {scope_of(optimizer, group) for group in optimizer.param_groups}
        if "model" in scopes and any(sharding.axes.shard.size > 1 for sharding, _ in places):
            raise ValueError(
                f"optimizer: {type(optimizer).__name__} updates a parameter by what other parameters are (as tried on "
                "small tensors), of which a rank has only a part; use another one, or stage 0"
            )
    except ValueError as error:
        if not allow_untested:
            raise
        _logger.warning("%s. It steps each rank's shards alone, as zero_allow_untested_optimizer is true", error)
        return True
    return scopes == {"element"}


def make_optimizer(
    module: nn.Module,
    given: Optimizer | OptimizerFactory | None,
    named: OptimizerConfig | None = None,
    model_parameters: Iterable[Any] | None = None,
    allow_untested: bool = False,
) -> Optimizer | None:
    """Local, the same on all ranks. The optimizer over a sharded module's shards, or None if none is asked for.

    Args:
        module: The sharded module.
        given: An optimizer on its parameters, or a function from ``model_parameters`` to one. Goes before a name.
        named: Name and parameters, as :func:`zerofunc.optimizers.build_optimizer` and, for Muon,
            :func:`zerofunc.optimizers.muon_optimizer` take them.
        model_parameters: Parameters, named ones or group dicts to train; all trainable ones by default. Frozen ones
            are left out, and groups without any other as well.
        allow_untested: As in :func:`shard_optimizer`.

    Raises:
        ValueError: As in :func:`shard_optimizer`, or if the name or a parameter of it is not known.
    """
    if is_optimizer(given):
        return shard_optimizer(given, module, allow_untested=allow_untested)
    if given is None and named is None:
        return None
    entries = _trainable(module, model_parameters)
    if given is not None:
        made = given(entries)  # type: ignore[operator]  # a factory: the rest was an optimizer
        if not is_optimizer(made):
            raise ValueError(f"optimizer returned {type(made).__name__}; expected a torch.optim.Optimizer")
        return shard_optimizer(made, module, allow_untested=allow_untested)
    assert named is not None
    groups = entries if isinstance(entries[0], dict) else [{"params": entries}]
    if named.type.lower() == "muon":
        return shard_optimizer(muon_optimizer(module, groups, named.params), module)
    if needs_whole_parameters(named.type):
        return shard_optimizer(build_optimizer(groups, named.type, named.params), module)
    return build_optimizer(_over_shards(module, groups), named.type, named.params)


def _trainable(module: nn.Module, model_parameters: Iterable[Any] | None) -> list[Any]:
    """What shall be trained, in the form that it was given, without what is frozen."""
    entries: list[Any] = list(module.parameters() if model_parameters is None else model_parameters)
    if entries and isinstance(entries[0], dict):
        groups = [{**entry, "params": _unfrozen(_listed(entry["params"]))} for entry in entries]
        entries = [group for group in groups if group["params"]]
    else:
        entries = _unfrozen(entries)
    if not entries:
        raise ValueError("there is no parameter to train: model_parameters has none that requires a gradient")
    return entries


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _tensor_of(entry: Any) -> torch.Tensor:
    tensor: torch.Tensor = entry[1] if isinstance(entry, tuple) else entry
    return tensor


def _unfrozen(entries: list[Any]) -> list[Any]:
    return [entry for entry in entries if _tensor_of(entry).requires_grad]


def _over_shards(module: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with shards in the place of parameters; names are kept."""
    sharding = sharding_of(module)
    moved, places = [], []
    for number, group in enumerate(groups):
        found = [_place(_tensor_of(entry), sharding, f"model_parameters, group {number}") for entry in group["params"]]
        shards = [owner.shard(name) for owner, name in found]
        pairs = zip(group["params"], shards, strict=True)
        moved.append({**group, "params": [(e[0], shard) if isinstance(e, tuple) else shard for e, shard in pairs]})
        places += found
    _refuse_duplicates(places)
    return moved


def _place(param: torch.Tensor, expected: Sharding | None, where: str) -> tuple[Sharding, str]:
    """The sharding that a parameter, or a shard, belongs to, and its name there."""
    owner = owner_of(param)
    sharding = owner.sharding() if owner is not None else None
    if owner is None or sharding is None or expected not in (None, sharding):
        raise ValueError(
            f"{where}: the optimizer's parameters include one of shape {tuple(param.shape)} that is not the model's; "
            "give parameters of the module that is sharded, as module.parameters() has them"
        )
    return sharding, owner.name


def _refuse_duplicates(places: list[tuple[Sharding, str]]) -> None:
    if len(set(places)) < len(places):
        name = next(name for number, (sharding, name) in enumerate(places) if (sharding, name) in places[:number])
        raise ValueError(f"the optimizer's parameters include {name!r} more than once; give it once (it may be tied)")


def _move_state(optimizer: Optimizer, shard: torch.Tensor, state: dict[str, Any]) -> None:
    """Give a shard the state of its parameter: parts of what has the parameter's shape, and the rest as it is."""
    whole = whole_optimizer(optimizer, shard)
    if whole is not None:
        if whole.owns(shard):
            whole.state[shard] = state
        return
    owner = owner_of(shard)
    sharding = owner.sharding() if owner is not None else None
    assert owner is not None and sharding is not None
    place = sharding.places[owner.name]
    part = place.range(sharding.rank)
    optimizer.state[shard] = {
        key: _part_of(value, part, shard) if key != "step" and _has_shape(value, place.shape) else value
        for key, value in state.items()
    }


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return torch.is_tensor(value) and value.shape == shape


def _part_of(value: torch.Tensor, part: slice, shard: torch.Tensor) -> torch.Tensor:
    mine = value.detach().reshape(-1)[part]
    return mine.to(shard.device, shard.dtype if value.is_floating_point() else value.dtype, copy=True)
