"""A folder of weights as Hugging Face lays it out: safetensors files of bounded size, and an index of them.

https://huggingface.co/docs/safetensors, https://huggingface.co/docs/transformers/big_models
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from zerofunc.saving.files import NAMES, Specs, sync_folder, write_bytes, write_one_by_one

INDEX = "model.safetensors.index.json"
METADATA = {"format": "pt"}
_PART = ".part-"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def bytes_in(size: int | str) -> int:
    """A size such as ``"5GB"`` or ``"500MiB"`` in bytes.

    Raises:
        ValueError: If it is none.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?B)?\s*", str(size).upper())
    number = float(found[1]) * _UNITS[found[2] or ""] if found else 0
    if number < 1:
        raise ValueError(f"max_shard_size is {size!r}; expected a size such as '5GB' or '500MiB', or bytes")
    return int(number)


def dtype_named(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point data type that files can hold, of a name such as ``"bf16"`` or ``"float32"``.

    Raises:
        ValueError: If it is none.
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    found = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found not in NAMES:
        raise ValueError(f"dtype is {dtype!r}; expected a floating-point type such as 'bfloat16' or 'float32', or None")
    return found


def cast(spec: tuple[torch.dtype, Iterable[int]], dtype: torch.dtype | None) -> tuple[torch.dtype, tuple[int, ...]]:
    """Data type and shape of a tensor in the folder: floating-point ones are cast."""
    is_cast = dtype is not None and spec[0].is_floating_point
    return (dtype if dtype is not None and is_cast else spec[0]), tuple(spec[1])


def plan_files(specs: Specs, max_bytes: int) -> dict[str, list[str]]:
    """Which tensors go into which file: in their order, as many as fit, one at least."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, (dtype, shape) in specs.items():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if groups[-1] and held + nbytes > max_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def write_part(path: Path, specs: Specs, read: Callable[[str], torch.Tensor]) -> None:
    """Write one file of the folder, under another name for now.

    Raises:
        OSError: If the disk refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_one_by_one(path.with_name(f"{_PART}{path.name}"), specs, read, METADATA)


def remove_parts(folder: Path) -> None:
    """Remove what a failure, or a process that was killed, has left."""
    for path in folder.glob(f"{_PART}*"):
        path.unlink()


def complete(folder: Path, files: Mapping[str, list[str]], specs: Specs, others: Mapping[str, bytes]) -> None:
    """Give the files their names and write the index; files of an earlier export that would be mixed up go away.

    Args:
        folder: Where all parts have been written.
        files: As planned.
        specs: Of all tensors.
        others: Small files that belong to it, by name.
    """
    (folder / INDEX).unlink(missing_ok=True)  # first: it must never list old files and new ones
    for file in files:
        (folder / f"{_PART}{file}").rename(folder / file)
    for name, content in others.items():
        write_bytes(folder / name, content)
    if len(files) > 1:
        total = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in specs.values())
        index: dict[str, Any] = {
            "metadata": {"total_size": total},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        write_bytes(folder / INDEX, json.dumps(index, indent=2).encode())
    for path in folder.glob("model*.safetensors"):
        if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", path.name) and path.name not in files:
            path.unlink()
    remove_parts(folder)
    sync_folder(folder)
