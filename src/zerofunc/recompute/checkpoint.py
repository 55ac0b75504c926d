"""Activation checkpointing that is legal under every transform.

One ``autograd.Function`` keeps the inputs of a function and nothing of what it computes. Its derivatives are functions
of those inputs as well, and are kept in the same way: the pullback and the pushforward of a checkpointed function are
checkpointed functions. So what is saved stays small in any order of derivative, forward or reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch._C import _functorch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree

from zerofunc.ranks.buffers import below_transforms
from zerofunc.recompute.captures import filled, run_alone, slots_of, unwrapped

M = TypeVar("M", bound=nn.Module)
Tensors = tuple[torch.Tensor, ...]

# Arguments of torch.utils.checkpoint.checkpoint on which the result does not depend here.
_NEEDLESS = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``fn(*args, **kwargs)``, whose intermediate values are computed again when a derivative needs them.

    It may stand under any transform of torch.func, nested at will, under ``.backward()``, ``autograd.grad`` and
    ``forward_ad``, and inside another checkpoint. Every run draws the same random numbers, under the same autocast.
    Local to a rank; at stage 3 every run reads the parameters again.

    What ``fn`` reads besides its arguments is found where it is a module, a method, a partial or a function that
    closes over modules, tensors, or lists and dicts of them. Pass a module itself rather than a function that closes
    over the whole model: all parameters found are inputs, of which each call keeps a reference.

    Args:
        fn: A function of tensors that gives the same results whenever it is called, and writes into none of its
            arguments. It is run with gradient mode on and inputs that do not require gradients; derivatives inside it
            are those of torch.func, or over inputs that it calls ``requires_grad_()`` on.
        args: Any tree of tensors and other values.
        kwargs: Likewise. The options of ``torch.utils.checkpoint.checkpoint`` are accepted, and not needed.

    Returns:
        What ``fn`` returns: any tree of tensors and other values.

    Raises:
        ValueError: If ``context_fn`` is given.
        RuntimeError: If the result depends on a tensor with derivatives that was not found.
    """
    if kwargs.pop("context_fn", None) is not None:
        raise ValueError("context_fn: expected None, found a function; zerofunc.checkpoint saves nothing selectively")
    for name in _NEEDLESS:
        kwargs.pop(name, None)
    while isinstance(fn, partial):
        bound: partial[Any] = fn
        fn, args, kwargs = bound.func, (*bound.args, *args), {**bound.keywords, **kwargs}
    if not (torch.is_grad_enabled() or _is_transformed()):
        return fn(*args, **kwargs)
    arguments, rest = _split((args, kwargs))
    slots = slots_of(fn, *rest.leaves)
    outside = {id(tensor): tensor for tensor in slots.values() if _has_derivatives(tensor)}
    tensors = [*arguments, *outside.values()]
    if not _is_recorded(tensors):
        return fn(*args, **kwargs)
    surroundings: list[_Surroundings] = []
    modes = _get_current_function_mode_stack()  # PyTorch leaves them where a transform meets an autograd.Function
    transformed = _is_transformed() or forward_ad._current_level >= 0

    def run(*operands: torch.Tensor) -> Any:
        given, found = _parted(operands, len(outside))
        given_args, given_kwargs = rest.joined(given)
        replaced = dict(zip(outside, found, strict=True))
        with filled(slots, [replaced.get(id(tensor), tensor) for tensor in slots.values()]):
            if surroundings:
                with surroundings[0].restored():
                    return fn(*given_args, **given_kwargs)
            surroundings.append(_Surroundings({operand.device for operand in operands}, modes))
            with _inside(modes):
                return run_alone(partial(fn, *given_args, **given_kwargs), operands, transformed)

    return _kept(run, tensors)


def _is_recorded(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether reverse mode would keep anything of a function of these tensors; forward mode and vmap keep nothing."""
    levels = _functorch.get_interpreter_stack() or ()
    if any(level.key() == _functorch.TransformType.Grad for level in levels):
        return any(map(_has_derivatives, tensors))
    return torch.is_grad_enabled() and any(unwrapped(tensor).requires_grad for tensor in tensors)


def _has_derivatives(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be differentiated, or is batched: then a function that reads it must be told."""
    if tensor.requires_grad or _functorch.is_functorch_wrapped_tensor(tensor):
        return True
    return forward_ad._current_level >= 0 and _is_differentiable(tensor)


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_transformed() -> bool:
    return torch._C._are_functorch_transforms_active()


class _Rest(NamedTuple):
    """A tree without its tensors."""

    leaves: list[Any]
    spec: pytree.TreeSpec

    def joined(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The tree with these tensors, in order."""
        upcoming = iter(tensors)
        return pytree.tree_unflatten([next(upcoming) if leaf is _TENSOR else leaf for leaf in self.leaves], self.spec)


_TENSOR = object()
_NOTHING = _Rest(*pytree.tree_flatten(()))


def _split(tree: Any) -> tuple[Tensors, _Rest]:
    """The tensors of a tree, and what else it is made of."""
    leaves, spec = pytree.tree_flatten(tree)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return tensors, _Rest([_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)


# -- a function and its derivatives, of which the inputs are kept alone ------------------------------------------------


def _kept(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    """``function(*tensors)``: a tree. Autograd keeps the tensors and nothing else."""
    # A pullback may be called when its level has ended: torch/_functorch/autograd_function.py, on vjp and autograd.
    tensors = [_functorch.unwrap_if_dead(tensor) for tensor in tensors]
    if not (torch.is_grad_enabled() or _is_transformed()):
        return function(*tensors)
    rest = _NOTHING

    def flat(*operands: torch.Tensor) -> Tensors:
        nonlocal rest
        results, rest = _split(function(*operands))
        return results

    results = _Checkpoint.apply(flat, *tensors)
    return rest.joined(results)


class _Checkpoint(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(function: Callable[..., Tensors], *tensors: torch.Tensor) -> Tensors:
        return function(*(tensor.detach() for tensor in tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.set_materialize_grads(False)
        ctx.function, *tensors = inputs
        ctx.num_results = len(output)
        ctx.differentiable = [index for index, result in enumerate(output) if _is_differentiable(result)]
        # PyTorch refuses to save tensors of inference mode even for a level of functorch, to which they are constants.
        inference = [index for index, tensor in enumerate(tensors) if tensor.is_inference()]
        are_constant = bool(inference) and (_is_transformed() or not _is_recording())
        ctx.constants = {index: tensors[index] for index in inference} if are_constant else {}
        saved = [None if index in ctx.constants else tensor for index, tensor in enumerate(tensors)]
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        tensors = _kept_tensors(ctx)
        wanted = [index for index in range(len(tensors)) if ctx.needs_input_grad[index + 1]]
        given = {index: cotangent for index, cotangent in enumerate(cotangents) if cotangent is not None}
        pullback = partial(_pullback, ctx.function, wanted, list(given))
        gradients = _kept(pullback, [*tensors, *given.values()])
        return None, *_spread(wanted, gradients, len(tensors))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> Any:
        tensors = _kept_tensors(ctx)
        wanted = {index: tangent for index, tangent in enumerate(tangents) if tangent is not None}
        pushforward = partial(_pushforward, ctx.function, list(wanted), ctx.differentiable)
        results = _kept(pushforward, [*tensors, *wanted.values()])
        return _spread(ctx.differentiable, results, ctx.num_results)


def _kept_tensors(ctx: Any) -> list[torch.Tensor]:
    return [ctx.constants.get(index, tensor) for index, tensor in enumerate(ctx.saved_tensors)]


def _spread(places: Sequence[int], values: Sequence[Any], length: int) -> tuple[Any, ...]:
    """``values`` at their places, None elsewhere."""
    at = dict(zip(places, values, strict=True))
    return tuple(at.get(index) for index in range(length))


def _restricted(
    function: Callable[..., Tensors], tensors: Sequence[torch.Tensor], wanted: Sequence[int], results: Sequence[int]
) -> Callable[..., Tensors]:
    """``function`` of its ``wanted`` inputs to its chosen ``results``, the other inputs being fixed."""

    def restricted(*operands: torch.Tensor) -> Tensors:
        at = dict(zip(wanted, operands, strict=True))
        every = function(*(at.get(index, tensor) for index, tensor in enumerate(tensors)))
        return tuple(every[index] for index in results)

    return restricted


def _pullback(
    function: Callable[..., Tensors], wanted: Sequence[int], given: Sequence[int], *operands: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    """Gradients for the ``wanted`` inputs: operands are all inputs, then cotangents of the ``given`` results."""
    tensors, cotangents = _parted(operands, len(given))
    restricted = _restricted(function, tensors, wanted, given)
    primals = [tensors[index] for index in wanted]
    again = torch.is_grad_enabled() or forward_ad._current_level >= 0  # fused backward kernels have no tangents
    gradients: list[torch.Tensor | None] = [None] * len(wanted)

    def differentiated(*inputs: torch.Tensor) -> Tensors:
        pairs = zip(restricted(*inputs), cotangents, strict=True)
        results, directions = _columns([pair for pair in pairs if pair[0].requires_grad])
        if results:
            gradients[:] = torch.autograd.grad(results, inputs, directions, create_graph=again, allow_unused=True)
        return *(gradient for gradient in gradients if gradient is not None), inputs[0]  # func.vjp wants one at least

    # In a level of functorch kernels see that it is not the first derivative, and inference mode records as well.
    if again or _is_transformed() or not _is_recording():
        found = iter(torch.func.vjp(differentiated, *primals)[0])
        return [None if gradient is None else next(found) for gradient in gradients]
    with torch.enable_grad():
        differentiated(*(primal.detach().requires_grad_() for primal in primals))
    return gradients


def _is_recording() -> bool:
    """Whether autograd records here where it may: not in inference mode, of which a backward inside sees a half."""
    with torch.enable_grad():
        return torch.empty(0, requires_grad=True).neg().requires_grad


def _columns(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Tensors, Tensors]:
    return tuple(first for first, _ in pairs), tuple(second for _, second in pairs)


def _pushforward(
    function: Callable[..., Tensors], wanted: Sequence[int], results: Sequence[int], *operands: torch.Tensor
) -> Tensors:
    """Tangents of the ``results``: operands are all inputs, then tangents of the ``wanted`` ones."""
    tensors, tangents = _parted(operands, len(wanted))
    restricted = _restricted(function, tensors, wanted, results)
    primals = [_without_overlap(tensors[index]) for index in wanted]
    if forward_ad._current_level >= 0 and eager_transforms.JVP_NESTING == 0:
        # The user's own dual_level is active, and PyTorch has no second one: a pullback is linear, and its transpose
        # is the pushforward.
        values, pull = torch.func.vjp(restricted, *primals)  # type: ignore[misc]
        push = torch.func.vjp(pull, tuple(map(torch.zeros_like, values)))[1]
        return push(tangents)[0]
    return torch.func.jvp(restricted, tuple(primals), tangents)[1]


def _parted(operands: Tensors, num_last: int) -> tuple[Tensors, Tensors]:
    split = len(operands) - num_last
    return operands[:split], operands[split:]


def _without_overlap(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that forward mode takes: it refuses primals of which two elements share memory, expanded ones."""
    return tensor.clone() if torch._debug_has_internal_overlap(unwrapped(tensor)) else tensor


# -- what a run depends on besides tensors -----------------------------------------------------------------------------


class _Surroundings:
    """Random state, autocast, attention kernels and function modes of the first run, for the later ones."""

    def __init__(self, devices: set[torch.device], modes: list[TorchFunctionMode]) -> None:
        self.accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
        self.kinds = {"cpu", *(device.type for device in self.accelerators)}
        self.random = self._random_state()
        self.cache = torch.is_autocast_cache_enabled()
        self.autocast = {kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in self.kinds}
        self.attention = _cur_sdpa_kernel_backends()
        self.modes = modes

    def _random_state(self) -> list[torch.Tensor]:
        with below_transforms():
            states = [torch.get_device_module(d).get_rng_state(d) for d in self.accelerators]
            return [torch.get_rng_state(), *states]

    def _set_random_state(self, states: list[torch.Tensor]) -> None:
        with below_transforms():
            torch.set_rng_state(states[0])
            for device, state in zip(self.accelerators, states[1:], strict=True):
                torch.get_device_module(device).set_rng_state(state, device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context like the first run's; the random state afterwards is that of before."""
        before = self._random_state()
        with ExitStack() as stack:
            stack.callback(self._set_random_state, before)
            self._set_random_state(self.random)
            for kind, (dtype, enabled) in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled, self.cache))
            stack.enter_context(sdpa_kernel(self.attention))
            stack.enter_context(_inside(self.modes))
            yield


@contextmanager
def _inside(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    """A context within the function modes, of which those that are active already are not entered again."""
    present = _get_current_function_mode_stack()
    with ExitStack() as stack:
        for mode in modes:
            if not any(mode is other for other in present):
                stack.enter_context(mode)
        yield


# -- modules -----------------------------------------------------------------------------------------------------------


def checkpoint_module(module: M, enabled: bool = True) -> M:
    """``module``, changed in place so that calling it checkpoints its forward.

    Its hooks run outside of the checkpoint. Names, parameters and ``state_dict`` stay as they are; copies and pickles
    of it checkpoint as well. A model of ``transformers`` that can checkpoint its layers does so with
    :func:`checkpoint`, in training mode only: that is what its own ``gradient_checkpointing_enable`` does with
    ``torch.utils.checkpoint``.

    Args:
        module: Any module.
        enabled: Whether to checkpoint; False undoes it.
    """
    if getattr(module, "supports_gradient_checkpointing", False):
        set_layers: Any = module._set_gradient_checkpointing
        set_layers(enable=enabled, gradient_checkpointing_func=checkpoint)
        return module
    forward = vars(module).get("forward")
    if isinstance(forward, partial) and forward.func is _forward:
        if not enabled:
            vars(module)["forward"] = forward.args[1]
            if forward.args[1] is None:
                del vars(module)["forward"]
    elif enabled:
        vars(module)["forward"] = partial(_forward, module, forward)
    return module


def _forward(module: nn.Module, forward: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """Checkpointed, what the module's forward was: its class's, unless it had one of its own."""
    return checkpoint(forward or partial(type(module).forward, module), *args, **kwargs)
