"""What an engine counts and skips: steps that update and steps that do not, beside plain PyTorch."""

import gc
import weakref

import pytest
import torch
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

import zerofunc
from reference import (
    ADAMW,
    SGD,
    STAGES,
    Net,
    adamw,
    assert_same,
    build,
    config,
    data,
    engine_of,
    fit,
    mean_over_ranks,
    values,
)
from zerofunc.compat import deepspeed


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_step_is_applied_at_the_boundary_alone(stage):
    engine = engine_of(build(Net), stage, gradient_accumulation_steps=4)
    applied = []
    for micro in range(8):
        engine.backward(fit(engine, micro, dist.get_rank()))
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [False, False, False, True] * 2


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_an_optimizer_shows_the_overflow_of_the_last_update(stage):
    given = config(
        stage, gradient_accumulation_steps=2, fp16={"enabled": True, "initial_scale_power": 8}, optimizer=SGD
    )
    engine, optimizer, *_ = deepspeed.initialize(model=build(Net).float(), config=given)
    seen = []
    for micro in range(6):
        factor = 1e9 if micro == 1 and dist.get_rank() == 1 else 1.0
        engine.backward((engine(data(micro, dist.get_rank()).half()).float() * factor).sum())
        engine.step()
        seen.append((optimizer.overflow, engine.was_step_applied()))
    none, skipped, between, updated = (False, False), (True, False), (True, False), (False, True)
    assert seen == [none, skipped, between, updated, none, updated]
    assert engine.skipped_steps == 1


# ---- gradients that are forgotten, or fail --------------------------------------------------------------------------


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_step_without_a_backward_counts_and_changes_nothing(stage):
    engine, model = engine_of(build(Net), stage, gradient_clipping=1.0), build(Net)
    engine.step()
    assert_same(engine, model, rtol=0, atol=0)
    assert (engine.global_steps, engine.skipped_steps, engine.get_global_grad_norm()) == (1, 0, 0.0)


@STAGES
@pytest.mark.world_size(1, 2)
def test_backwards_of_a_micro_step_add_up(stage):
    engine, model = engine_of(build(Net), stage, gradient_accumulation_steps=2), build(Net)
    optimizer = adamw(model)
    for step in range(2):
        for micro in range(3):
            engine.backward(fit(engine, 3 * step + micro, dist.get_rank()))
            (mean_over_ranks(fit, model, 3 * step + micro) / 2).backward()
        engine.step()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        assert_same(engine, model)


class Failing(torch.autograd.Function):
    """The identity, with a backward that raises."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("planned")


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_backward_that_fails_leaves_the_micro_steps_before_it(stage):
    engine, model = engine_of(build(Net), stage, gradient_accumulation_steps=2), build(Net)
    optimizer = adamw(model)

    def failing(x):
        return engine.module.head(torch.tanh(engine.module.middle(Failing.apply(engine.module.first(x))))).sum()

    for step in range(2):
        for micro in (2 * step, 2 * step + 1):
            if micro % 2 == 1 - step:  # at the boundary, then before it
                with pytest.raises(ZeroDivisionError, match="planned"):
                    engine.backward(failing(data(9, dist.get_rank())))
            engine.backward(fit(engine, micro, dist.get_rank()))
            engine.step()
            (mean_over_ranks(fit, model, micro) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_same(engine, model)


@pytest.mark.parametrize("forgotten_by", ["engine", "optimizer"])
@STAGES
@pytest.mark.world_size(2)
def test_gradients_of_earlier_micro_steps_are_forgotten_on_request(stage, forgotten_by):
    engine, model = engine_of(build(Net), stage, gradient_accumulation_steps=2), build(Net)
    optimizer = adamw(model)
    for step in range(2):
        engine.backward(fit(engine, 2 * step, dist.get_rank()))
        engine.step()
        (engine if forgotten_by == "engine" else engine.optimizer).zero_grad()
        engine.backward(fit(engine, 2 * step + 1, dist.get_rank()))
        engine.step()
        optimizer.zero_grad()
        (mean_over_ranks(fit, model, 2 * step + 1) / 2).backward()
        optimizer.step()
        assert_same(engine, model)


@pytest.mark.world_size(2)
def test_an_optimizer_is_freed_with_its_engine():
    engine = engine_of(build(Net), 2)
    optimizer = weakref.ref(engine.optimizer)
    engine.module.__dict__["_zerofunc"].optimizer = None
    del engine
    gc.collect()
    assert optimizer() is None


@STAGES
@pytest.mark.world_size(2)
def test_clipping_is_by_the_norm_of_what_is_trained(stage):
    model, sharded = build(Net), build(Net)
    given = config(stage, gradient_clipping=0.1)
    engine = zerofunc.initialize(sharded, given, model_parameters=sharded.head.parameters())[0]
    optimizer = torch.optim.AdamW(model.head.parameters(), **ADAMW)
    for step in range(3):
        engine.backward(fit(engine, step, dist.get_rank()))
        engine.step()
        optimizer.zero_grad()
        mean_over_ranks(fit, model, step).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.head.parameters(), 0.1)
        optimizer.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-9)
        assert_same(engine, model)


# ---- overflows ------------------------------------------------------------------------------------------------------

FLOAT16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}, "optimizer": SGD}


def low_loss(engine, step, factor=1.0):
    x = data(step, dist.get_rank())
    return (engine(x.half()) - x[:, :3].sin().half()).float().square().mean() * factor


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.world_size(2)
def test_an_overflow_inside_no_sync_skips_one_step_and_leaves_nothing(stage):
    engine, clean = (engine_of(build(Net).float(), stage, **FLOAT16) for _ in "12")
    for step in range(3):
        with engine.no_sync():
            engine.backward(low_loss(engine, 2 * step, 1e9 if step == 0 and dist.get_rank() else 1.0))
        engine.backward(low_loss(engine, 2 * step + 1))
        engine.step()
        assert engine.was_step_applied() == (step > 0)
        if step:
            clean.backward(low_loss(clean, 2 * step))
            clean.backward(low_loss(clean, 2 * step + 1))
            clean.step()
    assert (engine.skipped_steps, engine.loss_scale(), clean.loss_scale()) == (1, 128, 256)
    torch.testing.assert_close(values(engine.module), values(clean.module), rtol=1e-3, atol=1e-4)


@STAGES
@pytest.mark.world_size(2)
def test_a_skipped_step_counts_its_samples_and_moves_no_schedule(stage):
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"}}
    more = {**FLOAT16, "scheduler": schedule, "gradient_clipping": 0.1}
    engine = engine_of(build(Net).float(), stage, gradient_accumulation_steps=2, **more)
    rates, nan = [], float("nan")
    for micro in range(6):
        engine.backward(low_loss(engine, micro, nan if micro == 2 and dist.get_rank() == 1 else 1.0))
        engine.step()
        rates.append(engine.get_lr()[0])
    assert rates[1] == rates[3] < rates[5]
    assert (engine.global_steps, engine.skipped_steps, engine.global_samples) == (3, 1, 3 * 2 * 4 * 2)


# ---- who counts, and what is asked meanwhile ------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.world_size(2)
def test_samples_of_backwards_by_hand_count_where_the_user_counts(stage):
    engine, model = engine_of(build(Net), stage, managed_gradient_accumulation=False), build(Net)
    optimizer = adamw(model)
    for micro in range(3):
        fit(engine, micro, dist.get_rank()).backward()
        mean_over_ranks(fit, model, micro).backward()
    engine.step()
    optimizer.step()
    assert_same(engine, model)
    assert engine.global_samples == 3 * 4 * 2


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_a_whole_batch_is_one_step_where_the_user_counts(stage):
    more = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 2}
    engine, model = engine_of(build(Net), stage, **more), build(Net)
    optimizer = adamw(model)
    batches = iter([data(micro, dist.get_rank()) for micro in range(2)])
    engine.train_batch(batches, lambda engine, x: (engine(x) - x[:, :3].sin()).square().mean())
    for micro in range(2):
        (mean_over_ranks(fit, model, micro) / 2).backward()
    optimizer.step()
    assert engine.global_steps == 1
    assert_same(engine, model)


@STAGES
@pytest.mark.world_size(2)
def test_an_evaluation_between_micro_steps_leaves_gradients_and_modes(stage):
    engine, model = engine_of(build(Net), stage, gradient_accumulation_steps=2), build(Net)
    optimizer = adamw(model)
    engine.module.middle.eval()
    for micro in range(2):
        engine.backward(fit(engine, micro, dist.get_rank()))
        batches = iter([data(7, dist.get_rank()), data(8, dist.get_rank())])
        engine.eval_batch(batches, lambda engine, x: engine(x).sum())
        engine.step()
        (mean_over_ranks(fit, model, micro) / 2).backward()
    optimizer.step()
    assert_same(engine, model)
    assert [module.training for module in engine.module.children()] == [True, False, True]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.world_size(1)
def test_a_scale_that_was_asked_for_allows_no_other_backward(stage):
    engine = engine_of(build(Net).float(), stage, **FLOAT16)
    scaled = engine.scale(low_loss(engine, 0))
    engine.backward(low_loss(engine, 0))
    with pytest.raises(RuntimeError, match="Loss scaling is required"):
        low_loss(engine, 1).backward()
    for again in (True, False):  # a graph that is kept may be run again
        scaled.backward(retain_graph=again)
    with pytest.raises(ValueError, match=r"scale\(\) takes a loss of one element, found \(4, 3\)"):
        engine.scale(engine(data(0, 0).half()))
    with pytest.raises(ValueError, match=r"scale\(\) was given a loss that does not require a gradient"):
        engine.scale(low_loss(engine, 0).detach())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(1)
def test_a_scaled_backward_may_recompute_in_backwards_of_its_own(stage):
    engine, other = (engine_of(build(Net).float(), stage, **FLOAT16) for _ in "12")
    x = data(0, 0).half()
    hidden = checkpoint(engine.module.encode, x.clone().requires_grad_(), use_reentrant=True)
    engine.scale(engine.module.head(hidden).float().square().mean()).backward()
    other.backward(other(x).float().square().mean())
    found, expected = zerofunc.full_gradients(engine.module), zerofunc.full_gradients(other.module)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_started_process_group_may_be_required():
    with pytest.raises(RuntimeError, match="dist_init_required is False, but torch.distributed is not started"):
        deepspeed.init_distributed(dist_init_required=False)
