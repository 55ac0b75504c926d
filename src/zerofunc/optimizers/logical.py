"""Optimizers that need whole parameters, over shards: each parameter is stepped by one rank, its owner.

The owner gathers the parameter and its mean gradient, lets the optimizer that it wraps step them in their logical
shape, and hands the parts back. It alone keeps the parameter's state, so that a rank keeps one in N of it.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from zerofunc.module.sharding import owner_of
from zerofunc.optimizers import scope_of, step_with
from zerofunc.ranks.buffers import below_transforms
from zerofunc.ranks.collectives import Axis

ROUND_NUMEL = 1 << 24
"""Elements that an owner gathers at a time, or one parameter if that has more."""


@dataclass(frozen=True, eq=False)
class _Whole:
    """A parameter that one rank steps in its full shape.

    Attributes:
        group: Number of its parameter group.
        name: Its name in the module.
        shape: Its full shape.
        shard: This rank's part, a leaf.
        parts: Each rank's part of the flat parameter.
        owner: The rank that steps it.
        axis: The ranks that it is split over.
        device: Where parts are exchanged.
    """

    group: int
    name: str
    shape: torch.Size
    shard: torch.Tensor
    parts: tuple[slice, ...]
    owner: int
    axis: Axis
    device: torch.device

    def len(self, rank: int) -> int:
        """Elements on a rank."""
        return int(self.parts[rank].stop) - int(self.parts[rank].start)

    @property
    def numel(self) -> int:
        """Elements in all."""
        return self.shape.numel()

    @property
    def is_mine(self) -> bool:
        """Whether this rank steps it."""
        return self.owner == self.axis.rank

    @property
    def is_at_home(self) -> bool:
        """Whether its owner holds all of it, so that it is stepped where it lies."""
        return self.len(self.owner) == self.numel


class LogicalOptimizer(Optimizer):
    """Lets an optimizer that is not elementwise step sharded parameters as if they were whole.

    Its ``param_groups`` hold shards, and are the wrapped optimizer's own: a schedule of either is one of both. Groups
    whose updates are elementwise are stepped on the shards. ``state`` has full tensors, on the owner of each parameter
    alone; where nothing is split (stage 0) every rank is the owner. ``step`` is collective.

    Args:
        optimizer: Over shards (:func:`zerofunc.shard_optimizer` brings it there); one whose update of a parameter
            needs that parameter alone, where parameters are split.

    Raises:
        ValueError: If it is over other tensors than shards, or cannot be tried.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._elementwise: list[int] = []
        self._wholes: list[_Whole] = []
        self._loads: dict[int, list[int]] = {}
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
        self.state.update(optimizer.state)
        self._share()

    def _share(self) -> None:
        self.optimizer.param_groups, self.optimizer.state = self.param_groups, self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over groups and state, as ``load_state_dict`` does."""
        super().__setstate__(state)
        self._share()

    def __deepcopy__(self, memo: dict[int, Any]) -> LogicalOptimizer:
        """Refused: shards belong to their module."""
        raise TypeError("an optimizer over shards cannot be copied; copy its state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of shards."""
        super().add_param_group(param_group)
        number, group = len(self.param_groups) - 1, self.param_groups[-1]
        if scope_of(self.optimizer, group) == "element":
            self._elementwise.append(number)
        else:
            self._wholes += [self._assign(number, shard) for shard in group["params"]]

    def _assign(self, group: int, shard: torch.Tensor) -> _Whole:
        """The parameter of a shard, with the owner that has the least to do, what it would have to receive included."""
        found = owner_of(shard)
        sharding = found.sharding() if found is not None else None
        if found is None or sharding is None or not found.is_shard:
            raise ValueError(f"parameter group {group} has a tensor of shape {tuple(shard.shape)}, which is no shard")
        place, axis = sharding.places[found.name], sharding.axes.shard
        parts = tuple(place.range(rank) for rank in range(axis.size))
        loads = self._loads.setdefault(id(axis), [0] * axis.size)
        owner = min(range(axis.size), key=lambda rank: loads[rank] - (parts[rank].stop - parts[rank].start))
        loads[owner] += place.slot.numel
        return _Whole(group, found.name, place.shape, shard, parts, owner, axis, place.page.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective. Update the shards that have a gradient; return what ``closure`` returns.

        An owner gathers :data:`ROUND_NUMEL` elements at a time, or one parameter, and as many of gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with below_transforms():
            if self._elementwise:
                step_with(self.optimizer, [self.param_groups[number] for number in self._elementwise], self.state)
            changed: dict[int, dict[str, Any]] = {}
            for wholes in self._rounds():
                full = _gathered(wholes)
                changed.update(self._step_wholes(full))
                _hand_back(wholes, full)
            for number, settings in changed.items():  # such as a count of steps that an optimizer keeps there
                self.param_groups[number].update(settings)
        return loss

    def _rounds(self) -> Iterator[list[_Whole]]:
        """Collective. What is stepped together: first what needs no gathering, then a load of each owner at a time."""
        due = [whole for whole in self._wholes if whole.shard.grad is not None]
        for axis in {id(whole.axis): whole.axis for whole in self._wholes}.values():
            axis.agree(f"step of {', '.join(whole.name for whole in due if whole.axis is axis)} as whole parameters")
        yield [whole for whole in due if whole.is_at_home]
        queues: defaultdict[Any, defaultdict[int, list[list[_Whole]]]] = defaultdict(lambda: defaultdict(list))
        for whole in due:
            if not whole.is_at_home:
                queue = queues[id(whole.axis), whole.shard.dtype, whole.device][whole.owner]
                if not queue or sum(other.numel for other in queue[-1]) + whole.numel > ROUND_NUMEL:
                    queue.append([])
                queue[-1].append(whole)
        for by_owner in queues.values():
            for loads in itertools.zip_longest(*by_owner.values(), fillvalue=[]):
                yield list(itertools.chain.from_iterable(loads))

    def _step_wholes(self, full: dict[_Whole, torch.Tensor]) -> dict[int, dict[str, Any]]:
        """Let the optimizer step gathered parameters, in place; what it has changed in the settings of groups."""
        groups: dict[int, dict[str, Any]] = {}
        values: dict[_Whole, torch.Tensor] = {}
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for whole, (value, gradient) in full.items():
            settings = {k: v for k, v in self.param_groups[whole.group].items() if k not in ("params", "param_names")}
            values[whole] = param = value.view(whole.shape).requires_grad_()
            param.grad = gradient.view(whole.shape)
            groups.setdefault(whole.group, {**settings, "params": []})["params"].append(param)
            if whole.shard in self.state:
                state[param] = self.state[whole.shard]
        if groups:
            step_with(self.optimizer, list(groups.values()), state)
        for whole, param in values.items():
            if param in state:
                self.state[whole.shard] = state[param]
        return {number: {k: v for k, v in group.items() if k != "params"} for number, group in groups.items()}

    # -- state ----------------------------------------------------------------------------------------------------

    def is_whole(self, shard: torch.Tensor) -> bool:
        """Local. Whether the state of a shard's parameter is kept in full, by its owner."""
        return any(whole.shard is shard for whole in self._wholes)

    def owns(self, shard: torch.Tensor) -> bool:
        """Local. Whether this rank keeps the state of a shard's parameter."""
        return self._whole(shard).is_mine

    def full_state(self, shard: torch.Tensor) -> dict[str, Any]:
        """Collective. A copy of the full state of a shard's parameter, on all ranks; empty before its first step."""
        whole = self._whole(shard)
        mine = copy.deepcopy(self.state.get(shard, {})) if whole.is_mine else None
        found: dict[str, Any] = whole.axis.broadcast_object(mine, f"state of {whole.name}", whole.owner)
        place = shard.device
        return {key: value.to(place) if torch.is_tensor(value) else value for key, value in found.items()}

    def _whole(self, shard: torch.Tensor) -> _Whole:
        for whole in self._wholes:
            if whole.shard is shard:
                return whole
        raise ValueError(f"a tensor of shape {tuple(shard.shape)} is not one whose parameter is stepped as a whole")


def whole_optimizer(optimizer: Any, shard: torch.Tensor) -> LogicalOptimizer | None:
    """Local. The optimizer, if it steps the parameter of this shard as a whole on one rank."""
    return optimizer if isinstance(optimizer, LogicalOptimizer) and optimizer.is_whole(shard) else None


def _gathered(wholes: list[_Whole]) -> dict[_Whole, torch.Tensor]:
    """Collective. Value and gradient of the parameters that this rank owns, 2 x [numel]."""
    mine = [whole for whole in wholes if whole.is_mine]
    if all(whole.is_at_home for whole in wholes):
        return {whole: _pair(whole) for whole in mine}  # type: ignore[misc]
    ranks = range(wholes[0].axis.size)
    parts = [[t for whole in wholes if whole.owner == rank for t in _pair(whole)] for rank in ranks]
    sizes = [[2 * whole.len(rank) for whole in mine] for rank in ranks]
    full = {whole: whole.shard.new_empty(2, whole.numel) for whole in mine}
    for rank, received in enumerate(_exchange(wholes, parts, sizes, "gather")):
        for whole, pair in zip(mine, received, strict=True):
            full[whole][:, whole.parts[rank]] = pair.view(2, -1)
    return full


def _hand_back(wholes: list[_Whole], full: dict[_Whole, torch.Tensor]) -> None:
    """Collective. Put every rank's part of the parameters that were stepped into its shards."""
    if all(whole.is_at_home for whole in wholes):
        return
    ranks = range(wholes[0].axis.size)
    parts = [[value[0, whole.parts[rank]] for whole, value in full.items()] for rank in ranks]
    theirs = [[whole for whole in wholes if whole.owner == rank] for rank in ranks]
    sizes = [[len(whole.shard) for whole in group] for group in theirs]
    for group, received in zip(theirs, _exchange(wholes, parts, sizes, "return"), strict=True):
        for whole, part in zip(group, received, strict=True):
            whole.shard.copy_(part)


def _pair(whole: _Whole) -> tuple[torch.Tensor, torch.Tensor]:
    gradient = whole.shard.grad
    assert gradient is not None
    return whole.shard.detach(), gradient


def _exchange(
    wholes: list[_Whole], parts: list[list[torch.Tensor]], sizes: list[list[int]], what: str
) -> Iterator[Iterable[torch.Tensor]]:
    """Collective. What each rank has sent, in pieces of ``sizes``; ``parts`` are what each rank is sent."""
    first = wholes[0]
    empty = torch.empty(0, dtype=first.shard.dtype, device=first.device)
    sent = [torch.cat(group).to(first.device) if group else empty for group in parts]
    received = [empty.new_empty(sum(lengths)) for lengths in sizes]
    first.axis.all_to_all(received, sent, f"{what} of whole parameters, {first.name} and others").wait()
    return (flat.split(lengths) for flat, lengths in zip(received, sizes, strict=True))
