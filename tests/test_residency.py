"""Stage 3 within tight budgets: what stays resident counts, and the page being read is never evicted."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofunc
from reference import assert_same_gradients, build, data, mean_over_ranks

LAYER_BYTES, BIAS_BYTES = 8 * 8 * 8, 8 * 8


def make():
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


def loss(model, step, rank):
    return model(data(step, rank, 2, 8)).square().sum()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("held", ["persistent", "pinned"])
def test_a_page_gathered_ahead_leaves_room_for_what_stays(held):
    budget = 2 * LAYER_BYTES + BIAS_BYTES  # two weights alone, or one beside four biases
    persistence = BIAS_BYTES if held == "persistent" else 0
    net, plain = build(make), build(make)
    zerofunc.shard(net, 3, page_bytes=4, resident_bytes=budget, persistence_bytes=persistence, timeout_s=8)
    for step in range(5):
        pinned = [layer.bias for layer in net] if held == "pinned" else []
        with zerofunc.gathered(pinned) if pinned else contextlib.nullcontext():
            loss(net, step, dist.get_rank()).backward()
        mean_over_ranks(loss, plain, step).backward()
        assert_same_gradients(net, plain)
    assert zerofunc.usage(net).gathered_peak_bytes <= budget + LAYER_BYTES  # an operator still reads the one before
    torch.testing.assert_close(net[0].weight.detach().clone(), plain[0].weight.detach())
