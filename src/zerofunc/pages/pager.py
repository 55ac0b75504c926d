"""Residency of gathered pages: fault (all-gather), prefetch, evict.

What is gathered and what is evicted depends on the sequence of reads alone, so that ranks which run the same program
issue the same collectives in the same order. A gathered copy is valid while the version counters of its shards are
unchanged: an optimizer step invalidates it without being told.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zerofunc.pages.page import Page
from zerofunc.pages.read_order import ReadOrder
from zerofunc.ranks.buffers import BufferPool, below_transforms, uncompiled
from zerofunc.ranks.collectives import Axes, Done, Work


@dataclass
class _Resident:
    buffer: torch.Tensor
    version: int
    work: Work

    def wait(self) -> None:
        """Block until the page is here. A work is waited for once: gloo's would wait for another message."""
        self.work.wait()
        self.work = Done()


class Pager:
    """Gathered pages within a budget, the least recently used evicted first.

    Attributes:
        resident_bytes: The budget. One page is resident whatever its size.
        persistence_bytes: A module's pages of at most this size are never evicted,
        persistence_limit_bytes: as long as they are not more than this together.
        prefetch: Start to gather the page that followed the current two the last two times.
    """

    def __init__(
        self,
        axes: Axes,
        resident_bytes: int,
        persistence_bytes: int = 0,
        prefetch: bool = True,
        persistence_limit_bytes: float = math.inf,
    ) -> None:
        self.axes = axes
        self.resident_bytes = resident_bytes
        self.persistence_bytes = persistence_bytes
        self.persistence_limit_bytes = persistence_limit_bytes
        self.prefetch = prefetch
        self.pool = BufferPool()
        self._resident: OrderedDict[Page, _Resident] = OrderedDict()
        self._pinned: dict[Page, int] = {}
        self._persistent: set[Page] = set()
        self._uneven: set[Page] = set()  # pinned pages whose gathered copies differ between ranks
        self._order = ReadOrder()

    def __deepcopy__(self, memo: dict[int, object]) -> Pager:
        """A pager of its own over the same ranks, nothing resident."""
        limits = self.persistence_bytes, self.prefetch, self.persistence_limit_bytes
        return Pager(self.axes, self.resident_bytes, *limits)

    def adopt(self, pages: Iterable[Page]) -> None:
        """Local. Say which pages are a module's own.

        The small ones, first ones first, will not be evicted; those of one unsplit module are gathered together.
        """
        held = 0
        units: dict[str, list[Page]] = {}
        for page in pages:
            if page.layout.unsplit is not None:
                page.unit = units.setdefault(page.layout.unsplit, [])
                page.unit.append(page)
            if page.gathered_bytes <= min(self.persistence_bytes, self.persistence_limit_bytes - held):
                held += page.gathered_bytes
                self._persistent.add(page)

    @uncompiled
    def read(self, page: Page) -> torch.Tensor:
        """Collective unless resident. The gathered page, 1-D [padded_numel].

        Raises:
            RuntimeError: If a backward reads a page whose shards were changed since its forward.
            DivergenceError: If ranks do not read the same pages in the same order.
        """
        if page.full is not None:
            return page.full
        version = page.versions()
        if version != page.noted:
            self._note_changes(page)
        if page.is_its_own_copy:
            return page.master
        resident = self._resident.get(page)
        if resident is None or resident.version != version or (page.unit and not self.is_resident(page)):
            with below_transforms():
                self._gather(page)
            resident = self._resident[page]
        first = page.unit[0] if page.unit else page
        if self._order.last is not first and page not in self._pinned:  # ranks may read pinned pages in any order
            for member in self._unit(page):
                if member in self._resident:
                    self._resident.move_to_end(member)
            if page.shards and self.prefetch:  # a page of given values is not read again in the next step
                following = self._order.next_after(first)
                if following is not None:
                    self._prefetch(first, following)
        resident.wait()
        return resident.buffer

    def is_resident(self, page: Page) -> bool:
        """Whether reading the page needs no communication."""
        return all([self._is_valid(member) for member in self._unit(page)])

    def _is_valid(self, page: Page) -> bool:
        resident = self._resident.get(page)
        return page.is_its_own_copy or (resident is not None and resident.version == page.versions())

    def _unit(self, page: Page) -> list[Page]:
        """The pages that are gathered when this one is read; a pinned page must need no other."""
        return page.unit if page.unit and page not in self._pinned else [page]

    def wrote(self, page: Page, buffer: torch.Tensor, same_on_all_ranks: bool) -> None:
        """Tell that ``buffer`` and this rank's shard were changed alike; otherwise the copy is gathered anew."""
        resident = self._resident.get(page)
        if resident is not None and resident.buffer is buffer and (same_on_all_ranks or page in self._pinned):
            resident.version = page.versions()
        else:
            self._drop(page)
        if page in self._pinned and not same_on_all_ranks:
            self._uneven.add(page)
        page.note_changes()

    @contextmanager
    def pinned(self, pages: list[Page]) -> Iterator[None]:
        """Collective. Keep pages resident inside the context, whatever the budget."""
        for page in pages:
            self._pinned[page] = self._pinned.get(page, 0) + 1
        try:
            for page in pages:
                self.read(page)
            yield
        finally:
            for page in pages:
                self._pinned[page] -= 1
                if not self._pinned[page]:
                    del self._pinned[page]
            for page in self._uneven - self._pinned.keys():
                self._drop(page)
            self._uneven &= self._pinned.keys()
            self._make_room(0)

    def release(self) -> None:
        """Local, the same on all ranks. Evict every page that is not pinned, and free its buffer."""
        for page in [page for page in self._resident if page not in self._pinned]:
            self._drop(page)
        self.pool.clear()

    def is_persistent(self, page: Page) -> bool:
        """Whether the page, once gathered, is never evicted."""
        return page in self._persistent

    def is_pinned(self, page: Page) -> bool:
        """Whether the page is held resident by a ``gathered`` context."""
        return page in self._pinned

    def _note_changes(self, page: Page) -> None:
        """An optimizer's step is noted when it ends, and autograd refuses a stale backward; this is for the rest."""
        page.note_changes()
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{page.label}: a shard was changed between a forward and its backward; the gradient would mix old "
                "activations with new weights. Call backward before changing the shards."
            )

    def _gather(self, page: Page, keep: Iterable[Page] = ()) -> None:
        """Collective. Start to gather what is not resident of the page's unit, without evicting those to keep."""
        unit = self._unit(page)
        missing = [member for member in unit if not self._is_valid(member)]
        for member in missing:
            self._drop(member)
        self._make_room(sum(member.gathered_bytes for member in missing), keep=[*unit, *keep])
        for member in missing:
            buffer = self.pool.take(member.layout.padded_numel, member.dtype, member.device)
            self._resident[member] = _Resident(buffer, member.versions(), self._start_gather(member, buffer))

    def _start_gather(self, page: Page, buffer: torch.Tensor) -> Work:
        mine, label = page.master.to(page.device, page.dtype), f"gather of {page.label}"
        if mine.dim() == 1:
            return self.axes.shard.all_gather(buffer, mine, label)
        copies, numel = mine.shape
        pieces = self.pool.take(page.layout.num_shards * mine.numel(), page.dtype, mine.device)
        self.axes.shard.all_gather(pieces, mine.reshape(-1), label).wait()
        rows = pieces.view(-1, copies, numel).transpose(0, 1).reshape(copies, -1)
        for slot in page.layout.slots:
            first, last = slot.offset // copies, (slot.offset + slot.numel) // copies
            buffer[slot.offset : slot.offset + slot.numel].view(copies, -1).copy_(rows[:, first:last])
        return Done()

    def _drop(self, page: Page) -> None:
        resident = self._resident.pop(page, None)
        if resident is not None:
            resident.wait()  # its buffer is being written to

    def _make_room(self, wanted: int, keep: Iterable[Page] = ()) -> None:
        spared = {*keep, *self._pinned, *self._persistent}
        held = sum(page.gathered_bytes for page in self._resident)
        for page in list(self._resident):
            if held + wanted <= self.resident_bytes:
                return
            if page not in spared:
                held -= page.gathered_bytes
                self._drop(page)

    def _prefetch(self, page: Page, following: Page) -> None:
        """Start to gather the page that will be read next, if there is room for both."""
        if self.is_resident(following):
            return
        stays = [other for other in self._resident if other in self._pinned or other in self._persistent]
        together = {*self._unit(page), *self._unit(following), *stays}
        if sum(member.gathered_bytes for member in together) <= self.resident_bytes:
            with below_transforms():
                self._gather(following, keep=self._unit(page))
