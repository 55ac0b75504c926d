"""Loss scales: when they move, what is done on an overflow, and that no backward goes without one."""

import pytest
import torch
from torch import distributed as dist

import zerofunc
from reference import SGD, STAGES, Net, assert_same, build, data, engine_of
from zerofunc.compat import deepspeed
from zerofunc.training.precision import LossScaler

FLOAT16 = {"torch_autocast": {"enabled": True, "dtype": "float16"}}


def loss_of(model, step, rank):
    return model(data(step, rank).float()).float().square().sum()


def scaled_by_torch(steps, growth_interval):
    """A model trained under a GradScaler on the data of all ranks; this rank's losses, steps applied, and scales."""
    model = build(Net).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", growth_interval=growth_interval)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        scale, before = scaler.get_scale(), [p.detach().clone() for p in model.parameters()]
        for rank in range(dist.get_world_size()):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, step, rank)
            scaler.scale(loss).backward()
            if rank == dist.get_rank():
                mine = loss.item()
        for parameter in model.parameters():
            parameter.grad /= dist.get_world_size()
        scaler.step(optimizer)
        scaler.update()
        applied = any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        seen.append((mine, applied, scale))
    return model, seen


@STAGES
@pytest.mark.world_size(1, 2)
def test_autocast_to_float16_is_scaled_as_by_a_grad_scaler(stage):
    fp16 = {"loss_scale_window": 3}
    optimizer = {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}
    engine = engine_of(build(Net).float(), stage, **FLOAT16, optimizer=optimizer, fp16=fp16)
    model, expected = scaled_by_torch(12, growth_interval=3)
    for step, (loss, applied, scale) in enumerate(expected):
        assert engine.loss_scale() == scale
        found = loss_of(engine, step, dist.get_rank())
        engine.backward(found)
        engine.step()
        assert found.item() == pytest.approx(loss, rel=1e-3)
        assert engine.was_step_applied() == applied
    applied = [applied for _, applied, _ in expected]
    assert applied[0] is False and any(applied) and False in applied[3:]  # it falls, and grows too far again
    assert engine.skipped_steps == applied.count(False)
    assert_same(engine, model, rtol=1e-3, atol=1e-4)


@STAGES
@pytest.mark.world_size(1)
def test_a_backward_that_needs_a_loss_scale_is_refused_without_one(stage):
    engine = engine_of(build(Net).float(), stage, **FLOAT16, optimizer=SGD, fp16={"initial_scale_power": 8})
    before = {name: shard.detach().clone() for name, shard in zerofunc.shards(engine.module).items()}
    with pytest.raises(RuntimeError, match=r"Loss scaling is required .*torch_autocast to float16.*engine.scale\(loss"):
        loss_of(engine, 0, 0).backward()
    engine.step()
    torch.testing.assert_close(dict(zerofunc.shards(engine.module)), before, rtol=0, atol=0)
    other = engine_of(build(Net).float(), stage, **FLOAT16, optimizer=SGD, fp16={"initial_scale_power": 8})
    engine.scale(loss_of(engine, 0, 0)).backward()
    other.backward(loss_of(other, 0, 0))
    engine.step()
    other.step()
    assert engine.get_global_grad_norm() == other.get_global_grad_norm() > 0
    assert_same(engine, other.module, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.world_size(1)
def test_the_scale_of_fp16_grows_in_the_step_in_which_deepspeed_s_does(stage):
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    engine, optimizer, *_ = deepspeed.initialize(
        model=build(Net).float(),
        config={"train_batch_size": 4, "optimizer": SGD, "fp16": fp16, "zero_optimization": {"stage": stage}},
    )

    def step(factor):
        engine.backward(engine(data(0, 0).half()).float().sum() * factor)
        engine.step()
        return optimizer.cur_scale

    assert [step(0.1) for _ in range(7)] == [256, 256, 512, 512, 1024, 1024, 2048]
    assert [step(factor) for factor in (1e30, 0.1, 0.1, 0.1, 0.1)] == [1024, 1024, 1024, 2048, 2048]


@pytest.mark.world_size(1)
def test_a_scale_stands_where_a_saved_one_stood():
    scaler, again = (LossScaler(256.0, dynamic=True, window=3, uncounted=1) for _ in range(2))
    for overflow in (False, False, True, False, False):
        scaler.update(overflow)
    again.restore(vars(scaler))
    scales = [[one.update(overflow=False) or one.scale for _ in range(6)] for one in (scaler, again)]
    assert scales[0] == scales[1] == [256, 512, 512, 512, 1024, 1024]
