"""Parameter space over parameters of no dimension, of one element and of none, and over modules registered twice."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import grad, jacrev, jvp, vmap

import zerofunc
from reference import data, stages


class Odd(nn.Module):
    """A factor that depends on nothing else that is trained: its gradient has no tangent elsewhere."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.scale = nn.Parameter(torch.randn(4, 3).double()), nn.Parameter(torch.tensor(1.3).double())
        self.one, self.none = nn.Parameter(torch.randn(1).double()), nn.Parameter(torch.empty(0, 4).double())

    def forward(self, x):
        return torch.tanh(x) @ self.weight.detach() * self.scale * self.one.exp() + (x @ self.none.T).sum()


TRANSFORMS = {
    "grad": lambda f, p, v: grad(f)(p),
    "jvp": lambda f, p, v: {"": jvp(f, (p,), (v,))[1]},
    "jvp of grad": lambda f, p, v: jvp(grad(f), (p,), (v,))[1],
    "grad of grad": lambda f, p, v: grad(lambda q: sum((grad(f)(q)[n] * v[n]).sum() for n in v))(p),
    "vmap of jvp of grad": lambda f, p, v: vmap(lambda w: jvp(grad(f), (p,), (w,))[1])(
        {n: torch.stack([t, 2 * t]) for n, t in v.items()}
    ),
    "jacrev": lambda f, p, v: jacrev(f)(p),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@stages(3)
@pytest.mark.world_size(2)
def test_transforms_over_odd_parameters_equal_one_process(stage, name):
    module, plain = Odd(), Odd()
    zerofunc.shard(module, stage, page_bytes=16, resident_bytes=0, timeout_s=20)
    full = {n: p.detach() for n, p in plain.named_parameters()}
    direction = {n: torch.full_like(p, 0.5) for n, p in full.items()}

    inputs = [data(0, rank, 2, 4) for rank in range(2)]

    def mean_loss(parameters):
        losses = [torch.func.functional_call(plain, parameters, (x,)).square().sum() for x in inputs]
        return sum(losses) / 2

    def loss(shards):
        return zerofunc.functional_call(module, shards, (inputs[dist.get_rank()],)).square().sum()

    expected = TRANSFORMS[name](mean_loss, full, direction)
    found = TRANSFORMS[name](loss, zerofunc.shards(module), zerofunc.reshard(module, direction))
    if name == "jvp":
        torch.testing.assert_close(zerofunc.mean(found[""], module), expected[""])
    else:
        if name.startswith("vmap"):
            found, expected = ({n: t[1] for n, t in tree.items()} for tree in (found, expected))
        torch.testing.assert_close(zerofunc.unshard(module, found), dict(expected))


@stages(3)
@pytest.mark.world_size(2)
def test_overrides_of_a_module_registered_twice_do_not_stay(stage):
    torch.manual_seed(0)
    inner = nn.Linear(3, 3).double()
    module = zerofunc.shard(nn.Sequential(inner, nn.Tanh(), inner), stage)
    x = data(0, 0, 2, 3)
    before = module(x).detach()
    tripled = {name: 3 * part for name, part in zerofunc.shards(module).items()}
    assert not torch.allclose(zerofunc.functional_call(module, tripled, (x,)), before)
    torch.testing.assert_close(module(x).detach(), before)
    module(x).sum().backward()
    torch.optim.SGD(zerofunc.shards(module).values(), lr=0.1).step()
