"""Ranges of logical tensors, and what a rank writes and reads of them: safetensors, one file for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zerofunc.saving.files import NAMES, TensorFile, sync_folder, write_tensors
from zerofunc.saving.manifest import CheckpointError, Chunk, Manifest, StoredTensor
from zerofunc.saving.packing import Packed


@dataclass(frozen=True)
class Piece:
    """A flattened logical tensor of which this rank has one range.

    Attributes:
        part: The range, 1-D, contiguous.
        start: Its first element in the flattened tensor.
        full_shape: Shape of the logical tensor.
    """

    part: torch.Tensor
    start: int
    full_shape: torch.Size


@dataclass(frozen=True)
class Written:
    """One range that a rank has written.

    Attributes:
        name: Of the tensor.
        shape: Of the logical tensor.
        dtype: By safetensors' name.
        chunk: Where it lies.
        header: Checksum of its file's header.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: Chunk
    header: str


Offer = Mapping[str, tuple[int, int]]
"""What a rank has: by name of the tensor, its range's first element, and its bytes."""


def offer(pieces: Mapping[str, Piece]) -> Offer:
    """Local. What this rank could write."""
    return {name: (piece.start, piece.part.nbytes) for name, piece in pieces.items() if piece.part.numel()}


def shared_out(offers: Sequence[Offer]) -> list[list[str]]:
    """What each rank writes: every range once, by the rank that has the fewest bytes to write among those that have it.

    Args:
        offers: Of all ranks, the same on all of them.
    """
    holders: dict[tuple[str, int], list[int]] = {}
    for rank, one in enumerate(offers):
        for name, (start, _) in one.items():
            holders.setdefault((name, start), []).append(rank)
    loads, chosen = [0] * len(offers), [list[str]() for _ in offers]
    for (name, _), ranks in sorted(holders.items(), key=lambda item: len(item[1])):  # first what only one rank has
        writer = min(ranks, key=loads.__getitem__)
        loads[writer] += offers[writer][name][1]
        chosen[writer].append(name)
    return chosen


def write_share(
    folder: Path, rank: int, pieces: Mapping[str, Piece], trees: Mapping[str, Packed], names: Sequence[str]
) -> list[Written]:
    """Local. Write this rank's files to the disk.

    Args:
        folder: An existing folder, the same on all ranks.
        rank: This process's place among those that write.
        pieces: What it has.
        trees: Other files of this rank, by name.
        names: The pieces that it writes.
    """
    for file, tree in trees.items():
        tree.write(folder / file)
    file = f"data_{rank:05d}.safetensors"
    sums = write_tensors(folder / file, {name: pieces[name].part for name in names}, {}) if names else {}
    sync_folder(folder)
    written = []
    for name in names:
        part, start, shape = pieces[name].part, pieces[name].start, tuple(pieces[name].full_shape)
        chunk = Chunk(file=file, start=start, numel=part.numel(), checksum=sums[name])
        written.append(Written(name, shape, NAMES[part.dtype], chunk, sums[""]))
    return written


def table_of(
    written: Sequence[Sequence[Written]], order: Sequence[str]
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """What all ranks have written: the tensors by name, in ``order``, and the checksums of the files' headers."""
    found: dict[str, list[Written]] = {}
    headers = {}
    for one in (one for of_rank in written for one in of_rank):
        found.setdefault(one.name, []).append(one)
        headers[one.chunk.file] = one.header
    places = {name: number for number, name in enumerate(order)}
    tensors = {}
    for name in sorted(found, key=lambda name: places.get(name, len(places))):
        chunks = sorted((one.chunk for one in found[name]), key=lambda chunk: chunk.start)
        tensors[name] = StoredTensor(dtype=found[name][0].dtype, shape=found[name][0].shape, chunks=tuple(chunks))
    return tensors, headers


def read_pieces(folder: Path, manifest: Manifest, pieces: Mapping[str, Piece]) -> None:
    """Local. Fill pieces from the mapped files of a checkpoint that was verified, in the pieces' own data types.

    Raises:
        CheckpointError: If a part of one is not there.
    """
    files: dict[str, TensorFile] = {}
    for name, piece in pieces.items():
        stop, missing = piece.start + piece.part.numel(), piece.part.numel()
        for chunk in manifest.tensors[name].chunks:
            first, last = max(chunk.start, piece.start), min(chunk.start + chunk.numel, stop)
            if first >= last:
                continue
            if chunk.file not in files:
                files[chunk.file] = TensorFile(folder / chunk.file)
            there = files[chunk.file].read(name)[first - chunk.start : last - chunk.start]
            piece.part[first - piece.start : last - piece.start].copy_(there)
            missing -= last - first
        if missing:
            raise CheckpointError(f"{folder} has not all of {name}: {missing} elements of this rank's part are missing")
