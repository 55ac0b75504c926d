"""A model built inside Init, or on the meta device, is the one that plain construction gives, and is never whole."""

import copy
import ctypes
import re
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.utils import parametrizations

import zerofunc
from reference import STAGES, Language, Net, adamw, assert_same, config, engine_of, fit, step_reference, values
from zerofunc.module.init import Init
from zerofunc.optimizers.parameter_state import GatheredParameters
from zerofunc.pages.paged_tensor import PagedTensor


class Rich(nn.Module):
    """What constructors do to their parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12), 2)  # copies its layer
        self.recurrent, self.norm = nn.LSTM(4, 3), nn.BatchNorm1d(3)
        self.tied = nn.ModuleList([nn.Linear(4, 5), nn.Linear(4, 5)])
        self.tied[1].weight = self.tied[0].weight
        self.scaled = parametrizations.weight_norm(nn.Linear(4, 4))
        self.turned = parametrizations.orthogonal(nn.Linear(4, 4))
        self.bounded = parametrizations.spectral_norm(nn.Linear(4, 4))
        self.list = nn.ParameterList([torch.randn(2, 3), nn.Parameter(torch.randn(2), requires_grad=False)])
        self.own = own = nn.Parameter(torch.empty(6, 4))
        nn.init.orthogonal_(own)
        self.register_buffer("drawn", torch.randn(3))
        self.tied[0].bias.data = torch.arange(5.0)
        with torch.no_grad():
            own[2:4] *= 2
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear) and "weight" in module._parameters:
            module.weight.data.normal_(std=0.02)
            module.bias.data[1:].fill_(0.5)


def assert_equal(module, expected):
    """Names, values, ties and buffers."""
    assert list(module.state_dict()) == list(expected.state_dict())
    named = [dict(m.named_parameters(remove_duplicate=False)) for m in (module, expected)]
    ties = [[[a is b for b in names.values()] for a in names.values()] for names in named]
    assert ties[0] == ties[1]
    torch.testing.assert_close(values(module), values(expected), rtol=0, atol=0)
    torch.testing.assert_close(dict(module.named_buffers()), dict(expected.named_buffers()), rtol=0, atol=0)
    assert [p.requires_grad for p in module.parameters()] == [p.requires_grad for p in expected.parameters()]


def built(make, seed):
    torch.manual_seed(seed)
    with Init():
        return make()


def plain(make):
    """What the first rank builds without the context."""
    torch.manual_seed(0)
    return make()


# ---- inside the context -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.world_size(1, 2)
def test_values_are_those_of_plain_construction_on_the_first_rank(stage):
    module = built(Rich, seed=dist.get_rank())
    assert all(isinstance(parameter, PagedTensor) for parameter in module.parameters())
    assert_equal(module, plain(Rich))
    zerofunc.shard(module, stage, page_bytes=300, resident_bytes=0)
    assert_equal(module, plain(Rich))
    assert isinstance(module.own, PagedTensor) == (stage == 3)


@STAGES
@pytest.mark.world_size(2)
@pytest.mark.parametrize("make", [Net, Language])
def test_training_equals_one_process(stage, make):
    loss = fit if make is Net else (lambda model, step, rank: model(torch.arange(6).view(2, 3)).square().mean())
    engine, model = engine_of(built(make, seed=dist.get_rank()).double(), stage), plain(make).double()
    optimizer = adamw(model)
    for step in range(2):
        engine.backward(loss(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, loss, step)
        assert_same(engine, model)


@pytest.mark.world_size(2)
def test_an_optimizer_built_before_initialize_trains_the_model():
    module, model = built(Net, seed=0).double(), plain(Net).double()
    engine = zerofunc.initialize(module, config(3, optimizer=None), optimizer=adamw(module))[0]
    optimizer = adamw(model)
    engine.backward(fit(engine, 0, dist.get_rank()))
    engine.step()
    step_reference(model, optimizer, fit, 0)
    assert_same(engine, model)


@pytest.mark.world_size(2)
def test_generators_go_on_as_without_the_context():
    for seed in (0, dist.get_rank()):  # the same on all ranks, or not
        built(Net, seed)
        drawn = torch.randn(4)
        torch.manual_seed(seed)
        if seed == 0:
            Net()
        assert torch.equal(drawn, torch.randn(4))


@pytest.mark.world_size(1, 2)
def test_one_rank_writes_before_the_model_is_sharded():
    module, expected = built(Net, seed=0), plain(Net)
    with GatheredParameters(module.middle.weight, modifier_rank=dist.get_world_size() - 1):
        if dist.get_rank() == dist.get_world_size() - 1:
            nn.init.constant_(module.middle.weight, 2.0)
    nn.init.constant_(expected.middle.weight, 2.0)
    assert_equal(module, expected)


@pytest.mark.world_size(1, 2)
def test_what_users_do_before_they_shard():
    module = built(Net, seed=0)
    twin = copy.deepcopy(module)
    nn.init.zeros_(twin.first.weight)
    assert_equal(module, plain(Net))
    with Init(), Init():
        module.head.weight.data = torch.ones(7, 5)  # of another shape
        module.first = nn.Linear(2, 2)
    module.extra = nn.Linear(2, 2)  # outside of the context
    held = module.middle.weight
    module.to(torch.bfloat16)
    assert held is module.middle.weight
    assert held.dtype == torch.bfloat16
    zerofunc.shard(module, 3)
    assert torch.equal(module.head.weight.detach().clone(), torch.ones(7, 5, dtype=torch.bfloat16))


@pytest.mark.world_size(1)
def test_attributes_of_parameters_are_kept():
    layer = nn.Linear(2, 2)
    layer.weight.decays = layer.bias.decays = True
    with Init():
        layer.weight = layer.weight
    zerofunc.shard(layer, 3)
    assert layer.weight.decays
    assert layer.bias.decays


@pytest.mark.world_size(1)
def test_options():
    with Init(dtype=torch.bfloat16):
        layer = nn.Linear(2, 2)
    assert layer.weight.dtype == torch.bfloat16
    assert not isinstance(nn.Linear(2, 2).weight, PagedTensor)
    with pytest.raises(RuntimeError, match="at heart"), Init():
        raise RuntimeError("at heart")
    assert not isinstance(nn.Linear(2, 2).weight, PagedTensor)
    for options in ({"enabled": False}, {"config_dict_or_path": config(2)}):
        with Init(**options):
            assert not isinstance(nn.Linear(2, 2).weight, PagedTensor)
    module = nn.Linear(2, 2)
    expected = values(module)
    Init(module, config=config(3), remote_device="cpu")
    assert isinstance(module.weight, PagedTensor)
    torch.testing.assert_close(values(module), expected)
    with pytest.raises(ValueError, match="'nvme'; expected None or 'cpu'"):
        Init(remote_device="nvme")
    with pytest.raises(ValueError, match="give mesh="):
        Init(mpu=object())


# ---- memory -------------------------------------------------------------------------------------------------------

MIB, WIDTH, LAYERS = 1 << 20, 1024, 16  # 64 MiB in all, 4 MiB a layer


def peak_of(run):
    """What ``run`` returns, and the most bytes of memory that the process had beyond those it had before."""

    def kept(name):
        return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # begins the record anew
    before = kept("VmRSS")
    return run(), kept("VmHWM") - before


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_rank_holds_its_shards_and_a_page():
    """Measured: 36 MiB while building, where 32 are the shards; 10 more while the pages are made."""
    ctypes.CDLL(None).mallopt(-3, 1 << 18)  # freed blocks go back to the system, so that they are not counted
    with Init():
        nn.Linear(2, 2)

    def build():
        with Init():
            return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])

    module, peak = peak_of(build)
    assert peak < (32 + 4 + 2) * MIB
    _, peak = peak_of(lambda: zerofunc.shard(module, 3, page_bytes=8 * MIB))
    assert peak < (8 + 4) * MIB


# ---- the meta device ----------------------------------------------------------------------------------------------


def on_meta(make):
    with torch.device("meta"):
        return make()


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.scale = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.empty(2))

    def reset_parameters(self):
        self.scale.data.uniform_(1, 2)
        self.table.fill_(3)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.bias, 0.25)


@STAGES
@pytest.mark.world_size(1, 2)
def test_modules_on_the_meta_device_get_values(stage):
    torch.manual_seed(dist.get_rank())
    module = zerofunc.shard(on_meta(Custom), stage, page_bytes=16)
    found = values(module)
    assert not any(parameter.isnan().any() for parameter in found.values())
    assert module.table.tolist() == [3, 3]
    assert found["mix.bias"].tolist() == [0.25] * 4
    assert module.norm.running_var.tolist() == [1] * 4
    assert ((found["scale"] > 1) & (found["scale"] < 2)).all()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: parameter.tolist() for name, parameter in found.items()})
    assert everyone.count(everyone[0]) == len(everyone)
    module.mix(torch.ones(1, 4)).sum().backward()


class Nameless(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


@pytest.mark.world_size(1, 2)
def test_what_cannot_get_values_is_named():
    with pytest.raises(ValueError, match=r"weight of 0 \(Nameless\) on the meta device.*load_safetensors"):
        zerofunc.shard(nn.Sequential(on_meta(Nameless)), 3)
    layer = on_meta(lambda: nn.Linear(2, 2))
    layer.bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"weight of the module \(Linear\) on the meta device, while its other"):
        zerofunc.shard(layer, 3)
