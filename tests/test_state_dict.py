"""What `state_dict()` gives, and what files are made of it: full tensors, tied ones once, each of its own bytes."""

import os

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

import zerofunc
from reference import STAGES, engine_of


class Tied(nn.Module):
    """A tie, a buffer, a frozen layer, and sizes that no page's alignment divides."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.mix.bias.requires_grad_(False)
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


def built(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return Tied().to(dtype)


@STAGES
@pytest.mark.world_size(1, 2)
def test_torch_save_writes_each_tensor_once_and_only_its_own_bytes(stage, tmp_path):
    model = built()
    module = zerofunc.shard(built(), stage, page_bytes=300)
    path, plain = tmp_path / f"{dist.get_rank()}.pt", tmp_path / f"plain_{dist.get_rank()}.pt"
    torch.save(module.state_dict(), path)
    torch.save(model.state_dict(), plain)
    loaded = torch.load(path, weights_only=True)
    torch.testing.assert_close(dict(loaded), dict(model.state_dict()), rtol=0, atol=0)
    assert loaded["head.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in loaded.values())
    assert abs(os.path.getsize(path) - os.path.getsize(plain)) < 200  # the names of the folders inside differ


@STAGES
@pytest.mark.world_size(1, 2)
def test_safetensors_saves_a_state_dict_as_it_does_a_plain_one(stage, tmp_path):
    model = built()
    module = zerofunc.shard(built(), stage, page_bytes=300)
    path = tmp_path / f"{dist.get_rank()}.safetensors"
    with pytest.raises(RuntimeError, match="share memory"):  # the tie
        safetensors.torch.save_file(module.state_dict(), path)
    untied = {name: value for name, value in module.state_dict().items() if name != "head.weight"}
    safetensors.torch.save_file(untied, path)
    expected = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    torch.testing.assert_close(safetensors.torch.load_file(path), expected, rtol=0, atol=0)
    safetensors.torch.save_model(module, path)
    loaded = safetensors.torch.load_file(path)
    assert len(loaded) == len(expected)
    other = built(seed=1)
    safetensors.torch.load_model(other, path)
    torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


@STAGES
@pytest.mark.world_size(1, 2)
def test_entries_are_live_and_so_are_their_addresses(stage, tmp_path):
    module = zerofunc.shard(built(), stage, page_bytes=300)
    state = module.state_dict()
    before = safetensors.torch.save({"weight": state["mix.weight"]})
    with torch.no_grad():
        module.mix.weight.add_(1.0)
    after = safetensors.torch.load(safetensors.torch.save({"weight": state["mix.weight"]}))["weight"]
    assert torch.equal(after, built().mix.weight + 1.0)
    assert torch.equal(after, safetensors.torch.load(before)["weight"] + 1.0)
    state["mix.weight"].zero_()
    assert not module.mix.weight.any()


@pytest.mark.world_size(2)
def test_a_state_dict_that_one_rank_saves_is_an_error(tmp_path):
    module = zerofunc.shard(built(), 3, page_bytes=300, timeout_s=3)
    with pytest.raises(zerofunc.DivergenceError, match="gather of page"):
        if dist.get_rank() == 0:
            torch.save(module.state_dict(), tmp_path / "weights.pt")
        else:
            module(torch.zeros(1, 2, dtype=torch.long)).sum().backward()


@STAGES
@pytest.mark.world_size(1, 2)
def test_an_engine_gives_its_state_everywhere_or_on_one_rank(stage):
    engine = engine_of(built(), stage)
    expected = {f"module.{name}": value for name, value in built().state_dict().items()}
    state = engine.state_dict()
    torch.testing.assert_close(dict(state), expected, rtol=0, atol=0)
    assert {type(value) for value in state.values()} == {torch.Tensor}
    on_first = engine.state_dict(rank=0)
    assert list(on_first) == (list(expected) if dist.get_rank() == 0 else [])
    torch.testing.assert_close(dict(on_first), expected if on_first else {}, rtol=0, atol=0)
    assert list(engine.module_state_dict()) == list(built().state_dict())
    assert "mix.bias" not in engine.module_state_dict(exclude_frozen_parameters=True)
    with torch.no_grad():
        state["module.mix.weight"].zero_()  # a copy
        assert engine.module.mix.weight.any()
    other = engine_of(built(seed=1), stage)
    other.load_state_dict(engine.state_dict())
    torch.testing.assert_close(dict(other.state_dict()), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"rank is 5; expected a rank from 0 to"):
        engine.state_dict(rank=5)


@STAGES
@pytest.mark.world_size(2)
def test_a_plain_module_takes_what_one_rank_is_given(stage, tmp_path):
    engine, plain = engine_of(built(), stage), built(seed=1)
    state = engine.module_state_dict(rank=0)
    if dist.get_rank() == 0:
        torch.save(state, tmp_path / "weights.pt")
        plain.load_state_dict(torch.load(tmp_path / "weights.pt"))
        torch.testing.assert_close(dict(plain.state_dict()), dict(built().state_dict()), rtol=0, atol=0)
    else:
        assert state == {}


@STAGES
@pytest.mark.world_size(1, 2)
def test_an_engine_inside_a_module_adds_its_entries(stage):
    outer = nn.Sequential(engine_of(built(), stage))
    assert list(outer.state_dict()) == [f"0.module.{name}" for name in built().state_dict()]
    other = nn.Sequential(engine_of(built(seed=1), stage))
    other.load_state_dict(outer.state_dict())
    torch.testing.assert_close(dict(other[0].state_dict()), dict(outer[0].state_dict()), rtol=0, atol=0)


@pytest.mark.world_size(2)
def test_a_state_dict_on_one_rank_gathers_page_by_page():
    engine = engine_of(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), 3, zerofunc={"page_bytes": 64 * 64 * 4})
    engine.state_dict(rank=0)
    assert engine.usage().gathered_peak_bytes <= 3 * 64 * 65 * 4
