"""Which kernel a sharded module's operators use: PyTorch's fused one, or one that has the derivative asked for.

Where first-order reverse mode is all there is, nothing changes. Where a forward-mode level, or reverse mode in reverse
mode, is active when a submodule is called, the operators of :mod:`zerofunc.kernels.composites` stand in for those
whose derivatives PyTorch gets wrong or lacks, until that submodule returns.
"""

from __future__ import annotations

import builtins
import functools
import re
import sys
import threading
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._C._functorch import CGradInterpreterPtr, TransformType, get_interpreter_stack, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn.utils.parametrizations import _WeightNorm
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from zerofunc.kernels import dispatched
from zerofunc.kernels.composites import COMPOSITES, PAST_FORWARD_MODE, PLAIN_LAYERS, WITHOUT_VMAP


def _is_beyond_first_order() -> bool:
    """Whether more than one reverse derivative may be taken of what runs now."""
    if forward_ad._current_level >= 0:
        return True
    grads = [level for level in get_interpreter_stack() or () if level.key() == TransformType.Grad]
    if len(grads) == 1:  # does autograd record the gradient itself?
        return bool(CGradInterpreterPtr(grads[0]).prevGradMode())
    return len(grads) > 1


def _is_past_forward_mode() -> bool:
    """Whether a derivative may be taken of the tangents of what runs now."""
    stack = get_interpreter_stack() or ()
    grads = [level for level in stack if level.key() == TransformType.Grad]
    jvps = [level for level in stack if level.key() == TransformType.Jvp]
    recorded = CGradInterpreterPtr(grads[0]).prevGradMode() if grads else torch.is_grad_enabled()
    if not jvps:  # dual numbers by hand, inside or outside of the reverse levels
        return forward_ad._current_level >= 0 and (recorded or bool(grads))
    return recorded or len(jvps) > 1 or (bool(grads) and grads[0].level() < jvps[0].level())


def _is_transformed() -> bool:
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


class CompositeKernels(TorchFunctionMode):
    """Inside, operators with a faulty derivative are composed of elementary ones where that derivative may be taken.

    It asks at every such operator, since transforms begin and end inside a module.

    Args:
        always: Compose them whatever is active.
    """

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always = always

    def _selects(self, func: Any) -> bool:
        if self.always or (func in WITHOUT_VMAP and _is_transformed()):
            return True
        return _is_past_forward_mode() if func in PAST_FORWARD_MODE else _is_beyond_first_order()

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The composite of ``func``, or ``func``; PyTorch has left the mode meanwhile."""
        kwargs = kwargs or {}
        if func in COMPOSITES and self._selects(func):
            result = COMPOSITES[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        elif isinstance(func, types.FunctionType) and func.__globals__ is vars(F):
            with self:
                return _without_override(func)(*args, **kwargs)
        return func(*args, **kwargs)


def _never(*args: Any) -> bool:
    return False


class _LiveGlobals(dict[str, Any]):
    """The names of ``torch.nn.functional`` as they are now: a program may have put functions of its own there."""

    def __missing__(self, name: str) -> Any:
        if name in vars(F):
            return vars(F)[name]
        return vars(builtins)[name]


_GLOBALS = _LiveGlobals({name: _never for name in vars(F) if name.startswith("has_torch_function")})


@functools.cache
def _without_override(func: types.FunctionType) -> types.FunctionType:
    """A function of ``torch.nn.functional`` that a mode sees into, instead of as one call."""
    twin = types.FunctionType(func.__code__, _GLOBALS, func.__name__, func.__defaults__, func.__closure__)
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


def second_order() -> CompositeKernels:
    """A context in which plain forwards, too, use kernels whose gradient can be differentiated again.

    Local. ``torch.autograd.grad(loss, x, create_graph=True)`` after the forward cannot be seen when the forward
    runs; inside this context fused attention and the like are composed of operators that have a second derivative::

        with zerofunc.second_order():
            (gradient,) = torch.autograd.grad(engine(x).sum(), x, create_graph=True)
        engine.backward(gradient.square().mean())
    """
    return CompositeKernels(always=True)


# -- at every submodule -----------------------------------------------------------------------------------------------


class _Entered(threading.local):
    """The modules that run under a transform, innermost last, and the mode that each has entered, if any."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, CompositeKernels | None]] = []


_entered = _Entered()


def select_kernels(module: nn.Module, second_order: bool = False) -> None:
    """Local. Make ``module`` and its submodules choose kernels by what is differentiated when they are called.

    A module that has met no transform pays for one hook that asks. A module whose own code says ``create_graph`` always
    composes them, as forces in a potential want. Copies and pickles keep the hooks.

    Args:
        module: Any module.
        second_order: Compose operators in plain forwards too; see :func:`second_order`.
    """
    for name, submodule in module.named_modules():
        is_plain = type(submodule) in PLAIN_LAYERS and submodule is not module
        if is_plain or isinstance(submodule, torch.jit.ScriptModule):
            continue
        words = _words_of(type(submodule))  # type: ignore[arg-type]
        # weight_norm is silently wrong in any second derivative, so that nobody would think of the option.
        always = second_order or "create_graph" in words or isinstance(submodule, _WeightNorm)
        enter = functools.partial(_enter, name=name, always=always, differentiates=bool(words & _TRANSFORMS))
        submodule.register_forward_pre_hook(enter, prepend=True)
    dispatched.install()


_TRANSFORMS = {"grad", "grad_and_value", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "linearize", "make_dual"}


@functools.cache
def _words_of(kind: type[nn.Module]) -> frozenset[str]:
    """The names and keywords in the methods of a user's class.

    A module whose code names a transform may begin one around operators of its own, which no call of a submodule shows.
    """
    bases = [base for base in kind.__mro__ if not base.__module__.startswith("torch.")]
    methods = [m for base in bases for m in vars(base).values() if isinstance(m, types.FunctionType)]
    return frozenset(word for method in methods for word in _words(method.__code__))


def _words(code: types.CodeType) -> set[str]:
    words = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            words |= _words(constant)
        elif isinstance(constant, tuple):  # names of keyword arguments
            words |= {word for word in constant if isinstance(word, str)}
    return words


def _enter(module: nn.Module, args: Any, *, name: str, always: bool, differentiates: bool) -> None:
    if torch.compiler.is_compiling():
        return
    stack, always = _entered.stack, always or _is_composed(module)
    if not (stack or always or differentiates or _is_transformed()):
        return
    if "_zerofunc_leaves" not in module.__dict__:  # not before it is needed: it would double the cost of plain calls
        module.__dict__["_zerofunc_leaves"] = True
        module.register_forward_hook(functools.partial(_leave, name=name), always_call=True)
    is_inside = any(mode is not None and mode.always >= always for _, mode in stack)
    stack.append((module, None if is_inside else CompositeKernels(always).__enter__()))


def _is_composed(module: nn.Module) -> bool:
    """Whether a module runs inside :func:`second_order`, or is recomputed in a backward after it last did.

    A recomputation, as ``torch.utils.checkpoint`` makes it, must save what the forward has saved.
    """
    if torch._C._current_graph_task_id() != -1:
        return module.__dict__.get("_zerofunc_composed", False)
    modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    is_composed = any(isinstance(mode, CompositeKernels) and mode.always for mode in modes)
    if is_composed or "_zerofunc_composed" in module.__dict__:
        module.__dict__["_zerofunc_composed"] = is_composed
    return is_composed


def _leave(module: nn.Module, args: Any, output: Any, *, name: str) -> None:
    if torch.compiler.is_compiling():
        return
    stack = _entered.stack
    if any(entered is module for entered, _ in stack):
        while True:  # once, unless a KeyboardInterrupt has skipped the hooks of modules inside
            entered, mode = stack.pop()
            if mode is not None:
                mode.__exit__(None, None, None)
            if entered is module:
                break
    error = sys.exc_info()[1]
    if output is None and isinstance(error, RuntimeError):  # PyTorch calls it in its except clause
        _name_module(error, module, name)


# -- errors that say what to do ---------------------------------------------------------------------------------------

_REFUSED_WRITE = re.compile(
    r"attempted to call in-place operation|inplace arithmetic|Batch norm got a batched tensor|"
    r"output with shape .* doesn't match the broadcast shape"  # a sample written to a number that all samples share
)
_NO_DERIVATIVE = re.compile(r"derivative for \S+ is not implemented")


def _name_module(error: RuntimeError, module: nn.Module, name: str) -> None:
    """Add to the error of a refused in-place update which module made it, once."""
    text = str(error)
    if not _REFUSED_WRITE.search(text) or "Two ways out" in text:
        return
    error.args = (
        f"module {name!r} ({type(module).__name__}) updates a buffer in place, which torch.func does not allow. "
        "Two ways out: put it into evaluation mode (.eval()), in which it only reads its buffers; or, before the model "
        "is sharded, replace it by one that has none: torch.func.replace_all_batch_norm_modules_(model), "
        f"track_running_stats=False, or GroupNorm. PyTorch said: {text}",
    )


def explain_second_order(error: BaseException) -> None:
    """Add to the error of a missing second derivative what to do about it."""
    if _NO_DERIVATIVE.search(str(error)):
        error.args = (
            f"{error}. A loss contains a gradient from autograd.grad(create_graph=True), and the forward used a fused "
            "kernel, as nothing then announced a second derivative. Run the forward inside "
            '`with zerofunc.second_order():`, or set {"zerofunc": {"second_order": true}} in the config, or '
            "shard(…, second_order=True). docs/operators.md lists the operators that this covers.",
        )
