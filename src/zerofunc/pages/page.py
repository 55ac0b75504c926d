"""A page: parameters that travel together, what this rank holds of them, and the place of each."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch

from zerofunc.pages.layout import PageLayout, Slot
from zerofunc.pages.parts import Shard, as_shard
from zerofunc.ranks.buffers import below_transforms, own_part


@dataclass(frozen=True)
class Place:
    """Where a parameter is kept: which one it is of which page. A part of it, maybe none, lies in every rank's shard.

    Attributes:
        page: The page.
        index: The parameter's number on it.
    """

    page: Page
    index: int

    @functools.cached_property
    def slot(self) -> Slot:
        """Its name, its shape, and where it begins in the page."""
        return self.page.layout.slots[self.index]

    @property
    def name(self) -> str:
        """The parameter's first name in the module."""
        return self.slot.name

    @property
    def shape(self) -> torch.Size:
        """Shape of the full parameter."""
        return self.slot.shape

    @property
    def shard(self) -> Shard:
        """This rank's part of the parameter, 1-D: the leaf that an optimizer updates."""
        return self.page.shards[self.index]

    @property
    def parameter(self) -> torch.Tensor:
        """The module's parameter."""
        return self.page.parameters[self.index]

    def range(self, rank: int) -> slice:
        """Which elements of the flattened parameter the shard of ``rank`` holds."""
        return self.page.layout.in_parameter(self.index, rank)


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
        for index, shard in enumerate(self.shards):
            part = own_part(page.master, self._start(index), shard.shape)
            page.shards.append(as_shard(part.requires_grad_(shard.requires_grad), shard._axis))
        page.parameters = [copy.deepcopy(parameter, memo) for parameter in self.parameters]
        page.note_changes()
        return page

    def give_masters(self) -> None:
        """Local. Where a frozen page is trained from now on: keep this rank's shard in the precision of training."""
        if self.trained_dtype in (None, self.master.dtype) or not any([p.requires_grad for p in self.parameters]):
            return
        with below_transforms():
            self.master = self.master.to(self.trained_dtype)
            for index, shard in enumerate(self.shards):
                part = own_part(self.master, self._start(index), shard.shape)
                torch.Tensor.data.__set__(shard, part)  # type: ignore[attr-defined]

    def _start(self, index: int) -> int:
        """Where a shard begins in ``master``."""
        return self.layout.in_shard(index, self.shards[index]._axis.rank).start

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
    def places(self) -> list[Place]:
        """The place of each of its parameters."""
        return [Place(self, index) for index in range(len(self.layout.slots))]

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

    def take_over(self, flat: torch.Tensor, indices: Iterable[int], rank: int) -> None:
        """Copy this rank's part of ``flat`` into the shards of some slots; unchanged digits of a master are kept."""
        for index in indices:
            shard, part = self.shards[index].detach(), flat[self.layout.in_page(index, rank)].to(self.master.device)
            if shard.dtype != part.dtype:
                shard.copy_(torch.where(shard.to(part.dtype) == part, shard, part.to(shard.dtype)))
            elif not shard.numel() or shard.data_ptr() != part.data_ptr():
                shard.copy_(part)
            torch.autograd.graph.increment_version(self.shards[index])  # which no operator inside a dispatch does
