"""Ranks that register parameters inside Init in different orders, as iteration over a set does."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofunc
from reference import STAGES, assert_same


class Filled(nn.Module):
    """Parts that are registered in some order, and filled afterwards in the order of their names."""

    def __init__(self, order, fill=True):
        super().__init__()
        for name in order:
            self.register_parameter(name, nn.Parameter(torch.full((3, 4), float(len(name)), dtype=torch.float64)))
        if fill:
            for name in ("a", "bb"):
                nn.init.normal_(self.get_parameter(name))

    def forward(self, x):
        return x @ (self.a + self.bb + self.ccc).T


@pytest.mark.parametrize("fill", [True, False])
@STAGES
@pytest.mark.world_size(2)
def test_the_order_of_registration_does_not_matter(stage, fill):
    names = ["a", "bb", "ccc"]
    torch.manual_seed(0)
    plain = Filled(names, fill)
    torch.manual_seed(0)
    with zerofunc.Init():
        module = Filled(names if dist.get_rank() == 0 else names[::-1], fill)
    module._parameters = {name: module._parameters[name] for name in names}
    zerofunc.shard(module, stage, page_bytes=64)
    assert_same(module, plain)


@STAGES
@pytest.mark.world_size(2)
def test_values_that_differ_between_ranks_are_refused_on_all(stage):
    with zerofunc.Init():
        module = nn.Linear(2, 2)
        module.weight = nn.Parameter(torch.full((2, 2), float(dist.get_rank())))
    with pytest.raises(zerofunc.DivergenceError, match="have built weight inside zerofunc.Init with different values"):
        zerofunc.shard(module, stage, timeout_s=10)
