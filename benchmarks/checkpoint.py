"""zerofunc.checkpoint beside torch.utils.checkpoint and no checkpoint: time and peak memory of a GPT's blocks.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py
    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py --rounds 20 --write

Training is a forward and a backward; torch.utils.checkpoint has no other derivative.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from alone import Tasks, peak_mib, peak_mib_apart, seconds_of, write
from gpt import GPT, SEQUENCE, VOCABULARY, WIDTH
from report import Sheet, ratios, spread
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zerofunc import checkpoint_module

BATCH = 4
TARGET = 1.1
RESULTS = Path(__file__).with_name("RESULTS_CHECKPOINT.md")


def gpt(name: str) -> GPT:
    """A GPT whose blocks are checkpointed as ``name`` says."""
    torch.manual_seed(0)
    model = GPT()
    for block in model.blocks:
        if name == "zerofunc":
            checkpoint_module(block)
        elif name != "none":
            block.forward = partial(torch_checkpoint, block.forward, use_reentrant=name == "torch, reentrant")
    return model


def tasks_of(work: str) -> Tasks:
    """Each contender's task."""
    return {name: task(work, name) for name in CONTENDERS[work]}


def task(work: str, name: str) -> Callable[[], object]:
    """One piece of work on one model."""
    model = gpt(name)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1))
    embeddings, direction = torch.randn(2, BATCH, SEQUENCE, WIDTH).unbind()

    def of_embeddings(x: torch.Tensor) -> torch.Tensor:
        return model(None, tokens[:, 1:], x)

    def run() -> None:
        if work == "training":
            model(tokens[:, :-1], tokens[:, 1:]).backward()
        elif work == "func.grad":
            torch.func.grad(of_embeddings)(embeddings)
        else:
            with sdpa_kernel(SDPBackend.MATH):
                torch.func.jvp(of_embeddings, (embeddings,), (direction,))[1].backward()
        model.zero_grad()

    return run


CONTENDERS = {
    "training": ("none", "torch", "torch, reentrant", "zerofunc"),
    "func.grad": ("none", "zerofunc"),
    "jvp loss": ("none", "zerofunc"),
}


def sheet_of(work: str, seconds: dict[str, list[float]], peaks: dict[str, float]) -> Sheet:
    """Time and memory of one kind of work."""
    base = "torch" if "torch" in seconds else "none"
    rows = [
        [
            name,
            spread(values, 3),
            spread(ratios(seconds, name, base)),
            f"<= {TARGET:.2f}" if (name, base) == ("zerofunc", "torch") else "",
            f"{peaks[name]:.1f}",
        ]
        for name, values in seconds.items()
    ]
    return Sheet(work, ["checkpoint", "s / call", f"x {base}", "target", "peak MiB"], rows)


def main() -> None:
    """Measure, show, and write where asked to."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds, after those that warm up")
    parser.add_argument("--calls-per-round", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"rewrite {RESULTS.name} beside this script")
    parser.add_argument("--peak", nargs=2, metavar=("WORK", "NAME"), help="print one peak in MiB, and no more")
    options = parser.parse_args()
    if options.peak:
        print(peak_mib(task(*options.peak)))
        return
    sheets = []
    for work, names in CONTENDERS.items():
        seconds = seconds_of(work, tasks_of, options.rounds, options.calls_per_round)
        sheets.append(sheet_of(work, seconds, {name: peak_mib_apart(__file__, work, name) for name in names}))
        Console().print(sheets[-1].rich())
    if options.write:
        command = shlex.join(["python", "benchmarks/checkpoint.py", *sys.argv[1:]])
        write(RESULTS, "benchmarks/checkpoint.py", command, sheets)


if __name__ == "__main__":
    main()
