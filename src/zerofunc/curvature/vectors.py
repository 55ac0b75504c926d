"""Sharded trees as vectors: checks that they fit, this rank's parts end to end, and inner products over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zerofunc.module.sharding import Sharding
from zerofunc.ranks.buffers import outside_transforms
from zerofunc.space.transposed import Total

Tree = Mapping[str, torch.Tensor]
Product = Callable[[dict[str, torch.Tensor]], Tree]


class VectorSpace:
    """The sharded trees of a module's trainable parameters as vectors: this rank's parts end to end."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._like = trainable(sharding)

    def flat(self, tree: Tree) -> torch.Tensor:
        """A tree of parts [n] as one vector."""
        problem = misfit("the product", tree, self._like)
        if problem:
            raise ValueError(problem)
        return torch.cat([tree[name].detach() for name in self._like])

    def tree(self, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tree of parts [*, n] that vectors [*, number of elements here] are."""
        pieces = vectors.split([part.numel() for part in self._like.values()], -1)
        return {n: piece.to(part.dtype) for (n, part), piece in zip(self._like.items(), pieces, strict=True)}

    def dot(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Collective. Inner products over all ranks' parts of ``a`` [*, n] with ``b`` [n], float64 [*]."""
        products: torch.Tensor = Total.apply(self._sharding, (a @ b).double(), "inner product of sharded trees")
        if not products.isfinite().all():
            raise FloatingPointError("an inner product of sharded trees is not finite: look for nan and inf in the map")
        return products


def trainable(sharding: Sharding) -> dict[str, torch.Tensor]:
    """The shards that require a gradient, detached."""
    return {name: s.detach() for name in sharding.places if (s := sharding.shard(name)).requires_grad}


def probe_seed(seed: int, index: int) -> int:
    """The seed of one of many draws."""
    return (seed << 32) + index


def refuse(sharding: Sharding, *problems: str) -> None:
    """Collective. Raise the first problem that is not empty.

    Raises:
        ValueError: On every rank, if there is one on any.
    """
    problem = next(filter(None, problems), "")
    with outside_transforms():
        sharding.axes.agree("check of the arguments")
        if sharding.axes.any(torch.tensor([bool(problem)], dtype=torch.uint8)).item():
            raise ValueError(problem or "another rank was given arguments that are not valid; see its message")


def not_positive(name: str, number: int) -> str:
    """What is wrong with a number that must be at least 1."""
    return "" if number >= 1 else f"{name} is {number}; expected at least 1"


def misfit(what: str, tree: Tree, like: Tree, dims: Iterable[int] = (1,)) -> str:
    """What is wrong with a sharded tree that should be like another, but for leading dimensions; empty if it fits."""
    if not isinstance(tree, Mapping) or tree.keys() != like.keys():
        found = sorted(tree.keys() ^ like.keys())[:10] if isinstance(tree, Mapping) else type(tree).__name__
        return f"{what} should be a sharded tree with the names of zerofunc.shards(module); it differs in {found}"
    batches = {tuple(part.shape[:-1]) for part in tree.values()}
    if len(batches) > 1:
        return f"{what} has leading dimensions {sorted(batches)[:3]}; expected the same for all names"
    for name, own in like.items():
        part = tree[name]
        if part.dim() not in dims or part.shape[-1:] != own.shape:
            return (
                f"{what}[{name!r}] has shape {tuple(part.shape)}; this rank's shard has {tuple(own.shape)}. Was it "
                "made for another module, world size or stage? zerofunc.reshard makes one from tensors of full shape."
            )
        if part.dtype != own.dtype or part.device != own.device:
            return f"{what}[{name!r}] is {part.dtype} on {part.device}; expected {own.dtype} on {own.device}"
    return ""


def scalar(loss: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """The loss's value.

    Raises:
        ValueError: If it is not a scalar tensor.
    """
    value = loss(*arguments)
    if not isinstance(value, torch.Tensor) or value.dim():
        found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"the loss should return a scalar tensor, and returned {found}; take its mean or sum")
    return value
