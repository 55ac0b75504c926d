"""How the zoo's models compute: in float64 throughout, and with PyTorch's kernels or with elementary operations.

PyTorch's own kernels lack derivatives (fused attention has no forward mode and no second derivative, weight norm no
forward mode, GroupNorm none of a transposed input) or get them wrong (LayerNorm, for a backward through a jvp). A
model of elementary operations has them all.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from zerofunc import second_order


def softmax(x, dim=-1, *unused, dtype=None, **also_unused):
    # Softmax's own derivative has no backward through a tangent of forward_ad.
    exponentials = torch.exp(x - x.amax(dim, keepdim=True).detach())
    return exponentials / exponentials.sum(dim, keepdim=True)


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    dims = tuple(range(-len(normalized_shape), 0))
    centred = x - x.mean(dims, keepdim=True)
    normal = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    return normal * (1 if weight is None else weight) + (0 if bias is None else bias)


def group_norm(x, num_groups, weight=None, bias=None, eps=1e-5):
    groups = x.reshape(len(x), num_groups, -1)
    normal = layer_norm(groups, groups.shape[-1:], eps=eps).reshape(x.shape)
    channels = (-1, *[1] * (x.dim() - 2))
    return normal * (1 if weight is None else weight.view(channels)) + (0 if bias is None else bias.view(channels))


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    repeats = query.shape[-3] // key.shape[-3] if enable_gqa else 1
    key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return softmax(scores) @ value


def weight_norm(v, g, dim=0):
    return v * (g / torch.norm_except_dim(v, 2, dim))


ELEMENTARY = {
    F.layer_norm: layer_norm,
    F.group_norm: group_norm,
    F.scaled_dot_product_attention: attention,
    F.softmax: softmax,
    torch.softmax: softmax,
    torch.Tensor.softmax: softmax,
    torch._weight_norm: weight_norm,
}


class InFloat64(TorchFunctionMode):
    """Turns every cast to float32 into one to float64, and the functions of ``instead`` into others.

    Many models compute norms, softmax and rotary positions in float32 whatever they are given; finite differences of
    those are too coarse to compare with.
    """

    def __init__(self, instead):
        super().__init__()
        self.instead = {torch.Tensor.float: torch.Tensor.double, **instead}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = tuple(_double(value) for value in args)
        return self.instead.get(func, func)(*args, **{name: _double(value) for name, value in (kwargs or {}).items()})


def _double(value):
    return torch.float64 if value is torch.float32 else value


class Called(nn.Module):
    """A model in evaluation mode that is called in its own way, as a module from one tensor to one tensor.

    All parameters are moved by noise: no gate is zero, no norm's weight one, no output tiny.

    Args:
        model: The model.
        call: What is computed: (model, input) to output. A function of a module, since models are copied.

    Attributes:
        elementary: Whether with elementary operations instead of PyTorch's kernels.
        second_order: Whether plain forwards are differentiated twice, and need kernels that can be.
    """

    def __init__(self, model, call):
        super().__init__()
        self.model, self.call, self.elementary, self.second_order = model.eval(), call, False, False
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))

    def forward(self, x):
        kernels = second_order() if self.second_order else contextlib.nullcontext()
        with InFloat64(ELEMENTARY if self.elementary else {}), kernels:
            return self.call(self.model, x)
