"""The table of transforms: what is computed in each cell, and what it must agree with by finite differences.

A cell is written once, for anything that can be called like a module; :mod:`zerofunc.verify.run` evaluates it on the
engine and on the plain module. ``check`` yields pairs that must agree: what the cell claims, contracted with a
direction, and a central difference of something one derivative lower, so that plain PyTorch is checked as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)

Tensors = dict[str, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Probe:
    """Something to differentiate, and where.

    Attributes:
        call: The engine or the plain module.
        module: The module itself (an engine's ``module``), for parameters.
        x: Input, [batch, ...].
        v: A direction of the same shape.
        w: A cotangent of the output's shape.
        step: Step of the central differences.
    """

    call: Callable[[torch.Tensor], torch.Tensor]
    module: nn.Module
    x: torch.Tensor
    v: torch.Tensor
    w: torch.Tensor
    step: float

    def scalar(self, x: torch.Tensor) -> torch.Tensor:
        """A smooth function of the output, curved in it: mean of squares and cubes."""
        y = self.call(x)
        return (y.square() + y.pow(3) / 3).mean()

    def one(self, sample: torch.Tensor) -> torch.Tensor:
        """The output of one sample without batch dimension."""
        return self.call(sample.unsqueeze(0)).squeeze(0)

    def one_scalar(self, sample: torch.Tensor) -> torch.Tensor:
        """:meth:`scalar` of one sample."""
        return self.scalar(sample.unsqueeze(0))

    def with_parameters(self, parameters: Tensors) -> Probe:
        """The same probe at other parameters."""
        return replace(self, call=lambda x: functional_call(self.module, parameters, (x,)))

    @property
    def parameters(self) -> Tensors:
        """The module's trainable parameters by name."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def along(self, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Central difference of ``function`` at ``x`` along ``v``."""
        with torch.no_grad():
            ahead, behind = self.x + self.step * self.v, self.x - self.step * self.v
        return (function(ahead) - function(behind)).detach() / (2 * self.step)

    def directions(self) -> Tensors:
        """A direction in parameter space, of unit scale."""
        generator = torch.Generator().manual_seed(1)
        return {
            name: torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device)
            for name, p in self.parameters.items()
        }

    def along_parameters(self, function: Callable[[Tensors], torch.Tensor]) -> torch.Tensor:
        """Central difference of ``function``, of trainable parameters, along :meth:`directions`."""
        d = self.directions()
        ahead = {name: p.detach() + self.step * d[name] for name, p in self.parameters.items()}
        behind = {name: p.detach() - self.step * d[name] for name, p in self.parameters.items()}
        return (function(ahead) - function(behind)).detach() / (2 * self.step)


@dataclass(frozen=True)
class Cell:
    """One row of the table.

    Attributes:
        name: As printed.
        section: Heading it is printed under.
        compute: What is compared between engine and plain module: a tree of tensors. None for a training loss.
        check: Pairs of (claim, finite difference) for a result of ``compute``.
        loss: A training loss of (probe, probe for what is under a stop-gradient), whose gradient over the parameters
            is compared.
    """

    name: str
    section: str
    compute: Callable[[Probe], Any] | None = None
    check: Callable[[Probe, Any], Iterator[Pair]] | None = None
    loss: Callable[[Probe, Probe], torch.Tensor] | None = None


CELLS: list[Cell] = []


def _computes(
    name: str, section: str, check: Callable[[Probe, Any], Iterator[Pair]]
) -> Callable[[Callable[[Probe], Any]], Callable[[Probe], Any]]:
    def register(compute: Callable[[Probe], Any]) -> Callable[[Probe], Any]:
        CELLS.append(Cell(name, section, compute, check))
        return compute

    return register


def _trains(name: str) -> Callable[[Callable[[Probe], torch.Tensor]], Callable[[Probe], torch.Tensor]]:
    def register(loss: Callable[[Probe], torch.Tensor]) -> Callable[[Probe], torch.Tensor]:
        CELLS.append(Cell(name, TRAINING, loss=lambda p, stopped: loss(p)))
        return loss

    return register


# -- checks by finite differences -------------------------------------------------------------------------------------


def _autograd(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """First-order reverse mode without torch.func."""
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]


def _is_value(p: Probe, result: Any) -> Iterator[Pair]:
    yield result, p.call(p.x).detach()


def _is_gradient(p: Probe, result: Any) -> Iterator[Pair]:
    yield (result * p.v).sum(), p.along(p.scalar)


def _is_gradient_and_value(p: Probe, result: Any) -> Iterator[Pair]:
    yield result[1], p.scalar(p.x).detach()
    yield from _is_gradient(p, result[0])


def _is_pullback(p: Probe, result: Any) -> Iterator[Pair]:
    yield (result * p.v).sum(), p.along(lambda x: (p.call(x) * p.w).sum())


def _is_push(p: Probe, result: Any) -> Iterator[Pair]:
    value, tangent = result
    yield value, p.call(p.x).detach()
    yield tangent, p.along(p.call)


def _is_jacobian(p: Probe, result: Any) -> Iterator[Pair]:
    yield (result.flatten(-p.x.dim()) * p.v.flatten()).sum(-1), p.along(p.call)


def _is_hessian(p: Probe, result: Any) -> Iterator[Pair]:
    yield torch.tensordot(result, p.v, p.v.dim()), p.along(lambda x: _autograd(p.scalar, x))


def _is_hvp(p: Probe, result: Any) -> Iterator[Pair]:
    yield result, p.along(lambda x: _autograd(p.scalar, x))


def _is_mapped_gradient(p: Probe, result: Any) -> Iterator[Pair]:
    for g, x, v in zip(result, p.x, p.v, strict=True):
        yield (g * v).sum(), replace(p, x=x, v=v).along(p.one_scalar)


def _is_mapped_jacobian(p: Probe, result: Any) -> Iterator[Pair]:
    for j, x, v in zip(result, p.x, p.v, strict=True):
        yield (j.flatten(-x.dim()) * v.flatten()).sum(-1), replace(p, x=x, v=v).along(p.one)


def _is_mapped_hvp(p: Probe, result: Any) -> Iterator[Pair]:
    for h, x, v in zip(result, p.x, p.v, strict=True):
        yield h, replace(p, x=x, v=v).along(lambda a: _autograd(p.one_scalar, a))


def _is_mapped_hessian(p: Probe, result: Any) -> Iterator[Pair]:
    contracted = [torch.tensordot(h, v, v.dim()) for h, v in zip(result, p.v, strict=True)]
    yield from _is_mapped_hvp(p, contracted)


def _is_third_order(p: Probe, result: Any) -> Iterator[Pair]:
    yield (result * p.v).sum(), p.along(lambda x: (jvp(grad(p.scalar), (x,), (p.v,))[1] * p.v).sum())


def _is_parameter_gradient(p: Probe, result: Any) -> Iterator[Pair]:
    d = p.directions()
    claimed = torch.stack([(result[name] * d[name]).sum() for name in d]).sum()
    yield claimed, p.along_parameters(lambda q: p.with_parameters(q).scalar(p.x))


def _is_per_sample_gradient(p: Probe, result: Any) -> Iterator[Pair]:
    for index in range(len(p.x)):
        sample = {name: g[index] for name, g in result.items()}
        yield from _is_parameter_gradient(replace(p, x=p.x[index : index + 1]), sample)


def _is_parameter_push(p: Probe, result: Any) -> Iterator[Pair]:
    yield result[1], p.along_parameters(lambda q: p.with_parameters(q).call(p.x))


def _is_parameter_hvp(p: Probe, result: Any) -> Iterator[Pair]:
    def gradient(parameters: Tensors, name: str) -> torch.Tensor:
        leaves = {n: tensor.detach().clone().requires_grad_() for n, tensor in parameters.items()}
        return torch.autograd.grad(p.with_parameters(leaves).scalar(p.x), leaves[name])[0]

    name = max(result, key=lambda n: result[n].norm().item())
    yield result[name], p.along_parameters(lambda q: gradient(q, name))


# -- derivatives over the input ---------------------------------------------------------------------------------------

INPUTS = "over inputs"


@_computes("forward", INPUTS, _is_value)
def _(p: Probe) -> Any:
    return p.call(p.x).detach()


@_computes("grad", INPUTS, _is_gradient)
def _(p: Probe) -> Any:
    return grad(p.scalar)(p.x)


@_computes("grad_and_value", INPUTS, _is_gradient_and_value)
def _(p: Probe) -> Any:
    return grad_and_value(p.scalar)(p.x)


@_computes("vjp, pulled back outside", INPUTS, _is_pullback)
def _(p: Probe) -> Any:
    _, pull = vjp(p.call, p.x)
    return pull(p.w)[0]


@_computes("jvp", INPUTS, _is_push)
def _(p: Probe) -> Any:
    return jvp(p.call, (p.x,), (p.v,))


@_computes("linearize", INPUTS, _is_push)
def _(p: Probe) -> Any:
    with warnings.catch_warnings():  # PyTorch's own, of the graph that it makes
        warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node")
        value, push = linearize(p.call, p.x)
        return value, push(p.v)


@_computes("jacrev", INPUTS, _is_jacobian)
def _(p: Probe) -> Any:
    return jacrev(p.call)(p.x)


@_computes("jacfwd", INPUTS, _is_jacobian)
def _(p: Probe) -> Any:
    return jacfwd(p.call)(p.x)


@_computes("hessian", INPUTS, _is_hessian)
def _(p: Probe) -> Any:
    return hessian(p.scalar)(p.x)


@_computes("vmap", INPUTS, _is_value)
def _(p: Probe) -> Any:
    return vmap(p.one)(p.x).detach()


@_computes("vmap(grad)", INPUTS, _is_mapped_gradient)
def _(p: Probe) -> Any:
    return vmap(grad(p.one_scalar))(p.x)


@_computes("vmap(jacrev)", INPUTS, _is_mapped_jacobian)
def _(p: Probe) -> Any:
    return vmap(jacrev(p.one))(p.x)


@_computes("vmap(hessian)", INPUTS, _is_mapped_hessian)
def _(p: Probe) -> Any:
    return vmap(hessian(p.one_scalar))(p.x)


@_computes("vmap(jvp(grad))", INPUTS, _is_mapped_hvp)
def _(p: Probe) -> Any:
    return vmap(lambda x, v: jvp(grad(p.one_scalar), (x,), (v,))[1])(p.x, p.v)


@_computes("jvp(grad)", INPUTS, _is_hvp)
def _(p: Probe) -> Any:
    return jvp(grad(p.scalar), (p.x,), (p.v,))[1]


@_computes("grad(jvp)", INPUTS, _is_hvp)
def _(p: Probe) -> Any:
    return grad(lambda x: jvp(p.scalar, (x,), (p.v,))[1])(p.x)


@_computes("grad(grad)", INPUTS, _is_hvp)
def _(p: Probe) -> Any:
    return grad(lambda x: (grad(p.scalar)(x) * p.v).sum())(p.x)


@_computes("grad(jvp(grad)), third order", INPUTS, _is_third_order)
def _(p: Probe) -> Any:
    return grad(lambda x: (jvp(grad(p.scalar), (x,), (p.v,))[1] * p.v).sum())(p.x)


@_computes("autograd.grad, create_graph", INPUTS, _is_hvp)
def _(p: Probe) -> Any:
    x = p.x.clone().requires_grad_()
    first = torch.autograd.grad(p.scalar(x), x, create_graph=True)[0]
    return torch.autograd.grad((first * p.v).sum(), x)[0]


@_computes("autograd.functional.jacobian", INPUTS, _is_jacobian)
def _(p: Probe) -> Any:
    return torch.autograd.functional.jacobian(p.call, p.x)


@_computes("autograd.functional.hessian", INPUTS, _is_hessian)
def _(p: Probe) -> Any:
    return torch.autograd.functional.hessian(p.scalar, p.x)


@_computes("autograd.functional.hvp", INPUTS, _is_hvp)
def _(p: Probe) -> Any:
    return torch.autograd.functional.hvp(p.scalar, p.x, p.v)[1]


@_computes("autograd.functional.jvp", INPUTS, _is_push)
def _(p: Probe) -> Any:
    return torch.autograd.functional.jvp(p.call, p.x, p.v)


@_computes("forward_ad dual numbers", INPUTS, _is_push)
def _(p: Probe) -> Any:
    with torch.no_grad(), fwAD.dual_level():
        result = fwAD.unpack_dual(p.call(fwAD.make_dual(p.x, p.v)))
        assert result.tangent is not None
        return result.primal.clone(), result.tangent.clone()


# -- derivatives over this rank's full parameters ---------------------------------------------------------------------

PARAMETERS = "over full parameters, rank-local"


@_computes("functional_call: grad", PARAMETERS, _is_parameter_gradient)
def _(p: Probe) -> Any:
    return grad(lambda q: p.with_parameters(q).scalar(p.x))(p.parameters)


@_computes("functional_call: per-sample grad", PARAMETERS, _is_per_sample_gradient)
def _(p: Probe) -> Any:
    per_sample = vmap(grad(lambda q, x: p.with_parameters(q).one_scalar(x)), (None, 0))
    return per_sample(p.parameters, p.x)


@_computes("functional_call: jvp", PARAMETERS, _is_parameter_push)
def _(p: Probe) -> Any:
    return jvp(lambda q: p.with_parameters(q).call(p.x), (p.parameters,), (p.directions(),))


@_computes("functional_call: jvp(grad)", PARAMETERS, _is_parameter_hvp)
def _(p: Probe) -> Any:
    return jvp(grad(lambda q: p.with_parameters(q).scalar(p.x)), (p.parameters,), (p.directions(),))[1]


TRAINING = "training on a loss"

# -- training losses --------------------------------------------------------------------------------------------------


@_trains("ordinary loss")
def _(p: Probe) -> torch.Tensor:
    return p.scalar(p.x)


@_trains("autograd gradient penalty + loss")
def _(p: Probe) -> torch.Tensor:
    x = p.x.clone().requires_grad_()
    y = p.call(x)
    slope = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    return y.square().mean() + slope.square().sum()


@_trains("func.grad penalty alone")
def _(p: Probe) -> torch.Tensor:
    return grad(lambda x: p.call(x).sum())(p.x).square().sum()


@_trains("func.grad penalty + loss")
def _(p: Probe) -> torch.Tensor:
    return p.scalar(p.x) + (grad(lambda x: p.call(x).sum())(p.x).square().sum(0).sqrt() - 1).square().mean()


@_trains("score matching (autograd.grad)")
def _(p: Probe) -> torch.Tensor:
    x = p.x.clone().requires_grad_()
    score = torch.autograd.grad(p.scalar(x), x, create_graph=True)[0]
    return (score - p.v).square().mean()


@_trains("sliced score matching")
def _(p: Probe) -> torch.Tensor:
    score, curvature = jvp(grad(p.scalar), (p.x,), (p.v,))
    return (curvature * p.v).sum() + 0.5 * score.square().sum()


def _mean_flow(p: Probe, stopped: Probe) -> torch.Tensor:
    y, slope = jvp(p.call, (p.x,), (p.v,))
    if stopped is not p:
        slope = jvp(stopped.call, (p.x,), (p.v,))[1]
    return (y - (p.w - 0.5 * slope).detach()).square().mean()


CELLS.append(Cell("MeanFlow (jvp, target detached)", TRAINING, loss=_mean_flow))


@_trains("backward through a jvp")
def _(p: Probe) -> torch.Tensor:
    return jvp(p.call, (p.x,), (p.v,))[1].square().mean()


@_trains("jvp along the gradient")
def _(p: Probe) -> torch.Tensor:
    direction = grad(p.scalar)(p.x)
    return jvp(p.scalar, (p.x,), (direction,))[1]


@_trains("jvp by forward_ad")
def _(p: Probe) -> torch.Tensor:
    with fwAD.dual_level():
        tangent = fwAD.unpack_dual(p.call(fwAD.make_dual(p.x, p.v))).tangent
        assert tangent is not None
        return tangent.square().mean()


@_trains("Laplacian (vmap of hessian)")
def _(p: Probe) -> torch.Tensor:
    curvature = vmap(hessian(p.one_scalar))(p.x).flatten(p.x.dim()).flatten(1, p.x.dim() - 1)
    return curvature.diagonal(dim1=1, dim2=2).sum(1).square().mean()


@_trains("forces + energy")
def _(p: Probe) -> torch.Tensor:
    slope, energy = vmap(grad_and_value(p.one_scalar))(p.x)
    return energy.square().mean() + (-slope - p.v).square().mean()


@_trains("Hutchinson trace (jvp of grad)")
def _(p: Probe) -> torch.Tensor:
    return (vmap(lambda x, v: jvp(grad(p.one_scalar), (x,), (v,))[1])(p.x, p.v) * p.v).sum(0).square().mean()


@_trains("Jacobian (vmap of jacrev)")
def _(p: Probe) -> torch.Tensor:
    return vmap(jacrev(p.one))(p.x).square().sum()


@_trains("forward twice, losses added")
def _(p: Probe) -> torch.Tensor:
    return p.scalar(p.x) + p.call(p.x + p.v).square().mean()
