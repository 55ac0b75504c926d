"""What an engine counts and skips: steps that update and steps that do not, beside plain PyTorch."""

import pytest
from torch import distributed as dist

from reference import SGD, STAGES, Net, build, data, engine_of, fit
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
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": SGD,
        "fp16": {"enabled": True, "initial_scale_power": 8}, "zero_optimization": {"stage": stage},
    }  # fmt: skip
    engine, optimizer, *_ = deepspeed.initialize(model=build(Net).float(), config=config)
    seen = []
    for micro in range(6):
        factor = 1e9 if micro == 1 and dist.get_rank() == 1 else 1.0
        engine.backward((engine(data(micro, dist.get_rank()).half()).float() * factor).sum())
        engine.step()
        seen.append((optimizer.overflow, engine.was_step_applied()))
    none, skipped, between, updated = (False, False), (True, False), (True, False), (False, True)
    assert seen == [none, skipped, between, updated, none, updated]
    assert engine.skipped_steps == 1
