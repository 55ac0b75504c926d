"""Parts of the compat layer that do something of their own."""

import datetime
import logging
import os

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

import zerofunc
from reference import Branches, Net, adamw, assert_same, build, config, data, engine_of, fit, step_reference
from zerofunc.compat import deepspeed
from zerofunc.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zerofunc.compat.deepspeed.runtime.activation_checkpointing import checkpointing
from zerofunc.compat.deepspeed.runtime.utils import see_memory_usage
from zerofunc.compat.deepspeed.utils import zero_to_fp32


@pytest.mark.parametrize(("in_splits", "out_splits", "bias"), [(1, 1, True), (3, 2, True), (2, 3, False)])
def test_a_tiled_linear_layer_is_the_whole_one(in_splits, out_splits, bias):
    whole = nn.Linear(7, 5, bias=bias).double()
    tiled = deepspeed.zero.TiledLinear(
        7, 5, bias, in_splits, out_splits, init_linear=whole, dtype=torch.float64, combine_out_splits=True
    )
    x = data(0, 0, 2, 3, 7)
    torch.testing.assert_close(tiled(x), whole(x))
    tiled.input_is_already_split, tiled.combine_out_splits = True, False
    parts = tiled(x.split(tiled.in_parts, -1))
    assert [part.shape[-1] for part in parts] == tiled.out_parts
    torch.testing.assert_close(torch.cat(parts, -1), whole(x))
    with pytest.raises(RuntimeError, match="in_splits is 8; expected 1 to 7"):
        deepspeed.zero.TiledLinear(7, 5, in_splits=8)


@pytest.mark.parametrize("make", [FusedAdam, DeepSpeedCPUAdam])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.world_size(2)
def test_adam_of_that_name_is_adamw(make, stage):
    model, plain = build(Net), build(Net)
    client = make(model.parameters(), lr=0.05, weight_decay=0.1)
    settings = config(stage, gradient_clipping=0.0)
    del settings["optimizer"]
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=client, config=settings)
    assert optimizer is client
    adam = adamw(plain)
    for step in range(2):
        engine.backward(fit(engine, step, dist.get_rank()))
        engine.step()
        step_reference(plain, adam, fit, step)
    assert_same(engine, plain)
    assert isinstance(optimizer, torch.optim.Adam)
    with pytest.raises(ValueError, match="bias_correction is False"):
        make(plain.parameters(), bias_correction=False)
    assert not make(plain.parameters(), **{"adam_w_mode" if make is FusedAdam else "adamw_mode": False}).defaults[
        "decoupled_weight_decay"
    ]


@pytest.mark.world_size(2)
def test_an_optimizer_of_whole_parameters_has_the_views_too():
    model = nn.Linear(6, 4, bias=False)
    muon = {"type": "Muon", "params": {"lr": 0.05}}
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=config(3, optimizer=muon))
    before = model.weight.detach().clone()
    engine.backward(engine(torch.randn(3, 6)).square().mean())
    engine.step()
    assert not torch.equal(before, model.weight.detach().clone())
    assert optimizer.loss_scale == optimizer.cur_scale == 1.0
    assert not optimizer.dynamic_loss_scale
    assert not optimizer.overflow


@pytest.mark.world_size(2)
def test_an_overflow_is_seen_on_the_optimizer():
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine, optimizer, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config(2, fp16=fp16))
    assert (optimizer.loss_scale, optimizer.dynamic_loss_scale, optimizer.overflow) == (16.0, True, False)
    engine.backward(engine(torch.full((2, 2), 1.0, dtype=torch.float16)).sum() * torch.inf)
    engine.step()
    assert (optimizer.cur_scale, optimizer.overflow) == (8.0, True)
    assert optimizer.loss_scaler.scale == 8.0


@pytest.mark.world_size(2)
def test_marked_modules_are_kept_whole_so_that_ranks_may_branch():
    model, plain = build(Branches), build(Branches)
    assert deepspeed.utils.set_z3_leaf_modules(model, [nn.ModuleList]) == [model.experts]
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model.experts]
    engine, *_ = deepspeed.initialize(model=model, config=config(3, gradient_clipping=0.0))

    def loss(model, step, rank):
        return model(data(step, rank), rank).square().mean()

    engine.backward(loss(engine, 0, dist.get_rank()))
    engine.step()
    step_reference(plain, adamw(plain), loss, 0)
    assert_same(engine, plain)


def test_marks_go_by_class_name_and_suffix():
    model = build(Branches)
    utils = deepspeed.utils
    assert utils.set_z3_leaf_modules(model, ["Linear"])[0] is model.stem
    utils.unset_z3_leaf_modules(model, ["torch.nn.modules.linear.Linear"])
    assert utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules_by_name(model, ["head", "tail"], raise_if_not_found=False) == (
        [model.head],
        ["tail"],
    )
    assert utils.set_z3_leaf_modules_by_suffix(model, [".1"])[0] == [model.experts[1]]
    assert utils.z3_leaf_module(model.experts[1])
    with pytest.raises(ValueError, match="no module named so: tail"):
        utils.set_z3_leaf_modules_by_name(model, ["tail"])
    with pytest.raises(ValueError, match="no module of"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d])


def test_settings_of_checkpointing_are_not_needed(caplog):
    with caplog.at_level(logging.WARNING, "zerofunc"):
        checkpointing.configure(None, partition_activations=True)
    assert "partition_activations" in caplog.text
    assert checkpointing.is_configured()
    x = data(0, 0, 3).requires_grad_()
    checkpointing.checkpoint(torch.sin, x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_on_device_builds_where_and_what_it_says():
    with deepspeed.OnDevice(dtype=torch.float16, device="meta"):
        layer = nn.Linear(2, 2)
    assert (layer.weight.is_meta, layer.weight.dtype, torch.get_default_dtype()) == (True, torch.float16, torch.float32)
    with deepspeed.OnDevice(dtype=torch.float16, enabled=False):
        assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.world_size(1)
def test_checkpoints_are_turned_into_float32_weights(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    section = {"bf16": {"enabled": True}, "zerofunc": {"rounded_masters": False}}
    engine = deepspeed.initialize(model=model, config={"train_batch_size": 1, **section})[0]
    engine.save_checkpoint(tmp_path, "one")
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "pickled", tag="one")
    loaded = torch.load(tmp_path / "pickled" / "pytorch_model.bin", weights_only=True)
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "safe", safe_serialization=True)
    loaded = safetensors.torch.load_file(tmp_path / "safe" / "model.safetensors")
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    zero_to_fp32.load_state_dict_from_zero_checkpoint(plain, tmp_path)
    torch.testing.assert_close(dict(plain.state_dict()), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="does not say what was frozen"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)


@pytest.mark.world_size(2)
def test_scripts_start_and_communicate_as_ever():
    said, logger = [], logging.getLogger("zerofunc")
    handler, level = logging.Handler(), logger.level
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        deepspeed.init_distributed(dist_backend="nccl", timeout=datetime.timedelta(minutes=1))
        see_memory_usage("so far", force=True)
        deepspeed.log_dist("on the second rank", ranks=[1])
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    text = " ".join(said)
    rank, comm = deepspeed.comm.get_rank(), deepspeed.comm
    assert ("so far" in text, "on the second rank" in text) == (rank == 0, rank == 1)
    total = torch.tensor([1.0 + rank])
    comm.all_reduce(total, op=comm.ReduceOp.MAX)
    assert total.item() == 2
    assert comm.get_all_ranks_from_group(comm.get_world_group()) == [0, 1]
    assert comm.get_global_rank(None, 1) == comm.get_global_rank(comm.get_world_group(), 1) == 1
    assert comm.get_local_rank() == int(os.environ.get("LOCAL_RANK", "0"))


def test_the_accelerator_is_torch_s_or_the_cpu():
    accelerator = deepspeed.get_accelerator()
    device = accelerator.current_device_name()
    assert accelerator.on_accelerator(torch.zeros(1, device=device))
    accelerator.manual_seed(0)
    state = accelerator.get_rng_state()
    first = torch.rand(2, device=device)
    accelerator.set_rng_state(state)
    assert torch.equal(first, torch.rand(2, device=device))
    assert accelerator.memory_allocated() >= 0
    assert accelerator.device_count() >= 1
    assert accelerator.is_available()
    assert torch.float32 in accelerator.supported_dtypes()
    assert (accelerator.communication_backend_name() == "gloo") == (device == "cpu")
    accelerator.set_device(accelerator.current_device())
    accelerator.synchronize()
    accelerator.empty_cache()


def test_names_of_the_native_package_come_first():
    assert zerofunc.initialize is not deepspeed.initialize
    with pytest.raises(AttributeError, match="no attribute 'pipe'"):
        zerofunc.pipe  # noqa: B018
    assert zerofunc.zero is deepspeed.zero


@pytest.mark.world_size(1)
def test_what_upstream_has_and_this_has_not_is_refused():
    with pytest.raises(ValueError, match="no sequence parallelism"):
        deepspeed.initialize(model=build(Net), config=config(0), mesh_param=(1, 2))
    with pytest.raises(zerofunc.ConfigError, match="found 0"):
        deepspeed.initialize(model=build(Net))
    assert engine_of(build(Net), 0).gradient_clipping() == 0.0
