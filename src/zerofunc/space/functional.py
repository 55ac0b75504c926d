"""Derivatives over sharded parameters: a module as a function of its shards.

``functional_call(module, shards, args)`` is the module at the parameters that the shards of all ranks make up. A
gradient over shards is the mean over ranks, this rank's part; the outputs, losses and tangents are this rank's own.
Nothing is gathered for longer than a page is read (see transposed.py and paged_tensor.py).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zerofunc.module.sharding import Sharding, sharding_of
from zerofunc.pages.page import Page
from zerofunc.ranks.buffers import outside_transforms
from zerofunc.space.transposed import Gather, Mean, TangentPull, plain

Tree = Mapping[str, torch.Tensor]


class PulledShards(dict[str, torch.Tensor]):
    """Shards of which a pullback wants the tangents alone. What a transform makes of them is a plain dict."""

    def __init__(self, shards: Tree, pull: TangentPull) -> None:
        super().__init__(shards)
        self.pull = pull


pytree.register_pytree_node(
    PulledShards,
    lambda shards: (list(shards.values()), list(shards)),
    lambda parts, names: dict(zip(names, parts, strict=True)),
    serialized_type_name="zerofunc.PulledShards",
)


def functional_call(
    module: nn.Module,
    shards: Tree,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    full: Tree | None = None,
) -> Any:
    """Collective. The module's result at the parameters that ``shards`` make up: this rank's own.

    To be transformed by torch.func with respect to ``shards``, in any nesting, at every stage. A gradient is that of
    the mean over ranks of this rank's scalar, this rank's part of it; a tangent is the derivative of this rank's
    result along the direction that all ranks' parts make up. The sum of elementwise products of two sharded trees on
    this rank is its part of their inner product, and is differentiated as such. Under vmap, entry i of every rank
    belongs together.

    Args:
        module: A sharded module, or its engine.
        shards: ``{name: this rank's part}`` of every trainable parameter, as :func:`zerofunc.shards` gives them, or any
            differentiable function of them. Frozen parameters may be given as well, and are the module's otherwise.
        args: Positional arguments of the module, a tuple or one that is not a tuple.
        kwargs: Keyword arguments.
        full: ``{name: tensor}`` of parameters or buffers that are replaced by tensors of full shape. They are this
            rank's own: a derivative with respect to them is not averaged.

    Raises:
        ValueError: On every rank, if a name is missing or unknown, or a part's shape, data type or device does not fit.
    """
    sharding = sharding_of(module)
    full = dict(full or {})
    is_own = _check(sharding, shards, full)
    _warn_of_samples(shards, (args, kwargs))
    parameters = dict(full)
    for page, own in zip(sharding.pages, is_own, strict=True):
        names = [slot.name for slot in page.layout.slots]
        if any(name in shards for name in names):
            parts = [shards[n] if n in shards else sharding.shard(n).detach() for n in names]
            gathered = Gather.apply(sharding, page, own, getattr(shards, "pull", None), *parts)
            parameters.update((n, t) for n, t in zip(names, gathered, strict=True) if n in shards)
    prefix = "" if module is sharding.module() else "module."
    named = {prefix + name: tensor for name, tensor in parameters.items()}
    with _put_back(module):
        return torch.func.functional_call(module, named, args, kwargs)


@contextmanager
def _put_back(module: nn.Module) -> Iterator[None]:
    """Local. Afterwards modules that are registered twice have their own tensors again.

    ``torch.func.functional_call`` puts a tensor back for every name, and the second time it finds the override there.
    """
    times = Counter(inner for _, inner in module.named_modules(remove_duplicate=False))
    repeated = [inner for inner, count in times.items() if count > 1]
    before = [(held, dict(held)) for inner in repeated for held in (inner._parameters, inner._buffers)]
    try:
        yield
    finally:
        for held, own in before:
            held.update(own)


def _check(sharding: Sharding, shards: Tree, full: Tree) -> list[bool]:
    """Collective. Whether each page's parts are, on every rank, the module's own shards as they are.

    Raises:
        ValueError: On every rank, if the trees do not fit the module.
    """
    problem = _problem(sharding, shards, full)
    flags = [bool(problem), *(bool(problem) or not _is_own(page, shards) for page in sharding.pages)]
    with outside_transforms():
        sharding.axes.agree("functional_call over shards")
        merged = sharding.axes.any(torch.tensor(flags, dtype=torch.uint8)).tolist()
        if merged[0]:
            raise ValueError(problem or "another rank gave functional_call shards that do not fit; see its message")
        own = [not flag for flag in merged[1:]]
        if any(own) and sharding.stage < 3:
            sharding.refresh()
    return own


def _warn_of_samples(shards: Tree, arguments: Any) -> None:
    """Warn of ``vmap(grad)`` over samples: what a user means by it is not what the mean over ranks gives."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    gradients = [level.level() for level in stack if level.key() == torch._C._functorch.TransformType.Grad]
    mapped = _batch_levels(pytree.tree_leaves(arguments)) - _batch_levels(shards.values()) if gradients else set()
    if mapped and min(mapped) < max(gradients):
        warnings.warn(
            "vmap(grad) over samples through zerofunc.functional_call: entry i is the mean over ranks of the "
            "gradients of every rank's sample i. For gradients of this rank's samples use "
            "zerofunc.per_sample_grad_norms and its kin, or torch.func.functional_call over named_parameters().",
            stacklevel=3,
        )


def _batch_levels(tensors: Iterable[Any]) -> set[int]:
    """Levels of the vmaps that map over one of the tensors."""
    levels = set()
    for tensor in tensors:
        while isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            if torch._C._functorch.is_batchedtensor(tensor):
                levels.add(torch._C._functorch.maybe_get_level(tensor))
            tensor = torch._C._functorch.get_unwrapped(tensor)
    return levels


def _problem(sharding: Sharding, shards: Tree, full: Tree) -> str:
    """What is wrong with the trees; empty if they fit."""
    module = sharding.module()
    assert module is not None
    unknown = [name for name in shards if name not in sharding.places]
    needed = [name for name in sharding.places if sharding.shard(name).requires_grad]
    missing = [name for name in needed if name not in shards and name not in full]
    if unknown or missing:
        wrong = f"unknown names {unknown[:10]}" if unknown else f"no part of {missing[:10]}"
        return (
            f"shards of {type(module).__name__}: {wrong}. Expected the names of zerofunc.shards(module); tensors of "
            "full shape go into full={name: tensor}."
        )
    for name, part in shards.items():
        own = sharding.shard(name)
        if not isinstance(part, torch.Tensor):
            return f"the part of {name!r} is a {type(part).__name__}; expected a tensor"
        if part.shape != own.shape:
            return (
                f"the part of {name!r} has shape {tuple(part.shape)}; this rank's shard has {tuple(own.shape)}. Was "
                "it made for another module, world size or stage? A tensor of full shape goes into full={name: tensor}."
            )
        if part.dtype != own.dtype or part.device != own.device:
            return f"the part of {name!r} is {part.dtype} on {part.device}; expected {own.dtype} on {own.device}"
    both = shards.keys() & full.keys()
    if both:
        return f"{sorted(both)[:10]} are given both as shards and in full"
    shapes = {name: place.shape for name, place in sharding.places.items()}
    shapes.update((name, buffer.shape) for name, buffer in module.named_buffers())
    for name, tensor in full.items():
        if name not in shapes:
            return f"full has {name!r}, which is neither a parameter nor a buffer of {type(module).__name__}"
        if tensor.shape != shapes[name]:
            return f"full[{name!r}] has shape {tuple(tensor.shape)}; expected {tuple(shapes[name])}"
    return ""


def _is_own(page: Page, shards: Tree) -> bool:
    """Whether the parts given for a page lie where the module's shards lie (vacuous where this rank has no element)."""
    for slot, own in zip(page.layout.slots, page.shards, strict=True):
        part = shards.get(slot.name)
        if part is None or not own.numel():
            continue
        part = plain(part)
        if part.shape != own.shape or part.data_ptr() != own.data_ptr() or part.stride() != own.stride():
            return False
    return True


# -- jacfwd -----------------------------------------------------------------------------------------------------------


def jacfwd(
    function: Callable[..., Any], module: nn.Module, chunk_size: int | None = None
) -> Callable[[Tree], dict[str, Any]]:
    """Jacobian over shards by forward mode: the mean over ranks of this rank's outputs' Jacobians, this rank's columns.

    Collective when called. ``torch.func.jacfwd`` sees one rank's parts only; this one pushes the basis vectors of all
    ranks in turn, so its cost is that of one jvp per parameter element. It equals ``torch.func.jacrev``.

    Args:
        function: From shards to tensors (any tree of them) that are this rank's own, through :func:`functional_call`.
        module: The sharded module that the shards belong to.
        chunk_size: The most directions pushed at once.

    Returns:
        A function of shards; for each name, the tree of outputs with tensors [*output shape, n].
    """
    sharding = sharding_of(module)

    def jacobian(shards: Tree) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for rank in range(sharding.axes.shard.size):
            chunks = [
                _columns(function, sharding, shards, basis) for basis in _bases(sharding, shards, rank, chunk_size)
            ]
            if rank == sharding.rank:
                found = _by_name(shards, chunks)
        return found

    return jacobian


def _bases(sharding: Sharding, shards: Tree, rank: int, chunk_size: int | None) -> Iterator[dict[str, torch.Tensor]]:
    """Basis vectors of the parts of ``rank``, some rows at a time: on other ranks as many rows of zeros."""
    ranges = [sharding.places[name].range(rank) for name in shards]
    num_rows = sum(part.stop - part.start for part in ranges)
    lengths = [part.numel() for part in shards.values()]
    like = next(iter(shards.values()))
    for first in range(0, num_rows, chunk_size or max(num_rows, 1)):
        rows = min(chunk_size or num_rows, num_rows - first)
        basis = like.new_zeros(rows, sum(lengths))
        if rank == sharding.rank:
            basis[:, first : first + rows].fill_diagonal_(1)
        pieces = zip(shards.items(), basis.split(lengths, 1), strict=True)
        yield {name: piece.to(part.dtype) for (name, part), piece in pieces}


def _columns(function: Callable[..., Any], sharding: Sharding, shards: Tree, basis: Tree) -> Any:
    """Collective. Mean over ranks of the derivatives of ``function`` along each row of ``basis``."""

    def push(direction: Tree) -> Any:
        return torch.func.jvp(function, (dict(shards),), (direction,))[1]

    pushed = torch.func.vmap(push)(basis)
    if isinstance(pushed, Mapping) and all(name in sharding.places for name in pushed):
        raise ValueError(
            "jacfwd was given a function of shards that returns a sharded tree, such as a gradient, which has no mean. "
            "For products with a Hessian use torch.func.jvp of the gradient, or zerofunc.curvature.hvp."
        )
    return pytree.tree_map(lambda tangent: Mean.apply(sharding, tangent, "jacfwd over shards"), pushed)


def _by_name(shards: Tree, chunks: list[Any]) -> dict[str, Any]:
    """The rows of all chunks as the last dimension, split by parameter."""
    whole = pytree.tree_map(lambda *rows: torch.cat(rows).movedim(0, -1), *chunks)
    leaves, form = pytree.tree_flatten(whole)
    lengths = [part.numel() for part in shards.values()]
    pieces = zip(*(leaf.split(lengths, -1) for leaf in leaves), strict=True)
    return {name: pytree.tree_unflatten(list(piece), form) for name, piece in zip(shards, pieces, strict=True)}
