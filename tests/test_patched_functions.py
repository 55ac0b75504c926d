"""A function that a program puts into `torch.nn.functional` is used under transforms as it is outside of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jvp

import zerofunc
from reference import STAGES


@STAGES
@pytest.mark.world_size(2)
def test_a_patched_function_is_called_under_transforms(stage, monkeypatch):
    original = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: 3 * original(*args, **kwargs))
    torch.manual_seed(0)
    module = zerofunc.shard(nn.MultiheadAttention(4, 2, batch_first=True).double(), stage, page_bytes=64)
    x, v = torch.randn(2, 3, 4).double(), torch.randn(2, 3, 4).double()

    def f(a):
        return module(a, a, a, need_weights=False)[0]

    value, tangent = jvp(f, (x,), (v,))
    torch.testing.assert_close(value, f(x))
    step = 1e-6
    torch.testing.assert_close(tangent, (f(x + step * v) - f(x - step * v)) / (2 * step), rtol=1e-6, atol=1e-8)
    second = grad(lambda a: grad(lambda b: f(b).sum())(a).square().sum())(x)
    assert second.abs().max() > 0
