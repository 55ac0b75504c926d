"""What the update of an element depends on: known for torch's optimizers, tried on small tensors for others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from zerofunc.optimizers.lion import Lion
from zerofunc.optimizers.named import WHOLE, elementwise_class
from zerofunc.optimizers.stepping import step_with, twin_of

Scope = Literal["element", "parameter", "model"]
"""The element's own history, that of its parameter's other elements as well, or other parameters too."""

_NUM_STEPS = 3


def scope_of(optimizer: Optimizer, group: dict[str, Any]) -> Scope:
    """What an element's update depends on, for the parameters of one group; local, the same on all ranks.

    A class of ``torch.optim`` is known. Another one takes a few steps on two small matrices with the group's settings:
    together, apart, and cut into flat pieces as ranks hold them. What it does only to large tensors goes unseen.

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
    """A tensor to try an optimizer on, and its gradients in the steps."""

    value: torch.Tensor
    gradients: list[torch.Tensor]

    def flat(self, start: int, stop: int) -> _Piece:
        """A part of it, 1-D."""
        return _Piece(self.value.flatten()[start:stop], [g.flatten()[start:stop] for g in self.gradients])


def _tried(optimizer: Optimizer, group: dict[str, Any]) -> Scope:
    example = next(iter(group["params"]), torch.empty(0))
    first, second = _pieces(example.device, torch.promote_types(example.dtype, torch.float32))
    devices = [] if example.device.type == "cpu" else [example.device]
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        try:
            together = _moved(optimizer, group, [[first, second]])
        except Exception as error:
            raise ValueError(_cannot_try(optimizer, f"its step raised {type(error).__name__}: {error}")) from error
        if not bool(together.any()):
            raise ValueError(_cannot_try(optimizer, "its step did not move them"))

        def by_ranks(*calls: list[list[_Piece]]) -> bool:
            """Whether ranks, each with its own calls of step, move the pieces as far as one rank does."""
            return _same(together, lambda: torch.cat([_moved(optimizer, group, of_rank) for of_rank in calls]))

        if by_ranks([[first.flat(0, 10)]], [[first.flat(10, 24), second.flat(0, 15)]]):
            return "element"
        if by_ranks([[first]], [[second]]) and by_ranks([[first], [second]]):
            return "parameter"
    return "model"


def _cannot_try(optimizer: Optimizer, why: str) -> str:
    return (
        f"optimizer: You are using an untested ZeRO Optimizer, {type(optimizer).__name__}. Whether it is elementwise "
        f"could not be tried on small tensors: {why}. If it is, set zero_allow_untested_optimizer to true."
    )


def _pieces(device: torch.device, dtype: torch.dtype) -> tuple[_Piece, _Piece]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    scales = (1.0, -3.0, 0.2)[:_NUM_STEPS]
    first, second = (_Piece(draw(*shape), [draw(*shape) * scale for scale in scales]) for shape in ((6, 4), (5, 3)))
    return first, second


def _moved(optimizer: Optimizer, group: dict[str, Any], calls: Sequence[Sequence[_Piece]]) -> torch.Tensor:
    """How far the pieces moved, 1-D, in steps that call the optimizer's once for each list of pieces."""
    twin, state = twin_of(optimizer), defaultdict[torch.Tensor, Any](dict)
    settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    if "lr" in settings:  # a schedule may have begun at 0
        settings["lr"] = torch.full_like(settings["lr"], 0.1) if torch.is_tensor(settings["lr"]) else 0.1
    tensors = [[piece.value.clone().requires_grad_() for piece in pieces] for pieces in calls]
    for step in range(_NUM_STEPS):
        changed = settings
        for pieces, params in zip(calls, tensors, strict=True):
            for piece, param in zip(pieces, params, strict=True):
                param.grad = piece.gradients[step].clone()
            passed = {**settings, "params": list(params)}
            step_with(twin, [passed], state)
            changed = {name: passed[name] for name in settings.keys() | passed.keys() - {"params"}}
        settings = changed
    pairs = zip([p for pieces in calls for p in pieces], [t for params in tensors for t in params], strict=True)
    return torch.cat([(param.detach() - piece.value).flatten() for piece, param in pairs])


def _same(expected: torch.Tensor, moved: Callable[[], torch.Tensor]) -> bool:
    """Whether another way to step moves the pieces as far. One that raises is none."""
    try:
        found = moved()
    except Exception:  # of any optimizer that there is: it does not take such tensors
        return False
    return bool(torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())))
