"""Lion: steps of one size in the direction of a momentum's sign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Sign momentum with decoupled weight decay (Chen et al. 2023, arXiv:2302.06675, algorithm 2). Elementwise.

    ``p = p (1 - lr decay) - lr sign(beta1 m + (1 - beta1) g)``, then ``m = beta2 m + (1 - beta2) g``. The defaults are
    DeepSpeed's; the paper has a ``lr`` of 1e-4 and betas of (0.9, 0.99).

    Args:
        params: Parameters, named ones or groups.
        lr: Size of a step, in every element.
        betas: How much of the momentum is in the step, and how much is kept.
        weight_decay: Its coefficient, times ``lr``.

    Raises:
        ValueError: If a number is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        if not lr >= 0.0:
            raise ValueError(f"lr is {lr}; expected a number >= 0")
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas is {betas}; expected two numbers in [0, 1)")
        if not weight_decay >= 0.0:
            raise ValueError(f"weight_decay is {weight_decay}; expected a number >= 0")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; return what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(params, float(group["lr"]), group["betas"], group["weight_decay"])
        return loss

    def _update(self, params: list[torch.Tensor], lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        gradients = [param.grad for param in params if param.grad is not None]
        for param in params:
            if not self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
        moments = [self.state[param]["exp_avg"] for param in params]
        directions = torch._foreach_lerp(moments, gradients, 1 - betas[0])
        torch._foreach_sign_(directions)
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        torch._foreach_add_(params, directions, alpha=-lr)
        torch._foreach_lerp_(moments, gradients, 1 - betas[1])
