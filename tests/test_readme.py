"""The examples in the README run."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_examples():
    assert len(BLOCKS) == 2


@pytest.mark.world_size(2)
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_runs_and_trains(number):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    x = torch.randn(5, 4)
    names = {"net": model, "model": model, "batches": [(x, x)] * 2, "x": x, "loss_fn": lambda y: y.square().mean()}
    exec("import torch, zerofunc\n" + BLOCKS[number], names)  # the reader's own program
    import zerofunc

    after = zerofunc.unshard(model, zerofunc.shards(model))
    assert all(not torch.equal(old, new) for old, new in zip(before, after.values(), strict=True))
