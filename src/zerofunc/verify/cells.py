"""The table's rows: derivatives over inputs, over parameters, in training losses, and through what zerofunc adds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch.func import (
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

from zerofunc.recompute.checkpoint import checkpoint_module
from zerofunc.verify.checks import (
    is_gradient,
    is_gradient_and_value,
    is_hessian,
    is_hvp,
    is_jacobian,
    is_mapped_gradient,
    is_mapped_hessian,
    is_mapped_hvp,
    is_mapped_jacobian,
    is_parameter_gradient,
    is_parameter_hvp,
    is_parameter_push,
    is_per_sample_gradient,
    is_pullback,
    is_push,
    is_third_order,
    is_value,
)
from zerofunc.verify.probe import Cell, Pair, Probe
from zerofunc.verify.shards import CELLS as OVER_SHARDS

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


# -- derivatives over the input ---------------------------------------------------------------------------------------

INPUTS = "over inputs"


@_computes("forward", INPUTS, is_value)
def _(p: Probe) -> Any:
    return p.call(p.x).detach()


@_computes("grad", INPUTS, is_gradient)
def _(p: Probe) -> Any:
    return grad(p.scalar)(p.x)


@_computes("grad_and_value", INPUTS, is_gradient_and_value)
def _(p: Probe) -> Any:
    return grad_and_value(p.scalar)(p.x)


@_computes("vjp, pulled back outside", INPUTS, is_pullback)
def _(p: Probe) -> Any:
    _, pull = vjp(p.call, p.x)
    return pull(p.w)[0]


@_computes("jvp", INPUTS, is_push)
def _(p: Probe) -> Any:
    return jvp(p.call, (p.x,), (p.v,))


@_computes("linearize", INPUTS, is_push)
def _(p: Probe) -> Any:
    with warnings.catch_warnings():  # PyTorch's own, of the graph that it makes
        warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node")
        value, push = linearize(p.call, p.x)
        return value, push(p.v)


@_computes("jacrev", INPUTS, is_jacobian)
def _(p: Probe) -> Any:
    return jacrev(p.call)(p.x)


@_computes("jacfwd", INPUTS, is_jacobian)
def _(p: Probe) -> Any:
    return jacfwd(p.call)(p.x)


@_computes("hessian", INPUTS, is_hessian)
def _(p: Probe) -> Any:
    return hessian(p.scalar)(p.x)


@_computes("vmap", INPUTS, is_value)
def _(p: Probe) -> Any:
    return vmap(p.one)(p.x).detach()


@_computes("vmap(grad)", INPUTS, is_mapped_gradient)
def _(p: Probe) -> Any:
    return vmap(grad(p.one_scalar))(p.x)


@_computes("vmap(jacrev)", INPUTS, is_mapped_jacobian)
def _(p: Probe) -> Any:
    return vmap(jacrev(p.one))(p.x)


@_computes("vmap(hessian)", INPUTS, is_mapped_hessian)
def _(p: Probe) -> Any:
    return vmap(hessian(p.one_scalar))(p.x)


@_computes("vmap(jvp(grad))", INPUTS, is_mapped_hvp)
def _(p: Probe) -> Any:
    return vmap(lambda x, v: jvp(grad(p.one_scalar), (x,), (v,))[1])(p.x, p.v)


@_computes("jvp(grad)", INPUTS, is_hvp)
def _(p: Probe) -> Any:
    return jvp(grad(p.scalar), (p.x,), (p.v,))[1]


@_computes("grad(jvp)", INPUTS, is_hvp)
def _(p: Probe) -> Any:
    return grad(lambda x: jvp(p.scalar, (x,), (p.v,))[1])(p.x)


@_computes("grad(grad)", INPUTS, is_hvp)
def _(p: Probe) -> Any:
    return grad(lambda x: (grad(p.scalar)(x) * p.v).sum())(p.x)


@_computes("grad(jvp(grad)), third order", INPUTS, is_third_order)
def _(p: Probe) -> Any:
    return grad(lambda x: (jvp(grad(p.scalar), (x,), (p.v,))[1] * p.v).sum())(p.x)


@_computes("autograd.grad, create_graph", INPUTS, is_hvp)
def _(p: Probe) -> Any:
    x = p.x.clone().requires_grad_()
    first = torch.autograd.grad(p.scalar(x), x, create_graph=True)[0]
    return torch.autograd.grad((first * p.v).sum(), x)[0]


@_computes("autograd.functional.jacobian", INPUTS, is_jacobian)
def _(p: Probe) -> Any:
    return torch.autograd.functional.jacobian(p.call, p.x)


@_computes("autograd.functional.hessian", INPUTS, is_hessian)
def _(p: Probe) -> Any:
    return torch.autograd.functional.hessian(p.scalar, p.x)


@_computes("autograd.functional.hvp", INPUTS, is_hvp)
def _(p: Probe) -> Any:
    return torch.autograd.functional.hvp(p.scalar, p.x, p.v)[1]


@_computes("autograd.functional.jvp", INPUTS, is_push)
def _(p: Probe) -> Any:
    return torch.autograd.functional.jvp(p.call, p.x, p.v)


@_computes("forward_ad dual numbers", INPUTS, is_push)
def _(p: Probe) -> Any:
    with torch.no_grad(), fwAD.dual_level():
        result = fwAD.unpack_dual(p.call(fwAD.make_dual(p.x, p.v)))
        assert result.tangent is not None
        return result.primal.clone(), result.tangent.clone()


# -- derivatives over this rank's full parameters ---------------------------------------------------------------------

PARAMETERS = "over full parameters, rank-local"


@_computes("functional_call: grad", PARAMETERS, is_parameter_gradient)
def _(p: Probe) -> Any:
    return grad(lambda q: p.with_parameters(q).scalar(p.x))(p.parameters)


@_computes("functional_call: per-sample grad", PARAMETERS, is_per_sample_gradient)
def _(p: Probe) -> Any:
    per_sample = vmap(grad(lambda q, x: p.with_parameters(q).one_scalar(x)), (None, 0))
    return per_sample(p.parameters, p.x)


@_computes("functional_call: jvp", PARAMETERS, is_parameter_push)
def _(p: Probe) -> Any:
    return jvp(lambda q: p.with_parameters(q).call(p.x), (p.parameters,), (p.directions(),))


@_computes("functional_call: jvp(grad)", PARAMETERS, is_parameter_hvp)
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
    slope = grad(lambda x: p.call(x).sum())(p.x)
    norm = (slope.square().sum(0) + 1e-3).sqrt()  # where ReLUs are off the slope is zero, and the root has a pole
    return p.scalar(p.x) + (norm - 1).square().mean()


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


CELLS += OVER_SHARDS

# -- through what zerofunc adds ---------------------------------------------------------------------------------------


def _again(names: Iterable[str], prefix: str, section: str, **changes: Any) -> list[Cell]:
    by_name = {cell.name: cell for cell in CELLS}
    return [replace(by_name[n], name=f"{prefix}: {n}", section=section, **changes) for n in names]


_CHECKPOINTED = (
    "grad", "vjp, pulled back outside", "jvp", "jacrev", "hessian", "vmap(grad)", "grad(grad)",
    "grad(jvp(grad)), third order", "functional_call: per-sample grad", "shards: jvp(grad)", "shards: grad(grad)",
    "ordinary loss", "func.grad penalty + loss", "backward through a jvp",
)  # fmt: skip
_KERNELS = (
    "grad", "jvp", "hessian", "vmap(grad)", "vmap(hessian)", "jvp(grad)", "grad(grad)",
    "functional_call: per-sample grad", "shards: jvp(grad)", "ordinary loss", "func.grad penalty + loss",
    "MeanFlow (jvp, target detached)", "backward through a jvp", "jvp by forward_ad",
)  # fmt: skip
_FUSED = ("zerofunc.verify.models:fused", "zerofunc.verify.models:composed")
CELLS += [
    *_again(_CHECKPOINTED, "checkpoint", "through zerofunc.checkpoint_module", prepare=checkpoint_module),
    *_again(_KERNELS, "kernels", "LayerNorm, fused attention, LSTM, against composed ones", models=_FUSED),
]
