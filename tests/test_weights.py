"""Weights from safetensors files: each rank's part of them, whatever the module is when they are read."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch import nn

import zerofunc
from reference import Language, Net, assert_same, values
from zerofunc.module.init import Init
from zerofunc.module.weights import load_safetensors
from zerofunc.optimizers.parameter_state import safe_get_full_fp32_param
from zerofunc.ranks.collectives import DivergenceError


class Shaped(nn.Module):
    """Tensors whose parts begin and end anywhere, tied ones, and buffers."""

    def __init__(self):
        super().__init__()
        self.language, self.norm = Language(), nn.BatchNorm1d(3)
        self.inner = nn.Parameter(torch.randn(1, 1, 5, 3))
        self.scalar, self.empty = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(0, 2))
        self.register_buffer("table", torch.arange(4))

    def reset_parameters(self):
        raise AssertionError("what was loaded needs no other values")


def expected(make=Shaped, seed=1):
    torch.manual_seed(seed)
    return make()


@pytest.fixture
def folder(tmp_path):
    """A `Shaped` in three files with an index, its tied tensor once."""
    tensors = expected().state_dict()
    del tensors["language.head.weight"]
    places = {key: f"model-{number % 3}.safetensors" for number, key in enumerate(tensors)}
    for file in set(places.values()):
        save_file({key: tensors[key] for key in tensors if places[key] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return tmp_path


@pytest.fixture
def files(tmp_path):
    """Files of a `Net`: one that is right, and others."""
    tensors = expected(Net).state_dict()
    save_file(tensors, tmp_path / "right")
    save_file({f"model.{name}": tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "prefixed")
    save_file({**tensors, "head.bias": torch.zeros(4)}, tmp_path / "longer")
    tensors["other"] = tensors.pop("head.bias")
    save_file(tensors, tmp_path / "renamed")
    (tmp_path / "broken").write_bytes(b"no header")
    (tmp_path / "indexed").mkdir()
    (tmp_path / "indexed" / "m.safetensors.index.json").write_text('{"weight_map": 3}')
    return tmp_path


def made(how):
    torch.manual_seed(0)
    if how == "Init":
        with Init():
            return Shaped()
    if how == "meta":
        with torch.device("meta"):
            module = Shaped()
        return module
    module = Shaped()
    return module if how == "plain" else zerofunc.shard(module, int(how), page_bytes=50, resident_bytes=0)


@pytest.mark.parametrize("how", ["plain", "meta", "Init", "0", "1", "3"])
@pytest.mark.world_size(1, 2)
def test_every_kind_of_module_reads_its_values(how, folder):
    module = made(how)
    assert load_safetensors(module, folder) == ([], [])
    assert_same(module, expected(), rtol=0, atol=0)
    assert module.language.head.weight is module.language.embedding.weight
    assert module.table.tolist() == [0, 1, 2, 3]
    if not how.isdigit():
        zerofunc.shard(module, 3, page_bytes=50)
        assert_same(module, expected(), rtol=0, atol=0)
    module.load_state_dict(expected(seed=2).state_dict())
    assert_same(module, expected(seed=2), rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.world_size(2)
def test_masters_keep_digits_that_the_module_computes_without(stage, files):
    module, model = zerofunc.shard(Net(), stage, param_dtype=torch.bfloat16), expected(Net)
    load_safetensors(module, files / "right")
    assert torch.equal(module.first.weight.detach().clone(), model.first.weight.bfloat16())
    assert torch.equal(safe_get_full_fp32_param(module.first.weight), model.first.weight)


@pytest.mark.world_size(1, 2)
def test_a_file_of_another_data_type_and_other_names(files):
    module = zerofunc.shard(Net(), 3)
    load_safetensors(module, str(files / "prefixed"), rename=lambda key: key.removeprefix("model."))
    assert_same(module, expected(Net).bfloat16().float(), rtol=0, atol=0)


@pytest.mark.world_size(2)
def test_keys_that_do_not_match(files):
    module = zerofunc.shard(Net(), 3)
    before = values(module)
    with pytest.raises(ValueError, match=r"missing keys: head\.bias; keys that the module does not have: other"):
        load_safetensors(module, files / "renamed")
    with pytest.raises(ValueError, match=r"head\.bias has shape \(4,\) there, expected \(3,\)"):
        load_safetensors(module, files / "longer", strict=False)
    with pytest.raises(ValueError, match=r"is found twice, the second time as .*longer"):
        load_safetensors(module, [files / "right", files / "longer"])
    torch.testing.assert_close(values(module), before, rtol=0, atol=0)
    assert load_safetensors(module, [files / "renamed"], strict=False) == (["head.bias"], ["other"])
    after = {**values(expected(Net)), "head.bias": before["head.bias"]}
    torch.testing.assert_close(values(module), after, rtol=0, atol=0)


@pytest.mark.world_size(2)
def test_files_that_cannot_be_read(files):
    module = zerofunc.shard(Net(), 3)
    for name, words in {
        ".": r"has no \*\.safetensors file",
        "gone": "gone cannot be read as a safetensors file",
        "broken": "broken cannot be read as a safetensors file",
        "indexed": "is not an index",
    }.items():
        with pytest.raises(ValueError, match=words):
            load_safetensors(module, files / name)
    name = "right" if dist.get_rank() == 0 else "gone"  # on one rank only
    with pytest.raises(DivergenceError, match="rank 1: load_safetensors.*gone cannot be read"):
        load_safetensors(module, files / name)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_rank_allocates_its_shards_and_no_more(tmp_path):
    """Measured: 32.1 MiB for a module of 64 MiB."""
    with torch.device("meta"):
        module = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])
    if dist.get_rank() == 0:
        save_file({name: torch.ones(p.shape) for name, p in module.named_parameters()}, tmp_path / "a.safetensors")
    dist.barrier()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiled:
        load_safetensors(module, tmp_path)
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() / 2**20 for event in sorted(events, key=lambda event: event.start_ns())]
    held = torch.tensor([change for change in changes if abs(change) < 64]).cumsum(0)  # without the mapped file
    assert 32 <= held.max() < 33


# ---- models of transformers -----------------------------------------------------------------------------------------


def pretrained(name):
    """A tiny random model's class and configuration."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "llama":  # tied weights, rotary buffers
        made = transformers.LlamaConfig(**sizes, vocab_size=37, num_key_value_heads=1, tie_word_embeddings=True)
        return transformers.AutoModelForCausalLM, made
    if name == "mixtral":  # files under other names, experts one by one
        made = transformers.MixtralConfig(**sizes, vocab_size=37, num_key_value_heads=1, num_local_experts=4)
        return transformers.AutoModelForCausalLM, made
    return transformers.AutoModelForMaskedLM, transformers.BertConfig(**sizes, vocab_size=37)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral", "bert"])
@pytest.mark.world_size(2)
def test_models_of_transformers(name, tmp_path):
    kind, made = pretrained(name)
    torch.manual_seed(0)
    model = kind.from_config(made)
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path, max_shard_size="10KB")
    dist.barrier()
    torch.manual_seed(dist.get_rank())
    with Init():
        built, loaded = kind.from_config(made), kind.from_pretrained(tmp_path)
    modules = [built, loaded]
    if name != "mixtral":
        with torch.device("meta"):
            blank = kind.from_config(made)
        load_safetensors(blank, tmp_path)
        modules.append(blank)
    for module in modules:
        assert list(module.state_dict()) == list(model.state_dict())
        zerofunc.shard(module, 3, page_bytes=1000)
        assert_same(module, model, rtol=0, atol=0)
        torch.testing.assert_close(dict(module.named_buffers()), dict(model.named_buffers()))
    tokens = torch.arange(6).view(2, 3)
    torch.testing.assert_close(loaded.eval()(tokens).logits, model.eval()(tokens).logits)
    if name == "mixtral":
        with pytest.raises(ValueError, match="by its from_pretrained inside"):
            load_safetensors(built, tmp_path)
