"""What a module's reductions are told: a policy when it is sharded, and a plan when a backward begins."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ReductionPolicy:
    """How the gradients of a module become those of its shards, from its sharding on.

    Attributes:
        average: Whether gradients are averaged over the ranks; otherwise they are added up.
        accumulate_in: Data type that gradients are added up in, before and after reductions; the shards' own where
            None. ``shard.grad`` keeps the shard's type, with values of this one.
        communicate_in: Data type that gradients are reduced in; the one that they are kept in where None.
        need_all: Whether a trainable parameter without a gradient on any rank is an error.
    """

    average: bool = True
    accumulate_in: torch.dtype | None = None
    communicate_in: torch.dtype | None = None
    need_all: bool = False


@dataclass(frozen=True)
class BackwardPlan:
    """What one backward does with the gradients that it finds.

    Attributes:
        sync: Whether it ends in a reduction. Otherwise gradients add up on this rank, full. The same on all ranks.
        scale: Factor on all ranks' gradients.
        weight: Factor on this rank's gradients among those of all ranks.
    """

    sync: bool = True
    scale: float = 1.0
    weight: float = 1.0


class Conductor:
    """Whom a module's backwards ask. This one lets all pass, reduces each, and times nothing."""

    def admit(self) -> None:
        """Called when a backward first finds a gradient of the module; may raise to forbid the backward."""

    def plan(self) -> BackwardPlan:
        """Asked once in a backward, when it first finds a gradient, or when it ends without one."""
        return BackwardPlan()

    def phase(self, name: str) -> AbstractContextManager[object]:
        """A context for a phase of a step, such as a timer's."""
        return nullcontext()
