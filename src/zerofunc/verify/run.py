"""Evaluate the table on the engine and on the plain module, and judge each cell.

Everything is compared within each rank: the plain module is built from the same factory and seed in the same process
and never communicates; the reference of a training loss is the mean of its gradients over all ranks' data. Plain
PyTorch is itself checked by finite differences, since it is wrong in places: a cell is judged against it only if it
holds there.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zerofunc.module.sharding import shards
from zerofunc.space.trees import full_gradients, unshard
from zerofunc.training.engine import Engine
from zerofunc.training.initialization import initialize
from zerofunc.verify.cells import CELLS
from zerofunc.verify.probe import Cell, Probe
from zerofunc.verify.spaces import full_space, sharded_space
from zerofunc_testing.pool import report

OK, WRONG, ERROR, CANNOT = "ok", "wrong", "error", "PyTorch cannot"


@dataclass(frozen=True)
class Outcome:
    """One cell's result at one stage.

    Attributes:
        cell: Its name.
        stage: ZeRO stage.
        status: "ok"; "wrong" (a number differs); "error" (the engine raised where plain PyTorch does not); or
            "PyTorch cannot" (plain PyTorch raises, or differs from finite differences).
        detail: What differs, by how much and when (cold or warm), or the error.
        error: The largest relative difference found from the plain module.
    """

    cell: str
    stage: int
    status: str
    detail: str = ""
    error: float = 0.0


@dataclass(frozen=True)
class Setting:
    """What to verify on. Picklable, and the same on every rank.

    Attributes:
        model: ``"package.module:factory"``; the factory returns (module, example input with a batch dimension).
        seed: Seed of weights and inputs.
        page_bytes: Size of a page; small, so that small models have several.
        resident_bytes: Gathered pages kept at stage 3; 0 keeps one.
        tolerance: Largest relative difference from the plain module, where that computes in float64.
    """

    model: str = "zerofunc.verify.models:attention"
    seed: int = 0
    page_bytes: int = 1024
    resident_bytes: int = 0
    tolerance: float = 1e-9

    def build(self) -> nn.Module:
        """The module in float64, the same at every call.

        Raises:
            ValueError: If the model cannot be imported or is not a factory as described.
        """
        return copy.deepcopy(_made(self.model, self.seed)[0])

    @functools.cached_property
    def is_double(self) -> bool:
        """Whether the module computes in float64 throughout. Some cast to float32 inside, whatever they are given."""
        module = self.build()
        x, v, _ = self.inputs(0)
        with torch.no_grad():
            ahead, behind = module(x + 1e-9 * v), module(x - 1e-9 * v)
            coarse = module(x + 1e-3 * v) - module(x - 1e-3 * v)
        return relative_difference((ahead - behind) / 2e-9, coarse / 2e-3) < 1e-2

    @property
    def step(self) -> float:
        """Step of the central differences."""
        return 1e-5 if self.is_double else 3e-3

    def of(self, model: str) -> Setting:
        """The same with another model."""
        return replace(self, model=model)

    @functools.cache  # noqa: B019 - settings are few and live as long as the program
    def inputs(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input, direction and cotangent of a rank: the example, moved by noise."""
        module, example = _made(self.model, self.seed)
        generator = torch.Generator().manual_seed(1000 * self.seed + rank + 1)

        def noise(like: torch.Tensor) -> torch.Tensor:
            return torch.randn(like.shape, generator=generator, dtype=like.dtype)

        with torch.no_grad():
            output = module(example)
        scale = example.std() if example.numel() > 1 else torch.ones(())
        return example + 0.3 * scale * noise(example), noise(example), noise(output)


@functools.cache
def _made(model: str, seed: int) -> tuple[nn.Module, torch.Tensor]:
    path, _, name = model.partition(":")
    try:
        factory = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--model {model!r}: {error}; expected package.module:factory") from error
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = factory()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(f"{model} must return (module, example input), found {type(made).__name__}")
    if not isinstance(made[1], torch.Tensor) or not made[1].is_floating_point():
        raise ValueError(f"{model} must return a floating-point example input")
    return made[0].double(), made[1].double()


def verify_rank(setting: Setting, stage: int, names: list[str]) -> list[Outcome]:
    """Collective. The outcomes of the named cells at one stage on this rank, each reported when it is done."""
    outcomes = []
    for name in names:
        report({"stage": stage, "begins": name})
        outcome = judge(setting, stage, next(cell for cell in CELLS if cell.name == name))
        report({"stage": stage, "done": outcome})
        outcomes.append(outcome)
    return outcomes


def _probe(setting: Setting, call: nn.Module, rank: int) -> Probe:
    module = call.module if isinstance(call, Engine) else call
    device = next(module.parameters()).device
    x, v, w = (tensor.to(device) for tensor in setting.inputs(rank))
    return Probe(call, module, x, v, w, setting.step)


def plain_gradients(
    setting: Setting, plain: nn.Module, cell: Cell, ranks: Iterable[int]
) -> dict[str, torch.Tensor | None]:
    """Mean over ranks' data of the plain module's parameter gradients of a training loss."""
    assert cell.loss is not None
    ranks = list(ranks)
    for rank in ranks:
        probe = _probe(setting, plain, rank)
        (cell.loss(probe, probe) / len(ranks)).backward()
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    plain.zero_grad()
    return gradients


@functools.cache
def plain_fails(setting: Setting, cell: Cell) -> str:
    """Why plain PyTorch cannot do the cell: its error, or its difference from finite differences. Empty if it can.

    Judged on the first rank's data by every rank, so that all agree.
    """
    plain = setting.build()
    probe = _probe(setting, plain, rank=0)
    try:
        if cell.compute is not None:
            assert cell.check is not None
            pairs = list(cell.check(probe, cell.compute(probe)))
        elif cell.over is not None:
            assert cell.check is not None
            space = full_space(plain, [probe.x], lambda number: probe.directions(number + 1), setting.step)
            pairs = list(cell.check(space, cell.over(space)))
        else:
            assert cell.loss is not None
            gradients = plain_gradients(setting, plain, cell, ranks=[0])
            d, loss = probe.directions(), cell.loss
            claimed = sum(((g * d[n]).sum() for n, g in gradients.items() if g is not None), torch.zeros(()))
            pairs = [(claimed, probe.along_parameters(lambda q: loss(probe.with_parameters(q), probe)))]
    except Exception as error:  # whatever PyTorch raises is the result
        return f"{type(error).__name__}: {_first_line(error)}"
    worst = max(relative_difference(claim, difference) for claim, difference in pairs)
    allowed = 1e-4 if setting.is_double else 3e-2
    return f"differs from finite differences by {worst:.1e}" if not worst < allowed else ""


class _Mismatch(Exception):
    """A number differs."""


def judge(setting: Setting, stage: int, cell: Cell) -> Outcome:
    """Collective. One cell's outcome at one stage on this rank."""
    sharded, plain = (setting.of(cell.models[0]), setting.of(cell.models[1])) if cell.models else (setting, setting)
    cannot = plain_fails(plain, cell)
    if cannot:
        return Outcome(cell.name, stage, CANNOT, cannot)
    return _Trial(sharded, plain, stage).judge(cell)


class _Trial:
    """One cell on a fresh engine: cold, after two training steps, and with training checked right afterwards."""

    def __init__(self, sharded: Setting, setting: Setting, stage: int) -> None:
        self.setting, self.stage = setting, stage
        self.plain = setting.build()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.5}},
            "zero_optimization": {"stage": stage},
            "zerofunc": {"page_bytes": setting.page_bytes, "resident_bytes": setting.resident_bytes},
        }
        self.engine: Engine = initialize(model=sharded.build(), config=config)[0]
        trainable = [p for p in self.plain.parameters() if p.requires_grad]
        self.plain_optimizer = torch.optim.SGD(trainable, lr=0.05, momentum=0.5)
        axes = self.engine._sharding.axes
        self.rank, self.num_ranks = axes.rank, axes.num_ranks
        self.largest = 0.0

    def judge(self, cell: Cell) -> Outcome:
        """Collective. Run the cell in both states."""
        when = "cold"
        try:
            if cell.prepare is not None:
                cell.prepare(self.engine.module)
            self._compare(cell)
            self._train(2)
            when = "warm"
            self._compare(cell)
            self._train(1)
        except _Mismatch as difference:
            return Outcome(cell.name, self.stage, WRONG, f"{when}: {difference}", self.largest)
        except Exception as error:  # whatever the engine raises is the result
            return Outcome(cell.name, self.stage, ERROR, f"{when}: {type(error).__name__}: {_first_line(error)}")
        return Outcome(cell.name, self.stage, OK, error=self.largest)

    def _compare(self, cell: Cell) -> None:
        if cell.compute is not None:
            plain = cell.compute(_probe(self.setting, self.plain, self.rank))
            engine = cell.compute(_probe(self.setting, self.engine, self.rank))
            self._must_equal(engine, plain, cell.name)
            self._must_have_no_trace()
            return
        if cell.over is not None:
            inputs = [_probe(self.setting, self.plain, rank).x for rank in range(self.num_ranks)]
            sharded = sharded_space(self.engine.module, inputs[self.rank], self.setting.step)
            full = full_space(self.plain, inputs, lambda n: sharded.full(sharded.direction(n)), self.setting.step)
            found = [sharded.full(part) if isinstance(part, dict) else part for part in cell.over(sharded)]
            self._must_equal(found, cell.over(full), cell.name)
            self._must_have_no_trace()
            return
        assert cell.loss is not None
        expected = plain_gradients(self.setting, self.plain, cell, range(self.num_ranks))
        probe = _probe(self.setting, self.engine, self.rank)
        self.engine.backward(cell.loss(probe, probe))
        self._must_equal(full_gradients(self.engine.module), expected, "gradient")
        self.engine.zero_grad()

    def _train(self, steps: int) -> None:
        """Train both on the ordinary loss and compare all parameters."""
        ordinary = next(cell for cell in CELLS if cell.name == "ordinary loss")
        assert ordinary.loss is not None
        for _ in range(steps):
            probe = _probe(self.setting, self.engine, self.rank)
            self.engine.backward(ordinary.loss(probe, probe))
            self.engine.step()
            gradients = plain_gradients(self.setting, self.plain, ordinary, range(self.num_ranks))
            for name, parameter in self.plain.named_parameters():
                parameter.grad = gradients.get(name)
            self.plain_optimizer.step()
            self.plain_optimizer.zero_grad()
        full = unshard(self.engine.module, shards(self.engine.module))
        expected = {name: p.detach() for name, p in self.plain.named_parameters() if p.requires_grad}
        self._must_equal(full, expected, "parameters after training")

    def _must_equal(self, found: Any, expected: Any, what: str) -> None:
        found_leaves, found_form = pytree.tree_flatten(found)
        leaves, form = pytree.tree_flatten(expected)
        if found_form != form:
            raise _Mismatch(f"{what}: another structure")
        # Where the true value is zero, as the gradient of a key's bias, all that is left is the others' rounding.
        floor = 1e-3 * max((b.detach().abs().max().item() for b in leaves if b is not None and b.numel()), default=0.0)
        for a, b in zip(found_leaves, leaves, strict=True):
            if (a is None) != (b is None):
                raise _Mismatch(
                    f"{what}: {'no value' if a is None else 'a value'} where the plain module has the other"
                )
            if a is not None:
                difference = relative_difference(a, b, floor)
                self.largest = max(self.largest, difference)
                if not difference <= (self.setting.tolerance if self.setting.is_double else 1e-4):
                    raise _Mismatch(f"{what}: differs by {difference:.1e}")

    def _must_have_no_trace(self) -> None:
        touched = [n for n, p in self.engine.module.named_parameters() if p.grad is not None]
        touched += [n for n, part in shards(self.engine.module).items() if part.grad is not None]
        if touched or self.engine._reducer.owed:
            raise _Mismatch(f"the transform left a gradient on {touched[:3]}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def relative_difference(found: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest expected value, or ``floor`` where that is smaller.

    Infinite where shapes differ or a value is not finite.
    """
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    difference = (found.detach().cpu().double() - expected.detach().cpu().double()).abs().max()
    scale = max(expected.detach().abs().max().item(), floor, 1e-6)
    return difference.item() / scale if torch.isfinite(difference) else float("inf")


def merge(per_rank: list[list[Outcome]]) -> list[Outcome]:
    """One outcome per cell: the worst over ranks."""
    order = [OK, CANNOT, WRONG, ERROR]
    merged = []
    for outcomes in zip(*per_rank, strict=True):
        worst = max(outcomes, key=lambda outcome: order.index(outcome.status))
        merged.append(replace(worst, error=max(outcome.error for outcome in outcomes)))
    return merged


__all__ = ["CANNOT", "CELLS", "ERROR", "OK", "WRONG", "Outcome", "Setting", "merge", "verify_rank"]
