"""Tests of optimizers over shards: whole parameters on their owners equal one process, and groups come along."""

import logging
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofunc
from reference import STAGES, Net, assert_same, build, config, engine_of, fit, mean_over_ranks
from zerofunc.optimizers import logical
from zerofunc.optimizers.logical import LogicalOptimizer
from zerofunc.optimizers.sharded import shard_optimizer
from zerofunc.ranks.collectives import DivergenceError

MUON = {"type": "Muon", "params": {"lr": 0.01, "adam_lr": 0.02, "weight_decay": 0.1}}


def matrices(model):
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


def rest(model):
    return [parameter for parameter in model.parameters() if parameter.dim() != 2]


def muon_and_adamw(model):
    adamw = torch.optim.AdamW(rest(model), lr=0.02, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    return [torch.optim.Muon(matrices(model), lr=0.01, weight_decay=0.1), adamw]


class Whitening(torch.optim.Optimizer):
    """A small Shampoo, as users write one: it needs matrices, and counts its steps in the group."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for param in [param for param in group["params"] if param.grad is not None]:
                gradient = param.grad.reshape(len(param), -1)
                gram = self.state[param].setdefault("gram", torch.eye(len(param)).to(gradient))
                gram += gradient @ gradient.T
                step = torch.linalg.solve(torch.linalg.cholesky(gram), gradient)
                param -= group["lr"] / group["count"] * step.view_as(param)


def train(engine, model, optimizers, steps=range(3), loss=fit):
    for step in steps:
        engine.backward(loss(engine, step, dist.get_rank()))
        engine.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean_over_ranks(loss, model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_same(engine, model)


# ---- equal to one process -------------------------------------------------------------------------------------------


@STAGES
@pytest.mark.world_size(1, 2)
def test_muon_by_name_equals_muon_and_adamw_in_one_process(stage):
    engine, model = engine_of(build(Net), stage, optimizer=MUON), build(Net)
    assert isinstance(engine.optimizer, LogicalOptimizer)
    train(engine, model, muon_and_adamw(model))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.world_size(2)
def test_the_callers_muon_and_its_schedule_are_followed(stage):
    module, model = build(Net), build(Net)

    def groups(net):
        return [{"params": [net.first.weight], "lr": 0.05}, {"params": [net.middle.weight, net.head.weight]}]

    given, expected = torch.optim.Muon(groups(module)), torch.optim.Muon(groups(model))
    schedule, expected_schedule = (torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (given, expected))
    engine, optimizer, _, found = zerofunc.initialize(module, config(stage), given, lr_scheduler=schedule)
    assert found is schedule and optimizer.optimizer is given
    for step in range(3):
        train(engine, model, [expected], [step])
        expected_schedule.step()
        assert engine.get_lr() == [group["lr"] for group in expected.param_groups] == schedule.get_last_lr()


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, Whitening])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_other_optimizers_of_whole_parameters_equal_one_process(stage, kind, monkeypatch):
    monkeypatch.setattr(logical, "ROUND_NUMEL", 25)
    module, model = build(Net), build(Net)
    engine, optimizer, _, _ = zerofunc.initialize(module, config(stage), optimizer=kind)
    train(engine, model, [kind(model.parameters())])
    assert optimizer.param_groups[0].get("count", 3) == 3


@pytest.mark.world_size(2)
def test_a_name_of_torch_that_needs_whole_parameters_is_built():
    engine, model = engine_of(build(Net), 2, optimizer={"type": "Adafactor", "params": {"lr": 0.1}}), build(Net)
    train(engine, model, [torch.optim.Adafactor(model.parameters(), lr=0.1)])


@pytest.mark.world_size(2)
def test_an_optimizer_over_the_shards_of_a_module_needs_no_engine():
    module, model = zerofunc.shard(build(Net), 3, page_bytes=160), build(Net)
    optimizer = shard_optimizer(torch.optim.Muon(matrices(module)))
    expected = torch.optim.Muon(matrices(model))
    for step in range(2):
        loss = optimizer.step(lambda step=step: _backward(module, optimizer, fit(module, step, dist.get_rank())))
        assert loss.requires_grad
        expected.zero_grad()
        mean_over_ranks(fit, model, step).backward()
        expected.step()
        assert_same(module, model)


def _backward(module, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.world_size(4)
def test_muon_equals_one_process_where_shards_are_replicated(stage):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module, model = build(Net), build(Net)
    engine = zerofunc.initialize(module, config(stage, optimizer=MUON), mesh=mesh)[0]
    train(engine, model, muon_and_adamw(model))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.world_size(1)
def test_a_mark_on_a_parameter_decides_whether_muon_takes_it(stage):
    module = build(Net)
    module.head.weight.use_muon = False
    engine = engine_of(module, stage, optimizer=MUON)
    shards, muon = zerofunc.shards(module), engine.optimizer.param_groups[0]
    assert [id(shard) for shard in muon["params"]] == [id(shards[name]) for name in ("first.weight", "middle.weight")]


# ---- who keeps what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.world_size(2)
def test_each_rank_keeps_the_state_of_its_parameters_and_any_may_read_it(stage):
    engine, model = engine_of(build(Net), stage, optimizer=MUON), build(Net)
    expected = muon_and_adamw(model)
    train(engine, model, expected)
    optimizer, shards = engine.optimizer, zerofunc.shards(engine.module)
    named = dict(model.named_parameters())
    whole = [name for name, parameter in named.items() if parameter.dim() == 2]
    kept = torch.tensor(
        sum(optimizer.state[shards[n]]["momentum_buffer"].numel() for n in whole if shards[n] in optimizer.state)
    )
    total = sum(named[name].numel() for name in whole)
    assert 0.25 * total <= kept <= 0.75 * total
    dist.all_reduce(kept)
    assert kept == total
    for name in whole:
        found = optimizer.full_state(shards[name])["momentum_buffer"]
        torch.testing.assert_close(found, expected[0].state[named[name]]["momentum_buffer"])
    assert optimizer.state[shards["first.bias"]]["exp_avg"].shape == shards["first.bias"].shape
    assert not optimizer.is_whole(shards["first.bias"])


@pytest.mark.world_size(2)
def test_training_goes_on_from_a_state_dict():
    engine, model = engine_of(build(Net), 3, optimizer=MUON), build(Net)
    expected = muon_and_adamw(model)
    train(engine, model, expected)
    other = engine_of(build(Net), 3, optimizer=MUON)
    other.module.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    other.optimizer.load_state_dict(engine.optimizer.state_dict())
    other.optimizer.param_groups[0]["lr"] = expected[0].param_groups[0]["lr"] = 0.3
    train(other, model, expected, [3, 4])


@pytest.mark.world_size(2)
def test_ranks_that_step_different_parameters_raise():
    engine = engine_of(build(Net), 3, optimizer=MUON)
    engine.backward(fit(engine, 0, dist.get_rank()))
    if dist.get_rank() == 1:
        zerofunc.shards(engine.module)["head.weight"].grad = None
    with pytest.raises(DivergenceError, match="rank 0: step of .*head.weight as whole parameters"):
        engine.optimizer.step()


@pytest.mark.world_size(2)
def test_owners_step_several_parameters_at_a_time_but_not_all(monkeypatch):
    taken = []
    gathered = logical._gathered
    monkeypatch.setattr(logical, "_gathered", lambda wholes: taken.append(gathered(wholes)) or taken[-1])
    monkeypatch.setattr(logical, "ROUND_NUMEL", 40)
    module = zerofunc.shard(nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(12)]), 2, page_bytes=64)
    optimizer = shard_optimizer(torch.optim.Muon(module.parameters()))
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert [len(full) for full in taken if full] == [2, 2, 2], "6 of 12 parameters, 2 at a time"


# ---- the caller's optimizer -----------------------------------------------------------------------------------------


def momentum(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@STAGES
@pytest.mark.world_size(2)
def test_state_of_a_client_optimizer_comes_along(stage):
    def net():
        model = build(Net)
        optimizers = [momentum(model.first.parameters()), torch.optim.Adagrad(model.head.parameters(), 0.1, 0, 0, 0.5)]
        optimizers.append(torch.optim.Muon([model.middle.weight]))
        for optimizer in optimizers:
            model(torch.ones(1, 4).double()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizers

    for number in range(3):
        (module, given), (model, expected) = net(), net()
        engine = zerofunc.initialize(module, config(stage), optimizer=given[number])[0]
        train(engine, model, [expected[number]], range(2))


@pytest.mark.world_size(1)
def test_frozen_groups_of_a_function_are_left_out_and_names_are_kept():
    model = build(Net)
    model.first.requires_grad_(False)
    groups = [
        {"params": model.first.parameters(), "lr": 0.1},
        {"params": model.head.named_parameters(), "lr": 0.2, "name": "head"},
    ]
    optimizer = zerofunc.initialize(model, config(3), optimizer=momentum, model_parameters=groups)[1]
    (group,) = optimizer.param_groups
    assert (group["lr"], group["name"], group["param_names"]) == (0.2, "head", ["weight", "bias"])
    module = build(Net)
    (group,) = zerofunc.initialize(module, config(3), model_parameters=module.named_parameters())[1].param_groups
    assert group["param_names"][:2] == ["first.weight", "first.bias"]


@pytest.mark.parametrize("by", ["instance", "function", "config"])
@pytest.mark.world_size(1)
def test_parameters_that_cannot_be_trained_are_named(by):
    def start(params):
        model = build(Net)
        wanted = params(model)
        given = {"instance": lambda: momentum(wanted), "function": lambda: momentum, "config": lambda: None}[by]()
        zerofunc.initialize(model, config(2), optimizer=given, model_parameters=None if by == "instance" else wanted)

    with pytest.raises(ValueError, match=r"include one of shape \(3, 5\) that is not the model's"):
        start(lambda model: [model.first.weight, build(Net).head.weight])
    with pytest.raises(ValueError, match="include 'first.weight' more than once"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch only warns
        start(lambda model: [model.first.weight, model.first.weight])
    if by != "instance":
        with pytest.raises(ValueError, match="there is no parameter to train"):
            start(lambda model: [p.requires_grad_(False) for p in model.parameters()])


@pytest.mark.world_size(1)
def test_a_group_that_is_frozen_stays_in_an_instance():
    module = build(Net)
    module.first.requires_grad_(False)
    given = momentum([{"params": module.first.parameters(), "lr": 0.5}, {"params": module.head.parameters()}])
    engine = zerofunc.initialize(module, config(3), optimizer=given)[0]
    assert engine.get_lr() == [0.5, 0.05]
    module.first.requires_grad_(True)
    before = module.first.weight.detach().clone()
    engine.backward(fit(engine, 0, 0))
    engine.step()
    assert not torch.equal(before, module.first.weight.detach())


class Sum(Whitening):
    """Steps by the sum of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        total = torch.stack([param.grad.sum() for param in params]).sum()
        for param in params:
            param -= 0.1 * total


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.world_size(2)
def test_an_optimizer_that_takes_all_parameters_together_works_where_they_are_whole(stage):
    module, model = build(Net), build(Net)
    if stage:
        with pytest.raises(ValueError, match="Sum updates a parameter by what other parameters are .* or stage 0"):
            zerofunc.initialize(module, config(stage), optimizer=Sum(module.parameters()))
    else:
        train(zerofunc.initialize(module, config(stage), optimizer=Sum)[0], model, [Sum(model.parameters())])


@pytest.mark.world_size(2)
def test_an_untested_optimizer_may_be_forced():
    module, said = build(Net), []
    logging.getLogger("zerofunc.optimizers.sharded").addFilter(said.append)
    given = Sum(module.parameters())
    found = zerofunc.initialize(module, config(2, zero_allow_untested_optimizer=True), optimizer=given)[1]
    logging.getLogger("zerofunc.optimizers.sharded").removeFilter(said.append)
    assert found is given and "steps each rank's shards alone" in said[0].msg
