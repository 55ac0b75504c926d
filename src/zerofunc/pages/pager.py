"""Residency of gathered pages: fault (all-gather), prefetch, evict.

What is gathered and what is evicted depends on the sequence of reads alone, so that ranks which run the same program
issue the same collectives in the same order. A gathered copy is valid while the version counters of its shards are
unchanged: an optimizer step invalidates it without being told.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch

from zerofunc.pages.layout import PageLayout, Slot
from zerofunc.pages.parts import Shard, as_shard
from zerofunc.ranks.buffers import BufferPool, below_transforms, own_part, uncompiled
from zerofunc.ranks.collectives import Axes, Done, Work


@dataclass(eq=False)
class Page:
    """One page's state on this rank.

    Attributes:
        layout: Which parameters lie where.
        dtype: Data type of the parameters as the module sees them.
        master: This rank's shard, 1-D [layout.shard_numel], padding included. The state itself. A page of given
            values, in parameter space, may hold several copies: 2-D, and slots are those of [copies, *shape].
        shards: For each slot, a leaf tensor over its part of ``master``; what optimizers update. None in parameter
            space.
        parameters: For each slot, the module's parameter.
        full: The full parameters, 1-D [layout.padded_numel], where they are kept (stages 0 to 2).
        seen: For each slot, the last versions of (shard, parameter) that were noted.
        label: What error messages call the page.
        copies: Memory of full parameters that were copied, by name and version, while something uses it.
        unit: The pages of an unsplit module that has several (frozen and trained, of two data types), this one
            included. A rank that reads one gathers all: ranks may use different parts of the module.
        trained_dtype: Data type of ``master`` as soon as a parameter is trained.
        built: A checksum of what this rank had of a page of :class:`zerofunc.Init`, and the page's version then.
    """

    layout: PageLayout
    dtype: torch.dtype
    master: torch.Tensor
    shards: list[Shard] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    full: torch.Tensor | None = None
    seen: list[tuple[int, int]] = field(default_factory=list)
    noted: int = 0
    label: str = ""
    copies: WeakValueDictionary[tuple[str, int], torch.UntypedStorage] = field(default_factory=WeakValueDictionary)
    unit: list[Page] = field(default_factory=list)
    trained_dtype: torch.dtype | None = None
    built: tuple[int, int] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Page:
        """A page of its own with equal values (stage 3)."""
        assert self.full is None
        page = Page(self.layout, self.dtype, self.master.clone(), label=self.label, trained_dtype=self.trained_dtype)
        memo[id(self)] = page
        offsets = itertools.accumulate((old.numel() for old in self.shards), initial=0)
        pairs = zip(offsets, self.shards, strict=False)
        page.shards = [
            as_shard(own_part(page.master, start, s.shape).requires_grad_(s.requires_grad), s._axis)
            for start, s in pairs
        ]
        page.parameters = [copy.deepcopy(parameter, memo) for parameter in self.parameters]
        page.note_changes()
        return page

    def give_masters(self) -> None:
        """Local. Where a frozen page is trained from now on: keep this rank's shard in the precision of training."""
        if self.trained_dtype in (None, self.master.dtype) or not any([p.requires_grad for p in self.parameters]):
            return
        with below_transforms():
            self.master = self.master.to(self.trained_dtype)
            start = 0
            for shard in self.shards:
                stop = start + len(shard)
                torch.Tensor.data.__set__(shard, own_part(self.master, start, (stop - start,)))  # type: ignore[attr-defined]
                start = stop

    def moved_slot(self) -> Slot | None:
        """Local. A parameter that is an ordinary tensor and does not lie in ``full`` any more; None if all do."""
        if self.full is None:
            return None
        first, itemsize = self.full.data_ptr(), self.full.itemsize
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            if slot.numel and parameter.data_ptr() != first + slot.offset * itemsize:
                return slot
        return None

    def versions(self) -> int:
        """A number that grows whenever a shard of the page is changed."""
        return sum([shard._version for shard in self.shards])

    @property
    def is_its_own_copy(self) -> bool:
        """Whether the shard is the whole page, in the parameters' data type, so that nothing needs gathering."""
        return self.layout.num_shards == 1 and self.is_aliased and self.master.dim() == 1

    @property
    def is_aliased(self) -> bool:
        """Whether masters are of the parameters' own data type, where the module computes."""
        return self.master.dtype == self.dtype and self.master.device == self.device

    @property
    def device(self) -> torch.device:
        """Where the module computes; masters may be elsewhere."""
        device: torch.device = self.layout.key[1]
        return device

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered page."""
        return self.layout.padded_numel * self.dtype.itemsize

    def note_changes(self) -> tuple[list[int], list[int]]:
        """Slots whose shard, and slots whose parameter, was written since last time; autograd is told of the former."""
        now = [(shard._version, p._version) for shard, p in zip(self.shards, self.parameters, strict=True)]
        pairs = list(enumerate(zip(self.seen or [(0, 0)] * len(now), now, strict=True)))
        shards = [index for index, (old, new) in pairs if old[0] != new[0]]
        parameters = [index for index, (old, new) in pairs if old[1] != new[1]]
        if shards:
            torch.autograd.graph.increment_version([self.parameters[index] for index in shards])
        self.seen = [(shard._version, p._version) for shard, p in zip(self.shards, self.parameters, strict=True)]
        self.noted = self.versions()
        return shards, parameters

    def part(self, index: int, rank: int) -> slice:
        """Where this rank's part of a slot lies in the full page, 1-D."""
        start, stop = self.layout.part(self.layout.slots[index], rank)
        first = rank * self.layout.shard_numel
        return slice(first + start, first + stop)

    def take_over(self, flat: torch.Tensor, indices: Iterable[int], rank: int) -> None:
        """Copy this rank's part of ``flat`` into the shards of some slots; unchanged digits of a master are kept."""
        for index in indices:
            shard, part = self.shards[index].detach(), flat[self.part(index, rank)].to(self.master.device)
            if shard.dtype != part.dtype:
                shard.copy_(torch.where(shard.to(part.dtype) == part, shard, part.to(shard.dtype)))
            elif not shard.numel() or shard.data_ptr() != part.data_ptr():
                shard.copy_(part)
            torch.autograd.graph.increment_version(self.shards[index])  # which no operator inside a dispatch does


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
        self._successor: dict[tuple[Page | None, Page], tuple[Page, bool]] = {}  # and whether it was so twice
        self._recent: tuple[Page | None, Page | None] = (None, None)

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
        if self._recent[1] is not first and page not in self._pinned:  # ranks may read pinned pages in any order
            for member in self._unit(page):
                if member in self._resident:
                    self._resident.move_to_end(member)
            if page.shards:  # a page of given values is not read again in the next step
                self._turn_to(first)
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

    def take_from(self, rank: int, pages: Iterable[Page]) -> None:
        """Collective. Replace the parameters and shards of some pages by what one rank's parameters hold."""
        with below_transforms():
            for page in pages:
                flat = self.read(page)
                self.axes.broadcast(flat, f"broadcast of {page.label}", rank)
                page.take_over(flat, range(len(page.shards)), self.axes.shard.rank)
                if page.full is None:
                    self.wrote(page, flat, same_on_all_ranks=True)
                page.note_changes()

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

    def _turn_to(self, page: Page) -> None:
        """Learn which page followed the last two (a forward and its backward run opposite ways), and prefetch.

        Only a page that followed twice in a row is gathered ahead: a wrong guess would cost a gather and an eviction.
        """
        if not self.prefetch:  # nothing to learn for, and what is learnt keeps pages alive
            return
        before, last = self._recent
        if last is not None:
            known = self._successor.get((before, last))
            self._successor[(before, last)] = (page, known is not None and known[0] is page)
        self._recent = (last, page)
        following, is_sure = self._successor.get((last, page), (page, False))
        if not is_sure or self.is_resident(following):
            return
        stays = [other for other in self._resident if other in self._pinned or other in self._persistent]
        together = {*self._unit(page), *self._unit(following), *stays}
        if sum(member.gathered_bytes for member in together) <= self.resident_bytes:
            with below_transforms():
                self._gather(following, keep=self._unit(page))
