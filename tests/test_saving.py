"""Checkpoints: training goes on from them at any stage and on any number of ranks as if it had not been interrupted."""

import copy
import functools
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import zerofunc
from reference import EVERY_STAGE, STAGES, Language, Net, build, config, data, engine_of, fit, values
from zerofunc.saving.files import TensorFile
from zerofunc.saving.manifest import CheckpointError, read_manifest
from zerofunc.saving.packing import Packed, read_packed
from zerofunc_testing.pool import shared_pool

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.05}}
MUON = {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9}}


class Everything(nn.Module):
    """Dropout, buffers that differ by rank, a frozen and an empty parameter, tied weights, a state of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 4)
        self.tied = nn.Linear(6, 4)
        self.tied.weight = self.head.weight
        self.frozen, self.empty = nn.Parameter(torch.randn(3), False), nn.Parameter(torch.empty(0))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        h = nn.functional.dropout(torch.tanh(self.first(x)), 0.3, self.training)
        with torch.no_grad():
            self.mean.lerp_(h.float().mean(0), 0.1)
        return self.head(h) + self.tied(h).sin() + self.frozen.sum() + self.empty.sum()

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def everything():
    return Everything().float()


def train(engine, steps, loss=fit):
    for step in steps:
        engine.backward(loss(engine, step, dist.get_rank()))
        engine.step()


def loss_of_everything(model, step, rank):
    return model(data(step, rank).to(next(model.parameters()).dtype)).square().mean()


def state_of(engine):
    """All that training keeps, in full."""
    optimizer = engine.optimizer
    shards = zerofunc.shards(engine.module)
    is_whole = getattr(optimizer, "is_whole", lambda shard: False)
    full = {
        (name, key): zerofunc.safe_get_full_optimizer_state(parameter, key)
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad and parameter.numel()
        for key in (optimizer.full_state if is_whole(shards[name]) else optimizer.state.get)(shards[name]) or ()
    }
    masters = {n: zerofunc.safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    return copy.deepcopy({"masters": masters, "optimizer": full, "buffers": buffers, "random": torch.rand(3)})


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# ---- the same size ---------------------------------------------------------------------------------------------------


PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2}},
}


@EVERY_STAGE
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.world_size(2)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(stage, precision, tmp_path):
    """With accumulation under way, a schedule, dropout, and buffers of each rank's own."""

    def engine_here():
        torch.manual_seed(3)
        more = {"gradient_accumulation_steps": 2, "scheduler": SCHEDULE, **PRECISIONS[precision]}
        return engine_of(everything(), stage, **more)

    engine = engine_here()
    torch.manual_seed(dist.get_rank())
    train(engine, range(5), loss_of_everything)  # two steps and a half
    engine.save_checkpoint(tmp_path, "half", client_state={"note": (1, torch.ones(2))})
    train(engine, range(5, 9), loss_of_everything)
    expected = state_of(engine)
    again = engine_here()
    train(again, range(20, 22), loss_of_everything)
    folder, client_state = again.load_checkpoint(tmp_path)
    assert folder == str(tmp_path / "half")
    assert_equal(client_state, {"note": (1, torch.ones(2))})
    train(again, range(5, 9), loss_of_everything)
    assert_equal(state_of(again), expected)
    for name in ("global_steps", "skipped_steps", "global_samples", "micro_steps"):
        assert getattr(again, name) == getattr(engine, name), name
    assert again.get_lr() == engine.get_lr() and again.loss_scale() == engine.loss_scale()
    assert again.module.calls == engine.module.calls
    assert_equal(values(again.module), values(engine.module))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_accumulation_goes_on_with_other_micro_steps_where_that_comes_out_even(stage, tmp_path):
    def engine_here(micro_steps):
        return engine_of(build(Net), stage, gradient_accumulation_steps=micro_steps)

    engine = engine_here(4)
    train(engine, range(6))  # a step and a half
    engine.save_checkpoint(tmp_path)
    train(engine, [6, 6])
    again = engine_here(2)
    again.load_checkpoint(tmp_path)
    train(again, [6])  # which weighs twice as much here
    assert (again.global_steps, again.is_gradient_accumulation_boundary()) == (2, False)
    torch.testing.assert_close(values(again.module), values(engine.module), rtol=1e-9, atol=1e-12)
    other = engine_here(3)
    before = values(other.module)
    with pytest.raises(
        CheckpointError, match=r"after micro-step 2 of 4, which is no whole number of the 3 micro-steps"
    ):
        other.load_checkpoint(tmp_path)
    torch.testing.assert_close(values(other.module), before, rtol=0, atol=0)
    other.load_checkpoint(tmp_path, load_optimizer_states=False)  # without the gradients either
    train(other, range(3))
    assert other.global_steps == 2


# ---- another size ----------------------------------------------------------------------------------------------------


NUM_PARTS = 4  # of a global batch, divided over whatever ranks there are


def loss_of_parts(model, step):
    rank, size = dist.get_rank(), dist.get_world_size()
    return torch.stack([fit(model, step, part) for part in range(rank, NUM_PARTS, size)]).mean()


def made(stage, optimizer, page_bytes):
    more = {} if optimizer is None else {"optimizer": optimizer}
    return engine_of(build(Net, seed=dist.get_world_size()), stage, zerofunc={"page_bytes": page_bytes}, **more)


def save_some(folder, stage, optimizer):
    engine = made(stage, optimizer, 160)
    engine.load_checkpoint(folder, "start")
    for step in range(2):
        engine.backward(loss_of_parts(engine, step))
        engine.step()
    engine.save_checkpoint(folder, f"{dist.get_world_size()} ranks, stage {stage}")
    engine.destroy()


def start(folder, optimizer):
    engine = made(0, optimizer, 160)
    engine.save_checkpoint(folder, "start")
    engine.destroy()


def go_on(folder, stage, optimizer, tags):
    """State after the load, and after one more step, for each checkpoint."""
    found = {}
    for tag in tags:
        engine = made(stage, optimizer, 400)
        engine.load_checkpoint(folder, tag)
        before = state_of(engine)
        engine.backward(loss_of_parts(engine, 2))
        engine.step()
        found[tag] = before, state_of(engine)
    return found


def without_random(state):
    return {key: value for key, value in state.items() if key != "random"}


SOME = [(1, 0), (2, 3)]
ALL = [(size, stage) for size in (1, 2, 4) for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize("optimizer", [None, pytest.param(MUON, marks=pytest.mark.slow)], ids=["AdamW", "Muon"])
@pytest.mark.parametrize("sizes", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_checkpoint_loads_on_any_number_of_ranks_at_any_stage(sizes, optimizer, tmp_path):
    shared_pool(1).run(functools.partial(start, tmp_path, optimizer))
    for size, stage in sizes:
        shared_pool(size).run(functools.partial(save_some, tmp_path, stage, optimizer))
    tags = [f"{size} ranks, stage {stage}" for size, stage in sizes]
    expected = None
    for size, stage in [*sizes, *([(4, 3), (4, 0)] if sizes == SOME else [])]:
        for of_rank in shared_pool(size).run(functools.partial(go_on, tmp_path, stage, optimizer, tags)):
            for before, after in of_rank.values():
                expected = expected or (without_random(before), without_random(after))
                torch.testing.assert_close(without_random(before), expected[0], rtol=1e-9, atol=1e-12)
                torch.testing.assert_close(without_random(after), expected[1], rtol=1e-9, atol=1e-12)


@STAGES
@pytest.mark.world_size(2)
def test_precision_may_change(stage, tmp_path):
    engine = engine_of(everything(), stage, bf16={"enabled": True})
    train(engine, range(2), loss_of_everything)
    engine.save_checkpoint(tmp_path)
    again = engine_of(everything(), stage)
    again.load_checkpoint(tmp_path)
    found, expected = state_of(again), state_of(engine)
    assert_equal(found["masters"], expected["masters"])
    assert_equal(found["optimizer"], expected["optimizer"])
    assert next(again.module.parameters()).dtype == torch.float32


# ---- what is loaded --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_weights_alone_are_loaded_where_that_is_asked_for(stage, tmp_path):
    engine = engine_of(build(Net), stage, scheduler=SCHEDULE)
    train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    again = engine_of(build(Net, seed=1), stage, scheduler=SCHEDULE)
    again.load_checkpoint(tmp_path, load_module_only=True)
    assert_equal(values(again.module), values(engine.module))
    assert again.global_steps == 0 and not again.optimizer.state and again.get_lr() != engine.get_lr()
    again.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert again.global_steps == 3 and not again.optimizer.state and again.lr_scheduler.last_epoch == 3


@pytest.mark.world_size(2)
def test_frozen_parameters_may_be_left_out(tmp_path):
    engine = engine_of(everything(), 3)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert read_manifest(tmp_path / "global_step0").excluded == ("frozen",)
    again = engine_of(everything(), 3)
    with torch.no_grad(), zerofunc.gathered(again.module, write=True):
        again.module.frozen.fill_(7)
    again.load_checkpoint(tmp_path)
    assert again.module.frozen.sum() == 21


def test_tied_weights_are_stored_once(tmp_path):
    engine = engine_of(build(Language), 3)
    engine.save_checkpoint(tmp_path)
    manifest = read_manifest(tmp_path / "global_step0")
    assert manifest.ties == {"head.weight": "embedding.weight"}
    stored = sum(file.stat().st_size for file in (tmp_path / "global_step0").glob("data_*"))
    assert stored < 8 * sum(p.numel() for p in engine.module.parameters()) + 1000


def test_files_are_safetensors_and_plain(tmp_path):
    engine = engine_of(build(Net), 0)
    train_alone(engine)
    engine.save_checkpoint(tmp_path)
    folder = tmp_path / "global_step1"
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    with TensorFile(folder / "data_00000.safetensors") as file:
        assert_equal(file.read("model/first.weight").view(6, 4), engine.module.first.weight.detach())
    assert read_packed(folder / "shared.safetensors")["counters"]["steps"]["global_steps"] == 1


def train_alone(engine):
    engine.backward(fit(engine, 0, 0))
    engine.step()


def test_plain_data_keeps_its_types(tmp_path):
    import numpy as np

    value = {
        "a": [1, 2.5, float("inf"), None, True, "é", b"\0x", (1, (2,)), {3, 4}, torch.Size([1, 2])],
        (1, "key"): {0: torch.arange(3), 1.5: np.arange(2.0), None: np.float32(2), "b": torch.bfloat16},
        "scalar": torch.tensor(2.0), "empty": torch.empty(0, 3), "bool": torch.tensor([True, False]),
    }  # fmt: skip
    Packed.of(value, "value").write(tmp_path / "file")
    found = read_packed(tmp_path / "file")
    torch.testing.assert_close(found["bool"], value["bool"])
    for key, one in value.items():
        assert type(found[key]) is type(one)
    assert found["a"] == value["a"] and [type(x) for x in found["a"]] == [type(x) for x in value["a"]]
    assert_equal(found[1, "key"][0], torch.arange(3))
    assert found[1, "key"][1.5].tolist() == [0, 1] and found[1, "key"]["b"] is torch.bfloat16
    assert found["empty"].shape == (0, 3) and found["scalar"].shape == ()


# ---- where it does not fit -------------------------------------------------------------------------------------------


class Other(Net):
    def __init__(self):
        super().__init__()
        self.middle, self.tail = nn.Linear(6, 5, bias=False), nn.Linear(3, 3)
        self.head = nn.Linear(5, 4)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_another_model_is_refused_by_names_and_nothing_is_changed(stage, tmp_path):
    engine_of(build(Net), stage).save_checkpoint(tmp_path)
    other = engine_of(build(Other), stage)
    before = state_of(other)
    with pytest.raises(CheckpointError) as caught:
        other.load_checkpoint(tmp_path)
    for words in ("head.weight (3, 5) there, (4, 5) here", "it does not have tail.", "does not have middle.bias"):
        assert words in str(caught.value)
    assert_equal(without_random(state_of(other)), without_random(before))
    sgd = engine_of(build(Net), stage, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    with pytest.raises(CheckpointError, match=r"its optimizer is AdamW, this one SGD"):
        sgd.load_checkpoint(tmp_path)
    sgd.load_checkpoint(tmp_path, load_optimizer_states=False)


@pytest.mark.world_size(2)
def test_parts_of_another_model_are_loaded_where_that_is_asked_for(tmp_path):
    engine_of(build(Net), 3).save_checkpoint(tmp_path)
    model = build(Net, seed=1)
    model.tail = nn.Linear(3, 3).double()
    engine = engine_of(model, 3)
    tail = values(engine.module.tail)
    engine.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)
    assert_equal(values(engine.module.first), values(build(Net).first))
    assert_equal(values(engine.module.tail), tail)


@pytest.mark.world_size(2)
def test_what_cannot_be_saved_is_named_on_every_rank_before_anything_is_written(tmp_path):
    engine = engine_of(build(Net), 2)
    with pytest.raises(CheckpointError, match=r"state\['client_state'\]\['a'\]\[0\] is a lock, which a checkpoint"):
        engine.save_checkpoint(tmp_path, client_state={"a": [threading.Lock()]})
    with pytest.raises(ValueError, match="save_dir is empty"):
        engine.save_checkpoint("")
    with pytest.raises(ValueError, match=r"tag is '\.\./x'; expected the name of a folder"):
        engine.save_checkpoint(tmp_path, "../x")
    with pytest.raises(ValueError, match="keep_last is 0"):
        engine.save_checkpoint(tmp_path, keep_last=0)
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.world_size(2)
def test_a_missing_checkpoint_is_named(tmp_path):
    engine = engine_of(build(Net), 3)
    assert engine.load_checkpoint(tmp_path) == (None, {})
    engine.save_checkpoint(tmp_path, "a")
    with pytest.raises(CheckpointError, match="has no checkpoint 'b'; the checkpoints there are a"):
        engine.load_checkpoint(tmp_path, "b")
    with pytest.raises(CheckpointError, match="no checkpoint in that folder"):
        engine.load_checkpoint(tmp_path / "a", "b")


@pytest.mark.parametrize("validation", ["Ignore", "Warn", "Fail"])
@pytest.mark.world_size(2)
def test_tags_that_differ_between_ranks(validation, tmp_path):
    engine = engine_of(build(Net), 3, checkpoint={"tag_validation": validation})
    tag = f"of rank {dist.get_rank()}"
    if validation == "Fail":
        with pytest.raises(ValueError, match="ranks save under different tags"):
            engine.save_checkpoint(tmp_path, tag)
    else:
        engine.save_checkpoint(tmp_path, tag)
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "of rank 0")


# ---- several checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.world_size(2)
def test_a_tag_is_saved_again_and_old_ones_are_removed(tmp_path):
    engine = engine_of(build(Net), 3)
    for step, tag in enumerate(["a", "b", "c", "a"]):
        train(engine, [step])
        engine.save_checkpoint(tmp_path, tag, keep_last=2, save_latest=tag != "c")
    dist.barrier()
    seen = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert seen == ["a", "c", "latest"]
    again = engine_of(build(Net, seed=1), 3)
    assert again.load_checkpoint(tmp_path)[0] == str(tmp_path / "a")
    assert_equal(values(again.module), values(engine.module))


def test_what_is_no_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    with pytest.raises(CheckpointError, match="mine exists and is not a checkpoint of zerofunc"):
        engine_of(build(Net), 0).save_checkpoint(tmp_path, "mine")
    assert (tmp_path / "mine" / "notes").read_text() == "keep"


# ---- in the background -----------------------------------------------------------------------------------------------


@STAGES
@pytest.mark.world_size(2)
def test_a_save_in_the_background_is_of_the_moment_that_it_was_asked_for(stage, tmp_path):
    engine = engine_of(build(Net), stage, zerofunc={"checkpoint": {"asynchronous": True, "keep_last": 2}})
    expected = []
    for step in range(3):
        train(engine, [step])
        expected.append(state_of(engine))
        engine.save_checkpoint(tmp_path, str(step), client_state={"value": torch.full((2,), step)})
        train(engine, [10 + step])
    engine.wait_for_checkpoint()
    assert not (tmp_path / "0").exists()
    for step in (1, 2):
        again = engine_of(build(Net, seed=1), stage)
        client_state = again.load_checkpoint(tmp_path, str(step))[1]
        assert_equal(client_state["value"], torch.full((2,), step))
        assert_equal(without_random(state_of(again)), without_random(expected[step]))


@pytest.mark.world_size(2)
def test_a_failure_in_the_background_reaches_the_user(tmp_path):
    engine = engine_of(build(Net), 3)

    def full(*args):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("zerofunc.saving.pieces.write_tensors", full)
        engine.save_checkpoint(tmp_path, "a", asynchronous=True)
        with pytest.raises(CheckpointError, match=r"rank 1: \[Errno 28\] No space left on device"):
            engine.wait_for_checkpoint()
    engine.wait_for_checkpoint()  # once
    engine.save_checkpoint(tmp_path, "b")
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "b")


# ---- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.world_size(2)
def test_the_loader_goes_on_where_it_stood(tmp_path):
    def initialized():
        samples = TensorDataset(torch.arange(40.0).view(40, 1).expand(40, 4).contiguous())
        made = zerofunc.initialize(
            nn.Linear(4, 1), {**config(2), "gradient_accumulation_steps": 2}, training_data=samples
        )
        return made[0]

    def batches(engine, steps):
        seen = []
        for _ in range(steps):
            engine.train_batch(
                loss_fn=lambda engine, batch: seen.append(batch[0][:, 0].tolist()) or engine(batch[0]).mean()
            )
        return seen

    engine = initialized()
    batches(engine, 3)
    engine.save_checkpoint(tmp_path)
    again, untouched = initialized(), initialized()
    assert batches(again, 1) == batches(untouched, 1)
    data = tmp_path / "global_step3" / "data_00001.safetensors"
    whole = data.read_bytes()
    dist.barrier()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    dist.barrier()
    with pytest.raises(CheckpointError, match="is damaged in "):  # found by one rank
        again.load_checkpoint(tmp_path)
    assert batches(again, 1) == batches(untouched, 1)
    dist.barrier()
    data.write_bytes(whole)
    dist.barrier()
    again.load_checkpoint(tmp_path)
    assert batches(again, 5) == batches(engine, 5)
