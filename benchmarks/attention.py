"""zerofunc.attention beside PyTorch's math attention at several lengths: time and peak memory of its derivatives.

    OMP_NUM_THREADS=1 python benchmarks/attention.py
    OMP_NUM_THREADS=1 python benchmarks/attention.py --lengths 1024 4096 --write

The fused kernels have none of these derivatives but the first.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from alone import Tasks, peak_mib, peak_mib_apart, seconds_of, write
from report import Sheet, ratios, spread
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel

from zerofunc import attention

HEADS, WIDTH = 4, 32
RESULTS = Path(__file__).with_name("RESULTS_ATTENTION.md")

Attention = Callable[..., torch.Tensor]


def math_attention(*args: torch.Tensor) -> torch.Tensor:
    """PyTorch's composite kernel, causal."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, is_causal=True)


CONTENDERS: dict[str, Attention] = {"math": math_attention, "zerofunc": partial(attention, is_causal=True)}


def backward(f: Attention, x: tuple[torch.Tensor, ...]) -> None:
    """Gradients of a loss on the output."""
    torch.autograd.grad(f(*x).square().sum(), x)


def jvp(f: Attention, x: tuple[torch.Tensor, ...]) -> None:
    """Output and tangent."""
    with torch.no_grad():
        torch.func.jvp(f, x, x)


def backward_through_jvp(f: Attention, x: tuple[torch.Tensor, ...]) -> None:
    """Gradients of a loss on the tangent."""
    torch.autograd.grad(torch.func.jvp(f, x, x)[1].square().sum(), x)


WORKS = {"forward + backward": backward, "jvp": jvp, "backward through a jvp": backward_through_jvp}


def tasks_of(title: str) -> Tasks:
    """Each contender's task."""
    return {name: task(title, name) for name in CONTENDERS}


def task(title: str, name: str) -> Callable[[], object]:
    """The work at the length that the title names, ``"work, length"``."""
    work, length = title.split(", ")
    torch.manual_seed(0)
    x = tuple(torch.randn(1, HEADS, int(length), WIDTH, requires_grad=True) for _ in range(3))
    return lambda: WORKS[work](CONTENDERS[name], x)


def row_of(title: str, rounds: int) -> list[str]:
    """Time and memory at one length."""
    seconds = seconds_of(title, tasks_of, rounds, 1)
    peaks = [peak_mib_apart(__file__, title, name) for name in CONTENDERS]
    times = [spread(values, 3) for values in seconds.values()]
    return [title.split(", ")[1], *times, spread(ratios(seconds, "zerofunc", "math")), *(f"{p:.1f}" for p in peaks)]


def main() -> None:
    """Measure, show, and write where asked to."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after those that warm up")
    parser.add_argument("--write", action="store_true", help=f"rewrite {RESULTS.name} beside this script")
    parser.add_argument("--peak", nargs=2, metavar=("TITLE", "NAME"), help="print one peak in MiB, and no more")
    options = parser.parse_args()
    if options.peak:
        print(peak_mib(task(*options.peak)))
        return
    sheets = []
    columns = ["length", "math, s", "zerofunc, s", "x math", "math, peak MiB", "zerofunc, peak MiB"]
    for work in WORKS:
        rows = [row_of(f"{work}, {length}", options.rounds) for length in options.lengths]
        sheets.append(Sheet(f"{work}, causal, {HEADS} heads of width {WIDTH}", columns, rows))
        Console().print(sheets[-1].rich())
    if options.write:
        command = shlex.join(["python", "benchmarks/attention.py", *sys.argv[1:]])
        write(RESULTS, "benchmarks/attention.py", command, sheets)


if __name__ == "__main__":
    main()
