"""Attention that never holds a matrix of queries by keys, under any derivative."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from zerofunc.recompute.checkpoint import checkpoint

DEFAULT_BLOCK_SIZE = 256


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> torch.Tensor:
    """What ``F.scaled_dot_product_attention`` gives, [..., queries, value width], with every derivative in any order.

    Queries are taken in blocks, of elementary operations each, and each block is a :func:`checkpoint`. What is alive
    for a block is ``block_size`` rows of the attention weights, and what is kept is nothing but the arguments, in
    forward and in reverse mode and in their nestings. So memory grows linearly with the sequence. Local to a rank.

    Args:
        q: Queries, [..., heads, queries, width].
        k: Keys, [..., heads, keys, width]; leading dimensions broadcast.
        v: Values, [..., heads, keys, value width].
        attn_mask: Broadcastable to [..., heads, queries, keys]: bool, True where a query sees a key, or of q's dtype,
            added to the scores. A query that sees no key gets zeros.
        dropout_p: Probability that a weight is dropped, always: pass 0.0 in evaluation.
        is_causal: Whether query i sees keys 0 to i only. Others are not computed, up to the block.
        scale: Factor on the scores; 1 / sqrt(width) by default.
        enable_gqa: Whether several heads of queries share one of keys and values, in order.
        block_size: Queries at a time.

    Raises:
        ValueError: If shapes or dtypes do not fit, or a number is out of its range.
    """
    _check_tensors(q, k, v, enable_gqa)
    _check_mask(q, k, attn_mask, is_causal)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p: expected a probability in [0, 1], found {dropout_p}")
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size: expected an integer > 0, found {block_size!r}")
    if scale is None:
        scale = 1.0 / math.sqrt(max(q.size(-1), 1))
    groups = q.size(-3) // max(k.size(-3), 1) if enable_gqa else 1
    rows = []
    for start in range(0, max(q.size(-2), 1), block_size):
        stop = min(start + block_size, q.size(-2))
        mask = None if attn_mask is None else _rows_of(attn_mask, start, stop)
        diagonal = start if is_causal else None
        rows.append(checkpoint(_attend, q[..., start:stop, :], k, v, mask, dropout_p, diagonal, scale, groups))
    return torch.cat(rows, -2)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    diagonal: int | None,
    scale: float,
    groups: int,
) -> torch.Tensor:
    """Attention of a block of queries; row i sees keys 0 to ``diagonal`` + i where that is given.

    A head of keys and values serves ``groups`` heads of queries.
    """
    if diagonal is not None:  # in here, so that the blocks' gradients of k add up where they arrive, and do not pile up
        k, v = k[..., : diagonal + q.size(-2), :], v[..., : diagonal + q.size(-2), :]
    if groups > 1:
        k, v = _repeated(k, groups), _repeated(v, groups)
    scores = (q * scale) @ k.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if diagonal is not None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(diagonal)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights, total = _exponentials(scores)
    if dropout_p:
        weights = F.dropout(weights, dropout_p)
    return ((weights.to(v.dtype) @ v) / total.to(v.dtype)).to(q.dtype)


def _exponentials(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax as numerator and denominator; zeros and ones in rows of -inf alone.

    Written out, since PyTorch's softmax has no backward through a tangent of ``forward_ad``.
    """
    if scores.size(-1) == 0:
        return scores, torch.ones_like(scores.sum(-1, keepdim=True))
    largest = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - largest.masked_fill(largest == -math.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    return weights, total.masked_fill(largest == -math.inf, 1.0)


def _repeated(heads: torch.Tensor, times: int) -> torch.Tensor:
    """Each head ``times`` times, one after the other."""
    return heads.unsqueeze(-3).expand(*heads.shape[:-2], times, *heads.shape[-2:]).flatten(-4, -3)


def _rows_of(mask: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return mask if mask.dim() < 2 or mask.size(-2) == 1 else mask[..., start:stop, :]


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2 or not tensor.is_floating_point():
            found = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else tensor
            raise ValueError(f"{name}: expected a floating-point tensor [..., length, width], found {found!r}")
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise ValueError(
                f"{name}: expected {q.dtype} on {q.device} as q has, found {tensor.dtype} on {tensor.device}"
            )
    if q.size(-1) != k.size(-1):
        raise ValueError(f"k: expected width {q.size(-1)} as q has, found {k.size(-1)}")
    if k.size(-2) != v.size(-2):
        raise ValueError(f"v: expected {k.size(-2)} values, one for each key, found {v.size(-2)}")
    shapes = [tuple(tensor.shape[:-2]) for tensor in (q, k, v)]
    if enable_gqa:
        if min(map(len, shapes)) < 1 or shapes[1][-1] != shapes[2][-1] or shapes[0][-1] % max(shapes[1][-1], 1):
            raise ValueError(
                f"enable_gqa: expected k and v of a number of heads that divides q's, found leading dimensions {shapes}"
            )
        shapes = [shape[:-1] for shape in shapes]
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError as error:
        hint = "" if enable_gqa else "; set enable_gqa=True where heads share keys"
        raise ValueError(f"q, k, v: expected leading dimensions that broadcast, found {shapes}{hint}") from error


def _check_mask(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> None:
    if mask is None:
        return
    if is_causal:
        raise ValueError("attn_mask: expected None with is_causal=True; put the causal mask into attn_mask")
    if mask.dtype not in (torch.bool, q.dtype):
        raise ValueError(f"attn_mask: expected torch.bool or {q.dtype} as q has, found {mask.dtype}")
    weights = (*q.shape[:-1], k.size(-2))
    try:
        torch.broadcast_shapes(mask.shape, weights)
    except RuntimeError as error:
        raise ValueError(
            f"attn_mask: expected a shape that broadcasts to {weights}, found {tuple(mask.shape)}"
        ) from error
