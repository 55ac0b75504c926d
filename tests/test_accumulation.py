"""Gradient accumulation: however micro-batches are counted and reduced, a step is that of one large batch."""

import pytest
import torch
from torch import distributed as dist
from torch import nn

import zerofunc
from reference import (
    EVERY_STAGE,
    Branches,
    Net,
    adamw,
    assert_same,
    assert_same_gradients,
    build,
    data,
    engine_of,
    fit,
    mean_over_ranks,
    step_reference,
)


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_eight_micro_batches_of_one_equal_one_of_eight(stage):
    many = engine_of(build(Net), stage, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=8)
    one = engine_of(build(Net), stage, train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=1)
    assert many.train_batch_size() == one.train_batch_size() == 8 * dist.get_world_size()

    def loss(model, step, rank):
        return model(data(step, rank, 8, 4)).exp().mean()

    model = build(Net)
    optimizer = adamw(model)
    for step in range(2):
        for sample in data(step, dist.get_rank(), 8, 4).split(1):
            assert many.is_gradient_accumulation_boundary() == (many.micro_steps % 8 == 7)
            many.backward(many(sample).exp().mean())
            many.step()
        one.backward(loss(one, step, dist.get_rank()))
        one.step()
        step_reference(model, optimizer, loss, step)
        assert_same(many, model)
        assert_same(one, model)
    assert many.global_steps == one.global_steps == 2
    assert many.global_samples == one.global_samples


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_the_boundary_of_accumulation_may_be_set_by_hand(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        engine.set_gradient_accumulation_boundary(False)
        for micro in range(3 * step, 3 * step + 3):
            assert not engine.is_gradient_accumulation_boundary()
            engine.backward(fit(engine, micro, dist.get_rank()))
            engine.step() if micro % 3 < 2 else engine.set_gradient_accumulation_boundary(True)
            mean_over_ranks(fit, model, micro).backward()
        engine.step()
        optimizer.step()
        assert_same(engine, model)
    assert (engine.global_steps, engine.micro_steps) == (2, 6)


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_gradients_are_forgotten_on_request(stage):
    engine, model = engine_of(build(Net), stage, gradient_accumulation_steps=2), build(Net)
    engine.backward(fit(engine, 5, dist.get_rank()))
    engine.zero_grad()
    engine.step()
    engine.backward(fit(engine, 0, dist.get_rank()), scale_wrt_gas=False)
    mean_over_ranks(fit, model, 0).backward()
    assert_same_gradients(engine.module, model)
    engine.zero_grad(set_to_none=False)
    assert all(gradient.count_nonzero() == 0 for gradient in zerofunc.full_gradients(engine.module).values())


# ---- reductions held back -------------------------------------------------------------------------------------------


def reference_step(model, optimizer, micros):
    """One step in one process on the mean over micro-batches."""
    optimizer.zero_grad()
    for micro in micros:
        (mean_over_ranks(fit, model, micro) / len(micros)).backward()
    optimizer.step()


def reduced_bytes(engine, body):
    """What this rank sends while ``body`` runs, pages gathered for forwards and backwards left out."""
    with zerofunc.gathered(engine.module):
        before = engine.usage().moved_bytes
        body()
        return engine.usage().moved_bytes - before


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.world_size(1, 2)
def test_backwards_in_no_sync_stay_on_the_rank_and_count(stage):
    engine, model = engine_of(build(Net), stage, gradient_accumulation_steps=2), build(Net)
    optimizer = adamw(model)
    engine.set_gradient_accumulation_boundary(True)
    for step in range(2):

        def inside(step=step):
            with engine.no_sync():
                engine.backward(fit(engine, 2 * step, dist.get_rank()))

        assert reduced_bytes(engine, inside) == 0
        engine.backward(fit(engine, 2 * step + 1, dist.get_rank()))
        engine.step()
        reference_step(model, optimizer, [2 * step, 2 * step + 1])
        assert_same(engine, model)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.world_size(1)
def test_no_sync_is_refused_where_gradients_are_split(stage):
    engine = engine_of(build(Net), stage)
    with pytest.raises(RuntimeError, match=f"ZeRO stage {stage}; use coalesce_grad_reduction"), engine.no_sync():
        pass


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_coalesced_backwards_are_reduced_once(stage):
    engine, model = engine_of(build(Net), stage, gradient_accumulation_steps=3), build(Net)
    each = engine_of(build(Net), stage, gradient_accumulation_steps=3)
    optimizer, micros = adamw(model), range(3)

    def coalesced():
        with engine.coalesce_grad_reduction():
            for micro in micros:
                engine.backward(fit(engine, micro, dist.get_rank()))
                assert all(shard.grad is None for shard in zerofunc.shards(engine.module).values())

    def one():
        each.backward(fit(each, 0, dist.get_rank()))

    each.set_gradient_accumulation_boundary(True)
    assert reduced_bytes(engine, coalesced) == reduced_bytes(each, one)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    reference_step(model, optimizer, list(micros))
    assert_same(engine, model)


@EVERY_STAGE
@pytest.mark.world_size(2)
def test_coalesced_backwards_may_reach_other_parameters_on_other_ranks(stage):
    more = {"zerofunc": {"unsplit": ["experts"]}}
    engine, model = engine_of(build(Branches), stage, **more), build(Branches)

    def loss(model, step, rank):
        return model(data(step, rank), (step + rank) % 2 if step else None).square().mean()

    with engine.coalesce_grad_reduction():
        for step in range(2):
            engine.backward(loss(engine, step, dist.get_rank()))
    for step in range(2):
        mean_over_ranks(loss, model, step).backward()
    assert_same_gradients(engine.module, model)


@pytest.mark.parametrize("context", ["no_sync", "coalesce_grad_reduction"])
@pytest.mark.world_size(1)
def test_a_step_or_another_context_inside_is_refused(context):
    engine = engine_of(build(Net), 1)
    with getattr(engine, context)():
        with pytest.raises(RuntimeError, match=rf"illegal to call Engine.step\(\) inside {context}"):
            engine.step()
        with pytest.raises(RuntimeError, match=f"inside {context}"), engine.no_sync():
            pass
    assert engine.micro_steps == 0


@EVERY_STAGE
@pytest.mark.world_size(2)
def test_an_error_in_a_coalesced_backward_leaves_nothing_behind(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    with pytest.raises(ZeroDivisionError), engine.coalesce_grad_reduction():
        engine.backward(fit(engine, 3, dist.get_rank()))
        raise ZeroDivisionError
    engine.zero_grad()
    engine.backward(fit(engine, 0, dist.get_rank()))
    mean_over_ranks(fit, model, 0).backward()
    assert_same_gradients(engine.module, model)


# ---- who counts -----------------------------------------------------------------------------------------------------


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_the_user_may_count_micro_batches(stage):
    more = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 2}
    engine, model = engine_of(build(Net), stage, **more), build(Net)
    optimizer = adamw(model)
    for step in range(2):
        for micro in (2 * step, 2 * step + 1):
            assert not engine.is_gradient_accumulation_boundary()
            engine.backward(fit(engine, micro, dist.get_rank()))
        engine.step()
        reference_step(model, optimizer, [2 * step, 2 * step + 1])
        assert_same(engine, model)
    assert engine.global_steps == 2
    assert engine.global_samples == 4 * 4 * dist.get_world_size()
    for refused in (
        lambda: engine.set_gradient_accumulation_boundary(True),
        engine.coalesce_grad_reduction().__enter__,
    ):
        with pytest.raises(RuntimeError, match="managed_gradient_accumulation"):
            refused()


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_a_whole_batch_is_trained_and_evaluated_by_one_call(stage):
    engine, model = engine_of(build(Net), stage, gradient_accumulation_steps=2), build(Net)
    optimizer, rank = adamw(model), dist.get_rank()

    def loss_fn(engine, batch):
        return (engine(batch) - batch[:, :3].sin()).square().mean()

    batches = iter([data(step, rank) for step in range(8)])
    for step in range(2):
        found = engine.train_batch(batches, loss_fn)
        micros = [2 * step, 2 * step + 1]
        torch.testing.assert_close(found, torch.stack([mean_over_ranks(fit, model, m) for m in micros]).mean().detach())
        reference_step(model, optimizer, micros)
        assert_same(engine, model)
    found = engine.eval_batch(batches, loss_fn)
    expected = torch.stack([mean_over_ranks(fit, model, micro) for micro in (4, 5)]).mean()
    torch.testing.assert_close(found, expected.detach())
    assert engine.training
    assert (engine.global_steps, engine.micro_steps) == (2, 4)


@pytest.mark.world_size(1)
def test_a_batch_is_what_the_module_takes():
    class WithLoss(Net):
        def forward(self, x, y=0.0):
            loss = (super().forward(x) - y).square().mean()
            return {"tensor": loss, "tuple": (loss, x), "object": Output(loss), "none": {}}[self.returns]

    class Output:
        def __init__(self, loss):
            self.loss = loss

    x, y = data(0, 0), data(1, 0)[:, :3]
    plain = build(WithLoss)
    engine = engine_of(build(WithLoss), 0)
    for returns, batch in (("tensor", x), ("tuple", [x, y]), ("object", {"x": x, "y": y})):
        engine.module.returns = plain.returns = "tensor"
        expected = (
            plain(**batch) if isinstance(batch, dict) else plain(*batch) if isinstance(batch, list) else plain(batch)
        )
        engine.module.returns = returns
        torch.testing.assert_close(engine.eval_batch(iter([batch])), expected.detach())
    engine.module.returns = "none"
    with pytest.raises(ValueError, match="returned dict, which holds no loss; give loss_fn"):
        engine.train_batch(iter([x]))
    with pytest.raises(ValueError, match="no training_data"):
        engine.train_batch()


@pytest.mark.world_size(1, 2)
def test_batch_sizes_may_change_between_steps():
    ranks = dist.get_world_size()
    engine, model = engine_of(build(Net), 2), build(Net)
    optimizer = adamw(model)
    engine.set_train_batch_size(3 * 4 * ranks)
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (3, 12 * ranks)
    for micro in range(3):
        engine.backward(fit(engine, micro, dist.get_rank()))
        engine.step()
    reference_step(model, optimizer, [0, 1, 2])
    assert_same(engine, model)
    engine.set_train_batch_size(2 * 4 * ranks)
    for micro in range(3, 5):  # counted from the step, not from the beginning
        engine.backward(fit(engine, micro, dist.get_rank()))
        engine.step()
    reference_step(model, optimizer, [3, 4])
    assert_same(engine, model)
    engine.set_train_batch_size(3 * 4 * ranks)
    engine.set_train_micro_batch_size(2)
    assert (engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()) == (2, 6 * ranks)
    with pytest.raises(ValueError, match=f"expected a multiple of micro-batch x ranks = {2 * ranks}"):
        engine.set_train_batch_size(2 * ranks + 1)


# ---- what a reduction does ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.world_size(1, 2)
def test_gradients_may_be_added_up_over_ranks(stage):
    engine, model = engine_of(build(Net), stage, gradient_allreduce_op="sum"), build(Net)
    engine.backward(fit(engine, 0, dist.get_rank()))
    (mean_over_ranks(fit, model, 0) * dist.get_world_size()).backward()
    assert_same_gradients(engine.module, model)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.world_size(1, 2)
def test_an_unused_parameter_is_an_error_where_that_is_asked_for(stage):
    class PartlyUnused(Net):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(2, 2)

    engine = engine_of(
        build(PartlyUnused), stage, zero_optimization={"stage": stage, "ignore_unused_parameters": False}
    )
    with pytest.raises(RuntimeError, match="no gradient on any rank: unused.weight, unused.bias"):
        engine.backward(fit(engine, 0, dist.get_rank()))
    engine.module.unused.requires_grad_(False)
    engine.backward(fit(engine, 0, dist.get_rank()))
