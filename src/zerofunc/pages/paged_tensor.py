"""PagedTensor: a parameter of full logical shape and no data, which gathers its page when an operator reads it.

Autograd sits above ``__torch_dispatch__``: it records the operator, and saves the wrapper, never the gathered weight.
So a second backward, a backward through a jvp or a hessian simply reads again, and functorch, which sits above too,
never sees a collective.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zerofunc.pages.held_parameter import full_gradient
from zerofunc.pages.page import Page, Place
from zerofunc.pages.pager import Pager
from zerofunc.pages.parts import take_values
from zerofunc.ranks.buffers import below_transforms, own_part

aten = torch.ops.aten

_ALIASES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
_EXTRA_VIEWS = {aten._unsafe_view.default, aten._reshape_alias.default}
# Operators that ask for the metadata of their arguments only.
_FACTORIES = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
}  # fmt: skip
_META = torch.device("meta")
_METADATA = {"is_same_size", "_has_same_storage_numel"}
_OF_STORAGE = {"set_", "resize_", "resize_as_"}

Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int | None]


class PagedTensor(torch.Tensor):
    """A stage-3 parameter, or a lazy view of one.

    It holds where the data lies (page and slot) and a chain of views and casts to replay when it is read.
    ``_meta`` is a tensor on the meta device with the same sizes, strides, storage offset and storage size.
    """

    _pager: Pager
    _place: Place
    _chain: tuple[Step, ...]
    _meta: torch.Tensor
    _taken_at: int | None
    _gradients: tuple[Any, ...]

    grad = full_gradient

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(  # noqa: D417 - cls is no argument
        cls: type[PagedTensor],
        pager: Pager,
        place: Place,
        meta: torch.Tensor | None = None,
        chain: tuple[Step, ...] = (),
        taken_at: int | None = None,
    ) -> PagedTensor:
        """A tensor with the data of ``place``.

        Args:
            pager: Where gathered pages come from.
            place: Which slot of which page holds the data.
            meta: Metadata after ``chain``; that of the whole parameter by default.
            chain: Views and casts to replay when read.
            taken_at: The page's version when this was taken as a value, lazily; it must not be read at another one.
        """
        if meta is None:
            meta = torch.empty(place.shape, dtype=place.page.dtype, device="meta")
        if torch.is_inference_mode_enabled():  # a view of a parameter shares its version counter
            with torch.inference_mode(False):
                return cls(pager, place, meta, chain, taken_at)
        self: PagedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            storage_size=meta.untyped_storage().nbytes(),
            dtype=meta.dtype,
            device=place.page.device,
        )
        self._pager, self._place = pager, place
        self._meta, self._chain, self._taken_at = meta, chain, taken_at
        return self

    # -- reading ------------------------------------------------------------------------------------------------

    def _value(self) -> torch.Tensor:
        """Collective unless resident. The data: a plain tensor, for the length of one operator."""
        if torch._C._len_torch_dispatch_stack():
            if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
                return torch.empty_strided(self.size(), self.stride(), dtype=self.dtype, device=self.device)
            with below_transforms():
                return self._replay(self._pager.read(self._place.page))
        return self._replay(self._pager.read(self._place.page))

    def _replay(self, flat: torch.Tensor) -> torch.Tensor:
        if self._taken_at is not None and self._taken_at != self._place.page.versions():
            raise RuntimeError(
                f"parameter {self._place.name!r} was used, and its value is read again after its shards have changed; "
                "call backward, or what else derives, before the optimizer's step; keep a value with .clone()"
            )
        slot = self._place.slot
        # With a storage of its own: what operators know of offsets and sizes is what the wrapper says of them.
        return self._through_chain(own_part(flat, slot.offset, slot.shape, slot.stride))

    def _through_chain(self, value: torch.Tensor) -> torch.Tensor:
        for func, args, kwargs, index in self._chain:
            value = func(value, *args, **kwargs)
            if index is not None:
                value = value[index]
        return value

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator gives that needs no data: another view of this, or this as another view; None of others."""
        if func in _ALIASES:
            return self._same()
        if _is_view(func) or (func is aten._to_copy.default and _is_autocast(kwargs)):
            return self._lazy(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags and func._opname not in _OF_STORAGE:
            return self._change_view(func, args, kwargs)
        return None

    def _lazy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a view or cast, as PagedTensors that replay it."""
        taken_at = self._place.page.versions() if func is aten._to_copy.default else self._taken_at
        metas = _meta_of_view(func, self._meta, args, kwargs)

        def wrap(meta: torch.Tensor, index: int | None) -> PagedTensor:
            chain = (*self._chain, (func, args, kwargs, index))
            return type(self)(self._pager, self._place, meta, chain, taken_at)

        if isinstance(metas, torch.Tensor):
            return wrap(metas, None)
        return type(metas)([wrap(meta, index) for index, meta in enumerate(metas)])

    def _change_view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PagedTensor:
        """This tensor, made another view of the same data in place, as ``t_`` and ``unsqueeze_`` do."""
        if any(parameter is self for parameter in self._place.page.parameters):
            raise RuntimeError(
                f"{func._opname} on parameter {self._place.name!r}: the shape of a sharded parameter is fixed. Use the "
                "operator that returns a view, or change the parameter before the module is sharded."
            )
        with below_transforms():
            meta = self._meta.detach()
            func(meta, *args, **kwargs)
        with torch._C._DisableTorchDispatch():  # the sizes and strides that PyTorch keeps of the wrapper itself
            func(self, *args, **kwargs)
        self._meta, self._chain = meta, (*self._chain, (func, args, kwargs, None))
        return self

    def _same(self) -> PagedTensor:
        return type(self)(self._pager, self._place, self._meta, self._chain, self._taken_at)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer from metadata, stay lazy, write through, or read and run."""
        kwargs = kwargs or {}
        base = args[0] if args else None
        if isinstance(base, PagedTensor):
            if func._opname == "to":  # seen whole below autograd, where a kernel for zeros asks for metadata
                return func.decompose(*args, **kwargs)
            view = base._view(func, args[1:], kwargs)
            if view is not None:
                return view
        known = _from_metadata(func, base, args, kwargs)
        if known is not NotImplemented:
            return known
        if func._schema.is_mutable:
            written = _written(func, args, kwargs)
            if written:
                return _write_through(func, args, kwargs, written)
        return func(*_map(args, _value), **_map(kwargs, _value))

    # -- what a user of an ordinary parameter expects -----------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name and metadata: printing never communicates."""
        return (
            f"PagedTensor({self._place.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"requires_grad={self.requires_grad}, on {self._place.page.label.split(' (')[0]}, "
            f"{'resident' if self._pager.is_resident(self._place.page) else 'sharded'})"
        )

    def full(self) -> torch.Tensor:
        """Collective unless resident. A plain copy of the whole tensor, without gradient."""
        return self._value().clone()

    def _shared_copy(self) -> torch.Tensor:
        """Like :meth:`full`, sharing memory with other such copies of the parameter that are still alive."""
        page, slot = self._place.page, self._place.slot
        key = slot.name, page.versions()
        storage = page.copies.get(key)
        with below_transforms():
            if storage is None:
                value = self._pager.read(page).as_strided(slot.shape, slot.stride, slot.offset)
                storage = page.copies[key] = value.clone().untyped_storage()
            whole = torch.empty(0, dtype=page.dtype, device=page.device)
            return self._through_chain(whole.set_(storage, 0, slot.shape, slot.stride))

    def numpy(self, *, force: bool = False) -> Any:
        """Collective unless resident. A NumPy copy."""
        if self.requires_grad and torch.is_grad_enabled() and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self.full().cpu().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Collective unless resident. A NumPy copy."""
        array = self.detach().numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def tolist(self) -> Any:
        """Collective unless resident. Nested lists of the values."""
        return self.full().tolist()

    def data_ptr(self) -> int:
        """Address of the gathered data, inside ``zerofunc.gathered`` only."""
        if self._pager.is_pinned(self._place.page):
            return self._value().data_ptr()
        self._refuse("data_ptr()")

    def untyped_storage(self) -> torch.UntypedStorage:
        """Storage of the gathered page, inside ``zerofunc.gathered`` only."""
        if self._pager.is_pinned(self._place.page):
            return self._value().untyped_storage()
        self._refuse("untyped_storage()")

    def storage(self) -> Any:
        """Refused: see :meth:`untyped_storage`."""
        self._refuse("storage()")

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Collective unless resident. A copy's capsule."""
        return self.full().__dlpack__(**kwargs)

    def share_memory_(self) -> NoReturn:
        """Refused: the data is not in one place."""
        self._refuse("share_memory_()")

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what} of parameter {self._place.name!r}: its data is sharded over the ranks and has no address. "
            "Use `with zerofunc.gathered(module):` around the call, or .detach().clone() for a plain copy."
        )

    @property
    def data(self) -> torch.Tensor:
        """The same parameter without gradient; writing into it writes the shards."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, PagedTensor) and (value._place, value._chain) == (self._place, ()):
            return
        take_values(self, value, f"parameter {self._place.name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedTensor:
        """A parameter on a copy of the page, sharded alike; copies of one module's parameters share their pages."""
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        pager = memo[id(self._pager)] = copy.deepcopy(self._pager, memo)
        place = Place(copy.deepcopy(self._place.page, memo), self._place.index)
        if id(self) not in memo:  # the page's copy has copies of the page's parameters
            new: torch.Tensor = PagedTensor(pager, place, self._meta, self._chain, self._taken_at)
            memo[id(self)] = nn.Parameter(new, self.requires_grad) if isinstance(self, nn.Parameter) else new
        copied: PagedTensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Collective unless resident. Pickles as an ordinary tensor or parameter with all its data, tied ones once."""
        full = self.full() if self._chain or self._taken_at is not None else self._shared_copy()
        plain = nn.Parameter(full, self.requires_grad) if isinstance(self, nn.Parameter) else full
        return plain.__reduce_ex__(protocol)


# -- rules of dispatch ------------------------------------------------------------------------------------------------

_view_cache: dict[Any, bool] = {}


def _is_view(func: Any) -> bool:
    known = _view_cache.get(func)
    if known is None:
        known = _view_cache[func] = func.is_view or func in _EXTRA_VIEWS
    return known


def _is_autocast(kwargs: dict[str, Any]) -> bool:
    """Whether a copy may be autocast's: autograd saves it, so it is lazy. Other copies are snapshots, and real.

    Autocast is switched off while it casts, and so it is inside any dispatch: only how deeply it is nested tells. What
    a user casts inside ``torch.autocast`` is lazy as well, and raises where it is read after the shards have changed.
    """
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth > 0 and set(kwargs) == {"dtype"}


def _map(value: Any, function: Callable[[PagedTensor], Any]) -> Any:
    """The arguments of an operator with ``function`` applied to its PagedTensors; a faster ``tree_map``."""
    if isinstance(value, PagedTensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([_map(item, function) for item in value])
    if type(value) is dict:
        return {key: _map(item, function) for key, item in value.items()}
    return value


def _meta_of_view(func: Any, meta: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` gives on the meta device; models view the same parameters alike again and again."""
    try:
        key = (func, meta, args, tuple(kwargs.items()))
        known = _metas.get(key)
    except TypeError:  # an argument that cannot be hashed, such as a list of sizes
        key, known = None, None
    if known is None:
        with below_transforms():
            known = func(meta, *args, **kwargs)
        if key is not None:
            if len(_metas) > 10_000:
                _metas.clear()
            _metas[key] = known
    return known


_metas: dict[Any, Any] = {}


def _meta(tensor: PagedTensor) -> torch.Tensor:
    return tensor._meta


def _from_metadata(func: Any, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator gives that asks for metadata alone; NotImplemented for others."""
    name = func._opname
    if name in _METADATA:
        return func(*_map(args, _meta), **kwargs)
    if func is aten._new_zeros_with_same_feature_meta.default:
        return _new_zeros(func, args, kwargs)
    if isinstance(base, PagedTensor) and name in _FACTORIES:
        return func(base._meta, *args[1:], **{**kwargs, "device": kwargs.get("device") or base.device})
    if isinstance(base, PagedTensor) and func is aten._to_copy.default and kwargs.get("device") == _META:
        return func(base._meta, **kwargs)
    return NotImplemented


def _value(tensor: PagedTensor) -> torch.Tensor:
    return tensor._value()


def _new_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Zeros with one tensor's options and the other's layout: forward-mode AD asks for it."""
    like = args[0]
    with below_transforms():
        metas = [a._meta if isinstance(a, PagedTensor) else a.to("meta") if a.device.type != "meta" else a
                 for a in args[:2]]  # fmt: skip
        meta = func(*metas, *args[2:], **kwargs)
    storage = torch.zeros(meta.untyped_storage().nbytes() // meta.itemsize, dtype=like.dtype, device=like.device)
    return storage.as_strided(meta.size(), meta.stride(), meta.storage_offset())


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[PagedTensor]:
    """The PagedTensors that an in-place or ``out=`` operator writes to."""
    found: list[PagedTensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [t for t in pytree.tree_leaves(value) if isinstance(t, PagedTensor)]
    return found


def _write_through(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[PagedTensor]) -> Any:
    """Run an in-place operator on the gathered data, then put this rank's part into the shards."""
    name = func._opname
    for target in written:
        if target._taken_at is not None or name in _OF_STORAGE:
            raise RuntimeError(
                f"{name} on parameter {target._place.name!r}: a sharded parameter's storage is fixed; "
                "change its values with copy_(), or work on a .clone()"
            )
        if not target._place.page.shards:
            raise RuntimeError(
                f"{name} on parameter {target._place.name!r}: it is a function of shards; clone it first"
            )
    plain: dict[int, torch.Tensor] = {}
    flats: dict[Page, torch.Tensor] = {}
    with below_transforms():
        for target in written:
            if target._place.page not in flats:
                flats[target._place.page] = target._pager.read(target._place.page)
            plain[id(target)] = target._replay(flats[target._place.page])

    def value(tensor: PagedTensor) -> torch.Tensor:
        return plain[id(tensor)] if id(tensor) in plain else tensor._value()

    result = func(*_map(args, value), **_map(kwargs, value))
    same_on_all_ranks = torch.Tag.nondeterministic_seeded not in func.tags
    with below_transforms():
        for target in written:
            page, pager = target._place.page, target._pager
            page.take_over(flats[page], [target._place.index], pager.axes.shard.rank)
            pager.wrote(page, flats[page], same_on_all_ranks)
    back = {id(plain[id(target)]): target for target in written}
    return pytree.tree_map_only(torch.Tensor, lambda tensor: back.get(id(tensor), tensor), result)
