"""What training keeps, as pieces of tensors and plain data, and back into a run of any stage and number of ranks."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from zerofunc.data.loaders import RankLoader
from zerofunc.module.sharding import Sharding, owner_of
from zerofunc.optimizers.logical import LogicalOptimizer, whole_optimizer
from zerofunc.saving.files import bytes_of
from zerofunc.saving.manifest import Manifest, StoredTensor, some
from zerofunc.saving.pieces import Piece

IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
"""Settings of a parameter group that say how it is stepped here, and not what is computed."""


@dataclass(frozen=True)
class Run:
    """What of an engine goes into a checkpoint.

    Attributes:
        sharding: The sharded module.
        optimizer: Over its shards, or None.
        scheduler: Of the optimizer, or None.
        loader: The training loader, or None.
    """

    sharding: Sharding
    optimizer: Optimizer | None
    scheduler: Any
    loader: RankLoader | None

    @property
    def module(self) -> nn.Module:
        """The sharded module."""
        module = self.sharding.module()
        assert module is not None
        return module

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank."""
        return self.sharding.axes.rank == 0

    @property
    def optimizer_name(self) -> str | None:
        """Class of the optimizer that the user chose."""
        inner = self.optimizer.optimizer if isinstance(self.optimizer, LogicalOptimizer) else self.optimizer
        return None if inner is None else type(inner).__name__

    def is_whole(self, shard: torch.Tensor) -> bool:
        """Whether the optimizer keeps the state of a shard's parameter in full, on its owner."""
        return whole_optimizer(self.optimizer, shard) is not None

    def owns(self, shard: torch.Tensor) -> bool:
        """Whether this rank keeps that state."""
        return isinstance(self.optimizer, LogicalOptimizer) and self.optimizer.owns(shard)

    def piece(self, name: str, part: torch.Tensor) -> Piece:
        """This rank's range of something that has one value per element of a parameter."""
        place = self.sharding.places[name]
        return Piece(part.detach(), place.range(self.sharding.rank).start, place.shape)

    def names(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """The optimizer's groups, each with the names of its parameters."""
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            owners = [owner_of(shard) for shard in group["params"]]
            yield group, [owner.name for owner in owners if owner is not None]

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that a ``state_dict`` has."""
        return {
            f"{path}.{name}" if path else name: buffer
            for path, module in self.module.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }

    def ties(self) -> dict[str, str]:
        """Other names of tied parameters, each with the one in :attr:`Sharding.places`."""
        first = {id(place.parameter): name for name, place in self.sharding.places.items()}
        everywhere = self.module.named_parameters(remove_duplicate=False)
        return {name: kept for name, parameter in everywhere if (kept := first[id(parameter)]) != name}

    def by_own_names(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Tensors of a checkpoint, tied ones under the name in :attr:`Sharding.places`."""
        ties = self.ties()
        return {ties.get(name, name): one for name, one in stored.items()}


# -- out of a run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Captured:
    """A run at one moment; tensors are its own, not copies.

    Attributes:
        pieces: What this rank has of tensors.
        shared: Plain data that is the same on all ranks.
        own: Plain data of this rank.
    """

    pieces: dict[str, Piece]
    shared: dict[str, Any]
    own: dict[str, Any]


def capture(run: Run, excluded: set[str]) -> Captured:
    """Collective. What a checkpoint shall hold, without the parameters ``excluded``."""
    sharding = run.sharding
    sharding.refresh()  # parameters written by hand reach their shards
    sharding.reducer.reduce_owed()
    pieces = {}
    for name in (name for name in sharding.places if name not in excluded):
        shard = sharding.shard(name)
        pieces[f"model/{name}"] = run.piece(name, shard)
        if shard.grad is not None:
            pieces[f"gradient/{name}"] = run.piece(name, shard.grad)
    values, odd = _capture_optimizer(run, pieces)
    found = sharding.axes.gather_objects(values, "values of the optimizer's state")
    shared = {
        "groups": [
            {"names": names, "settings": {k: v for k, v in group.items() if k not in ("params", "param_names")}}
            for group, names in run.names()
        ],
        "values": {name: entries for of_rank in found for name, entries in of_rank.items()},
        "extra": {
            path: module.get_extra_state()
            for path, module in run.module.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        },
        "scheduler": run.scheduler.state_dict() if run.scheduler is not None else None,
    }
    own = {"random": random_state(), "optimizer": odd, "buffers": _own_buffers(run, pieces)}
    if run.loader is not None:
        own["loader"] = run.loader.state_dict()
    return Captured(pieces, shared, own)


def _capture_optimizer(run: Run, pieces: dict[str, Piece]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Local. Adds tensors to ``pieces``; entries that all ranks share, and those that are this rank's alone."""
    values: dict[str, Any] = {}
    odd: dict[str, Any] = {}
    if run.optimizer is None:
        return values, odd
    for group, names in run.names():
        for shard, name in zip(group["params"], names, strict=True):
            is_whole = run.is_whole(shard)
            if is_whole and not run.owns(shard):
                continue
            for key, value in run.optimizer.state.get(shard, {}).items():
                if torch.is_tensor(value) and value.dim() and (is_whole or value.shape == shard.shape):
                    flat = value.detach().reshape(-1)
                    piece = Piece(flat, 0, value.shape) if is_whole else run.piece(name, flat)
                    pieces[f"optimizer/{key}/{name}"] = piece
                elif torch.is_tensor(value) and value.dim():
                    odd.setdefault(name, {})[key] = value
                elif is_whole or run.is_first:
                    values.setdefault(name, {})[key] = value.cpu() if torch.is_tensor(value) else value
    return values, odd


def _own_buffers(run: Run, pieces: dict[str, Piece]) -> dict[str, torch.Tensor]:
    """Collective. Adds the first rank's buffers to ``pieces``; those of this rank that differ from them."""
    buffers = run.buffers()
    sums = {}
    for name, buffer in buffers.items():
        checksum = xxhash.xxh3_64()
        for piece in bytes_of(buffer):
            checksum.update(piece)
        sums[name] = checksum.hexdigest()
    firsts = run.sharding.axes.gather_objects(sums, "checksums of buffers")[0] if buffers else {}
    if run.is_first:
        for name, buffer in buffers.items():
            pieces[f"buffer/{name}"] = Piece(buffer.detach().reshape(-1), 0, buffer.shape)
    return {name: buffer.detach() for name, buffer in buffers.items() if sums[name] != firsts[name]}


def random_state() -> dict[str, Any]:
    """Local. Where this process's random generators stand: PyTorch's, Python's and, if it is used, NumPy's."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.accelerator.is_available():
        state["accelerator"] = torch.get_device_module(torch.accelerator.current_accelerator()).get_rng_state()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Local. Put the generators there."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "accelerator" in state and torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(state["accelerator"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


def seed_from(state: Mapping[str, Any], rank: int) -> None:
    """Local. Seed the generators for one of another number of ranks: each has numbers of its own."""
    seed = xxhash.xxh3_64_intdigest(bytes_of_all(state["torch"]), rank)
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def bytes_of_all(tensor: torch.Tensor) -> bytes:
    """A small tensor's bytes."""
    return b"".join(bytes(piece) for piece in bytes_of(tensor))


# -- into a run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """What of a checkpoint is loaded.

    Attributes:
        strict: All parameters and buffers of the module must be there, and no other ones.
        optimizer: Optimizer state and accumulated gradients as well.
        scheduler: The schedule's state as well.
        progress: Counters, random generators and the loader's position as well.
    """

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    progress: bool = True


def misfits(run: Run, manifest: Manifest, shared: Mapping[str, Any], wanted: Wanted) -> list[str]:
    """Local. What of a checkpoint does not fit a run, in words."""
    theirs = run.by_own_names({**manifest.of("model"), **manifest.of("buffer")})
    shapes = {name: place.shape for name, place in run.sharding.places.items()}
    ours = {**shapes, **{name: buffer.shape for name, buffer in run.buffers().items()}}
    found = _shape_misfits(theirs, ours)
    if wanted.strict:
        empty = {name for name, shape in ours.items() if not shape.numel()}
        if missing := [n for n in ours if n not in theirs and n not in manifest.excluded and n not in empty]:
            found.append(f"it does not have {some(missing)}")
        if unknown := [name for name in theirs if name not in ours]:
            found.append(f"the module does not have {some(unknown)}")
    if wanted.optimizer and run.optimizer is not None and manifest.optimizer is not None:
        found += _optimizer_misfits(run, manifest, shared)
    return found


def _shape_misfits(stored: Mapping[str, StoredTensor], shapes: Mapping[str, torch.Size]) -> list[str]:
    differ = [
        f"{name} {tuple(one.shape)} there, {tuple(shapes[name])} here"
        for name, one in stored.items()
        if name in shapes and tuple(one.shape) != tuple(shapes[name])
    ]
    return [f"shapes differ: {some(differ)}"] if differ else []


def _optimizer_misfits(run: Run, manifest: Manifest, shared: Mapping[str, Any]) -> list[str]:
    if manifest.optimizer != run.optimizer_name:
        return [f"its optimizer is {manifest.optimizer}, this one {run.optimizer_name}"]
    theirs = {frozenset(group["names"]) for group in shared["groups"]}
    found = []
    for number, (_, names) in enumerate(run.names()):
        if frozenset(names) not in theirs:
            known = {name for group in theirs for name in group}
            new = [name for name in names if name not in known]
            what = f"the optimizer there did not train {some(new)}" if new else "it is divided otherwise there"
            found.append(f"parameter group {number} differs: {what}")
    return found


def targets(run: Run, manifest: Manifest, wanted: Wanted) -> dict[str, Piece]:
    """Local. Where this rank wants what: where masters and optimizer state are; new tensors where there are none."""
    found = {}
    places = run.sharding.places
    ties, buffers = run.ties(), run.buffers()
    for kind in ("model", "buffer"):  # files of weights do not say which is which
        for stored_name in manifest.of(kind):
            name = ties.get(stored_name, stored_name)
            if name in places:
                found[f"{kind}/{stored_name}"] = run.piece(name, run.sharding.shard(name))
            elif name in buffers:
                empty = torch.empty(buffers[name].numel(), dtype=buffers[name].dtype)
                found[f"{kind}/{stored_name}"] = Piece(empty, 0, buffers[name].shape)
    if wanted.optimizer and run.optimizer is not None:
        for name in manifest.of("gradient").keys() & places.keys():
            shard = run.sharding.shard(name)
            found[f"gradient/{name}"] = run.piece(name, torch.empty_like(shard) if shard.grad is None else shard.grad)
        for path, stored in manifest.of("optimizer").items():
            key, _, name = path.partition("/")
            piece = _target_of_state(run, name, key, stored) if name in places else None
            if piece is not None:
                found[f"optimizer/{path}"] = piece
    return found


def _target_of_state(run: Run, name: str, key: str, stored: StoredTensor) -> Piece | None:
    assert run.optimizer is not None
    shard = run.sharding.shard(name)
    is_whole = run.is_whole(shard)
    if is_whole and not run.owns(shard):
        return None
    wanted = (stored.numel if is_whole else len(shard), stored.torch_dtype, shard.device)
    there = run.optimizer.state.get(shard, {}).get(key)
    if torch.is_tensor(there) and there.is_contiguous() and (there.numel(), there.dtype, there.device) == wanted:
        target = there.detach().view(-1)
    else:
        target = torch.empty(wanted[0], dtype=wanted[1], device=wanted[2])
    return Piece(target, 0, torch.Size(stored.shape)) if is_whole else run.piece(name, target)


def restore(run: Run, read: Mapping[str, Piece], shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
    """Collective. Put what was read into the run.

    Args:
        run: Whose masters have been read in place.
        read: The targets.
        shared: As captured.
        own: As captured by the rank of the same number; None if there is another number of ranks.
    """
    sharding = run.sharding
    torch.autograd.graph.increment_version([shard for page in sharding.pages for shard in page.shards])
    sharding.refresh()
    own_buffers = own["buffers"] if own is not None else {}
    for name, buffer in run.buffers().items():
        piece = read.get(f"buffer/{name}", read.get(f"model/{name}"))
        value = own_buffers.get(name, piece.part if piece is not None else None)
        if value is not None:
            buffer.copy_(value.view_as(buffer))
    for path, state in shared["extra"].items():
        run.module.get_submodule(path).set_extra_state(state)


def restore_optimizer(
    run: Run, read: Mapping[str, Piece], shared: Mapping[str, Any], own: Mapping[str, Any] | None
) -> None:
    """Local. The optimizer's state, its groups' settings and the gradients that were accumulated."""
    assert run.optimizer is not None
    sharding = run.sharding
    sharding.reducer.discard()
    for name in sharding.places:
        gradient = read.get(f"gradient/{name}")
        sharding.shard(name).grad = None if gradient is None else gradient.part
    entries = _entries(run, read, [shared["values"], own["optimizer"] if own is not None else {}])
    settings = {frozenset(group["names"]): group["settings"] for group in shared["groups"]}
    run.optimizer.state.clear()
    for group, names in run.names():
        group.update({k: v for k, v in settings[frozenset(names)].items() if k not in IMPLEMENTATION})
        is_on_device = group.get("capturable") or group.get("fused")
        for shard, name in zip(group["params"], names, strict=True):
            if name in entries:
                step = entries[name].get("step")
                if torch.is_tensor(step) and is_on_device:
                    entries[name]["step"] = step.to(shard.device)
                run.optimizer.state[shard] = entries[name]


def _entries(run: Run, read: Mapping[str, Piece], values: list[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The entries of the optimizer's state that belong on this rank, by parameter."""
    entries: dict[str, dict[str, Any]] = {}
    for path, piece in read.items():
        kind, _, rest = path.partition("/")
        if kind == "optimizer":
            key, _, name = rest.partition("/")
            is_whole = run.is_whole(run.sharding.shard(name))
            entries.setdefault(name, {})[key] = piece.part.view(piece.full_shape) if is_whole else piece.part
    for name, more in (item for one in values for item in one.items()):
        place = run.sharding.places.get(name)
        if place is None or not place.slot.numel:
            continue  # an empty parameter has no tensors stored: its state begins anew
        shard = run.sharding.shard(name)
        if not run.is_whole(shard) or run.owns(shard):
            entries.setdefault(name, {}).update(more)
    return entries
