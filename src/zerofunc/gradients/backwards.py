"""Backwards that are running: what one has packed and begun to reduce, and what ends it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from zerofunc.gradients.policy import BackwardPlan
from zerofunc.pages.page import Page
from zerofunc.ranks.collectives import Work


@dataclass
class Local:
    """A page's unreduced gradient on this rank, and which of its slots hold something."""

    buffer: torch.Tensor | None = None
    written: set[int] = field(default_factory=set)


@dataclass
class Flight:
    """A page whose reduction is under way: ``reduced`` holds this rank's part of the sum when it has landed.

    ``place`` counts the reductions of its backward that were started up to this one.
    """

    page: Page
    reduced: torch.Tensor
    work: Work
    place: int


class Backward:
    """What one module's gradients have come to between two ends of backwards.

    Attributes:
        number: Counts those of its module, the same on all ranks.
        endings: What will end it. One that every ending has left belongs to graph tasks that have failed.
        is_owned: Whether it has had an ending. Otherwise other ranks have begun it, and this rank's loss has not
            reached the module yet.
        trainable: For each page, whether a parameter of it requires a gradient.
        expected: For each page, the slots without which it is not complete.
        local: For each page, what has come before its reduction was started,
        late: and what has come afterwards.
        borrowed: For each page, what earlier backwards had left on this rank and this one has begun to reduce.
        plan: What it does with its gradients; None until that was asked.
        started: Number of pages, from the last one, whose reduction was started here.
        known: How many of those every rank is known to have started.
        is_alone: Whether reductions may be started without an exchange: no other module's can come between these.
        held_after_asking: Pages held here when ranks were last asked to start some.
    """

    def __init__(self, number: int, pages: list[Page], reported: list[set[int]] | None, is_alone: bool) -> None:
        self.number = number
        self.endings: weakref.WeakSet[Ending] = weakref.WeakSet()
        self.is_owned = False
        self.plan: BackwardPlan | None = None
        slots = [{slot for slot, p in enumerate(page.parameters) if p.requires_grad} for page in pages]
        self.trainable = [bool(trainable) for trainable in slots]
        self.expected = slots if reported is None else [a & b for a, b in zip(slots, reported, strict=True)]
        self.local = [Local() for _ in pages]
        self.late = [Local() for _ in pages]
        self.borrowed: dict[int, Local] = {}
        self.started = self.known = 0
        self.is_alone = is_alone
        self.held_after_asking = 0
        self.flights: deque[Flight] = deque()
        self.landed: list[tuple[Page, torch.Tensor]] = []

    @property
    def is_alive(self) -> bool:
        """Whether its graph tasks have not failed."""
        return not self.is_owned or len(self.endings) > 0

    def num_ready(self) -> int:
        """Pages, from the last one, that are started or have all the gradients that are expected."""
        count = self.started
        while count < len(self.local):
            number = len(self.local) - 1 - count
            if not self.expected[number] <= self.local[number].written:
                break
            count += 1
        return count

    def num_held(self) -> int:
        """Pages whose full gradient waits here for its reduction to be started."""
        return sum([local.buffer is not None for local in self.local])

    def land(self, in_flight: int) -> None:
        """Wait until at most ``in_flight`` reductions are under way."""
        while len(self.flights) > in_flight:
            flight = self.flights.popleft()
            flight.work.wait()
            self.landed.append((flight.page, flight.reduced))  # without the work, which holds the full gradient


class Endable(Protocol):
    """Whose backwards are ended."""

    @property
    def place(self) -> int:
        """Its place in the order in which backwards end, the same on all ranks."""

    def finish(self) -> None:
        """Collective. End the backward."""

    def fail(self) -> None:
        """Local. Give the backward up, begun or not."""


class Ending:
    """Ends the backwards of one graph task, or of an engine's whole backward, in the order that every rank follows.

    The graph task's callback, or the engine's call, alone keeps it.
    """

    def __init__(self) -> None:
        self.reached: dict[Endable, None] = {}

    def end(self) -> None:
        """Collective. End all that were reached."""
        waiting = sorted(self.reached, key=lambda reducer: reducer.place, reverse=True)
        try:
            while waiting:
                waiting[-1].finish()
                waiting.pop()
        except BaseException:
            for reducer in waiting[:-1]:
                reducer.fail()
            raise

    def fail(self) -> None:
        """Local. Give up all that were reached."""
        for reducer in self.reached:
            reducer.fail()


_collecting: list[Ending] = []  # of the process, as autograd has threads of its own
_of_tasks: weakref.WeakValueDictionary[int, Ending] = weakref.WeakValueDictionary()


@contextmanager
def collected(reducer: Endable) -> Iterator[None]:
    """Collective. One backward, with all backwards inside it and whatever modules they reach: they end with it.

    A rank whose loss reaches no parameter of ``reducer`` takes part likewise.
    """
    if _collecting:  # of a hook in such a backward
        _collecting[-1].reached[reducer] = None
        yield
        return
    ending = Ending()
    ending.reached[reducer] = None
    _collecting.append(ending)
    try:
        yield
    except BaseException:
        ending.fail()
        raise
    finally:
        _collecting.pop()
    ending.end()


def is_collecting() -> bool:
    """Local. Whether a backward of :func:`collected` is running."""
    return bool(_collecting)


def current_ending() -> Ending:
    """Local. What ends the backward that is running here: an engine's, or else its graph task's."""
    if _collecting:
        return _collecting[-1]
    task = torch._C._current_graph_task_id()
    ending = _of_tasks.get(task)
    if ending is None:
        ending = _of_tasks[task] = made = Ending()
        torch.autograd.Variable._execution_engine.queue_callback(lambda: made.end())
    return ending
