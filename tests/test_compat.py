"""DeepSpeed's names and habits: what scripts import is there, and three scripts train as on DeepSpeed itself."""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn

import zerofunc
from reference import Net, build, config, fit
from zerofunc.compat import deepspeed

SCRIPTS = Path(__file__).parent / "deepspeed_scripts"

NAMES = {
    "": "initialize init_distributed add_config_arguments DeepSpeedEngine DeepSpeedConfigError OnDevice comm "
    "accelerator utils zero ops runtime checkpointing monitor get_accelerator",
    "comm": "is_initialized get_rank get_world_size barrier broadcast all_reduce all_gather all_gather_into_tensor "
    "reduce new_group ReduceOp get_world_group destroy_process_group",
    "accelerator": "get_accelerator",
    "utils": "safe_get_full_grad safe_get_full_fp32_param safe_get_full_optimizer_state safe_set_full_grad "
    "safe_set_full_fp32_param safe_set_full_optimizer_state safe_get_local_grad safe_get_local_fp32_param "
    "safe_get_local_optimizer_state safe_set_local_grad safe_set_local_fp32_param safe_set_local_optimizer_state "
    "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules RepeatingLoader logger",
    "zero": "Init GatheredParameters register_external_parameter TiledLinear",
    "runtime.lr_schedules": "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest",
    "ops.adam": "FusedAdam DeepSpeedCPUAdam",
    "checkpointing": "checkpoint configure",
    "runtime.zero.partition_parameters": "ZeroParamStatus",
}
ENGINE = (
    "forward backward step device module optimizer lr_scheduler training_dataloader train_micro_batch_size_per_gpu "
    "train_batch_size gradient_accumulation_steps gradient_clipping destroy train eval zero_grad no_sync "
    "coalesce_grad_reduction set_gradient_accumulation_boundary is_gradient_accumulation_boundary scale "
    "get_global_grad_norm was_step_applied skipped_steps global_steps global_samples micro_steps get_lr get_mom "
    "get_type zero_optimization_stage loss_scale dynamic_loss_scale empty_partition_cache deepspeed_io compile "
    "set_train_batch_size set_train_micro_batch_size local_rank global_rank world_size dp_world_size"
)


@pytest.mark.parametrize("path", NAMES)
@pytest.mark.parametrize("package", [deepspeed, zerofunc], ids=["compat", "zerofunc"])
def test_what_scripts_name_is_there(package, path):
    """As attributes of either package; and as a module of the compat layer."""
    found = package
    for part in filter(None, path.split(".")):
        found = getattr(found, part)
    assert [name for name in NAMES[path].split() if not hasattr(found, name)] == []
    if path and path not in ("zero", "checkpointing"):  # which are attributes there as well, not modules
        module = importlib.import_module(f"zerofunc.compat.deepspeed.{path}")
        assert [name for name in NAMES[path].split() if not hasattr(module, name)] == []


def arguments(tmp_path, stage, **more):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**config(stage), **more}))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    return parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.world_size(1)
def test_a_script_initializes_trains_and_asks(stage, tmp_path):
    model = build(Net)
    engine, optimizer, loader, schedule = deepspeed.initialize(
        args=arguments(tmp_path, stage), model=model, model_parameters=model.parameters()
    )
    assert [name for name in ENGINE.split() if not hasattr(engine, name)] == []
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert (loader, schedule) == (None, None)
    assert engine.gradient_clipping() == 1.0
    assert (optimizer.loss_scale, optimizer.cur_scale, optimizer.overflow) == (1.0, 1.0, False)
    weight = model.head.weight
    assert hasattr(weight, "ds_id") == (stage == 3)
    if stage == 3:
        assert (weight.ds_shape, weight.ds_numel) == (torch.Size([3, 5]), 15)
        assert weight.ds_tensor.dim() == 1
        assert weight.ds_status.name == "NOT_AVAILABLE"
        with deepspeed.zero.GatheredParameters(weight):
            assert weight.ds_status.name == "AVAILABLE"
    engine.backward(fit(engine, 0, 0))
    assert deepspeed.utils.safe_get_full_grad(weight).shape == (3, 5)
    engine.step()
    assert deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg").shape == (3, 5)
    assert (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()) == (0, dist.get_world_size())


@pytest.mark.world_size(1)
def test_the_native_package_takes_the_script_s_arguments(tmp_path):
    model = build(Net)
    engine, *_ = zerofunc.initialize(
        args=arguments(tmp_path, 2), model=model, model_parameters=model.parameters(), dist_init_required=True
    )
    assert engine.gradient_clipping() == 0
    with pytest.raises(zerofunc.ConfigError, match="found 2"):
        zerofunc.initialize(args=arguments(tmp_path, 2), model=build(Net), config=config(2))
    with pytest.raises(ValueError, match="no model parallelism"):
        zerofunc.initialize(model=build(Net), config=config(2), mpu=object())


@pytest.mark.world_size(2)
def test_a_model_is_built_in_pieces_and_written_by_one_rank():
    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        model = build(Net)
    engine, *_ = deepspeed.initialize(model=model, config=config(3), model_parameters=model.parameters())
    weight = engine.module.head.weight
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=1):
        if dist.get_rank() == 1:
            nn.init.constant_(weight, 2.0)
    torch.testing.assert_close(weight.detach().clone(), torch.full((3, 5), 2.0, dtype=torch.float64))


@pytest.mark.world_size(1)
def test_epochs_have_the_order_that_deepspeed_gives_them():
    numbers = torch.utils.data.TensorDataset(torch.arange(12))
    model = build(Net)
    loader = deepspeed.initialize(model=model, config=config(1), training_data=numbers)[2]
    first, second = ([batch.tolist() for (batch,) in loader] for _ in range(2))
    assert first == second
    loader.data_sampler.set_epoch(1)
    assert [batch.tolist() for (batch,) in loader] != first


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("script", ["classifier", "gpt", "gan"])
def test_a_script_trains_as_on_deepspeed(script, stage, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    compare = importlib.import_module("compare")
    monkeypatch.setitem(os.environ, "PYTHONPATH", os.pathsep.join(sys.path))
    found = compare.losses(sys.executable, "zerofunc.compat.deepspeed", script, stage)
    assert found is not None
    assert found[-1] == pytest.approx(compare.LAST_LOSSES[script], rel=1e-4)
