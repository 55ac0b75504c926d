"""The tables of a run, for the terminal and for RESULTS.md, with what was hoped for beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contenders import MIB, STAGES, Paging
from memory import Memory
from rich.table import Table
from timing import Timing

from zerofunc.module.sharding import DEFAULT_RESIDENT_BYTES

FLOAT_BYTES = 4
# The most that func.grad may take, over the plain module.
TRAIN_TARGETS = {
    **dict.fromkeys(("stage0", "stage1", "stage2"), "<= 1.00 ddp"),
    "stage3": "<= 1.00 fsdp2, 1.25 ddp",
}
GRAD_TARGETS = {"stage0": 1.05, "stage1": 1.05, "stage2": 1.05, "stage3": 1.25}


@dataclass(frozen=True)
class Sheet:
    """A table in no format yet: the first column is text, the others are numbers as text."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""

    def rich(self) -> Table:
        """For the terminal."""
        table = Table(title=self.title, caption=self.note or None, title_justify="left", caption_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """For a file."""
        rule = [":--", *("--:" for _ in self.columns[1:])]
        lines = ["| " + " | ".join(row) + " |" for row in (self.columns, rule, *self.rows)]
        return "\n".join([f"## {self.title}", "", *([self.note, ""] if self.note else []), *lines])


@dataclass(frozen=True)
class Run:
    """What one call of the benchmark measured, and on what.

    Attributes:
        environment: Facts of the machine and the versions, by name.
        num_parameters: The model's, called Psi in the tables.
        timing: None where it was skipped.
    """

    environment: dict[str, str]
    num_parameters: int
    num_ranks: int
    paging: Paging
    timing: Timing | None
    memory: list[Memory]

    def sheets(self) -> list[Sheet]:
        """All tables of what was measured."""
        made = []
        if self.timing is not None:
            made += [training_sheet(self.timing), gradient_sheet(self.timing), traffic_sheet(self, self.timing)]
        if self.memory:
            made.append(memory_sheet(self))
        return [sheet for sheet in made if sheet.rows]


def markdown(run: Run) -> str:
    """The whole of RESULTS.md."""
    facts = "\n".join(f"- {name}: {value}" for name, value in run.environment.items())
    intro = (
        "A GPT is trained by each contender with the same initialisation, data, optimizer and clipping. Contenders "
        "take turns within one process group. Ratios are taken within each round, between neighbours in time; tables "
        "give their median and, in brackets, their quartiles."
    )
    parts = ["# Results of benchmarks/train_step.py", intro, facts, *(sheet.markdown() for sheet in run.sheets())]
    return "\n\n".join(parts) + "\n"


# -- numbers ----------------------------------------------------------------------------------------------------------


def ratios(values: dict[str, list[float]], name: str, base: str) -> list[float]:
    """One contender's seconds over another's, round by round; empty where one of them did not run."""
    return [own / other for own, other in zip(values.get(name, []), values.get(base, []), strict=False)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and quartiles as text."""
    if not values:
        return ""
    low, high = quartiles(values)
    return f"{statistics.median(values):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile; of one value, itself twice."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _mib(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / MIB:.1f}"


# -- tables -----------------------------------------------------------------------------------------------------------


def training_sheet(timing: Timing) -> Sheet:
    """Seconds per training step."""
    rows = [
        [
            name,
            spread(seconds, 3),
            spread(ratios(timing.train_s, name, "single")),
            spread(ratios(timing.train_s, name, "ddp")),
            spread(ratios(timing.train_s, name, "fsdp2")) if name == "stage3" else "",
            TRAIN_TARGETS.get(name, ""),
            f"{timing.losses[name]:.4f}",
        ]
        for name, seconds in timing.train_s.items()
    ]
    columns = ["contender", "s / step", "x single", "x ddp", "x fsdp2", "target", "last loss"]
    note = "`single` does the same work on every rank without communication, so that its loss is another one."
    return Sheet("Training step", columns, rows, note)


def gradient_sheet(timing: Timing) -> Sheet:
    """Seconds per functional gradient with respect to an input."""
    rows = [
        [
            name,
            spread(seconds, 3),
            spread(ratios(timing.grad_s, name, "single")),
            f"<= {GRAD_TARGETS[name]:.2f}" if name in GRAD_TARGETS else "",
            _mib(timing.grad_moved_bytes.get(name)),
        ]
        for name, seconds in timing.grad_s.items()
    ]
    columns = ["contender", "s / call", "x single", "target", "MiB sent / call"]
    return Sheet("torch.func.grad with respect to the input", columns, rows)


def traffic_sheet(run: Run, timing: Timing) -> Sheet:
    """Bytes that a rank sends per training step, and ZeRO's prediction."""
    rows = []
    for name, moved in timing.train_moved_bytes.items():
        predicted = predicted_traffic_bytes(STAGES[name], run.num_parameters, run.num_ranks)
        target = "<= 1.000" if STAGES[name] == 3 else "1.000"
        rows.append([name, _mib(moved), _mib(predicted), f"{moved / predicted:.3f}", target])
    columns = ["contender", "MiB sent / step", "predicted MiB", "ratio", "target"]
    note = (
        "Sent by each rank for parameters and gradients. ZeRO predicts 2 Psi at stages 0 to 2 and at most 3 Psi at "
        "stage 3, times 4 bytes and (N - 1) / N."
    )
    return Sheet("Traffic of a training step", columns, rows, note)


def predicted_traffic_bytes(stage: int, num_parameters: int, num_ranks: int) -> float:
    """ZeRO, section 7 (https://arxiv.org/abs/1910.02054), with float32 and ring collectives."""
    passes = 3 if stage == 3 else 2
    return passes * num_parameters * FLOAT_BYTES * (num_ranks - 1) / num_ranks


def memory_sheet(run: Run) -> Sheet:
    """Resident memory of each contender at each kind of work."""
    rows = [
        [
            record.name,
            record.work,
            _mib(record.held_bytes),
            _mib(record.peak_bytes),
            _mib(predicted_memory_bytes(record.name, run)),
            _mib(record.gathered_peak_bytes),
            _mib(record.gradient_peak_bytes),
        ]
        for record in run.memory
    ]
    columns = ["contender", "work", "held", "peak", "predicted", "gathered", "gradients"]
    note = (
        "MiB over what the imports take, each contender in processes of its own. Held: between steps. Predicted: "
        "weights, gradients and Adam's state by ZeRO, at stage 3 with the resident pages; activations, and buffers of "
        "gradients under way, come on top in the peak. Gathered, gradients: the most page and gradient buffers alive "
        "by zerofunc's own account."
    )
    return Sheet("Memory", columns, rows, note)


def predicted_memory_bytes(name: str, run: Run) -> float:
    """ZeRO, section 5, with float32: 4 bytes of weight, 4 of gradient and 8 of Adam's state per parameter."""
    psi, n = run.num_parameters, run.num_ranks
    by_stage = [16.0, 4 + 4 + 8 / n, 4 + 12 / n, 16 / n]
    stage = 3 if name == "fsdp2" else STAGES.get(name, 0)
    resident = resident_bytes(run) if name == "stage3" else 0
    return psi * by_stage[stage] + resident


def resident_bytes(run: Run) -> float:
    """The most that stage 3 keeps gathered: its budget, or the model where that is smaller."""
    budget: Any = run.paging.config().get("resident_bytes", DEFAULT_RESIDENT_BYTES)
    return min(budget, FLOAT_BYTES * run.num_parameters)
