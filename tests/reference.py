"""Small models, and training in one process that sharded training is compared with. All in float64."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofunc

EVERY_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def stages(*fast):
    """Every stage, those that are not named in the slow suite alone.

    Stages 1 and 2 have the parameters of stage 0 and differ in reductions and in what an optimizer sees; what asks
    about these has :data:`EVERY_STAGE`.
    """
    slow = pytest.mark.slow
    return pytest.mark.parametrize("stage", [s if s in fast else pytest.param(s, marks=slow) for s in range(4)])


STAGES = stages(0, 3)
ADAMW = {"lr": 0.05, "weight_decay": 0.1}
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


class Net(nn.Module):
    """Three layers on several pages; the sizes leave padding on 2 and on 4 ranks."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)

    def encode(self, x):
        return torch.tanh(self.middle(torch.tanh(self.first(x))))

    def forward(self, x):
        return self.head(self.encode(x))


class Branches(nn.Module):
    """Two experts, of which one is used, or none."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.experts = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x, expert):
        h = torch.tanh(self.stem(x))
        return self.head(h if expert is None else torch.tanh(self.experts[expert](h)))


class Language(nn.Module):
    """A model of the next token whose output weight is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embedding(tokens).cumsum(1))))


def build(make, seed=0):
    """The model as every rank and the reference begin with it."""
    torch.manual_seed(seed)
    return make().double()


def data(step, rank, *shape):
    """Input of one rank in one step, the same wherever it is drawn."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape or (4, 4), generator=generator, dtype=torch.float64)


def fit(model, step, rank):
    """A loss of one rank that every parameter of a `Net` takes part in."""
    x = data(step, rank)
    return (model(x) - x[:, :3].sin()).square().mean()


def config(stage, **more):
    """Small pages, and at stage 3 one of them resident at a time."""
    ours = {"page_bytes": 160, "resident_bytes": 0, "timeout_s": 20, **more.pop("zerofunc", {})}
    optimizer = {"type": "AdamW", "params": ADAMW}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage},
        "zerofunc": ours,
        **more,
    }


def engine_of(model, stage, **more):
    """The engine alone, from `config(stage, **more)`."""
    return zerofunc.initialize(model, config(stage, **more))[0]


def adamw(model):
    """The optimizer of `config`, in one process."""
    return torch.optim.AdamW(model.parameters(), **ADAMW)


def mean_over_ranks(loss, model, step):
    """What all ranks together minimise."""
    return torch.stack([loss(model, step, rank) for rank in range(dist.get_world_size())]).mean()


def step_reference(model, optimizer, loss, step):
    """One step in one process, on the data of all ranks."""
    optimizer.zero_grad()
    mean_over_ranks(loss, model, step).backward()
    optimizer.step()


def train_both(make, loss, stage, steps=3, **more):
    """An engine and its reference after some steps, compared after each."""
    engine, model = engine_of(build(make), stage, **more), build(make)
    optimizer = adamw(model)
    for step in range(steps):
        engine.backward(loss(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, loss, step)
        assert_same(engine, model)
    return engine, model


def values(module):
    """Plain copies of all parameters, gathered where they are sharded."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_same(engine, model, rtol=1e-9, atol=1e-11):
    """The engine's parameters are those of the reference."""
    found = values(getattr(engine, "module", engine))
    torch.testing.assert_close(found, values(model), rtol=rtol, atol=atol)


def assert_same_gradients(module, model, rtol=1e-9, atol=1e-11):
    """The mean gradients over all ranks are those of the reference; None where it has None."""
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = zerofunc.full_gradients(module)
    assert [name for name in found if found[name] is None] == [n for n in expected if expected[n] is None]
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=rtol, atol=atol)
