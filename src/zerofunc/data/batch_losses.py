"""From a batch of a loader to the loss of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

LossFunction = Callable[[nn.Module, Any], torch.Tensor]


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on the device."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def loss_of(module: nn.Module, batch: Any, loss_fn: LossFunction | None = None) -> torch.Tensor:
    """The module's loss of a batch.

    Args:
        module: Called with the batch, or its entries (tuple, list), or its entries by name (mapping).
        batch: What the loader gave.
        loss_fn: ``(module, batch) -> loss``. By default the module returns the loss: by itself, as ``.loss``, or first
            in a tuple.

    Raises:
        ValueError: If it returns none of these.
    """
    if loss_fn is not None:
        return loss_fn(module, batch)
    if isinstance(batch, Mapping):
        result = module(**batch)
    else:
        result = module(*batch) if isinstance(batch, tuple | list) else module(batch)
    loss = result[0] if isinstance(result, tuple | list) else getattr(result, "loss", result)
    if not isinstance(loss, torch.Tensor):
        raise ValueError(f"the module returned {type(result).__name__}, which holds no loss; give loss_fn")
    return loss
