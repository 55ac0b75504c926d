"""Random tensors that depend on a seed and a parameter's name alone, block by block.

Any part can be drawn without the rest, and is the same on any number of ranks and at any stage.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

NOISE_BLOCK = 1 << 12  # elements
PROJECTION_BLOCK = 1 << 22  # elements
KINDS = ("rademacher", "normal")


def _generator(device: torch.device, *key: object) -> torch.Generator:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def normal_part(seed: int, name: str, start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
    """Elements ``start`` to ``stop`` of a standard normal vector, 1-D; type and device of ``like``. Local."""
    first = start // NOISE_BLOCK
    blocks = [
        torch.randn(
            NOISE_BLOCK, generator=_generator(like.device, seed, name, block), dtype=like.dtype, device=like.device
        )
        for block in range(first, -(-stop // NOISE_BLOCK) if stop > start else first)
    ]
    return torch.cat([like.new_empty(0), *blocks])[start - first * NOISE_BLOCK : stop - first * NOISE_BLOCK]


@dataclass(frozen=True)
class Projector:
    """A random linear map of gradients to ``dim`` numbers that keeps inner products on average.

    Its matrix is drawn in blocks of rows when it is applied, and never held.

    Attributes:
        dim: Length of a projected gradient.
        seed: Of the matrix. The same seed gives the same map on any number of ranks and at any stage.
        kind: ``"rademacher"`` (signs) or ``"normal"``; both over the square root of ``dim``.
    """

    dim: int
    seed: int = 0
    kind: str = "rademacher"

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or self.dim < 1:
            raise ValueError(f"Projector: dim is {self.dim!r}; expected a positive int")
        if not isinstance(self.seed, int):
            raise ValueError(f"Projector: seed is {self.seed!r}; expected an int")
        if self.kind not in KINDS:
            raise ValueError(f"Projector: kind is {self.kind!r}; expected one of {', '.join(KINDS)}")

    def project(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Local. The projection, [dim], of a tensor of the parameter ``name``; differentiable, also under vmap."""
        flat = tensor.reshape(-1)
        total = flat.new_zeros(self.dim)
        for block, piece in enumerate(flat.split(max(1, PROJECTION_BLOCK // self.dim))):
            with torch._C._DisableFuncTorch():  # the same for all samples of a vmap
                matrix = self._block((name, block), len(piece), tensor.dtype, tensor.device)
            total = total + piece @ matrix
        return total / self.dim**0.5

    def _block(self, key: object, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        generator = _generator(device, self, key)
        if self.kind == "normal":
            return torch.randn(rows, self.dim, generator=generator, device=device, dtype=dtype)
        signs = torch.randint(0, 2, (rows, self.dim), generator=generator, device=device, dtype=torch.int8)
        return signs.to(dtype).mul_(2).sub_(1)
