"""A job that torchrun starts again and again: it goes on from its last checkpoint, and notes the samples of each step.

torchrun … tests/elastic_job.py FOLDER STAGE
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import zerofunc
from reference import Net, build, config

NUM_SAMPLES, BATCH, NUM_STEPS = 40, 8, 16


class Numbered(Dataset):
    """Samples that know their number."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, number):
        return number, torch.sin(torch.arange(4.0, dtype=torch.float64) * (number + 1))


def loss_of(model, batch):
    x = batch[1]
    return (model(x) - x[:, :3].cos()).square().mean()


def main(folder, stage):
    zerofunc.init_distributed()
    given = {**config(stage), "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 1}
    engine = zerofunc.initialize(build(Net), given, training_data=Numbered())[0]
    engine.load_checkpoint(folder)
    start = torch.tensor(time.time_ns())
    dist.broadcast(start, 0)
    with (folder / f"samples_{os.getpid()}.jsonl").open("w") as log:

        def noted(model, batch):
            entry = {"step": engine.global_steps, "start": start.item(), "size": dist.get_world_size()}
            print(json.dumps({**entry, "samples": batch[0].tolist()}), file=log, flush=True)
            time.sleep(0.05)
            return loss_of(model, batch)

        while engine.global_steps < NUM_STEPS:
            engine.train_batch(loss_fn=noted)
            engine.save_checkpoint(folder, keep_last=2, asynchronous=engine.global_steps % 2 == 0)
    full = engine.state_dict(rank=0)
    engine.destroy()
    if dist.get_rank() == 0:
        torch.save(full, folder / "final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
