"""Time, traffic and memory of training steps: zerofunc at stages 0 to 3 beside DDP, FSDP2 and no communication.

    OMP_NUM_THREADS=1 python benchmarks/train_step.py
    OMP_NUM_THREADS=1 python benchmarks/train_step.py --rounds 20 --write
    OMP_NUM_THREADS=1 python benchmarks/train_step.py --only single ddp stage3 --resident-mib 24 --page-mib 8

It starts its own two ranks, with gloo and one thread each. Other work on the machine disturbs it: look at the load
average that it notes, and at the quartiles.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from contenders import MICRO_BATCH, NAMES, WORKS, Paging, num_parameters
from gpt import DEPTH, HEADS, SEQUENCE, VOCABULARY, WIDTH
from memory import Memory, measure_apart
from report import Run, markdown
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from timing import Plan, Timing, time_contenders

import zerofunc
from zerofunc_testing.pool import RankPool

NUM_RANKS = 2
TIMEOUT_S = 4 * 3600.0
MIN_WIDTH = 120
RESULTS = Path(__file__).with_name("RESULTS.md")


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="measured rounds, after those that warm up")
    parser.add_argument("--steps-per-round", type=int, default=3, help="steps of each contender per round")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--skip-time", action="store_true", help="measure memory only")
    parser.add_argument("--skip-memory", action="store_true", help="measure time and traffic only")
    parser.add_argument("--page-mib", type=float, help="size of zerofunc's pages")
    parser.add_argument("--resident-mib", type=float, help="bound on gathered pages at stage 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--write", action="store_true", help=f"rewrite {RESULTS.name} beside this script")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.steps_per_round < 1:
        parser.error("--rounds and --steps-per-round must be at least 1")
    return options


def environment_of(arguments: list[str]) -> dict[str, str]:
    """Facts that the numbers depend on."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    shape = f"width {WIDTH}, {DEPTH} layers, {HEADS} heads, vocabulary {VOCABULARY}, sequence {SEQUENCE}"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": f"`{shlex.join(['python', 'benchmarks/train_step.py', *arguments])}`",
        "versions": f"zerofunc {zerofunc.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "load average at the start (1, 5, 15 min)": load,
        "ranks": f"{NUM_RANKS}, gloo, 1 thread each",
        "model": f"GPT of {num_parameters() / 1e6:.1f} M parameters (Psi), float32: {shape}",
        "micro-batch": f"{MICRO_BATCH} per rank",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def measure_time(plan: Plan, progress: Progress) -> Timing:
    """Time and traffic, the ranks' progress shown."""
    bars = {title: progress.add_task(title, total=plan.all_rounds) for title in ("training", "func.grad")}
    with RankPool(NUM_RANKS, timeout_s=TIMEOUT_S) as pool:
        timings = pool.run(
            time_contenders, plan, on_progress=lambda rank, done: progress.update(bars[done[0]], completed=done[1])
        )
    first: Timing = timings[0]
    return first


def measure_memory(names: list[str], paging: Paging, progress: Progress) -> list[Memory]:
    """Memory of each contender, one after the other; of ``single`` and stage 3 at every kind of work."""
    wanted = [(n, w) for n in names for w in WORKS if w == "training" or n in ("single", "stage3")]
    return [measure_apart(name, work, paging) for name, work in progress.track(wanted, description="memory")]


def main() -> None:
    """Measure what the command line asks for, and show it."""
    arguments = sys.argv[1:]
    options = options_of(arguments)
    names = [name for name in NAMES if name in options.only]
    paging = Paging(options.page_mib, options.resident_mib)
    environment = environment_of(arguments)
    console = Console(width=max(Console().width, MIN_WIDTH))  # numbers that wrap cannot be read
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bars, console=Console(stderr=True)) as progress:
        plan = Plan(names, options.rounds, options.steps_per_round, paging)
        timing = None if options.skip_time else measure_time(plan, progress)
        memory = [] if options.skip_memory else measure_memory(names, paging, progress)
    run = Run(environment, num_parameters(), NUM_RANKS, paging, timing, memory)
    for name, fact in environment.items():
        console.print(f"{name}: {fact}", highlight=False, soft_wrap=True)
    for sheet in run.sheets():
        console.print(sheet.rich())
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(run), indent=2) + "\n", encoding="utf-8")
    if options.write:
        RESULTS.write_text(markdown(run), encoding="utf-8")


if __name__ == "__main__":
    main()
