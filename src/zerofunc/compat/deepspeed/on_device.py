"""``OnDevice``: build a module on a device and in a data type, such as half precision on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["OnDevice"]


@contextmanager
def OnDevice(dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> Iterator[None]:
    """Local. New tensors inside the context are on ``device``, and floating-point ones in ``dtype``.

    ``zerofunc.initialize`` takes no parameters on the meta device: give them data first, or use ``zero.Init``.
    """
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
