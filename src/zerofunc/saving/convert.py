"""From a checkpoint to a folder of weights, in one process, with the memory of one tensor."""

from __future__ import annotations

import logging
import os
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
    stored = weights_of(manifest)
    if not stored:
        raise CheckpointError(f"{folder} holds no weights")
    specs: Specs = {name: weights_folder.cast((one.torch_dtype, one.shape), to) for name, one in stored.items()}
    files, path = weights_folder.plan_files(specs, max_bytes), Path(destination)

    def read(name: str) -> torch.Tensor:
        return read_tensor(folder, stored[name], _stored_name(manifest, name)).to(specs[name][0])

    try:
        for file, names in files.items():
            weights_folder.write_part(path / file, {name: specs[name] for name in names}, read)
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


def weights_of(manifest: Manifest) -> dict[str, StoredTensor]:
    """Parameters and buffers by name."""
    return {**manifest.of("model"), **manifest.of("buffer")}


def _stored_name(manifest: Manifest, name: str) -> str:
    return f"model/{name}" if f"model/{name}" in manifest.tensors else f"buffer/{name}"


def read_tensor(folder: Path, stored: StoredTensor, name: str) -> torch.Tensor:
    """A whole tensor of a checkpoint; a copy, unless it lies in one file."""
    parts = [TensorFile(folder / chunk.file).read(name) for chunk in stored.chunks]
    flat = parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=stored.torch_dtype), *parts])
    return flat.view(stored.shape)


def read_weights(source: str | os.PathLike[str], tag: str | None = None) -> dict[str, torch.Tensor]:
    """All weights and buffers of a checkpoint, in full, tied ones under each of their names.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged.
    """
    folder = locate(Path(source), tag)
    manifest = read_manifest(folder)
    verify(folder, manifest)
    found = {n: read_tensor(folder, one, _stored_name(manifest, n)).clone() for n, one in weights_of(manifest).items()}
    return {**found, **{name: found[kept] for name, kept in manifest.ties.items() if kept in found}}
