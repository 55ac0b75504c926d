"""``deepspeed.utils.zero_to_fp32``: full float32 weights from checkpoints of zerofunc, in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofunc.saving.convert import convert, read_weights
from zerofunc.saving.files import write_pickled

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

Folder = str | os.PathLike[str]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Folder,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Weights, in float32, and buffers in full, on the CPU. Tied ones share memory; ``lazy_mode`` changes nothing.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged.
        ValueError: If frozen parameters shall be left out, which is decided when a checkpoint is saved.
    """
    if exclude_frozen_parameters:
        raise ValueError("a checkpoint does not say what was frozen: save it with exclude_frozen_parameters=True")
    return read_weights(checkpoint_dir, tag)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write them as safetensors in Hugging Face's layout, or as one ``pytorch_model.bin``."""
    if safe_serialization and not exclude_frozen_parameters:
        convert(checkpoint_dir, output_dir, max_shard_size=max_shard_size, tag=tag)
    else:
        state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
        write_pickled(Path(output_dir) / "pytorch_model.bin", state)


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Folder, tag: str | None = None) -> Any:
    """The plain ``model``, on the CPU, with those weights."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model
