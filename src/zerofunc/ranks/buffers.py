"""Flat memory below autograd: aliases with version counters of their own, and buffers that are used again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def below_transforms() -> Iterator[None]:
    """Run on plain tensors, seen by no transform, tracer, mode or autograd.

    A buffer that were allocated under ``make_fx`` would be traced; one allocated in inference mode could not be
    written to later.
    """
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        yield


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Like :func:`below_transforms`, for code that a transformed function calls, above functorch's levels."""
    with torch._C._DisableFuncTorch(), below_transforms():
        yield


def uncompiled(function: F) -> F:
    """The function, which ``torch.compile`` neither traces nor looks into: its graph is broken there.

    ``torch.compiler.disable`` does the same, but imports the compiler, which takes seconds.
    """
    function.__dict__["_torchdynamo_disable"] = True
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # here, and in what is called from here
    set_code_exec_strategy(function.__code__, skip)
    return function


def alias(flat: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor over ``flat``'s memory with a version counter of its own.

    A view would share the counter of the whole page, and changing one parameter would then forbid a backward through
    all others on its page.
    """
    strides = torch.empty(shape, device="meta").stride()
    return flat.new_empty(0).set_(flat.untyped_storage(), int(flat.storage_offset()) + offset, shape, strides)


def own_part(
    flat: torch.Tensor, start: int, shape: tuple[int, ...], stride: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Like :func:`alias`, with a storage that begins and ends where the tensor does.

    What is saved of a tensor is its storage; forward mode lays a tangent out like its primal, storage included; and
    offsets, as ``as_strided`` takes them, count from where the storage begins.
    """
    strides = torch.empty(shape, device="meta").stride() if stride is None else stride
    return from_dlpack(to_dlpack(flat.detach().as_strided(shape, strides, int(flat.storage_offset()) + start)))


def _references(buffer: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(buffer.untyped_storage()._cdata))


class BufferPool:
    """Flat buffers that are used again once nothing refers to their storage any more.

    Freed large blocks are slow to get back from the system on CPU, and hide the saving of ZeRO there.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._idle = _references(torch.empty(1))
        self.peak_bytes = 0

    def __deepcopy__(self, memo: dict[int, object]) -> BufferPool:
        """A pool of its own, empty."""
        return BufferPool()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, idle ones included."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def live_bytes(self) -> int:
        """Bytes of buffers that something still refers to."""
        return sum(buffer.nbytes for buffer in self._buffers if _references(buffer) > self._idle)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised 1-D buffer of ``numel`` elements; give it back by dropping every reference to it."""
        idle = [buffer for buffer in self._buffers if _references(buffer) <= self._idle]
        fits = [
            b for b in idle if b.dtype == dtype and b.device == device and numel <= b.numel() <= 1.25 * numel + 1024
        ]
        if fits:
            buffer = min(fits, key=torch.Tensor.numel)
            del idle, fits
        else:
            dropped = {id(buffer) for buffer in idle}
            del idle, fits
            self._buffers = [buffer for buffer in self._buffers if id(buffer) not in dropped]
            buffer = torch.empty(numel, dtype=dtype, device=device)
            self._buffers.append(buffer)
        taken = alias(buffer, 0, (numel,))
        self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return taken

    def clear(self) -> None:
        """Forget the idle buffers."""
        self._buffers = [buffer for buffer in self._buffers if _references(buffer) > self._idle]
