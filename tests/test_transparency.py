"""Transforms leave no trace: training with them in between equals training without, bit for bit."""

import itertools

import pytest
import torch
from torch import distributed as dist

import zerofunc
from reference import STAGES, Net, build, data, engine_of, fit, values
from zerofunc.pages.parts import own_grad

EXACT = {"rtol": 1e-9, "atol": 1e-11}
ROUGH = {"rtol": 0.05, "atol": 0.02}  # results in float16
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}


def with_grad(model, x):
    return torch.func.grad(lambda x: model(x).square().mean())(x)


def with_vjp(model, x):
    y, pull = torch.func.vjp(model, x)
    return pull(torch.ones_like(y))[0]  # no transform is active here


def with_autograd_grad(model, x):
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), x)[0]


def with_gradient_of_parameters(model, x):
    parameters = dict(getattr(model, "module", model).named_parameters())
    gradients = torch.autograd.grad(model(x).square().mean(), list(parameters.values()))
    return dict(zip(parameters, gradients, strict=True))


def with_functional_call(model, x):
    module = getattr(model, "module", model)

    def loss(parameters):
        return torch.func.functional_call(module, parameters, (x,)).square().mean()

    return torch.func.grad(loss)({name: p.detach() for name, p in module.named_parameters()})


def with_jvp(model, x):
    return torch.func.jvp(model, (x,), (x.cos(),))


def with_vmap(model, x):
    return torch.func.vmap(torch.func.grad(lambda x: model(x).square().mean()))(x)


def with_hessian(model, x):
    return torch.func.hessian(lambda x: model(x).square().mean())(x[0])


def with_jacobians(model, x):
    return torch.func.jacrev(model)(x[0]), torch.func.jacfwd(model)(x[0])


TRANSFORMS = [
    with_grad, with_vjp, with_autograd_grad, with_gradient_of_parameters, with_functional_call, with_jvp, with_vmap,
    with_hessian, with_jacobians,
]  # fmt: skip


def state(engine):
    """Everything that a transform must leave alone."""
    gradients = {name: shard.grad for name, shard in zerofunc.shards(engine.module).items()}
    return {
        "gradients": {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None},
        "gradients of parameters": [p for p in engine.module.parameters() if own_grad(p) is not None],
        "counters": (engine.micro_steps, engine.global_steps, engine.skipped_steps, engine.global_samples),
        "boundary": (engine.is_gradient_accumulation_boundary(), engine.was_step_applied()),
        "scale": (engine.loss_scaler.scale, engine.get_global_grad_norm()),
    }


def assert_no_trace(engine, transform, x, tolerance):
    """The transform is that of an ordinary model, and changes nothing."""
    before = state(engine)
    result = transform(engine, x)
    torch.testing.assert_close(state(engine), before, rtol=0, atol=0)
    assert not before["gradients of parameters"]
    weights = values(engine.module)
    model = Net().to(x.dtype)
    model.load_state_dict(weights)
    torch.testing.assert_close(result, transform(model, x), **tolerance)


def train(engine, dtype, probe):
    """Losses of five micro-steps, with `probe` called before, between and after their parts."""
    losses = []
    for step in range(5):
        x = data(step, dist.get_rank()).to(dtype)
        probe(step)
        loss = (engine(x) - x[:, :3].sin()).float().square().mean()
        probe(step)
        losses.append(engine.backward(loss))
        probe(step)
        engine.step()
    return losses


def compare(transforms, steps, dtype, tolerance, stage, **more):
    """Train with the transforms in turn, in some of the steps, and without."""
    turn = itertools.cycle(transforms)
    plain, probed = (engine_of(build(Net).to(torch.promote_types(dtype, torch.float32)), stage, **more) for _ in "12")

    def probe(step):
        if step in steps:
            assert_no_trace(probed, next(turn), data(step, 7 + dist.get_rank()).to(dtype), tolerance)

    expected = train(plain, dtype, lambda step: None)
    assert train(probed, dtype, probe) == expected
    torch.testing.assert_close(state(probed), state(plain), rtol=0, atol=0)
    torch.testing.assert_close(values(probed.module), values(plain.module), rtol=0, atol=0)
    return probed


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.__name__[5:])
@STAGES
@pytest.mark.world_size(2)
def test_training_with_accumulation_is_the_same_with_a_transform_in_between(stage, transform):
    probed = compare([transform], {0, 3, 4}, torch.float64, EXACT, stage, gradient_accumulation_steps=4)
    assert probed.global_steps == 1
    assert probed.micro_steps == 5


@STAGES
@pytest.mark.world_size(1, 2)
def test_training_with_a_loss_scale_is_the_same_with_transforms_in_between(stage):
    fp16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2}
    probed = compare(TRANSFORMS, range(5), torch.float16, ROUGH, stage, fp16=fp16, optimizer=SGD)
    assert probed.loss_scaler.scale == 4096
    assert probed.skipped_steps == 0


@STAGES
@pytest.mark.world_size(1, 2)
def test_training_by_hand_is_the_same_with_transforms_in_between(stage):
    def train_by_hand(transforms):
        module = zerofunc.shard(build(Net), stage, page_bytes=160, resident_bytes=0)
        optimizer = torch.optim.SGD(zerofunc.shards(module).values(), lr=0.05, momentum=0.9)
        for step in range(3):
            for transform in transforms:
                transform(module, data(step, 7 + dist.get_rank()))
            loss = fit(module, step, dist.get_rank())
            for transform in transforms:
                transform(module, data(step, 7 + dist.get_rank()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(module)

    torch.testing.assert_close(train_by_hand(TRANSFORMS[:3]), train_by_hand([]), rtol=0, atol=0)
