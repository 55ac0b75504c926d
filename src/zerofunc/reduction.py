"""Gradients of ``.backward()``: from each parameter's local gradient to the mean over ranks in ``shard.grad``.

A post-accumulate-grad hook on each parameter takes the full local gradient away and packs it into its page's buffer.
Such hooks fire for ``.backward()`` alone: they are silent under torch.func and torch.autograd.grad, so no transform
leaves a trace here. Pages are reduced from the last to the first, all of them, on every rank, whatever order their
gradients come in: a page early, once it and all pages after it have reported; the rest when the backward ends.
Parameters that did not report count as zeros there; those that reported on no rank keep ``grad=None``, as in one
process. What a backward has packed counts only when it ends: one that fails leaves nothing behind.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from zerofunc.buffers import BufferPool, alias, below_transforms
from zerofunc.collectives import Axes, Work
from zerofunc.pager import Page


@dataclass
class _Local:
    """A page's unreduced gradient on this rank, and which of its slots hold something."""

    buffer: torch.Tensor | None = None
    written: set[int] = field(default_factory=set)


@dataclass
class _Flight:
    """A page whose reduction is under way: ``reduced`` holds this rank's part of the sum when it has landed."""

    page: Page
    reduced: torch.Tensor
    work: Work


class _Backward:
    """One backward that is running: what it has packed, and how far its reductions have come."""

    def __init__(self, pages: list[Page]) -> None:
        self.local = [_Local() for _ in pages]
        self.expected = [sum([parameter.requires_grad for parameter in page.parameters]) for page in pages]
        self.turn = len(pages) - 1
        self.flights: deque[_Flight] = deque()
        self.landed: list[tuple[Page, torch.Tensor]] = []

    def land(self, in_flight: int) -> None:
        """Wait until at most ``in_flight`` reductions are under way."""
        while len(self.flights) > in_flight:
            flight = self.flights.popleft()
            flight.work.wait()
            self.landed.append((flight.page, flight.reduced))  # without the work, which holds the full gradient


class Reducer:
    """Averages the gradients of a sharded module.

    Attributes:
        sync: Whether the next backward ends in a reduction. Otherwise gradients add up on this rank, full.
        scale: Factor on the gradients of a backward.
        weight: Factor on this rank's gradients among those of all ranks.
        average: Whether gradients are averaged over the ranks; otherwise they are added up.
        accumulate_in: Data type that gradients are added up in, before and after reductions; the shards' own where
            None. ``shard.grad`` keeps the shard's type, with values of this one.
        communicate_in: Data type that gradients are reduced in; the one that they are kept in where None.
        need_all: Whether a trainable parameter without a gradient is an error.
        in_flight: The most pages whose reduction is under way; each holds a full page of gradient.
        keep_idle: Whether full-page buffers are kept from one backward to the next.
        finished: Number of backwards ended.
        owed: Whether a backward ended without the reduction that it needs.
        guard: Called when a backward first reports a gradient; it may raise to forbid the backward.
        phase: Makes the context in which reductions run, such as a timer's.
    """

    def __init__(self, axes: Axes, pages: list[Page], in_flight: int, keep_idle: bool) -> None:
        self.axes = axes
        self.pages = pages
        self.in_flight = in_flight
        self.keep_idle = keep_idle
        self.sync = True
        self.scale = 1.0
        self.weight = 1.0
        self.average = True
        self.accumulate_in: torch.dtype | None = None
        self.communicate_in: torch.dtype | None = None
        self.need_all = False
        self.guard: Callable[[], None] = lambda: None
        self.phase: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext()
        self.pool = BufferPool()
        self.finished = 0
        self.owed = False
        self._running: dict[int, _Backward] = {}  # by graph task; several where a backward calls another one
        self._accumulated = [_Local() for _ in pages]
        self._unreduced: set[int] = set()  # pages that were trainable in a backward since the last reduction
        self._abandoned: list[_Flight] = []

    def attach(self) -> None:
        """Hook every parameter of the pages, frozen ones too. The hooks do not keep the reducer alive."""
        for number, page in enumerate(self.pages):
            for slot, parameter in enumerate(page.parameters):
                trainable = parameter.requires_grad
                parameter.requires_grad_(True).register_post_accumulate_grad_hook(
                    _hook(weakref.ref(self), number, slot)
                )
                parameter.requires_grad_(trainable)

    def take(self, number: int, slot: int, gradient: torch.Tensor) -> None:
        """Collective where ``sync``. Add one parameter's local gradient to the backward that is running."""
        task = torch._C._current_graph_task_id()
        if task not in self._running:
            if not self._running:
                self.guard()
            self._running[task] = _Backward(self.pages)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.finish(task))
        backward = self._running[task]
        with below_transforms():
            self._pack(backward.local[number], self.pages[number], slot, gradient.detach())
            if self.sync:
                while backward.turn >= 0 and self._is_complete(backward):
                    with self.phase("reduce"):
                        self._reduce_next(backward)
                        backward.land(self.in_flight)

    def _pack(self, local: _Local, page: Page, slot: int, gradient: torch.Tensor) -> None:
        layout = page.layout.slots[slot]
        if local.buffer is None:
            local.buffer = self._take(page)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        place = local.buffer.as_strided(layout.shape, layout.stride, layout.offset)
        factor = self.scale * self.weight / (self.axes.num_ranks if self.average else 1)
        if factor == 0:  # an infinity counts nothing either
            gradient = torch.zeros_like(gradient)
        if slot in local.written:
            place.add_(gradient, alpha=factor)
        elif gradient.dtype == place.dtype:
            torch.mul(gradient, factor, out=place)
        else:
            place.copy_(gradient).mul_(factor)
        local.written.add(slot)

    def _take(self, page: Page) -> torch.Tensor:
        """A buffer for the full gradient of a page."""
        return self.pool.take(page.layout.padded_numel, self._kept_in(page), page.device)

    def _kept_in(self, page: Page) -> torch.dtype:
        """What gradients of a page are added up in."""
        dtype = page.master.dtype
        return self.accumulate_in if self.accumulate_in and dtype == torch.float32 else dtype

    def _is_complete(self, backward: _Backward) -> bool:
        """Whether the page in turn has all the gradients that it can get."""
        return len(backward.local[backward.turn].written) >= backward.expected[backward.turn]

    def _reduce_next(self, backward: _Backward) -> None:
        """Collective. Start the reduction of the next page in turn; what did not report counts as zero."""
        number, page = backward.turn, self.pages[backward.turn]
        backward.turn -= 1
        if not backward.expected[number] and number not in self._unreduced:
            return  # frozen, on every rank
        full = self._filled(self._merged(backward.local[number], self._accumulated[number], page), page)
        if self.communicate_in is not None:
            full = full.to(self.communicate_in)
        backward.local[number] = _Local(None, backward.local[number].written)
        label = f"reduction of the gradient of {page.label}"
        if page.layout.num_shards == 1:
            reduced, work = full, self.axes.replicate.all_reduce(full, label)
        else:
            reduced = self.pool.take(page.layout.shard_numel, full.dtype, full.device)
            work = self.axes.shard.reduce_scatter(reduced, full, label)
            if self.axes.replicate.size > 1:
                work.wait()
                work = self.axes.replicate.all_reduce(reduced, label)
        backward.flights.append(_Flight(page, reduced, work))

    def _merged(self, local: _Local, other: _Local, page: Page) -> _Local:
        """The sum of two unreduced gradients, in the first one's buffer, or the second's where the first has none."""
        if other.buffer is None:
            return local
        if local.buffer is None:
            local.buffer = self.pool.take(page.layout.padded_numel, other.buffer.dtype, other.buffer.device)
        for slot in other.written:
            layout = page.layout.slots[slot]
            mine = local.buffer[layout.offset : layout.offset + layout.numel]
            theirs = other.buffer[layout.offset : layout.offset + layout.numel]
            mine.add_(theirs) if slot in local.written else mine.copy_(theirs)
        local.written |= other.written
        return local

    def _filled(self, local: _Local, page: Page) -> torch.Tensor:
        """The page's gradient with zeros in padding and in slots that hold nothing."""
        if local.buffer is None:
            return self._take(page).zero_()
        for index, slot in enumerate(page.layout.slots):
            if index not in local.written:
                local.buffer[slot.offset : slot.offset + slot.numel].zero_()
        local.buffer[page.layout.numel :].zero_()
        return local.buffer

    def finish(self, task: int | None = None) -> None:
        """Collective where ``sync``. End a backward: reduce the pages that are left, and set ``shard.grad``.

        The autograd engine calls it; a rank whose backward reached none of the parameters must call it itself.
        """
        backward = self._running.pop(task, None) if task is not None else None
        backward = backward or _Backward(self.pages)
        with below_transforms(), self.phase("reduce"):
            if self.sync:
                try:
                    self._average(backward)
                except BaseException:
                    self._abandoned += backward.flights
                    raise
                self._accumulated = [_Local() for _ in self.pages]
                self._unreduced.clear()
            else:
                self._unreduced |= {number for number, expected in enumerate(backward.expected) if expected}
                pairs = zip(backward.local, self._accumulated, self.pages, strict=True)
                self._accumulated = [self._merged(local, before, page) for local, before, page in pairs]
        del backward
        if not self.keep_idle:
            self.pool.clear()
            self.axes.shard.free_buffers()
        self.owed = not self.sync
        self.finished += 1

    def reduce_owed(self) -> None:
        """Collective where a backward has left its gradient on the ranks. Reduce it; later ones add to it."""
        if self.owed:
            with self.settings(True, 1.0):
                self.finish()

    def _average(self, backward: _Backward) -> None:
        while backward.turn >= 0:  # before ranks agree: another one may wait for these pages inside its backward
            self._reduce_next(backward)
            backward.land(self.in_flight)
        self.axes.agree("end of a backward")
        flags = [
            slot in local.written for local, page in zip(backward.local, self.pages, strict=True)
            for slot in range(len(page.parameters))
        ]  # fmt: skip
        merged = self.axes.any(torch.tensor(flags, dtype=torch.uint8))
        reported = dict(zip(self.pages, merged.split([len(page.parameters) for page in self.pages]), strict=True))
        backward.land(0)
        if self.need_all:
            self._refuse_unused(reported)
        for page, reduced in backward.landed:
            _accumulate(page, reduced.to(self._kept_in(page)), reported[page].tolist(), self.axes.shard.rank)

    def _refuse_unused(self, reported: dict[Page, torch.Tensor]) -> None:
        unused = [
            slot.name
            for page, flags in reported.items()
            for slot, parameter, flag in zip(page.layout.slots, page.parameters, flags.tolist(), strict=True)
            if parameter.requires_grad and not flag
        ]
        if unused:
            raise RuntimeError(
                f"parameters got no gradient on any rank: {', '.join(unused[:10])}{' …' if len(unused) > 10 else ''}. "
                "Freeze them, use them, or set zero_optimization.ignore_unused_parameters to true."
            )

    def discard(self) -> None:
        """Forget the unreduced gradients, as after an error in a backward. Waits for nobody."""
        self.forget_failed()
        self._accumulated = [_Local() for _ in self.pages]
        self._unreduced.clear()
        self.owed = False

    def forget_failed(self) -> None:
        """Free what a backward that raised has packed; called where no backward runs."""
        if self._running:
            # What was under way may still be written to; no rank waits for it any more.
            self._abandoned += [flight for backward in self._running.values() for flight in backward.flights]
            self._running.clear()

    @contextmanager
    def settings(self, sync: bool, scale: float) -> Iterator[None]:
        """Use ``sync`` and ``scale`` inside the context."""
        before = self.sync, self.scale
        self.sync, self.scale = sync, scale
        try:
            yield
        finally:
            self.sync, self.scale = before


def _hook(reducer: weakref.ref[Reducer], number: int, slot: int) -> Callable[[torch.Tensor], None]:
    def take_gradient(parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        alive = reducer()
        if gradient is not None and alive is not None:  # the graph may reach it with an undefined gradient
            alive.take(number, slot, gradient)

    return take_gradient


def _accumulate(page: Page, reduced: torch.Tensor, reported: list[int], rank: int) -> None:
    """Add the reduced gradient of a page, in its type, to the ``grad`` of its shards; a first one becomes a view."""
    for slot, shard, flag in zip(page.layout.slots, page.shards, reported, strict=True):
        if not flag:
            continue
        start, stop = page.layout.part(slot, rank)
        part = alias(reduced, start, (stop - start,)).to(shard.device)
        if shard.grad is None:
            shard.grad = part.to(shard)
        else:
            shard.grad.copy_(shard.grad.to(part.dtype).add_(part))
