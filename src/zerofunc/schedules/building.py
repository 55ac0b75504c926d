"""From the name and the parameters of a configuration to a schedule."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from zerofunc.schedules.cycles import LRRangeTest, OneCycle
from zerofunc.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

_NOT_BUILDABLE = {
    "ReduceLROnPlateau": "its step takes a metric; build it, pass it, and call engine.step({'metrics': value})",
    "ChainedScheduler": "it is made of scheduler objects; build it and pass the object",
    "SequentialLR": "it is made of scheduler objects; build it and pass the object",
}


def _schedulers() -> dict[str, type[LRScheduler]]:
    """Return every schedule that can be built, by lower-case name."""
    torchs = [
        value
        for value in vars(lr_scheduler).values()
        if isinstance(value, type) and issubclass(value, LRScheduler) and not value.__name__.startswith("_")
    ]
    ours: list[type[LRScheduler]] = [WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest]
    return {
        kind.__name__.lower(): kind
        for kind in [*torchs, *ours]
        if kind is not LRScheduler and kind.__name__ not in _NOT_BUILDABLE
    }


def build_scheduler(optimizer: Optimizer, type_name: str, params: dict[str, Any]) -> LRScheduler:
    """Return the schedule of that name over the optimizer; local.

    Args:
        optimizer: Whose groups get the rates.
        type_name: One of DeepSpeed's schedules or a class of `torch.optim.lr_scheduler`, in any case.
        params: Its keyword arguments.

    Raises:
        ValueError: If there is no such schedule, it does not take these parameters, or the optimizer has no rate.
    """
    for name, reason in _NOT_BUILDABLE.items():
        if type_name.lower() == name.lower():
            raise ValueError(f"scheduler.type: {name} cannot be built from a configuration: {reason}")
    known = _schedulers()
    kind = known.get(type_name.lower())
    if kind is None:
        near = difflib.get_close_matches(type_name.lower(), known, n=1)
        hint = f"; did you mean {known[near[0]].__name__}?" if near else ""
        raise ValueError(f"scheduler.type: expected a known schedule, found {type_name!r}{hint}")
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ValueError(
            f"scheduler.type: {kind.__name__} sets learning rates, and the optimizer has none (lr is None: it chooses "
            "the size of its steps by itself); leave the scheduler out, or give the optimizer a rate"
        )
    accepted = [name for name in inspect.signature(kind).parameters if name != "optimizer"]
    unknown = sorted(set(params) - set(accepted))
    if unknown:
        raise ValueError(
            f"scheduler.params: {kind.__name__} does not take {', '.join(unknown)}; it takes {', '.join(accepted)}"
        )
    try:
        return kind(optimizer, **params)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"scheduler.params: {kind.__name__} refused {params}: {error}; it takes {', '.join(accepted)}"
        ) from error
