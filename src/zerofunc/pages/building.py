"""Pages of a module: built with the first rank's values, and put in the place of its parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from zerofunc.pages.layout import PageLayout
from zerofunc.pages.page import Page, Place
from zerofunc.pages.paged_tensor import PagedTensor
from zerofunc.pages.pager import Pager
from zerofunc.pages.parts import as_shard
from zerofunc.ranks.buffers import own_part
from zerofunc.ranks.collectives import Axes

PIECE_NUMEL = 1 << 20  # elements of a first value that travel at a time, so that no rank copies a large parameter whole


def build_page(
    layout: PageLayout,
    parameters: list[nn.Parameter],
    stage: int,
    axes: Axes,
    low_precision: bool,
    on_cpu: bool,
    are_alike: bool = False,
) -> Page:
    """Collective. One page with the first rank's values; local where they are said to be alike on all ranks.

    Frozen parameters that are given in low precision have no masters in a higher one until they are thawed.
    """
    dtype, device, is_trained = layout.key
    trained_dtype = torch.float32 if _is_low(dtype) and not low_precision else dtype
    has_masters = is_trained or not all(_is_low(parameter.dtype) for parameter in parameters)
    master_dtype = trained_dtype if has_masters else dtype
    master_device = torch.device("cpu") if on_cpu else device
    first = axes.shard.rank * layout.shard_numel
    mine = slice(first, first + layout.shard_numel)
    held = mine if stage == 3 else slice(0, layout.padded_numel)
    values = torch.zeros(held.stop - held.start, dtype=master_dtype, device=master_device if stage == 3 else device)
    for slot, parameter in zip(layout.slots, parameters, strict=True):
        position = slot.offset - held.start
        for piece in _first_values(parameter, axes, device, master_dtype, slot.name, are_alike):
            start, stop = max(position, 0), min(position + piece.numel(), values.numel())
            if start < stop:
                values[start:stop].copy_(piece[start - position : stop - position])
            position += piece.numel()
            del piece  # before the next parameter is gathered
    full, master = (None, values) if stage == 3 else (values.to(dtype), values[mine])
    if full is not None and (dtype != master_dtype or device != master_device):
        master = master.to(master_device, copy=True)
    page = Page(layout, dtype, master, full=full, label=layout.label, trained_dtype=trained_dtype)
    for index, parameter in enumerate(parameters):
        mine = layout.in_shard(index, axes.shard.rank)
        part = own_part(master, mine.start, (mine.stop - mine.start,)).requires_grad_(parameter.requires_grad)
        page.shards.append(as_shard(part, axes.shard))
    return page


def _is_low(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


def _first_values(
    parameter: nn.Parameter, axes: Axes, device: torch.device, dtype: torch.dtype, name: str, are_alike: bool
) -> Iterator[torch.Tensor]:
    """Collective. The first rank's values of a parameter, 1-D, piece by piece; NaN on the meta device."""
    if parameter.is_meta:
        nothing = torch.full((), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
        yield nothing.expand(parameter.numel())
    elif isinstance(parameter, PagedTensor):  # of Init, where they are the same on all ranks
        yield parameter._value().reshape(-1)
    else:
        for piece in parameter.detach().reshape(-1).split(PIECE_NUMEL):
            if axes.num_ranks > 1 and piece.numel() and not are_alike:
                piece = piece.to(device, dtype, copy=True)
                axes.broadcast(piece, f"first broadcast of {name!r}")
            yield piece


def replace_parameters(page: Page, parameters: list[nn.Parameter], pager: Pager) -> None:
    """Local. Make parameters, their identity and attributes kept, those of a page."""
    for place, parameter in zip(page.places, parameters, strict=True):
        slot = place.slot
        if page.full is not None and not parameter.is_meta and not isinstance(parameter, PagedTensor):
            parameter.grad = None
            parameter.data = own_part(page.full, slot.offset, slot.shape)  # hooks and graphs of it stay as they are
        else:
            _swap_for(place, parameter, pager)
        page.parameters.append(parameter)
    page.note_changes()


def _swap_for(place: Place, parameter: nn.Parameter, pager: Pager) -> None:
    """Local. Give a parameter another content than an ordinary tensor's, or than it had on the meta device."""
    page, slot = place.page, place.slot
    new = PagedTensor(pager, place) if page.full is None else own_part(page.full, slot.offset, slot.shape)
    replacement = nn.Parameter(new, parameter.requires_grad)
    del new
    try:
        swap(parameter, replacement)
    except RuntimeError as error:
        raise ValueError(
            f"parameter {slot.name!r} is in use by a graph, a scripted module or a weak reference ({error}). Shard the "
            "module before its first forward, script no part that has parameters (torch.jit holds them itself; stages "
            "0 to 2 take such parts), and compute in forward() what a module keeps of its parameters' values."
        ) from error


def swap(parameter: torch.Tensor, replacement: torch.Tensor) -> None:
    """Give ``parameter`` the content of ``replacement``, its identity and attributes kept.

    ``torch.utils.swap_tensors`` refuses weak references. nn.RNN holds some to its weights, which shall see the change.

    Raises:
        RuntimeError: If something else refers to the content, such as a graph.
    """
    of_content = {*PagedTensor.__annotations__, "_is_param"}
    vars(replacement).update({k: v for k, v in vars(parameter).items() if k not in of_content})
    references = parameter._use_count()  # type: ignore[attr-defined]
    if not weakref.getweakrefs(parameter):
        torch.utils.swap_tensors(parameter, replacement)
    elif references > 1:
        raise RuntimeError(f"{references} references")
    else:
        kind, attributes = type(parameter), parameter.__dict__
        parameter.__class__, parameter.__dict__ = type(replacement), replacement.__dict__
        replacement.__class__, replacement.__dict__ = kind, attributes
        torch._C._swap_tensor_impl(parameter, replacement)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # hooks are the content's, their list is not
        if getattr(parameter, name):
            setattr(parameter, name, getattr(parameter, name))


def release_derived(module: nn.Module) -> None:
    """Local. Cut off what ``torch.nn.utils.weight_norm`` and ``spectral_norm`` keep, and make anew in every forward."""
    for inner in module.modules():
        for hook in inner._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                setattr(inner, hook.name, getattr(inner, hook.name).detach())
