"""Krylov methods for a symmetric linear map between sharded trees, such as a Hessian: Lanczos, conjugate gradients.

They see the map only by its products, and hold vectors as this rank's parts end to end. All numbers that decide
(inner products) are sums over all ranks, so every rank takes the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from zerofunc.curvature.vectors import Product, Tree, VectorSpace, misfit, not_positive, probe_seed, refuse, trainable
from zerofunc.module.sharding import sharding_of
from zerofunc.space.trees import draw


@dataclass(frozen=True)
class Lanczos:
    """What :func:`lanczos` finds; the same on every rank but for ``eigenvectors``, which are sharded.

    Attributes:
        tridiagonal: [k, k] float64, the map on the Krylov space; k is less than the steps asked for where that space
            is exhausted.
        eigenvalues: [k] float64, of ``tridiagonal``, largest first: the outer ones approximate the map's.
        weights: [k] float64, the shares of the eigenvalues in the start vector; their sum is 1.
        error_bounds: [k] float64: within this distance of each value lies an eigenvalue of the map.
        eigenvectors: ``{name: [num_eigenvectors, n]}``, this rank's parts, of norm 1, of the largest eigenvalues.
    """

    tridiagonal: torch.Tensor
    eigenvalues: torch.Tensor
    weights: torch.Tensor
    error_bounds: torch.Tensor
    eigenvectors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class SpectralDensity:
    """What :func:`spectral_density` finds; the same on every rank, all 1-D float64.

    Attributes:
        grid: Where the density is given.
        density: Share of eigenvalues per unit; its integral is 1.
        nodes: The estimate before smoothing: points, and
        weights: their shares, of sum 1. The trace of a function f of the map is about the number of parameters times
            ``(weights * f(nodes)).sum()``.
    """

    grid: torch.Tensor
    density: torch.Tensor
    nodes: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class ConjugateGradient:
    """What :func:`conjugate_gradient` finds.

    Attributes:
        solution: This rank's parts, the best so far.
        residuals: ``|b - (A + damping) x| / |b|`` before the first step and after each.
        outcome: Why it stopped. At ``"negative curvature"`` the damped map is not positive definite, and the solution
            is that of the steps before.
    """

    solution: dict[str, torch.Tensor]
    residuals: list[float]
    outcome: Literal["converged", "max_steps", "negative curvature"]

    @property
    def converged(self) -> bool:
        """Whether the last residual is within the tolerance."""
        return self.outcome == "converged"


# -- methods ----------------------------------------------------------------------------------------------------------


def lanczos(
    product: Product,
    module: nn.Module,
    num_steps: int,
    *,
    seed: int = 0,
    num_eigenvectors: int = 0,
    reorthogonalise: bool = True,
) -> Lanczos:
    """Collective. The largest and smallest eigenvalues of a symmetric map, by Lanczos' method from a random start.

    One product a step. The start is that of :func:`zerofunc.draw`, the same at any world size.

    Args:
        product: The map's product with a sharded tree, such as ``lambda v: hvp(loss, module, v)``.
        module: The sharded module.
        num_steps: The most steps. A few more than the eigenvalues that are wanted; the outer ones converge first.
        seed: The same on all ranks.
        num_eigenvectors: How many eigenvectors to return, of the largest eigenvalues.
        reorthogonalise: Make each new vector orthogonal to all before, which keeps ``num_steps`` of them. Without it
            two are kept, and converged eigenvalues may appear again.

    Raises:
        ValueError: On every rank, if a number is not valid or the product does not fit the module.
        FloatingPointError: On every rank, if a product is not finite.
    """
    sharding = sharding_of(module)
    refuse(
        sharding,
        not_positive("num_steps", num_steps),
        ""
        if 0 <= num_eigenvectors <= num_steps
        else f"num_eigenvectors is {num_eigenvectors}; expected 0 to num_steps",
        "num_eigenvectors needs reorthogonalise=True" if num_eigenvectors and not reorthogonalise else "",
    )
    space = VectorSpace(sharding)
    return _lanczos(product, space, space.flat(draw(module, seed)), num_steps, num_eigenvectors, reorthogonalise)


def spectral_density(
    product: Product,
    module: nn.Module,
    num_steps: int,
    *,
    num_probes: int = 1,
    seed: int = 0,
    width: float | None = None,
    num_points: int = 1000,
    reorthogonalise: bool = True,
) -> SpectralDensity:
    """Collective. How the eigenvalues of a symmetric map are distributed, by stochastic Lanczos quadrature.

    Each probe of random signs gives ``num_steps`` nodes; the density is their mean over probes, smoothed by Gaussians
    (Ghorbani et al. 2019, https://arxiv.org/abs/1901.10159).

    Args:
        product: The map's product with a sharded tree.
        module: The sharded module.
        num_steps: Products per probe.
        num_probes: The error falls as one over the root of it, and of the number of parameters.
        seed: The same on all ranks.
        width: Standard deviation of the Gaussians; a hundredth of the spectrum's extent by default.
        num_points: Length of the grid, which covers the spectrum and four widths on either side.
        reorthogonalise: As in :func:`lanczos`.

    Raises:
        ValueError: On every rank, if a number is not valid or the product does not fit the module.
        FloatingPointError: On every rank, if a product is not finite.
    """
    sharding = sharding_of(module)
    refuse(
        sharding,
        *(not_positive(name, n) for name, n in (("num_steps", num_steps), ("num_probes", num_probes))),
        "" if num_points > 1 else f"num_points is {num_points}; expected at least 2",
        "" if width is None or width > 0 else f"width is {width}; expected more than 0",
    )
    space = VectorSpace(sharding)
    starts = (space.flat(draw(module, probe_seed(seed, i), "rademacher")) for i in range(num_probes))
    found = [_lanczos(product, space, start, num_steps, 0, reorthogonalise) for start in starts]
    nodes = torch.cat([one.eigenvalues for one in found])
    weights = torch.cat([one.weights for one in found]) / num_probes
    low, high = nodes.min().item(), nodes.max().item()
    sigma = width or (high - low or abs(high) or 1.0) / 100
    grid = torch.linspace(low - 4 * sigma, high + 4 * sigma, num_points, dtype=torch.float64)
    bells = torch.exp(-0.5 * ((grid[:, None] - nodes) / sigma).square()) / (sigma * math.sqrt(2 * math.pi))
    return SpectralDensity(grid, bells @ weights, nodes, weights)


def conjugate_gradient(
    product: Product,
    b: Tree,
    module: nn.Module,
    *,
    damping: float = 0.0,
    tolerance: float = 1e-6,
    max_steps: int = 100,
    callback: Callable[[int, float], object] | None = None,
) -> ConjugateGradient:
    """Collective. The solution x of ``(A + damping) x = b`` for a symmetric map A, by conjugate gradients.

    One product a step. It starts from zero and ends when the residual is at most ``tolerance`` times the norm of b.

    Args:
        product: A's product with a sharded tree, such as ``lambda v: ggnvp(output, loss, module, v)``.
        b: A sharded tree of all trainable parameters, such as a gradient.
        module: The sharded module.
        damping: A multiple of the identity that is added to A.
        tolerance: Of the residual's norm, relative to that of b.
        max_steps: The most products.
        callback: Called on every rank after each step with the number of steps and the relative residual.

    Raises:
        ValueError: On every rank, if ``b`` or the product does not fit the module, or a number is not valid.
        FloatingPointError: On every rank, if ``b`` or a product is not finite.
    """
    sharding = sharding_of(module)
    refuse(
        sharding,
        not_positive("max_steps", max_steps),
        *(
            "" if n >= 0 else f"{k} is {n}; expected at least 0"
            for k, n in (("damping", damping), ("tolerance", tolerance))
        ),
        misfit("b", b, trainable(sharding)),
    )
    space = VectorSpace(sharding)
    residual = space.flat(b)
    solution, direction = torch.zeros_like(residual), residual
    square = start = space.dot(residual, residual).item()
    residuals = [1.0 if start else 0.0]
    outcome: Literal["converged", "max_steps", "negative curvature"] = "max_steps"
    for step in range(1, max_steps + 1):
        if residuals[-1] <= tolerance:
            break
        image = space.flat(product(space.tree(direction))) + damping * direction
        curvature = space.dot(direction, image).item()
        if curvature <= 0:
            outcome = "negative curvature"
            break
        solution = solution + square / curvature * direction
        residual = residual - square / curvature * image
        square, before = space.dot(residual, residual).item(), square
        direction = residual + square / before * direction
        residuals.append(math.sqrt(square / start))
        if callback is not None:
            callback(step, residuals[-1])
    if residuals[-1] <= tolerance:
        outcome = "converged"
    return ConjugateGradient(space.tree(solution), residuals, outcome)


def _lanczos(
    product: Product,
    space: VectorSpace,
    start: torch.Tensor,
    num_steps: int,
    num_eigenvectors: int,
    reorthogonalise: bool,
) -> Lanczos:
    # Without reorthogonalisation only the two latest vectors are kept, in turn.
    basis = start.new_zeros(num_steps if reorthogonalise else 2, len(start))
    diagonal: list[float] = []
    norms = [space.dot(start, start).sqrt().item()]
    vector = start
    for step in range(num_steps):
        row, kept = step % len(basis), basis[: step + 1]
        basis[row] = vector / norms[-1]
        vector = space.flat(product(space.tree(basis[row])))
        shares = space.dot(kept, vector)
        diagonal.append(shares[row].item())
        vector = vector - shares.to(kept) @ kept
        if reorthogonalise:  # once more, for what rounding left
            vector = vector - space.dot(kept, vector).to(kept) @ kept
        norms.append(space.dot(vector, vector).sqrt().item())
        if norms[-1] <= 10 * torch.finfo(start.dtype).eps * max(map(abs, (*diagonal, *norms[1:]))):
            break  # the Krylov space is exhausted
    off = torch.tensor(norms[1 : len(diagonal)], dtype=torch.float64)
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = (found.flip(-1) for found in torch.linalg.eigh(tridiagonal))
    top = vectors[:, :num_eigenvectors].to(basis)
    return Lanczos(
        tridiagonal,
        values,
        vectors[0].square(),
        norms[-1] * vectors[-1].abs(),
        space.tree(top.mT @ basis[: len(diagonal)]) if num_eigenvectors else {},
    )
