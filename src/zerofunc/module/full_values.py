"""Whole parameters: resident for a while, or as copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from zerofunc.module.sharding import place_of, sharding_of
from zerofunc.pages.page import Page
from zerofunc.pages.pager import Pager
from zerofunc.ranks.buffers import below_transforms


@contextmanager
def gathered(
    module_or_params: nn.Module | Iterable[torch.Tensor], write: bool = False, writer: int = 0
) -> Iterator[None]:
    """Collective. All parameters resident inside the context, so that reading them needs no communication.

    Ranks may run different programs inside, and ``data_ptr()`` works. At stages 0 to 2 they are resident anyway.

    Args:
        module_or_params: A module, or parameters of sharded modules.
        write: At exit, every rank takes over what one rank has written into these parameters (in place, under
            ``no_grad``); what others have written is lost.
        writer: That rank, among the data-parallel ranks.

    Raises:
        ValueError: If nothing of it is sharded, or there is no such rank.
    """
    is_module = isinstance(module_or_params, nn.Module)
    parameters = list(module_or_params.parameters() if is_module else module_or_params)  # type: ignore[union-attr,arg-type]
    pages: dict[Pager, dict[Page, None]] = {}
    for parameter in parameters:
        if (place := place_of(parameter)) is not None:
            pages.setdefault(place[0], {})[place[1].page] = None
    if not pages and parameters:
        raise ValueError("gathered() was given no parameter of a sharded module")
    for pager in pages:
        if not 0 <= writer < pager.axes.num_ranks:
            raise ValueError(f"writer is {writer}; expected a rank from 0 to {pager.axes.num_ranks - 1}")
    ordered = {pager: sorted(held, key=lambda page: page.layout.index) for pager, held in pages.items()}
    with ExitStack() as stack:
        for pager, held in ordered.items():
            stack.enter_context(pager.pinned(held))
        yield
        if write:
            for pager, held in ordered.items():
                _take_over(pager, writer, held)


def _take_over(pager: Pager, writer: int, pages: Iterable[Page]) -> None:
    """Collective. Replace the parameters and shards of some pages by what one rank's parameters hold."""
    with below_transforms():
        for page in pages:
            flat = pager.read(page)
            pager.axes.broadcast(flat, f"broadcast of {page.label}", writer)
            page.take_over(flat, range(len(page.shards)), pager.axes.shard.rank)
            if page.full is None:
                pager.wrote(page, flat, same_on_all_ranks=True)
            page.note_changes()


def full_state(module: nn.Module, rank: int | None = None, with_frozen: bool = True) -> dict[str, Any]:
    """Collective at stage 3. Copies on the CPU of what a module's ``state_dict()`` holds; tied ones share memory.

    Args:
        module: A sharded module.
        rank: The one rank that gets it, the others an empty dict; they never hold more than the resident pages. By
            default all get it.
        with_frozen: Parameters that require no gradient, too.

    Raises:
        ValueError: If there is no such rank.
    """
    axes = sharding_of(module).axes
    if rank is not None and not 0 <= rank < axes.num_ranks:
        raise ValueError(f"rank is {rank}; expected a rank from 0 to {axes.num_ranks - 1}")
    is_mine = rank in (None, axes.rank)
    copies: dict[int, Any] = {}
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and not (value.requires_grad or with_frozen):
            continue
        if id(value) not in copies:
            copy = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            copies[id(value)] = copy if is_mine else None
        state[name] = copies[id(value)]
    return state if is_mine else {}
