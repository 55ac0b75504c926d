"""``deepspeed.ops.adam``: torch's Adam under other names. As upstream, "Adam" decouples weight decay by default."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class _Adam(torch.optim.Adam):
    def __init__(
        self,
        params: Any,
        lr: float,
        bias_correction: bool,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        amsgrad: bool,
        decoupled: bool,
    ) -> None:
        if not bias_correction:
            raise ValueError("bias_correction is False, which torch's Adam does not have; leave it True")
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, fused=True, decoupled_weight_decay=decoupled)


class FusedAdam(_Adam):
    """AdamW (or Adam, without ``adam_w_mode``) with torch's fused kernel."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)


class DeepSpeedCPUAdam(_Adam):
    """The same; the masters that it steps are on the CPU where ``offload_optimizer`` says so."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode)
