"""Train a classifier of handwritten digits with differential privacy, its parameters sharded.

DP-SGD (Abadi et al. 2016, https://arxiv.org/abs/1607.00133) draws each digit into a batch with the same probability,
clips every digit's gradient and adds noise to their sum. At stage 3 no rank holds the parameters, and none the digits'
gradients: `zerofunc.clipped_grad` takes their norms layer by layer, then one backward through the weighted losses.
The digits drawn and the noise are the same on any number of ranks. Opacus' accountant turns steps into the budget
(epsilon, delta) that has been spent.

    pip install 'zerofunc[demo]'
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/dp_digits.py --stage 3
    python examples/dp_digits.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import zerofunc

try:
    import matplotlib
    from opacus.accountants import RDPAccountant
    from opacus.accountants.utils import get_noise_multiplier
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit(
        f"scikit-learn, matplotlib and opacus are needed ({error}): pip install 'zerofunc[demo]'"
    ) from None

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

DELTA = 1e-4  # below one over the number of digits
SAMPLE_RATE = 0.2
MAX_NORM = 1.0
HELD_OUT = 360
EVALUATIONS = 20


@dataclass(frozen=True)
class Digits:
    """Images [n, 1, 8, 8] in -1..1 and labels, to train on and to judge by."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Point:
    """How good the classifier is at some step, and what it has cost."""

    step: int
    accuracy: float
    epsilon: float


def read_digits() -> Digits:
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = (pixels.float() / 8 - 1).view(-1, 1, 8, 8)[order], labels.long()[order]
    return Digits(x[HELD_OUT:], y[HELD_OUT:], x[:HELD_OUT], y[:HELD_OUT])


def classifier() -> nn.Module:
    """Small, for the noise grows with the number of parameters; and with GroupNorm, which keeps digits apart."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def loss_of_one(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(model(x[None]), label[None])


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """Collective at stage 3. The share of held-out digits that are recognised."""
    return (model(digits.test_x).argmax(1) == digits.test_y).float().mean().item()


def train(stage: int, steps: int, noise: float, max_norm: float, seed: int, digits: Digits) -> Iterator[Point]:
    """Collective. Train with noise of this many times ``max_norm``, and tell now and then how it goes."""
    torch.manual_seed(seed)
    ranks, rank = zerofunc.init_distributed(start_alone=False), int(os.environ.get("RANK", "0"))
    model = zerofunc.shard(classifier(), stage, page_bytes=8 << 10, resident_bytes=8 << 10)
    shards = zerofunc.shards(model)
    optimizer = torch.optim.Adam(shards.values(), lr=0.01)
    accountant = RDPAccountant()
    chance = torch.Generator().manual_seed(seed)  # the same on every rank: of whom is drawn, and of the noise
    for step in range(1, steps + 1):
        drawn = torch.rand(len(digits.x), generator=chance) < SAMPLE_RATE
        mine = drawn.nonzero()[rank::ranks, 0]
        gradient = zerofunc.clipped_grad(
            loss_of_one, model, (digits.x[mine], digits.y[mine]), max_norm, noise, chance,
            batch_size=SAMPLE_RATE * len(digits.x),
        )  # fmt: skip
        for name, shard in shards.items():
            shard.grad = gradient[name]
        optimizer.step()
        optimizer.zero_grad()
        if noise:
            accountant.step(noise_multiplier=noise, sample_rate=SAMPLE_RATE)
        if step % max(1, steps // EVALUATIONS) == 0 or step == steps:
            yield Point(step, accuracy(model, digits), accountant.get_epsilon(DELTA) if noise else float("inf"))


def draw(curves: dict[str, list[Point]], public: float, path: Path) -> None:
    """Accuracy against the budget spent."""
    figure, axis = plt.subplots(figsize=(7, 4.4), layout="constrained")
    for name, points in curves.items():
        axis.plot([point.epsilon for point in points], [point.accuracy for point in points], ".-", label=name)
    axis.axhline(public, color="gray", linestyle="--", label="without privacy")
    axis.set(xlabel=f"epsilon spent (delta = {DELTA:g})", ylabel=f"accuracy on {HELD_OUT} held-out digits", ylim=(0, 1))
    axis.legend(loc="lower right")
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main(
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 150,
    epsilon: Annotated[list[float] | None, typer.Option(help="Budget; may be given again. By default 1, 3, 8.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for privacy.png.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and noise.")] = 0,
) -> None:
    """Train classifiers of 8x8 digits within several privacy budgets; start it with torchrun for several ranks."""
    ranks, rank = zerofunc.init_distributed(start_alone=False), int(os.environ.get("RANK", "0"))
    console, digits = Console(quiet=rank != 0), read_digits()
    table = Table("", "noise", "epsilon spent", "accuracy", title=f"DP-SGD on digits: stage {stage}, {ranks} rank(s)")
    curves: dict[str, list[Point]] = {}
    for budget in epsilon or (1.0, 3.0, 8.0):
        noise = get_noise_multiplier(
            target_epsilon=budget, target_delta=DELTA, sample_rate=SAMPLE_RATE, steps=steps, accountant="rdp"
        )
        points = train(stage, steps, noise, MAX_NORM, seed, digits)
        name = f"epsilon = {budget:g}"
        curves[name] = list(track(points, f"{name:20}", total=EVALUATIONS, console=console))
        last = curves[name][-1]
        table.add_row(name, f"{noise:.2f}", f"{last.epsilon:.2f}", f"{last.accuracy:.1%}")
    *_, public = train(stage, steps, 0.0, 1e6, seed, digits)
    table.add_row("without privacy", "0", "infinite", f"{public.accuracy:.1%}")
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        draw(curves, public.accuracy, out / "privacy.png")
    console.print(table)
    console.print(f"delta = {DELTA:g}. Wrote {out / 'privacy.png'}.")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
