"""Checkpoints of torch.distributed.checkpoint, such as FSDP2's. Its ``.metadata`` is a pickle of a few classes."""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from zerofunc.saving.foreign.found import Found, Lazy
from zerofunc.saving.foreign.pickles import Restricted, load
from zerofunc.saving.manifest import CheckpointError, some

METADATA = ".metadata"
_CLASSES = (
    metadata.Metadata, metadata.MetadataIndex, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata, metadata.TensorProperties, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo, filesystem._StoragePrefix,
)  # fmt: skip


def _layout_named(name: str) -> torch.layout:
    """A layout, and nothing else of torch, which a pickle could call."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise CheckpointError(f"{METADATA} names {name}, which is no layout: it is not read")
    return found


_ALLOWED: dict[str, Any] = {
    **{f"{kind.__module__}.{kind.__name__}": kind for kind in _CLASSES},
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": _layout_named,
    "collections.OrderedDict": collections.OrderedDict,
    "pathlib.PosixPath": pathlib.PurePosixPath,
    "pathlib.WindowsPath": pathlib.PureWindowsPath,
    "pathlib._local.PosixPath": pathlib.PurePosixPath,
    "pathlib._local.WindowsPath": pathlib.PureWindowsPath,
}
_ROOTS = {"model", "module", "state_dict", "model_state_dict", "weights"}


def read(source: Path, tag: str | None, allow_pickle: bool) -> Found | None:
    """Weights and optimizer state, or None if it is no such folder."""
    folder = source / tag if tag is not None and (source / tag / METADATA).is_file() else source
    if not (folder / METADATA).is_file():
        return None
    files = _Files(folder, allow_pickle)
    found = Found(tag or folder.resolve().name.lstrip("."))
    paths = files.paths()
    states = {path: key for path, key in paths.items() if len(path) >= 3 and path[-3] == "state"}
    groups = {path: key for path, key in paths.items() if "param_groups" in path}
    weights = {p: key for p, key in paths.items() if p not in states and p not in groups and files.is_tensor(key)}
    for name, key in _below_one_root(weights, folder).items():
        found.tensors[f"model/{name}"] = files.lazy(key)
    kinds = set()
    for path, key in states.items():
        name, kind = str(path[-2]), str(path[-1])
        kinds.add(kind)
        if files.is_tensor(key) and files.shape(key):
            found.tensors[f"optimizer/{kind}/{name}"] = files.lazy(key)
        else:
            found.values.setdefault(name, {})[kind] = files.value(key)
    if states:
        found.add_optimizer(kinds, _groups(files, groups), None)
    return found


def _groups(files: _Files, paths: dict[tuple[Any, ...], str]) -> list[tuple[list[str], dict[str, Any]]]:
    """Names and settings of the optimizer's groups: ``(…, "param_groups", 0, "lr")``."""
    settings: dict[int, dict[str, Any]] = {}
    for path, key in paths.items():
        place = path.index("param_groups")
        if len(path) == place + 1:  # all of them in one entry
            settings = dict(enumerate(files.value(key)))
        elif len(path) == place + 3:
            settings.setdefault(path[place + 1], {})[path[place + 2]] = files.value(key)
    return [(list(map(str, group.get("params", ()))), group) for _, group in sorted(settings.items())]


def _below_one_root(paths: dict[tuple[Any, ...], str], folder: Path) -> dict[str, str]:
    """Names of the weights: without the root that says that they are."""
    roots: dict[tuple[Any, ...], dict[str, str]] = {}
    for path, key in paths.items():
        roots.setdefault(path[:-1], {})[str(path[-1])] = key
    named = {root: names for root, names in roots.items() if root and root[-1] in _ROOTS} or roots
    if len(named) != 1:
        told = some(".".join(map(str, root)) or "(none)" for root in named)
        raise CheckpointError(f"{folder}: it is not clear where the weights are; tensors are below {told}")
    return next(iter(named.values()))


class _Files:
    """The entries of a folder, by their flat names."""

    def __init__(self, folder: Path, allow_pickle: bool) -> None:
        self._folder = folder
        self._allow_pickle = allow_pickle
        path = folder / METADATA
        try:
            self._table = Restricted(path.read_bytes(), _ALLOWED, path).load()
            self._where = {(index.fqn, index.offset): info for index, info in self._table.storage_data.items()}
        except (OSError, pickle.UnpicklingError, AttributeError, TypeError, ValueError, EOFError, IndexError) as error:
            raise CheckpointError(f"{path} cannot be read: {error!r}") from error

    def paths(self) -> dict[tuple[Any, ...], str]:
        """Where each entry was in the dict that was saved; only the flat name where that is not known."""
        known = self._table.planner_data if isinstance(self._table.planner_data, dict) else {}
        return {tuple(known.get(key, (key,))): key for key in self._table.state_dict_metadata}

    def is_tensor(self, key: str) -> bool:
        """Whether it is a tensor, and not something pickled."""
        return isinstance(self._table.state_dict_metadata[key], metadata.TensorStorageMetadata)

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a tensor."""
        return tuple(self._table.state_dict_metadata[key].size)

    def lazy(self, key: str) -> Lazy:
        """A tensor, put together when it is read."""
        return Lazy(self._table.state_dict_metadata[key].properties.dtype, self.shape(key), lambda: self.value(key))

    def value(self, key: str) -> Any:
        """What an entry holds."""
        described = self._table.state_dict_metadata[key]
        if not isinstance(described, metadata.TensorStorageMetadata):
            return self._read(key, None)
        full = torch.empty(described.size, dtype=described.properties.dtype)
        for chunk in described.chunks:
            place = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            full[place].copy_(self._read(key, chunk.offsets))
        return full

    def _read(self, key: str, offsets: torch.Size | None) -> Any:
        info = self._where.get((key, offsets))
        if info is None:
            raise CheckpointError(f"{self._folder / METADATA} does not say where {key} is")
        if info.transform_descriptors:
            raise CheckpointError(f"{self._folder / info.relative_path} is transformed: {info.transform_descriptors}")
        path = self._folder / info.relative_path
        try:
            with path.open("rb") as file:
                file.seek(info.offset)
                content = file.read(info.length)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return load(io.BytesIO(content), self._allow_pickle)
