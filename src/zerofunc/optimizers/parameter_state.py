"""What training keeps of a parameter: its master, its gradient and its optimizer state, to read and to write.

The names are DeepSpeed's, and so is the argument: a parameter of the module, as ``engine.module.named_parameters()``
gives it, at every stage. *Full* tensors have the parameter's shape and are the same on all ranks; *local* ones are this
rank's 1-D part. Gradients are means over the ranks, times the loss scale under float16.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zerofunc.module.full_values import gathered
from zerofunc.module.sharding import Sharding, owner_of, place_of
from zerofunc.optimizers.logical import LogicalOptimizer, whole_optimizer
from zerofunc.space.trees import reshard, unshard

__all__ = [
    "GatheredParameters",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]

_logger = logging.getLogger(__name__)


# -- whole tensors ----------------------------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """Collective. A copy of the parameter's master: in float32 where the module computes in 16 bits.

    Raises:
        ValueError: As all functions here do, if ``param`` is not a parameter of a sharded module.
    """
    sharding, name = _place(param)
    return _full(sharding, name, sharding.shard(name))


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Collective. A copy of the gradient that has been accumulated since the last step, or None.

    Gradients that wait for the accumulation boundary (stages 0 and 1) are reduced for it now.
    """
    sharding, name = _place(param)
    sharding.reducer.reduce_owed()
    gradient = sharding.shard(name).grad
    return None if gradient is None else _full(sharding, name, gradient)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> Any:
    """Collective. A copy of one entry of the optimizer's state, such as ``exp_avg``; None before the first step.

    An entry that is not one value per element, such as ``step``, is returned as it is.

    Raises:
        ValueError: If the optimizer keeps no such entry, or none was made by :func:`zerofunc.initialize`.
    """
    sharding, name = _place(param)
    whole = _whole_optimizer(sharding, name)
    if whole is not None:
        return _chosen(whole.full_state(sharding.shard(name)), name, optim_state_key)
    value = _entry(sharding, name, optim_state_key)
    return _full(sharding, name, value) if _is_part(sharding, name, value) else value


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Collective. Replace the parameter and its master by ``value``, of its shape, the same on all ranks."""
    sharding, name = _place(param)
    _write(sharding.shard(name), _part(sharding, name, value))
    sharding.refresh()


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Collective. Replace the accumulated gradient by ``value``, the same on all ranks, of the parameter's shape."""
    sharding, name = _place(param)
    part = _part(sharding, name, value)
    sharding.reducer.reduce_owed()
    _set_gradient(sharding.shard(name), part)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Collective. Replace one entry of the optimizer's state by ``value``, of the parameter's shape, on all ranks.

    Raises:
        ValueError: If the optimizer has no such entry yet, or has one that is not one value per element.
    """
    sharding, name = _place(param)
    whole = _whole_optimizer(sharding, name)
    if whole is None:
        _write(_state_part(sharding, name, optim_state_key), _part(sharding, name, value))
        return
    full = safe_get_full_optimizer_state(param, optim_state_key)
    if not isinstance(full, torch.Tensor) or full.shape != value.shape:
        raise ValueError(f"{optim_state_key!r} of {name!r} is not a tensor of shape {tuple(value.shape)}")
    if whole.owns(sharding.shard(name)):
        _write(whole.state[sharding.shard(name)][optim_state_key], value)


# -- this rank's parts ------------------------------------------------------------------------------------------------


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """Local. This rank's part of the parameter's master, 1-D, not a copy."""
    sharding, name = _place(param)
    return sharding.shard(name).detach()


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Local. This rank's part of the gradient that has been reduced since the last step, not a copy, or None."""
    sharding, name = _place(param)
    return sharding.shard(name).grad


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> Any:
    """Local. This rank's part of one entry of the optimizer's state, not a copy; None before the first step."""
    sharding, name = _place(param)
    return _entry(sharding, name, optim_state_key)


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Local. Replace this rank's part of the master; the parameter follows at the next forward.

    Every rank calls it, with its own part, before that forward.
    """
    sharding, name = _place(param)
    shard = sharding.shard(name)
    _write(shard, _fitting(name, value, shard.shape))


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Local. Replace this rank's part of the reduced gradient. Every rank calls it, with its own part."""
    sharding, name = _place(param)
    shard = sharding.shard(name)
    _set_gradient(shard, _fitting(name, value, shard.shape))


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Local. Replace this rank's part of one entry of the optimizer's state."""
    sharding, name = _place(param)
    part = _state_part(sharding, name, optim_state_key)
    _write(part, _fitting(name, value, part.shape))


def _place(param: torch.Tensor) -> tuple[Sharding, str]:
    """The sharding that a parameter belongs to, and the parameter's name there."""
    owner = owner_of(param)
    sharding = owner.sharding() if owner is not None else None
    if owner is None or sharding is None:
        raise ValueError(
            f"param, a {type(param).__name__} of shape {tuple(param.shape)}, is not a parameter of a sharded module; "
            "take it from engine.module.named_parameters()"
        )
    return sharding, owner.name


def _module(sharding: Sharding) -> nn.Module:
    module = sharding.module()
    if module is None:
        raise ValueError("the module that param belongs to is gone")
    return module


def _full(sharding: Sharding, name: str, part: torch.Tensor) -> torch.Tensor:
    return unshard(_module(sharding), {name: part})[name]


def _part(sharding: Sharding, name: str, value: torch.Tensor) -> torch.Tensor:
    return reshard(_module(sharding), {name: value.detach()})[name]


def _fitting(name: str, value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if value.shape != shape:
        raise ValueError(
            f"value for {name!r} has shape {tuple(value.shape)}; expected this rank's part, {tuple(shape)}"
        )
    return value


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(value)


def _set_gradient(shard: torch.Tensor, value: torch.Tensor) -> None:
    if not shard.requires_grad:
        raise ValueError("param does not require a gradient, so that a gradient would go nowhere")
    shard.grad = value.detach().to(shard, copy=True)


def _entry(sharding: Sharding, name: str, key: str) -> Any:
    """One entry of the optimizer's state; None where it has no state yet."""
    if sharding.optimizer is None:
        raise ValueError(
            f"no optimizer is known for {name!r}; read the state of your own one: optimizer.state[shard], with the "
            "shard from zerofunc.shards(module)"
        )
    if _whole_optimizer(sharding, name) is not None:
        raise ValueError(
            f"the state of {name!r} is kept in full shape by one rank, as its optimizer needs whole parameters; use "
            "the functions for full state"
        )
    return _chosen(sharding.optimizer.state.get(sharding.shard(name)), name, key)


def _chosen(state: dict[str, Any] | None, name: str, key: str) -> Any:
    if state and key not in state:
        raise ValueError(f"the optimizer keeps no {key!r} of {name!r}; it keeps {', '.join(state)}")
    return state[key] if state else None


def _whole_optimizer(sharding: Sharding, name: str) -> LogicalOptimizer | None:
    """The optimizer, if it steps this parameter as a whole on one rank."""
    return whole_optimizer(sharding.optimizer, sharding.shard(name))


def _is_part(sharding: Sharding, name: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == sharding.shard(name).shape


def _state_part(sharding: Sharding, name: str, key: str) -> torch.Tensor:
    entry = _entry(sharding, name, key)
    if entry is None:
        raise ValueError(f"the optimizer has no {key!r} of {name!r} before its first step; take one first")
    if not _is_part(sharding, name, entry):
        raise ValueError(f"{key!r} of {name!r} is not one value per element; change it in optimizer.state")
    part: torch.Tensor = entry
    return part


# -- parameters themselves --------------------------------------------------------------------------------------------


@contextmanager
def GatheredParameters(
    params: torch.Tensor | Iterable[torch.Tensor] | nn.Module,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Collective. :func:`zerofunc.gathered` under DeepSpeed's name: parameters are resident inside the context.

    Args:
        params: One parameter, several, or a module's. Those that are not sharded are left as they are.
        modifier_rank: At exit all ranks take over what this rank has written. None: nobody writes.
        fwd_module: Accepted; every forward sees what was written.
        enabled: Whether anything is done.
    """
    if isinstance(params, nn.Module):
        params = params.parameters()
    tensors = [params] if isinstance(params, torch.Tensor) else list(params)
    sharded = [tensor for tensor in tensors if place_of(tensor) is not None]
    if not enabled or not sharded:
        yield
        return
    with gathered(sharded, write=modifier_rank is not None, writer=modifier_rank or 0):
        yield


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Local. Nothing: a parameter gathers itself wherever it is read. Says so once in the log."""
    _say_nothing_to_register()


@functools.cache
def _say_nothing_to_register() -> None:
    _logger.info("register_external_parameter does nothing: a parameter gathers itself wherever it is read")
