"""Custom autograd Functions, operators and fused losses that are given a raw weight."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

import zerofunc
from reference import (
    STAGES,
    Language,
    Net,
    adamw,
    assert_same,
    assert_same_gradients,
    build,
    data,
    engine_of,
    fit,
    mean_over_ranks,
    step_reference,
    train_both,
)

CHUNK = 3  # rows at a time, so that the logits are never whole


class LinearCrossEntropy(torch.autograd.Function):
    """The last layer and its loss in one, as Liger-Kernel writes it: forward computes the gradients in chunks."""

    @staticmethod
    def forward(ctx, x, weight, bias, target):
        loss = x.new_zeros(())
        grad_x, grad_weight, grad_bias = torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
        for start in range(0, len(x), CHUNK):
            rows = slice(start, start + CHUNK)
            logits = x[rows] @ weight.t() + bias
            loss += F.cross_entropy(logits, target[rows], reduction="sum") / len(x)
            slope = (logits.softmax(-1) - F.one_hot(target[rows], len(weight))) / len(x)
            grad_x[rows] = slope @ weight
            torch.addmm(grad_weight, slope.t(), x[rows], out=grad_weight)
            grad_bias += slope.sum(0)
        ctx.save_for_backward(grad_x.detach(), grad_weight.detach(), grad_bias.detach())
        return loss

    @staticmethod
    def backward(ctx, slope):
        return *(slope * saved for saved in ctx.saved_tensors), None


class SavedLinear(torch.autograd.Function):
    """A linear layer that saves its weight, and reads it again in backward; by attribute, too."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, slope):
        x, weight = ctx.saved_tensors
        return (slope @ weight + slope @ ctx.weight) / 2, slope.t() @ x, slope.sum(0)


class NumpyLinear(torch.autograd.Function):
    """A kernel outside PyTorch."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.from_numpy(x.detach().numpy() @ weight.detach().numpy().T + bias.detach().numpy())

    @staticmethod
    def backward(ctx, slope):
        x, weight = ctx.saved_tensors
        return torch.from_numpy(slope.numpy() @ weight.numpy()), slope.t() @ x, slope.sum(0)


@torch.library.custom_op("zerofunc_tests::linear", mutates_args=())
def operator(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    assert weight.data_ptr()  # the gathered weight, as a C++ or Triton kernel needs it
    return x @ weight.t() + bias


operator.register_autograd(
    lambda ctx, slope: (slope @ ctx.saved_tensors[1], slope.t() @ ctx.saved_tensors[0], slope.sum(0)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]),
)


def targets(x):
    return x[:, 0].mul(5).long().abs() % 3


def linear_cross_entropy(model, step, rank):
    x = data(step, rank, 7, 4)
    hidden, head = model.encode(x), model.head
    return LinearCrossEntropy.apply(hidden, head.weight, head.bias, targets(x))


def by(linear):
    def loss(model, step, rank):
        x = data(step, rank, 7, 4)
        return F.cross_entropy(linear(model.encode(x), model.head.weight, model.head.bias), targets(x))

    return loss


def mixed(model, step, rank):
    """The same weight, read by a Function and by the module."""
    x = data(step, rank, 7, 4)
    hidden, head = model.encode(x), model.head
    weight = head.weight.t().contiguous().t()
    return LinearCrossEntropy.apply(hidden, weight, head.bias, targets(x)) + model(x).square().mean()


LOSSES = {
    "chunks": linear_cross_entropy,
    "saved": by(SavedLinear.apply),
    "numpy": by(NumpyLinear.apply),
    "operator": by(operator),
    "mixed": mixed,
}


@pytest.mark.parametrize("loss", LOSSES)
@STAGES
@pytest.mark.world_size(1, 2)
def test_a_function_that_is_given_a_weight_trains_it(stage, loss):
    train_both(Net, LOSSES[loss], stage)


def tied(model, step, rank):
    tokens = torch.randint(7, (2, 4), generator=torch.Generator().manual_seed(10 * step + rank))
    hidden = torch.tanh(model.mix(model.embedding(tokens).cumsum(1))).flatten(0, 1)
    return LinearCrossEntropy.apply(hidden, model.head.weight, model.head.bias, tokens.flatten())


@STAGES
@pytest.mark.world_size(2)
def test_a_fused_loss_and_an_embedding_share_a_weight(stage):
    train_both(Language, tied, stage)


@STAGES
@pytest.mark.world_size(2)
def test_gradients_of_a_fused_loss_add_up_and_are_scaled(stage):
    """Accumulation: the loss's own gradients are scaled by what comes from above, as autograd's are."""
    engine, model = engine_of(build(Net), stage, gradient_accumulation_steps=2), build(Net)
    for micro in range(2):
        engine.backward(3 * linear_cross_entropy(engine, micro, dist.get_rank()))
        (1.5 * mean_over_ranks(linear_cross_entropy, model, micro)).backward()
        if micro == 0:
            engine.step()
    assert_same_gradients(engine.module, model)


def detached(model, step, rank):
    x = data(step, rank, 7, 4)
    return LinearCrossEntropy.apply(model.encode(x), model.head.weight.data, model.head.bias, targets(x))


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_weight_that_is_given_as_data_is_a_constant(stage):
    """As in plain PyTorch: the value is right, and the weight has no gradient of it."""
    engine, model = train_both(Net, detached, stage)
    engine.backward(detached(engine, 0, dist.get_rank()))
    assert zerofunc.full_gradients(engine.module)["head.weight"] is None


class InPlace(torch.autograd.Function):
    """Adds the weight's gradient to a buffer by itself, as Megatron's fused accumulation does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, slope):
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad.addmm_(slope.t(), x)
        return slope @ weight, None


@STAGES
@pytest.mark.world_size(2)
def test_a_gradient_buffer_on_a_parameter_stays_the_callers(stage):
    """What a Function puts aside on a parameter is this rank's own, in full: attributes of parameters are kept."""

    def loss(model, rank):
        return InPlace.apply(model.encode(data(0, rank)), model.head.weight).square().mean()

    engine, model = engine_of(build(Net), stage), build(Net)
    for module in (engine.module, model):
        module.head.weight.main_grad = torch.zeros(3, 5, dtype=torch.float64)
    engine.backward(loss(engine, dist.get_rank()))
    loss(model, dist.get_rank()).backward()
    torch.testing.assert_close(engine.module.head.weight.main_grad, model.head.weight.main_grad)


def linear_kernel(weight: nn.Parameter) -> int:
    return weight.data_ptr()


@STAGES
@pytest.mark.world_size(2)
def test_a_kernel_that_takes_an_address_works_inside_gathered(stage):
    engine = engine_of(build(Net), stage)
    weight = engine.module.head.weight
    if stage == 3:
        with pytest.raises(RuntimeError, match=r"data_ptr\(\) of parameter 'head\.weight'.*zerofunc\.gathered"):
            linear_kernel(weight)
    with zerofunc.gathered(engine.module):
        assert linear_kernel(weight)


def compiled(part):
    """A loss with one part compiled: all of it, the module, or what follows the module."""

    def distance(y, x):
        return (y - x[:, :3].sin()).square().mean()

    def whole(model, x):
        return distance(model(x), x)

    def of_module(model, x):
        return distance(torch.compile(model)(x), x)

    def of_output(model, x):
        return torch.compile(distance)(model(x), x)

    run = {"loss": torch.compile(whole), "module": of_module, "output": of_output}[part]

    def loss(model, step, rank):
        return run(getattr(model, "module", model), data(step, rank))

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("part", ["loss", "module", "output"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.world_size(2, timeout_s=400)
def test_compiled_code_trains(stage, part):
    """At stage 3 the graph is broken wherever a parameter is read."""
    engine, model = engine_of(build(Net), stage, zerofunc={"timeout_s": 200}), build(Net)
    optimizer, loss = adamw(model), compiled(part)
    for step in range(2):
        engine.backward(loss(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, fit, step)
        assert_same(engine, model)
