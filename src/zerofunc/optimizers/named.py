"""Optimizers by name, over shards or over whole parameters, and those that are refused by name."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from zerofunc.optimizers.lion import Lion

_NOT_IN_TORCH = "torch has no such class; build one that has and give the instance to initialize()"
_COMMUNICATES = "it communicates by itself; AdamW with communication_data_type 'bf16' moves less as well"
_REFUSED = {
    "LBFGS": "its line search takes products over all parameters and calls a closure again and again",
    "SparseAdam": "it takes sparse gradients, and shards have dense ones",
    "OneBitAdam": _COMMUNICATES,
    "ZeroOneAdam": _COMMUNICATES,
    "OneBitLamb": _COMMUNICATES,
}
_ABSENT = ("Lamb", "FusedLamb", "LARS", "Shampoo", "SOAP", "MuAdam", "MuAdamW", "MuSGD")

WHOLE: frozenset[type[Optimizer]] = frozenset({torch.optim.Adafactor, torch.optim.Muon})
"""Classes of ``torch.optim`` whose update of an element depends on its whole parameter."""

_OPTIMIZERS: dict[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in [*vars(torch.optim).items(), ("Lion", Lion)]
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer and name not in _REFUSED
}
_ADAMS = ("adam", "adamw")


def elementwise_class(kind: type[Optimizer]) -> bool:
    """Whether it is a class of ``torch.optim`` whose update of an element depends on that element's history alone."""
    return kind in _OPTIMIZERS.values() and kind not in WHOLE


def needs_whole_parameters(type_name: str) -> bool:
    """Whether the optimizer of that name, in any case, must see parameters in their full shapes."""
    return _OPTIMIZERS.get(type_name.lower()) in WHOLE


def refuse_known(optimizer: Optimizer) -> None:
    """Raise ValueError if the optimizer, or a class it derives from, is known not to work on sharded parameters."""
    for kind in type(optimizer).__mro__:
        _refuse_name(kind.__name__)


def _refuse_name(type_name: str) -> None:
    for name, reason in _REFUSED.items():
        if name.lower() == type_name.lower():
            raise ValueError(f"optimizer: {name} cannot train sharded parameters: {reason}")


def build_optimizer(
    params_or_groups: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]],
    type_name: str,
    params: dict[str, Any],
) -> Optimizer:
    """Return the optimizer of that name; local.

    As in DeepSpeed, Adam means AdamW unless `adam_w_mode` is false, and both have no weight decay unless it is given;
    with `torch_adam` torch's own default holds. A fused kernel is used where torch has one for every tensor and
    `params` does not choose otherwise.

    Args:
        params_or_groups: Tensors, named tensors or group dicts; groups are copied. Tensors may have 0 elements.
        type_name: A class of `torch.optim`, or Lion, in any case.
        params: Its keyword arguments, and for Adam and AdamW `adam_w_mode`, `torch_adam`, `bias_correction`.

    Raises:
        ValueError: If there is no such optimizer, it is refused, or it does not take these parameters.
    """
    _refuse_name(type_name)
    kind, arguments = _resolve(type_name, dict(params))
    entries = _copied(params_or_groups)
    accepted = [name for name in inspect.signature(kind).parameters if name != "params"]
    unknown = sorted(set(arguments) - set(accepted))
    if unknown:
        raise ValueError(
            f"optimizer.params: {kind.__name__} does not take {', '.join(unknown)}; it takes {', '.join(accepted)}"
        )
    if _may_choose_fused(accepted, arguments, entries):
        places = {(tensor.device, tensor.dtype) for tensor in _tensors(entries)}
        if places and all(_fused_steps(kind.__name__, device, dtype) for device, dtype in places):
            arguments["fused"] = True
    try:
        return kind(entries, **arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer: {kind.__name__} refused {params}: {error}") from error


def _resolve(type_name: str, arguments: dict[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return torch's class and its keyword arguments for a name and the parameters of a configuration."""
    name = type_name.lower()
    if name in map(str.lower, _ABSENT):
        raise ValueError(f"optimizer.type: {type_name}: {_NOT_IN_TORCH}")
    if name not in _OPTIMIZERS:
        near = difflib.get_close_matches(name, _OPTIMIZERS, n=1)
        hint = f"; did you mean {_OPTIMIZERS[near[0]].__name__}?" if near else ""
        raise ValueError(f"optimizer.type: expected a class of torch.optim or Lion, found {type_name!r}{hint}")
    if "max_grad_norm" in arguments:
        raise ValueError("optimizer.params.max_grad_norm: not an optimizer's parameter; set gradient_clipping instead")
    if "betas" in arguments and isinstance(arguments["betas"], list):
        arguments["betas"] = tuple(arguments["betas"])
    if name in _ADAMS:
        if not arguments.pop("bias_correction", True):
            raise ValueError("optimizer.params.bias_correction: false is not supported; torch's Adam always corrects")
        if not arguments.pop("fp32_optimizer_states", True):
            raise ValueError("optimizer.params.fp32_optimizer_states: false is not supported; shards are float32")
        decoupled = arguments.pop("adam_w_mode", True) or name == "adamw"
        if not arguments.pop("torch_adam", False):
            arguments.setdefault("weight_decay", 0.0)
        name = "adamw" if decoupled else "adam"
    return _OPTIMIZERS[name], arguments


def _copied(entries: Any) -> list[Any]:
    """Return the parameters or groups as a list that the optimizer may keep, with group dicts copied."""
    if isinstance(entries, torch.Tensor):
        return [entries]
    return [{**entry, "params": _copied(entry["params"])} if isinstance(entry, dict) else entry for entry in entries]


def _tensors(entries: list[Any]) -> list[torch.Tensor]:
    """Return every tensor of a list of tensors, named tensors or groups."""
    found: list[torch.Tensor] = []
    for entry in entries:
        if isinstance(entry, dict):
            found += _tensors(entry["params"])
        else:
            found.append(entry[1] if isinstance(entry, tuple) else entry)
    return found


def _may_choose_fused(accepted: list[str], arguments: dict[str, Any], entries: list[Any]) -> bool:
    """Return whether the class has a fused kernel that takes any gradients, and nobody chose another."""
    chosen = ("fused", "foreach", "differentiable")
    settings = [arguments, *(entry for entry in entries if isinstance(entry, dict))]
    if any(setting.get("momentum") for setting in settings):
        return False  # fused SGD fails where one parameter gets its first gradient in a later step than another
    return "fused" in accepted and not any(name in setting for setting in settings for name in chosen)


@functools.cache
def _fused_steps(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the fused kernel takes a step there, with a tensor of 0 elements among its own.

    Asked of the kernel itself, because torch's list of supported places is private.
    """
    if not dtype.is_floating_point or device.type == "meta":
        return False
    try:
        probes = [torch.zeros(size, device=device, dtype=dtype) for size in (1, 0)]
        optimizer = _OPTIMIZERS[name.lower()](probes, fused=True)  # type: ignore[call-arg]
        for probe in probes:
            probe.grad = torch.zeros_like(probe)
        optimizer.step()
    except (RuntimeError, NotImplementedError):
        return False
    return True
