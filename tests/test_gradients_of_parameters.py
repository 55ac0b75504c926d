"""`grad` and `data` of a module's parameters and of its shards, as plain PyTorch has them."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofunc
from reference import STAGES, Net, assert_same, build, data, engine_of, fit

SMALL = {"page_bytes": 160, "resident_bytes": 0, "timeout_s": 20}
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def mean_data(step, *shape):
    """What two ranks' data come to."""
    return (data(step, 0, *shape) + data(step, 1, *shape)) / 2


class Both:
    """A sharded module and a plain one that sees the data of all ranks, each with its optimizer."""

    def __init__(self, stage, make=Net):
        self.module, self.plain = zerofunc.shard(build(make), stage, **SMALL), build(make)
        self.optimizer = torch.optim.SGD(zerofunc.shards(self.module).values(), lr=0.1)
        self.reference = torch.optim.SGD(self.plain.parameters(), lr=0.1)

    def backward(self, step=0):
        fit(self.module, step, dist.get_rank()).backward()
        size = dist.get_world_size()
        (sum(fit(self.plain, step, rank) for rank in range(size)) / size).backward()

    def parameters(self):
        return zip(self.module.parameters(), self.plain.parameters(), strict=True)

    def step(self):
        self.optimizer.step()
        self.reference.step()
        assert_same(self.module, self.plain)

    def assert_same_gradients(self):
        for mine, theirs in self.parameters():
            assert (mine.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(mine.grad.clone(), theirs.grad)


# ---- reading and clearing ----------------------------------------------------------------------------------------


@STAGES
@pytest.mark.world_size(1, 2, 3)
def test_a_parameters_gradient_is_the_full_mean(stage):
    both = Both(stage)
    both.assert_same_gradients()
    both.backward()
    both.assert_same_gradients()
    both.backward(1)
    both.assert_same_gradients()
    both.step()
    both.optimizer.zero_grad()
    both.reference.zero_grad()
    both.assert_same_gradients()


def by_module(module):
    module.zero_grad()


def by_submodule(module):
    module.middle.zero_grad()


def by_parameter(module):
    module.head.weight.grad = None


def in_place(module):
    for parameter in module.parameters():
        parameter.grad.zero_()


@pytest.mark.parametrize("clear", [by_module, by_submodule, by_parameter, in_place])
@STAGES
@pytest.mark.world_size(2)
def test_what_clears_gradients_in_pytorch_clears_them(stage, clear):
    both = Both(stage)
    both.backward()
    clear(both.module)
    clear(both.plain)
    both.assert_same_gradients()
    both.backward(1)
    both.assert_same_gradients()
    both.step()


@STAGES
@pytest.mark.world_size(2)
def test_zero_grad_between_micro_steps_clears_what_is_not_reduced(stage):
    engine, plain = engine_of(build(Net), stage, optimizer=SGD, gradient_accumulation_steps=2), build(Net)
    engine.backward(fit(engine, 5, dist.get_rank()))
    engine.module.zero_grad()
    engine.step()
    engine.backward(fit(engine, 0, dist.get_rank()))
    engine.step()
    (sum(fit(plain, 0, rank) for rank in range(2)) / 4).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same(engine, plain)


@STAGES
@pytest.mark.world_size(2)
def test_gradients_that_wait_for_the_boundary_are_averaged_to_be_read(stage):
    engine, plain = engine_of(build(Net), stage, optimizer=SGD, gradient_accumulation_steps=2), build(Net)
    for step in range(2):
        engine.backward(fit(engine, step, dist.get_rank()))
        (sum(fit(plain, step, rank) for rank in range(2)) / 4).backward()
        for mine, theirs in zip(engine.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.norm(), theirs.grad.norm())
            torch.testing.assert_close(mine.grad.clone(), theirs.grad)
            theirs.grad.mul_(2)
            mine.grad.mul_(2)
        engine.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same(engine, plain)
    assert all(parameter.grad is None for parameter in engine.parameters())


@STAGES
@pytest.mark.world_size(2)
def test_a_gradient_that_is_kept_outlives_zero_grad(stage):
    both = Both(stage)
    both.backward()
    kept = [parameter.grad for parameter in both.module.parameters()]
    both.module.zero_grad()
    for gradient, parameter in zip(kept, both.plain.parameters(), strict=True):
        torch.testing.assert_close(gradient.clone(), parameter.grad)
    for gradient, parameter in zip(kept, both.module.parameters(), strict=True):
        parameter.grad = gradient
    both.assert_same_gradients()
    both.step()


@pytest.mark.world_size(2)
def test_a_gradient_cleared_before_it_was_averaged_cannot_be_read():
    both = Both(3)
    weight = both.module.first.weight
    weight.grad = torch.ones_like(weight)
    kept, weight.grad = weight.grad, None
    with pytest.raises(RuntimeError, match=r"'first\.weight' was cleared or replaced before it was averaged.*clone"):
        kept.norm()


# ---- assigning ---------------------------------------------------------------------------------------------------


@STAGES
@pytest.mark.world_size(2)
def test_an_assigned_gradient_is_averaged_and_used(stage):
    both = Both(stage)
    both.backward()
    for number, (mine, theirs) in enumerate(both.parameters()):
        if number % 2:
            mine.grad = data(number, dist.get_rank(), *mine.shape)
            theirs.grad = mean_data(number, *mine.shape)
    both.step()


@STAGES
@pytest.mark.world_size(2)
def test_an_assigned_gradient_is_what_an_engine_steps_with(stage):
    engine, plain = engine_of(build(Net), stage, optimizer=SGD), build(Net)
    for number, (mine, theirs) in enumerate(zip(engine.parameters(), plain.parameters(), strict=True)):
        mine.grad = data(number, dist.get_rank(), *mine.shape)
        theirs.grad = mean_data(number, *mine.shape)
    engine.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same(engine, plain)


@STAGES
@pytest.mark.world_size(2)
def test_gradients_are_changed_in_place_as_in_pytorch(stage):
    both = Both(stage)
    both.backward()
    for mine, theirs in both.parameters():
        for gradient in (mine.grad, theirs.grad):
            gradient.mul_(3).clamp_(-0.5, 0.5)
        mine.grad = mine.grad - 0.1 * mine.detach()
        theirs.grad = theirs.grad - 0.1 * theirs.detach()
    both.assert_same_gradients()
    both.step()


def rows(gradient):
    gradient[0] = 1.0


def by_mask(gradient):
    gradient.masked_fill_(gradient < 0, 0.5)


def by_copy(gradient):
    gradient.copy_(2 * gradient)


def by_view(gradient):
    gradient.view(-1)[1:].mul_(2)


def centred(gradient):
    gradient.sub_(gradient.mean())


def old_style(gradient):
    gradient.data.div_(gradient.data.norm(2))


@pytest.mark.slow
@pytest.mark.parametrize("change", [rows, by_mask, by_copy, by_view, centred, old_style])
@STAGES
@pytest.mark.world_size(2, 3)
def test_whatever_writes_into_a_gradient_writes_into_what_is_stepped_with(stage, change):
    both = Both(stage)
    both.backward()
    for mine, theirs in both.parameters():
        for gradient in (mine.grad, theirs.grad):
            change(gradient)
        mine.grad += 0.1
        theirs.grad += 0.1
    both.assert_same_gradients()
    both.step()


@STAGES
@pytest.mark.world_size(2)
def test_what_differs_between_ranks_is_averaged_when_it_is_written(stage):
    both = Both(stage)
    both.backward()
    for number, (mine, theirs) in enumerate(both.parameters()):
        mine.grad.add_(data(number, dist.get_rank(), *mine.shape))
        theirs.grad.add_(mean_data(number, *mine.shape))
    both.step()


@STAGES
@pytest.mark.world_size(2)
def test_training_by_hand(stage):
    both = Both(stage)
    for step in range(2):
        both.backward(step)
        with torch.no_grad():
            for pair in both.parameters():
                for parameter in pair:
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None
        assert_same(both.module, both.plain)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.world_size(1, 2)
def test_a_module_is_compiled_where_it_has_gradients(stage):
    both = Both(stage)
    module = both.module
    both.backward()
    both.module = torch.compile(module, backend="aot_eager")
    for step in range(1, 3):
        both.backward(step)
        both.assert_same_gradients()
    torch._dynamo.reset()
    both.module = module
    both.step()


@STAGES
@pytest.mark.world_size(2)
def test_a_gradient_of_another_shape_is_refused(stage):
    module = Both(stage).module
    with pytest.raises(RuntimeError, match=r"grad of 'first\.weight' was given shape \(3,\); expected \(6, 4\)"):
        module.first.weight.grad = torch.ones(3).double()


# ---- norms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("of", ["parameters", "shards"])
@STAGES
@pytest.mark.world_size(2)
def test_clipping_by_pytorch_is_by_the_norm_over_all_ranks(stage, of, norm_type):
    both = Both(stage)
    both.backward()
    mine = list(both.module.parameters() if of == "parameters" else zerofunc.shards(both.module).values())
    clip = torch.nn.utils.clip_grad_norm_
    for foreach in (True, False):
        found = clip(mine, 0.1, norm_type, foreach=foreach)
        expected = clip(both.plain.parameters(), 0.1, norm_type, foreach=foreach)
        torch.testing.assert_close(found, expected)
    both.step()


@STAGES
@pytest.mark.world_size(2)
def test_norms_of_shards_are_those_of_parameters(stage):
    both = Both(stage)
    mine, theirs = list(zerofunc.shards(both.module).values()), list(both.plain.parameters())
    if stage > 0:
        with pytest.raises(RuntimeError, match=r"no derivative goes through it; use zerofunc\.vdot"):
            mine[0].norm()
    mine, theirs = [shard.detach() for shard in mine], [parameter.detach() for parameter in theirs]
    torch.testing.assert_close(torch._foreach_norm(mine), torch._foreach_norm(theirs))
    for shard, parameter in zip(mine, theirs, strict=True):
        torch.testing.assert_close(shard.norm(), parameter.norm())
        torch.testing.assert_close(torch.linalg.vector_norm(shard), parameter.norm())
    torch.testing.assert_close(torch.nn.utils.get_total_norm(mine), torch.nn.utils.get_total_norm(theirs))


@STAGES
@pytest.mark.world_size(2)
def test_a_grad_scaler_sees_an_infinity_of_any_rank(stage):
    module = Both(stage).module
    optimizer = torch.optim.SGD(zerofunc.shards(module).values(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    scaler.scale(fit(module, 0, dist.get_rank())).backward()
    part = zerofunc.shards(module)["first.weight"].grad
    with torch.no_grad():
        if (stage == 0 or dist.get_rank() == 0) and part.numel():
            part[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    for parameter, value in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter.detach().clone(), value)


@STAGES
@pytest.mark.world_size(2)
def test_a_parameter_made_of_a_parameter_is_an_ordinary_one(stage):
    weight = Both(stage).module.first.weight
    made = nn.Parameter(weight)
    assert isinstance(made, nn.Parameter) and made.requires_grad and made.grad is None
    assert torch.equal(made.detach() * 1, weight.detach() * 1)
    if stage < 3:
        (2 * made).sum().backward()
        assert torch.equal(made.grad, torch.full_like(made, 2)) and weight.grad is None


# ---- data --------------------------------------------------------------------------------------------------------


def by_data(shards):
    for shard in shards.values():
        shard.data = shard.data * 2


def by_vector(shards):
    parts = list(shards.values())
    torch.nn.utils.vector_to_parameters(2 * torch.nn.utils.parameters_to_vector(parts).detach(), parts)


@pytest.mark.parametrize("change", [by_data, by_vector])
@STAGES
@pytest.mark.world_size(2)
def test_a_shard_whose_data_is_assigned_is_trained(stage, change):
    both = Both(stage)
    change(zerofunc.shards(both.module))
    with torch.no_grad():
        for parameter in both.plain.parameters():
            parameter.mul_(2)
    both.backward()
    both.step()


@STAGES
@pytest.mark.world_size(2)
def test_data_of_a_parameter_of_another_type_is_refused_at_once(stage):
    module = Both(stage).module
    with pytest.raises(RuntimeError, match=r"'first\.weight' is sharded.*\.half\(\)"):
        module.half()


@STAGES
@pytest.mark.world_size(2)
def test_shards_are_copied_and_pickled_as_plain_tensors(stage):
    shard = zerofunc.shards(Both(stage).module)["first.weight"]
    for one in (copy.deepcopy(shard), pickle.loads(pickle.dumps(shard))):
        assert type(one) is torch.Tensor and torch.equal(one, shard.detach())
    assert type(shard * 2) is torch.Tensor and type(nn.functional.relu(shard)) is torch.Tensor
