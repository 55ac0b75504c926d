"""The model whose state is saved: layers that all look alike."""

import torch
from torch import nn

WIDTH = 4096
MILLIONS = 400


def build(millions: int) -> nn.Sequential:
    """Linear layers of about that many million parameters in all."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(max(1, round(millions * 1e6 / WIDTH**2)))))


def loss_of(model: nn.Module) -> torch.Tensor:
    """Something to differentiate."""
    loss: torch.Tensor = model(torch.ones(1, WIDTH)).square().mean()
    return loss
