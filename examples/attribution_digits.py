"""Find the training digits that are responsible for what a classifier makes of a test digit.

TRAK (Park et al. 2023, https://arxiv.org/abs/2303.14186) treats a trained network as linear in its parameters. With
features phi(x), the random projections of the gradient of a digit's margin, the effect of training digit i on the
margin of test digit t is phi(t) (Phi^T Phi)^-1 phi(i) (1 - p_i), averaged over some networks.
`zerofunc.per_sample_projections` gives the features layer by layer, at stage 3 from parameters that no rank holds, and
the same on any number of ranks.

Two checks. How many of the digits held most responsible show the same digit (one in ten by chance). And the linear
datamodeling score: networks are trained on random halves of the digits; the rank correlation of the margins that they
reach with those that the attributions of their halves add up to.

    pip install 'zerofunc[demo]'
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/attribution_digits.py --stage 3
    python examples/attribution_digits.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import zerofunc

try:
    import matplotlib
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit(f"scikit-learn and matplotlib are needed ({error}): pip install 'zerofunc[demo]'") from None

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

TEST = 160
TOP = 10
SHOWN_TESTS, SHOWN_EACH = 6, 5
TRAINING_STEPS = 150
RATE = 0.01
RIDGE = 0.1  # over the mean eigenvalue

Data = tuple[Tensor, Tensor]


def read_digits() -> tuple[Data, Data]:
    """Images [n, 64] and labels, to train on and to explain."""
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = (pixels.float() / 8 - 1)[order], labels.long()[order]
    return (x[TEST:], y[TEST:]), (x[:TEST], y[:TEST])


def classifier(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-odds of the right label: log p / (1 - p)."""
    right = labels[..., None] == torch.arange(logits.shape[-1])
    others = logits.masked_fill(right, -torch.inf)
    return (logits * right).sum(-1) - others.logsumexp(-1)


def margin_of_one(model: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    return margins(model(x), label)


def everyone(mine: Any) -> list[Any]:
    """Collective. What each rank has."""
    if not dist.is_initialized():
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def interleaved(mine: Tensor, total: int) -> Tensor:
    """Collective. Rows ``rank::ranks`` of every rank, put together again."""
    parts = everyone(mine)
    whole = mine.new_empty(total, *mine.shape[1:])
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole


# -- attribution ------------------------------------------------------------------------------------------------------


def trained(stage: int, seed: int, train: Data) -> nn.Module:
    """Collective. A classifier, trained on all ranks' digits."""
    model = zerofunc.shard(classifier(seed), stage, page_bytes=8 << 10, resident_bytes=8 << 10)
    optimizer = torch.optim.Adam(zerofunc.shards(model).values(), lr=RATE)
    ranks, rank = zerofunc.init_distributed(start_alone=False), int(os.environ.get("RANK", "0"))
    x, y = train[0][rank::ranks], train[1][rank::ranks]
    for _ in range(TRAINING_STEPS):
        (F.cross_entropy(model(x), y, reduction="sum") * ranks / len(train[0])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def features(model: nn.Module, data: Data, projector: zerofunc.Projector) -> Tensor:
    """Collective. Projected gradients of the margins, [n, projector.dim]; each rank does its share."""
    ranks, rank = zerofunc.init_distributed(start_alone=False), int(os.environ.get("RANK", "0"))
    mine = (data[0][rank::ranks], data[1][rank::ranks])
    return interleaved(
        zerofunc.per_sample_projections(margin_of_one, model, mine, projector, chunk_size=256), len(data[0])
    )


@torch.no_grad()
def attributions(model: nn.Module, train: Data, test: Data, projector: zerofunc.Projector) -> Tensor:
    """Collective. The effect of each training digit on each test digit's margin, [test, train]."""
    phi, phi_test = (features(model, data, projector).double() for data in (train, test))
    doubt = torch.sigmoid(-margins(model(train[0]), train[1]))  # one minus the probability of the right label
    kernel = phi.T @ phi
    kernel += RIDGE * kernel.diagonal().mean() * torch.eye(len(kernel))
    return phi_test @ torch.linalg.solve(kernel, phi.T) * doubt


# -- checks -----------------------------------------------------------------------------------------------------------


def margins_by_half(halves: Tensor, seeds: list[int], train: Data, test: Data) -> Tensor:
    """Margins of the test digits, [halves, test], each for a classifier trained on the digits of a half.

    ``halves`` [halves, train] has 1 where a digit is used. All classifiers are trained at once, as one vmap.
    """
    models = [classifier(seed) for seed in seeds]
    stacked, _ = torch.func.stack_module_state(models)
    optimizer = torch.optim.Adam(stacked.values(), lr=RATE)

    def loss(parameters: dict[str, Tensor], half: Tensor) -> Tensor:
        logits = torch.func.functional_call(models[0], parameters, (train[0],))
        return (F.cross_entropy(logits, train[1], reduction="none") * half).sum() / half.sum()

    for _ in range(TRAINING_STEPS):
        optimizer.zero_grad()
        torch.func.vmap(loss)(stacked, halves).sum().backward()
        optimizer.step()
    with torch.no_grad():
        logits = torch.func.vmap(lambda p: torch.func.functional_call(models[0], p, (test[0],)))(stacked)
    return margins(logits, test[1])


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's correlation of each column of two matrices [n, m]."""
    ranks = [tensor.argsort(0).argsort(0).double() for tensor in (a, b)]
    centered = [F.normalize(rank - rank.mean(0), dim=0) for rank in ranks]
    return (centered[0] * centered[1]).sum(0)


def datamodeling_score(scores: Tensor, train: Data, test: Data, num_halves: int, seed: int) -> float:
    """Collective. How well sums of attributions foretell the margins after training on half of the digits."""
    ranks, rank = zerofunc.init_distributed(start_alone=False), int(os.environ.get("RANK", "0"))
    draw = torch.rand(num_halves, len(train[0]), generator=torch.Generator().manual_seed(seed))
    halves = (draw < draw.median(1, keepdim=True).values).float()
    seeds = range(1000 + seed, 1000 + seed + num_halves)
    reached = interleaved(margins_by_half(halves[rank::ranks], list(seeds[rank::ranks]), train, test), num_halves)
    return rank_correlation(halves.double() @ scores.T, reached).mean().item()


# -- picture ----------------------------------------------------------------------------------------------------------


def draw(scores: Tensor, train: Data, test: Data, path: Path) -> None:
    """Test digits, and for each the training digits that help it most and those that oppose it most."""
    figure, axes = plt.subplots(SHOWN_TESTS, 2 * SHOWN_EACH + 1, figsize=(11, 6.6), layout="constrained")
    least_sure = scores.amax(1).topk(SHOWN_TESTS).indices  # where single digits matter most
    for row, index in zip(axes, least_sure.tolist(), strict=True):
        order = scores[index].argsort(descending=True)
        shown = [(test, index), *((train, i) for i in [*order[:SHOWN_EACH].tolist(), *order[-SHOWN_EACH:].tolist()])]
        for axis, ((x, y), i), color in zip(row, shown, "k" + "g" * SHOWN_EACH + "r" * SHOWN_EACH, strict=True):
            axis.imshow(x[i].view(8, 8), cmap="gray_r", vmin=-1, vmax=1)
            axis.set(xticks=[], yticks=[], xlabel=str(y[i].item()))
            plt.setp(axis.spines.values(), color=color, linewidth=2)
    for column, title in ((0, "test digit"), (3, "most responsible"), (3 + SHOWN_EACH, "most opposed")):
        axes[0, column].set_title(title)
    figure.savefig(path, dpi=100)


def main(
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 3,
    networks: Annotated[int, typer.Option(min=1, help="Networks to average over.")] = 3,
    dim: Annotated[int, typer.Option(min=1, help="Length of a projected gradient.")] = 512,
    halves: Annotated[int, typer.Option(min=4, help="Networks trained on half of the digits, for the check.")] = 40,
    out: Annotated[Path, typer.Option(help="Folder for attribution.png.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of weights, projections and halves.")] = 0,
) -> None:
    """Attribute what classifiers say of 8x8 digits to training digits; start it with torchrun for several ranks."""
    ranks, rank = zerofunc.init_distributed(start_alone=False), int(os.environ.get("RANK", "0"))
    console, (train, test) = Console(quiet=rank != 0), read_digits()
    total = torch.zeros(len(test[0]), len(train[0]), dtype=torch.float64)
    for index in range(networks):
        model = trained(stage, seed + index, train)
        total += attributions(model, train, test, zerofunc.Projector(dim, seed=seed + index)) / networks
        console.print(f"network {index + 1} of {networks} attributed", highlight=False)
    top, bottom = (total.topk(TOP, largest=largest).indices for largest in (True, False))
    table = Table("", "measured", "by chance", title=f"Attribution of digits: stage {stage}, {ranks} rank(s)")
    for name, found in (("responsible", top), ("opposed", bottom)):
        same = (train[1][found] == test[1][:, None]).double().mean().item()
        table.add_row(f"same digit among the {TOP} most {name}", f"{same:.1%}", "10.0%")
    score = datamodeling_score(total, train, test, halves, seed)
    table.add_row("linear datamodeling score", f"{score:.3f}", "0.000")
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        draw(total, train, test, out / "attribution.png")
    console.print(table)
    console.print(f"Wrote {out / 'attribution.png'}.")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
