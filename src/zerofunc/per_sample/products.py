"""Squared norms of products ``gradients^T rows``, [out, in], of rows [T, in] and gradients [T, out]."""

from __future__ import annotations

import torch


def of_product(rows: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """Squared norm of ``gradients^T rows`` for rows [T, in] and gradients [T, out], the cheaper way."""
    if len(rows) == 1:
        return square(rows) * square(gradients)
    if is_short(len(rows), rows.shape[1], gradients.shape[1]):
        return of_gram(rows, gradients)
    return square(gradients.mT @ rows)


def is_short(num: int, width: int, height: int) -> bool:
    """Whether Gram matrices of ``num`` rows are cheaper than a product [height, width]."""
    return num * (width + height) < width * height


def of_gram(rows: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """Squared norm of ``gradients^T rows`` from the rows' inner products; the sum over groups in front, if any."""
    return torch.dot((rows @ rows.mT).flatten(), (gradients @ gradients.mT).flatten())


def square(tensor: torch.Tensor) -> torch.Tensor:
    """Squared norm, without a temporary tensor of squares."""
    return torch.linalg.vector_norm(tensor).square()
