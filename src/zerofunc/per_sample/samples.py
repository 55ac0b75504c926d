"""A batch to go through sample by sample, cut alike on every rank.

At stage 3 all ranks must read the same pages in the same order. So each runs as many chunks as the rank that has most,
on a made-up sample where it has no more of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from zerofunc.module.sharding import Sharding, sharding_of, shards
from zerofunc.per_sample.taps import Measure, measure_gradients
from zerofunc.ranks.buffers import below_transforms
from zerofunc.space.functional import functional_call

Tree = Mapping[str, torch.Tensor]
Chunk = list[torch.Tensor]


@dataclass(frozen=True)
class Samples:
    """A batch and the loss of its samples.

    Attributes:
        loss: From a model and one sample's tensors to a checked scalar.
        sharding: None for a plain module.
        tensors: The batch's tensors.
        num_chunks: Of the rank that has most.
        num_samples: On all ranks.
        seed: Of the noise, the same on all ranks.
    """

    loss: Callable[..., torch.Tensor]
    module: nn.Module
    sharding: Sharding | None
    tensors: list[torch.Tensor]
    chunk_size: int
    num_chunks: int
    num_samples: int
    seed: int

    @property
    def point(self) -> dict[str, torch.Tensor]:
        """The trainable parameters, as what :meth:`losses` is differentiated with respect to."""
        return {name: part.detach() for name, part in trainable(self.module).items()}

    @property
    def num_ranks(self) -> int:
        """How many ranks a gradient over :attr:`point` is averaged over."""
        return 1 if self.sharding is None else self.sharding.axes.num_ranks

    @property
    def accumulator(self) -> torch.Tensor:
        """A zero in the data type of norms."""
        point = self.point.values()
        is_double = any(part.dtype == torch.float64 for part in point)
        return next(iter(point)).new_zeros((), dtype=torch.float64 if is_double else torch.float32)

    def chunk(self, index: int) -> tuple[Chunk, int]:
        """The chunk's tensors and how many of its samples count; a made-up one where this rank has no more."""
        rows = slice(index * self.chunk_size, (index + 1) * self.chunk_size)
        chunk = [tensor[rows] for tensor in self.tensors]
        count = len(chunk[0])
        return chunk if count else [_made_up(tensor) for tensor in self.tensors], count

    def of_all(self, function: Callable[[Chunk], torch.Tensor]) -> torch.Tensor:
        """Collective. ``function`` of all chunks, one after the other, [B, …]."""
        found = []
        for index in range(self.num_chunks):
            chunk, count = self.chunk(index)
            found.append(function(chunk)[:count])
        return torch.cat(found)

    def measured(self, chunk: Chunk, measure: Measure) -> torch.Tensor:
        """Collective at stage 3."""
        root = self.module if self.sharding is None else self.sharding.module()
        assert root is not None
        prefix = "" if root is self.module else "module."
        parameters = {name: p.detach() for name, p in root.named_parameters() if p.requires_grad}

        def call(tapped: Tree) -> Callable[..., Any]:
            named = {prefix + name: tensor for name, tensor in tapped.items()}
            return lambda *args, **kwargs: torch.func.functional_call(self.module, named, args, kwargs)

        return measure_gradients(self.loss, call, parameters, chunk, measure)

    def losses(self, tree: Tree, chunk: Chunk) -> torch.Tensor:
        """Collective. Losses of the chunk's samples, [B], as a function of the trainable parameters."""
        call: Callable[..., Any] = torch.func.functional_call if self.sharding is None else functional_call

        def model(*args: Any, **kwargs: Any) -> Any:
            return call(self.module, tree, args, kwargs)

        return torch.func.vmap(lambda *sample: self.loss(model, *sample), randomness="different")(*chunk)

    def gradient(self, chunk: Chunk, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """Collective. Gradient of the weighted sum of losses: the mean over ranks."""

        def weighted(tree: Tree) -> torch.Tensor:
            losses = self.losses(tree, chunk)
            return losses @ weights.to(losses.dtype)

        with torch.no_grad():
            gradients: dict[str, torch.Tensor] = torch.func.grad(weighted)(self.point)
        return gradients


def samples_of(
    fn: Callable[..., torch.Tensor],
    module: nn.Module,
    batch: Any,
    chunk_size: int | None,
    problem: str = "",
    seed: int = 0,
) -> Samples:
    """Collective. Check what was given on every rank, and agree on the number of chunks.

    Raises:
        ValueError: On every rank, if something is wrong on one of them.
    """
    leaves, form = pytree.tree_flatten(tuple(batch) if isinstance(batch, list | tuple) else (batch,))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    problem = problem or _problem(module, tensors, chunk_size)
    count = 0 if problem else len(tensors[0])
    size = chunk_size or max(count, 1)
    sharding = _sharding_of(module)
    agreed = _agree(sharding, [bool(problem), -(-count // size) if not problem else 0, seed], count)
    if agreed[0]:
        raise ValueError(problem or "another rank's arguments do not fit; see its message")

    def loss(model: Callable[..., Any], *sample: torch.Tensor) -> torch.Tensor:
        given = iter(sample)
        filled = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return _scalar(fn(model, *pytree.tree_unflatten(filled, form)))

    return Samples(loss, module, sharding, tensors, size, max(agreed[1], 1), sum(agreed[3:]), agreed[2])


def _agree(sharding: Sharding | None, numbers: list[int], count: int) -> list[int]:
    """Collective. The largest of each of ``numbers`` on any rank, then every rank's ``count``."""
    if sharding is None:
        return [*numbers, count]
    axes = sharding.axes
    found = torch.tensor([*numbers, *(count if rank == axes.rank else 0 for rank in range(axes.num_ranks))])
    with below_transforms():
        axes.agree("per-sample gradients")
        merged: list[int] = axes.any(found).tolist()
        if not merged[0]:
            sharding.refresh()
    return merged


def _sharding_of(module: nn.Module) -> Sharding | None:
    try:
        return sharding_of(module)
    except ValueError:
        return None


def trainable(module: nn.Module) -> Tree:
    """Local. The shards of a sharded module's trainable parameters, or the parameters of a plain one."""
    if _sharding_of(module) is not None:
        return shards(module)
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _made_up(tensor: torch.Tensor) -> torch.Tensor:
    """A sample for a rank that has none. Not of zeros, by which models may divide."""
    if tensor.is_floating_point():
        return torch.linspace(0.1, 0.9, math.prod(tensor.shape[1:])).to(tensor).view(1, *tensor.shape[1:])
    return tensor.new_zeros(1, *tensor.shape[1:])


def _scalar(value: Any) -> torch.Tensor:
    is_tensor = isinstance(value, torch.Tensor)
    if not is_tensor or value.dim() or not value.is_floating_point():
        found = f"{value.dtype} of shape {tuple(value.shape)}" if is_tensor else type(value).__name__
        raise ValueError(
            f"fn returned {found}; expected one sample's loss, a floating-point tensor without dimensions. Reduce it "
            "inside fn, with .sum() or .mean()"
        )
    scalar: torch.Tensor = value
    return scalar


def _problem(module: nn.Module, tensors: list[torch.Tensor], chunk_size: int | None) -> str:
    """What is wrong with a batch or a module; empty if nothing is."""
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        return f"chunk_size is {chunk_size!r}; expected a positive int or None"
    if not tensors:
        return "batch has no tensors; expected one or more, of the same length"
    if any(not tensor.dim() for tensor in tensors):
        return "batch has a tensor without dimensions; the first dimension of each counts the samples"
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        return f"the batch's tensors have lengths {lengths}; expected the same number of samples in each"
    if not trainable(module):
        return f"{type(module).__name__} has no trainable parameters"
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.training:
            return (
                f"{name!r} is a {type(part).__name__} in training mode: it mixes the samples of a batch, so that a "
                "sample has no gradient of its own. Use GroupNorm, or put it into eval() mode"
            )
    return ""
