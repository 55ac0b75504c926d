"""Train a one-step generator of handwritten digits, with a forward-mode derivative taken through the ZeRO engine.

MeanFlow (Geng et al. 2025, https://arxiv.org/abs/2505.13447) learns the average velocity u(z, r, t) of the straight
path z_t = (1 - t) x + t e from a digit x to noise e, so that one evaluation leads from noise to a digit:

    x = e - u(e, r=0, t=1)

Its regression target contains the derivative of the network along the path, so every training step calls
`torch.func.jvp` on the engine. At stage 3 no rank holds the parameters that this derivative runs through.

    pip install 'zerofunc[demo]'
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/meanflow_digits.py --stage 3
    python examples/meanflow_digits.py
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zerofunc
from zerofunc import Engine, Usage

try:
    import matplotlib
    from sklearn.datasets import load_digits
    from sklearn.svm import SVC
except ImportError as error:
    raise SystemExit(f"scikit-learn and matplotlib are needed ({error}): pip install 'zerofunc[demo]'") from None

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

GLOBAL_BATCH = 256  # whatever the number of ranks
PIXELS, CLASSES = 64, 10


def rms_norm(x: Tensor) -> Tensor:
    """x over its root mean square, in plain operations: fused norms are not reliable under forward mode."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def waves(t: Tensor, width: int = 64) -> Tensor:
    """Times [batch] as sines and cosines of geometric frequencies, [batch, width].

    The frequencies are low: the target contains the derivative by t, which high ones make large and noisy.
    """
    angles = t[:, None] * torch.logspace(0, 1, width // 2, device=t.device)
    return torch.cat([angles.sin(), angles.cos()], -1)


class Block(nn.Module):
    """A residual MLP, shifted, scaled and gated by the condition; the identity at first."""

    def __init__(self, width: int, condition: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(condition, 3 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, h: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(condition).chunk(3, -1)
        return h + gate * self.down(F.silu(self.up(rms_norm(h) * (1 + scale) + shift)))


class AverageVelocity(nn.Module):
    """u(z, r, t | label): the velocity of z, averaged over the times from r to t."""

    def __init__(self, width: int = 256, depth: int = 3, condition: int = 128) -> None:
        super().__init__()
        self.times = nn.Sequential(nn.Linear(128, condition), nn.SiLU(), nn.Linear(condition, condition))
        self.labels = nn.Embedding(CLASSES, condition)
        self.first = nn.Linear(PIXELS, width)
        self.blocks = nn.ModuleList(Block(width, condition) for _ in range(depth))
        self.last = nn.Linear(width, PIXELS)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, z: Tensor, r: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        condition = F.silu(self.times(torch.cat([waves(t), waves(t - r)], -1)) + self.labels(labels))
        h = self.first(z)
        for block in self.blocks:
            h = block(h, condition)
        return self.last(rms_norm(h))


def draw_times(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Times r <= t from a logit-normal distribution; r = t, which is plain flow matching, for a quarter of them."""
    pair = torch.sigmoid(torch.randn(2, batch, device=device) - 0.4)
    r, t = pair.amin(0), pair.amax(0)
    return torch.where(torch.rand(batch, device=device) < 0.25, t, r), t


def mean_flow_loss(engine: Engine, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss to differentiate, and the squared error behind it; x is [batch, 64]."""
    r, t = draw_times(len(x), x.device)
    e = torch.randn_like(x)
    z, v = torch.lerp(x, e, t[:, None]), e - x
    # Along the path z moves with velocity v, r stays and t runs: one forward pass gives u and its total derivative.
    u, derivative = torch.func.jvp(
        lambda z, r, t: engine(z, r, t, labels), (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t))
    )
    target = (v - (t - r)[:, None] * derivative).detach()
    error = (u - target).square().sum(-1)
    return (error * (error.detach() + 1e-3).rsqrt()).mean(), error.detach().mean()  # adaptive weights, p = 1/2


@torch.no_grad()
def sample(engine: Engine, per_class: int, seed: int) -> tuple[Tensor, Tensor]:
    """Collective at stage 3. Generate digits in one step each: images [n, 64] in -1..1, and the labels asked for."""
    labels = torch.arange(CLASSES, device=engine.device).repeat(per_class)
    noise = torch.randn(len(labels), PIXELS, generator=torch.Generator().manual_seed(seed)).to(engine.device)
    u = engine(noise, torch.zeros_like(noise[:, 0]), torch.ones_like(noise[:, 0]), labels)
    return (noise - u).clamp(-1, 1), labels


def configuration(stage: int, steps: int, ranks: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.0}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": steps, "warmup_num_steps": max(2, steps // 8), "warmup_type": "linear"},
        },
        "gradient_clipping": 1.0,
        "dataloader_drop_last": True,
        "zero_optimization": {"stage": stage},
        "zerofunc": {"page_bytes": 1 << 20, "resident_bytes": 1 << 20},  # of 4.6 MB; half-sized pages would prefetch
    }


def batches(loader: DataLoader[Any]) -> Iterator[list[Tensor]]:
    """Epoch after epoch, each in an order of its own."""
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        yield from loader


def train(engine: Engine, loader: DataLoader[Any], steps: int, console: Console) -> tuple[list[float], Usage, float]:
    """Squared errors by step, the engine's usage just before the last update, and bytes this rank sent per step."""
    errors, usage = [], engine.usage()
    start, sent = time.perf_counter(), usage.moved_bytes
    status = TextColumn("step {task.completed}/{task.total}  squared error {task.fields[error]:5.1f}")
    speed = TextColumn("{task.fields[rate]:.1f} steps/s")
    with Progress(status, BarColumn(), speed, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=steps, error=math.nan, rate=0.0)
        for done, (x, labels) in enumerate(itertools.islice(batches(loader), steps), start=1):
            loss, error = mean_flow_loss(engine, x.to(engine.device), labels.to(engine.device))
            engine.backward(loss)
            usage = engine.usage()  # here, where gradients and optimizer state are both alive
            engine.step()
            errors.append(error.item())
            rate = done / (time.perf_counter() - start)
            progress.update(task, completed=done, error=statistics.fmean(errors[-50:]), rate=rate)
    return errors, usage, (engine.usage().moved_bytes - sent) / steps


def draw_samples(real: Tensor, generated: Tensor, path: Path) -> None:
    """Images by rows of ten, 0 to 9, real ones on the left."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 6.4), layout="constrained")
    for axis, images, title in zip(axes, (real, generated), ("real", "generated in one step"), strict=True):
        cells = F.pad(images.view(-1, CLASSES, 8, 8), (1, 1, 1, 1), value=-1.0)  # [rows, 10, 10, 10]
        axis.imshow(cells.transpose(1, 2).flatten(2).flatten(0, 1), cmap="gray_r", vmin=-1, vmax=1)
        axis.set_xticks([10 * digit + 4.5 for digit in range(CLASSES)], [str(digit) for digit in range(CLASSES)])
        axis.set(title=title, yticks=[])
    figure.savefig(path, dpi=100)


def draw_loss(errors: list[float], path: Path) -> None:
    window = max(1, len(errors) // 40)
    smooth = torch.tensor(errors).unfold(0, window, 1).mean(1)
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(range(window, len(errors) + 1), smooth)
    axis.set(xlabel="step", ylabel=f"squared error on rank 0, mean of {window} steps", ylim=(0, None))
    figure.savefig(path, dpi=100)


def zero_predictions(stage: int, parameters: int, ranks: int) -> tuple[float, str, float]:
    """ZeRO's bytes held per rank (float32, Adam), and sent per rank and step, with how to read the latter."""
    # ZeRO counts whole gradients at stage 1; this engine frees them during the backward, so it holds less there.
    split = [1 if stage < first else ranks for first in (3, 2, 1)]  # parameters, gradients, optimizer state
    held = parameters * sum(size / parts for size, parts in zip((4, 4, 8), split, strict=True))
    # One pass of forward mode reads each parameter once, for value and derivative together, and so does the backward.
    # At stage 3 that is two gathers and one reduction, less what is still resident when the backward turns around.
    passes, word = (3, "at most ") if stage == 3 else (2, "")
    return held, word, passes * 4 * parameters * (ranks - 1) / ranks


def megabytes(size: float) -> str:
    return f"{size / 1e6:.2f} MB"


def report(
    stage: int, ranks: int, usage: Usage, sent: float, x: Tensor, y: Tensor, images: Tensor, labels: Tensor
) -> Table:
    """What the run cost and how good the generated images are, beside ZeRO's arithmetic and the real digits x, y."""
    judge = SVC(C=10).fit(x[::2], y[::2])  # the other half tells how good the judge is
    recognised, seen = judge.score(images, labels), judge.score(x[1::2], y[1::2])
    between = torch.cdist(x, x).fill_diagonal_(math.inf)
    near, usual = torch.cdist(images, x).amin(1).median(), between.amin(1).median()
    held, word, moved = zero_predictions(stage, usage.parameters, ranks)
    whole = f"all parameters: {megabytes(4 * usage.parameters)}"
    table = Table("", "measured", "for comparison", title=f"MeanFlow on digits: stage {stage}, {ranks} rank(s)")
    table.add_row("parameters", f"{usage.parameters:,}", "")
    table.add_row("held per rank", megabytes(usage.held_bytes), f"ZeRO predicts {megabytes(held)}")
    table.add_row("gathered at most", megabytes(usage.gathered_peak_bytes), whole)
    table.add_row("sent per rank and step", megabytes(sent), f"ZeRO predicts {word}{megabytes(moved)}")
    table.add_row("samples recognised", f"{recognised:.1%}", f"unseen real digits: {seen:.1%}")
    table.add_row("distance to nearest real digit", f"{near:.2f}", f"between real digits: {usual:.2f}")
    return table


def main(
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Training steps of 256 digits.")] = 600,
    out: Annotated[Path, typer.Option(help="Folder for samples.png and loss.png.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of weights and noise.")] = 0,
) -> None:
    """Train a MeanFlow generator of 8x8 digits under ZeRO; start it with torchrun for several ranks."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if GLOBAL_BATCH % ranks:
        raise typer.BadParameter(f"{ranks} ranks do not divide the global batch of {GLOBAL_BATCH}")
    console = Console(quiet=rank != 0)
    pixels, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    dataset = TensorDataset(pixels.float() / 8 - 1, digits.long())

    torch.manual_seed(seed)  # the same weights on every rank …
    engine, _, loader, _ = zerofunc.initialize(
        model=AverageVelocity(), config=configuration(stage, steps, ranks), training_data=dataset
    )
    torch.manual_seed(seed * ranks + rank)  # … but other noise
    errors, usage, sent = train(engine, loader, steps, console)

    images, labels = (tensor.cpu() for tensor in sample(engine, per_class=100, seed=seed))  # on every rank
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        x, y = dataset.tensors
        by_digit = torch.stack([x[y == digit][:10] for digit in range(CLASSES)], 1).flatten(0, 1)
        draw_samples(by_digit, images[: 10 * CLASSES], out / "samples.png")
        draw_loss(errors, out / "loss.png")
        console.print(report(stage, ranks, usage, sent, x, y, images, labels))
        console.print(f"Wrote {out / 'samples.png'} and {out / 'loss.png'}.")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
