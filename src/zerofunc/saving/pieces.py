"""Ranges of logical tensors, and torch.distributed.checkpoint's writer and reader of them.

DCP plans who writes what and who reads which part of what, and tells every rank of another's failure. Files are
safetensors, one for each rank, and the table of contents is JSON: nothing is pickled to the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from zerofunc.saving.files import NAMES, TensorFile, sync_folder, write_tensors
from zerofunc.saving.manifest import Chunk, Manifest, StoredTensor
from zerofunc.saving.packing import Packed


class Piece(torch.Tensor):
    """A flattened logical tensor of which this rank has one range, in a form that DCP plans for.

    Attributes:
        part: The range, 1-D, contiguous.
        start: Its first element in the flattened tensor.
        full_shape: Shape of the logical tensor.
    """

    part: torch.Tensor
    start: int
    full_shape: torch.Size

    def __new__(cls, part: torch.Tensor, start: int, full_shape: torch.Size) -> Piece:
        """Of ``part``, which is not copied."""
        piece: Piece = torch.Tensor._make_wrapper_subclass(
            cls, (full_shape.numel(),), dtype=part.dtype, device=part.device
        )
        piece.part, piece.start, piece.full_shape = part, start, full_shape
        return piece

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refused: a piece is there to be saved or loaded."""
        raise TypeError(f"{func} of a piece of a tensor")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:  # noqa: PLW3201 - DCP's protocol
        """What this rank writes."""
        if not self.part.numel():
            return []
        (chunk,) = self.__create_chunk_list__()
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size())
        return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:  # noqa: PLW3201
        """What this rank reads."""
        if not self.part.numel():
            return []
        return [ChunkStorageMetadata(torch.Size([self.start]), self.part.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:  # noqa: PLW3201
        """Where it is."""
        return self.part


class PieceWriter(StorageWriter):
    """Writes each rank's pieces and other state into one folder, and completes it on the first rank.

    Args:
        folder: An existing folder, the same on all ranks.
        rank: This process's place among those that write.
        pieces: What it has, by name; DCP chooses who writes what several have.
        trees: Other files of this rank, by name.
        complete: Called on the first rank with the table of tensors and the checksums of files' headers, when all
            ranks have written. What it raises is raised on every rank.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        pieces: Mapping[str, Piece],
        trees: Mapping[str, Packed],
        complete: Callable[[dict[str, StoredTensor], dict[str, str]], None],
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.pieces = pieces
        self.trees = trees
        self.complete = complete

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; the result has each piece's shape and checksums, for the table."""
        for file, tree in self.trees.items():
            tree.write(self.folder / file)
        name = f"data_{self.rank:05d}.safetensors"
        values = {item.index.fqn: self.pieces[item.index.fqn].part for item in plan.items}
        sums = write_tensors(self.folder / name, values, {}) if values else {}
        sync_folder(self.folder)
        results = []
        for item in plan.items:
            piece = self.pieces[item.index.fqn]
            chunk = Chunk(file=name, start=piece.start, numel=piece.part.numel(), checksum=sums[item.index.fqn])
            results.append(WriteResult(item.index, 0, (tuple(piece.full_shape), NAMES[piece.dtype], chunk, sums[""])))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint."""
        order = {name: number for number, name in enumerate(self.pieces)}
        found: dict[str, tuple[tuple[int, ...], str, list[Chunk]]] = {}
        headers = {}
        for result in (result for of_rank in results for result in of_rank):
            shape, dtype, chunk, header = result.storage_data
            found.setdefault(result.index.fqn, (shape, dtype, []))[2].append(chunk)
            headers[chunk.file] = header
        tensors = {
            name: StoredTensor(dtype=dtype, shape=shape, chunks=tuple(sorted(chunks, key=lambda chunk: chunk.start)))
            for name, (shape, dtype, chunks) in sorted(found.items(), key=lambda item: order.get(item[0], len(order)))
        }
        self.complete(tensors, headers)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a folder."""
        return Path(checkpoint_id).is_dir()


class PieceReader(StorageReader):
    """Reads pieces of a checkpoint that was verified.

    Args:
        folder: The checkpoint.
        manifest: Its table.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader reads once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The table in DCP's words."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.torch_dtype),
                    torch.Size([tensor.numel]),
                    [ChunkStorageMetadata(torch.Size([c.start]), torch.Size([c.numel])) for c in tensor.chunks],
                )
                for name, tensor in self.manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what is wanted from the mapped files, converted to the target's data type."""
        files: dict[str, TensorFile] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            assert item.storage_index.offset is not None
            (offset,) = item.storage_index.offset
            file = next(chunk.file for chunk in self.manifest.tensors[name].chunks if chunk.start == offset)
            if file not in files:
                files[file] = TensorFile(self.folder / file)
            (first,), (numel,) = item.storage_offsets, item.lengths
            target = planner.resolve_tensor(item)
            target.copy_(files[file].read(name)[first : first + numel])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a folder."""
        return Path(checkpoint_id).is_dir()
