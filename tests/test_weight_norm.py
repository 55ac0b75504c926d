"""Weight normalization under derivatives of third order, and of a single dimension."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp

import zerofunc
from reference import data
from zerofunc.kernels.normalizations import weight_norm


class Written(nn.Module):
    """The same parametrization, of operators whose derivatives PyTorch has."""

    def forward(self, g, v):
        return v * (g / v.square().sum(1, keepdim=True).sqrt())


def build():
    torch.manual_seed(0)
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 3).double())


def third(module, named):
    """The gradient of a Hessian product's entries."""
    loss = lambda p: functional_call(module, p, (data(0, 0),)).square().mean()  # noqa: E731
    cosines = lambda p: {name: tensor.detach().cos() for name, tensor in p.items()}  # noqa: E731
    product = lambda p: jvp(grad(loss), (p,), (cosines(p),))[1]  # noqa: E731
    return grad(lambda p: sum((t * c).sum() for t, c in zip(product(p).values(), cosines(p).values(), strict=True)))(
        named
    )


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_through_a_hessian_product_reaches_normalized_weights(stage):
    module, plain = zerofunc.shard(build(), stage), build()
    plain.parametrizations.weight[0].__class__ = Written
    found, expected = (third(m, dict(m.named_parameters())) for m in (module, plain))
    torch.testing.assert_close(found, {name: t.detach() for name, t in expected.items()}, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("shape", [(3,), (3, 4)])
def test_the_composite_is_the_operator(shape, dim):
    torch.manual_seed(0)
    v = torch.randn(shape, dtype=torch.float64)
    if dim >= v.ndim:
        pytest.skip("there is no such dimension")
    g = torch.rand(torch.norm_except_dim(v, 2, dim).shape, dtype=torch.float64)
    torch.testing.assert_close(weight_norm(v, g, dim), torch._weight_norm(v, g, dim))
