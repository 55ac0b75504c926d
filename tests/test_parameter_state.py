"""Masters, gradients and optimizer state of single parameters, read and written through the module's parameters."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofunc
from reference import (
    STAGES,
    Net,
    adamw,
    assert_same,
    build,
    data,
    engine_of,
    fit,
    mean_over_ranks,
    step_reference,
    train_both,
)
from zerofunc.optimizers import parameter_state as state

TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}


def assert_each(engine, read, expected):
    """`read` of each parameter is what `expected` gives for the reference's name."""
    for name, parameter in engine.module.named_parameters():
        found = read(parameter)
        if expected(name) is None:
            assert found is None
        else:
            torch.testing.assert_close(found, expected(name), **TOLERANCE)


@STAGES
@pytest.mark.world_size(1, 2)
def test_gradients_are_read_at_any_time(stage):
    engine, model = engine_of(build(Net), stage, gradient_accumulation_steps=2), build(Net)
    plain = dict(model.named_parameters())
    assert_each(engine, state.safe_get_full_grad, lambda name: None)
    for micro_step in range(2):
        engine.backward(fit(engine, micro_step, dist.get_rank()))
        (mean_over_ranks(fit, model, micro_step) / 2).backward()
        assert_each(engine, state.safe_get_full_grad, lambda name: plain[name].grad)
        if micro_step == 0:
            engine.step()
    adam = adamw(model)
    adam.step()
    engine.step()  # reading has not changed what it does
    assert_same(engine, model)
    assert_each(engine, state.safe_get_full_grad, lambda name: None)


@STAGES
@pytest.mark.world_size(1, 2)
def test_masters_and_optimizer_state_are_read(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    plain, adam = dict(model.named_parameters()), adamw(model)
    assert_each(engine, lambda p: state.safe_get_full_optimizer_state(p, "exp_avg"), lambda name: None)
    for step in range(2):
        engine.backward(fit(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, adam, fit, step)
    assert_each(engine, state.safe_get_full_fp32_param, lambda name: plain[name].detach())
    for key in ("exp_avg", "exp_avg_sq"):
        assert_each(
            engine, lambda p, k=key: state.safe_get_full_optimizer_state(p, k), lambda n, k=key: adam.state[plain[n]][k]
        )
    assert float(state.safe_get_full_optimizer_state(engine.module.head.bias, "step")) == 2
    with pytest.raises(ValueError, match=r"no 'momentum' of 'head.bias'; it keeps .*exp_avg"):
        state.safe_get_full_optimizer_state(engine.module.head.bias, "momentum")


@STAGES
@pytest.mark.world_size(1, 2)
def test_what_is_written_is_trained_with(stage):
    engine, model = train_both(Net, fit, stage, steps=1)
    adam = adamw(model)
    adam.load_state_dict({**adam.state_dict(), "state": {}})
    weight, plain = engine.module.middle.weight, model.middle.weight
    value = data(7, 0, *plain.shape)
    state.safe_set_full_fp32_param(weight, value)
    torch.testing.assert_close(weight.detach().clone(), value, rtol=0, atol=0)
    with torch.no_grad():
        plain.copy_(value)
    assert_same(engine, model)

    engine.backward(fit(engine, 1, dist.get_rank()))
    adam.zero_grad()
    mean_over_ranks(fit, model, 1).backward()
    state.safe_set_full_grad(weight, value)
    plain.grad = value.clone()
    for name, parameter in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state.safe_set_full_optimizer_state(parameter, torch.zeros(parameter.shape), key)
        state.safe_get_local_optimizer_state(parameter, "step").zero_()
        assert state.safe_get_full_optimizer_state(parameter, "exp_avg").norm() == 0, name
    engine.step()
    adam.step()
    assert_same(engine, model)


@STAGES
@pytest.mark.world_size(2)
def test_local_parts_are_views_of_the_state(stage):
    engine, model = train_both(Net, fit, stage, steps=1)
    shards = zerofunc.shards(engine.module)
    engine.backward(fit(engine, 1, dist.get_rank()))
    for name, parameter in engine.module.named_parameters():
        shard = shards[name]
        assert torch.equal(state.safe_get_local_fp32_param(parameter), shard)
        assert state.safe_get_local_grad(parameter) is shard.grad
        assert state.safe_get_local_optimizer_state(parameter, "exp_avg").shape == shard.shape
        state.safe_set_local_fp32_param(parameter, 2 * shard.detach())
        state.safe_set_local_grad(parameter, torch.zeros_like(shard))
        state.safe_set_local_optimizer_state(parameter, torch.ones_like(shard), "exp_avg")
        full = state.safe_get_full_optimizer_state(parameter, "exp_avg")
        assert torch.equal(full, torch.ones_like(full))
        assert torch.count_nonzero(state.safe_get_full_grad(parameter)) == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    x = data(0, dist.get_rank())
    torch.testing.assert_close(engine(x), model(x))
    assert_same(engine, model)


@STAGES
@pytest.mark.world_size(2)
def test_masters_are_float32_under_bfloat16(stage):
    torch.manual_seed(0)
    engine = engine_of(nn.Linear(8, 3), stage, bf16={"enabled": True})
    weight = engine.module.weight
    exact = torch.full((3, 8), 1 + 2.0**-12)  # not a bfloat16 number
    state.safe_set_full_fp32_param(weight, exact)
    assert torch.equal(state.safe_get_full_fp32_param(weight), exact)
    assert torch.equal(weight.detach().clone(), exact.bfloat16())
    engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum())
    assert state.safe_get_full_grad(weight).dtype == torch.float32
    engine.step()
    assert state.safe_get_full_optimizer_state(weight, "exp_avg").dtype == torch.float32


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_what_does_not_fit_is_refused_by_name(stage):
    engine = engine_of(build(Net), stage)
    bias = engine.module.head.bias
    with pytest.raises(ValueError, match="not a parameter of a sharded module"):
        state.safe_get_full_grad(torch.zeros(3))
    with pytest.raises(ValueError, match=r"'head.bias' has shape \(4,\)"):
        state.safe_set_full_fp32_param(bias, torch.zeros(4))
    with pytest.raises(ValueError, match="expected this rank's part"):
        state.safe_set_local_grad(bias, torch.zeros(7))
    with pytest.raises(ValueError, match="before its first step"):
        state.safe_set_full_optimizer_state(bias, torch.zeros(3), "exp_avg")
    module = zerofunc.shard(build(Net), stage)
    with pytest.raises(ValueError, match="no optimizer is known"):
        state.safe_get_full_optimizer_state(module.head.bias, "exp_avg")
    frozen = build(Net)
    frozen.head.requires_grad_(False)
    frozen = engine_of(frozen, stage, zero_allow_untested_optimizer=True).module
    assert state.safe_get_full_grad(frozen.head.bias) is None
    torch.testing.assert_close(state.safe_get_full_fp32_param(frozen.head.bias), build(Net).head.bias.detach())
    with pytest.raises(ValueError, match="does not require a gradient"):
        state.safe_set_full_grad(frozen.head.bias, torch.zeros(3))


@STAGES
@pytest.mark.world_size(2)
def test_what_the_modifier_writes_is_taken_by_all(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    module, plain = engine.module, nn.Linear(2, 2)
    values = data(5, 0, 3, 5)
    with state.GatheredParameters([module.head.weight, plain.weight], modifier_rank=1):
        if dist.get_rank() == 1:
            module.head.weight.data.copy_(values)
        else:
            module.head.weight.data.zero_()
    with state.GatheredParameters(module.head.bias, modifier_rank=0), torch.no_grad():
        if dist.get_rank() == 0:
            nn.init.constant_(module.head.bias, 0.5)
    with state.GatheredParameters(module.first.parameters(), modifier_rank=0):  # nobody writes
        pass
    with torch.no_grad():
        model.head.weight.copy_(values)
        model.head.bias.fill_(0.5)
    assert_same(module, model, rtol=0, atol=0)
    with state.GatheredParameters(module):
        if dist.get_rank() == 0:  # without the other rank
            torch.testing.assert_close(module(data(0, 0)), model(data(0, 0)))
    with state.GatheredParameters(plain), state.GatheredParameters(module, enabled=False):
        pass
    with pytest.raises(ValueError, match="writer is 2"), state.GatheredParameters(module, modifier_rank=2):
        pass
    engine.backward(fit(engine, 0, dist.get_rank()))
    engine.step()
    step_reference(model, adamw(model), fit, 0)
    assert_same(engine, model)


@pytest.mark.world_size(2)
def test_only_the_pages_concerned_are_gathered():
    module = zerofunc.shard(build(Net), 3, page_bytes=160, resident_bytes=0, prefetch=False)
    before = zerofunc.usage(module).moved_bytes
    with state.GatheredParameters(module.head.bias, modifier_rank=0):
        pass
    assert zerofunc.usage(module).gathered_peak_bytes <= 8 * (15 + 3 + 1)
    assert zerofunc.usage(module).moved_bytes - before <= 8 * (15 + 3 + 1)


def test_registering_is_needless_and_said_once(caplog):
    state._say_nothing_to_register.cache_clear()
    module = zerofunc.shard(nn.Linear(2, 2), 3)
    with caplog.at_level(logging.INFO, "zerofunc"):
        state.register_external_parameter(module, module.weight)
        state.register_external_parameter(module, module.bias)
    assert len(caplog.records) == 1


@STAGES
@pytest.mark.world_size(2)
def test_state_of_whole_parameters_is_read_and_written(stage):
    muon = {"type": "Muon", "params": {"lr": 0.05, "weight_decay": 0.0}}
    engine = engine_of(build(Net), stage, optimizer=muon)
    weight = engine.module.middle.weight
    assert state.safe_get_full_optimizer_state(weight, "momentum_buffer") is None
    engine.backward(fit(engine, 0, dist.get_rank()))
    gradient = state.safe_get_full_grad(weight)
    engine.step()
    found = state.safe_get_full_optimizer_state(weight, "momentum_buffer")
    cosine = torch.nn.functional.cosine_similarity(found.reshape(-1).double(), gradient.reshape(-1), dim=0)
    assert cosine > 0.999
    state.safe_set_full_optimizer_state(weight, torch.ones_like(found), "momentum_buffer")
    assert bool((state.safe_get_full_optimizer_state(weight, "momentum_buffer") == 1).all())
    with pytest.raises(ValueError, match="in full shape by one rank"):
        state.safe_get_local_optimizer_state(weight, "momentum_buffer")
    assert state.safe_get_full_optimizer_state(engine.module.middle.bias, "exp_avg").shape == (5,)
