"""Training without an engine goes on from a saved optimizer at another stage, and says where it cannot."""

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofunc
from reference import STAGES, Net, assert_same, build, fit, mean_over_ranks
from zerofunc.optimizers.sharded import shard_optimizer

SMALL = {"page_bytes": 160, "resident_bytes": 0, "timeout_s": 20}
KINDS = {
    "adamw": lambda module: torch.optim.AdamW(zerofunc.shards(module).values(), lr=0.05),
    "momentum": lambda module: torch.optim.SGD(zerofunc.shards(module).values(), lr=0.1, momentum=0.9),
    "adafactor": lambda module: shard_optimizer(torch.optim.Adafactor(module.parameters(), lr=0.05)),
}
PLAIN = {
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=0.05),
    "momentum": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
    "adafactor": lambda module: torch.optim.Adafactor(module.parameters(), lr=0.05),
}


def train(module, optimizer, steps):
    for step in steps:
        fit(module, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
@STAGES
@pytest.mark.world_size(1, 2)
def test_training_goes_on_at_another_stage(stage, kind):
    module = zerofunc.shard(build(Net), stage, **SMALL)
    optimizer = KINDS[kind](module)
    train(module, optimizer, range(2))
    saved = io.BytesIO()
    torch.save((dict(module.state_dict()), zerofunc.optimizer_state(module, optimizer)), saved)
    saved.seek(0)
    weights, state = torch.load(saved)

    again = zerofunc.shard(build(Net, seed=1), 3 - stage, **SMALL)
    other = KINDS[kind](again)
    again.load_state_dict(weights)
    zerofunc.load_optimizer_state(again, other, state)
    train(again, other, range(2, 4))

    plain = build(Net)
    reference = PLAIN[kind](plain)
    for step in range(4):
        reference.zero_grad()
        mean_over_ranks(fit, plain, step).backward()
        reference.step()
    assert_same(again, plain)


@pytest.mark.world_size(2)
def test_state_of_shards_of_other_sizes_is_refused_before_the_step():
    whole, split = (zerofunc.shard(build(Net), stage, **SMALL) for stage in (0, 1))
    first, second = KINDS["adamw"](whole), KINDS["adamw"](split)
    train(whole, first, range(1))
    second.load_state_dict(first.state_dict())
    before = [parameter.detach().clone() for parameter in split.parameters()]
    with pytest.raises(ValueError, match=r"state 'exp_avg' of 'first\.weight' has 24 elements.*load_optimizer_state"):
        train(split, second, range(1))
    for parameter, value in zip(split.parameters(), before, strict=True):
        assert torch.equal(parameter.detach(), value)


@pytest.mark.world_size(1)
def test_state_of_another_model_is_refused():
    module, other = zerofunc.shard(build(Net), 3), zerofunc.shard(nn.Sequential(nn.Linear(2, 2)), 3)
    state = zerofunc.optimizer_state(module, KINDS["adamw"](module))
    with pytest.raises(ValueError, match=r"groups are of 0\.weight, 0\.bias; the state that was saved is of first"):
        zerofunc.load_optimizer_state(other, KINDS["adamw"](other), state)
    with pytest.raises(ValueError, match="is no shard of the module"):
        zerofunc.optimizer_state(module, KINDS["adamw"](other))
