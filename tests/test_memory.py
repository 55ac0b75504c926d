"""Memory and traffic are what ZeRO says, in training and under transforms."""

import pytest
import torch
from torch import nn
from torch.func import grad, hessian, jvp, vmap

import zerofunc

WIDTH, LAYERS = 16, 6
PAGE = WIDTH * WIDTH * 4 + WIDTH * 4  # one layer, in bytes
PSI = LAYERS * (WIDTH * WIDTH + WIDTH)


def engine_at(stage, **ours):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "zerofunc": {"page_bytes": PAGE, "resident_bytes": 2 * PAGE, **ours},
    }
    return zerofunc.initialize(model, config)[0]


def train(engine, steps):
    for _ in range(steps):
        engine.backward(engine(torch.randn(2, WIDTH)).square().mean())
        engine.step()


@pytest.mark.world_size(1, 2)
@pytest.mark.parametrize(("stage", "full", "split"), [(0, 16, 0), (1, 4, 12), (2, 4, 8 + 4), (3, 0, 16)])
def test_a_rank_holds_what_zero_says(stage, full, split, world_size):
    """Bytes per parameter with a gradient alive. A shard at stages 1 and 2 lies in the full parameters, not beside."""
    engine = engine_at(stage)
    train(engine, 2)
    engine.backward(engine(torch.randn(2, WIDTH)).square().mean())
    expected = PSI * (full + split / world_size)
    counters = 2 * LAYERS * 4  # Adam's step, a scalar for each of weight and bias
    assert engine.usage().held_bytes == expected + counters


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_moves_what_zero_says(stage, world_size):
    engine = engine_at(stage)
    train(engine, 3)
    before = engine.usage().moved_bytes
    train(engine, 1)
    moved = engine.usage().moved_bytes - before
    share = 4 * PSI * (world_size - 1) / world_size
    if stage < 3:
        assert moved == 2 * share
    else:
        assert 2 * share < moved <= 3 * share


TRANSFORMS = {
    "forward": lambda f, x: f(x),
    "grad": lambda f, x: grad(lambda a: f(a).sum())(x),
    "hessian": lambda f, x: hessian(lambda a: f(a).sum())(x),
    "jvp": lambda f, x: jvp(f, (x,), (x,)),
    "vmap(grad)": lambda f, x: vmap(grad(lambda a: f(a).sum()))(x),
    "grad(grad)": lambda f, x: grad(lambda b: grad(lambda a: f(a).square().sum())(b).square().sum())(x),
    "training": lambda f, x: f(x).square().mean().backward(),
    "training on a gradient": lambda f, x: grad(lambda a: f(a).sum())(x).square().sum().backward(),
    "training on a jvp": lambda f, x: jvp(f, (x,), (x,))[1].square().sum().backward(),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("budget", [0, 2])
def test_gathered_pages_stay_within_the_budget_under_transforms(name, budget):
    """And one page more, which the operator that is running reads."""
    engine = engine_at(3, resident_bytes=budget * PAGE)
    TRANSFORMS[name](engine, torch.randn(2, WIDTH))
    usage = engine.usage()
    assert 0 < usage.gathered_peak_bytes <= (max(budget, 1) + 1) * PAGE
    assert usage.gathered_bytes <= max(budget, 1) * PAGE
    assert usage.gradient_peak_bytes <= PSI * 4 / 2 + 4 * PAGE


@pytest.mark.world_size(2)
def test_what_is_dropped_is_used_again():
    engine = engine_at(3)
    train(engine, 3)
    before = engine.usage().buffer_bytes
    train(engine, 5)
    assert engine.usage().buffer_bytes == before


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kept", [3, LAYERS])
def test_small_pages_stay_gathered_up_to_a_limit(kept):
    """Transforms over given shards, whose pages are as small, leave nothing behind."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    options = {"page_bytes": PAGE, "resident_bytes": 0, "persistence_bytes": PAGE, "prefetch": False}
    zerofunc.shard(model, 3, **options, persistence_limit_bytes=kept * PAGE)
    x = torch.randn(2, WIDTH)
    halves = {name: part.detach() / 2 for name, part in zerofunc.shards(model).items()}
    grad(lambda shards: zerofunc.functional_call(model, shards, (x,)).square().mean())(halves)
    model(x)
    assert zerofunc.usage(model).gathered_bytes == min(kept + 1, LAYERS) * PAGE  # and the last one read
