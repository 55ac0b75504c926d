"""`torch.utils.checkpoint` recomputes with the kernels that the forward used."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofunc
from reference import assert_same_gradients, data, stages


def build():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(4, 4), block, nn.LayerNorm(4), nn.Tanh()).double()


def checkpointed(module, x):
    return checkpoint(module, x, use_reentrant=False)


def penalty(run, module, x, is_first_order):
    with zerofunc.second_order():
        y = run(module, x)
        if is_first_order:
            return y.square().mean()
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return gradient.square().mean()


@pytest.mark.parametrize("is_first_order", [False, True])
@stages(3)
@pytest.mark.world_size(1, 2)
def test_a_checkpoint_inside_second_order(stage, is_first_order):
    module, plain = zerofunc.shard(build(), stage, page_bytes=160, resident_bytes=0, timeout_s=20), build()
    for net, run in ((module, checkpointed), (plain, nn.Module.__call__)):
        penalty(run, net, data(0, 0, 2, 3, 4).requires_grad_(), is_first_order).backward()
    assert_same_gradients(module, plain)
    for net in (module, plain):  # and a plain forward afterwards
        checkpointed(net, data(1, 0, 2, 3, 4).requires_grad_()).sum().backward()
    assert_same_gradients(module, plain)
