"""Optimizers of others, over shards: each trains as in one process, or is refused before it has changed anything."""

import logging

import pytest
import torch

import zerofunc
from reference import Net, build, config, fit


class OwnPace(torch.optim.Optimizer):
    """Chooses the size of its steps by itself: its groups have a rate of None."""

    def __init__(self, params):
        super().__init__(params, {"lr": None})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                param.sub_(param.grad / state["step"])


def test_an_optimizer_without_a_rate_trains_and_is_reported(caplog):
    caplog.set_level(logging.INFO)
    module = build(Net)
    settings = config(3, steps_per_print=1)
    engine, *_ = zerofunc.initialize(model=module, optimizer=OwnPace(module.parameters()), config=settings)
    for step in range(2):
        engine.backward(fit(engine, step, 0))
        engine.step()
    assert engine.get_lr() == [None] and "step=2, skipped=0, lr=[None]" in caplog.text
    with pytest.raises(ValueError, match="WarmupLR sets learning rates, and the optimizer has none"):
        zerofunc.initialize(
            model=build(Net), optimizer=OwnPace, config={**settings, "scheduler": {"type": "WarmupLR", "params": {}}}
        )
