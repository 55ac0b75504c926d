"""What a cell of the table is: something to differentiate, what to compute of it, and how the claim is checked.

A cell is written once, for anything that can be called like a module; :mod:`zerofunc.verify.run` evaluates it on the
engine and on the plain module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

Tensors = dict[str, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Probe:
    """Something to differentiate, and where.

    Attributes:
        call: The engine or the plain module.
        module: The module itself (an engine's ``module``), for parameters.
        x: Input, [batch, ...].
        v: A direction of the same shape.
        w: A cotangent of the output's shape.
        step: Step of the central differences.
    """

    call: Callable[[torch.Tensor], torch.Tensor]
    module: nn.Module
    x: torch.Tensor
    v: torch.Tensor
    w: torch.Tensor
    step: float

    def scalar(self, x: torch.Tensor) -> torch.Tensor:
        """A smooth function of the output, curved in it: mean of squares and cubes."""
        y = self.call(x)
        return (y.square() + y.pow(3) / 3).mean()

    def one(self, sample: torch.Tensor) -> torch.Tensor:
        """The output of one sample without batch dimension."""
        return self.call(sample.unsqueeze(0)).squeeze(0)

    def one_scalar(self, sample: torch.Tensor) -> torch.Tensor:
        """:meth:`scalar` of one sample."""
        return self.scalar(sample.unsqueeze(0))

    def with_parameters(self, parameters: Tensors) -> Probe:
        """The same probe at other parameters."""
        return replace(self, call=lambda x: functional_call(self.module, parameters, (x,)))

    @property
    def parameters(self) -> Tensors:
        """The module's trainable parameters by name."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def along(self, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Central difference of ``function`` at ``x`` along ``v``."""
        with torch.no_grad():
            ahead, behind = self.x + self.step * self.v, self.x - self.step * self.v
        return (function(ahead) - function(behind)).detach() / (2 * self.step)

    def directions(self, seed: int = 1) -> Tensors:
        """A direction in parameter space, of unit scale."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device)
            for name, p in self.parameters.items()
        }

    def along_parameters(self, function: Callable[[Tensors], torch.Tensor]) -> torch.Tensor:
        """Central difference of ``function``, of trainable parameters, along :meth:`directions`."""
        d = self.directions()
        ahead = {name: p.detach() + self.step * d[name] for name, p in self.parameters.items()}
        behind = {name: p.detach() - self.step * d[name] for name, p in self.parameters.items()}
        return (function(ahead) - function(behind)).detach() / (2 * self.step)


@dataclass(frozen=True)
class Space:
    """The mean loss over all ranks as a function of a tree of parameters: shards, or full ones in one process.

    Attributes:
        loss: A tree's loss: of this rank's data where the tree is sharded, the mean over all ranks' where it is full.
        outputs: A few outputs, [k], likewise.
        parameters: The tree at which derivatives are taken.
        direction: A direction by number, the same in both.
        inner: Inner product of two trees.
        average: Mean over ranks of a tensor; the identity where the tree is full.
        jacfwd: ``torch.func.jacfwd``, or :func:`zerofunc.jacfwd` of the module.
        full: A tree's tensors in full shape.
        step: Step of the central differences.
    """

    loss: Callable[[Tensors], torch.Tensor]
    outputs: Callable[[Tensors], torch.Tensor]
    parameters: Tensors
    direction: Callable[[int], Tensors]
    inner: Callable[[Tensors, Tensors], torch.Tensor]
    average: Callable[[torch.Tensor], torch.Tensor]
    jacfwd: Callable[..., Any]
    full: Callable[[Tensors], Tensors]
    step: float

    def moved(self, size: float, number: int = 0) -> Tensors:
        """The parameters, moved along a direction."""
        direction = self.direction(number)
        return {name: value.detach() + size * direction[name] for name, value in self.parameters.items()}

    def along(self, function: Callable[[Tensors], torch.Tensor], number: int = 0) -> torch.Tensor:
        """Central difference of ``function`` at the parameters along a direction."""
        ahead, behind = function(self.moved(self.step, number)), function(self.moved(-self.step, number))
        return (ahead - behind).detach() / (2 * self.step)


@dataclass(frozen=True)
class Cell:
    """One row of the table.

    Attributes:
        name: As printed.
        section: Heading it is printed under.
        compute: What is compared between engine and plain module: a tree of tensors. None for a training loss.
        check: Pairs of (claim, finite difference) for a result of ``compute``.
        over: What is compared between shards and full parameters: a list of trees and tensors. Its ``check`` is one of
            (space, result).
        loss: A training loss of (probe, probe for what is under a stop-gradient), whose gradient over the parameters
            is compared.
        prepare: What is done to the engine's module beforehand, and not to the plain one.
        models: Factories of another model for the engine, and of one with the same parameters that plain PyTorch
            differentiates rightly.
    """

    name: str
    section: str
    compute: Callable[[Probe], Any] | None = None
    check: Callable[[Any, Any], Iterator[Pair]] | None = None
    over: Callable[[Space], list[Any]] | None = None
    loss: Callable[[Probe, Probe], torch.Tensor] | None = None
    prepare: Callable[[nn.Module], object] | None = None
    models: tuple[str, str] | None = None
