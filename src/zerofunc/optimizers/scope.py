"""What the update of an element depends on: known for torch's optimizers, tried on small tensors for others."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from zerofunc.optimizers.dataflow import DataFlow
from zerofunc.optimizers.lion import Lion
from zerofunc.optimizers.named import WHOLE, elementwise_class
from zerofunc.optimizers.stepping import step_with, twin_of

Scope = Literal["element", "parameter", "model"]
"""The element's own history, that of its parameter's other elements as well, or other parameters too."""

_NUM_STEPS = 8  # some wait for a few before they move


def scope_of(optimizer: Optimizer, group: dict[str, Any]) -> Scope:
    """What an element's update depends on, for the parameters of one group; local, the same on all ranks.

    A class of ``torch.optim`` is known. Another one takes a few steps on two small matrices with the group's settings:
    together, apart, and cut into flat pieces as ranks hold them; and with other gradients of the first, which neither
    the second nor what is kept for all parameters may show. Its operators are watched meanwhile, so that a norm that
    changes nothing yet is seen as well. What it does only to large tensors goes unseen.

    Args:
        optimizer: Any optimizer; its parameters and its state are left alone.
        group: One of its groups.

    Raises:
        ValueError: If it cannot be tried.
    """
    if type(optimizer) is Lion or elementwise_class(type(optimizer)):
        return "element"
    if type(optimizer) in WHOLE:
        return "parameter"
    return _tried(optimizer, group)


@dataclass(frozen=True)
class _Piece:
    """A tensor to try an optimizer on, and where its gradients lead it, more or less."""

    value: torch.Tensor
    target: torch.Tensor
    noise: list[torch.Tensor]

    def flat(self, start: int, stop: int) -> _Piece:
        """A part of it, 1-D."""
        value, target, *noise = (t.flatten()[start:stop] for t in (self.value, self.target, *self.noise))
        return _Piece(value, target, noise)

    def gradient(self, param: torch.Tensor, step: int) -> torch.Tensor:
        """Of the step, at the parameter's value."""
        return (param.detach() - self.target + self.noise[step]) * (3.0 if step % 3 == 1 else 0.5)


@dataclass
class _Trial:
    """What some steps did.

    Attributes:
        moved: How far each tensor went, flat.
        common: What the optimizer keeps for all parameters afterwards, as text.
    """

    moved: list[torch.Tensor]
    common: str


def _tried(optimizer: Any, group: dict[str, Any]) -> Scope:
    example = next(iter(group["params"]), torch.empty(0))
    first, second = _pieces(example.device, torch.promote_types(example.dtype, torch.float32))
    other, flow = replace(first, target=-2 * first.target), DataFlow()
    devices = [] if example.device.type == "cpu" else [example.device]
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        try:
            together = _try(optimizer, group, [[first, second]], flow)
        except Exception as error:
            raise ValueError(_cannot_try(optimizer, f"its step raised {type(error).__name__}: {error}")) from error
        if not any([bool(moved.any()) for moved in together.moved]):
            raise ValueError(_cannot_try(optimizer, "its step did not move them"))
        elsewhere = _try(optimizer, group, [[other, second]])
        if flow.couples or elsewhere.common != together.common or not _equal(together.moved[1:], elsewhere):
            return "model"
        whole = torch.cat(together.moved)

        def by_ranks(*calls: list[list[_Piece]]) -> bool:
            """Whether ranks, each with its own calls of step, move the pieces as far as one rank does."""
            return _same(whole, lambda: torch.cat([m for c in calls for m in _try(optimizer, group, c).moved]))

        pieces = [[[first.flat(0, 10)]], [[first.flat(10, 24), second.flat(0, 15)]]]
        if not flow.mixes and by_ranks(*pieces):
            return "element"
        if by_ranks([[first]], [[second]]) and by_ranks([[first], [second]]):
            return "parameter"
    return "model"


def _equal(moved: list[torch.Tensor], trial: _Trial) -> bool:
    return all(torch.equal(one, two) for one, two in zip(moved, trial.moved[1:], strict=True))


def _cannot_try(optimizer: Optimizer, why: str) -> str:
    return (
        f"optimizer: You are using an untested ZeRO Optimizer, {type(optimizer).__name__}. Whether it is elementwise "
        f"could not be tried on small tensors: {why}. If it is, set zero_allow_untested_optimizer to true."
    )


def _pieces(device: torch.device, dtype: torch.dtype) -> tuple[_Piece, _Piece]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    first, second = (_Piece(draw(*n), draw(*n), [draw(*n) for _ in range(_NUM_STEPS)]) for n in ((6, 4), (5, 3)))
    return first, second


def _try(
    optimizer: Any, group: dict[str, Any], calls: Sequence[Sequence[_Piece]], flow: DataFlow | None = None
) -> _Trial:
    """Steps that call the optimizer's once for each list of pieces, its operators followed by ``flow``."""
    twin, state = twin_of(optimizer), defaultdict[torch.Tensor, Any](dict)
    given = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    settings = copy.deepcopy(given)  # an optimizer may write into a list that its group holds
    if settings.get("lr") is not None:  # a schedule may have begun at 0
        settings["lr"] = torch.full_like(settings["lr"], 0.1) if torch.is_tensor(settings["lr"]) else 0.1
    tensors = [[piece.value.clone().requires_grad_() for piece in pieces] for pieces in calls]
    settings = _begin_training(twin, settings, tensors, state)
    for step in range(_NUM_STEPS):
        changed = settings
        for pieces, params in zip(calls, tensors, strict=True):
            for number, (piece, param) in enumerate(zip(pieces, params, strict=True)):
                param.grad = piece.gradient(param, step)
                if flow is not None:
                    flow.follow(number, (param.detach(), param.grad))
            passed = {**settings, "params": list(params)}
            with flow or nullcontext():
                step_with(twin, [passed], state)
            changed = {name: passed[name] for name in settings.keys() | passed.keys() - {"params"}}
        settings = changed
    pairs = zip([p for pieces in calls for p in pieces], [t for params in tensors for t in params], strict=True)
    moved = [(param.detach() - piece.value).flatten() for piece, param in pairs]
    own = {name: value for name, value in vars(twin).items() if isinstance(value, int | float | torch.Tensor)}
    return _Trial(moved, repr(sorted({**own, **settings}.items(), key=str)))


def _begin_training(
    twin: Any, settings: dict[str, Any], tensors: list[list[torch.Tensor]], state: dict[torch.Tensor, Any]
) -> dict[str, Any]:
    """The settings of one that has a mode for training, such as a schedule-free one, in that mode."""
    if callable(getattr(twin, "train", None)):
        passed = {**settings, "params": [param for params in tensors for param in params]}
        step_with(twin, [passed], state, method="train")
        settings = {name: value for name, value in passed.items() if name != "params"}
    return settings


def _same(expected: torch.Tensor, moved: Callable[[], torch.Tensor]) -> bool:
    """Whether another way to step moves the pieces as far. One that raises is none."""
    try:
        found = moved()
    except Exception:  # of any optimizer that there is: it does not take such tensors
        return False
    return bool(torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())))
