"""Robust training: whatever a training loop does, the result is that of one process on all ranks' data."""

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zerofunc
from reference import (
    ADAMW,
    EVERY_STAGE,
    SGD,
    Branches,
    Language,
    Net,
    adamw,
    assert_same,
    assert_same_gradients,
    build,
    config,
    data,
    engine_of,
    fit,
    mean_over_ranks,
    step_reference,
    train_both,
)
from zerofunc.schedules import build_scheduler

# ---- which parameters take part ----------------------------------------------------------------------------------


@EVERY_STAGE
@pytest.mark.world_size(1, 2, 4)
def test_training_equals_one_process(stage):
    train_both(Net, fit, stage)


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_torch_style_training_equals_one_process(stage):
    model = build(Net)
    module = zerofunc.shard(build(Net), stage, page_bytes=160, resident_bytes=0)
    assert isinstance(module, Net)
    optimizer, expected = torch.optim.AdamW(zerofunc.shards(module).values(), **ADAMW), adamw(model)
    for step in range(3):
        fit(module, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        step_reference(model, expected, fit, step)
        assert_same(module, model)


def next_token(model, step, rank):
    tokens = (data(step, rank, 3, 6).abs() * 10).long() % 7
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_tied_weights_stay_one_parameter(stage):
    engine, _ = train_both(Language, next_token, stage)
    assert engine.module.head.weight is engine.module.embedding.weight
    assert list(zerofunc.shards(engine.module)) == ["embedding.weight", "mix.weight", "mix.bias", "head.bias"]


class HalfFrozen(Net):
    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)
        self.head.bias.requires_grad_(False)


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_frozen_parameters_stay(stage):
    engine, _ = train_both(HalfFrozen, fit, stage)
    assert set(zerofunc.shards(engine.module)) == {"middle.weight", "middle.bias", "head.weight"}
    assert torch.equal(engine.module.first.weight.detach().clone(), build(HalfFrozen).first.weight.detach())


class PartlyUnused(Net):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.also_unused = nn.Parameter(torch.ones(2))


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_unused_parameters_have_no_gradient_and_do_not_decay(stage):
    engine, model = engine_of(build(PartlyUnused), stage), build(PartlyUnused)
    optimizer = adamw(model)
    for step in range(2):
        engine.backward(fit(engine, step, dist.get_rank()))
        shards = zerofunc.shards(engine.module)
        assert [name for name in shards if shards[name].grad is None] == ["also_unused", "unused.weight", "unused.bias"]
        engine.step()
        step_reference(model, optimizer, fit, step)
        assert_same(engine, model)


def one_expert(model, step, rank):
    return model(data(step, rank), (step + rank) % 2).square().mean()


def an_expert_on_the_first_rank(model, step, rank):
    return model(data(step, rank), 0 if rank == 0 else None).square().mean()


@pytest.mark.parametrize("loss", [one_expert, an_expert_on_the_first_rank])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.world_size(1, 2)
def test_parameters_may_be_used_on_one_rank_only(stage, loss):
    train_both(Branches, loss, stage)


@pytest.mark.world_size(1, 2)
def test_ranks_may_take_different_branches_of_an_unsplit_module_at_stage_3():
    train_both(Branches, one_expert, 3, zerofunc={"unsplit": ["experts"]})


@EVERY_STAGE
@pytest.mark.world_size(2)
def test_ranks_may_differ_inside_gathered(stage):
    engine, model = engine_of(build(Branches), stage), build(Branches)
    optimizer = adamw(model)
    for step in range(3):
        with zerofunc.gathered(engine.module):
            engine.backward(an_expert_on_the_first_rank(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, an_expert_on_the_first_rank, step)
        assert_same(engine, model)


@pytest.mark.world_size(2)
def test_ranks_that_read_in_another_order_inside_gathered_agree_afterwards():
    engine, model = engine_of(build(Net), 3, zerofunc={"page_bytes": 160, "resident_bytes": 500}), build(Net)
    optimizer = adamw(model)
    for step in range(6):
        parameters = list(engine.module.parameters())
        with zerofunc.gathered(engine.module), torch.no_grad():
            for parameter in parameters if dist.get_rank() == 0 else reversed(parameters):
                parameter.sum()
        engine.backward(fit(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, fit, step)
        assert_same(engine, model)


def no_head_on_the_first_rank(model, step, rank):
    x = data(step, rank)
    return (model.encode(x) if rank == 0 else model(x)).square().mean()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.world_size(1, 2)
def test_a_rank_may_leave_out_the_last_layer(stage):
    train_both(Net, no_head_on_the_first_rank, stage)


def nothing_on_the_first_rank(model, step, rank):
    x = data(step, rank).requires_grad_()
    return x.sum() if rank == 0 else model(x).square().mean()


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_a_loss_may_reach_no_parameter_on_a_rank(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    with zerofunc.gathered(engine.module):
        engine.backward(nothing_on_the_first_rank(engine, 0, dist.get_rank()))
    mean_over_ranks(nothing_on_the_first_rank, model, 0).backward()
    assert_same_gradients(engine.module, model)


# ---- forwards, backwards and losses ---------------------------------------------------------------------------------


def several_forwards(model, step, rank):
    x, y = data(step, rank), data(step + 100, rank)
    return (model(x) * model(y)).mean() + model(x + y).square().mean()


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_several_forwards_and_one_backward(stage):
    train_both(Net, several_forwards, stage)


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_several_backwards_before_a_step_add_up(stage):
    engine, model = engine_of(build(Net), stage, gradient_accumulation_steps=2), build(Net)
    optimizer = adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        for micro in (2 * step, 2 * step + 1):
            for loss in (fit, several_forwards):
                engine.backward(loss(engine, micro, dist.get_rank()))
                (mean_over_ranks(loss, model, micro) / 2).backward()
            engine.step()
        optimizer.step()
        assert_same(engine, model)


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_several_losses_share_a_forward(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    rank = dist.get_rank()

    def losses(model, rank):
        y = model(data(0, rank))
        return y[:, 0].square().mean(), y[:, 1:].exp().mean()

    first, second = losses(engine, rank)
    engine.backward(first, retain_graph=True)
    engine.backward(second)
    mean_over_ranks(lambda model, step, rank: sum(losses(model, rank)), model, 0).backward()
    assert_same_gradients(engine.module, model)


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_a_retained_graph_is_run_twice(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    loss = fit(engine, 0, dist.get_rank())
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    (2 * mean_over_ranks(fit, model, 0)).backward()
    assert_same_gradients(engine.module, model)


def with_checkpoint(reentrant):
    def loss(model, step, rank):
        x = data(step, rank).requires_grad_()
        hidden = checkpoint(model.encode, x, use_reentrant=reentrant)
        return (model.head(hidden) + model.encode(x).sum() - x[:, :3].sin()).square().mean()

    return loss


@pytest.mark.parametrize("reentrant", [False, True])
@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_activations_may_be_checkpointed(stage, reentrant):
    train_both(Net, with_checkpoint(reentrant), stage, steps=2)


def with_a_gradient_inside(model, step, rank):
    x = data(step, rank).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().mean() + torch.func.jvp(model, (x.detach(),), (x.detach().cos(),))[1].square().mean()


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_a_loss_may_be_made_of_derivatives(stage):
    train_both(Net, with_a_gradient_inside, stage, steps=2)


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


class Critic(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def critic_loss(critic, real, fake):
    return F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()


def generator_loss(critic, fake):
    return F.softplus(-critic(fake)).mean()


@pytest.mark.parametrize("freeze", [False, True])
@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_a_gan_of_two_engines_trains(stage, freeze):
    generator, critic = build(Generator, 1), build(Critic, 2)
    generator_optimizer, critic_optimizer = adamw(generator), adamw(critic)
    first, second = engine_of(build(Generator, 1), stage), engine_of(build(Critic, 2), stage)
    for step in range(3):
        real, noise = data(step, dist.get_rank()).cos(), data(step + 50, dist.get_rank())
        second.backward(critic_loss(second, real, first(noise)))
        second.step()
        second.module.requires_grad_(not freeze)
        first.backward(generator_loss(second, first(noise)))
        first.step()
        second.module.requires_grad_(True)
        second.zero_grad()

        critic_optimizer.zero_grad()
        reals, noises = (
            torch.cat([data(step + offset, rank) for rank in range(dist.get_world_size())]) for offset in (0, 50)
        )
        critic_loss(critic, reals.cos(), generator(noises)).backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        generator_loss(critic, generator(noises)).backward()
        generator_optimizer.step()
        assert_same(first, generator)
        assert_same(second, critic)


# ---- the module between steps ---------------------------------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("shift", torch.randn(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x):
        self.seen += len(x)
        return self.head(torch.tanh(self.norm(self.first(x)))) + self.shift


class EvalBuffered(Buffered):
    def __init__(self):
        super().__init__()
        self.eval()


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_buffers_are_those_of_the_module(stage):
    engine, model = train_both(EvalBuffered, fit, stage)
    buffers = dict(engine.module.named_buffers())
    assert buffers.pop("seen").item() == 3 * 4
    for name, buffer in buffers.items():
        assert torch.equal(buffer, model.get_buffer(name)), name


@EVERY_STAGE
@pytest.mark.world_size(2)
def test_every_rank_begins_with_the_values_of_the_first_rank(stage):
    engine, model = engine_of(build(Buffered, seed=dist.get_rank()), stage), build(Buffered, seed=0)
    assert_same(engine, model)
    for name, buffer in engine.module.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name


def generate(model, length=4):
    tokens = torch.tensor([[1, 2], [3, 4]])
    for _ in range(length):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    return model(tokens)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_training_goes_on_after_evaluation_and_generation(stage, mode):
    engine, model = engine_of(build(Language), stage), build(Language)
    optimizer = adamw(model)
    for step in range(3):
        engine.eval()
        with mode():
            torch.testing.assert_close(generate(engine), generate(model))
            torch.testing.assert_close(next_token(engine, 9, 0), next_token(model, 9, 0))
        engine.train()
        loss = next_token(engine, step, dist.get_rank())
        with mode():
            generate(engine)
        engine.backward(loss)
        engine.step()
        step_reference(model, optimizer, next_token, step)
    assert_same(engine, model)


def by_attribute(model, step, rank):
    module = getattr(model, "module", model)
    hidden = module.encode(data(step, rank))
    return (F.linear(hidden, module.head.weight) + 2 * module.head.bias).square().mean() + module.first.weight.sum()


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_weights_read_by_attribute_and_other_methods_train(stage):
    train_both(Net, by_attribute, stage)


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_the_engine_has_the_attributes_of_its_module(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    torch.testing.assert_close(engine.encode(data(0, 0)), model.encode(data(0, 0)))
    assert engine.head is engine.module.head
    with pytest.raises(AttributeError, match="no_such_thing"):
        engine.no_such_thing  # noqa: B018


def metadata(module):
    return {
        name: (p.shape, p.size(), p.numel(), p.dim(), len(p), p.dtype, p.stride(), p.is_contiguous(), p.device,
               p.requires_grad, p.is_leaf, p.element_size())
        for name, p in module.named_parameters()
    }  # fmt: skip


class Witness(Net):
    """Notes the metadata of its parameters inside forward and backward."""

    def forward(self, x):
        self.notes.append(metadata(self))
        hidden = self.encode(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.notes.append(metadata(self)))
        return self.head(hidden)


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_metadata_of_parameters_is_logical_at_all_times(stage):
    expected = metadata(build(Witness))
    engine = engine_of(build(Witness), stage)
    engine.module.notes = notes = [metadata(engine.module)]
    for step in range(2):
        loss = fit(engine, step, dist.get_rank())
        notes.append(metadata(engine.module))
        engine.backward(loss)
        notes.append(metadata(engine.module))
        engine.step()
        notes.append(metadata(engine.module))
    assert len(notes) == 11
    for note in notes:
        assert note == expected


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_a_step_inside_gathered_is_seen_inside_and_outside(stage):
    engine, model = engine_of(build(Net), stage), build(Net)
    optimizer = adamw(model)
    for step in range(2):
        with zerofunc.gathered(engine.module):
            engine.backward(fit(engine, step, dist.get_rank()))
            engine.step()
            step_reference(model, optimizer, fit, step)
            torch.testing.assert_close(engine(data(9, 0)), model(data(9, 0)))
        assert_same(engine, model)


# ---- clipping --------------------------------------------------------------------------------------------


@EVERY_STAGE
@pytest.mark.world_size(1, 2, 4)
def test_clipping_is_by_the_norm_of_the_mean_gradient(stage):
    limit = 0.05
    engine = engine_of(build(Net), stage, gradient_clipping=limit, gradient_accumulation_steps=2)
    model = build(Net)
    optimizer = adamw(model)
    assert engine.get_global_grad_norm() is None
    for step in range(3):
        optimizer.zero_grad()
        for micro in (2 * step, 2 * step + 1):
            engine.backward(fit(engine, micro, dist.get_rank()))
            engine.step()
            (mean_over_ranks(fit, model, micro) / 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        assert norm > limit
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-9)
        assert_same(engine, model)


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_the_norm_is_known_without_clipping(stage):
    engine, model = engine_of(build(PartlyUnused), stage), build(PartlyUnused)
    engine.backward(fit(engine, 0, dist.get_rank()))
    engine.step()
    mean_over_ranks(fit, model, 0).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-9)


class MixedTypes(nn.Module):
    """Parameters in two data types, one of them without a gradient on its page, and a sparse gradient."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 3, sparse=True)
        self.low, self.high, self.unused = nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def double(self):
        super().double().low.float()
        return self

    def forward(self, x):
        embedded = self.embedding((x.abs() * 4).long() % 9).sum(1)
        return self.high(torch.tanh(self.low(embedded.float())).double())


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_data_types_may_be_mixed_and_gradients_sparse(stage):
    plain = {"type": "SGD", "params": {"lr": 0.5}}
    engine = engine_of(build(MixedTypes), stage, optimizer=plain, gradient_clipping=0.2)
    model = build(MixedTypes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        engine.backward(fit(engine, step, dist.get_rank()))
        engine.step()
        optimizer.zero_grad()
        mean_over_ranks(fit, model, step).backward()
        model.embedding.weight.grad = model.embedding.weight.grad.to_dense()
        used = [p.grad.double() for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(used).item()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= min(0.2 / (norm + 1e-6), 1.0)
        optimizer.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
        assert_same(engine, model, rtol=1e-5, atol=1e-6)
    assert engine.module.low.weight.dtype == torch.float32


# ---- the caller's optimizer and schedule ----------------------------------------------------------------------------


def groups_of(model):
    return [
        {"params": list(model.head.parameters()), "lr": 0.2},
        {"params": [model.first.weight, model.middle.weight], "weight_decay": 0.1},
        {"params": [model.first.bias, model.middle.bias]},
    ]


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train_with(engine, model, optimizer, schedule=None, steps=3):
    for step in range(steps):
        engine.backward(fit(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, fit, step)
        if schedule is not None:
            schedule.step()
            assert engine.get_lr() == pytest.approx([group["lr"] for group in optimizer.param_groups])
        assert_same(engine, model)


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_an_optimizer_with_groups_moves_to_the_shards(stage):
    module, model = build(Net), build(Net)
    given = momentum(groups_of(module))
    engine, optimizer, _, _ = zerofunc.initialize(module, config(stage), optimizer=given)
    assert optimizer is given is engine.optimizer
    assert engine.get_lr() == [0.2, 0.05, 0.05]
    train_with(engine, model, momentum(groups_of(model)))


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_an_optimizer_may_be_a_function_of_groups(stage):
    module, model = build(Net), build(Net)
    engine, optimizer, _, _ = zerofunc.initialize(
        module, config(stage), optimizer=momentum, model_parameters=groups_of(module)
    )
    assert isinstance(optimizer, torch.optim.SGD)
    train_with(engine, model, momentum(groups_of(model)))


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_parameters_that_are_not_given_to_the_optimizer_stay(stage):
    module, model = build(Net), build(Net)
    engine, _, _, _ = zerofunc.initialize(
        module, config(stage), optimizer=momentum, model_parameters=module.head.named_parameters()
    )
    train_with(engine, model, momentum(model.head.parameters()))


def halve(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


@pytest.mark.parametrize("as_function", [False, True])
@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_a_schedule_of_the_caller_is_followed(stage, as_function):
    module, model = build(Net), build(Net)
    given = momentum(module.parameters())
    engine, _, _, scheduler = zerofunc.initialize(
        module, config(stage), optimizer=given, lr_scheduler=halve if as_function else halve(given)
    )
    assert scheduler is engine.lr_scheduler
    optimizer = momentum(model.parameters())
    train_with(engine, model, optimizer, halve(optimizer))
    assert engine.get_lr() == [0.05 / 8]


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_a_schedule_of_the_config_is_followed(stage):
    kind, params = "WarmupLR", {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}
    engine = engine_of(build(Net), stage, scheduler={"type": kind, "params": params}, optimizer=SGD)
    model = build(Net)
    optimizer = torch.optim.SGD(model.parameters(), **SGD["params"])
    train_with(engine, model, optimizer, build_scheduler(optimizer, kind, params))


# ---- meshes ---------------------------------------------------------------------------------------------------------


@EVERY_STAGE
@pytest.mark.world_size(4)
def test_a_mesh_of_two_axes_shards_over_one_and_replicates_over_the_other(stage):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    limit = 0.05
    engine, _, _, _ = zerofunc.initialize(
        build(Net, seed=dist.get_rank()), config(stage, gradient_clipping=limit), mesh=mesh
    )
    model = build(Net)
    optimizer = adamw(model)
    for step in range(3):
        engine.backward(fit(engine, step, dist.get_rank()))
        engine.step()
        optimizer.zero_grad()
        mean_over_ranks(fit, model, step).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-9)
        assert_same(engine, model)
    part = sum(shard.numel() for shard in zerofunc.shards(engine.module).values())
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert part == whole if stage == 0 else part < 0.6 * whole


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.world_size(4)
def test_a_rank_of_a_mesh_may_leave_out_the_last_layer(stage):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    engine, _, _, _ = zerofunc.initialize(build(Net), config(stage), mesh=mesh)
    model = build(Net)
    optimizer = adamw(model)
    for step in range(2):
        engine.backward(no_head_on_the_first_rank(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, no_head_on_the_first_rank, step)
        assert_same(engine, model)
