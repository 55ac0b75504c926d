"""Third derivatives in reverse mode through LayerNorm, by transforms and by autograd, with nothing announced."""

import pytest
import torch
from torch import nn
from torch.func import grad, jvp, vmap

import zerofunc
from reference import stages


class Elementary(nn.LayerNorm):
    """LayerNorm of operators whose derivatives PyTorch has right."""

    def forward(self, x):
        dims = tuple(range(-len(self.normalized_shape), 0))
        centered = x - x.mean(dims, keepdim=True)
        normed = centered * (centered.square().mean(dims, keepdim=True) + self.eps).rsqrt()
        return normed if self.weight is None else normed * self.weight + self.bias


def build(kind, shape=(4,), **options):
    torch.manual_seed(0)
    norm = kind(shape, **options).double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return nn.Sequential(nn.Linear(4, 4).double(), norm, nn.Tanh(), nn.Linear(4, 1).double())


def first(m):
    return grad(lambda a: m(a).sum())


def second(m):
    return grad(lambda a: first(m)(a).square().sum())


def recorded(m, x):
    a = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(m(a).sum(), a, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), a, create_graph=True)
    return h.square().sum()


LOSSES = {
    "grad, backward": lambda m, x: first(m)(x).square().sum(),
    "grad of grad, backward": lambda m, x: second(m)(x).square().sum(),
    "jvp of grad, backward": lambda m, x: jvp(first(m), (x,), (x.cos(),))[1].square().sum(),
    "autograd.grad twice, backward": recorded,
    "vmap of grad of grad, backward": lambda m, x: vmap(lambda a: second(m)(a[None]))(x).square().sum(),
}
NORMS = {"one dimension": {}, "without parameters": {"elementwise_affine": False}, "two": {"shape": (3, 4)}}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", LOSSES)
@stages(3)
@pytest.mark.world_size(2)
def test_third_derivatives_through_layer_norm(stage, name, norm):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if norm == "two" and name.startswith("vmap"):
        x = x[None]  # so that a sample is what is normalised
    plain, module = build(Elementary, **NORMS[norm]), build(nn.LayerNorm, **NORMS[norm])
    zerofunc.shard(module, stage, page_bytes=160, resident_bytes=0, timeout_s=20)
    expected, found = LOSSES[name](plain, x), LOSSES[name](module, x)
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    gradients = zerofunc.full_gradients(module)
    for parameter_name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[parameter_name], parameter.grad, msg=parameter_name)


@pytest.mark.world_size(1)
def test_the_first_derivative_is_pytorchs_own_kernel():
    module = build(nn.LayerNorm)
    x = torch.randn(3, 4, dtype=torch.float64)
    module(x).sum().backward()
    before = [parameter.grad.clone() for parameter in module.parameters()]
    zerofunc.shard(module, 0)
    module.zero_grad()
    for shard in zerofunc.shards(module).values():
        shard.grad = None
    module(x).sum().backward()
    for shard, gradient in zip(zerofunc.shards(module).values(), before, strict=True):
        assert torch.equal(shard.grad, gradient.reshape(-1))
