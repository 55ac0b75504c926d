"""Seconds and bytes of the contenders side by side: all are built in one process group and take turns."""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from contenders import STAGES, Batch, Contender, Paging, build, input_gradient, make_batches, train

from zerofunc_testing.pool import report

NUM_BATCHES = 8
WARM_UP_ROUNDS = 2
COUNTED_STEPS = 2


@dataclass(frozen=True)
class Plan:
    """What to time: the contenders by name, and for how long."""

    names: list[str]
    rounds: int
    steps_per_round: int
    paging: Paging

    @property
    def all_rounds(self) -> int:
        """Rounds with those that warm up."""
        return WARM_UP_ROUNDS + self.rounds


@dataclass
class Timing:
    """What was measured, by contender.

    Attributes:
        train_s: Seconds per training step, one number per round: the slowest rank's.
        grad_s: Seconds per ``torch.func.grad``, likewise.
        train_moved_bytes: Bytes that a rank sends per training step.
        grad_moved_bytes: Bytes that a rank sends per ``torch.func.grad``.
        losses: Of the first rank, after the timed training steps: the same for all that train the same way.
    """

    train_s: dict[str, list[float]]
    grad_s: dict[str, list[float]]
    train_moved_bytes: dict[str, float] = field(default_factory=dict)
    grad_moved_bytes: dict[str, float] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)


def time_contenders(plan: Plan) -> Timing:
    """Collective. Build the contenders, let them take turns, then count bytes."""
    batches = make_batches(NUM_BATCHES)
    contenders = {name: build(name, plan.paging) for name in plan.names}
    transformed = {name: c for name, c in contenders.items() if name == "single" or name in STAGES}
    timing = Timing(
        alternate("training", _tasks(train, contenders, batches), plan),
        alternate("func.grad", _tasks(input_gradient, transformed, batches), plan),
    )
    timing.losses = {name: train(contender, batches[0]) for name, contender in contenders.items()}
    for name, contender in contenders.items():
        if contender.usage() is not None:
            timing.train_moved_bytes[name] = _moved_bytes(train, contender, batches[0])
            timing.grad_moved_bytes[name] = _moved_bytes(input_gradient, contender, batches[0])
    return timing


def _tasks(
    work: Callable[[Contender, Batch], object], contenders: dict[str, Contender], batches: list[Batch]
) -> dict[str, Callable[[], object]]:
    """For each contender a function that works on its next batch."""

    def task(contender: Contender) -> Callable[[], object]:
        upcoming = itertools.cycle(batches)
        return lambda: work(contender, next(upcoming))

    return {name: task(contender) for name, contender in contenders.items()}


def alternate(
    title: str, tasks: dict[str, Callable[[], object]], plan: Plan, prepare: Callable[[], object] = gc.collect
) -> dict[str, list[float]]:
    """Collective. Seconds per call of each task, one number per round after the warm-up.

    Every round runs each task once, in an order drawn anew, the same on all ranks: a disturbance of the machine and
    its slow drifts then fall on all alike, and ratios are those of neighbours in time. What ``prepare`` does before
    each is not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(plan.all_rounds):
        for name in random.Random(number).sample(list(tasks), len(tasks)):
            prepare()
            seconds[name].append(_seconds_per_call(tasks[name], plan.steps_per_round))
        if dist.get_rank() == 0:
            report((title, number + 1))
    return {name: values[WARM_UP_ROUNDS:] for name, values in seconds.items()}


def _seconds_per_call(task: Callable[[], object], num_calls: int) -> float:
    """Collective. The slowest rank's seconds, all ranks having started together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_calls):
        task()
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.double)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item() / num_calls


def _moved_bytes(work: Callable[[Contender, Batch], object], contender: Contender, batch: Batch) -> float:
    """Collective. Bytes per call by the engine's counter, after one call that brings it to a steady state."""
    work(contender, batch)
    before = contender.usage()
    for _ in range(COUNTED_STEPS):
        work(contender, batch)
    after = contender.usage()
    assert before is not None and after is not None
    return (after.moved_bytes - before.moved_bytes) / COUNTED_STEPS
