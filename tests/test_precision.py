"""Mixed precision: masters, loss scaling, autocast, data types of gradients, derivatives in low precision."""

import logging
from contextlib import contextmanager

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap

import zerofunc
from reference import (
    SGD,
    STAGES,
    Net,
    build,
    data,
    engine_of,
    mean_over_ranks,
    step_reference,
    values,
)


def in_dtype_of(model):
    return next(model.parameters()).dtype


def fit_low(model, step, rank):
    x = data(step, rank).to(in_dtype_of(model))
    return (model(x) - x[:, :3].sin()).float().square().mean()


@STAGES
@pytest.mark.world_size(1, 2)
def test_bfloat16_trains_close_to_float32_with_float32_masters(stage):
    engine = engine_of(build(Net).float(), stage, bf16={"enabled": True}, optimizer=SGD)
    model = build(Net).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    masters = zerofunc.unshard(engine.module, zerofunc.shards(engine.module))
    torch.testing.assert_close(masters, values(model), rtol=0, atol=0)
    losses = []
    for step in range(6):
        loss = fit_low(engine, step % 2, dist.get_rank())
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        step_reference(model, optimizer, fit_low, step % 2)
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
    shards = zerofunc.shards(engine.module)
    assert {s.dtype for s in shards.values()} == {torch.float32}
    masters = zerofunc.unshard(engine.module, shards)
    torch.testing.assert_close(masters, values(model), rtol=0, atol=0.02)
    torch.testing.assert_close(values(engine.module), {n: v.bfloat16() for n, v in masters.items()}, rtol=0, atol=0)
    assert losses[-1] < losses[1]


def fp16(**more):
    section = {"enabled": True, "initial_scale_power": 8, "hysteresis": 2, "loss_scale_window": 3, **more}
    return {"fp16": section, "optimizer": SGD}


@STAGES
@pytest.mark.world_size(1, 2)
def test_float16_trains_close_to_float32(stage):
    engine, model = engine_of(build(Net).float(), stage, gradient_clipping=1.0, **fp16()), build(Net).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        engine.backward(fit_low(engine, step, dist.get_rank()))
        engine.step()
        optimizer.zero_grad()
        mean_over_ranks(fit_low, model, step).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=0.02)
    assert engine.skipped_steps == 0
    assert {p.dtype for p in engine.module.parameters()} == {torch.float16}
    masters = zerofunc.unshard(engine.module, zerofunc.shards(engine.module))
    torch.testing.assert_close(masters, values(model), rtol=0, atol=0.005)


@STAGES
@pytest.mark.world_size(1, 2)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_the_scale_recovers(stage):
    engine = engine_of(build(Net).float(), stage, **fp16())
    scales, applied = [], []
    for step in range(7):
        before = values(engine.module)
        factor = 1e6 if step < 3 and dist.get_rank() == 0 else 1.0
        engine.backward(fit_low(engine, step, dist.get_rank()) * factor)
        engine.step()
        unchanged = all(torch.equal(value, before[name]) for name, value in values(engine.module).items())
        assert unchanged != engine.was_step_applied()
        scales.append(engine.loss_scaler.scale)
        applied.append(engine.was_step_applied())
    assert applied == [False, False, False, True, True, True, True]
    assert scales == [256, 128, 64, 64, 64, 64, 128]
    assert engine.skipped_steps == 3
    assert engine.global_steps == 7


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_skipped_step_does_not_move_the_schedule(stage):
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"}}
    engine = engine_of(build(Net).float(), stage, scheduler=schedule, **fp16())
    before = engine.get_lr()
    engine.backward(fit_low(engine, 0, dist.get_rank()) * 1e6)
    engine.step()
    assert not engine.was_step_applied()
    assert engine.get_lr() == before


# ---- what the steps are ---------------------------------------------------------------------------------------------


def trained_by_hand(dtype, steps, autocast=None):
    """Masters in float32 after steps of one process whose gradients are computed as a rank computes them."""
    masters = build(Net).float()
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        gradients = []
        for rank in range(dist.get_world_size()):
            model = build(Net).to(dtype)
            model.load_state_dict(masters.state_dict())
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = fit_low(model, step, rank)
            loss.backward()
            gradients.append([parameter.grad.float() for parameter in model.parameters()])
        for parameter, *per_rank in zip(masters.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack(per_rank).mean(0)
        optimizer.step()
    return values(masters)


def trained(engine, steps):
    for step in range(steps):
        engine.backward(fit_low(engine, step, dist.get_rank()))
        engine.step()
    return zerofunc.unshard(engine.module, zerofunc.shards(engine.module))


@STAGES
@pytest.mark.world_size(1, 2)
def test_bfloat16_steps_are_those_of_masters_and_a_rounded_copy(stage):
    engine = engine_of(build(Net).float(), stage, bf16={"enabled": True}, optimizer=SGD)
    torch.testing.assert_close(trained(engine, 3), trained_by_hand(torch.bfloat16, 3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@STAGES
@pytest.mark.world_size(1, 2)
def test_autocast_steps_are_those_of_plain_autocast(stage, dtype):
    name = str(dtype).removeprefix("torch.")
    engine = engine_of(
        build(Net).float(), stage, torch_autocast={"enabled": True, "dtype": name}, optimizer=SGD,
        fp16={"initial_scale_power": 4},
    )  # fmt: skip
    assert engine(data(0, 0).float()).dtype == dtype
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    assert engine.loss_scale() == (16 if dtype == torch.float16 else 1)
    torch.testing.assert_close(trained(engine, 3), trained_by_hand(torch.float32, 3, dtype), rtol=1e-4, atol=1e-4)


@STAGES
@pytest.mark.world_size(2)
def test_masters_may_be_bfloat16(stage):
    section = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    engine = engine_of(build(Net).float(), stage, bf16=section, optimizer=SGD)
    trained(engine, 2)
    assert {shard.dtype for shard in zerofunc.shards(engine.module).values()} == {torch.bfloat16}
    assert {v.dtype for state in engine.optimizer.state.values() for v in state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("section", ["bf16", "fp16"])
@pytest.mark.world_size(1)
def test_inputs_are_cast_where_that_is_asked_for(section):
    engine = engine_of(build(Net).float(), 0, optimizer=SGD, **{section: {"enabled": True, "auto_cast": True}})
    x = data(0, 0).float()
    result, tangent = jvp(lambda x: engine(x).float(), (x,), (x,))
    assert result.shape == tangent.shape
    assert tangent.count_nonzero()
    plain = engine_of(build(Net).float(), 0, optimizer=SGD, **{section: {"enabled": True}})
    with pytest.raises(RuntimeError, match="dtype"):
        plain(x)


@pytest.mark.parametrize("name", ["buffer_dtype"])
@pytest.mark.world_size(1)
def test_buffers_keep_their_type_unless_told(name):
    class Normed(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.ones(3))

    plain = engine_of(build(Normed).float(), 3, bf16={"enabled": True}, optimizer=SGD)
    cast = engine_of(build(Normed).float(), 3, bf16={"enabled": True}, optimizer=SGD, data_types={name: "bf16"})
    assert (plain.module.shift.dtype, cast.module.shift.dtype) == (torch.float32, torch.bfloat16)


# ---- gradients in other types ---------------------------------------------------------------------------------------


def moved_by_backward(engine):
    with zerofunc.gathered(engine.module):
        before = engine.usage().moved_bytes
        engine.backward(fit_low(engine, 0, dist.get_rank()))
        return engine.usage().moved_bytes - before


@pytest.mark.parametrize("more", [{"communication_data_type": "bf16"}, {"data_types": {"grad_accum_dtype": "bf16"}}])
@STAGES
@pytest.mark.world_size(2)
def test_gradients_may_travel_in_bfloat16(stage, more):
    exact = engine_of(build(Net).float(), stage, optimizer=SGD)
    engine = engine_of(build(Net).float(), stage, optimizer=SGD, **more)
    assert 2 * moved_by_backward(engine) == moved_by_backward(exact)
    found, expected = (zerofunc.full_gradients(e.module) for e in (engine, exact))
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, expected[name], rtol=2**-6, atol=2**-8 * expected[name].abs().max().item())
    assert any(not torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.world_size(2)
def test_unreduced_gradients_are_kept_in_the_type_asked_for():
    peaks = []
    for kept_in in ("fp32", "bf16"):
        engine = engine_of(build(Net).float(), 0, optimizer=SGD, data_types={"grad_accum_dtype": kept_in})
        with engine.coalesce_grad_reduction():
            engine.backward(fit_low(engine, 0, dist.get_rank()))
            peaks.append(engine.usage().gradient_peak_bytes)
    assert peaks[0] == 2 * peaks[1]


# ---- overflow -------------------------------------------------------------------------------------------------------


@contextmanager
def logged():
    """The messages that zerofunc logs inside, as a list."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("zerofunc").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("zerofunc").removeHandler(handler)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_an_overflow_names_the_first_parameter_and_never_ends_the_run(stage):
    engine = engine_of(build(Net).float(), stage, **fp16(initial_scale_power=1, hysteresis=1, min_loss_scale=1))
    x, factor = data(0, 0).half(), 1e9 if dist.get_rank() == 1 else 1.0
    with logged() as messages:
        for _ in range(4):
            hidden = engine.module.encode(x).detach()
            engine.backward((engine.module.head(hidden).float() * factor).sum())
            engine.step()
            assert not engine.was_step_applied()
    assert (engine.skipped_steps, engine.loss_scale()) == (4, 1.0)
    if dist.get_rank() == 0:
        assert "parameter 'head.weight' is infinite or NaN (and of 1 more); loss scale 2 -> 1" in messages[0]
        assert ["its minimum" in message for message in messages] == [True] * 4
    else:
        assert messages == []


@pytest.mark.parametrize("section", [{"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 8}}])
@pytest.mark.world_size(2)
def test_a_nan_skips_the_step_with_a_static_scale_and_in_bfloat16(section):
    engine = engine_of(build(Net).float(), 2, optimizer=SGD, **section)
    before = values(engine.module)
    for _ in range(2):
        engine.backward(fit_low(engine, 0, dist.get_rank()) * (float("nan") if dist.get_rank() else 1.0))
        engine.step()
    assert (engine.skipped_steps, engine.loss_scale()) == (2, 8 if "fp16" in section else 1)
    torch.testing.assert_close(values(engine.module), before, rtol=0, atol=0)


# ---- derivatives ----------------------------------------------------------------------------------------------------


def derivatives(f, x, v):
    """Every kind of derivative over the input of a scalar function of one sample."""

    def total(x):
        return f(x).float().square().sum()

    return {
        "grad": grad(total)(x),
        "vjp": vjp(f, x)[1](f(x).detach())[0],
        "jvp": jvp(f, (x,), (v,))[1],
        "jvp(grad)": jvp(grad(total), (x,), (v,))[1],
        "grad(grad)": grad(lambda x: (grad(total)(x) * v).sum())(x),
        "vmap(grad)": vmap(grad(total))(torch.stack([x, v])),
        "hessian": hessian(total)(x),
    }


LOW = {
    "bf16": ({"bf16": {"enabled": True}}, torch.bfloat16, None),
    "fp16": ({"fp16": {"enabled": True}}, torch.float16, None),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, torch.float32, torch.bfloat16),
}


@pytest.mark.parametrize("kind", LOW)
@STAGES
@pytest.mark.world_size(2)
def test_derivatives_in_low_precision_are_those_of_the_plain_module(stage, kind):
    more, dtype, cast = LOW[kind]
    engine, model = engine_of(build(Net).float(), stage, optimizer=SGD, **more), build(Net).float().to(dtype)
    x, v = (data(step, dist.get_rank(), 4).to(dtype) for step in (0, 1))

    def plain(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast is not None):
            return model(x)

    found, expected = derivatives(engine, x, v), derivatives(plain, x, v)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")
    parameters = dict(engine.module.named_parameters())
    local = grad(lambda p: functional_call(engine.module, p, (x,)).float().square().sum())(parameters)
    plain_local = grad(lambda p: functional_call(model, p, (x,)).float().square().sum())(dict(model.named_parameters()))
    if cast is None:
        torch.testing.assert_close(dict(local), dict(plain_local), rtol=0, atol=0)


def meanflow(model, step, rank):
    """A loss with a jvp in it, in the model's data type."""
    x = data(step, rank).to(in_dtype_of(model))
    value, tangent = jvp(model, (x,), (torch.ones_like(x),))
    return (value.float() - tangent.detach().float() - x[:, :3].float().sin()).square().mean()


@pytest.mark.parametrize("kind", LOW)
@STAGES
@pytest.mark.world_size(1, 2)
def test_low_precision_ends_where_float32_ends(stage, kind):
    more = LOW[kind][0]
    engine = engine_of(build(Net).float(), stage, optimizer=SGD, **more)
    model = build(Net).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(40):
        engine.backward(meanflow(engine, step % 2, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, meanflow, step % 2)
    with torch.no_grad():
        first = mean_over_ranks(meanflow, build(Net).float(), 0)
        found, expected = mean_over_ranks(meanflow, engine, 0), mean_over_ranks(meanflow, model, 0)
    assert engine.skipped_steps <= 2
    assert expected < 0.3 * first
    assert found == pytest.approx(expected.item(), abs=0.05 * first.item())
