"""Pages: which parameters travel together, and where each lies. Pure arithmetic: no tensors, no ranks' state.

A page is a run of parameters in one flat buffer, padded so that it splits evenly over the ranks of the shard axis.
A rank's shard of a page is contiguous, so that one all-gather without copies rebuilds the page.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ParameterSpec:
    """What the layout needs to know of a parameter.

    Attributes:
        name: Its first name in the module.
        shape: Its logical shape.
        key: Parameters of different keys never share a page (dtype, device, ``requires_grad``, optimizer group).
        unsplit: Name of the unsplit module that it belongs to; those parameters share one page. None for others.
    """

    name: str
    shape: torch.Size
    key: Any
    unsplit: str | None = None


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its page: ``flat[offset : offset + numel].view(shape)``."""

    name: str
    shape: torch.Size
    offset: int

    @functools.cached_property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return self.shape.numel()

    @functools.cached_property
    def stride(self) -> tuple[int, ...]:
        """Strides of the contiguous parameter."""
        return torch.empty(self.shape, device="meta").stride()


@dataclass(frozen=True)
class PageLayout:
    """One page: its slots in order, and how it is divided.

    Attributes:
        index: The page's place in the order that every rank follows.
        slots: The parameters on it.
        key: The key that all of them share.
        numel: Elements in use, without padding.
        num_shards: Number of ranks that the page is split over.
        unsplit: Name of the unsplit module that it belongs to.
    """

    index: int
    slots: tuple[Slot, ...]
    key: Any
    numel: int
    num_shards: int
    unsplit: str | None = None

    @property
    def label(self) -> str:
        """What error messages call the page: its number and its first parameters."""
        names = ", ".join(slot.name for slot in self.slots[:3]) + (", …" if len(self.slots) > 3 else "")
        return f"page {self.index} ({names})"

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard: an even split, rounded up."""
        return -(-self.numel // self.num_shards)

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer, with padding."""
        return self.shard_numel * self.num_shards

    def in_page(self, index: int, rank: int) -> slice:
        """Where the part of a parameter that ``rank`` holds lies in the page; empty where that rank has no element."""
        slot, first = self.slots[index], rank * self.shard_numel
        last = first + self.shard_numel
        return slice(min(max(slot.offset, first), last), min(max(slot.offset + slot.numel, first), last))

    def in_shard(self, index: int, rank: int) -> slice:
        """Where the same part lies in the shard of ``rank``."""
        part, first = self.in_page(index, rank), rank * self.shard_numel
        return slice(part.start - first, part.stop - first)

    def in_parameter(self, index: int, rank: int) -> slice:
        """Which elements of the flattened parameter it has."""
        part, slot = self.in_page(index, rank), self.slots[index]
        start = min(max(part.start - slot.offset, 0), slot.numel)
        return slice(start, start + part.stop - part.start)


def build_pages(parameters: Iterable[ParameterSpec], num_shards: int, page_numel: int) -> tuple[PageLayout, ...]:
    """Pack parameters into pages, in registration order.

    Each key has one open page; a parameter goes there unless that would exceed ``page_numel``, then a new page is
    opened. A parameter larger than a page has a page of its own. All parameters of an unsplit module with the same
    key share one page whatever its size.

    Args:
        parameters: In registration order, tied ones once.
        num_shards: Number of ranks on the shard axis.
        page_numel: The most elements on a page of several parameters.

    Returns:
        The pages, ordered by their first parameter.
    """
    groups: list[list[ParameterSpec]] = []
    open_page: dict[Hashable, list[ParameterSpec]] = {}
    filled: dict[Hashable, int] = {}
    for spec in parameters:
        key = (spec.key, spec.unsplit)
        numel = spec.shape.numel()
        if key not in open_page or (spec.unsplit is None and filled[key] + numel > page_numel):
            open_page[key], filled[key] = [], 0
            groups.append(open_page[key])
        open_page[key].append(spec)
        filled[key] += numel
    return tuple(_page(index, specs, num_shards) for index, specs in enumerate(groups))


def _page(index: int, specs: list[ParameterSpec], num_shards: int) -> PageLayout:
    slots, offset = [], 0
    for spec in specs:
        slots.append(Slot(spec.name, spec.shape, offset))
        offset += spec.shape.numel()
    return PageLayout(index, tuple(slots), specs[0].key, offset, num_shards, specs[0].unsplit)
