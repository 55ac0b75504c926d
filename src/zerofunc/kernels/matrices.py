"""Linear algebra whose derivatives of derivatives PyTorch gets wrong, from functions whose it gets right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack


def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """``torch.linalg.solve``: wrong for a backward through a jvp. By the inverse, refined once."""
    inverse, is_vector = torch.linalg.inv(A), B.ndim == 1 or B.shape == A.shape[:-1]
    b = B.unsqueeze(-1) if is_vector else B

    def times(matrix: Tensor, x: Tensor) -> Tensor:
        return matrix @ x if left else x @ matrix

    x = times(inverse, b)
    x = x + times(inverse, b - times(A, x))
    return x.squeeze(-1) if is_vector else x


def solve_ex(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    """``torch.linalg.solve_ex``; a singular matrix raises."""
    info = torch.zeros(A.shape[:-2], dtype=torch.int32, device=A.device)
    return torch.return_types.linalg_solve_ex((solve(A, B, left=left), info))  # type: ignore[attr-defined]


def tensorsolve(A: Tensor, B: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """``torch.linalg.tensorsolve``: wrong for a backward through a jvp."""
    if dims is not None:
        A = A.movedim(tuple(dims), tuple(range(A.ndim - len(dims), A.ndim)))
    flat = solve(A.reshape(B.numel(), -1), B.reshape(-1))
    return flat.reshape(A.shape[B.ndim :])


def _pivots(A: Tensor) -> tuple[Tensor, Tensor]:
    """The sign of the row exchanges of an LU decomposition, and the diagonal of U, whose product is the determinant."""
    exchanges, _, upper = torch.linalg.lu(A)
    return torch.linalg.det(exchanges.detach()), upper.diagonal(dim1=-2, dim2=-1)


def det(A: Tensor) -> Tensor:
    """``torch.linalg.det``: wrong for a backward through a jvp.

    Up to 3 x 3 it is right for singular matrices as well; larger ones give NaN there.
    """
    rows = A.unbind(-2)
    match len(rows):
        case 1:
            return A[..., 0, 0]
        case 2:
            return A[..., 0, 0] * A[..., 1, 1] - A[..., 0, 1] * A[..., 1, 0]
        case 3:
            return (torch.linalg.cross(rows[0], rows[1]) * rows[2]).sum(-1)
    sign, pivots = _pivots(A)
    return sign * pivots.prod(-1)


def slogdet(A: Tensor) -> Any:
    """``torch.linalg.slogdet``: wrong for a backward through a jvp."""
    sign, pivots = _pivots(A)
    both = sign * pivots.sgn().prod(-1), pivots.abs().log().sum(-1)
    return torch.return_types.linalg_slogdet(both)  # type: ignore[attr-defined]


def logdet(A: Tensor) -> Tensor:
    """``torch.logdet``: wrong for a backward through a jvp."""
    sign, logabsdet = slogdet(A)
    return logabsdet + sign.log()


def cholesky_inverse(input: Tensor, upper: bool = False) -> Tensor:
    """``torch.cholesky_inverse``: wrong in forward mode."""
    eye = torch.eye(input.shape[-1], dtype=input.dtype, device=input.device)
    return torch.cholesky_solve(eye.expand(input.shape), input, upper)


def triangular_solve(
    input: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    """``torch.triangular_solve``: wrong in forward mode where the other triangle is not zero."""
    triangle = A.triu() if upper else A.tril()
    solution = torch.linalg.solve_triangular(
        triangle.mT if transpose else triangle, input, upper=upper != transpose, unitriangular=unitriangular
    )
    return torch.return_types.triangular_solve((solution, A.clone()))


def householder_product(input: Tensor, tau: Tensor) -> Tensor:
    """``torch.linalg.householder_product``: wrong for a backward through a jvp. Reflections, the last one first."""
    rows, columns = input.shape[-2:]
    eye = torch.eye(rows, columns, dtype=input.dtype, device=input.device)
    product = eye.expand(*input.shape[:-2], rows, columns)
    reflectors = input.tril(-1) + eye
    for i in reversed(range(tau.shape[-1])):
        v = reflectors[..., i : i + 1]
        product = product - tau[..., i, None, None] * (v @ (v.mH @ product))
    return product


class _Eigh(torch.autograd.Function):
    """Eigenvalues and eigenvectors of a symmetric or Hermitian matrix, distinct ones.

    PyTorch divides by an infinite diagonal, whose derivative is NaN; here the diagonal is left out.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(A: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(A)
        return values, vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)

    @staticmethod
    def backward(ctx: Any, grad_values: Tensor, grad_vectors: Tensor) -> Tensor:
        values, vectors = ctx.saved_tensors
        inner = torch.diag_embed(grad_values) + (vectors.mH @ grad_vectors) * _inverse_gaps(values)
        gradient = vectors @ inner @ vectors.mH
        return (gradient + gradient.mH) / 2

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = ctx.saved_tensors
        inner = vectors.mH @ ((tangent + tangent.mH) / 2) @ vectors
        return inner.diagonal(dim1=-2, dim2=-1).real, vectors @ (inner * _inverse_gaps(values))


def _inverse_gaps(values: Tensor) -> Tensor:
    """``1 / (values[j] - values[i])`` off the diagonal, and 0 on it."""
    diagonal = torch.eye(values.shape[-1], dtype=torch.bool, device=values.device)
    gaps = values.unsqueeze(-2) - values.unsqueeze(-1)
    return torch.where(diagonal, 0, torch.where(diagonal, 1, gaps).reciprocal())


def eigh(A: Tensor, UPLO: str = "L") -> Any:
    """``torch.linalg.eigh``: NaN for a backward through a jvp of the eigenvectors."""
    levels = [level.key() for level in get_interpreter_stack() or ()]
    if levels.count(TransformType.Jvp) > 1:  # in which any autograd.Function is wrong, and PyTorch's own eigh right
        return NotImplemented
    triangle, strict = (A.tril(), A.tril(-1)) if UPLO.upper() == "L" else (A.triu(), A.triu(1))
    return torch.return_types.linalg_eigh(_Eigh.apply(triangle + strict.mH))  # type: ignore[attr-defined]
