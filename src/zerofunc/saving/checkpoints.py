"""Saving a run into a folder and loading it again, on any number of ranks, at any stage."""

from __future__ import annotations

import datetime
import functools
import logging
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerofunc.saving import folders, pieces
from zerofunc.saving.files import file_checksum
from zerofunc.saving.manifest import (
    FORMAT,
    CheckpointError,
    Manifest,
    StoredFile,
    StoredTensor,
    read_manifest,
    verify,
    write_manifest,
)
from zerofunc.saving.packing import Packed, read_packed
from zerofunc.saving.pieces import Piece
from zerofunc.saving.state import (
    Run,
    Wanted,
    capture,
    misfits,
    restore,
    restore_optimizer,
    seed_from,
    set_random_state,
    targets,
)
from zerofunc.saving.together import Meeting, together
from zerofunc.version import __version__

_logger = logging.getLogger(__name__)

SHARED = "shared.safetensors"


def own_file(rank: int) -> str:
    """Name of the file with what is a rank's alone."""
    return f"rank_{rank:05d}.safetensors"


@dataclass(frozen=True)
class Options:
    """How a checkpoint is saved.

    Attributes:
        save_latest: Whether ``latest`` names it.
        exclude_frozen: Whether parameters that require no gradient are left out.
        keep_last: How many checkpoints stay in the folder, or None for all.
    """

    save_latest: bool = True
    exclude_frozen: bool = False
    keep_last: int | None = None


class Saver:
    """Saves the checkpoints of one run, in the foreground or in the background; one at a time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._staged: dict[str, torch.Tensor] = {}
        self._locks: set[folders.Lock] = set()

    def wait(self) -> None:
        """Local. Wait until the checkpoint that is being saved in the background is complete.

        Raises:
            CheckpointError: If it could not be saved.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Local. Wait likewise, and let other processes save into the folders that this run has saved into."""
        self.wait()
        self._locks.clear()

    def save(
        self, save_dir: Path, tag: str, more: Mapping[str, Any], global_steps: int, options: Options, background: bool
    ) -> None:
        """Collective. Save the run; ``more`` is plain data of the first rank that belongs to it.

        Raises:
            CheckpointError: On every rank, with nothing visible, if one rank cannot write, or something in the state
                is not plain data.
            ValueError: If ``tag`` cannot be the name of a folder.
        """
        folders.check_tag(tag)
        self.wait()
        axes, is_first = self._run.sharding.axes, self._run.is_first
        excluded = set()
        if options.exclude_frozen:
            names = self._run.sharding.places
            excluded = {name for name in names if not self._run.sharding.shard(name).requires_grad}
        captured = capture(self._run, excluded)
        trees: dict[str, Packed] = {}

        def prepare() -> str:
            trees[own_file(axes.rank)] = Packed.of(captured.own, "state of this rank")
            if is_first:
                trees[SHARED] = Packed.of({**captured.shared, **more}, "state")
                self._locks.add(folders.lock(save_dir))
                return str(folders.begin(save_dir, tag))
            return ""

        folder = Path(together(axes, prepare, f"save of {tag}")[0])
        together(axes, functools.partial(_check_shared, folder), "look for the folder")
        manifest = Manifest(
            format=FORMAT, zerofunc=__version__, torch=torch.__version__, saved_at=now(), global_steps=global_steps,
            stage=self._run.sharding.stage, num_ranks=axes.num_ranks, optimizer=self._run.optimizer_name,
            ties=self._run.ties(), excluded=tuple(sorted(excluded)), tensors={}, files={},
        )  # fmt: skip
        own = captured.pieces
        if background:
            own = {name: self._stage(name, piece) for name, piece in own.items()}
            trees = {name: tree.copied() for name, tree in trees.items()}
        finish = functools.partial(complete, folder, manifest, options)
        write = functools.partial(_write, folder, axes.rank, own, trees, axes.background(), finish)
        if not background:
            write()
            return
        self._thread = self._thread or ThreadPoolExecutor(1, "zerofunc-checkpoint")
        self._pending = self._thread.submit(write)
        self._pending.add_done_callback(_log_failure)

    def _stage(self, name: str, piece: Piece) -> Piece:
        """A copy in memory of the CPU, which is used again by the next save."""
        buffer = self._staged.get(name)
        if buffer is None or buffer.shape != piece.part.shape or buffer.dtype != piece.part.dtype:
            is_pinned = piece.part.device.type != "cpu"
            buffer = torch.empty(piece.part.shape, dtype=piece.part.dtype, pin_memory=is_pinned)
            self._staged[name] = buffer
        buffer.copy_(piece.part)
        return Piece(buffer, piece.start, piece.full_shape)


def _check_shared(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}, which the first rank has made, is not there; save to a folder that all share")


def now() -> str:
    """The time, in UTC, as ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat()


def _log_failure(future: Future[None]) -> None:
    if (error := future.exception()) is not None:
        _logger.error("a checkpoint was not saved; the next save, or wait_for_checkpoint(), raises this: %s", error)


def _write(
    folder: Path,
    rank: int,
    captured: Mapping[str, Piece],
    trees: Mapping[str, Packed],
    ranks: Meeting,
    finish: Callable[[dict[str, StoredTensor], dict[str, str]], None],
) -> None:
    """Collective in the thread that runs it. Write all files; the first rank completes the checkpoint."""
    label = f"save into {folder.parent}"
    try:
        names = pieces.shared_out(ranks.gather_objects(pieces.offer(captured), label))[rank]
        written = together(ranks, lambda: pieces.write_share(folder, rank, captured, trees, names), label)

        def finish_on_first() -> None:
            if rank == 0:
                finish(*pieces.table_of(written, list(captured)))

        together(ranks, finish_on_first, label)
    except BaseException:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def complete(
    folder: Path, manifest: Manifest, options: Options, tensors: dict[str, StoredTensor], headers: dict[str, str]
) -> None:
    """Local, on the first rank. Write the table and let the checkpoint be seen."""
    files = {}
    for path in sorted(folder.iterdir()):
        checksum = headers.get(path.name) or file_checksum(path)
        files[path.name] = StoredFile(nbytes=path.stat().st_size, checksum=checksum)
    write_manifest(folder, manifest.model_copy(update={"tensors": tensors, "files": files}))
    folders.commit(folder, options.save_latest)
    if options.keep_last is not None:
        folders.keep_last(folder.parent, options.keep_last, folder.name)


# -- loading ----------------------------------------------------------------------------------------------------------


Judge = Callable[[dict[str, Any]], list[str]]
"""What of plain data does not fit, in words."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded.

    Attributes:
        folder: Where it lies.
        shared: The plain data that is the same on all ranks, with what :meth:`Saver.save` was given beside the run.
    """

    folder: Path
    shared: dict[str, Any]


@dataclass(frozen=True)
class _Examined:
    """A checkpoint that is whole and fits: its table, the plain data of all ranks and of one, the loader's state."""

    manifest: Manifest
    shared: dict[str, Any]
    own: dict[str, Any]
    stream: dict[str, Any] | None


@torch.no_grad()
def load(
    run: Run,
    load_dir: Path,
    tag: str | None,
    wanted: Wanted,
    more_misfits: Judge | None,
) -> Loaded | None:
    """Collective. Load a checkpoint into a run.

    All files are verified, and all names and shapes compared, before anything is changed; ``more_misfits`` tells what
    of the plain data does not fit whatever else is loaded.

    Returns:
        None if ``tag`` is None and the folder has no ``latest``.

    Raises:
        CheckpointError: On every rank, with nothing changed, if the checkpoint is missing, damaged, or does not fit.
    """
    axes = run.sharding.axes
    name = together(axes, functools.partial(_look, load_dir, tag), f"load of {tag or 'the latest checkpoint'}")[0]
    if name is None:
        return None
    folder, label = load_dir / name, f"load of {load_dir / name}"
    found: list[_Examined] = []
    together(axes, lambda: found.append(_examine(run, folder, wanted, more_misfits)), label)
    manifest, shared, own = found[0].manifest, found[0].shared, found[0].own
    read = targets(run, manifest, wanted)
    together(axes.background(), lambda: pieces.read_pieces(folder, manifest, read), label)
    own_again = own if manifest.num_ranks == axes.num_ranks else None
    restore(run, read, shared, own_again)
    if wanted.optimizer and run.optimizer is not None and manifest.optimizer is not None:
        restore_optimizer(run, read, shared, own_again)
    if wanted.scheduler and run.scheduler is not None and shared["scheduler"] is not None:
        run.scheduler.load_state_dict(shared["scheduler"])
    if run.loader is not None and found[0].stream is not None:
        run.loader.load_state_dict(found[0].stream)
    random = own["random"] if wanted.progress else None  # other libraries do not save it
    if random is not None and own_again is not None:
        set_random_state(random)
    elif random is not None:
        _logger.info("%s was saved by %d ranks: random numbers are not those of that run", folder, manifest.num_ranks)
        seed_from(random, axes.rank)
    return Loaded(folder, shared)


def _examine(run: Run, folder: Path, wanted: Wanted, more_misfits: Judge | None) -> _Examined:
    """Local. Verify this rank's share, and that all of it fits."""
    axes, manifest = run.sharding.axes, read_manifest(folder)
    verify(folder, manifest, axes.rank, axes.num_ranks)
    shared = read_packed(folder / SHARED)
    problems = misfits(run, manifest, shared, wanted) + (more_misfits(shared) if more_misfits else [])
    if problems:
        raise CheckpointError(f"{folder} does not fit this run: {'; '.join(problems)}")
    own = read_packed(folder / own_file(axes.rank % manifest.num_ranks))
    # A loader goes on as one of other ranks only from where all of them start: from the first one's state.
    position = own if manifest.num_ranks == axes.num_ranks else read_packed(folder / own_file(0))
    stream = position.get("loader") if wanted.progress and run.loader is not None else None
    if stream is not None and run.loader is not None:
        run.loader.check_state_dict(stream)
    return _Examined(manifest, shared, own, stream)


def _look(load_dir: Path, tag: str | None) -> str | None:
    tag = tag if tag is not None else folders.latest(load_dir)
    return None if tag is None else folders.find(load_dir, tag).name
