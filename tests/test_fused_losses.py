"""Custom autograd.Functions and fused losses that are handed a raw weight: their gradients train as any other."""

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn

import zerofunc
from reference import STAGES, assert_same_gradients, build, data, engine_of, mean_over_ranks, train_both


class LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy of ``hidden @ weight.T`` in chunks, which computes its gradients in the forward.

    The logits of all samples are never there at once.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets):
        total = hidden.new_zeros(())
        d_hidden, d_weight, d_bias = torch.empty_like(hidden), torch.zeros_like(weight), torch.zeros_like(bias)
        for rows in torch.arange(len(hidden)).split(2):
            logits = torch.addmm(bias, hidden[rows], weight.t())
            total += F.cross_entropy(logits, targets[rows], reduction="sum")
            slope = (logits.softmax(-1) - F.one_hot(targets[rows], len(bias))) / len(hidden)
            d_hidden[rows] = slope @ weight
            d_weight.addmm_(slope.t(), hidden[rows])
            d_bias += slope.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        return total / len(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return *(saved * gradient for saved in ctx.saved_tensors), None


class Scale(torch.autograd.Function):
    """A product with a raw parameter, whose backward reads it again."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.ones(6))

    def hidden(self, x):
        return Scale.apply(torch.tanh(self.first(x)), self.scale)


def fused(model, step, rank):
    x = data(step, rank)
    targets = (x.abs() * 4).long().sum(-1) % 5
    module = getattr(model, "module", model)
    return LinearCrossEntropy.apply(module.hidden(x), module.head.weight, module.head.bias, targets)


def unfused(model, step, rank):
    x = data(step, rank)
    targets = (x.abs() * 4).long().sum(-1) % 5
    return F.cross_entropy(model.head(model.hidden(x)), targets)


@STAGES
@pytest.mark.world_size(1, 2)
def test_a_fused_loss_trains_as_in_one_process(stage):
    train_both(Classifier, fused, stage)


@STAGES
@pytest.mark.world_size(2)
def test_its_gradients_are_those_of_the_ordinary_loss(stage):
    engine, model = engine_of(build(Classifier), stage), build(Classifier)
    engine.backward(fused(engine, 0, dist.get_rank()))
    mean_over_ranks(unfused, model, 0).backward()
    assert_same_gradients(engine.module, model)


@STAGES
@pytest.mark.world_size(2)
def test_a_raw_weight_may_be_read_detached_and_in_parts(stage):
    """What a teacher's or a regulariser's code does."""

    def loss(model, step, rank):
        module = getattr(model, "module", model)
        first, second = module.head.weight.chunk(2, dim=1)
        frozen = module.head.weight.detach()
        penalty = (first @ second.t()).square().sum() + (module.head.weight * frozen).sum()
        return unfused(module, step, rank) + 0.01 * penalty

    train_both(Classifier, loss, stage, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.world_size(2, timeout_s=300)
def test_a_compiled_loss_trains_at_stages_0_to_2(stage):
    engine, model = engine_of(build(Classifier), stage), build(Classifier)
    engine.backward(torch.compile(unfused)(engine.module, 0, dist.get_rank()))
    mean_over_ranks(unfused, model, 0).backward()
    assert_same_gradients(engine.module, model)
    assert zerofunc.usage(engine.module).parameters == sum(p.numel() for p in model.parameters())
