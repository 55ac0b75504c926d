"""Checkpoints of other libraries, from which training goes on here as it would have gone on there."""

import functools
import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

import zerofunc
from reference import Language, Net, build, config, engine_of, fit, values
from zerofunc.saving.convert import read_weights
from zerofunc.saving.foreign.alignment import names_by_shape
from zerofunc.saving.manifest import CheckpointError
from zerofunc.tools.cli import app
from zerofunc_testing.pool import shared_pool

DEEPSPEED = Path(__file__).parent / "deepspeed_checkpoints"
sys.path.insert(0, str(DEEPSPEED))
import tiny  # noqa: E402 - the model that those checkpoints are of

# ---- DeepSpeed -------------------------------------------------------------------------------------------------------


def expected(case):
    return json.loads((DEEPSPEED / case / "expected.json").read_text())


@pytest.mark.parametrize("case", list(tiny.CASES))
def test_masters_are_those_that_deepspeed_reads(case, tmp_path):
    folder = zerofunc.import_checkpoint(DEEPSPEED / case, tmp_path)
    assert folder == tmp_path / "global_step3"
    found = read_weights(folder)
    model = tiny.built()
    assert set(found) == set(model.state_dict())
    assert found["seen"].tolist() == expected(case)["buffers"]["seen"]
    if "fp32" in expected(case):
        for name, value in expected(case)["fp32"].items():
            torch.testing.assert_close(found[name].float(), torch.tensor(value), rtol=0, atol=0)
    assert torch.equal(found["head.weight"], found["embedding.weight"])


def resumed(folder, case, stage):
    """Losses of the steps that follow, and what was loaded beside tensors."""
    model = tiny.built()
    config = {**tiny.config(case), "zero_optimization": {"stage": stage}, "zerofunc": {"page_bytes": 100}}
    engine = zerofunc.initialize(model, config, optimizer=tiny.optimizer(model, case))[0]
    _, client_state = engine.load_checkpoint(folder)
    counters = [engine.global_steps, engine.skipped_steps, engine.global_samples]
    lr, scale, losses = engine.get_lr(), engine.loss_scale(), []
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(3, 6):
        loss = torch.stack([tiny.loss(engine, step, part) for part in range(rank, 2, size)]).mean()
        engine.backward(loss)
        engine.step()
        losses.append(zerofunc.mean(loss.detach(), model).item())
    return losses, counters, lr, [scale, engine.loss_scale()], client_state


FAST = {("stage1", 2), ("stage3_bf16", 2)}
PLACES = [
    pytest.param(case, size, 3 if size == 2 else 0, marks=[] if (case, size) in FAST else pytest.mark.slow)
    for case in tiny.CASES
    for size in (1, 2)
]


@pytest.mark.parametrize(("case", "size", "stage"), PLACES)
def test_training_goes_on_as_in_deepspeed(case, size, stage, tmp_path):
    zerofunc.import_checkpoint(DEEPSPEED / case, tmp_path)
    there = expected(case)
    tolerance = 1e-4 if "16" in case else 1e-6  # the sums of both libraries round differently
    for losses, counters, lr, scales, client_state in shared_pool(size).run(
        functools.partial(resumed, tmp_path, case, stage)
    ):
        torch.testing.assert_close(losses, there["losses"], rtol=tolerance, atol=0)
        assert counters == there["counters"]
        assert lr == pytest.approx(there["lr"], rel=1e-6)
        assert scales == there.get("loss_scales", [1.0, 1.0])
        assert client_state == {"epoch": 2, "best": [0.5]}


def test_a_missing_rank_another_parallelism_and_a_wrong_place_are_named(tmp_path):
    for case, lost, message in [
        ("stage3", "zero_pp_rank_1_mp_rank_00_optim_states.pt", r"1 files \*optim_states.pt, of 2"),
        ("stage3", "zero_pp_rank_0_mp_rank_00_model_states.pt", "no file like .* of rank 0"),
        ("stage1", "zero_pp_rank_1_mp_rank_00_optim_states.pt", r"1 files \*optim_states.pt, of 2"),
        ("stage1", "mp_rank_00_model_states.pt", r"no \*model_states.pt"),
    ]:
        shutil.copytree(DEEPSPEED / case, tmp_path / "copy")
        (tmp_path / "copy" / "global_step3" / lost).unlink()
        with pytest.raises(CheckpointError, match=message):
            zerofunc.import_checkpoint(tmp_path / "copy", tmp_path / "run")
        shutil.rmtree(tmp_path / "copy")
    shutil.copytree(DEEPSPEED / "stage1", tmp_path / "copy")
    inside = tmp_path / "copy" / "global_step3"
    (inside / "mp_rank_00_model_states.pt").rename(inside / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="split by something else than data parallelism"):
        zerofunc.import_checkpoint(tmp_path / "copy", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    zerofunc.import_checkpoint(DEEPSPEED / "stage1", tmp_path / "run")
    with pytest.raises(CheckpointError, match="global_step3 is there already"):
        zerofunc.import_checkpoint(DEEPSPEED / "stage1", tmp_path / "run")
    with pytest.raises(CheckpointError, match="global_step4 is of no kind that is known"):
        zerofunc.import_checkpoint(DEEPSPEED / "stage1", tmp_path / "other", "global_step4")
    torch.save({"optimizer_state_dict": {}}, inside / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (inside / "mp_rank_01_model_states.pt").rename(inside / "mp_rank_00_model_states.pt")
    (inside / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="laid out in another way than the versions that are known"):
        zerofunc.import_checkpoint(tmp_path / "copy", tmp_path / "other")
    (tmp_path / "text").write_text("")
    for wrong, message in [("text", "cannot be read"), ("nothing", "there is no"), (".", "of no kind that is known")]:
        with pytest.raises(CheckpointError, match=message):
            zerofunc.import_checkpoint(tmp_path / wrong, tmp_path / "other")


def test_numbered_parameters_are_named_where_only_one_way_fits():
    layers = [("a.weight", (2, 2)), ("a.bias", (2,)), ("frozen", (3,)), ("b.weight", (2, 2)), ("b.bias", (2,))]
    decay, rest = [(2, 2), (2, 2)], [(2,), (2,)]
    assert names_by_shape([decay, rest], layers) == [["a.weight", "b.weight"], ["a.bias", "b.bias"]]
    assert names_by_shape([[(2, 2), (2,), (2, 2), (2,)]], layers) == [["a.weight", "a.bias", "b.weight", "b.bias"]]
    assert names_by_shape([[(2, 2)], [(2, 2)], rest], layers) is None  # which of both is first?
    assert names_by_shape([[(2, 2)]], layers) is None
    assert names_by_shape([[(4,)]], layers) is None


# ---- torch.distributed.checkpoint ------------------------------------------------------------------------------------


def save_fsdp(folder):
    """Two steps under FSDP2, saved; a third one's weights."""
    model = build(Net)
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    model.forward = Net.forward.__get__(model)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)
    for step in range(3):
        if step == 2:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state, "epoch": 3}, checkpoint_id=folder)
        fit(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def go_on_from_fsdp(folder, stage):
    model = build(Net, seed=1)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]
    given = {**config(stage), "optimizer": None}
    engine = zerofunc.initialize(model, given, optimizer=torch.optim.AdamW(groups, lr=1.0))[0]
    engine.load_checkpoint(folder)
    engine.backward(fit(engine, 2, dist.get_rank()))
    engine.step()
    return values(engine.module)


def test_training_goes_on_as_under_fsdp(tmp_path):
    after = shared_pool(2).run(functools.partial(save_fsdp, tmp_path / "fsdp"))[0]
    zerofunc.import_checkpoint(tmp_path / "fsdp", tmp_path / "run")
    for found in shared_pool(2).run(functools.partial(go_on_from_fsdp, tmp_path / "run", 3)):
        torch.testing.assert_close(found, after, rtol=1e-9, atol=1e-12)


# ---- weights alone ---------------------------------------------------------------------------------------------------


class Normed(Language):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


@pytest.mark.parametrize("kind", ["pt", "nested", "old", "safetensors", "sharded", "dcp"])
def test_weights_are_read_from_files_of_all_kinds(kind, tmp_path):
    state = build(Normed, seed=3).state_dict()
    untied = {name: value for name, value in state.items() if name != "head.weight"}
    path = tmp_path / "weights"
    if kind == "pt":
        torch.save({f"module.{name}": value for name, value in state.items()}, path)
    elif kind == "nested":
        torch.save({"epoch": 3, "model": state}, path)
    elif kind == "old":
        torch.save(state, path, _use_new_zipfile_serialization=False)
    elif kind == "safetensors":
        path = tmp_path / "weights.safetensors"
        safetensors.torch.save_file(untied, path)
    elif kind == "sharded":
        zerofunc.export(zerofunc.shard(build(Normed, seed=3), 3), path, max_shard_size=200)
    else:
        dcp.save({"model": state}, checkpoint_id=path)
    done = CliRunner().invoke(app, ["convert", str(path), str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    engine = engine_of(build(Normed), 3)
    engine.module.norm.running_mean.fill_(5.0)
    engine.load_checkpoint(tmp_path / "run")
    torch.testing.assert_close(dict(engine.module_state_dict()), dict(state), rtol=0, atol=0)


# ---- code in files ---------------------------------------------------------------------------------------------------


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Borrowed:
    """An allowed function, made to give another one."""

    def __reduce__(self):
        return torch.serialization._get_layout, ("torch.save",)


def test_code_in_files_is_not_run_unless_that_is_asked_for(tmp_path):
    mark = tmp_path / "was run"
    state = build(Net).state_dict()
    torch.save({"model": state, "more": Malicious(mark)}, tmp_path / "file.pt")
    shutil.copytree(DEEPSPEED / "stage1", tmp_path / "deepspeed")
    inside = next((tmp_path / "deepspeed").rglob("mp_rank_00*"))
    content = torch.load(inside, weights_only=False)
    torch.save({**content, "mine": Malicious(mark)}, inside)
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Malicious(mark)))
    for source, message in [
        ("file.pt", "would run code when it is read"),
        ("deepspeed", "would run code when it is read"),
        ("dcp", r"holds (builtins\.getattr|pathlib\.Path), which does not belong there|does not belong there"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            zerofunc.import_checkpoint(tmp_path / source, tmp_path / "run")
        assert not mark.exists()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Borrowed()))
    with pytest.raises(CheckpointError, match="names torch.save, which is no layout"):
        zerofunc.import_checkpoint(tmp_path / "dcp", tmp_path / "run")
    zerofunc.import_checkpoint(tmp_path / "file.pt", tmp_path / "run", allow_pickle=True)
    assert mark.exists()
    mark.unlink()
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "deepspeed"), str(tmp_path / "run"), "--allow-pickle"])
    assert mark.exists(), done.output
