"""Between sharded trees (``{name: this rank's 1-D part}``) and full tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Literal

import torch
from torch import nn

from zerofunc.module.sharding import Sharding, sharding_of
from zerofunc.pages.parts import plain
from zerofunc.ranks.buffers import outside_transforms
from zerofunc.space.transposed import Mean, Part

Tree = Mapping[str, torch.Tensor]


def full_gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Collective. The mean gradient over all ranks of every trainable parameter, in full shape.

    One gather per page that has a gradient. None for parameters without one (unused on all ranks).
    """
    sharding = sharding_of(module)
    parts = _gradients(sharding)
    full: dict[str, torch.Tensor | None] = dict.fromkeys(
        name for name in sharding.places if sharding.shard(name).requires_grad
    )
    full.update(_unshard(sharding, parts))
    return full


def _gradients(sharding: Sharding, among: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    names = sharding.places if among is None else among
    return {name: shard.grad for name in names if (shard := sharding.shard(name)).grad is not None}


def unshard(module: nn.Module, tree: Tree) -> dict[str, torch.Tensor]:
    """Collective. Full tensors, each of its parameter's shape, from a sharded tree. No gradient flows through it.

    Args:
        module: The sharded module that the tree belongs to.
        tree: ``{name: this rank's 1-D part}``, such as shards, their gradients or a direction; some names may be
            missing, the same ones on all ranks.

    Raises:
        ValueError: If a name or a length does not fit the module, or a part is a function of what a transform varies.
    """
    sharding = sharding_of(module)
    for name, part in tree.items():
        if torch._C._functorch.is_functorch_wrapped_tensor(part):
            raise ValueError(
                f"unshard() of {name!r} inside a transform, which depends on what is transformed: no derivative goes "
                "through unshard. Use zerofunc.functional_call, or unshard the transform's result."
            )
        if name not in sharding.places:
            raise ValueError(f"{name!r} is not a parameter of {type(module).__name__}")
        if part.shape != sharding.shard(name).shape:
            raise ValueError(
                f"the part of {name!r} has shape {tuple(part.shape)}; this rank's shard has "
                f"{tuple(sharding.shard(name).shape)}. Was the tree made for another world size or stage?"
            )
    return _unshard(sharding, tree)


def _unshard(sharding: Sharding, tree: Tree) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    with outside_transforms():
        for page in sharding.pages:
            parts = {slot.name: tree[slot.name] for slot in page.layout.slots if slot.name in tree}
            for dtype in dict.fromkeys(part.dtype for part in parts.values()):
                same = {name: part for name, part in parts.items() if part.dtype == dtype}
                flat = sharding.gather_parts(page, same, dtype)
                for slot in page.layout.slots:
                    if slot.name in same:
                        found[slot.name] = flat[slot.offset : slot.offset + slot.numel].view(slot.shape).clone()
    return {name: found[name] for name in tree}


def reshard(module: nn.Module, full: Tree) -> dict[str, torch.Tensor]:
    """Local. This rank's 1-D parts of full tensors; the inverse of :func:`unshard`.

    Differentiable: the derivative with respect to a full tensor is this rank's own, and its mean over ranks is that of
    the mean loss.

    Raises:
        ValueError: If a name or a shape does not fit the module.
    """
    sharding = sharding_of(module)
    parts = {}
    for name, tensor in full.items():
        if name not in sharding.places:
            raise ValueError(f"{name!r} is not a parameter of {type(module).__name__}")
        place = sharding.places[name]
        if tensor.shape != place.shape:
            raise ValueError(f"{name!r} has shape {tuple(tensor.shape)}; the parameter has {tuple(place.shape)}")
        mine = place.range(sharding.rank)
        parts[name] = Part.apply(tensor.reshape(-1), mine.start, mine.stop, place.page.layout.num_shards)
    return parts


def draw(module: nn.Module, seed: int, kind: Literal["normal", "rademacher"] = "normal") -> dict[str, torch.Tensor]:
    """Local. Random numbers for every trainable parameter, this rank's part; the same at any world size and stage.

    Each parameter's numbers are drawn in full shape, one parameter at a time, from ``seed`` and the parameter's name.

    Args:
        module: A sharded module.
        seed: The same on all ranks.
        kind: Standard normal, or +1 and -1 with equal chance.

    Returns:
        ``{name: this rank's 1-D part}`` in the shards' data types.
    """
    if kind not in ("normal", "rademacher"):
        raise ValueError(f"kind is {kind!r}; expected 'normal' or 'rademacher'")
    sharding = sharding_of(module)
    parts: dict[str, torch.Tensor] = {}
    with outside_transforms():  # inside a transform it is a constant
        for name, place in sharding.places.items():
            if sharding.shard(name).requires_grad:
                full, master = _drawn(place.shape, f"{seed} {name}", kind).reshape(-1), place.page.master
                parts[name] = full[place.range(sharding.rank)].to(master.device, master.dtype, copy=True)
    return parts


def _drawn(shape: torch.Size, seed: str, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))
    if kind == "normal":
        return torch.randn(shape, generator=generator, dtype=torch.float32)
    return torch.randint(0, 2, shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)


def mean(value: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Collective. Mean over all ranks of one tensor each, of equal shapes, such as losses; differentiable."""
    averaged: torch.Tensor = Mean.apply(sharding_of(module), value, "mean over ranks")
    return averaged


def grad_norm(module: nn.Module, among: Collection[str] | None = None) -> torch.Tensor:
    """Collective. L2 norm of the mean gradient over all ranks' shards of all, or some, parameters: a float64 scalar."""
    sharding = sharding_of(module)
    gradients = [plain(part) for part in _gradients(sharding, among).values()]
    norms = torch._foreach_norm(gradients) if gradients else [torch.zeros((), device=sharding.pages[0].master.device)]
    squares = torch.stack([norm.double().square() for norm in norms]).sum()
    sharding.axes.agree("norm of the gradient")
    return sharding.axes.shard.sum(squares, "norm of the gradient").sqrt()


def overflowing(module: nn.Module, among: Collection[str]) -> list[str]:
    """Collective. Names of the parameters whose gradient has an infinity or a NaN, in the module's order."""
    sharding = sharding_of(module)
    gradients = _gradients(sharding, among)
    flags = [name in gradients and not gradients[name].isfinite().all() for name in sharding.places]
    found = sharding.axes.any(torch.tensor(flags, dtype=torch.uint8))
    return [name for name, flag in zip(sharding.places, found.tolist(), strict=True) if flag]


def clip_grad_norm_(module: nn.Module, max_norm: float) -> torch.Tensor:
    """Collective. Scale the gradients of the shards so that their norm over all ranks is at most ``max_norm``.

    ``torch.nn.utils.clip_grad_norm_`` over ``module.parameters()``, or over shards, does so as well, in the gradients'
    own data type and for any p-norm.

    Returns:
        The norm before, a float64 scalar.
    """
    norm = grad_norm(module)
    scale_gradients(module, clip_factor(norm, max_norm))
    return norm


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Local. What clips gradients of this norm, at most 1."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def scale_gradients(module: nn.Module, factor: torch.Tensor, among: Collection[str] | None = None) -> None:
    """Local. Multiply the gradients of the shards of all, or some, parameters by a scalar, in place."""
    gradients = list(_gradients(sharding_of(module), among).values())
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
