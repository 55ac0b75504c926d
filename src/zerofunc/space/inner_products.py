"""Inner products of sharded trees over all ranks' parts: of two, and of each of several with each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from zerofunc.module.sharding import Sharding, sharding_of, shardings
from zerofunc.space.transposed import Total
from zerofunc.space.trees import Tree


def vdot(a: Tree, b: Tree, module: nn.Module | None = None) -> torch.Tensor:
    """Collective. Inner product of two sharded trees over all ranks' parts, a scalar in the trees' data type.

    Differentiable, in every order and nesting; the same on all ranks.

    Args:
        a: A sharded tree.
        b: Another one with the same names and lengths.
        module: The module that they belong to; needed only where several sharded modules have such shards.

    Raises:
        ValueError: If the trees do not fit together or to the module.
    """
    _refuse_unlike(a, b)
    sharding = sharding_of(module) if module is not None else _only_sharding_with(a, "vdot(a, b, module=…)")
    parts = [torch.dot(a[name], b[name].to(a[name].dtype)) for name in a]
    total: torch.Tensor = Total.apply(sharding, torch.stack(parts).sum(), "vdot")
    return total


def gramian(trees: Sequence[Tree] | Tree, module: nn.Module | None = None) -> torch.Tensor:
    """Collective. Inner products of sharded trees, each with each, over all ranks' parts: [m, m] in their data type.

    What multi-task methods (MGDA, UPGrad, PCGrad…) ask of the gradients of m losses, in one exchange of m x m numbers.
    Differentiable, in every order and nesting; the same on all ranks.

    Args:
        trees: m sharded trees with the same names and lengths, such as one gradient per loss; or one tree of parts
            [m, n], as ``torch.func.jacrev`` of a vector of losses gives it.
        module: The module that they belong to; needed only where several sharded modules have such shards.

    Raises:
        ValueError: If there is no tree, or the trees do not fit together or to the module.
    """
    stacked = _stacked(trees)
    numbers = {name: len(part) for name, part in stacked.items()}
    if not stacked or len(set(numbers.values())) != 1:
        raise ValueError(f"trees has {numbers or 'none'} rows; expected the same number, at least 1, for every name")
    first = {name: part[0] for name, part in stacked.items()}
    sharding = sharding_of(module) if module is not None else _only_sharding_with(first, "gramian(trees, module=…)")
    dtype = next(iter(first.values())).dtype
    products = [part.to(dtype) @ part.to(dtype).mT for part in stacked.values()]
    total: torch.Tensor = Total.apply(sharding, torch.stack(products).sum(0), "gramian")
    return total


def _stacked(trees: Sequence[Tree] | Tree) -> dict[str, torch.Tensor]:
    """One tree of parts [m, n]."""
    if isinstance(trees, Mapping):
        flat = {name: tuple(part.shape) for name, part in trees.items() if part.dim() != 2}
        if flat:
            raise ValueError(f"trees is one tree with parts of shape {flat}; expected [m, n], or a list of trees")
        return dict(trees)
    for tree in trees[1:]:
        _refuse_unlike(trees[0], tree)
    return {name: torch.stack([tree[name] for tree in trees]) for name in (trees[0] if trees else ())}


def _refuse_unlike(a: Tree, b: Tree) -> None:
    if a.keys() != b.keys():
        raise ValueError(f"the trees differ in names: {sorted(a.keys() ^ b.keys())[:10]}")
    for name in a:
        if a[name].shape != b[name].shape:
            raise ValueError(f"{name!r} has shapes {tuple(a[name].shape)} and {tuple(b[name].shape)}")


def _only_sharding_with(tree: Tree, call: str) -> Sharding:
    fitting = [
        sharding
        for sharding in shardings()
        if all(n in sharding.places and sharding.shard(n).shape == part.shape for n, part in tree.items())
    ]
    if len({(s.axes.shard.size, s.axes.shard.rank) for s in fitting}) != 1:
        raise ValueError(f"{len(fitting)} sharded modules have such shards; say which one: {call}")
    return fitting[0]
