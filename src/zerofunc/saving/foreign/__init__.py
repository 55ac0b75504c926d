"""What other libraries have saved, made into a checkpoint of ours: in one process, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from zerofunc.saving.foreign import deepspeed, weights
from zerofunc.saving.foreign.found import Found
from zerofunc.saving.foreign.writing import write
from zerofunc.saving.manifest import CheckpointError


def _read_dcp(path: Path, tag: str | None, allow_pickle: bool) -> Found | None:
    from zerofunc.saving.foreign import dcp  # which loads torch.distributed.checkpoint, and that takes a second

    return dcp.read(path, tag, allow_pickle)


_READERS: tuple[Callable[[Path, str | None, bool], Found | None], ...] = (deepspeed.read, _read_dcp, weights.read)


def import_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    tag: str | None = None,
    allow_pickle: bool = False,
) -> Path:
    """Make a checkpoint that :meth:`zerofunc.Engine.load_checkpoint` loads of what another library has saved.

    Reads DeepSpeed's folders (ZeRO stages 0 to 3: masters, optimizer state, schedule, counters, client state),
    torch.distributed.checkpoint's (weights, and optimizer state as ``get_state_dict`` gives it, such as FSDP2's), torch
    files of a ``state_dict``, and safetensors files or folders. Needs no process group, and the memory of few tensors.

    Args:
        source: A file or a folder.
        destination: The folder of a run, to save into.
        tag: Which of the checkpoints in ``source``; by default the one that its ``latest`` names. It keeps its name.
        allow_pickle: Run code that files may hold. Without it only tensors and plain data are taken from them.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: With nothing written, if ``source`` is of no such kind, not complete, split by something else
            than data parallelism, or holds code.
    """
    path = Path(source)
    if not path.exists():
        raise CheckpointError(f"there is no {path}")
    try:
        found = next((found for read in _READERS if (found := read(path, tag, allow_pickle)) is not None), None)
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path} is laid out in another way than the versions that are known: {error!r}"
        ) from error
    if found is not None:
        return write(found, Path(destination))
    where = path if tag is None else path / tag
    raise CheckpointError(
        f"{where} is of no kind that is known: a folder of DeepSpeed (*_states.pt), of torch.distributed.checkpoint "
        "(.metadata), a torch file of a state_dict, or safetensors"
    )
