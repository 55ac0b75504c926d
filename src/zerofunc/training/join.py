"""Ranks with different numbers of batches: those that have run out accompany the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zerofunc.gradients.policy import BackwardPlan, Conductor
from zerofunc.module.sharding import sharding_of


class _Weighed(Conductor):
    """Another conductor, whose plans have a rank's weight in a :class:`Join`."""

    def __init__(self, joined: Join, inner: Conductor) -> None:
        self.joined = joined
        self.inner = inner

    def admit(self) -> None:
        """As the other one."""
        self.inner.admit()

    def plan(self) -> BackwardPlan:
        """The other one's plan with the weight."""
        return replace(self.inner.plan(), weight=self.joined.weight)

    def phase(self, name: str) -> AbstractContextManager[object]:
        """As the other one."""
        return self.inner.phase(name)


class Join:
    """Batches for a loop that every rank runs equally often, though ranks have different numbers of them.

    A rank that has run out is given its last batch again, so that it runs the same program and takes part in every
    gather and reduction, whatever transforms the loss is made of; its gradients of ``.backward()`` count nothing. Those
    of the other ranks are averaged over the ranks that still have data, as if the others were not there::

        for batch in zerofunc.join(engine, loader):
            engine.backward(loss(engine, batch))
            engine.step()

    Derivatives over shards (``torch.func`` with :func:`zerofunc.functional_call`) are averages over all ranks,
    repeated batches included: multiply the loss by ``weight`` there. Buffers that a forward updates (BatchNorm's) see
    the repeated batches too.

    Attributes:
        has_data: Whether the batch is this rank's own, and not its last one again; for sums and counts.
        weight: Factor on this rank's gradients: 0 where the batch is repeated.
    """

    def __init__(
        self, modules: nn.Module | Sequence[nn.Module], batches: Iterable[Any], over_all: bool = False
    ) -> None:
        joined = [modules] if isinstance(modules, nn.Module) else modules
        if not joined:
            raise ValueError("modules is empty; expected a sharded module, or several")
        self._shardings = [sharding_of(module) for module in joined]
        self._batches = batches
        self._over_all = over_all
        self.has_data = False
        self.weight = 1.0

    def __iter__(self) -> Iterator[Any]:
        """Collective at every batch. This rank's batches, then the last one again until no rank has any.

        Raises:
            ValueError: On every rank, if one has no batch at all.
        """
        num_ranks = self._shardings[0].axes.num_ranks
        batches, batch = iter(self._batches), None
        has_any = False
        try:
            while True:
                self.has_data = False
                for batch in batches:  # noqa: B007 - the last batch is kept
                    self.has_data = has_any = True
                    break
                num_empty, num_joined = self._exchange(not has_any, self.has_data)
                if num_empty and num_joined:
                    raise ValueError(
                        f"{num_empty} of {num_ranks} ranks have no batch at all, so that they cannot run the "
                        "loop's program; give every rank at least one batch"
                    )
                if not num_joined:
                    return
                share = 1.0 if self._over_all else num_ranks / num_joined
                self.weight = share if self.has_data else 0.0
                with self._weighed():
                    yield batch
        finally:
            self.weight = 1.0

    @contextmanager
    def _weighed(self) -> Iterator[None]:
        """Let backwards of the modules count by the weight."""
        reducers = list(dict.fromkeys(sharding.reducer for sharding in self._shardings))
        for reducer in reducers:
            reducer.conductor = _Weighed(self, reducer.conductor)
        try:
            yield
        finally:
            for reducer in reducers:
                if isinstance(reducer.conductor, _Weighed):  # a new engine has brought its own
                    reducer.conductor = reducer.conductor.inner

    def _exchange(self, *flags: bool) -> list[int]:
        """Collective. On how many ranks each flag is set."""
        axes = self._shardings[0].axes
        axes.agree("batches of zerofunc.join")
        counts: list[int] = axes.sum(torch.tensor(flags, dtype=torch.int64), "batches of zerofunc.join").tolist()
        return counts


def join(modules: nn.Module | Sequence[nn.Module], batches: Iterable[Any], over_all: bool = False) -> Join:
    """Batches for a loop that every rank runs equally often: see :class:`Join`.

    Args:
        modules: A sharded module or its engine, or several of them on the same ranks that one loop trains.
        batches: This rank's batches, such as a loader.
        over_all: Average gradients over all ranks, instead of those that still have data.

    Raises:
        ValueError: If there is no module, or one is not sharded.
    """
    return Join(modules, batches, over_all)
