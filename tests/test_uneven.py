"""Ranks with different numbers of batches: the result is that of the data there is, and nothing waits for ever."""

import pytest
import torch
from torch import distributed as dist
from torch.func import jvp

import zerofunc
from reference import STAGES, Net, adamw, assert_same, build, data, engine_of
from zerofunc import DivergenceError


def batches_of(rank):
    """The first rank has two batches more than the second, and the third one fewer."""
    return [data(step, rank) for step in range(5 - 2 * (rank % 2) - (rank == 2))]


def ordinary(model, x):
    return (model(x) - x[:, :3].sin()).square().mean()


def meanflow(model, x):
    value, tangent = jvp(model, (x,), (torch.ones_like(x),))
    return (value - tangent.detach() - x[:, :3].sin()).square().mean()


@pytest.mark.parametrize("over_all", [False, True])
@pytest.mark.parametrize("loss", [ordinary, meanflow])
@STAGES
@pytest.mark.world_size(2)
def test_training_uses_the_data_there_is(stage, loss, over_all):
    engine, model = engine_of(build(Net), stage), build(Net)
    optimizer, ranks = adamw(model), range(dist.get_world_size())
    steps = 0
    for batch in zerofunc.join(engine, batches_of(dist.get_rank()), over_all):
        engine.backward(loss(engine, batch))
        engine.step()
        optimizer.zero_grad()
        losses = [loss(model, batches_of(rank)[steps]) for rank in ranks if steps < len(batches_of(rank))]
        (sum(losses) / (len(ranks) if over_all else len(losses))).backward()
        optimizer.step()
        assert_same(engine, model)
        steps += 1
    assert steps == 5


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(4)
def test_four_ranks_end_one_after_the_other(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    optimizer = adamw(model)
    for step, batch in enumerate(zerofunc.join(engine, batches_of(dist.get_rank()))):
        engine.backward(ordinary(engine, batch))
        engine.step()
        optimizer.zero_grad()
        losses = [ordinary(model, batches_of(rank)[step]) for rank in range(4) if step < len(batches_of(rank))]
        torch.stack(losses).mean().backward()
        optimizer.step()
    assert_same(engine, model)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_a_rank_may_run_out_between_the_micro_steps_of_a_step(stage):
    engine, model = engine_of(build(Net), stage, gradient_accumulation_steps=2), build(Net)
    optimizer, batches = adamw(model), [batches_of(rank)[:4] for rank in range(2)]
    joined = iter(zerofunc.join(engine, batches[dist.get_rank()]))
    for step in range(2):
        engine.train_batch(joined, ordinary)
        optimizer.zero_grad()
        for micro in (2 * step, 2 * step + 1):
            losses = [ordinary(model, of_rank[micro]) for of_rank in batches if micro < len(of_rank)]
            (torch.stack(losses).mean() / 2).backward()
        optimizer.step()
        assert_same(engine, model)
    with pytest.raises(StopIteration):
        engine.train_batch(joined, ordinary)


@pytest.mark.world_size(2)
def test_one_loop_may_train_two_engines():
    first, second = engine_of(build(Net), 3), engine_of(build(Net, seed=1), 2)
    for batch in zerofunc.join([first, second], batches_of(dist.get_rank())):
        for engine in (first, second):
            engine.zero_grad()
            engine.backward(ordinary(engine, batch))
    for engine, plain in ((first, build(Net)), (second, build(Net, seed=1))):
        ordinary(plain, batches_of(0)[-1]).backward()  # the second rank has run out
        expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
        torch.testing.assert_close(zerofunc.full_gradients(engine.module), expected)
    with pytest.raises(ValueError, match="modules is empty"):
        zerofunc.join([], [])


@STAGES
@pytest.mark.world_size(2)
def test_evaluation_counts_each_batch_once(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    joined = zerofunc.join(engine, batches_of(dist.get_rank()))
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch in joined:
            loss = ordinary(engine, batch)
            if joined.has_data:
                sums += torch.stack([loss, torch.ones_like(loss)])
        dist.all_reduce(sums)
        expected = [ordinary(model, batch) for rank in range(2) for batch in batches_of(rank)]
    torch.testing.assert_close(sums[0] / sums[1], torch.stack(expected).mean())


@pytest.mark.world_size(2)
def test_an_infinite_gradient_of_a_repeated_batch_counts_nothing():
    engine = engine_of(build(Net), 2)
    joined = zerofunc.join(engine, batches_of(dist.get_rank()))
    for batch in joined:
        factor = 1.0 if joined.has_data else float("inf")
        engine.backward(ordinary(engine, batch) * factor)
        assert all(g.isfinite().all() for g in zerofunc.full_gradients(engine.module).values())
        engine.step()


@pytest.mark.world_size(2)
def test_a_rank_without_any_batch_is_an_error_on_every_rank():
    engine = engine_of(build(Net), 3)
    with pytest.raises(ValueError, match="1 of 2 ranks have no batch at all"):
        for batch in zerofunc.join(engine, [] if dist.get_rank() else batches_of(0)):
            engine.backward(ordinary(engine, batch))
    assert list(zerofunc.join(engine, [])) == []


@pytest.mark.world_size(2)
def test_leaving_the_loop_early_leaves_no_weight_behind():
    engine, model = engine_of(build(Net), 1), build(Net)
    for step, _ in enumerate(zerofunc.join(engine, batches_of(dist.get_rank()))):
        if step == 4:
            break
    engine.backward(ordinary(engine, data(0, dist.get_rank())))
    torch.stack([ordinary(model, data(0, rank)) for rank in range(2)]).mean().backward()
    found = zerofunc.full_gradients(engine.module)
    torch.testing.assert_close(found, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_an_uneven_loop_without_it_ends_with_its_name(stage):
    engine = engine_of(build(Net), stage, zerofunc={"timeout_s": 3})
    with pytest.raises(DivergenceError, match=r"zerofunc\.join\(engine, loader\)"):
        for batch in batches_of(dist.get_rank()):
            engine.backward(ordinary(engine, batch))
            engine.step()
        zerofunc.mean(torch.ones(()), engine.module)
