"""The head of every program: data, and steps that are taken by the sharded model and by plain PyTorch and compared.

`printing.text` copies this file into each program, from the first import on.
"""

import copy
import io
import pickle
import sys
import warnings

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import zerofunc

warnings.simplefilter("ignore")
zerofunc.init_distributed()
RANK, RANKS = dist.get_rank(), range(dist.get_world_size())
seen = []  # (step, verdict, what was found)


class Stop(Exception):  # noqa: N818
    """The two sides are no longer in the same state."""


def data(step, rank, dtype=None):
    """Three samples of one rank in one step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64).to(dtype or torch.get_default_dtype())


def attempt(function):
    try:
        return function()
    except zerofunc.DivergenceError:
        raise
    except Exception as error:
        return error


def difference(found, expected, tolerance, with_types):
    """What differs first between two trees of tensors; nothing where they are equal."""
    ours, theirs = (dict(pytree.tree_leaves_with_path(tree, is_leaf=lambda t: t is None)) for tree in (found, expected))
    for path in [*theirs, *(path for path in ours if path not in theirs)]:
        a, b = ours.get(path), theirs.get(path)
        if a is None or b is None:
            if a is not b:
                return f"{pytree.keystr(path)}: {a}, expected {b}"
        elif a.shape != b.shape or (with_types and a.dtype != b.dtype):
            return f"{pytree.keystr(path)}: {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}"
        else:
            a, b = a.detach().double(), b.detach().double()
            bound = tolerance * (1 + b.nan_to_num().abs().max().item()) if b.numel() else 0
            wrong = ~torch.isclose(a, b, rtol=0, atol=bound, equal_nan=True)
            if wrong.any():
                return f"{pytree.keystr(path)}: {a[wrong][:4].tolist()}, expected {b[wrong][:4].tolist()}"
    return ""


def both(step, ours, theirs, tolerance, changes=False, with_types=True):
    """The verdict on one step; ends the program where one side alone has taken a step that `changes` its state."""
    with sdpa_kernel(SDPBackend.MATH):  # whose derivatives PyTorch has
        expected = attempt(theirs)
    found = attempt(ours)
    text = f"{type(found).__name__}: {found}"
    if isinstance(found, Exception):
        is_alike = isinstance(expected, Exception) and ("on purpose" in str(found)) == ("on purpose" in str(expected))
        verdict = "raise" if is_alike else "error"
        text += f" / {type(expected).__name__}: {expected}" if is_alike else ""
    elif isinstance(expected, Exception):
        verdict, text = "alone", f"plain PyTorch: {type(expected).__name__}: {expected}"
    else:
        text = difference(found, expected, tolerance, with_types)
        verdict = "different" if text else "equal"
    seen.append((step, verdict, text[:1500]))
    if verdict == "error" or (verdict == "alone" and changes):
        raise Stop
    return verdict


def mean(loss, model):
    """What all ranks together minimise."""
    return torch.stack([loss(model, rank) for rank in RANKS]).mean()


def values(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


def cosines(tree):
    """A direction for each tensor of a tree."""
    return {name: tensor.detach().cos() for name, tensor in tree.items()}


def dot(a, b):
    """An inner product of full trees; of sharded trees this rank's part of it."""
    return sum((a[name] * b[name]).sum() for name in a)


class Norm(nn.LayerNorm):
    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred * (centred.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight + self.bias


class WeightNorm(nn.Module):
    def forward(self, g, v):
        return v * (g / v.square().sum(1, keepdim=True).sqrt())


class WeightNormHook(sys.modules["torch.nn.utils.weight_norm"].WeightNorm):
    def compute_weight(self, module):
        return WeightNorm.forward(self, module.weight_g, module.weight_v)


def elementary(module):
    """The same module for plain PyTorch, of operators whose derivatives PyTorch has right."""
    for inner in module.modules():
        if isinstance(inner, nn.LayerNorm):
            inner.__class__ = Norm
        if type(inner).__name__ == "_WeightNorm":
            inner.__class__ = WeightNorm
        for hook in inner._forward_pre_hooks.values():
            if type(hook).__name__ == "WeightNorm":
                hook.__class__ = WeightNormHook
    return module


def functional_call(module, parameters, args):
    """torch.func's, which leaves its parameters in a module that is registered twice: they are put back."""
    held = [(inner._parameters, dict(inner._parameters)) for inner in module.modules()]
    try:
        return torch.func.functional_call(module, parameters, args)
    finally:
        for parameters_of_inner, own in held:
            parameters_of_inner.update(own)


def over_shards(function, loss, module, direction):
    """`function` of this rank's loss, the shards and a direction, as full tensors."""
    call = lambda s: lambda *args: zerofunc.functional_call(module, s, args)  # noqa: E731
    tree = function(lambda s: loss(call(s), RANK), zerofunc.shards(module), direction)
    return zerofunc.unshard(module, tree)


def over_parameters(function, loss, model, direction):
    """The same of the mean loss and the full parameters."""
    call = lambda p: lambda *args: functional_call(model, p, args)  # noqa: E731
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return function(lambda p: torch.stack([loss(call(p), rank) for rank in RANKS]).mean(), trained, direction)


def fail(*args):
    raise RuntimeError("on purpose")


def fail_backward(module, args, out):
    if out.requires_grad:
        out.register_hook(fail)


def interrupted(block, hook, function):
    """Runs `function` while a block fails, in its forward or in its backward."""
    handle = block.register_forward_hook(hook)
    try:
        function()
    finally:
        handle.remove()


def saved(state):
    """A state that was written and read."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return {name: value.clone() for name, value in torch.load(file).items()}


def write(parameters, how):
    with torch.no_grad():
        for p in parameters:
            how(p)


def under(context, function):
    with context:
        return function()


def pick(module, index):
    """One of its parameters."""
    parameters = [*module.parameters()]
    return parameters[index % len(parameters)]


def build(optimizer, parameters, number, **options):
    """Optimizers that have every so manieth of the trainable parameters each."""
    trained = [p for p in parameters.values() if p.requires_grad]
    return [optimizer(trained[i::number], **options) for i in range(number) if trained[i::number]]


def step(optimizers, clipped=None):
    if clipped is not None:
        nn.utils.clip_grad_norm_(clipped.parameters(), 0.5)
    for optimizer in optimizers:
        optimizer.step()


def twice(loss, backward):
    backward(loss, retain_graph=True)
    backward(loss)
