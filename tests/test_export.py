"""Weights for others: the files load in plain PyTorch and in transformers, and are what the engine computes with."""

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from torch import nn
from typer.testing import CliRunner

import zerofunc
from reference import EVERY_STAGE, engine_of
from test_state_dict import Tied, built
from zerofunc.saving.convert import convert
from zerofunc.saving.weights_folder import bytes_in, plan_files
from zerofunc.tools.cli import app

MASTERS = {"bf16": {"enabled": True}}


def loaded(folder):
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        part = safetensors.torch.load_file(path)
        assert not found.keys() & part.keys()
        found.update(part)
    return found


def untied(state):
    return {name: value for name, value in state.items() if name != "head.weight"}


def trained(stage, dtype=torch.float64, **more):
    engine = engine_of(built(dtype=dtype), stage, **more)
    tokens = torch.arange(6).view(2, 3) + dist.get_rank()
    engine.backward(engine(tokens % 7).float().square().mean())
    engine.step()
    return engine


@EVERY_STAGE
@pytest.mark.world_size(1, 2)
def test_what_is_exported_loads_in_plain_pytorch(stage, tmp_path):
    engine = trained(stage)
    zerofunc.export(engine, tmp_path / "weights")
    dist.barrier()
    assert sorted(os.listdir(tmp_path / "weights")) == ["model.safetensors"]
    state = engine.module_state_dict()
    torch.testing.assert_close(loaded(tmp_path / "weights"), untied(state), rtol=0, atol=0)
    plain = built(seed=1)
    safetensors.torch.load_model(plain, tmp_path / "weights" / "model.safetensors")
    tokens = torch.arange(7).view(1, 7)
    torch.testing.assert_close(plain(tokens), engine(tokens), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_files_are_of_the_size_that_is_asked_for_and_an_older_export_is_replaced(stage, tmp_path):
    engine = trained(stage)
    for folder in (tmp_path, tmp_path):
        zerofunc.export(engine, folder, max_shard_size=300)
        dist.barrier()
        names = sorted(os.listdir(folder))
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert len(names) == 4 and set(index["weight_map"].values()) | {"model.safetensors.index.json"} == set(names)
        assert set(index["weight_map"]) == set(untied(engine.module_state_dict()))
        torch.testing.assert_close(loaded(folder), untied(engine.module_state_dict()), rtol=0, atol=0)
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in loaded(folder).values())
        dist.barrier()
    zerofunc.export(engine, tmp_path, "float32", exclude_frozen=True)
    dist.barrier()
    assert os.listdir(tmp_path) == ["model.safetensors"]
    found = loaded(tmp_path)
    assert "mix.bias" not in found and {value.dtype for value in found.values()} == {torch.float32}


@EVERY_STAGE
@pytest.mark.world_size(2)
def test_float32_masters_are_exported_where_float32_is_asked_for(stage, tmp_path):
    engine = trained(stage, torch.float32, **MASTERS)
    zerofunc.export(engine, tmp_path / "own")
    zerofunc.export(engine, tmp_path / "masters", torch.float32)
    masters = {n: zerofunc.safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    dist.barrier()
    own, full = loaded(tmp_path / "own"), loaded(tmp_path / "masters")
    assert own["mix.weight"].dtype == torch.bfloat16 and own["seen"].dtype == torch.float32
    torch.testing.assert_close({n: full[n] for n in masters}, masters, rtol=0, atol=0)
    assert not torch.equal(full["mix.weight"], full["mix.weight"].bfloat16().float())
    torch.testing.assert_close(own["mix.weight"], engine.module.mix.weight.detach().clone(), rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_save_16bit_model_writes_what_its_file_name_says(stage, tmp_path):
    engine = trained(stage, torch.float32, **MASTERS)
    assert engine.save_16bit_model(tmp_path / "safe")
    assert engine.save_fp16_model(tmp_path / "pickled", "pytorch_model.bin", exclude_frozen_parameters=True)
    dist.barrier()
    state = engine.module_state_dict()
    torch.testing.assert_close(loaded(tmp_path / "safe"), untied(state), rtol=0, atol=0)
    found = torch.load(tmp_path / "pickled" / "pytorch_model.bin", weights_only=True)
    torch.testing.assert_close(found, {n: v for n, v in state.items() if n != "mix.bias"}, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"save_filename is 'model.onnx'; expected .bin"):
        engine.save_16bit_model(tmp_path, "model.onnx")


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_from_pretrained_loads_an_export(stage, tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    engine = engine_of(transformers.GPT2LMHeadModel(config).eval(), stage)
    zerofunc.export(engine, tmp_path, max_shard_size="2KB")
    dist.barrier()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.arange(8).view(1, 8)
    torch.testing.assert_close(model(tokens).logits, engine(tokens).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.world_size(2)
def test_an_export_gathers_page_by_page(tmp_path):
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    engine = engine_of(layers, 3, zerofunc={"page_bytes": 64 * 64 * 4})
    zerofunc.export(engine, tmp_path)
    assert engine.usage().gathered_peak_bytes <= 3 * 64 * 65 * 4


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_a_disk_that_refuses_is_an_error_on_every_rank_and_nothing_hangs(stage, tmp_path):
    engine = trained(stage)
    (tmp_path / "file").write_text("")
    dist.barrier()
    with pytest.raises(zerofunc.CheckpointError, match=r"export of .*: rank 0: .*file"):
        zerofunc.export(engine, tmp_path / "file" / "inside")
    for arguments, message in [
        ({"dtype": "int8"}, "dtype is 'int8'; expected a floating-point type"),
        ({"max_shard_size": "many"}, "max_shard_size is 'many'"),
    ]:
        with pytest.raises(ValueError, match=message):
            zerofunc.export(engine, tmp_path, **arguments)
    zerofunc.export(engine, tmp_path / "elsewhere")
    assert engine.module(torch.zeros(1, 1, dtype=torch.long)).isfinite().all()


def test_sizes_are_read_and_files_planned():
    assert [bytes_in(size) for size in ("5GB", "1.5 mb", "2KiB", 300)] == [5 * 10**9, 1_500_000, 2048, 300]
    specs = {"a": (torch.float32, (10,)), "b": (torch.float32, (100,)), "c": (torch.int8, (10,)), "d": (torch.int8, ())}
    assert list(plan_files(specs, 60).values()) == [["a"], ["b"], ["c", "d"]]
    assert plan_files(specs, 1000) == {"model.safetensors": list("abcd")}


# ---- from checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.world_size(2)
def test_a_converted_checkpoint_is_what_would_have_been_exported(tmp_path):
    engine = trained(3, torch.float32, **MASTERS)
    engine.save_checkpoint(tmp_path / "run", "here")
    for dtype in ("float32", "bfloat16"):
        zerofunc.export(engine, tmp_path / "exported", dtype, max_shard_size=100)
        dist.barrier()
        if dist.get_rank() == 0:
            convert(tmp_path / "run", tmp_path / "converted", dtype, max_shard_size=100)
            torch.testing.assert_close(loaded(tmp_path / "converted"), loaded(tmp_path / "exported"), rtol=0, atol=0)
        dist.barrier()


def shown(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_commands_show_and_convert(tmp_path):
    engine = engine_of(Tied(), 3)
    engine.backward(engine(torch.zeros(1, 2, dtype=torch.long)).sum())
    engine.step()
    engine.save_checkpoint(tmp_path / "run", "first")
    engine.save_checkpoint(tmp_path / "run", "second", exclude_frozen_parameters=True)
    told = shown("inspect", tmp_path / "run", "--verify", "--config")
    assert told.exit_code == 0, told.output
    for text in ("step 1, saved 20", "first, second (latest)", "head.weight is tied to embedding.weight",
                 "left out: mix.bias", "7 x 5", "140 B", "exp_avg_sq", '"stage": 3',
                 "every byte is as it was written"):  # fmt: skip
        assert text in told.output
    done = shown("convert", tmp_path / "run", tmp_path / "weights", "--tag", "first", "--dtype", "bf16")
    assert done.exit_code == 0 and "wrote" in done.output
    expected = {n: v.bfloat16() for n, v in untied(engine.module_state_dict()).items()}
    torch.testing.assert_close(loaded(tmp_path / "weights"), expected, rtol=0, atol=0)
    damaged = next((tmp_path / "run" / "second").glob("data_*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    for arguments, message in [
        (("inspect", tmp_path / "run", "--verify"), "data_00000.safetensors is damaged"),
        (("inspect", tmp_path / "nothing"), "is not a checkpoint"),
        (("inspect", tmp_path / "run", "--tag", "third"), "the checkpoints there are first, second"),
        (("convert", tmp_path / "run", tmp_path / "other"), "data_00000.safetensors is damaged"),
        (("convert", tmp_path / "run" / "first", tmp_path / "other", "--dtype", "int"), "dtype is 'int'"),
    ]:
        told = shown(*arguments)
        assert told.exit_code == 1 and message in told.output, told.output
    assert not (tmp_path / "other").exists()
