"""Parameters that get their first gradient later than others."""

import pytest
import torch
import torch.distributed as dist

from reference import SGD, STAGES, Branches, assert_same, build, data, engine_of, step_reference


def loss(model, step, rank):
    return model(data(step, rank), expert=None if step == 0 else step % 2).square().sum()


@pytest.mark.world_size(2)
@STAGES
def test_momentum_begins_with_a_parameters_first_gradient(stage):
    engine, model = engine_of(build(Branches), stage, optimizer=SGD), build(Branches)
    optimizer = torch.optim.SGD(model.parameters(), **SGD["params"])
    for step in range(3):
        engine.backward(loss(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, loss, step)
        assert_same(engine, model)
