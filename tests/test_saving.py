"""Checkpoints: training goes on from them at any stage and on any number of ranks as if it had not been interrupted."""

import pytest
import torch
import torch.distributed as dist

from reference import STAGES, Net, adamw, assert_same, build, engine_of, fit, step_reference, values


def train(engine, steps):
    for step in steps:
        engine.backward(fit(engine, step, dist.get_rank()))
        engine.step()


@STAGES
@pytest.mark.world_size(1, 2)
def test_training_goes_on_from_a_checkpoint(stage, tmp_path):
    engine, model = engine_of(build(Net), stage), build(Net)
    train(engine, range(2))
    assert engine.save_checkpoint(tmp_path, client_state={"note": (1, "a", torch.ones(2))})
    train(engine, range(2, 4))
    again = engine_of(build(Net, seed=1), stage)
    folder, client_state = again.load_checkpoint(tmp_path)
    assert folder == str(tmp_path / "global_step2")
    assert client_state["note"][:2] == (1, "a") and client_state["note"][2].sum() == 2
    train(again, range(2, 4))
    torch.testing.assert_close(values(again.module), values(engine.module), rtol=0, atol=0)
    assert (again.global_steps, again.global_samples) == (engine.global_steps, engine.global_samples)
    optimizer = adamw(model)
    for step in range(4):
        step_reference(model, optimizer, fit, step)
    assert_same(again, model)
