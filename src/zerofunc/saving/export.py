"""Weights of a sharded module for others: a folder of safetensors, written without a full copy on any rank."""

from __future__ import annotations

import copy
import functools
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofunc.module.sharding import sharding_of
from zerofunc.optimizers.parameter_state import safe_get_full_fp32_param
from zerofunc.pages.paged_tensor import PagedTensor
from zerofunc.saving import weights_folder
from zerofunc.saving.files import Specs, layout
from zerofunc.saving.together import together


def export(
    module: nn.Module,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    exclude_frozen: bool = False,
) -> None:
    """Collective. Write parameters and buffers as safetensors, in Hugging Face's layout, at any stage.

    The first rank writes, tensor by tensor; no rank holds more than one full tensor and the resident pages. Names are
    the module's own; tied weights are there once, under their first name. Plain PyTorch loads the files
    (``safetensors.torch.load_file``); ``from_pretrained`` the folder of a module with a config of
    that kind, which is written too. Files appear when they are complete, and replace those of an earlier export.

    Args:
        module: An engine, or a sharded module.
        folder: Where to; made if it is not there.
        dtype: What floating-point tensors are cast to, parameters from their float32 masters; their own by default.
        max_shard_size: Size of a file at most, unless one tensor alone is larger: bytes, or text such as "5GB".
        exclude_frozen: Leave out parameters that require no gradient.

    Raises:
        CheckpointError: On every rank, if the first one cannot write.
        ValueError: On every rank, if an argument cannot be used.
    """
    to, max_bytes = weights_folder.dtype_named(dtype), weights_folder.bytes_in(max_shard_size)
    sharding = sharding_of(module)
    sharding.check_intact()
    inner = sharding.module()
    assert inner is not None
    tensors = _tensors(inner, exclude_frozen)
    specs: Specs = {name: weights_folder.cast((tensor.dtype, tensor.shape), to) for name, tensor in tensors.items()}
    if not specs:
        raise ValueError(f"{type(inner).__name__} has nothing to export but frozen parameters")
    sharding.refresh()
    files, path, is_first = weights_folder.plan_files(specs, max_bytes), Path(folder), sharding.axes.rank == 0

    def finish() -> None:
        if is_first:
            weights_folder.complete(path, files, specs, _config_files(inner, to))

    try:
        for file, names in files.items():
            of_file = {name: specs[name] for name in names}
            write = functools.partial(_write, path / file, tensors, of_file, is_first)
            together(sharding.axes, write, f"export of {path / file}")
        together(sharding.axes, finish, f"export into {path}")
    except BaseException:
        if is_first:
            weights_folder.remove_parts(path)
        raise


def _tensors(module: nn.Module, exclude_frozen: bool) -> dict[str, torch.Tensor]:
    """What is written, tied tensors under their first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        is_left_out = exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad
        if isinstance(value, torch.Tensor) and not is_left_out:
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def _write(path: Path, tensors: Mapping[str, torch.Tensor], specs: Specs, is_first: bool) -> None:
    """Collective. One file by the first rank; the others take part in what it reads, even if the disk refuses it."""
    waiting = deque(layout(specs))

    def read(name: str) -> torch.Tensor:
        waiting.remove(name)
        return _read(tensors[name], specs[name][0])

    try:
        if is_first:
            weights_folder.write_part(path, specs, read)
    finally:
        while waiting:
            read(waiting[0])


@torch.no_grad()
def _read(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Collective for what is sharded. A full tensor: from its master, if that has more digits of what is wanted."""
    if isinstance(tensor, nn.Parameter) and dtype != tensor.dtype:
        return safe_get_full_fp32_param(tensor).to(dtype)
    return (tensor.full() if isinstance(tensor, PagedTensor) else tensor.detach()).to(dtype)


def _config_files(module: nn.Module, dtype: torch.dtype | None) -> dict[str, bytes]:
    """What ``from_pretrained`` needs beside the weights, of a module that has such a config."""
    found = {}
    for attribute, file in (("config", "config.json"), ("generation_config", "generation_config.json")):
        config: Any = copy.deepcopy(getattr(module, attribute, None))
        if not hasattr(config, "to_json_string"):
            continue
        if attribute == "config":
            config.architectures = [type(module).__name__]
            config.dtype = dtype or next(module.parameters()).dtype
        found[file] = config.to_json_string().encode()
    return found
