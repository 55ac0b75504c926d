"""Saving and loading 400 M parameters with AdamW's state: zerofunc beside DCP on FSDP2, and beside DeepSpeed.

    OMP_NUM_THREADS=1 python benchmarks/saving.py
    OMP_NUM_THREADS=1 python benchmarks/saving.py --rounds 8 --deepspeed ../with_deepspeed/bin/python --write

Two ranks, gloo. All files go to the disk before a save ends, except DeepSpeed's, which are synchronised afterwards,
within its time. Loads read what was just saved, so that it may still be in memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from alone import write
from contenders import ADAMW, MIB, Paging
from memory import MALLOC, status_bytes
from report import Sheet, ratios, spread
from rich.console import Console
from saving_model import MILLIONS, WIDTH, build, loss_of
from timing import Plan, alternate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from train_step import MIN_WIDTH, NUM_RANKS, TIMEOUT_S

import zerofunc
from zerofunc.saving.files import PIECE_BYTES
from zerofunc_testing.pool import RankPool

RESULTS = Path(__file__).with_name("RESULTS_SAVING.md")
TARGET = 1.1
INTRO = (
    "Two ranks of one thread, gloo, one disk; zerofunc at stage 3, the state is that of AdamW. Contenders take turns "
    "within one process group, DeepSpeed in its own. Ratios are taken within each round, between neighbours in time: "
    "medians and, in brackets, quartiles. Every save is on the disk when it ends, and goes into an empty folder; loads "
    "read what was just saved, which may still be in memory. Extra memory: the most anonymous memory above that before "
    "the task."
)
DCP, DEEPSPEED = "DCP on FSDP2", "DeepSpeed"
PAGE_BYTES = WIDTH * (WIDTH + 1) * 4  # one layer
ALLOWED = f"The target is one page and one staging buffer: {PAGE_BYTES / MIB:.0f} + {PIECE_BYTES / MIB:.0f} MiB."
Tasks = dict[str, Callable[[], object]]


# -- contenders -------------------------------------------------------------------------------------------------------


def zerofunc_tasks(folder: Path, millions: int) -> Tasks:
    """Saving and loading of an engine at stage 3."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zerofunc": {"page_bytes": PAGE_BYTES, "resident_bytes": PAGE_BYTES, "timeout_s": 600},
    }
    engine = zerofunc.initialize(build(millions), config)[0]
    engine.backward(loss_of(engine))
    engine.step()

    def in_background() -> None:
        engine.save_checkpoint(folder / "saved_background", "only", asynchronous=True)

    return {
        "save": lambda: engine.save_checkpoint(folder / "saved_zerofunc", "only"),
        "load": lambda: engine.load_checkpoint(folder / "saved_zerofunc"),
        "stall": in_background,
        "wait": engine.wait_for_checkpoint,
    }


def dcp_tasks(folder: Path, millions: int) -> Tasks:
    """Saving and loading of FSDP2 by torch.distributed.checkpoint, as its tutorial does."""
    model = build(millions)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()

    def save() -> None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "saved_dcp")

    def load() -> None:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "saved_dcp")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

    return {"save": save, "load": load}


class DeepSpeed:
    """Ranks of DeepSpeed, in an environment of their own, that do what the first rank here tells them."""

    def __init__(self, python: str, folder: Path, millions: int) -> None:
        self.folder = folder
        self.calls = 0
        script = str(Path(__file__).with_name("saving_deepspeed.py"))
        command = [
            python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS), script,
            str(folder), str(millions),
        ]  # fmt: skip
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment = {**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        self.output = (folder / "deepspeed.txt").open("w")
        self.process = subprocess.Popen(command, env=environment, stdout=self.output, stderr=self.output)

    def end(self) -> None:
        """Let torchrun end its ranks."""
        self.process.terminate()
        self.process.wait()

    def __call__(self, what: str) -> dict[str, float]:
        """Let them do it, and wait."""
        self.calls += 1
        (self.folder / f"call_{self.calls}.part").write_text(what)
        (self.folder / f"call_{self.calls}.part").rename(self.folder / f"call_{self.calls}")
        answer = self.folder / f"answer_{self.calls}"
        while not answer.exists():
            if self.process.poll() is not None:
                raise RuntimeError((self.folder / "deepspeed.txt").read_text()[-3000:])
            time.sleep(0.01)
        answered: dict[str, float] = json.loads(answer.read_text())
        return answered


# -- measurements -----------------------------------------------------------------------------------------------------


def clear(folder: Path) -> None:
    """Collective. Remove what was saved, so that every save is the first one into its folder."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.glob("saved_*"):
            shutil.rmtree(path)
    dist.barrier()


def seconds_of(folder: Path, millions: int, rounds: int, python: str | None) -> dict[str, dict[str, list[float]]]:
    """Collective. Seconds of saves and of loads, beside DCP, or beside DeepSpeed if its interpreter is given."""
    ours = zerofunc_tasks(folder, millions)
    if python is None:
        rival, theirs = DCP, dcp_tasks(folder, millions)
    else:
        ranks = DeepSpeed(python, folder, millions) if dist.get_rank() == 0 else None
        rival, theirs = DEEPSPEED, {what: _call(ranks, what) for what in ("nothing", "save", "load")}
        theirs["nothing"]()  # until it is ready
    plan, found = Plan([], rounds, 1, Paging()), {}
    for what in ("save", "load"):
        tasks = {"zerofunc": ours[what], rival: theirs[what]}
        found[what] = alternate(what, tasks, plan, (lambda: clear(folder)) if what == "save" else gc.collect)
        for task in tasks.values():
            task()  # all are there, to be loaded
    if python is not None and ranks is not None:
        ranks.end()
    return found


def _call(ranks: DeepSpeed | None, what: str) -> Callable[[], object]:
    return lambda: ranks(what) if ranks is not None else None


def stalls_of(folder: Path, millions: int, rounds: int) -> dict[str, list[float]]:
    """Collective. Seconds that a save holds up training, and until one in the background is complete, in turns."""
    tasks = zerofunc_tasks(folder, millions)
    found: dict[str, list[float]] = {"synchronous": [], "asynchronous": [], "until it is complete": []}
    for number in range(rounds + 1):  # the first one makes the copy's memory
        for name, task in (("synchronous", "save"), ("asynchronous", "stall"), ("until it is complete", "wait")):
            if task != "wait":
                clear(folder)
            start = time.perf_counter()
            tasks[task]()
            if number:
                found[name].append(time.perf_counter() - start)
    return found


def peaks_of(name: str, folder: Path, millions: int) -> dict[str, float]:
    """Collective. MiB of memory that each task takes at most, above what is held between them, on the worst rank."""
    tasks = {"zerofunc": zerofunc_tasks, DCP: dcp_tasks}[name](folder, millions)
    found = {}
    for what, task in tasks.items():
        gc.collect()
        dist.barrier()
        with sampled() as samples:
            task()
        most = torch.tensor(float(max(samples) - samples[0]))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        found[what] = most.item() / MIB
    return found


@contextmanager
def sampled() -> Iterator[list[int]]:
    """Anonymous memory of this process, again and again: maps of files are not counted, which the kernel may drop."""
    samples, ended = [status_bytes("RssAnon")], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            samples.append(status_bytes("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


# -- report -----------------------------------------------------------------------------------------------------------


def sheets_of(
    seconds: dict[str, dict[str, dict[str, list[float]]]],
    stalls: dict[str, list[float]],
    peaks: dict[str, dict[str, float]],
) -> list[Sheet]:
    """Time and memory; ``seconds`` by rival, what, contender."""
    made = []
    for rival, of_pair in seconds.items():
        for what, values in of_pair.items():
            rows = [
                [
                    name,
                    spread(values[name]),
                    spread(ratios(values, name, rival)),
                    f"<= {TARGET}" if name == "zerofunc" and rival == DCP else "",
                    f"{peaks[name][what]:.0f}" if name in peaks else "",
                ]
                for name in values
            ]
            made.append(Sheet(f"{what}, beside {rival}", ["contender", "s", "x other", "target", "extra MiB"], rows))
    made[0] = Sheet(made[0].title, made[0].columns, made[0].rows, f"Extra memory: of the worst rank. {ALLOWED}")
    rows = [[name, spread(values), spread(ratios(stalls, name, "synchronous"))] for name, values in stalls.items()]
    note = f"Staging keeps a copy of this rank's state, {peaks['zerofunc']['stall']:.0f} MiB, for later saves."
    made.append(Sheet("a save that holds up training", ["save", "s", "x synchronous"], rows, note))
    return made


def main() -> None:
    """Measure and show."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--millions", type=int, default=MILLIONS, help="parameters, in millions")
    parser.add_argument("--folder", type=Path, help="where to save; the system's temporary folder by default")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter that has deepspeed")
    parser.add_argument("--write", action="store_true", help=f"rewrite {RESULTS.name} beside this script")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        peaks = {}
        for name in ("zerofunc", DCP):
            with RankPool(NUM_RANKS, timeout_s=TIMEOUT_S) as pool:
                peaks[name] = pool.run(peaks_of, name, folder, options.millions)[0]
        seconds = {}
        for rival, python in ((DCP, None), (DEEPSPEED, options.deepspeed)):
            if rival == DCP or python is not None:
                with RankPool(NUM_RANKS, timeout_s=TIMEOUT_S) as pool:
                    seconds[rival] = pool.run(seconds_of, folder, options.millions, options.rounds, python)[0]
        with RankPool(NUM_RANKS, timeout_s=TIMEOUT_S) as pool:
            stalls = pool.run(stalls_of, folder, options.millions, options.rounds)[0]
    finally:
        shutil.rmtree(folder)
    sheets = sheets_of(seconds, stalls, peaks)
    for sheet in sheets:
        Console(width=max(Console().width, MIN_WIDTH)).print(sheet.rich())
    if options.write:
        command = shlex.join(["python", "benchmarks/saving.py", *_without_paths(sys.argv[1:])])
        write(RESULTS, "benchmarks/saving.py", command, sheets, INTRO)


def _without_paths(arguments: list[str]) -> list[str]:
    """The command line without where things are on this machine."""
    return [Path(one).name if one.startswith("/") else one for one in arguments]


if __name__ == "__main__":
    main()
