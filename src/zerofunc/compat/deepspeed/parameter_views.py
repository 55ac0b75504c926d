"""The ``ds_*`` attributes of a stage-3 parameter, by which scripts recognise one."""

from __future__ import annotations

import enum

import torch
from torch import nn

from zerofunc.pages.paged_tensor import PagedTensor

__all__ = ["ZeroParamStatus", "ZeroParameter", "with_views"]


class ZeroParamStatus(enum.Enum):
    """Where the data of a parameter is."""

    AVAILABLE = 1
    """On every rank, inside ``GatheredParameters``."""
    NOT_AVAILABLE = 2
    """Spread over the ranks; reading gathers it."""
    INFLIGHT = 3
    """Never reported here."""


class ZeroParameter(PagedTensor):
    """A stage-3 parameter with DeepSpeed's views of it, all read-only."""

    @property
    def ds_id(self) -> int:
        """A number that no other parameter of this process has."""
        return id(self)

    @property
    def ds_shape(self) -> torch.Size:
        """Its full shape, as ``shape``."""
        return self.shape

    @property
    def ds_numel(self) -> int:
        """Its number of elements, as ``numel()``."""
        return self.numel()

    @property
    def ds_tensor(self) -> torch.Tensor:
        """This rank's part of its master, 1-D."""
        return self._place.shard.detach()

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Whether it is held resident now."""
        is_available = self._pager.is_pinned(self._place.page) or self.ds_persist
        return ZeroParamStatus.AVAILABLE if is_available else ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_persist(self) -> bool:
        """Whether it always stays resident."""
        return self._pager.is_persistent(self._place.page)


def with_views(module: nn.Module) -> None:
    """Local. Give the sharded parameters of a module these views; each stays the same object."""
    for parameter in module.parameters():
        if isinstance(parameter, PagedTensor):
            parameter.__class__ = ZeroParameter  # type: ignore[assignment]
