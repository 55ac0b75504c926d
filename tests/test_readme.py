"""The examples in the README and in the docs run."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

ROOT = Path(__file__).parent.parent


def blocks(file):
    return re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(encoding="utf-8"), flags=re.DOTALL)


PAGES = ["README.md", "docs/derivatives.md", "docs/from_deepspeed.md", "docs/checkpoints.md"]
README, DERIVATIVES, DEEPSPEED, CHECKPOINTS = map(blocks, PAGES)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def test_there_are_examples():
    assert len(README) == 2
    assert len(DERIVATIVES) > 5


@pytest.mark.world_size(2)
@pytest.mark.parametrize("number", range(len(README)))
def test_an_example_runs_and_trains(number):
    model = network()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    x = torch.randn(5, 4)
    names = {"net": model, "model": model, "batches": [(x, x)] * 2, "x": x, "loss_fn": lambda y: y.square().mean()}
    exec("import torch, zerofunc\n" + README[number], names)  # the reader's own program
    import zerofunc

    after = zerofunc.unshard(model, zerofunc.shards(model))
    assert all(not torch.equal(old, new) for old, new in zip(before, after.values(), strict=True))


@pytest.mark.world_size(2)
def test_the_examples_of_the_derivatives_page_run_one_after_the_other():
    names = {"net": network(), "batch": (torch.randn(5, 4), torch.randn(5, 4))}
    for block in DERIVATIVES:
        exec(block, names)
    assert names["norms"].shape == (5,)
    assert names["slope"].shape == (5, 4)
    plain = network()
    y = torch.func.functional_call(plain, {n: p.detach() for n, p in plain.named_parameters()}, (names["x"],))
    torch.testing.assert_close(names["output"], y)


@pytest.mark.world_size(2)
def test_the_example_for_users_of_deepspeed_trains():
    net = network()
    before = net[2].weight.detach().clone()
    names = {"net": net, "batches": [(torch.randn(4, 4), torch.randn(4, 4))] * 2}
    assert len(DEEPSPEED) == 1
    exec(DEEPSPEED[0], names)
    assert names["engine"].global_steps == 2
    assert not torch.equal(before, net[2].weight.detach().clone())


@pytest.mark.world_size(2)
def test_the_examples_of_the_checkpoints_page_save_and_go_on(tmp_path):
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
    }

    def run():
        names = {"net": network(), "config": config, "dataset": TensorDataset(torch.randn(20, 4))}
        names["loss_fn"] = lambda engine, batch: engine(batch[0]).square().mean()
        exec("import zerofunc\n" + CHECKPOINTS[0], names)
        return names

    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        first, again = run(), run()
        assert (first["folder"], first["client_state"]) == (None, {})
        assert (again["folder"], again["client_state"]) == ("run/global_step6", {"note": "any plain data"})
        torch.testing.assert_close(again["engine"].module_state_dict(), first["engine"].module_state_dict())
        exec(CHECKPOINTS[1], again)
        torch.distributed.barrier()
        assert sorted(os.listdir("run")) == [".lock", "global_step2", "global_step4", "global_step6", "latest"]
        assert os.listdir("weights") == os.listdir("weights_16") == ["model.safetensors"]
        assert len(again["state"]) == (4 if torch.distributed.get_rank() == 0 else 0)
    finally:
        os.chdir(before)
