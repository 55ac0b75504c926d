"""A folder of checkpoints: a new one is there when it is complete, and not before.

A save writes into ``.saving-TAG``; everything is on the disk before the folder is renamed to ``TAG``, and ``latest``
follows after that. A process that is killed in between leaves a folder that the next save removes. Where a tag is saved
again, the earlier one is kept as ``.replaced-TAG`` until the new one has its name. One process at a time saves into a
folder: it holds a lock, which the system releases when the process ends.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import weakref
from pathlib import Path
from typing import IO

from zerofunc.saving.files import sync_folder, write_bytes
from zerofunc.saving.manifest import NAME, CheckpointError, read_manifest

_logger = logging.getLogger(__name__)

LATEST = "latest"
_SAVING, _REPLACED, _LOCK = ".saving-", ".replaced-", ".lock"


def check_tag(tag: str) -> None:
    """Raise ValueError if a tag cannot be the name of a folder."""
    if not tag or tag != Path(tag).name or tag.startswith(".") or tag == LATEST:
        raise ValueError(f"tag is {tag!r}; expected the name of a folder, that does not begin with a dot")


def begin(save_dir: Path, tag: str) -> Path:
    """Local, on the first rank. An empty folder to write a checkpoint into; what killed saves have left is removed.

    ``save_dir`` is locked.

    Raises:
        CheckpointError: If ``tag`` names something else than a checkpoint.
        OSError: If the disk refuses.
    """
    clean(save_dir)
    if (save_dir / tag).exists() and not (save_dir / tag / NAME).is_file():
        raise CheckpointError(f"{save_dir / tag} exists and is not a checkpoint of zerofunc; save under another tag")
    folder = save_dir / f"{_SAVING}{tag}"
    folder.mkdir()
    sync_folder(save_dir)
    return folder


def clean(save_dir: Path) -> None:
    """Local. Remove what killed saves have left, and give a replaced checkpoint its name back."""
    for path in save_dir.iterdir():
        if path.name.startswith(_SAVING):
            shutil.rmtree(path)
        elif path.name.startswith(_REPLACED):
            tag = path.name.removeprefix(_REPLACED)
            if (save_dir / tag).exists():
                shutil.rmtree(path)
            else:
                path.rename(save_dir / tag)


def commit(folder: Path, save_latest: bool) -> None:
    """Local, on the first rank. Let a checkpoint that is complete on the disk be seen under its tag."""
    save_dir, tag = folder.parent, folder.name.removeprefix(_SAVING)
    sync_folder(folder)
    final, replaced = save_dir / tag, save_dir / f"{_REPLACED}{tag}"
    if final.exists():
        final.rename(replaced)
    folder.rename(final)
    sync_folder(save_dir)
    if save_latest:
        draft = save_dir / f"{_SAVING}{LATEST}"
        draft.mkdir(exist_ok=True)  # a folder, as all that a clean-up removes
        write_bytes(draft / LATEST, tag.encode())
        (draft / LATEST).replace(save_dir / LATEST)
        draft.rmdir()
        sync_folder(save_dir)
    if replaced.exists():
        shutil.rmtree(replaced)


def keep_last(save_dir: Path, number: int, tag: str) -> None:
    """Local, on the first rank. Remove all but the newest ``number`` checkpoints; ``tag`` and the latest one stay."""
    saved = []
    for path in save_dir.iterdir():
        if (path / NAME).is_file() and not path.name.startswith("."):
            try:
                saved.append((read_manifest(path).saved_at, path))
            except CheckpointError as error:
                _logger.warning("%s is not counted among the checkpoints to keep, and not removed: %s", path, error)
    spared = {tag, latest(save_dir)}
    for _, path in sorted(saved, reverse=True)[number:]:
        if path.name not in spared:
            _remove(path)


def _remove(path: Path) -> None:
    """Take a checkpoint's name away first: half of one is never seen."""
    doomed = path.with_name(f"{_SAVING}{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def latest(save_dir: Path) -> str | None:
    """Local. The tag that ``latest`` names; None if there is no such file.

    Raises:
        CheckpointError: If the file cannot be read.
    """
    try:
        return (save_dir / LATEST).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{save_dir / LATEST} cannot be read: {error}; give the tag to load") from error


def find(save_dir: Path, tag: str) -> Path:
    """Local. The folder of a checkpoint, also where a save that would replace it was killed.

    Raises:
        CheckpointError: If there is none; the message names those that are there.
    """
    for name in (tag, f"{_REPLACED}{tag}"):
        if (save_dir / name).is_dir():
            return save_dir / name
    there = sorted(path.parent.name for path in save_dir.glob(f"[!.]*/{NAME}")) if save_dir.is_dir() else []
    known = f"the checkpoints there are {', '.join(there)}" if there else "there is no checkpoint in that folder"
    raise CheckpointError(f"{save_dir} has no checkpoint {tag!r}; {known}")


class Lock:
    """The right to save into a folder, as long as this object lives; one for all that save there in this process."""

    def __init__(self, file: IO[str]) -> None:
        weakref.finalize(self, file.close)


_locks: weakref.WeakValueDictionary[Path, Lock] = weakref.WeakValueDictionary()


def lock(save_dir: Path) -> Lock:
    """Local, on the first rank. Make the folder, and take the right to save into it.

    Raises:
        CheckpointError: If another process has it.
        OSError: If the disk refuses.
    """
    save_dir.mkdir(parents=True, exist_ok=True)
    path = save_dir.resolve()
    if (held := _locks.get(path)) is not None:
        return held
    file = (path / _LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise CheckpointError(
                f"{save_dir} is being saved into by {holder}; let each job save into a folder of its own"
            ) from error
        _logger.warning("%s: no lock on this file system (%s); let only one job save there", save_dir, error)
    file.truncate(0)
    file.write(f"process {os.getpid()} of {os.uname().nodename}")
    file.flush()
    made = _locks[path] = Lock(file)
    return made
