"""The examples in docs/from_deepspeed.md run, one after the other."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

PAGE = Path(__file__).parent.parent / "docs" / "from_deepspeed.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.world_size(2)
def test_the_examples_run_and_train():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    before = net[2].weight.detach().clone()
    names = {"net": net, "dataset": TensorDataset(torch.randn(32, 4), torch.randn(32, 4))}
    assert len(BLOCKS) == 4
    for block in BLOCKS:
        exec(block, names)
    assert names["engine"].global_steps == 3
    assert names["gradient"].shape == names["momentum"].shape == names["master"].shape == (4,)
    assert not torch.equal(before, net[2].weight.detach().clone())
    assert torch.count_nonzero(net[0].bias.detach().clone()) == 0
