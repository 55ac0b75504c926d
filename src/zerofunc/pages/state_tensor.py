"""What a module's ``state_dict()`` holds of stage-3 parameters: live like they are, and with an address if asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zerofunc.pages.paged_tensor import PagedTensor


class StateTensor(PagedTensor):
    """An entry of a ``state_dict()``, or a view of one.

    Who writes files from memory (safetensors) asks for addresses: an entry has that of a copy, shared by tied entries,
    as theirs are in plain PyTorch. It is made then, anew after the shards have changed, and lives as long as the entry.
    """

    _copied: tuple[int, torch.Tensor] | None = None

    def _copy(self) -> torch.Tensor:
        version = self._place.page.versions()
        if self._copied is None or self._copied[0] != version:
            self._copied = version, self._shared_copy()
        return self._copied[1]

    def data_ptr(self) -> int:
        """Collective unless resident. Address of the copy."""
        return self._copy().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Collective unless resident. Storage of the copy."""
        return self._copy().untyped_storage()


def give_addresses(module: nn.Module) -> None:
    """Local. From now on such tensors are what ``state_dict()`` of a module, and of those inside, holds."""
    for inner in module.modules():
        if not isinstance(inner, torch.jit.ScriptModule):  # which takes no hooks
            inner.register_state_dict_post_hook(_give_addresses)


def _give_addresses(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
    for name in module._parameters:
        entry = state_dict.get(prefix + name)
        if type(entry) is PagedTensor and not isinstance(entry, nn.Parameter):
            entry.__class__ = StateTensor
