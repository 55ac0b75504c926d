"""What a module may be made of when it is sharded, and what is noticed when that changes afterwards."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofunc
from reference import STAGES, Branches, Net, build, data, engine_of, fit

SMALL = {"page_bytes": 160, "resident_bytes": 0, "timeout_s": 20}


def train(module, plain, num_steps=2, loss=fit):
    """Train a sharded module, and a plain one on the data of all ranks; compare their parameters."""
    size = dist.get_world_size()
    optimizer = torch.optim.SGD(zerofunc.shards(module).values(), lr=0.1)
    reference = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for step in range(num_steps):
        loss(module, step, dist.get_rank()).backward()
        (sum(loss(plain, step, rank) for rank in range(size)) / size).backward()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach() * 1, q.detach(), msg=name)


# ---- what a module is made of ------------------------------------------------------------------------------------


def normed(norm):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = build(Net)
        norm(net.first)
    return net.eval()  # in training, a forward of spectral_norm changes its buffers


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@STAGES
@pytest.mark.world_size(2)
def test_a_weight_that_a_hook_derives_is_trained(stage, norm):
    module, plain = normed(norm), normed(norm)
    train(zerofunc.shard(module, stage, **SMALL), plain)


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        self.kept = self.w @ self.w

    def forward(self, x):
        return x @ self.w


@STAGES
@pytest.mark.world_size(2)
def test_a_kept_graph_is_kept_or_refused_by_name(stage):
    module = Keeps()
    if stage == 3:
        with pytest.raises(ValueError, match=r"'w' is in use by a graph.*compute in forward\(\)"):
            zerofunc.shard(module, stage, **SMALL)
    else:
        plain = Keeps()
        plain.load_state_dict(module.state_dict())
        for first in (module, plain):
            dist.broadcast(first.w.data, 0)
        train(zerofunc.shard(module, stage, **SMALL), plain, loss=lambda m, s, r: m(data(s, r, 4, 3)).square().mean())


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


def scripted(has_parameters):
    torch.manual_seed(0)
    part = nn.Linear(4, 4).double() if has_parameters else Sine()
    return nn.Sequential(nn.Linear(4, 4).double(), torch.jit.script(part), nn.Linear(4, 3).double())


@pytest.mark.parametrize("has_parameters", [False, True])
@STAGES
@pytest.mark.world_size(2)
def test_scripted_parts_are_trained_or_refused_by_name(stage, has_parameters):
    module = scripted(has_parameters)
    if stage == 3 and has_parameters:
        with pytest.raises(ValueError, match=r"'1\.weight' is in use by .*scripted module.*stages 0 to 2"):
            zerofunc.shard(module, stage, **SMALL)
    else:
        train(zerofunc.shard(module, stage, **SMALL), scripted(has_parameters))


class Aliased(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.a = nn.Parameter(torch.randn(6))
        self.b = nn.Parameter(self.a.detach()[shift:][:3][None])


@STAGES
@pytest.mark.world_size(1)
def test_parameters_that_share_memory_are_refused_by_name(stage):
    with pytest.raises(ValueError, match=r"'a' and 'b' share memory.*one nn\.Parameter in both places"):
        zerofunc.shard(Aliased(2), stage)


@STAGES
@pytest.mark.world_size(1)
def test_parameters_side_by_side_in_one_storage_are_sharded(stage):
    module = nn.Linear(2, 3)
    both = torch.randn(9)
    module.weight, module.bias = nn.Parameter(both[:6].view(3, 2)), nn.Parameter(both[6:])
    expected = module(torch.ones(1, 2)).detach()
    zerofunc.shard(module, stage)
    torch.testing.assert_close(module(torch.ones(1, 2)), expected)


# ---- hooks from before -------------------------------------------------------------------------------------------


@STAGES
@pytest.mark.world_size(2)
def test_hooks_from_before_sharding_stay(stage):
    module, plain = build(Net), build(Net)
    seen, handles = [], []
    for net in (module, plain):
        net.first.weight.register_hook(lambda g: 0.5 * g)
        handles.append(net.middle.weight.register_hook(lambda g: 3 * g))
        net.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    zerofunc.shard(module, stage, **SMALL)
    for net in (module, plain):
        net.first.weight.register_hook(lambda g: g + 1)
    train(module, plain, num_steps=1)
    assert len(seen) == 2  # once on either side
    for handle in handles:
        handle.remove()
    train(module, plain)


# ---- what is trained ---------------------------------------------------------------------------------------------


def half_frozen():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 2, bias=False)).to(torch.bfloat16)
    net[0].requires_grad_(False)
    return net


@STAGES
@pytest.mark.world_size(2)
def test_frozen_low_precision_parameters_have_no_masters_until_they_are_thawed(stage):
    module = half_frozen()
    own = 2 * 64 * 64 // (2 if stage == 3 else 1)
    zerofunc.shard(module, stage, **SMALL)
    assert own <= zerofunc.usage(module).held_bytes <= own + 6 * 64 * 2 + 16
    module[0].requires_grad_(True)
    assert all(shard.dtype == torch.float32 for shard in zerofunc.shards(module).values())
    always = half_frozen()
    always[0].requires_grad_(True)
    zerofunc.shard(always, stage, **SMALL)
    for net in (module, always):
        optimizer = torch.optim.SGD(zerofunc.shards(net).values(), lr=0.01)
        for _ in range(3):
            net(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(module.parameters(), always.parameters(), strict=True):
        assert torch.equal(p.detach().clone(), q.detach().clone())


@pytest.mark.world_size(2)
def test_a_mark_on_the_root_keeps_it_whole():
    model = build(Branches)
    model._z3_leaf = True
    engine = engine_of(model, 3)
    engine.backward(engine(data(0, 0), dist.get_rank()).square().mean())
    engine.step()
    assert engine.was_step_applied()


# ---- what changes afterwards -------------------------------------------------------------------------------------


def put_in(module):
    module.middle = nn.Linear(6, 5).double()


def add(module):
    module.another = nn.Linear(2, 2)


def register(module):
    module.first.extra = nn.Parameter(torch.zeros(1))


def take_out(module):
    module.middle = nn.Identity()


@pytest.mark.parametrize("change", [put_in, add, register, take_out])
@STAGES
@pytest.mark.world_size(1)
def test_a_change_of_the_module_is_noticed_before_a_step_and_a_save(stage, change, tmp_path):
    engine = engine_of(build(Net), stage)
    change(engine.module)
    message = r"(put into the module|replaced or moved) after the module was sharded"
    with pytest.raises(RuntimeError, match=message):
        engine.step()
    with pytest.raises(RuntimeError, match=message):
        engine.save_checkpoint(tmp_path)
    assert not any(tmp_path.iterdir())


@STAGES
@pytest.mark.world_size(2)
def test_a_module_without_parameters_may_be_put_in(stage):
    module, plain = build(Net), build(Net)
    zerofunc.shard(module, stage, **SMALL)
    for net in (module, plain):
        net.extra = nn.Dropout(0.5)
    train(module, plain)


# ---- a second engine ---------------------------------------------------------------------------------------------


@STAGES
@pytest.mark.world_size(2)
def test_a_second_engine_uses_the_sharding_that_is_there(stage):
    module, plain = build(Net), build(Net)
    first = engine_of(module, stage)
    first.backward(fit(first, 9, dist.get_rank()))
    first.destroy()
    second = engine_of(module, stage, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    assert first.module is second.module
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        second.backward(fit(second, step, dist.get_rank()))
        second.step()
        (sum(fit(plain, step, rank) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach() * 1, q.detach())


@pytest.mark.world_size(2)
def test_other_settings_of_a_second_engine_are_named():
    module = build(Net)
    engine_of(module, 2)
    message = r"sharded already, with other settings: stage is 2, asked for now: 3; page_bytes is 160, .*: 320\. .*anew"
    with pytest.raises(ValueError, match=message):
        engine_of(module, 3, zerofunc={"page_bytes": 320})
    with pytest.raises(ValueError, match="reduction.average is True, asked for now: False"):
        engine_of(module, 2, gradient_allreduce_op="sum")
    assert zerofunc.shard(module, **_options(engine_of(module, 2))) is module


def _options(engine):
    return {name: value for name, value in engine._sharding.settings.items() if name in SHARD_ARGUMENTS}


SHARD_ARGUMENTS = {"stage", "page_bytes", "resident_bytes", "timeout_s", "prefetch", "persistence_bytes", "mesh"}
