"""Trains the cases on DeepSpeed and keeps their checkpoints, with what DeepSpeed itself reads in them, in this folder.

    DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 tests/deepspeed_checkpoints/make.py [CASE …]

Needs deepspeed; made with 0.19.8 and torch 2.13.0. Each case has DeepSpeed's files and
``expected.json``: what DeepSpeed itself reads in them, and the losses of the steps that follow.
"""

import json
import shutil
import sys
from pathlib import Path

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tiny import CASES, built, config, loss, optimizer

HERE = Path(__file__).parent


def train(engine, steps):
    """The mean losses of some steps."""
    losses = []
    for step in steps:
        value = loss(engine, step, dist.get_rank())
        engine.backward(value)
        engine.step()
        mean = value.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def make(case):
    folder = HERE / case
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    model = built()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model, case), config=config(case))
    train(engine, range(3))
    engine.save_checkpoint(folder, client_state={"epoch": 2, "best": [0.5]})
    expected = {"buffers": {"seen": engine.module.seen.tolist()}}
    expected["counters"] = [engine.global_steps, engine.skipped_steps, engine.global_samples]
    expected["lr"] = engine.get_lr()
    scale = engine.optimizer.cur_scale if engine.fp16_enabled() else 1.0
    expected["losses"] = train(engine, range(3, 6))
    expected["loss_scales"] = [scale, engine.optimizer.cur_scale if engine.fp16_enabled() else 1.0]
    if dist.get_rank() == 0:
        if engine.zero_optimization_stage():
            full = get_fp32_state_dict_from_zero_checkpoint(folder)
            expected["fp32"] = {name: tensor.tolist() for name, tensor in full.items()}
        for script in folder.glob("*.py"):
            script.unlink()
        (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    get_accelerator().is_fp16_supported = lambda: True  # it is, by torch
    for case in sys.argv[1:] or CASES:
        make(case)
    dist.destroy_process_group()
