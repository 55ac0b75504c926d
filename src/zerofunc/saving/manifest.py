"""The table of contents of a checkpoint, ``checkpoint.json``: which tensors, in which files, with which checksums."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from zerofunc.saving.files import DTYPES, TensorFile, file_checksum, header_checksum, write_bytes

NAME = "checkpoint.json"
FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or read, or does not fit; nothing was changed."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Chunk(_Record):
    """A range of a flattened tensor, stored under the tensor's name in one file.

    Attributes:
        file: The file, in the checkpoint's folder.
        start: Its first element.
        numel: Its number of elements.
        checksum: XXH3 of its bytes.
    """

    file: str
    start: int
    numel: int
    checksum: str


class StoredTensor(_Record):
    """One logical tensor, whoever wrote the parts of it.

    Attributes:
        dtype: Its data type, by safetensors' name.
        shape: Its shape.
        chunks: Its parts, of the flattened tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """Elements in all."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.numel * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its data type."""
        return DTYPES[self.dtype]


class StoredFile(_Record):
    """A file of the checkpoint.

    Attributes:
        nbytes: Its size.
        checksum: XXH3 of its header where its tensors have checksums of their own, otherwise of all of it.
    """

    nbytes: int
    checksum: str


class Manifest(_Record):
    """What a checkpoint holds.

    Attributes:
        format: Version of this table and of the files.
        zerofunc: Version of the library that wrote it.
        torch: Version of PyTorch that wrote it.
        saved_at: When, in UTC, as ISO 8601.
        global_steps: Optimizer steps of the run by then.
        stage: ZeRO stage of the run.
        num_ranks: Ranks of the run.
        optimizer: Class of the optimizer, or None.
        ties: Names of tied parameters, each with the name under which it is stored.
        excluded: Parameters left out (frozen ones, where that was asked for).
        tensors: By name: ``model/…`` masters, ``buffer/…``, ``gradient/…``, ``optimizer/KEY/…``.
        files: By name.
    """

    format: int
    zerofunc: str
    torch: str
    saved_at: str
    global_steps: int
    stage: int
    num_ranks: int
    optimizer: str | None
    ties: dict[str, str]
    excluded: tuple[str, ...]
    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]

    def of(self, kind: str) -> dict[str, StoredTensor]:
        """The tensors of one kind, by their names without it."""
        return {name[len(kind) + 1 :]: one for name, one in self.tensors.items() if name.startswith(f"{kind}/")}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the table, with a checksum of its own, to the disk."""
    content = manifest.model_dump(mode="json")
    document = {"checksum": _checksum(content), "checkpoint": content}
    write_bytes(folder / NAME, json.dumps(document, indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """The table of a checkpoint.

    Raises:
        CheckpointError: If it is missing, damaged, or of a newer version.
    """
    path = folder / NAME
    try:
        document = json.loads(path.read_bytes())
        content = document["checkpoint"]
        version = content["format"]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint of zerofunc: it has no {NAME}{_foreign(folder)}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged; load another checkpoint, by its tag ({error!r})") from error
    if isinstance(version, int) and version > FORMAT:
        raise CheckpointError(
            f"{path} was written in format {version} by zerofunc {content.get('zerofunc')}; this version reads up to "
            f"format {FORMAT}: install that version or a newer one"
        )
    if document.get("checksum") != _checksum(content):
        raise CheckpointError(f"{path} is damaged: its checksum differs; load another checkpoint, by its tag")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"{path} is not a table that this version can read: {error}") from error


def _checksum(content: Any) -> str:
    return str(xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode()))


def _foreign(folder: Path) -> str:
    """What else a folder may be."""
    if not folder.is_dir():
        return " (there is no such folder)"
    names = [path.name for path in folder.iterdir()]
    if any(name.endswith("_states.pt") for name in names):
        return "; it looks like DeepSpeed's, which `zerofunc convert` reads"
    if ".metadata" in names:
        return "; it looks like one of torch.distributed.checkpoint, which `zerofunc convert` reads"
    if any(name.endswith((".safetensors", ".bin", ".pt", ".pth")) for name in names):
        return "; weights alone are loaded by zerofunc.load_safetensors, or brought here by `zerofunc convert`"
    return ""


def verify(folder: Path, manifest: Manifest, share: int = 0, shares: int = 1) -> None:
    """Local. Check the checksums of a checkpoint's files: of its tensors those of one share in ``shares``.

    Raises:
        CheckpointError: If a file is missing, or a byte differs.
    """
    chunks = _by_file(manifest.tensors)
    turn = 0
    for name, stored in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} is missing or cannot be read: {error}{_REMEDY}") from error
        if size != stored.nbytes:
            raise CheckpointError(f"{path} has {size} bytes, of {stored.nbytes} that were written{_REMEDY}")
        try:
            has_checksums = name in chunks
            if (header_checksum if has_checksums else file_checksum)(path) != stored.checksum:
                raise CheckpointError(f"{path} is damaged{' in its header' if has_checksums else ''}{_REMEDY}")
            if not has_checksums:
                continue
            with TensorFile(path) as file:
                for key, checksum in chunks[name]:
                    turn += 1
                    if turn % shares == share and file.checksum(key) != checksum:
                        raise CheckpointError(f"{path} is damaged in {key}{_REMEDY}")
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path} is damaged: {error}{_REMEDY}") from error


_REMEDY = "; load another checkpoint, by its tag"


def _by_file(tensors: Mapping[str, StoredTensor]) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            found.setdefault(chunk.file, []).append((name, chunk.checksum))
    return found


def some(names: Iterable[str], most: int = 10) -> str:
    """Names in a row, at most ten of them."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
