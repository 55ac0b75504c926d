"""Which derivatives of which layers PyTorch gets wrong or lacks, and what a sharded module does about it.

Every derivative is compared in float64 with central differences of forward passes alone. Run it to write
`docs/operators.md`:

    python docs/operators.py
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.autograd.forward_ad as fwad
from layers import SECTIONS, Case
from torch import nn
from torch.func import functional_call, jvp, vjp, vmap

import zerofunc
from zerofunc import second_order

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., torch.Tensor]

# -- derivatives, each as numbers that differences of the forward can give too ----------------------------------------
# `f` maps tensors `z` to one tensor; `u` and `v` are directions in the space of `z`, `w` one in that of the output.


def dot(a: Tensors, b: Tensors) -> torch.Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True) if x is not None]).sum()


def moved(z: Tensors, *steps: tuple[float, Tensors]) -> Tensors:
    return tuple(sum((h * d[i] for h, d in steps), start=x) for i, x in enumerate(z))


def recorded(z: Tensors) -> Tensors:
    return tuple(x.clone().requires_grad_() for x in z)


def gradient(f: Function, w: torch.Tensor) -> Callable[..., Tensors]:
    return lambda *z: vjp(f, *z)[1](w)


def first_difference(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    h = 1e-6
    return (f(*moved(z, (h, v))) - f(*moved(z, (-h, v)))) / (2 * h)


def second_difference(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    h = 1e-4
    signs = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
    return (w * sum(a * b * f(*moved(z, (a * h, u), (b * h, v))) for a, b in signs)).sum() / (4 * h * h)


def third_difference(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    """Along ``u``, ``v`` and ``u``: of second derivatives, which the cells above have compared with the forward."""
    h = 1e-5
    with second_order(), torch.enable_grad():
        ahead, behind = (by_double_backward(f, moved(z, (step, u)), u, v, w) for step in (h, -h))
    return (ahead - behind) / (2 * h)


def by_backward(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    z = recorded(z)
    return dot(torch.autograd.grad((w * f(*z)).sum(), z, allow_unused=True), v)


def by_vjp(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    return dot(gradient(f, w)(*z), v)


def by_jvp(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    return jvp(f, z, v)[1]


def tangent_by_forward_ad(f: Function, z: Tensors, v: Tensors) -> torch.Tensor:
    with fwad.dual_level():
        tangent = fwad.unpack_dual(f(*map(fwad.make_dual, z, v))).tangent
        return torch.zeros(()) if tangent is None else tangent


def by_forward_ad(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    return tangent_by_forward_ad(f, z, v)


def by_double_backward(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    z = recorded(z)
    first = torch.autograd.grad((w * f(*z)).sum(), z, create_graph=True, allow_unused=True)
    return backward_along(dot(first, v), z, u)


def backward_along(loss: torch.Tensor, z: Tensors, u: Tensors) -> torch.Tensor:
    """The loss's derivative along ``u``; a loss that depends on no input (a linear layer's) has none."""
    if not loss.requires_grad:
        return loss.new_zeros(())
    return dot(torch.autograd.grad(loss, z, allow_unused=True), u) + 0 * loss.detach()


def by_backward_through_jvp(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    z = recorded(z)
    return backward_along((w * jvp(f, z, v)[1]).sum(), z, u)


def by_backward_through_forward_ad(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    z = recorded(z)
    return backward_along((w * tangent_by_forward_ad(f, z, v)).sum(), z, u)


def by_jvp_of_vjp(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    return dot(jvp(gradient(f, w), z, v)[1], u)


def by_vjp_of_jvp(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    return dot(gradient(lambda *z: jvp(f, z, v)[1], w)(*z), u)


def by_vjp_of_vjp(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    return dot(vjp(lambda *z: dot(gradient(f, w)(*z), v), *z)[1](torch.ones((), dtype=w.dtype)), u)


def by_jvp_of_jvp(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    return (w * jvp(lambda *z: jvp(f, z, v)[1], z, u)[1]).sum()


def by_triple_backward(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    z = recorded(z)
    first = torch.autograd.grad((w * f(*z)).sum(), z, create_graph=True, allow_unused=True)
    if not (slope := dot(first, v)).requires_grad:
        return w.new_zeros(())
    second = torch.autograd.grad(slope, z, create_graph=True, allow_unused=True)
    return backward_along(dot(second, u), z, u)


def by_backward_through_vjp_of_vjp(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    z = recorded(z)
    return backward_along(by_vjp_of_vjp(f, z, u, v, w), z, u)


def by_backward_through_jvp_of_vjp(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    z = recorded(z)
    return backward_along(by_jvp_of_vjp(f, z, u, v, w), z, u)


def by_vjp_of_vjp_of_vjp(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    one = torch.ones((), dtype=w.dtype)
    return dot(vjp(lambda *z: by_vjp_of_vjp(f, z, u, v, w), *z)[1](one), u)


def by_jvp_of_vjp_of_vjp(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    return jvp(lambda *z: by_vjp_of_vjp(f, z, u, v, w), z, u)[1]


def value(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
    return f(*z)


Derivative = Callable[[Function, Tensors, Tensors, Tensors, torch.Tensor], torch.Tensor]


def along(difference: Derivative) -> Derivative:
    """The first difference as a number, to compare a gradient with."""
    return lambda f, z, u, v, w: (w * difference(f, z, u, v, w)).sum()


def mapped(derivative: Derivative) -> Derivative:
    """The derivative at three points at once."""
    return lambda f, z, u, v, w: vmap(lambda *z: derivative(f, z, u, v, w), randomness="same")(*points(z, u))


def looped(difference: Derivative) -> Derivative:
    """The same, one point after the other."""

    def run(f: Function, z: Tensors, u: Tensors, v: Tensors, w: torch.Tensor) -> torch.Tensor:
        return torch.stack([difference(f, point, u, v, w) for point in zip(*points(z, u), strict=True)])

    return run


def points(z: Tensors, u: Tensors) -> Tensors:
    return tuple(torch.stack([x, x + 0.1 * d, x - 0.1 * d]) for x, d in zip(z, u, strict=True))


CELLS: dict[str, tuple[Derivative, Derivative]] = {
    "backward": (by_backward, along(first_difference)),
    "vjp": (by_vjp, along(first_difference)),
    "jvp": (by_jvp, first_difference),
    "forward_ad": (by_forward_ad, first_difference),
    "double backward": (by_double_backward, second_difference),
    "backward through jvp": (by_backward_through_jvp, second_difference),
    "backward through forward_ad": (by_backward_through_forward_ad, second_difference),
    "jvp of vjp": (by_jvp_of_vjp, second_difference),
    "vjp of jvp": (by_vjp_of_jvp, second_difference),
    "vjp of vjp": (by_vjp_of_vjp, second_difference),
    "jvp of jvp": (by_jvp_of_jvp, second_difference),
    "triple backward": (by_triple_backward, third_difference),
    "backward through vjp of vjp": (by_backward_through_vjp_of_vjp, third_difference),
    "backward through jvp of vjp": (by_backward_through_jvp_of_vjp, third_difference),
    "vjp of vjp of vjp": (by_vjp_of_vjp_of_vjp, third_difference),
    "jvp of vjp of vjp": (by_jvp_of_vjp_of_vjp, third_difference),
    "vmap": (mapped(value), looped(value)),
    "vmap of vjp": (mapped(by_vjp), looped(along(first_difference))),
    "vmap of jvp": (mapped(by_jvp), looped(first_difference)),
    "vmap of vjp of vjp": (mapped(by_vjp_of_vjp), looped(second_difference)),
    "vmap of jvp of vjp": (mapped(by_jvp_of_vjp), looped(second_difference)),
}


def judge(cell: str, f: Function, z: Tensors, sharded: bool = False) -> str:
    """``ok``, ``wrong`` (with the numbers), or what PyTorch says where it cannot."""
    generator = torch.Generator().manual_seed(1)

    def draw(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)

    u, v, w = tuple(map(draw, z)), tuple(map(draw, z)), draw(f(*z))
    derivative, difference = CELLS[cell]
    with torch.no_grad():
        expected = difference(f, z, u, v, w)
    announced = second_order() if sharded and cell == "double backward" else contextlib.nullcontext()
    try:
        with announced:
            found = derivative(f, z, u, v, w).detach()
    except Exception as error:  # whatever PyTorch raises is the finding
        return f"lacks: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    error = float((found - expected).abs().max())
    if error <= 2e-5 * (1 + float(expected.abs().max())):
        return "ok"
    return f"wrong: off by {error:.1e} at {float(expected.abs().max()):.1e}"


def function_of(case: Case, stage: int | None) -> tuple[Function, Tensors]:
    """The layer as a function of its parameters and inputs, on plain PyTorch or through a sharded module."""
    make, shapes = case
    torch.manual_seed(0)
    module = make().double()
    named = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    z = (*named.values(), *(torch.randn(shape, dtype=torch.float64) for shape in shapes))
    if stage is not None:
        if not named:
            module.register_parameter("unused", nn.Parameter(torch.zeros(1)))
        zerofunc.shard(module, stage)

    def f(*z: torch.Tensor) -> torch.Tensor:
        return functional_call(module, dict(zip(named, z, strict=False)), z[len(named) :])

    return f, z


# -- the table --------------------------------------------------------------------------------------------------------

INTRODUCTION = """# Derivatives of operators

Written by `python docs/operators.py` with PyTorch {torch}, Python {python}, on CPU ({machine}). In float64, {cells}
derivatives of each of {layers} layers are compared with central differences of forward passes alone (tolerance 2e-5):
on plain PyTorch, and through a module sharded by zerofunc at stage {stage}. A row has the layers with the same
findings; those that are right everywhere are listed below.

**wrong** is a number that is silently not the derivative; "lacks" is an error. Through zerofunc a layer is composed
of elementary operators where such a derivative may be taken, and only there: a plain forward and backward runs
PyTorch's fused kernels. "Double backward" of a plain forward, which cannot be seen in advance, runs inside `with
zerofunc.second_order():` there.

| layer | plain PyTorch | through zerofunc |
|---|---|---|
"""

REMARKS = """
What is left, and why:

- BatchNorm in training mode writes its statistics in place, which torch.func refuses. The error names the module and
  the ways out.
- A custom `autograd.Function` under a jvp of a jvp loses the outer tangent in PyTorch (its `jvp` runs with forward
  mode off), silently. Nothing can see into it from outside; take a jvp of a gradient instead.
- All this holds for what a sharded module computes. A loss outside the module is PyTorch's: for a backward through a
  dual number of `cross_entropy`, say, use `torch.func.jvp`, or enter `zerofunc.second_order()`, which treats the
  loss as well.
- A transform that begins inside a module's forward is seen where a submodule is called, and around the module's own
  operators where its class names the transform (`grad`, `jvp`, `create_graph`, ...). One that a function elsewhere
  begins, around operators outside any submodule, is not, nor is a method of the root that calls operators directly:
  enter `zerofunc.second_order()` there.
- For `ctc_loss`, `multilabel_margin_loss`, `grid_sample` of volumes, `logcumsumexp` and norms with p = 1 under
  `forward_ad`, `gaussian_nll_loss` under vmap, `ldl_solve`, `zeta` and complex `eig` there is no short composite:
  PyTorch's error reaches the user. Bessel functions have no derivative in PyTorch and are constants to it.
- `linalg.det` of singular matrices beyond 3 x 3, and `linalg.eigh` of equal eigenvalues, give NaN where they are
  composed.
- The fast path of `nn.TransformerEncoderLayer` in evaluation without gradients is off in sharded modules: it does not
  run in modules with hooks.
"""


def results(stage: int | None, only: str) -> dict[str, dict[str, str]]:
    """What was found: layer to derivative to verdict."""
    return {
        name: {cell: judge(cell, *function_of(case, stage), sharded=stage is not None) for cell in CELLS}
        for section in SECTIONS
        for name, case in section()
        if only in name
    }


def summary(verdicts: dict[str, str]) -> str:
    """The cells that are not right, shortly."""
    parts = []
    for kind in ("wrong", "lacks"):
        cells = [cell for cell, verdict in verdicts.items() if verdict.startswith(kind)]
        if cells:
            name = "**wrong**" if kind == "wrong" else kind
            parts.append(f"{name}: {', '.join(cells)}")
    return "; ".join(parts) or "ok"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=3, help="ZeRO stage of the second column")
    parser.add_argument("--only", default="", help="layers whose name contains this; prints, and writes nothing")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    plain, ours = results(None, options.only), results(options.stage, options.only)
    text = INTRODUCTION.format(
        torch=torch.__version__, python=platform.python_version(), machine=platform.machine(), stage=options.stage,
        cells=len(CELLS), layers=len(plain),
    )  # fmt: skip
    rows: dict[tuple[str, str], list[str]] = {}
    for name in plain:
        rows.setdefault((summary(plain[name]), summary(ours[name])), []).append(name)
    for (theirs, mine), names in rows.items():
        if (theirs, mine) != ("ok", "ok"):
            text += f"| {', '.join(names)} | {theirs} | {'the same' if mine == theirs else mine} |\n"
    right = ", ".join(name for name in plain if summary(plain[name]) == summary(ours[name]) == "ok")
    text += f"\nRight everywhere: {right}.\n"
    if options.only:
        for which, found in (("plain", plain), ("zerofunc", ours)):
            for name, verdicts in found.items():
                print(
                    "\n".join(f"{which} {name}, {c}: {v}" for c, v in verdicts.items() if v != "ok")
                    or f"{which} {name}: ok"
                )
    else:
        sys.stdout.write(text + REMARKS)
        options.output.write_text(text + REMARKS)


if __name__ == "__main__":
    main()
