"""The module's side of gradients: what ``parameter.grad`` of a sharded parameter gives and takes.

The shards own the gradients. A parameter's is a view of theirs: full and averaged over the ranks, gathered when it is
read, page by page. What is assigned to it, or written into it in place, is this rank's own, and is averaged over the
ranks before it is used, as the gradient of a backward is.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree

from zerofunc.gradients.reduction import Reducer
from zerofunc.pages.held_parameter import held_kind
from zerofunc.pages.norms import foreach_norm, unscale
from zerofunc.pages.page import Page, Place
from zerofunc.pages.paged_tensor import PagedTensor, _map, _written
from zerofunc.pages.pager import Pager
from zerofunc.pages.parts import Shard, plain, reduced_gradient
from zerofunc.ranks.buffers import below_transforms
from zerofunc.ranks.collectives import Axes

aten = torch.ops.aten


class Gradients:
    """Reads and takes the gradients of a sharded module's parameters, which are numbered as the reducer's.

    Attributes:
        axes: The ranks that gradients are averaged over.
        reducer: What averages them.
        pager: Gathers pages of gradient, one at a time.
    """

    def __init__(self, axes: Axes, reducer: Reducer) -> None:
        self.axes = axes
        self.reducer = reducer
        self.pager = Pager(axes, resident_bytes=0, prefetch=False)
        self._pages: WeakValueDictionary[int, GradientPage] = WeakValueDictionary()

    def attach(self) -> None:
        """Local. Let the parameters' ``grad`` come from here. They do not keep this alive."""
        for number, page in enumerate(self.reducer.pages):
            for slot, parameter in enumerate(page.parameters):
                if not isinstance(parameter, PagedTensor):
                    parameter.__class__ = held_kind(type(parameter))
                vars(parameter)["_gradients"] = weakref.ref(self), number, slot

    def name(self, number: int, slot: int) -> str:
        """Local. The parameter's name."""
        return self.reducer.pages[number].layout.slots[slot].name

    def read(self, number: int, slot: int) -> torch.Tensor | None:
        """Local. The full mean gradient of a parameter, or None; on a single rank a view of the shard's."""
        page = self.reducer.pages[number]
        shard = page.shards[slot]
        if reduced_gradient(shard) is None and not self.is_pending(number, slot):
            return None
        if self.axes.num_ranks == 1 and shard.device == page.device:
            self.reducer.reduce_owed()
            return None if shard.grad is None else shard.grad.view(page.layout.slots[slot].shape)
        found = self._pages.get(number)
        if found is None or not found.is_current(slot):
            found = self._pages[number] = GradientPage(self, number)
        return Gradient(self.pager, Place(found, slot))

    def is_pending(self, number: int, slot: int) -> bool:
        """Local. Whether a parameter's gradient has, or may have, something that is not averaged yet."""
        shard = self.reducer.pages[number].shards[slot]
        return shard.assigned is not None or (self.reducer.is_owed(number) and shard.requires_grad)

    def assign(self, number: int, slot: int, value: torch.Tensor | None) -> None:
        """Local, the same on all ranks. Replace a parameter's gradient by this rank's own, or forget it with None.

        Collective where the value is another parameter's gradient, or a former one.

        Raises:
            RuntimeError: If it has not the parameter's shape, or the parameter requires no gradient.
        """
        page = self.reducer.pages[number]
        name, shape = page.layout.slots[slot].name, page.layout.slots[slot].shape
        if value is not None and value.shape != shape:
            raise RuntimeError(f"grad of {name!r} was given shape {tuple(value.shape)}; expected {tuple(shape)}")
        if value is not None and not page.parameters[slot].requires_grad:
            raise RuntimeError(f"grad of {name!r}, which requires no gradient, would go nowhere; thaw it first")
        if isinstance(value, Gradient):
            if value.is_of(page.shards[slot]):  # as after p.grad += …
                return
            value = value.full()
        self.reducer.assign(number, slot, value)


class GradientPage(Page):
    """The gradients of one page's shards as they are when it is made, gathered as a page of parameters is."""

    def __init__(self, source: Gradients, number: int) -> None:
        own = source.reducer.pages[number]
        self.source, self.number, self.owners = source, number, own.shards
        self.layout, self.dtype, self.full = own.layout, own.master.dtype, None
        self.shards, self.parameters, self.seen, self.unit = [], [], [], []
        self.copies = WeakValueDictionary()
        self.label = f"the gradient of {own.label}"
        self.parts = [reduced_gradient(shard) for shard in own.shards]
        self._changes = 0
        pending = [slot for slot in range(len(own.shards)) if source.is_pending(number, slot)]
        self._pending = {slot: own.shards[slot].generation for slot in pending}

    def is_current(self, slot: int) -> bool:
        """Local. Whether a slot's gradient is its shard's still."""
        shard = self.owners[slot]
        if self.source.is_pending(self.number, slot):
            return self._pending.get(slot) == shard.generation
        return slot not in self._pending and self.parts[slot] is reduced_gradient(shard)

    def awaiting(self, slot: int) -> torch.Tensor | None:
        """Local. This rank's own full gradient, if it was assigned and is not averaged yet."""
        return self.owners[slot].assigned if self._pending.get(slot) == self.owners[slot].generation else None

    def part(self, slot: int) -> torch.Tensor:
        """Collective where it is not averaged yet. This rank's part of a slot's mean gradient.

        Raises:
            RuntimeError: If it was cleared or replaced before it was averaged.
        """
        if slot in self._pending:
            if self._pending[slot] != self.owners[slot].generation:
                raise RuntimeError(
                    f"the gradient of {self.layout.slots[slot].name!r} was cleared or replaced before it was averaged "
                    "over the ranks; take a copy before: parameter.grad.clone()"
                )
            self.source.reducer.reduce_owed()
            found = reduced_gradient(self.owners[slot])
            self.parts[slot] = torch.zeros_like(plain(self.owners[slot])) if found is None else found
            self._changes += 1
            del self._pending[slot]
        part = self.parts[slot]
        assert part is not None
        return part

    def replace(self, slot: int, value: torch.Tensor) -> None:
        """Local. Give a slot this rank's own full gradient, which is averaged before it is used.

        Raises:
            RuntimeError: If the parameter has another gradient by now, or none.
        """
        if not self.is_current(slot):
            raise RuntimeError(
                f"a former gradient of {self.layout.slots[slot].name!r} is written to; take a copy of it with .clone()"
            )
        self.source.reducer.assign(self.number, slot, value)
        self._pending[slot] = self.owners[slot].generation

    # -- as the pager sees it -------------------------------------------------------------------------------------

    @property
    def master(self) -> torch.Tensor:  # type: ignore[override]
        """This rank's part of the page, 1-D; zeros where a parameter has no gradient."""
        mine = torch.zeros(self.layout.shard_numel, dtype=self.dtype, device=self.owners[0].device)
        rank = self.source.axes.shard.rank
        for index, part in enumerate(self.parts):
            if part is not None:
                mine[self.layout.in_shard(index, rank)] = plain(part)
        return mine

    @property
    def is_its_own_copy(self) -> bool:
        """Never: ``master`` is made when it is asked for."""
        return False

    def versions(self) -> int:
        """A number that grows whenever a gradient of the page is changed."""
        return self._changes + sum([part._version for part in self.parts if part is not None])

    @property
    def noted(self) -> int:  # type: ignore[override]
        """A change of gradients makes no backward wrong."""
        return self.versions()


class Gradient(PagedTensor):
    """The full mean gradient of a parameter, or a view of it: reading it gathers its page.

    Collective, but for metadata: norms take one exchange; operators that scale in place act on each rank's part.
    """

    @property
    def _page(self) -> GradientPage:
        page = self._place.page
        assert isinstance(page, GradientPage)
        return page

    @property
    def _index(self) -> int:
        return self._place.index

    def is_of(self, shard: Shard) -> bool:
        """Local. Whether this is a shard's gradient as it is now, and all of it."""
        return not self._chain and self._page.owners[self._index] is shard and self._page.is_current(self._index)

    def _value(self) -> torch.Tensor:
        self._page.part(self._index)
        return super()._value()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As of any PagedTensor, but for norms and writes."""
        kwargs = kwargs or {}
        wholes = _wholes(args, kwargs)
        if wholes and func is aten.linalg_vector_norm.default and not any(args[2:]):
            return foreach_norm(_parts(wholes), float(args[1]) if len(args) > 1 else 2.0, kwargs.get("dtype"))[0]
        if wholes and func is aten._foreach_norm.Scalar:
            return foreach_norm(_parts(wholes), float(args[1]) if len(args) > 1 else 2.0, kwargs.get("dtype"))
        if wholes and _scales_in_place(func):
            return _scale(func, args, kwargs, wholes)
        written = [t for t in _written(func, args, kwargs) if isinstance(t, Gradient)]
        if written:
            return _write(func, args, kwargs, written)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name and metadata: printing never communicates."""
        return f"Gradient({self._place.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, sharded)"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:  # type: ignore[override]
        """Collective. A plain copy."""
        copied = memo[id(self)] = self.full()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Collective. Pickles as an ordinary tensor."""
        return self.full().__reduce_ex__(protocol)

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what} of the gradient of {self._place.name!r}: its data is sharded over the ranks and has no address. "
            "Use parameter.grad.clone(), or grad of zerofunc.shards(module)."
        )


def _wholes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Gradient]:
    """The gradients that an operator is about, if those are whole, and its other tensors are numbers."""
    if not args:
        return []
    first = list(args[0]) if isinstance(args[0], list | tuple) else [args[0]]
    others = [t for t in pytree.tree_leaves((args[1:], kwargs)) if isinstance(t, torch.Tensor)]
    fit = all(isinstance(g, Gradient) and not g._chain for g in first)
    return first if fit and all(t.dim() == 0 and not isinstance(t, PagedTensor) for t in others) else []


def _scales_in_place(func: Any) -> bool:
    """Whether an operator changes each element of its first argument by numbers alone."""
    name = func._opname
    is_elementwise = torch.Tag.pointwise in func.tags or name.startswith(("_foreach_", "_amp_foreach_"))
    return is_elementwise and name.endswith("_") and torch.Tag.nondeterministic_seeded not in func.tags


def _parts(gradients: list[Gradient]) -> list[torch.Tensor]:
    return [gradient._page.part(gradient._index) for gradient in gradients]


def _scale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: list[Gradient]) -> Any:
    """Change each rank's part, or its own gradient where that is not averaged yet."""
    pairs = [(gradient._page, gradient._index) for gradient in gradients]
    targets = [page.part(slot) if (own := page.awaiting(slot)) is None else own for page, slot in pairs]
    with below_transforms():
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            unscale(targets, *args[1:])
        else:
            rest = pytree.tree_map_only(torch.Tensor, lambda t: t.to(targets[0].device), args[1:])
            values = [plain(target) for target in targets]
            func(values if isinstance(args[0], list | tuple) else values[0], *rest, **kwargs)
    torch.autograd.graph.increment_version(targets)  # which no operator inside a dispatch does
    return args[0] if isinstance(args[0], torch.Tensor) else None


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Gradient]) -> Any:
    """Run an in-place operator on this rank's own full gradients, which are averaged before they are used."""
    own: dict[tuple[GradientPage, int], torch.Tensor] = {}
    with below_transforms():
        for gradient in written:
            page, slot = place = gradient._page, gradient._index
            if place not in own:
                found = page.awaiting(slot)
                own[place] = Gradient(gradient._pager, gradient._place).full() if found is None else found
    views = {id(g): g._through_chain(own[g._page, g._index]) for g in written}
    result = func(*_map(args, lambda t: _read(t, views)), **_map(kwargs, lambda t: _read(t, views)))
    for (page, slot), value in own.items():
        if page.awaiting(slot) is not value:
            page.replace(slot, value)
    back = {id(views[id(g)]): g for g in written}
    return pytree.tree_map_only(torch.Tensor, lambda tensor: back.get(id(tensor), tensor), result)


def _read(tensor: PagedTensor, known: dict[int, torch.Tensor]) -> torch.Tensor:
    found = known.get(id(tensor))
    return tensor._value() if found is None else found


_foreach_utils._foreach_supported_types += [Gradient]  # type: ignore[list-item]
