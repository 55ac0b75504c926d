"""Ranks that use different parameters: every program ends, with the values of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofunc
from programs import draw, run
from reference import SGD, STAGES, assert_same, build, data, engine_of, mean_over_ranks
from zerofunc.module.sharding import sharding_of


def run_number(number):
    program = draw(number, dist.get_world_size())
    try:
        run(program)
    except Exception as error:
        raise AssertionError(f"program {number}: {program}") from error


@pytest.mark.world_size(2)
@pytest.mark.parametrize("number", range(10))
def test_programs_whose_ranks_differ_equal_one_process(number):
    run_number(number)


@pytest.mark.slow
@pytest.mark.world_size(2, 3, timeout_s=300)
@pytest.mark.parametrize("first", range(100, 400, 20))
def test_many_programs_whose_ranks_differ_equal_one_process(first):
    for number in range(first, first + 20):
        run_number(number)


# ---- one backward inside another --------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """Of three layers, the middle one is used inside a backward's own backward and outside."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.middle(checkpoint(self.middle, self.first(x), use_reentrant=True)))


def recomputed_loss(model, step, rank):
    return model(data(step, rank)).square().sum()


@pytest.mark.world_size(2)
@STAGES
@pytest.mark.parametrize("may_be_unused", [pytest.param(True, marks=pytest.mark.slow), False])
def test_an_inner_backward_is_part_of_the_outer_one(stage, may_be_unused):
    zero = {"stage": stage, "ignore_unused_parameters": may_be_unused}
    more = {"gradient_accumulation_steps": 2, "optimizer": SGD, "zero_optimization": zero}
    engine, model = engine_of(build(Recomputed), stage, zerofunc={"page_bytes": 64}, **more), build(Recomputed)
    optimizer = torch.optim.SGD(model.parameters(), **SGD["params"])
    for step in range(0, 4, 2):
        for micro in (step, step + 1):
            engine.backward(recomputed_loss(engine, micro, dist.get_rank()))
            engine.step()
        losses = [mean_over_ranks(recomputed_loss, model, micro) for micro in (step, step + 1)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        assert_same(engine, model)


# ---- memory -----------------------------------------------------------------------------------------------------


class Gained(nn.Module):
    """A layer and its gain, which a rank may leave out: one page."""

    def __init__(self):
        super().__init__()
        self.layer, self.gain = nn.Linear(64, 64, bias=False), nn.Parameter(torch.ones(64))

    def forward(self, x, is_used):
        return torch.tanh(self.layer(x)) * self.gain if is_used else torch.tanh(self.layer(x))


USES = {
    "all ranks use everything": lambda rank, number: True,
    "one rank alone uses one": lambda rank, number: rank == 0 and number == 7,
    "ranks use different ones": lambda rank, number: (number + rank) % 2 == 0,
    "ranks use different runs": lambda rank, number: (number // 3 + rank) % 2 == 0,
    "no rank uses any": lambda rank, number: False,
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("uses", USES)
def test_few_pages_of_gradient_are_alive_whatever_ranks_use(stage, uses):
    page_bytes = 8 * 64 * 65
    net = build(lambda: nn.ModuleList(Gained() for _ in range(12)))
    zerofunc.shard(net, stage, page_bytes=page_bytes, resident_bytes=2 * page_bytes, timeout_s=20)
    for step in range(2):
        sharding_of(net).reducer.pool.peak_bytes = 0  # what no rank ever uses is known after a backward
        x = data(step, dist.get_rank(), 4, 64).requires_grad_()
        for number, block in enumerate(net):
            x = block(x, USES[uses](dist.get_rank(), number))
        x.square().mean().backward()
        for shard in zerofunc.shards(net).values():
            shard.grad = None
    pages = zerofunc.usage(net).gradient_peak_bytes / page_bytes
    assert pages <= 12 / 2 + 4  # the shards of all, and few in full; of the twelve that there are
