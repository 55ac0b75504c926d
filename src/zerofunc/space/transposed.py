"""Linear maps between shards and full tensors, each with its transpose, for derivatives over sharded parameters.

Two kinds of values meet here. A *sharded* one has a part on each rank; the inner product of two is the sum over the
shard axis. A *local* one is a whole tensor on each rank, a function of that rank's data; the inner product of two is
the mean over all ranks. With these,

    gather: sharded to local              and  reduce (mean over ranks, this rank's part): local to sharded,
    total (sum over the shard axis)       and  mean over all ranks,
    part (this rank's part of a tensor)   and  its padding with zeros, times the number of shards,

are transposed pairs, at every stage (at stage 0 the shard axis has one rank, gather copies and reduce averages). So a
gradient over shards is that of the mean loss, and every order of derivatives, in every nesting, follows from the rules
below, which only name the partner.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function

from zerofunc.module.sharding import Sharding
from zerofunc.pages.layout import PageLayout, Slot
from zerofunc.pages.page import Page
from zerofunc.pages.paged_tensor import PagedTensor
from zerofunc.ranks.buffers import alias, below_transforms, outside_transforms

Batch = tuple[int, ...]


class TangentPull:
    """A pullback to a module's own shards of which the tangents alone are wanted: its gradients are not reduced.

    They come out nan. A gradient that something else takes through the same graph is not meant.
    """

    def __init__(self) -> None:
        self._level: int | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """The pullback runs inside."""
        self._level = None if torch.is_anomaly_enabled() else _level()
        try:
            yield
        finally:
            self._level = None

    @property
    def is_running(self) -> bool:
        """Whether it runs now, and no other one that it has called."""
        return self._level == _level()


def _level() -> int:
    return int(torch._C._functorch.maybe_current_level() or 0)


class Gather(Function):
    """Parameters of full shape of one page, from this rank's parts; read lazily, as pages of their own.

    ``Gather.apply(sharding, page, is_own, pull, *parts)``: each part is [*batch, n]; each result [*batch, *shape].
    ``is_own`` tells that on every rank the parts are the module's own shards, so that its own pages serve. ``pull``
    may say that of some gradients the tangents alone are wanted.
    """

    @staticmethod
    def forward(
        sharding: Sharding, page: Page, is_own: bool, pull: TangentPull | None, *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        if not is_own:
            _refuse_tracing("a gather of shards")
        with below_transforms():
            source = page if is_own else _page_of(page, parts)
            taken_at = page.versions() if is_own else None
            return tuple(PagedTensor(sharding.pager, place, taken_at=taken_at) for place in source.places)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.sharding, ctx.page, ctx.is_own, ctx.pull = inputs[:4]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        is_wanted = not (ctx.is_own and ctx.pull is not None and ctx.pull.is_running)
        return None, None, None, None, *Reduce.apply(ctx.sharding, ctx.page, is_wanted, *gradients)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, ___: None, ____: None, *tangents: torch.Tensor | None) -> Any:
        given = _no_none(ctx.sharding, ctx.page, tangents)
        _refuse_basis(ctx.sharding, given)
        return Gather.apply(ctx.sharding, ctx.page, False, None, *given)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, sharding: Sharding, page: Page, is_own: bool, pull: Any, *parts: torch.Tensor
    ) -> Any:
        batched = _batch_first(info.batch_size, in_dims[4:], parts)
        return Gather.apply(sharding, page, False, None, *batched), (0,) * len(parts)


class Reduce(Function):
    """This rank's parts of the mean over ranks of one page's local tensors; the transpose of :class:`Gather`.

    ``Reduce.apply(sharding, page, is_wanted, *tensors)``: each tensor is [*batch, *shape], or None for zeros; each part
    [*batch, n]. With ``is_wanted`` false the value is not computed, only its tangent.
    """

    @staticmethod
    def forward(
        sharding: Sharding, page: Page, is_wanted: bool, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        _refuse_tracing("a reduction over ranks")
        with below_transforms():
            batch = _batch_of(page, tensors)
            parts = _parts(page, sharding.rank)
            if not is_wanted:
                return tuple(page.master.new_full((*batch, part.stop - part.start), math.nan) for part in parts)
            label = f"reduction of {page.label} in parameter space" + _over(batch)
            sharding.axes.agree(label)
            reduced = full = _packed(sharding, page, tensors, batch)
            if sharding.axes.shard.size > 1:
                reduced = full.new_empty(math.prod(batch) * page.layout.shard_numel)
                sharding.axes.shard.reduce_scatter(reduced, full, label).wait()
            sharding.axes.replicate.all_reduce(reduced, label).wait()
            reduced = reduced.to(page.master.device)
            rows = reduced.view(*batch, page.layout.shard_numel)
            if not batch:
                return tuple(alias(reduced, part.start, (part.stop - part.start,)) for part in parts)
            return tuple(rows[..., part].clone() for part in parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.sharding, ctx.page = inputs[:2]
        ctx.is_given = [tensor is not None for tensor in inputs[3:]]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        gathered = Gather.apply(ctx.sharding, ctx.page, False, None, *_no_none(ctx.sharding, ctx.page, gradients))
        pairs = zip(gathered, ctx.is_given, strict=True)
        return None, None, None, *(tensor if is_given else None for tensor, is_given in pairs)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, ___: None, *tangents: torch.Tensor | None) -> Any:
        return Reduce.apply(ctx.sharding, ctx.page, True, *tangents)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, sharding: Sharding, page: Page, is_wanted: bool, *tensors: torch.Tensor | None
    ) -> Any:
        batched = _batch_first(info.batch_size, in_dims[3:], tensors)
        return Reduce.apply(sharding, page, is_wanted, *batched), (0,) * len(tensors)


class Total(Function):
    """Sum over the shard axis of one tensor per rank, the same on every rank of the axis."""

    @staticmethod
    def forward(sharding: Sharding, value: torch.Tensor, label: str) -> torch.Tensor:
        _refuse_tracing(label)
        with below_transforms():
            sharding.axes.agree(f"{label}{_over(tuple(value.shape))}")
            return sharding.axes.shard.sum(value.clone(memory_format=torch.contiguous_format), label)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.sharding, _, ctx.label = inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, Mean.apply(ctx.sharding, gradient, ctx.label), None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor, __: None) -> Any:
        return Total.apply(ctx.sharding, tangent, ctx.label)

    @staticmethod
    def vmap(info: Any, in_dims: Any, sharding: Sharding, value: torch.Tensor, label: str) -> Any:
        return Total.apply(sharding, value.movedim(in_dims[1], 0), label), 0


class Mean(Function):
    """Mean over all ranks of one tensor per rank, the same on every rank.

    Between local values it is its own transpose; from a local value to one per shard it is the transpose of
    :class:`Total`, which differs in nothing but the name of the space.
    """

    @staticmethod
    def forward(sharding: Sharding, value: torch.Tensor, label: str) -> torch.Tensor:
        _refuse_tracing(label)
        with below_transforms():
            sharding.axes.agree(f"{label}{_over(tuple(value.shape))}")
            value = value.clone(memory_format=torch.contiguous_format)
            return sharding.axes.sum(value, label).div_(sharding.axes.num_ranks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.sharding, _, ctx.label = inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, Mean.apply(ctx.sharding, gradient, ctx.label), None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor, __: None) -> Any:
        return Mean.apply(ctx.sharding, tangent, ctx.label)

    @staticmethod
    def vmap(info: Any, in_dims: Any, sharding: Sharding, value: torch.Tensor, label: str) -> Any:
        return Mean.apply(sharding, value.movedim(in_dims[1], 0), label), 0


class Part(Function):
    """This rank's part of a full tensor, and backwards its padding with zeros. Communicates nothing.

    ``Part.apply(flat, start, stop, num_shards)``: [*batch, numel] to [*batch, stop - start].
    """

    @staticmethod
    def forward(flat: torch.Tensor, start: int, stop: int, num_shards: int) -> torch.Tensor:
        return flat[..., start:stop].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        flat, ctx.start, ctx.stop, ctx.num_shards = inputs
        ctx.numel = flat.shape[-1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        padded = torch.nn.functional.pad(gradient, (ctx.start, ctx.numel - ctx.stop))
        return padded * ctx.num_shards, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> Any:
        return Part.apply(tangent, ctx.start, ctx.stop, ctx.num_shards)

    @staticmethod
    def vmap(info: Any, in_dims: Any, flat: torch.Tensor, start: int, stop: int, num_shards: int) -> Any:
        return Part.apply(flat.movedim(in_dims[0], 0), start, stop, num_shards), 0


# -- pages of given parts ---------------------------------------------------------------------------------------------


def _page_of(page: Page, parts: Sequence[torch.Tensor]) -> Page:
    """A page like ``page`` that holds ``parts`` [*batch, n] instead of the module's own shards."""
    batch = tuple(parts[0].shape[:-1])
    padding = page.layout.shard_numel - sum(part.shape[-1] for part in parts)
    master = torch.cat([*parts, parts[0].new_zeros(*batch, padding)], -1)
    label = f"{page.label} from given shards{_over(batch)}"
    if not batch:
        return Page(page.layout, page.dtype, master, label=label)
    copies = math.prod(batch)
    slots = tuple(Slot(s.name, torch.Size((*batch, *s.shape)), s.offset * copies) for s in page.layout.slots)
    layout = PageLayout(page.layout.index, slots, page.layout.key, page.layout.numel * copies, page.layout.num_shards)
    return Page(layout, page.dtype, master.view(copies, -1), label=label)


def _parts(page: Page, rank: int) -> list[slice]:
    """Where each parameter's part lies in the shard of a rank."""
    return [page.layout.in_shard(index, rank) for index in range(len(page.layout.slots))]


def _batch_of(page: Page, tensors: Sequence[torch.Tensor | None]) -> Batch:
    for slot, tensor in zip(page.layout.slots, tensors, strict=True):
        if tensor is not None:
            return tuple(tensor.shape[: tensor.dim() - len(slot.shape)])
    return ()


def _packed(sharding: Sharding, page: Page, tensors: Sequence[torch.Tensor | None], batch: Batch) -> torch.Tensor:
    """The page over the number of ranks, [num_shards, *batch, shard_numel] as one dimension; None is zero."""
    layout, axes, copies = page.layout, sharding.axes, math.prod(batch)
    # What is split is needed no longer than the reduction takes.
    allocate = sharding.reducer.pool.take if axes.shard.size > 1 and copies == 1 else torch.empty
    full = allocate(copies * layout.padded_numel, dtype=page.master.dtype, device=page.device).view(copies, -1)
    full[:, layout.numel :].zero_()
    for slot, tensor in zip(layout.slots, tensors, strict=True):
        place = full[:, slot.offset : slot.offset + slot.numel]
        if tensor is None:
            place.zero_()
        elif tensor.dtype == full.dtype:
            torch.mul(tensor.reshape(copies, -1), 1 / axes.num_ranks, out=place)
        else:
            place.copy_(tensor.reshape(copies, -1)).div_(axes.num_ranks)
    if copies == 1:
        return full.view(-1)
    return full.view(copies, layout.num_shards, -1).transpose(0, 1).reshape(-1)


def _no_none(sharding: Sharding, page: Page, parts: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """The parts with zeros for None."""
    given = next(part for part in parts if part is not None)
    return [
        part if part is not None else given.new_zeros(*given.shape[:-1], mine.stop - mine.start)
        for part, mine in zip(parts, _parts(page, sharding.rank), strict=True)
    ]


def _batch_first(size: int, dims: Sequence[int | None], tensors: Sequence[Any]) -> list[Any]:
    """Every tensor with the mapped dimension first; those that are not mapped are expanded."""
    return [
        t if t is None else t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
        for dim, t in zip(dims, tensors, strict=True)
    ]


def _over(batch: Batch) -> str:
    return f" over a vmap of {' x '.join(map(str, batch))}" if batch else ""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor under functorch's wrappers; batch dimensions of a vmap show."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


# -- what would give wrong numbers ------------------------------------------------------------------------------------


def _refuse_tracing(what: str) -> None:
    """A tracer would take the result of a collective for a constant, and be wrong at other shards."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        raise NotImplementedError(
            f"{what} cannot be traced (torch.func.linearize, make_fx); use torch.func.jvp over shards instead"
        )


def _refuse_basis(sharding: Sharding, tangents: Sequence[torch.Tensor]) -> None:
    """Collective under vmap. Refuse the tangents of ``torch.func.jacfwd`` over shards.

    It pushes the basis vectors of this rank's parts one by one, while the other ranks push theirs: what comes out is
    the derivative along their sum.

    Raises:
        ValueError: On every rank, if two ranks or more push basis vectors in the same entries of the vmap.
    """
    if sharding.axes.shard.size == 1 or all(plain(tangent) is tangent for tangent in tangents):
        return
    with outside_transforms():
        rows = [plain(tangent) for tangent in tangents]
        fits = all(r.dim() == 2 and len(r) == len(rows[0]) for r in rows)
        pushed = torch.zeros(
            sharding.axes.shard.size, 2
        )  # of each rank: its first basis vector's row, and the next one's
        pushed[sharding.rank] = torch.tensor(_identity_rows(torch.cat(rows, 1)) if fits else (0, 0))
        sharding.axes.agree("tangents over shards")
        sharding.axes.shard.sum(pushed, "tangents over shards")
    ranges = sorted((first, last) for first, last in pushed.tolist() if last > first)
    if any(ahead[1] > behind[0] for ahead, behind in itertools.pairwise(ranges)):
        raise ValueError(
            "torch.func.jacfwd (or hessian) over shards would push a basis vector of every rank at once, and mix their "
            "derivatives. Use zerofunc.jacfwd(function, module)(shards), torch.func.jacrev, or vmap of jvp over "
            "directions that all ranks share."
        )


def _identity_rows(rows: torch.Tensor) -> tuple[int, int]:
    """Where rows of an identity matrix are, if all others are zero; an empty range otherwise."""
    row, column = rows.nonzero(as_tuple=True)
    consecutive = bool((row.diff() == 1).all()) and bool((column.diff() == 1).all())
    if len(row) >= min(2, rows.shape[1]) > 0 and consecutive and bool((rows[row, column] == 1).all()):
        return int(row[0]), int(row[-1]) + 1
    return 0, 0
