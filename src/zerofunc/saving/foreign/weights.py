"""Weights alone: a torch file of a ``state_dict``, safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zerofunc.saving.files import TensorFile
from zerofunc.saving.foreign.found import Found, Lazy
from zerofunc.saving.foreign.pickles import load
from zerofunc.saving.manifest import CheckpointError

_NESTED = ("model", "module", "state_dict", "model_state_dict")
_PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel, of torch.compile


def read(source: Path, tag: str | None, allow_pickle: bool) -> Found | None:
    """Weights, or None if there are none."""
    name = tag or (source.stem if source.is_file() else source.resolve().name).lstrip(".") or "weights"
    found = Found(name)
    files = [source] if source.is_file() else _files_in(source)
    if not files:
        return None
    for path in files:
        if path.suffix == ".safetensors":
            _add_safetensors(found, path)
        else:
            found.add_weights(_without_prefix(_state_in(load(path, allow_pickle), path)))
    return found


def _add_safetensors(found: Found, path: Path) -> None:
    try:
        file = TensorFile(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from error
    for name, entry in file.entries.items():
        found.tensors[f"model/{name}"] = Lazy(entry.dtype, entry.shape, lambda name=name: file.read(name))  # type: ignore[misc]


def _files_in(folder: Path) -> list[Path]:
    """The files of a folder as Hugging Face lays it out: those of an index, or all safetensors, or one torch file."""
    for index in sorted(folder.glob("*.index.json")):
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} cannot be read: {error!r}") from error
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise CheckpointError(f"{folder} has no {', '.join(missing)}, which {index.name} lists")
        return [folder / name for name in names]
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _state_in(content: Any, path: Path) -> dict[str, Any]:
    """The ``state_dict`` in a file: its content, or one level below."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, no state_dict")
    for name in _NESTED:
        if isinstance(content.get(name), Mapping) and _is_state(content[name]):
            return dict(content[name])
    if not _is_state(content):
        raise CheckpointError(f"{path} holds no state_dict: its entries are {', '.join(map(str, list(content)[:10]))}")
    return dict(content)


def _is_state(content: Mapping[Any, Any]) -> bool:
    is_named = all(isinstance(name, str) for name in content)
    return is_named and any(isinstance(value, torch.Tensor) for value in content.values())


def _without_prefix(state: dict[str, Any]) -> dict[str, Any]:
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in state):
            return {name.removeprefix(prefix): value for name, value in state.items()}
    return state
