"""Gradients of ``.backward()``: from each parameter's local gradient to the mean over ranks in ``shard.grad``.

A post-accumulate-grad hook on each parameter takes the full local gradient away and packs it into its page's buffer.
Such hooks fire for ``.backward()`` alone: they are silent under torch.func and torch.autograd.grad, so no transform
leaves a trace here. Pages are reduced from the last to the first, on every rank, whatever order their gradients come
in: a page early, once it and all pages after it have reported; the rest when the backward ends. Parameters that did
not report count as zeros there; those that reported on no rank keep ``grad=None``, as in one process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from zerofunc.buffers import BufferPool, alias, below_transforms
from zerofunc.collectives import Axes, Work
from zerofunc.pager import Page


@dataclass
class _Flight:
    """A page whose reduction is under way: ``reduced`` holds this rank's part of the sum when it has landed."""

    page: Page
    reduced: torch.Tensor
    work: Work


@dataclass
class _Local:
    """A page's unreduced gradient on this rank, and which of its slots have been written since it was empty."""

    buffer: torch.Tensor | None = None
    written: set[int] = field(default_factory=set)
    reported: set[int] = field(default_factory=set)


class Reducer:
    """Averages the gradients of a sharded module.

    Attributes:
        sync: Whether the next backward ends in a reduction. Otherwise gradients add up on this rank, full.
        scale: Factor on the gradients of a backward.
        finished: Number of backwards ended.
        owed: Whether a backward ended without the reduction that it needs.
        guard: Called when a backward first reports a gradient; it may raise to forbid the backward.
    """

    def __init__(self, axes: Axes, pages: list[Page], in_flight: int) -> None:
        self.axes = axes
        self.pages = pages
        self.in_flight = in_flight
        self.sync = True
        self.scale = 1.0
        self.guard: Callable[[], None] = lambda: None
        self.pool = BufferPool()
        self.finished = 0
        self.owed = False
        self._task = -1
        self._local = [_Local() for _ in pages]
        self._turn = len(pages) - 1
        self._flights: deque[_Flight] = deque()
        self._landed: list[_Flight] = []

    def attach(self) -> None:
        """Hook every parameter of the pages."""
        for number, page in enumerate(self.pages):
            for slot, parameter in enumerate(page.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(number, slot))

    def _hook(self, number: int, slot: int) -> Callable[[torch.Tensor], None]:
        def take_gradient(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:  # reached by the graph, but with an undefined gradient
                return
            task = torch._C._current_graph_task_id()
            if task != self._task:  # a reentrant backward, inside another one, ends by itself
                self.guard()
                self._task = task
                torch.autograd.Variable._execution_engine.queue_callback(self.finish)
            with below_transforms():
                self._pack(number, slot, gradient.detach())
                if self.sync:
                    self._reduce_ready()

        return take_gradient

    def _pack(self, number: int, slot: int, gradient: torch.Tensor) -> None:
        page, local = self.pages[number], self._local[number]
        layout = page.layout.slots[slot]
        if local.buffer is None:
            local.buffer = self.pool.take(page.layout.padded_numel, page.master.dtype, page.master.device)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        place = alias(local.buffer, layout.offset, layout.shape)
        factor = self.scale / self.axes.num_ranks
        if slot in local.written:
            place.add_(gradient, alpha=factor)
        elif gradient.dtype == place.dtype:
            torch.mul(gradient, factor, out=place)
        else:
            place.copy_(gradient).mul_(factor)
        local.written.add(slot)
        local.reported.add(slot)

    def _reduce_ready(self) -> None:
        while self._turn >= 0 and len(self._local[self._turn].reported) == len(self.pages[self._turn].parameters):
            self._reduce(self._turn)
            self._turn -= 1

    def _reduce(self, number: int) -> None:
        """Collective. Start the reduction of a page; what did not report counts as zero."""
        page, local = self.pages[number], self._local[number]
        dtype, device = page.master.dtype, page.master.device
        full = local.buffer
        if full is None:
            full = self.pool.take(page.layout.padded_numel, dtype, device).zero_()
        else:
            for index, slot in enumerate(page.layout.slots):
                if index not in local.written:
                    full[slot.offset : slot.offset + slot.numel].zero_()
            full[page.layout.numel :].zero_()
        label = f"reduction of the gradient of {page.label}"
        if page.layout.num_shards == 1:
            reduced, work = full, self.axes.replicate.all_reduce(full, label)
        else:
            reduced = self.pool.take(page.layout.shard_numel, dtype, device)
            work = self.axes.shard.reduce_scatter(reduced, full, label)
            if self.axes.replicate.size > 1:
                work.wait()
                work = self.axes.replicate.all_reduce(reduced, label)
        self._local[number] = _Local()
        self._flights.append(_Flight(page, reduced, work))
        while len(self._flights) > self.in_flight:
            self._land()

    def _land(self) -> None:
        flight = self._flights.popleft()
        flight.work.wait()
        self._landed.append(flight)

    def finish(self) -> None:
        """Collective where ``sync``. End a backward: reduce the pages that are left, and set ``shard.grad``.

        The autograd engine calls it; a rank whose backward reached none of the parameters must call it itself.
        """
        self._task = -1
        self.finished += 1
        self.owed = not self.sync
        if self.sync:
            with below_transforms():
                self._finish()
        for local in self._local:
            local.reported.clear()

    def _finish(self) -> None:
        self.axes.agree("end of a backward")
        sent = set(range(self._turn + 1, len(self.pages)))
        flags = torch.tensor(
            [
                number in sent or slot in self._local[number].written
                for number, page in enumerate(self.pages)
                for slot in range(len(page.parameters))
            ],
            dtype=torch.uint8,
        )
        by_page = self.axes.any(flags).split([len(page.parameters) for page in self.pages])
        reported = {page: flag.tolist() for page, flag in zip(self.pages, by_page, strict=True)}
        for number in range(self._turn, -1, -1):
            if any(reported[self.pages[number]]):
                self._reduce(number)
        while self._flights:
            self._land()
        self._turn = len(self.pages) - 1
        landed, self._landed = self._landed, []
        for flight in landed:
            _accumulate(flight.page, flight.reduced, reported[flight.page], self._shard_rank(flight.page))

    def _shard_rank(self, page: Page) -> int:
        return self.axes.shard.rank if page.layout.num_shards > 1 else 0

    def discard(self) -> None:
        """Forget the unreduced gradients, as after an error in a backward."""
        while self._flights:
            self._land()
        self._landed.clear()
        self._local = [_Local() for _ in self.pages]
        self._turn = len(self.pages) - 1
        self._task = -1
        self.owed = False

    @contextmanager
    def settings(self, sync: bool, scale: float) -> Iterator[None]:
        """Use ``sync`` and ``scale`` inside the context."""
        before = self.sync, self.scale
        self.sync, self.scale = sync, scale
        try:
            yield
        finally:
            self.sync, self.scale = before


def _accumulate(page: Page, reduced: torch.Tensor, reported: list[int], rank: int) -> None:
    """Add the reduced gradient of a page to the ``grad`` of its shards; a first one becomes a view of it."""
    for slot, shard, flag in zip(page.layout.slots, page.shards, reported, strict=True):
        if not flag:
            continue
        start, stop = page.layout.part(slot, rank)
        part = alias(reduced, start, (stop - start,))
        if shard.grad is None:
            shard.grad = part
        else:
            shard.grad.add_(part)
