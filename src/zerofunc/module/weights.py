"""Reading safetensors files into a module, each rank its own part, so that no rank ever holds a whole copy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import _IncompatibleKeys

from zerofunc.module.first_values import home_device
from zerofunc.module.init import shard_alone
from zerofunc.module.sharding import owner_of, place_of
from zerofunc.pages.pager import Pager
from zerofunc.ranks.collectives import axes_of

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def load_safetensors(
    module: nn.Module,
    files: Files,
    strict: bool = True,
    *,
    rename: Callable[[str], str] = str,
    mesh: DeviceMesh | None = None,
) -> _IncompatibleKeys:
    """Collective. Read weights into a module; as ``load_state_dict``, the keys that were missing or not expected.

    Each rank reads its own part of each parameter from the file into its shards, in their data type: masters stay
    float32. Buffers are read whole. The module may be sharded, built inside :class:`zerofunc.Init`, plain, or on the
    meta device: parameters there are split over the ranks, as inside Init.

    Args:
        module: Any module; ``engine.module`` for an engine.
        files: A file, several, or a folder: the files that its ``*.safetensors.index.json`` lists, or all in it.
        strict: Raise if a key is missing or not expected. For tied parameters one of their names will do.
        rename: From a key of the files to one of the module, such as a function that removes a prefix.
        mesh: Which ranks share parameters that are on the meta device, as for :func:`zerofunc.shard`.

    Raises:
        ValueError: With nothing changed, if a file cannot be read, a shape does not fit, or keys are missing or not
            expected and ``strict`` is True.
        DivergenceError: With nothing changed, if that is so on some ranks only.
    """
    targets = {n: t for n, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    places = [place for target in targets.values() if (place := place_of(target)) is not None]
    axes = places[0][0].axes if places else None
    if axes is None and any(_awaits_data(target) for target in targets.values()):
        axes = axes_of(mesh, replicate_all=False)
    with ExitStack() as open_files, torch.no_grad():
        problem = None
        try:
            stored = _stored(_paths(files), rename, open_files)
            keys, sources = _match(targets, stored, strict)
        except ValueError as error:
            problem = error
        if axes is not None:
            axes.agree(f"load_safetensors, {problem or f'of {sorted(sources)}'}")
        if problem is not None:
            raise problem
        drafts = Pager(axes, resident_bytes=0, prefetch=False) if axes is not None else None
        for name, source in sources.items():
            target = targets[name]
            if drafts is not None and _awaits_data(target):
                shard_alone(target, name, drafts, target.dtype)
            _load(module, name, target, source)
    owners = [owner for target in targets.values() if (owner := owner_of(target)) is not None]
    for sharding in dict.fromkeys(owner.sharding() for owner in owners):
        if sharding is not None:
            sharding.refresh()
    return keys


# -- the module -------------------------------------------------------------------------------------------------------


def _awaits_data(target: torch.Tensor) -> TypeGuard[nn.Parameter]:
    return target.is_meta and isinstance(target, nn.Parameter)


def _load(module: nn.Module, name: str, target: torch.Tensor, source: _Stored) -> None:
    """Local for a sharded parameter. Read what this rank holds of a tensor."""
    if (found := place_of(target)) is not None:
        pager, place = found
        place.shard.copy_(source.read(place.range(pager.axes.shard.rank)))
    elif target.is_meta:
        owner, _, buffer = name.rpartition(".")
        value = source.read(slice(0, target.numel())).view(target.shape)
        module.get_submodule(owner)._buffers[buffer] = value.to(home_device(), target.dtype, copy=True)
    else:
        target.copy_(source.read(slice(0, target.numel())).view(target.shape))


# -- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """A tensor in an open file."""

    file: Any
    key: str

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.file.get_slice(self.key).get_shape())

    def read(self, part: slice) -> torch.Tensor:
        """Some of the flattened tensor's elements, 1-D, over the memory that maps the file."""
        shape, first, numel = self.shape, part.start, part.stop - part.start
        if not shape or not numel:
            return self.file.get_tensor(self.key).reshape(-1)[:numel]
        split = next((dim for dim, size in enumerate(shape) if size > 1), 0)
        row = shape[split + 1 :].numel()
        start, stop = first // row, -(-(first + numel) // row)
        rows = self.file.get_slice(self.key)[(slice(None),) * split + (slice(start, stop),)]
        return rows.reshape(-1)[first - start * row :][:numel]


def _paths(files: Files) -> list[Path]:
    """The files that are meant."""
    if not isinstance(files, (str, os.PathLike)):
        return [Path(file) for file in files]
    path = Path(files)
    if not path.is_dir():
        return [path]
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise ValueError(f"folder {path} has {len(indexes)} indexes of safetensors files; name the files to load")
    if indexes:
        try:
            names = set(json.loads(indexes[0].read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{indexes[0]} is not an index of safetensors files: {error!r}") from error
        return [path / name for name in sorted(names)]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise ValueError(f"folder {path} has no *.safetensors file; save the weights in that format first")
    return found


def _stored(paths: list[Path], rename: Callable[[str], str], open_files: ExitStack) -> dict[str, _Stored]:
    """What some files hold, by keys of the module; the files stay open as long as ``open_files``."""
    stored: dict[str, _Stored] = {}
    for path in paths:
        try:
            file = open_files.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read as a safetensors file: {error}") from error
        for key in file.keys():  # noqa: SIM118 - it cannot be iterated over
            if rename(key) in stored:
                raise ValueError(f"{rename(key)!r} is found twice, the second time as {key!r} of {path}")
            stored[rename(key)] = _Stored(file, key)
    return stored


def _match(
    targets: dict[str, torch.Tensor], stored: dict[str, _Stored], strict: bool
) -> tuple[_IncompatibleKeys, dict[str, _Stored]]:
    """The keys without a counterpart, and what to read for each tensor of the module, tied ones once."""
    tied: dict[int, list[str]] = {}
    for name, target in targets.items():
        tied.setdefault(id(target), []).append(name)
    found = {names[0]: next((n for n in names if n in stored), None) for names in tied.values()}
    sources = {name: stored[key] for name, key in found.items() if key is not None}
    missing = [name for names in tied.values() if found[names[0]] is None for name in names]
    unexpected = [name for name in stored if name not in targets]
    problems = [
        f"{name} has shape {tuple(source.shape)} there, expected {tuple(targets[name].shape)}"
        for name, source in sources.items()
        if source.shape != targets[name].shape
    ]
    if strict and missing:
        problems.append(f"missing keys: {_some(missing)}")
    if strict and unexpected:
        problems.append(f"keys that the module does not have: {_some(unexpected)}")
    if problems:
        raise ValueError(
            f"the files do not fit the module: {'; '.join(problems)}. rename= maps keys, strict=False ignores these; a "
            "class that saves its weights under other names loads them by its from_pretrained inside zerofunc.Init()"
        )
    return _IncompatibleKeys(missing, unexpected), sources


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
