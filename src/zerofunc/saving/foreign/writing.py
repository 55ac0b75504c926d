"""A checkpoint of what was found, written as one rank that holds everything would."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from zerofunc.saving import folders
from zerofunc.saving.checkpoints import SHARED, Options, complete, now, own_file
from zerofunc.saving.files import NAMES, write_one_by_one
from zerofunc.saving.foreign.found import Found
from zerofunc.saving.manifest import FORMAT, CheckpointError, Chunk, Manifest, StoredTensor
from zerofunc.saving.packing import Packed
from zerofunc.version import __version__

_DATA = "data_00000.safetensors"


def write(found: Found, destination: Path) -> Path:
    """Write it, and let ``latest`` name it; the folder.

    Raises:
        CheckpointError: If the disk refuses, or something is not plain data; nothing is left then.
    """
    folder = None
    try:
        folders.check_tag(found.tag)
        trees = {SHARED: Packed.of(_shared(found), "state"), own_file(0): Packed.of(_OWN, "state")}
        held = folders.lock(destination)
        if (destination / found.tag).exists():
            raise CheckpointError(f"{destination / found.tag} is there already; choose another destination")
        folder = folders.begin(destination, found.tag)
        tensors, header = _write_tensors(found, folder)
        for file, tree in trees.items():
            tree.write(folder / file)
        manifest = Manifest(
            format=FORMAT, zerofunc=__version__, torch=torch.__version__, saved_at=now(),
            global_steps=found.steps["global_steps"], stage=0, num_ranks=1, optimizer=found.optimizer, ties=found.ties,
            excluded=(), tensors={}, files={},
        )  # fmt: skip
        complete(folder, manifest, Options(), tensors, {_DATA: header})
        del held
    except CheckpointError:
        raise
    except (OSError, TypeError, ValueError, RuntimeError, LookupError) as error:
        raise CheckpointError(f"{destination} was not written: {error}") from error
    finally:
        if folder is not None and folder.exists():
            shutil.rmtree(folder)
    return destination / found.tag


def _write_tensors(found: Found, folder: Path) -> tuple[dict[str, StoredTensor], str]:
    """The table of tensors, and the checksum of their file's header."""
    flat = {name: (one.dtype, (torch.Size(one.shape).numel(),)) for name, one in found.tensors.items()}
    flat = {name: spec for name, spec in flat.items() if spec[1][0]}

    def read(name: str) -> torch.Tensor:
        return found.tensors[name].read().reshape(-1)

    sums = write_one_by_one(folder / _DATA, flat, read, {})
    tensors = {}
    for name, (dtype, (numel,)) in flat.items():
        chunk = Chunk(file=_DATA, start=0, numel=numel, checksum=sums[name])
        tensors[name] = StoredTensor(dtype=NAMES[dtype], shape=found.tensors[name].shape, chunks=(chunk,))
    return tensors, sums[""]


_OWN: dict[str, object] = {"random": None, "optimizer": {}, "buffers": {}}


def _shared(found: Found) -> dict[str, object]:
    loss_scale = found.loss_scale or {"dynamic": False}
    accumulation = {"micro_steps": found.micro_steps, "place": 0, "num_steps": 1, "backwards": 0}
    return {
        "groups": found.groups,
        "values": found.values,
        "extra": found.extra,
        "scheduler": found.scheduler,
        "client_state": found.client_state,
        "config": found.config,
        "counters": {
            "steps": found.steps,
            "accumulation": accumulation,
            "loss_scale": loss_scale,
        },
    }
