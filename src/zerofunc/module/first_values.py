"""First values: random numbers that are the same on all ranks, and values for modules built on the meta device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zerofunc.ranks.collectives import Axes


def home_device() -> torch.device:
    """Where tensors without a device get data: this process's accelerator, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


@contextmanager
def first_rank_numbers(axes: Axes) -> Iterator[None]:
    """Collective. Inside, PyTorch's generators draw on every rank what they draw on the first.

    Afterwards the generators of a rank that entered with another state than the first are where they were.
    """
    device = home_device()
    generators = [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]
    mine = [generator.get_rng_state() for generator in generators]
    firsts = [state.to(device, copy=True) for state in mine]
    for state in firsts:
        axes.broadcast(state, "the first rank's random state")
    differ = [not torch.equal(own, first.cpu()) for own, first in zip(mine, firsts, strict=True)]
    for generator, first in zip(generators, firsts, strict=True):
        generator.set_rng_state(first.cpu())
    try:
        yield
    finally:
        for generator, own, differs in zip(generators, mine, differ, strict=True):
            if differs:
                generator.set_rng_state(own)


def send_buffers(module: nn.Module, axes: Axes) -> None:
    """Collective. Give every rank the first rank's buffers; those that are the same already are not written to."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = {}
    for name, buffer in module.named_buffers():
        by_kind.setdefault((buffer.dtype, buffer.device), []).append((name, buffer))
    for named in by_kind.values() if axes.num_ranks > 1 else ():
        mine = torch.cat([buffer.reshape(-1) for _, buffer in named])
        firsts = mine.clone()
        names = ", ".join(f"{name} {list(buffer.shape)}" for name, buffer in named)
        axes.broadcast(firsts, f"broadcast of the first rank's buffers ({names})")
        for (_, buffer), first in zip(named, firsts.split([buffer.numel() for _, buffer in named]), strict=True):
            if not torch.equal(buffer, first.view_as(buffer)):
                buffer.copy_(first.view_as(buffer))


# -- the meta device --------------------------------------------------------------------------------------------------


def find_unfilled(module: nn.Module) -> list[tuple[nn.Module, list[Callable[[], Any]]]]:
    """Local. Modules whose own tensors are on the meta device, inner ones first, and what gives each its values.

    Those are its ``reset_parameters``, and the ``_init_weights`` of the nearest module around it, as ``transformers``
    and others have it.

    Raises:
        ValueError: If one has neither, or some of its tensors have values already, which those would overwrite.
    """
    found = []
    for path, inner in _inside_out(module, ""):
        tensors = {name: t for name, t in {**inner._parameters, **inner._buffers}.items() if t is not None}
        missing = [name for name, tensor in tensors.items() if tensor.is_meta]
        if not missing:
            continue
        what = f"{', '.join(missing)} of {path or 'the module'} ({type(inner).__name__}) on the meta device"
        if len(missing) < len(tensors):
            raise ValueError(f"{what}, while its other tensors have values; give values to all of them, or to none")
        fillers = _fillers(module, path, inner)
        if not fillers:
            raise ValueError(
                f"{what}, and neither a reset_parameters() of its own nor an _init_weights(module) of a module around "
                "it to give values. Load them before sharding, with zerofunc.load_safetensors(module, files), or build "
                "the module inside zerofunc.Init() instead of on the meta device."
            )
        found.append((inner, fillers))
    return found


def _inside_out(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _inside_out(child, f"{path}.{name}" if path else name)
    yield path, module


def _fillers(root: nn.Module, path: str, inner: nn.Module) -> list[Callable[[], Any]]:
    resets = [getattr(inner, name, None) for name in ("reset_parameters", "_reset_parameters")]
    fillers: list[Callable[[], Any]] = [reset for reset in resets if callable(reset)][:1]
    names = path.split(".") if path else []
    for depth in range(len(names), -1, -1):
        initialize = getattr(root.get_submodule(".".join(names[:depth])), "_init_weights", None)
        if callable(initialize) and len(inspect.signature(initialize).parameters) == 1:
            return [*fillers, functools.partial(initialize, inner)]
    return fillers


def give_memory(module: nn.Module) -> None:
    """Local. Replace a module's own buffers on the meta device by ones that await values: NaN, or zero."""
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            value = torch.nan if buffer.is_floating_point() else 0
            module._buffers[name] = torch.full(buffer.shape, value, dtype=buffer.dtype, device=home_device())
