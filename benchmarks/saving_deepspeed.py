"""Ranks of DeepSpeed that save and load when saving.py says so; they run where deepspeed is installed."""

import json
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from saving_model import build, loss_of


def main(folder: Path, millions: int) -> None:
    """Obey until the end."""
    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    model = build(millions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(loss_of(engine))
    engine.step()
    for number in range(1, 1_000_000):
        call = folder / f"call_{number}"
        while not call.exists():
            time.sleep(0.01)
        what = call.read_text()
        dist.barrier()
        start = time.perf_counter()
        if what == "save":
            engine.save_checkpoint(str(folder / "saved_deepspeed"), "only")
            for path in (folder / "saved_deepspeed" / "only").iterdir():
                file = os.open(path, os.O_RDONLY)
                os.fsync(file)
                os.close(file)
        elif what == "load":
            engine.load_checkpoint(str(folder / "saved_deepspeed"), "only")
        dist.barrier()
        if dist.get_rank() == 0:
            part = folder / f"answer_{number}.part"
            part.write_text(json.dumps({"seconds": time.perf_counter() - start}))
            part.rename(folder / f"answer_{number}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
