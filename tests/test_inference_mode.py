"""Transforms begun in inference mode differentiate through recomputation as they do outside of it."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap

import zerofunc
from reference import Net, build, data, stages


def through_checkpoint(module):
    return lambda x: zerofunc.checkpoint(module, x).sin().sum()


def through_attention(module):
    def f(x):
        h = module.first(x)[None, None]
        return zerofunc.attention(h, h, h).sin().sum()

    return f


def by_hand(module):
    def f(x):
        h = module.first(x)[None, None]
        return F.scaled_dot_product_attention(h, h, h).sin().sum()

    return f


PAIRS = {
    "checkpoint": (through_checkpoint, lambda module: lambda x: module(x).sin().sum()),
    "attention": (through_attention, by_hand),
}
TRANSFORMS = {
    "grad": lambda f, x: grad(f)(x),
    "jvp of grad": lambda f, x: jvp(grad(f), (x,), (x.cos(),))[1],
    "grad of grad": lambda f, x: grad(lambda a: grad(f)(a).square().sum())(x),
    "vmap of grad": lambda f, x: vmap(grad(lambda a: f(a[None])))(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("what", PAIRS)
@stages(3)
@pytest.mark.world_size(2)
def test_transforms_in_inference_mode(stage, what, transform):
    module, plain = zerofunc.shard(build(Net), stage, page_bytes=160, resident_bytes=0, timeout_s=20), build(Net)
    recomputed, direct = PAIRS[what]
    with zerofunc.second_order():
        expected = TRANSFORMS[transform](direct(plain), data(0, 0))
    with torch.inference_mode():
        found = TRANSFORMS[transform](recomputed(module), data(0, 0))
    torch.testing.assert_close(found.clone(), expected)
