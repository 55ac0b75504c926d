"""``deepspeed.zero.TiledLinear``: a large linear layer as a grid of small ones, each fetched when it is its turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["TiledLinear"]


def _sizes(total: int, parts: int, name: str) -> list[int]:
    """The sizes of ``parts`` nearly equal parts, larger ones first."""
    if not 1 <= parts <= total:
        raise RuntimeError(f"{name} is {parts}; expected 1 to {total}")
    return [total // parts + (index < total % parts) for index in range(parts)]


class TiledLinear(nn.Module):
    """``nn.Linear`` made of ``out_splits`` x ``in_splits`` tiles; of ``linears[o][i]`` the last ``i`` have the bias.

    Args:
        in_features: Size of the input's last dim.
        out_features: Size of the output's last dim.
        bias: Whether a bias is added.
        in_splits: Number of parts of the input.
        out_splits: Number of parts of the output.
        input_is_already_split: Whether the input comes as a list of such parts.
        combine_out_splits: Whether the output is one tensor, or a list of parts.
        linear_cls: Class of a tile.
        init_linear: A linear layer whose values are copied.
        kwargs: For ``linear_cls``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = _sizes(in_features, in_splits, "in_splits")
        self.out_parts = _sizes(out_features, out_splits, "out_splits")
        last = in_splits - 1
        self.linears = nn.ModuleList(
            nn.ModuleList(linear_cls(m, n, bias=bias and i == last, **kwargs) for i, m in enumerate(self.in_parts))
            for n in self.out_parts
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        """What the whole layer gives, in parts unless ``combine_out_splits``."""
        parts = input_ if self.input_is_already_split else torch.split(input_, self.in_parts, -1)  # type: ignore[arg-type]
        outputs = []
        for row in self.linears:
            output = row[0](parts[0])  # type: ignore[index]
            for tile, part in zip(row[1:], parts[1:], strict=True):  # type: ignore[index]
                output = output + tile(part)
            outputs.append(output)
        return torch.cat(outputs, -1) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy the values of a whole linear layer."""
        for o, rows in enumerate(other.weight.split(self.out_parts)):
            for i, weight in enumerate(rows.split(self.in_parts, 1)):
                self.get_parameter(f"linears.{o}.{i}.weight").copy_(weight)
        for o, bias in enumerate(other.bias.split(self.out_parts) if self.use_bias else ()):
            self.get_parameter(f"linears.{o}.{self.in_splits - 1}.bias").copy_(bias)
