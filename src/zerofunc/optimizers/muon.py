"""Muon for the matrices of hidden layers and AdamW for all else, in one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zerofunc.optimizers.stepping import step_with

_MUON_KEYS = ("lr", "momentum", "weight_decay", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
_ADAMW_KEYS = ("lr", "betas", "eps", "weight_decay")
_OTHER_KEYS = ("muon_lr", "adam_lr", "adam_w_mode", "ns_method", "per_head_muon")


class MuonWithAdamW(Optimizer):
    """``torch.optim.Muon`` where a group says ``use_muon``, ``torch.optim.AdamW`` where it does not.

    Muon: https://kellerjordan.github.io/posts/muon. The defaults are DeepSpeed's: lr 0.02, momentum 0.95 and no weight
    decay for Muon; lr 3e-4, betas (0.9, 0.95), eps 1e-10 and no weight decay for AdamW.

    Args:
        params: Groups, each with ``use_muon`` and with settings of the one or the other.
        adam_w_mode: Whether weight decay of the others is AdamW's; otherwise it is Adam's.

    Raises:
        ValueError: If a group has no ``use_muon``, or has it on a parameter that is no matrix.
    """

    def __init__(self, params: list[dict[str, Any]], adam_w_mode: bool = True) -> None:
        adam, unused = torch.optim.AdamW if adam_w_mode else torch.optim.Adam, [torch.zeros(1, 1)]
        self._parts: dict[bool, Optimizer] = {
            True: torch.optim.Muon(unused, lr=0.02, weight_decay=0.0),
            False: adam(unused, lr=3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0),
        }
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with ``use_muon``."""
        use_muon = param_group.get("use_muon")
        if not isinstance(use_muon, bool):
            raise ValueError(f"a parameter group of Muon has use_muon {use_muon!r}; expected True or False")
        super().add_param_group({**self._parts[use_muon].defaults, **param_group})
        shapes = [tuple(param.shape) for param in self.param_groups[-1]["params"] if use_muon and param.dim() != 2]
        if shapes:
            raise ValueError(f"use_muon is True for a parameter of shape {shapes[0]}; Muon takes matrices")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; return what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for use_muon, part in self._parts.items():
            step_with(part, [group for group in self.param_groups if group["use_muon"] is use_muon], self.state)
        return loss


def muon_optimizer(module: nn.Module, groups: list[dict[str, Any]], params: dict[str, Any]) -> MuonWithAdamW:
    """Return Muon for the hidden matrices of a module and AdamW for its other parameters; local.

    A parameter's attribute ``use_muon``, set before, decides. Without it Muon takes matrices, but no embedding's (by
    the module's class, or "embed" in the name) and not "lm_head".

    Args:
        module: Whose parameters they are.
        groups: Groups of its parameters; their own settings go before those of ``params``.
        params: As in DeepSpeed: ``lr`` and ``weight_decay`` of both, ``muon_lr`` and ``adam_lr`` before it,
            ``momentum`` for Muon, ``betas`` and ``eps`` for AdamW, ``adam_w_mode``; and torch's ``nesterov``,
            ``ns_steps``, ``ns_coefficients`` and ``adjust_lr_fn`` for Muon.

    Raises:
        ValueError: If a name is none of these.
    """
    accepted = dict.fromkeys([*_MUON_KEYS, *_ADAMW_KEYS, *_OTHER_KEYS])
    unknown = sorted(set(params) - set(accepted))
    if unknown:
        raise ValueError(f"optimizer.params: Muon does not take {', '.join(unknown)}; it takes {', '.join(accepted)}")
    if params.get("per_head_muon"):
        raise ValueError("optimizer.params.per_head_muon: not supported; Muon takes a matrix as a whole")
    chosen = _muons(module)
    made: list[dict[str, Any]] = []
    for group in groups:
        named = isinstance(group["params"][0], tuple)
        for use_muon, keys, own_lr in ((True, _MUON_KEYS, "muon_lr"), (False, _ADAMW_KEYS, "adam_lr")):
            half = [entry for entry in group["params"] if (id(entry[1] if named else entry) in chosen) is use_muon]
            if half:
                shared = {key: _as_tuple(params[key]) for key in keys if key in params}
                lr = {"lr": params[own_lr]} if own_lr in params else {}
                own = {key: value for key, value in group.items() if key in keys or key not in accepted}
                made.append({**shared, **lr, **own, "params": half, "use_muon": use_muon})
    return MuonWithAdamW(made, params.get("adam_w_mode", True))


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _muons(module: nn.Module) -> set[int]:
    """Ids of the parameters that Muon takes."""
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}

    def is_hidden_matrix(name: str, param: torch.Tensor) -> bool:
        outside = id(param) in embeddings or any(word in name.lower() for word in ("embed", "lm_head"))
        return param.dim() == 2 and not outside

    named = module.named_parameters()
    return {id(param) for name, param in named if getattr(param, "use_muon", is_hidden_matrix(name, param))}
