"""Sharding a module in place, and going back and forth between shards and full tensors.

The shards are the state: optimizers update them, checkpoints hold them. At stages 0 to 2 the module's parameters
stay ordinary tensors over one full flat buffer per page, refreshed when the shards have changed; at stage 3 they
become :class:`~zerofunc.pages.paged_tensor.PagedTensor` objects that gather their page when they are read.
"""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zerofunc.gradients.parameter_gradients import Gradients
from zerofunc.gradients.policy import ReductionPolicy
from zerofunc.gradients.reduction import Reducer
from zerofunc.kernels.selection import select_kernels
from zerofunc.module.admission import layouts_of, parameters_to_shard, refuse_unlike, refuse_writers, specs_of
from zerofunc.module.first_values import find_unfilled, first_rank_numbers, give_memory, send_buffers
from zerofunc.module.structure import Structure, was_replaced
from zerofunc.pages.building import build_page, release_derived, replace_parameters
from zerofunc.pages.page import Page, Place
from zerofunc.pages.paged_tensor import PagedTensor
from zerofunc.pages.pager import Pager
from zerofunc.pages.parts import reduced_gradient
from zerofunc.pages.state_tensor import give_addresses
from zerofunc.ranks.buffers import below_transforms, outside_transforms, uncompiled
from zerofunc.ranks.collectives import Axes, axes_of

MIB = 1 << 20
DEFAULT_PAGE_BYTES = 8 * MIB
DEFAULT_RESIDENT_BYTES = 64 * MIB


@dataclass(frozen=True)
class Usage:
    """Memory and traffic of a sharded module on this rank, in bytes.

    Attributes:
        parameters: Logical number of parameters, tied ones once.
        held_bytes: Parameters, master shards, gradients (and optimizer state, where asked of an engine) kept here.
        gathered_bytes: Gathered pages alive now (stage 3).
        gathered_peak_bytes: The most gathered page bytes ever alive: the budget, and what an operator was reading.
        gradient_peak_bytes: The most bytes of gradient buffers ever alive.
        buffer_bytes: Allocated now for gathered pages and gradients under way, idle buffers included.
        moved_bytes: Sent by this rank for parameters and gradients so far.
    """

    parameters: int
    held_bytes: int
    gathered_bytes: int
    gathered_peak_bytes: int
    gradient_peak_bytes: int
    buffer_bytes: int
    moved_bytes: int


class Sharding:
    """What :func:`shard` attaches to a module: its pages, and what keeps parameters and shards equal.

    ``places`` says where each parameter lies, in the order of ``names``: the module's, which need not be that of pages.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        axes: Axes,
        pages: list[Page],
        pager: Pager,
        names: Iterable[str],
        policy: ReductionPolicy,
    ) -> None:
        self.module = weakref.ref(module)
        self.stage = stage
        self.axes = axes
        self.pages = pages
        self.pager = pager
        pager.adopt(pages)
        places = {place.name: place for page in pages for place in page.places}
        self.places = {name: places[name] for name in names}
        self.optimizer: torch.optim.Optimizer | None = None
        self.settings: dict[str, Any] = {}  # what it was sharded with
        number = axes.main.number_module()
        for page in pages:
            page.label = f"{page.layout.label} of module {number}"
        differentiable = [page for page in pages if page.dtype.is_floating_point]
        in_flight = 1 if stage >= 2 else len(pages)
        self.reducer = Reducer(axes, differentiable, policy, in_flight, keep_idle=stage < 2, number=number)
        self.reducer.attach()
        self.gradients = Gradients(axes, self.reducer)
        self.gradients.attach()
        ids = []
        for name, place in self.places.items():
            for tensor, is_shard in ((place.parameter, False), (place.shard, True)):
                _owners[id(tensor)] = _Owner(weakref.ref(self), name, is_shard)
                ids.append(id(tensor))
        weakref.finalize(self, lambda: [_owners.pop(i) for i in ids])
        self._structure: Structure | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding | None:
        """The state of a deep copy of the module; at stages 0 to 2 that copy is an ordinary module."""
        module = self.module()
        if self.stage < 3 or module is None or id(module) not in memo:
            return None
        pager = memo[id(self.pager)] = copy.deepcopy(self.pager, memo)
        pages = [copy.deepcopy(page, memo) for page in self.pages]
        return Sharding(memo[id(module)], 3, self.axes, pages, pager, self.places, self.reducer.policy)

    @property
    def rank(self) -> int:
        """This process's place among those that pages are split over."""
        return self.axes.shard.rank

    def shard(self, name: str) -> torch.Tensor:
        """This rank's leaf tensor of a parameter; it requires a gradient if the parameter does so now."""
        place = self.places[name]
        shard, parameter = place.shard, place.parameter
        if shard.requires_grad != parameter.requires_grad:
            place.page.give_masters()
            with enable_inplace_requires_grad(True):  # allowed inside a transform as well
                shard.requires_grad_(parameter.requires_grad)
        return shard

    def check_intact(self) -> None:
        """Check that the module still has the parameters that were sharded, and no others.

        Raises:
            RuntimeError: If one was put in, replaced, taken out, or moved by ``module.to(...)``.
        """
        module = self.module()
        assert module is not None
        if self._structure is None:
            self._structure = Structure(module)
        elif not self._structure.is_same():
            self._structure.refuse_changes(module)
        for page in self.pages:
            moved = page.moved_slot()
            if moved is not None:
                raise was_replaced(moved.name)

    def refuse_other(self, settings: Mapping[str, Any]) -> None:
        """Local, the same on all ranks. Check that the module was sharded with these settings.

        Raises:
            ValueError: With each setting that differs.
        """
        ours, theirs = _one_by_one(self.settings), _one_by_one(settings)
        other = [
            f"{name} is {ours[name]!r}, asked for now: {value!r}"
            for name, value in theirs.items()
            if name in ours and ours[name] != value
        ]
        if other:
            raise ValueError(
                f"the module is sharded already, with other settings: {'; '.join(other)}. A module is sharded once: "
                "ask for the same settings, or build the module anew and load its weights."
            )
        self.check_intact()

    def refresh(self) -> None:
        """Collective where parameters or shards have changed. Make the module's parameters equal to the shards.

        Also tells autograd which parameters have changed, so that a backward over an older forward raises.
        """
        works = []
        with below_transforms():
            for page in self.pages:
                shards, parameters = page.note_changes()
                if page.full is None or not (shards or parameters):
                    continue
                if not page.is_aliased and parameters:
                    page.take_over(page.full, parameters, self.rank)
                    page.note_changes()
                if page.layout.num_shards > 1 or not page.is_aliased:
                    part = page.master.to(page.device, page.dtype)
                    works.append(self.axes.shard.all_gather(page.full, part, f"refresh of {page.label}"))
            for work in works:
                work.wait()

    def see_changes(self) -> None:
        """Collective where shards or parameters have changed. Let a forward begin with what the shards hold now.

        At stage 3 a page is gathered when it is read; autograd learns now that its parameters have changed, before it
        saves a view of one.
        """
        if self.stage < 3:
            self.refresh()
        elif torch._C._current_graph_task_id() == -1:
            for page in self.pages:
                if page.versions() != page.noted:
                    page.note_changes()

    def gather_parts(self, page: Page, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Collective. Gather per-parameter parts (zeros where missing) into a page, 1-D [padded_numel]."""
        mine = torch.zeros(page.layout.shard_numel, dtype=dtype, device=page.device)
        for index, slot in enumerate(page.layout.slots):
            if slot.name in parts:
                mine[page.layout.in_shard(index, self.rank)] = parts[slot.name].detach()
        if page.layout.num_shards == 1:
            return mine
        full = torch.empty(page.layout.padded_numel, dtype=dtype, device=page.device)
        self.axes.shard.all_gather(full, mine, f"gather of a tree on {page.label}").wait()
        return full

    def usage(self) -> Usage:
        """Memory and traffic on this rank."""
        held: dict[int, int] = {}
        for page in self.pages:
            tensors = [page.master, page.full, *map(reduced_gradient, page.shards)]
            for storage in [t.untyped_storage() for t in tensors if t is not None]:
                held[storage.data_ptr()] = storage.nbytes()
        return Usage(
            parameters=sum(page.layout.numel for page in self.pages),
            held_bytes=sum(held.values()),
            gathered_bytes=self.pager.pool.live_bytes(),
            gathered_peak_bytes=self.pager.pool.peak_bytes,
            gradient_peak_bytes=self.reducer.pool.peak_bytes,
            buffer_bytes=self.pager.pool.nbytes + self.reducer.pool.nbytes + self.axes.shard.buffer_bytes,
            moved_bytes=self.axes.moved_bytes,
        )


def _one_by_one(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, those of the reduction each for itself."""
    found = {name: value for name, value in settings.items() if not isinstance(value, ReductionPolicy)}
    for name in settings.keys() - found.keys():
        found.update({f"{name}.{field}": value for field, value in vars(settings[name]).items()})
    return found


@dataclass(frozen=True)
class _Owner:
    sharding: weakref.ref[Sharding]
    name: str
    is_shard: bool


_owners: dict[int, _Owner] = {}


def owner_of(tensor: torch.Tensor) -> _Owner | None:
    """Which sharding a parameter or a shard belongs to."""
    return _owners.get(id(tensor))


def place_of(parameter: torch.Tensor) -> tuple[Pager, Place] | None:
    """Where a parameter's data lies, and what gathers it; None for what is not sharded.

    A parameter that was built inside :class:`zerofunc.Init` has a place before it has a sharding.
    """
    owner = owner_of(parameter)
    sharding = owner.sharding() if owner is not None else None
    if owner is not None and sharding is not None:
        return sharding.pager, sharding.places[owner.name]
    if isinstance(parameter, PagedTensor) and not parameter._chain:
        return parameter._pager, parameter._place
    return None


def shardings() -> list[Sharding]:
    """All shardings alive in this process."""
    return list(dict.fromkeys(s for owner in _owners.values() if (s := owner.sharding()) is not None))


# -- shard ------------------------------------------------------------------------------------------------------------


def shard(
    module: nn.Module,
    stage: int,
    mesh: DeviceMesh | None = None,
    *,
    page_bytes: int = DEFAULT_PAGE_BYTES,
    resident_bytes: int = DEFAULT_RESIDENT_BYTES,
    persistence_bytes: int = 0,
    persistence_limit_bytes: float = math.inf,
    prefetch: bool = True,
    unsplit: Iterable[str] = (),
    param_dtype: torch.dtype | None = None,
    low_precision_masters: bool = False,
    masters_on_cpu: bool = False,
    timeout_s: float | None = None,
    second_order: bool = False,
    broadcast_buffers: bool = False,
    reduction: ReductionPolicy | None = None,
) -> nn.Module:
    """Collective. Shard a module's parameters over the data-parallel ranks, in place, and return it.

    Names, shapes and ``state_dict`` keys do not change, and parameters keep their identity and attributes. Every rank
    starts from the parameters and buffers of the first rank. What is on the meta device gets values page by page, from
    the ``reset_parameters`` of its module or an ``_init_weights`` around it. Afterwards ``loss.backward()`` leaves the
    mean gradient over all ranks in the ``grad`` of :func:`shards`. A module that was sharded with the same settings is
    returned as it is.

    Args:
        module: Any module, on its final device and in its final data types, or built in :class:`zerofunc.Init`.
        stage: 0: all ranks hold everything. 1: optimizer state is split. 2: gradients too. 3: parameters too.
        mesh: One axis (shard) or two (replicate, shard). All ranks on the shard axis by default.
        page_bytes: Parameters are gathered and reduced in pages of about this size.
        resident_bytes: Stage 3: bytes of gathered pages kept at a time.
        persistence_bytes: Stage 3: pages of at most this size are never evicted,
        persistence_limit_bytes: as long as they are not more than this together.
        prefetch: Stage 3: gather ahead the page that followed last time.
        unsplit: Names of modules whose parameters share one page, such as a mixture-of-experts block.
        param_dtype: What the module's floating-point parameters are computed and gathered in, such as bfloat16;
            shards stay float32. Their own data type by default.
        low_precision_masters: Keep shards, and so optimizer state, in that low precision too.
        masters_on_cpu: Keep shards and what an optimizer makes of them on the CPU; the module computes where it is.
        timeout_s: Seconds after which a rank that waits alone raises; those of ``init_distributed`` by default, or 600.
        second_order: Use kernels that have a second derivative in plain forwards too; see
            :func:`zerofunc.second_order`.
        broadcast_buffers: Begin every forward in training mode with the first rank's buffers, as DDP does. By default
            they are each rank's own after the start, such as BatchNorm's running statistics.
        reduction: How gradients are averaged: over the ranks, in the shards' data type, by default.

    Raises:
        ValueError: If the stage, a size or a module name is not valid, the module is part of a graph or was sharded
            with other settings, or parameters share memory.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is {stage!r}; expected 0, 1, 2 or 3")
    if page_bytes < 1 or resident_bytes < 0 or persistence_bytes < 0 or (timeout_s is not None and timeout_s <= 0):
        raise ValueError("page_bytes and timeout_s must be positive, resident_bytes and persistence_bytes not negative")
    reduction = reduction or ReductionPolicy()
    settings = {name: value for name, value in locals().items() if name != "module"}
    settings["unsplit"] = unsplit = sorted(unsplit)
    if isinstance(module.__dict__.get("_zerofunc"), Sharding):
        sharding_of(module).refuse_other(settings)
        return module
    parameters, unfilled = (
        parameters_to_shard(module, lambda tensor: owner_of(tensor) is not None),
        find_unfilled(module),
    )
    specs = specs_of(module, parameters, unsplit, param_dtype)
    axes = axes_of(mesh, replicate_all=stage == 0, timeout_s=timeout_s)
    refuse_writers(module, axes.num_ranks)
    refuse_unlike(parameters, axes)
    axes.agree(f"shard(stage={stage}, page_bytes={page_bytes}) of {[(s.name, tuple(s.shape)) for s in specs]}")
    pager = Pager(axes, resident_bytes, persistence_bytes, prefetch, persistence_limit_bytes)
    pages = []
    release_derived(module)
    with below_transforms():
        for inner, _ in unfilled:
            give_memory(inner)
        send_buffers(module, axes)
        for layout in layouts_of(specs, axes.shard.size, page_bytes):
            page_parameters = [parameters[slot.name] for slot in layout.slots]
            page = build_page(layout, page_parameters, stage, axes, low_precision_masters, masters_on_cpu)
            replace_parameters(page, page_parameters, pager)  # which frees what they held before
            pages.append(page)
    sharding = module.__dict__["_zerofunc"] = Sharding(module, stage, axes, pages, pager, parameters, reduction)
    sharding.settings = settings
    if unfilled:
        with first_rank_numbers(axes), torch.no_grad():
            for inner, fillers in unfilled:
                for give_values in fillers:
                    give_values()
                torch.autograd.graph.increment_version(list(inner.parameters(recurse=False)))  # if written by .data
        sharding.refresh()
    sharding.check_intact()  # which notes where parameters are, before anyone can replace one
    module.register_forward_pre_hook(_before_forward)
    give_addresses(module)
    select_kernels(module, second_order)
    _watch_optimizers()
    return module


def sharding_of(module: nn.Module) -> Sharding:
    """The state that :func:`shard` attached to ``module`` (or to the module that an engine wraps).

    Raises:
        ValueError: If it is not sharded.
    """
    inner = module.__dict__.get("_modules", {}).get("module") if "_zerofunc" not in module.__dict__ else None
    found = (inner if isinstance(inner, nn.Module) else module).__dict__.get("_zerofunc")
    if not isinstance(found, Sharding):
        raise ValueError(f"{type(module).__name__} is not sharded; call zerofunc.shard(module, stage) first")
    return found


def shards(module: nn.Module, frozen: bool = False) -> dict[str, torch.Tensor]:
    """This rank's part of every trainable parameter: leaf tensors, 1-D, that own ``grad`` (mean over ranks).

    Local. Parts are float32 for low-precision parameters, and empty where a parameter has no element on this rank.

    Args:
        module: A sharded module.
        frozen: Also return parameters that do not require a gradient.
    """
    sharding = sharding_of(module)
    sharding.check_intact()
    return {n: sharding.shard(n) for n in sharding.places if frozen or sharding.shard(n).requires_grad}


def refresh(module: nn.Module) -> None:
    """Collective. Make the module's parameters equal to the shards, however these were changed.

    Optimizer steps and the module's own forward do this by themselves. Call it after a change through ``.data``, which
    PyTorch does not count, or before reading parameters outside the module's forward after a change by hand.
    """
    sharding = sharding_of(module)
    torch.autograd.graph.increment_version([shard for page in sharding.pages for shard in page.shards])
    sharding.refresh()


def usage(module: nn.Module) -> Usage:
    """Local. Memory and traffic of a sharded module on this rank."""
    return sharding_of(module).usage()


# -- when shards change -----------------------------------------------------------------------------------------------


@uncompiled
def _before_forward(module: nn.Module, args: Any) -> None:
    sharding = module.__dict__.get("_zerofunc")  # None in a deep copy of a module at stages 0 to 2
    if sharding is None:
        return
    if torch._C._current_graph_task_id() == -1:
        sharding.reducer.forget_failed()
    if module.training and sharding.settings.get("broadcast_buffers") and torch._C._current_graph_task_id() == -1:
        with outside_transforms():
            send_buffers(module, sharding.axes)
    with torch._C._DisableFuncTorch():
        sharding.see_changes()


@functools.cache
def _watch_optimizers() -> None:
    """From the first sharded module on, see every optimizer's step."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _shardings_of(optimizer: torch.optim.Optimizer) -> list[Sharding]:
    owners = [owner_of(parameter) for parameter in _parameters_of(optimizer)]
    return list(dict.fromkeys(s for owner in owners if owner is not None and (s := owner.sharding()) is not None))


@uncompiled
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for sharding in _shardings_of(optimizer):
        sharding.check_intact()
        sharding.see_changes()  # what was written into parameters since the forward is stepped from
        sharding.reducer.reduce_owed()
    _refuse_other_sizes(optimizer)
    for parameter in _parameters_of(optimizer):
        owner = owner_of(parameter)
        if owner is not None and not owner.is_shard:
            raise RuntimeError(
                f"{type(optimizer).__name__} was built on parameter {owner.name!r} of a sharded module, whose "
                "shards are what is trained. Build it on zerofunc.shards(module).values(), or give it to "
                "zerofunc.initialize, which does so."
            )


def _refuse_other_sizes(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a state that was loaded, and belongs to shards of other sizes; looked at once for each state."""
    if vars(optimizer).get("_zerofunc_seen") is optimizer.state:
        return
    vars(optimizer)["_zerofunc_seen"] = optimizer.state
    is_whole = getattr(optimizer, "is_whole", lambda shard: False)  # a LogicalOptimizer's own
    for parameter in _parameters_of(optimizer):
        owner = owner_of(parameter)
        if owner is None or is_whole(parameter):
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value) and value.dim() == 1 and 1 < len(value) != len(parameter):
                raise ValueError(
                    f"the optimizer's state {key!r} of {owner.name!r} has {len(value)} elements; this rank's shard has "
                    f"{parameter.numel()}. It was saved on another number of ranks or at another stage: save "
                    "zerofunc.optimizer_state(model, optimizer), and load it with zerofunc.load_optimizer_state."
                )


@uncompiled
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # Fused optimizer kernels do not count versions; a step that changed nothing costs a refresh.
    updated = [p for p in _parameters_of(optimizer) if p.grad is not None and owner_of(p) is not None]
    torch.autograd.graph.increment_version(updated)
    for sharding in _shardings_of(optimizer):
        sharding.reducer.num_steps += 1
        sharding.gradients.pager.release()
        sharding.refresh()
