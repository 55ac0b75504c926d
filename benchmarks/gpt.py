"""A plain small GPT of 20.5 M parameters, written without a thought of sharding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, DEPTH, HEADS, VOCABULARY, SEQUENCE = 384, 8, 6, 8192, 128


class RMSNorm(nn.Module):
    """x over its root mean square, in plain operations, which have every derivative."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """Causal attention and a GELU network, each on the normed residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] to the same."""
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head of its own."""

    def __init__(
        self,
        width: int = WIDTH,
        depth: int = DEPTH,
        heads: int = HEADS,
        vocabulary: int = VOCABULARY,
        sequence: int = SEQUENCE,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor | None, targets: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """Mean cross entropy.

        Args:
            tokens: [batch, sequence] int64; None where ``inputs_embeds`` is given.
            targets: [batch, sequence] int64, the tokens that follow.
            inputs_embeds: [batch, sequence, width], in place of the tokens' embeddings.
        """
        x = self.tokens(tokens) if inputs_embeds is None else inputs_embeds
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
