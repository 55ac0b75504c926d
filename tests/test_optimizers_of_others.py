"""Optimizers that are no elementwise ones of PyTorch's: as one process steps them, or refused."""

import pytest
import torch.distributed as dist

import zerofunc
from reference import EVERY_STAGE, Net, assert_same, build, config, fit
from test_optimizers import Averaging, Distance, Lamb, Momentum, SilentNorm, Wrapper


def train(make, stage, num_steps=3):
    module, plain = build(Net), build(Net)
    engine, optimizer, *_ = zerofunc.initialize(
        module, {**config(stage), "optimizer": None}, optimizer=make(module.parameters())
    )
    reference = make(plain.parameters())
    for one in (optimizer, reference):
        if hasattr(one, "train"):
            one.train()
    for step in range(num_steps):
        engine.backward(fit(engine, step, dist.get_rank()))
        engine.step()
        (sum(fit(plain, step, rank) for rank in range(2)) / 2).backward()
        reference.step()
        reference.zero_grad()
    assert_same(engine, plain)


def wrapped(params):
    return Wrapper(Momentum(params))


@pytest.mark.parametrize("kind", [Averaging, SilentNorm, Lamb, wrapped])
@EVERY_STAGE
@pytest.mark.world_size(2)
def test_steps_equal_one_process(stage, kind):
    train(kind, stage)


@EVERY_STAGE
@pytest.mark.world_size(2)
def test_a_number_over_all_parameters_is_right_at_stage_0_and_refused_above(stage):
    if stage == 0:
        train(Distance, 0)
    else:
        with pytest.raises(ValueError, match="Distance updates a parameter by what other parameters are.*stage 0"):
            train(Distance, stage)
