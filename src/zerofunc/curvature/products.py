"""Products with the Hessian and the Gauss-Newton matrix, and Hutchinson's estimates of a trace and a diagonal."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerofunc.curvature.vectors import Product, Tree, misfit, not_positive, probe_seed, refuse, scalar, trainable
from zerofunc.module.sharding import sharding_of
from zerofunc.space.functional import PulledShards
from zerofunc.space.transposed import TangentPull, Total
from zerofunc.space.trees import draw

# -- products ---------------------------------------------------------------------------------------------------------


def hvp(
    loss: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    module: nn.Module,
    direction: Tree,
    at: Tree | None = None,
    chunk_size: int | None = None,
) -> dict[str, torch.Tensor]:
    """Collective. The Hessian of the mean loss over ranks times a direction, this rank's part.

    Forward over reverse, at about the time of two gradients; memory is that of a gradient and its tangent. Under
    ``torch.no_grad()``, where nothing differentiates the product again, more of PyTorch's fused kernels are used.

    Args:
        loss: From shards to this rank's scalar, through :func:`zerofunc.functional_call`.
        module: The sharded module.
        direction: ``{name: this rank's part [n]}`` of every trainable parameter, or [k, n] for k directions at once.
        at: Where the Hessian is taken; the module's own shards by default.
        chunk_size: The most directions at once; all by default.

    Raises:
        ValueError: On every rank, if the direction does not fit the module or the loss is not a scalar.
    """
    where = _point(module, direction, at)

    def gradient(shards: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tangents_only = TangentPull()
        value, pull = torch.func.vjp(lambda own: scalar(loss, PulledShards(own, tangents_only)), shards)  # type: ignore[misc]
        with tangents_only.running():
            return pull(torch.ones_like(value), retain_graph=False)[0]

    return _map(lambda v: torch.func.jvp(gradient, (where,), (v,))[1], direction, chunk_size)


def ggnvp(
    output: Callable[[dict[str, torch.Tensor]], Any],
    loss_of_output: Callable[[Any], torch.Tensor],
    module: nn.Module,
    direction: Tree,
    at: Tree | None = None,
    chunk_size: int | None = None,
) -> dict[str, torch.Tensor]:
    """Collective. The generalised Gauss-Newton matrix times a direction, this rank's part.

    The matrix is the mean over ranks of J^T H J, with J the Jacobian of ``output`` and H the Hessian of the loss with
    respect to it; positive semi-definite where the loss is convex (Schraudolph 2002).

    Args:
        output: From shards to this rank's model outputs (a tensor or a tree of them).
        loss_of_output: From these to this rank's scalar.
        module: The sharded module.
        direction: ``{name: this rank's part [n]}`` of every trainable parameter, or [k, n] for k directions at once.
        at: Where the matrix is taken; the module's own shards by default.
        chunk_size: The most directions at once; all by default.

    Raises:
        ValueError: On every rank, if the direction does not fit the module or the loss is not a scalar.
    """
    where = _point(module, direction, at)
    gradient = torch.func.grad(functools.partial(scalar, loss_of_output))

    def multiply(v: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        def push(shards: dict[str, torch.Tensor]) -> Any:
            return torch.func.jvp(output, (shards,), (v,))

        # One forward gives the outputs to pull back through and, on the side, their tangents.
        outputs, pull, tangents = torch.func.vjp(push, where, has_aux=True)  # type: ignore[misc]
        return pull(torch.func.jvp(gradient, (outputs,), (tangents,))[1])[0]

    return _map(multiply, direction, chunk_size)


def _point(module: nn.Module, direction: Tree, at: Tree | None) -> dict[str, torch.Tensor]:
    """Collective. Where to differentiate; the direction is checked against it."""
    sharding = sharding_of(module)
    own = trainable(sharding)
    where = own if at is None else dict(at)
    refuse(sharding, misfit("at", where, own), misfit("direction", direction, own, dims=(1, 2)))
    return where


def _map(function: Product, direction: Tree, chunk_size: int | None) -> dict[str, torch.Tensor]:
    """``function`` of one direction, or of each of several."""
    if next(iter(direction.values())).dim() == 1:
        return dict(function(dict(direction)))
    images: Tree = torch.func.vmap(function, randomness="same", chunk_size=chunk_size)(dict(direction))
    return dict(images)


# -- estimates --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean over random probes.

    Attributes:
        value: A float64 scalar, or a sharded tree.
        standard_error: Of ``value``, alike: the standard deviation over probes divided by the root of their number; nan
            for a single probe.
    """

    value: Any
    standard_error: Any

    def __float__(self) -> float:
        """The value, where it is a scalar."""
        if not isinstance(self.value, torch.Tensor):
            raise TypeError("float() of an Estimate of a sharded tree; its value and standard_error are trees")
        return float(self.value)


def hutchinson_trace(
    product: Product, module: nn.Module, num_samples: int, *, seed: int = 0, chunk_size: int = 1
) -> Estimate:
    """Collective. The trace of a linear map, estimated from ``z . A z`` for random signs z; the same on every rank.

    Hutchinson 1990. The probes are those of :func:`zerofunc.draw`, the same at any world size.

    Args:
        product: The map's product with a sharded tree, such as ``lambda v: hvp(loss, module, v)``.
        module: The sharded module.
        num_samples: Number of probes, each of which costs one product.
        seed: The same on all ranks.
        chunk_size: Probes at once, by vmap of ``product``.

    Raises:
        ValueError: On every rank, if a number is not valid or the product does not fit the module.
    """
    sharding = sharding_of(module)
    parts = []
    for probes, images in _probed(product, module, num_samples, seed, chunk_size):
        parts.append(torch.stack([(probes[name] * images[name]).sum(-1).double() for name in probes]).sum(0))
    values: torch.Tensor = Total.apply(sharding, torch.cat(parts), "Hutchinson's trace")
    return _estimate(torch.stack([values.sum(), values.square().sum()]), num_samples)


def hutchinson_diagonal(
    product: Product, module: nn.Module, num_samples: int, *, seed: int = 0, chunk_size: int = 1
) -> Estimate:
    """Collective. The diagonal of a linear map, estimated as the mean of ``z * A z`` for random signs z, sharded.

    Bekas et al. 2007. Arguments and errors are those of :func:`hutchinson_trace`.
    """
    own = trainable(sharding_of(module))
    sums = {name: part.double().new_zeros(2, *part.shape) for name, part in own.items()}
    for probes, images in _probed(product, module, num_samples, seed, chunk_size):
        for name, total in sums.items():
            values = (probes[name] * images[name]).double()
            total += torch.stack([values.sum(0), values.square().sum(0)])
    found = {name: _estimate(total, num_samples) for name, total in sums.items()}
    return Estimate(
        {name: one.value.to(own[name].dtype) for name, one in found.items()},
        {name: one.standard_error.to(own[name].dtype) for name, one in found.items()},
    )


def _probed(
    product: Product, module: nn.Module, num_samples: int, seed: int, chunk_size: int
) -> Iterator[tuple[dict[str, torch.Tensor], Tree]]:
    """Collective. Probes of random signs {name: [k, n]} and their images, chunk by chunk."""
    sharding = sharding_of(module)
    refuse(sharding, not_positive("num_samples", num_samples), not_positive("chunk_size", chunk_size))
    like = trainable(sharding)
    for first in range(0, num_samples, chunk_size):
        seeds = [probe_seed(seed, i) for i in range(first, min(first + chunk_size, num_samples))]
        drawn = [draw(module, one, "rademacher") for one in seeds]
        probes = {name: torch.stack([signs[name] for signs in drawn]) for name in like}
        if chunk_size == 1:  # not every model can be vmapped
            images: Tree = {name: image[None] for name, image in product(drawn[0]).items()}
        else:
            images = torch.func.vmap(product, randomness="same")(probes)
        problem = misfit("the product", images, like, dims=(2,))
        if problem:
            raise ValueError(problem)
        yield probes, images


def _estimate(sums: torch.Tensor, num_samples: int) -> Estimate:
    """From the sums of the samples and of their squares, [2, *]."""
    mean, mean_square = sums / num_samples
    variance = (mean_square - mean.square()).clamp(min=0) / (num_samples - 1 or math.nan)
    return Estimate(mean, variance.sqrt())
