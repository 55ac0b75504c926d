"""Train one network for three tasks with an aggregator of TorchJD, on parameters that no rank holds whole.

The tasks, on 8x8 digits: which digit it is, whether it is one of 5 to 9, and the image itself through a narrow layer.
Multi-task methods weigh the tasks' gradients by their inner products. An aggregator that is given one rank's shards
would weigh them by that rank's inner products, each rank otherwise. `zerofunc.gramian` takes them over all ranks in
one exchange, and TorchJD's weightings take the Gramian (Quinton and Rey 2024, https://arxiv.org/abs/2406.16232).

The same training runs in one process on plain parameters, where TorchJD's aggregator sees the whole Jacobian; the table
shows the losses of both and how far their parameters are apart.

    pip install 'zerofunc[demo]'
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/multitask_digits.py --stage 3 --method MGDA
    python examples/multitask_digits.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import zerofunc

try:
    from sklearn.datasets import load_digits
    from torchjd import aggregation
except ImportError as error:
    raise SystemExit(f"scikit-learn and torchjd are needed ({error}): pip install 'zerofunc[demo]'") from None

TASKS = ("digit", "5 to 9", "image")
DIGITS = 1796  # an even number, of which each rank has as many
RATE = 0.02


class Tasks(nn.Module):
    """A trunk, a head for each task, and their losses as the module's output."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(8, 10), nn.Linear(8, 1), nn.Linear(8, 64)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        digit, large, image = (head(self.trunk(x)) for head in self.heads)
        large_loss = F.binary_cross_entropy_with_logits(large.squeeze(-1), (y >= 5).to(x))
        return torch.stack([F.cross_entropy(digit, y), large_loss, F.mse_loss(image, x)])


def network() -> Tasks:
    torch.manual_seed(0)
    return Tasks().double()


def digits() -> tuple[Tensor, Tensor]:
    pixels, labels = (torch.from_numpy(array)[:DIGITS] for array in load_digits(return_X_y=True))
    return pixels.double() / 8 - 1, labels.long()


def train_sharded(model: Tasks, weighting: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, num_steps: int) -> None:
    """Collective. Train a sharded network on all ranks' digits, weighing the tasks over all ranks' shards."""
    shards = zerofunc.shards(model)
    optimizer = torch.optim.Adam(shards.values(), lr=RATE)
    for _ in range(num_steps):
        # Mean over ranks, this rank's part: [tasks, n] for each name.
        jacobian = torch.func.jacrev(lambda s: zerofunc.functional_call(model, s, (x, y)))(shards)
        weights = weighting(zerofunc.gramian(jacobian, model))
        for name, shard in shards.items():
            shard.grad = weights @ jacobian[name]
        optimizer.step()


def train_alone(model: Tasks, aggregator: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, num_steps: int) -> None:
    """Local. The same on plain parameters, from the whole Jacobian."""
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.Adam(parameters.values(), lr=RATE)
    for _ in range(num_steps):
        jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x, y)))(parameters)
        direction = aggregator(torch.cat([rows.detach().flatten(1) for rows in jacobian.values()], 1))
        pieces = direction.split([parameter.numel() for parameter in parameters.values()])
        for parameter, piece in zip(parameters.values(), pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        optimizer.step()


def main(
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 3,
    method: Annotated[str, typer.Option(help="An aggregator of TorchJD that has a weighting of Gramians.")] = "UPGrad",
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 60,
) -> None:
    """Train on three tasks, sharded and in one process; start it with torchrun for several ranks."""
    ranks, rank = zerofunc.init_distributed(start_alone=False), int(os.environ.get("RANK", "0"))
    x, y = digits()
    before = network()(x, y)
    model = zerofunc.shard(network(), stage, page_bytes=8 << 10, resident_bytes=8 << 10)
    mine = slice(rank * len(x) // ranks, (rank + 1) * len(x) // ranks)
    train_sharded(model, getattr(aggregation, f"{method}Weighting")(), x[mine], y[mine], steps)
    alone = network()
    train_alone(alone, getattr(aggregation, method)(), x, y, steps)
    sharded = network()
    sharded.load_state_dict(zerofunc.unshard(model, zerofunc.shards(model)))
    table = Table("loss", "before", f"stage {stage}, {ranks} rank(s)", "one process", title=f"{method}, {steps} steps")
    for name, *losses in zip(TASKS, before, sharded(x, y), alone(x, y), strict=True):
        table.add_row(name, *(f"{loss.item():.6f}" for loss in losses))
    pairs = zip(sharded.parameters(), alone.parameters(), strict=True)
    apart = max((a - b).abs().max().item() for a, b in pairs)
    console = Console(quiet=rank != 0)
    console.print(table)
    console.print(f"Parameters differ by at most {apart:.1e}.", highlight=False)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
