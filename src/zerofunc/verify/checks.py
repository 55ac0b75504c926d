"""Checks of plain PyTorch by finite differences.

Each yields pairs that must agree: what the cell claims, contracted with a direction, and a central difference of
something one derivative lower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.func import grad, jvp

from zerofunc.verify.probe import Pair, Probe, Space, Tensors


def _autograd(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """First-order reverse mode without torch.func."""
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]


def is_value(p: Probe, result: Any) -> Iterator[Pair]:
    yield result, p.call(p.x).detach()


def is_gradient(p: Probe, result: Any) -> Iterator[Pair]:
    yield (result * p.v).sum(), p.along(p.scalar)


def is_gradient_and_value(p: Probe, result: Any) -> Iterator[Pair]:
    yield result[1], p.scalar(p.x).detach()
    yield from is_gradient(p, result[0])


def is_pullback(p: Probe, result: Any) -> Iterator[Pair]:
    yield (result * p.v).sum(), p.along(lambda x: (p.call(x) * p.w).sum())


def is_push(p: Probe, result: Any) -> Iterator[Pair]:
    value, tangent = result
    yield value, p.call(p.x).detach()
    yield tangent, p.along(p.call)


def is_jacobian(p: Probe, result: Any) -> Iterator[Pair]:
    yield (result.flatten(-p.x.dim()) * p.v.flatten()).sum(-1), p.along(p.call)


def is_hessian(p: Probe, result: Any) -> Iterator[Pair]:
    yield torch.tensordot(result, p.v, p.v.dim()), p.along(lambda x: _autograd(p.scalar, x))


def is_hvp(p: Probe, result: Any) -> Iterator[Pair]:
    yield result, p.along(lambda x: _autograd(p.scalar, x))


def is_mapped_gradient(p: Probe, result: Any) -> Iterator[Pair]:
    for g, x, v in zip(result, p.x, p.v, strict=True):
        yield (g * v).sum(), replace(p, x=x, v=v).along(p.one_scalar)


def is_mapped_jacobian(p: Probe, result: Any) -> Iterator[Pair]:
    for j, x, v in zip(result, p.x, p.v, strict=True):
        yield (j.flatten(-x.dim()) * v.flatten()).sum(-1), replace(p, x=x, v=v).along(p.one)


def is_mapped_hvp(p: Probe, result: Any) -> Iterator[Pair]:
    for h, x, v in zip(result, p.x, p.v, strict=True):
        yield h, replace(p, x=x, v=v).along(lambda a: _autograd(p.one_scalar, a))


def is_mapped_hessian(p: Probe, result: Any) -> Iterator[Pair]:
    contracted = [torch.tensordot(h, v, v.dim()) for h, v in zip(result, p.v, strict=True)]
    yield from is_mapped_hvp(p, contracted)


def is_third_order(p: Probe, result: Any) -> Iterator[Pair]:
    yield (result * p.v).sum(), p.along(lambda x: (jvp(grad(p.scalar), (x,), (p.v,))[1] * p.v).sum())


def is_parameter_gradient(p: Probe, result: Any) -> Iterator[Pair]:
    d = p.directions()
    claimed = torch.stack([(result[name] * d[name]).sum() for name in d]).sum()
    yield claimed, p.along_parameters(lambda q: p.with_parameters(q).scalar(p.x))


def is_per_sample_gradient(p: Probe, result: Any) -> Iterator[Pair]:
    for index in range(len(p.x)):
        sample = {name: g[index] for name, g in result.items()}
        yield from is_parameter_gradient(replace(p, x=p.x[index : index + 1]), sample)


def is_parameter_push(p: Probe, result: Any) -> Iterator[Pair]:
    yield result[1], p.along_parameters(lambda q: p.with_parameters(q).call(p.x))


def is_parameter_hvp(p: Probe, result: Any) -> Iterator[Pair]:
    def gradient(parameters: Tensors, name: str) -> torch.Tensor:
        leaves = {n: tensor.detach().clone().requires_grad_() for n, tensor in parameters.items()}
        return torch.autograd.grad(p.with_parameters(leaves).scalar(p.x), leaves[name])[0]

    name = max(result, key=lambda n: result[n].norm().item())
    yield result[name], p.along_parameters(lambda q: gradient(q, name))


def is_space_gradient(s: Space, result: list[Any], number: int = 0) -> Iterator[Pair]:
    """The first of ``result`` is the gradient."""
    yield s.inner(result[0], s.direction(number)), s.along(s.loss, number)


def is_space_slope(s: Space, result: list[Any]) -> Iterator[Pair]:
    """The first of ``result`` is the derivative along a direction."""
    yield result[0], s.along(s.loss)


def is_space_product(s: Space, result: list[Any]) -> Iterator[Pair]:
    """Entry i of ``result`` is the Hessian times direction i."""
    for number, product in enumerate(result):
        yield s.inner(product, s.direction(9)), s.along(lambda p: s.inner(grad(s.loss)(p), s.direction(9)), number)


def is_space_third(s: Space, result: list[Any]) -> Iterator[Pair]:
    """The first of ``result`` is the third derivative, twice along a direction."""

    def curvature(p: Tensors) -> torch.Tensor:
        return s.inner(jvp(grad(s.loss), (p,), (s.direction(0),))[1], s.direction(0))

    yield s.inner(result[0], s.direction(9)), s.along(curvature, 9)


def is_space_jacobian(s: Space, result: list[Any]) -> Iterator[Pair]:
    """Entry i of ``result`` is the gradient of output i."""
    difference = s.along(s.outputs)
    for row, output in zip(result, difference, strict=True):
        yield s.inner(row, s.direction(0)), output


def is_space_member(s: Space, result: list[Any]) -> Iterator[Pair]:
    """Entry i of ``result`` is the gradient at the parameters moved along direction i."""
    for number, gradient in enumerate(result):
        at = replace(s, parameters=s.moved(0.1, number))
        yield from is_space_gradient(at, [gradient])
