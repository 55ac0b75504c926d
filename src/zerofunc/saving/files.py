"""Files of tensors in safetensors' format: written tensor by tensor from where they lie, read where they are mapped.

A writer copies nothing on the CPU, and piece by piece from an accelerator, so that it needs the memory of one piece.
Every byte is in a checksum: of the header, and of each tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
import xxhash

from zerofunc.ranks.buffers import below_transforms

PIECE_BYTES = 8 << 20

# safetensors' names of data types, https://github.com/huggingface/safetensors
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        dtype: Its data type.
        shape: Its shape.
        start: Its first byte, after the header.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Specs = Mapping[str, tuple[torch.dtype, Iterable[int]]]
"""Data types and shapes by name."""


def layout(specs: Specs) -> dict[str, Entry]:
    """Where tensors of these data types and shapes go in a file: the widest first, so that each is aligned.

    Raises:
        ValueError: If the format has no name for a data type.
    """
    entries, start = {}, 0
    for name, (dtype, shape) in sorted(specs.items(), key=lambda item: -item[1][0].itemsize):
        if dtype not in NAMES:
            raise ValueError(f"{name} is {dtype}, which safetensors files cannot hold")
        entries[name] = Entry(dtype, tuple(shape), start)
        start += entries[name].nbytes
    return entries


def header_of(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """The head of a file, its length in front, a multiple of 8 bytes."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, entry in entries.items():
        offsets = [entry.start, entry.start + entry.nbytes]
        described[name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes, piece by piece; on the CPU where they lie, if it is contiguous."""
    with below_transforms(), torch.no_grad():  # not around a yield: an abandoned generator would leave both on
        flat = tensor.detach().reshape(-1).view(torch.uint8)  # complex and all other types alike
        pieces = flat.split(PIECE_BYTES) if flat.numel() else ()
    return (memoryview(piece.cpu().numpy()) for piece in pieces)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Write a file to the disk; the checksums of its tensors by name, and of its header as "".

    Raises:
        OSError: If the disk refuses.
        ValueError: If the format cannot hold a tensor.
    """
    specs = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return write_one_by_one(path, specs, tensors.__getitem__, metadata)


def write_one_by_one(
    path: Path, specs: Specs, read: Callable[[str], torch.Tensor], metadata: Mapping[str, str]
) -> dict[str, str]:
    """Likewise, of tensors of these data types and shapes that are read when it is their turn, and then let go."""
    entries = layout(specs)
    header = header_of(entries, metadata)
    sums = {"": xxhash.xxh3_64_hexdigest(header)}
    with path.open("wb") as file:
        file.write(header)
        for name in entries:
            sums[name] = _write(file, bytes_of(read(name)))
        sync(file)
    return sums


def _write(file: BinaryIO, pieces: Iterable[memoryview]) -> str:
    checksum = xxhash.xxh3_64()
    for piece in pieces:
        checksum.update(piece)
        file.write(piece)
    return str(checksum.hexdigest())


def file_checksum(path: Path) -> str:
    """The checksum of a small file's bytes."""
    return str(xxhash.xxh3_64_hexdigest(path.read_bytes()))


def header_checksum(path: Path) -> str:
    """The checksum of a file's header, as :func:`write_tensors` gives it; nothing of the header is believed."""
    with path.open("rb") as file:
        length = file.read(8)
        return str(xxhash.xxh3_64_hexdigest(length + file.read(min(int.from_bytes(length, "little"), 1 << 32))))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a small file to the disk."""
    with path.open("wb") as file:
        file.write(content)
        sync(file)


def write_pickled(path: Path, content: Any) -> None:
    """Write a file with ``torch.save`` to the disk; it has its name when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".part-{path.name}")
    try:
        with draft.open("wb") as file:
            torch.save(content, file)
            sync(file)
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync(file: BinaryIO) -> None:
    """Wait until what was written to a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TensorFile:
    """A file of tensors, mapped into memory: what is read comes from the disk when it is used.

    Attributes:
        path: The file.
        entries: Its tensors by name.
        metadata: The texts of its header.

    Raises:
        OSError: If it cannot be opened.
        ValueError: If it is not such a file, or its end is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        try:
            if size < 8:
                raise ValueError("it is shorter than a header")
            with path.open("rb") as file:
                self._start = 8 + int.from_bytes(file.read(8), "little")
                if self._start > size:
                    raise ValueError("its header is cut off")
                described = json.loads(file.read(self._start - 8))
            self.metadata: dict[str, str] = described.pop("__metadata__", {})
            self.entries = {
                name: Entry(DTYPES[one["dtype"]], tuple(one["shape"]), one["data_offsets"][0])
                for name, one in described.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a safetensors file, or is damaged: {error}") from error
        end = self._start + max((entry.start + entry.nbytes for entry in self.entries.values()), default=0)
        if size != end:
            raise ValueError(f"{path} has {size} bytes; expected {end}: it is damaged or was not written to its end")
        self._bytes = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)

    def __enter__(self) -> TensorFile:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """Let the memory go once no tensor of it is used any more."""
        del self._bytes

    def read(self, name: str) -> torch.Tensor:
        """A tensor over the mapped file, not to be written to."""
        entry = self.entries[name]
        start = self._start + entry.start
        return self._bytes[start : start + entry.nbytes].view(entry.dtype).view(entry.shape)

    def checksum(self, name: str) -> str:
        """The checksum that :func:`write_tensors` gave for a tensor; reads all of it."""
        checksum = xxhash.xxh3_64()
        for piece in bytes_of(self.read(name)):
            checksum.update(piece)
        return str(checksum.hexdigest())
