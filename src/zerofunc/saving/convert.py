"""From a checkpoint to a folder of weights, in one process, with the memory of one tensor."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from zerofunc.saving import folders, weights_folder
from zerofunc.saving.files import Specs, TensorFile
from zerofunc.saving.manifest import NAME, CheckpointError, Manifest, StoredTensor, read_manifest, some, verify

_logger = logging.getLogger(__name__)


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    tag: str | None = None,
) -> None:
    """Write a checkpoint's weights and buffers as safetensors, in Hugging Face's layout. Needs no process group.

    Args:
        source: The folder that was saved into, or one checkpoint in it.
        destination: Where to; made if it is not there.
        dtype: What floating-point tensors are cast to; by default as they were saved: masters, in float32.
        max_shard_size: Size of a file at most, unless one tensor alone is larger: bytes, or text such as "5GB".
        tag: Which checkpoint; the latest by default.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged, or the disk refuses; nothing is left.
        ValueError: If an argument cannot be used.
    """
    to, max_bytes = weights_folder.dtype_named(dtype), weights_folder.bytes_in(max_shard_size)
    folder = locate(Path(source), tag)
    manifest = read_manifest(folder)
    verify(folder, manifest)
    if manifest.excluded:
        _logger.warning("%s does not hold frozen parameters: %s", folder, some(manifest.excluded))
    stored, read = open_weights(folder, manifest)
    if not stored:
        raise CheckpointError(f"{folder} holds no weights")
    specs: Specs = {name: weights_folder.cast((one.torch_dtype, one.shape), to) for name, one in stored.items()}
    files, path = weights_folder.plan_files(specs, max_bytes), Path(destination)

    def read_cast(name: str) -> torch.Tensor:
        return read(name).to(specs[name][0])

    try:
        for file, names in files.items():
            weights_folder.write_part(path / file, {name: specs[name] for name in names}, read_cast)
        weights_folder.complete(path, files, specs, {})
    except BaseException as error:
        weights_folder.remove_parts(path)
        if isinstance(error, OSError):
            raise CheckpointError(f"{path} cannot be written: {error}") from error
        raise


def locate(source: Path, tag: str | None) -> Path:
    """The folder of a checkpoint: the given one, or one inside.

    Raises:
        CheckpointError: If there is none.
    """
    if (source / NAME).is_file() and tag is None:
        return source
    tag = tag if tag is not None else folders.latest(source)
    if tag is None:
        raise CheckpointError(f"{source} is not a checkpoint, and has no {folders.LATEST} that names one; give a tag")
    return folders.find(source, tag)


def open_weights(folder: Path, manifest: Manifest) -> tuple[dict[str, StoredTensor], Callable[[str], torch.Tensor]]:
    """Parameters and buffers by name, and what reads one of them: a copy, unless it lies in one file."""
    path_of = {name: f"{kind}/{name}" for kind in ("model", "buffer") for name in manifest.of(kind)}
    stored = {name: manifest.tensors[path] for name, path in path_of.items()}
    opened = functools.cache(lambda file: TensorFile(folder / file))

    def read(name: str) -> torch.Tensor:
        parts = [opened(chunk.file).read(path_of[name]) for chunk in stored[name].chunks]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(stored[name].shape)

    return stored, read


def read_weights(source: str | os.PathLike[str], tag: str | None = None) -> dict[str, torch.Tensor]:
    """All weights and buffers of a checkpoint, in full, tied ones under each of their names.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged.
    """
    folder = locate(Path(source), tag)
    manifest = read_manifest(folder)
    verify(folder, manifest)
    stored, read = open_weights(folder, manifest)
    found = {name: read(name).clone() for name in stored}
    return {**found, **{name: found[kept] for name, kept in manifest.ties.items() if kept in found}}
