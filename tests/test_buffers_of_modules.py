"""Buffers: each rank's own, or the first rank's at the start of every training forward, as DDP has them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reference import STAGES, assert_same, data, engine_of

SGD = {"type": "SGD", "params": {"lr": 0.1}}


class Codebook(nn.Module):
    """Normalised features, and a moving average of them as a buffer that the loss uses."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=0.5), nn.Linear(5, 3)
        self.register_buffer("code", torch.zeros(5))

    def forward(self, x):
        h = self.norm(self.first(x))
        y = self.head(h + self.code)
        if self.training:
            self.code = self.code.lerp(h.detach().mean(0) + x.mean(), 0.3)
        return y


def build():
    torch.manual_seed(dist.get_rank())
    return Codebook().double()


def run(model, backward, step):
    found = []
    for number in range(3):
        loss = model(data(number, dist.get_rank(), 6, 4)).square().mean()
        found.append(loss.detach())
        backward(loss)
        step()
    return torch.stack(found)


@pytest.mark.parametrize("broadcasts", [False, True])
@STAGES
@pytest.mark.world_size(2)
def test_buffers_are_those_of_ddp(stage, broadcasts):
    engine = engine_of(build(), stage, optimizer=SGD, zerofunc={"broadcast_buffers": broadcasts})
    plain = DistributedDataParallel(build(), broadcast_buffers=broadcasts)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    expected = run(plain, torch.Tensor.backward, step)
    torch.testing.assert_close(run(engine, engine.backward, engine.step), expected)
    assert_same(engine, plain.module)
    for (name, mine), theirs in zip(engine.module.named_buffers(), plain.module.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


@STAGES
@pytest.mark.world_size(2)
def test_evaluation_leaves_buffers_alone_and_training_sends_them_again(stage):
    engine = engine_of(build(), stage, optimizer=SGD, zerofunc={"broadcast_buffers": True})
    engine(data(0, dist.get_rank(), 6, 4))
    own = engine.code.clone()
    engine.eval()
    engine(data(1, dist.get_rank(), 6, 4))
    assert torch.equal(engine.code, own)
    engine.train()
    engine(data(1, 0, 6, 4))
    codes = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(codes, engine.code)
    assert torch.equal(*codes)
