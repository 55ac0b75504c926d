"""Norms of per-sample gradients beside Opacus' ghost clipping: time and peak memory, for three models.

    pip install opacus
    OMP_NUM_THREADS=1 python benchmarks/per_sample.py
    OMP_NUM_THREADS=1 python benchmarks/per_sample.py --rounds 20 --write

`opacus` is what its optimizer does for the norms: one forward and backward of the mean loss with its hooks. `plain` is
`zerofunc.per_sample_grad_norms` of the same module, `stage0` and `stage3` of the module sharded over two ranks. All
ranks have samples of their own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from contenders import MIB, Paging
from memory import MALLOC, peak_bytes, status_bytes
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from report import Sheet, ratios, spread
from rich.console import Console
from timing import Plan, alternate
from torch import Tensor, nn
from train_step import MIN_WIDTH, NUM_RANKS, TIMEOUT_S, environment_of

import zerofunc
from zerofunc_testing.pool import RankPool

STAGES = {"stage0": 0, "stage3": 3}
NAMES = ("opacus", "plain", *STAGES)
TIME_TARGET, MEMORY_TARGET = 1.1, 1.0
RESULTS = Path(__file__).with_name("RESULTS_PER_SAMPLE.md")
WIDTH, HEADS, SEQUENCE, VOCABULARY = 256, 4, 128, 4096


class Block(nn.Module):
    """Attention and a GELU network, each on the normed residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        weights = (q @ k.mT / (WIDTH // HEADS) ** 0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Logits [batch, sequence, vocabulary] of tokens; positions are embedded for each sample, as Opacus needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(SEQUENCE).repeat(len(tokens), 1)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))


def convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


@dataclass(frozen=True)
class Subject:
    """A model and a batch."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]


def tokens() -> tuple[Tensor, Tensor]:
    both = torch.randint(VOCABULARY, (8, SEQUENCE + 1))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()  # Opacus views them


SUBJECTS = {
    "transformer": Subject(Transformer, tokens),
    "convolutional": Subject(convolutional, lambda: (torch.randn(32, 3, 32, 32), torch.randint(10, (32,)))),
    "perceptron": Subject(perceptron, lambda: (torch.randn(256, 512), torch.randint(10, (256,)))),
}


def loss_of_one(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(model(x[None]).flatten(0, -2), target.flatten())


def opacus(subject: Subject, batch: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    """A function that gives the norms by ghost clipping."""
    hooked = GradSampleModuleFastGradientClipping(subject.make().train(), loss_reduction="mean")
    x, targets = batch

    def norms() -> Tensor:
        F.cross_entropy(hooked(x).flatten(0, -2), targets.flatten()).backward()
        found = hooked.get_norm_sample()
        hooked.zero_grad()
        return found

    return norms


def build(name: str, subject: Subject) -> Callable[[], Tensor]:
    """Collective for sharded ones. A function that gives the norms of a rank's batch."""
    torch.manual_seed(0)
    batch = subject.batch()
    if name == "opacus":
        return opacus(subject, batch)
    module = subject.make()
    if name in STAGES:
        module = zerofunc.shard(module, STAGES[name])
    return lambda: zerofunc.per_sample_grad_norms(loss_of_one, module, batch)


def time_norms(plan: Plan, subject: str) -> tuple[dict[str, list[float]], float]:
    """Collective. Seconds per call of each contender by round, and how far apart their norms are, relatively."""
    warnings.simplefilter("ignore")
    tasks = {name: build(name, SUBJECTS[subject]) for name in plan.names}
    found = torch.stack([task() for task in tasks.values()])
    apart = ((found.amax(0) - found.amin(0)) / found.amin(0)).max().item()
    return alternate(subject, tasks, plan), apart


def measure_memory(name: str, subject: str) -> int:
    """The most anonymous memory at work, in bytes, over that before it is built; in a process of its own.

    A first one is built, used and dropped: what PyTorch imports and caches when it is first called stays with it.
    """
    build(name, SUBJECTS[subject])()
    gc.collect()
    baseline = status_bytes("RssAnon")
    norms = build(name, SUBJECTS[subject])
    norms()
    gc.collect()
    return peak_bytes(norms) - baseline


def measure_apart(name: str, subject: str) -> int:
    """The same from here."""
    command = [sys.executable, "-W", "ignore", __file__, "--memory", name, subject]
    ended = subprocess.run(command, env=os.environ | MALLOC, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def sheet_of(subject: str, seconds: dict[str, list[float]], apart: float, memory: dict[str, int]) -> Sheet:
    """Seconds and bytes, and their ratios to Opacus."""
    rows = []
    for name, values in seconds.items():
        row = [name, spread(values, 3), spread(ratios(seconds, name, "opacus"))]
        peak = memory.get(name)
        row += ["", ""] if peak is None else [f"{peak / MIB:.1f}", f"{peak / memory['opacus']:.2f}"]
        rows.append([*row, "" if name == "opacus" else f"<= {TIME_TARGET:.2f}, {MEMORY_TARGET:.2f}"])
    parameters = sum(p.numel() for p in SUBJECTS[subject].make().parameters())
    batch = SUBJECTS[subject].batch()[0]
    note = (
        f"{parameters / 1e6:.2f} M parameters, input {list(batch.shape)}. Norms differ by at most {apart:.0e} of them."
    )
    columns = ["contender", "s / call", "x opacus", "peak MiB", "x opacus", "targets"]
    return Sheet(subject, columns, rows, note)


def options_of() -> argparse.Namespace:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds, after those that warm up")
    parser.add_argument("--calls-per-round", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=SUBJECTS, metavar="MODEL")
    parser.add_argument("--memory", nargs=2, metavar=("NAME", "MODEL"), help="measure one memory here, and print it")
    parser.add_argument("--write", action="store_true", help=f"rewrite {RESULTS.name} beside this script")
    return parser.parse_args()


def main() -> None:
    """Measure, show, and write where asked to."""
    options = options_of()
    if options.memory:
        print(json.dumps(measure_memory(*options.memory)))
        return
    command = f"`{shlex.join(['python', 'benchmarks/per_sample.py', *sys.argv[1:]])}`"
    environment = {k: v for k, v in environment_of([]).items() if k not in ("model", "micro-batch")}
    plan = Plan(list(NAMES), options.rounds, options.calls_per_round, Paging())
    sheets = []
    for subject in options.only:
        memory = {name: measure_apart(name, subject) for name in ("opacus", "plain")}
        with RankPool(NUM_RANKS, timeout_s=TIMEOUT_S) as pool:
            seconds, apart = pool.run(time_norms, plan, subject)[0]
        sheets.append(sheet_of(subject, seconds, apart, memory))
        Console(width=max(Console().width, MIN_WIDTH)).print(sheets[-1].rich())
    if options.write:
        intro = (
            "Contenders take turns within one process group. Ratios are taken within each round, between neighbours in "
            "time; tables give their median and, in brackets, their quartiles. Memory is one process's peak, the "
            "module included, over what remains of an earlier run of the same."
        )
        facts = "\n".join(f"- {name}: {fact}" for name, fact in {**environment, "command": command}.items())
        parts = ["# Results of benchmarks/per_sample.py", intro, facts, *(sheet.markdown() for sheet in sheets)]
        RESULTS.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
