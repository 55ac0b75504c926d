"""Variants of one task, without communication: seconds in turns in one process, peak memory in a process of each."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from contenders import MIB, Paging
from memory import MALLOC, peak_bytes, status_bytes
from report import Sheet
from timing import Plan, alternate
from train_step import TIMEOUT_S, environment_of

from zerofunc_testing.pool import RankPool

Tasks = dict[str, Callable[[], object]]
RATIOS = (
    "Variants take turns in one process of one thread. Ratios are taken within each round, between neighbours in time: "
    "medians and, in brackets, quartiles. Peak: resident memory above that before the task, the task having run once, "
    "in a process of its own."
)


def seconds_of(title: str, make: Callable[[str], Tasks], rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds per call of each of the tasks ``make(title)``, one number per round."""
    with RankPool(1, timeout_s=TIMEOUT_S) as pool:
        seconds: dict[str, list[float]] = pool.run(_alternate, title, make, Plan([], rounds, calls, Paging()))[0]
    return seconds


def _alternate(title: str, make: Callable[[str], Tasks], plan: Plan) -> dict[str, list[float]]:
    return alternate(title, make(title), plan)


def peak_mib_apart(script: str, title: str, name: str) -> float:
    """The peak that ``script --peak title name`` prints.

    Raises:
        RuntimeError: If it failed, with what it wrote.
    """
    command = [sys.executable, script, "--peak", title, name]
    ended = subprocess.run(command, env=os.environ | MALLOC, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"memory of {name} at {title} could not be measured:\n{ended.stderr}")
    return float(ended.stdout.split()[-1])


def peak_mib(task: Callable[[], object]) -> float:
    """The peak of a task in this process, in MiB."""
    task()
    gc.collect()
    before = status_bytes("RssAnon")
    return (peak_bytes(task) - before) / MIB


def write(results: Path, script: str, command: str, sheets: list[Sheet], intro: str = RATIOS) -> None:
    """Rewrite the results of a script."""
    kept = ("date", "versions", "processor", "load average at the start (1, 5, 15 min)")
    facts = {name: fact for name, fact in environment_of([]).items() if name in kept}
    lines = "\n".join(f"- {name}: {fact}" for name, fact in {**facts, "command": f"`{command}`"}.items())
    tables = "\n\n".join(sheet.markdown() for sheet in sheets)
    results.write_text(f"# Results of {script}\n\n{intro}\n\n{lines}\n\n{tables}\n", encoding="utf-8")
