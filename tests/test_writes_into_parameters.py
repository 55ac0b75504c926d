"""What is written into parameters between a backward and a step counts, and so does the step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofunc
from reference import STAGES, Net, build, data


def loss_of(module, rank):
    x = data(0, rank)
    dtype = next(module.parameters()).dtype
    return (module(x.to(dtype)).double() - x[:, :3].sin()).square().mean()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@STAGES
@pytest.mark.world_size(2)
def test_a_write_between_backward_and_step_counts(stage, dtype):
    """As weight decay by hand: the masters take it, rounded as the parameters are, and are stepped from there."""
    module = build(Net).float()
    zerofunc.shard(module, stage, page_bytes=160, param_dtype=dtype)
    loss_of(module, dist.get_rank()).backward()
    gradients = {name: gradient.clone() for name, gradient in zerofunc.full_gradients(module).items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.75)
    written = {name: parameter.detach().clone().float() for name, parameter in module.named_parameters()}
    torch.optim.SGD(zerofunc.shards(module).values(), lr=1.0).step()
    masters = zerofunc.unshard(module, {name: shard.detach() for name, shard in zerofunc.shards(module).items()})
    for name, master in masters.items():
        torch.testing.assert_close(master, written[name] - gradients[name], msg=name)
        torch.testing.assert_close(module.get_parameter(name).detach() * 1, master.to(dtype or torch.float32))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@STAGES
@pytest.mark.world_size(1, 2)
def test_an_embedding_that_renormalises_its_rows_is_refused_on_several_ranks(stage, kind):
    module = nn.Sequential(kind(5, 3, max_norm=1.0))
    if dist.get_world_size() == 1:
        zerofunc.shard(module, stage)
    else:
        with pytest.raises(ValueError, match=r"0, a Embedding.* has max_norm.*Leave max_norm out"):
            zerofunc.shard(module, stage)
