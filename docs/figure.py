"""Draws docs/paging.png, the picture in the README: what happens when an operator reads a stage-3 parameter."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch  # noqa: E402

BLUE, ORANGE, GREY, INK = "#4c78a8", "#f58518", "#e8e8e8", "#222222"


def box(ax: Axes, x: float, y: float, width: float, height: float, text: str, colour: str, ink: str = INK) -> None:
    shape = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0.02,rounding_size=0.08", facecolor=colour, edgecolor=INK
    )
    ax.add_patch(shape)
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9.5, color=ink)


def arrow(ax: Axes, start: tuple[float, float], stop: tuple[float, float], text: str, at: tuple[float, float]) -> None:
    ax.add_patch(FancyArrowPatch(start, stop, arrowstyle="-|>", mutation_scale=13, linewidth=1.3, color=INK))
    ax.text(*at, text, fontsize=9, ha="center", va="center", color=INK)


def draw() -> plt.Figure:
    figure, ax = plt.subplots(figsize=(10, 4.6), dpi=110)
    ax.set(xlim=(0, 12), ylim=(0, 5.6))
    ax.axis("off")
    above = (
        "torch.func:  grad · vjp · jvp · hessian · vmap · linearize      autograd: saves the wrapper, never the weight"
    )
    box(ax, 0.2, 4.5, 11.6, 0.8, above, GREY)
    box(ax, 0.2, 2.95, 3.6, 0.8, "F.linear(x, weight)\nPagedTensor: full shape, no data", "white")
    box(ax, 4.9, 2.95, 2.8, 0.8, "Pager\nfew pages resident", "white")
    box(ax, 8.9, 2.95, 2.9, 0.8, "the operator runs\non views of the page", "white")
    arrow(ax, (2.0, 4.48), (2.0, 3.78), "__torch_dispatch__", (3.0, 4.13))
    arrow(ax, (3.83, 3.35), (4.87, 3.35), "read", (4.35, 3.52))
    arrow(ax, (7.73, 3.35), (8.87, 3.35), "page", (8.3, 3.52))
    for rank, x in enumerate((0.9, 6.6)):
        ax.text(x + 2.2, 1.72, f"rank {rank}: 1/N of each page, float32", ha="center", fontsize=9, color=INK)
        for page in range(4):
            box(ax, x + 1.12 * page, 0.9, 1.0, 0.55, f"page {page}", ORANGE if page == 2 else BLUE, "white")
    arrow(ax, (5.3, 1.5), (6.0, 2.92), "fault: all-gather of one page", (3.9, 2.4))
    arrow(ax, (9.6, 2.92), (8.9, 1.95), "backward: reduce-scatter", (10.65, 2.4))
    ax.text(6.0, 0.35, "shards: what optimizers update, what carries .grad, what is saved", ha="center", fontsize=9.5)
    return figure


if __name__ == "__main__":
    draw().savefig(Path(__file__).with_name("paging.png"), bbox_inches="tight")
