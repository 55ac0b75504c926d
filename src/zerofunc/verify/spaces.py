"""The mean loss over all ranks, as a function of shards and as one of full parameters in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

import zerofunc
from zerofunc.verify.probe import Space, Tensors


def sharded_space(module: nn.Module, x: torch.Tensor, step: float) -> Space:
    """Of a sharded module with this rank's input."""

    def outputs(tree: Tensors) -> torch.Tensor:
        result: torch.Tensor = zerofunc.functional_call(module, tree, (x,))
        return result

    return Space(
        loss=lambda tree: _score(outputs(tree)),
        outputs=lambda tree: outputs(tree).flatten()[:2],
        parameters=zerofunc.shards(module),
        direction=lambda number: zerofunc.draw(module, number),
        inner=lambda a, b: zerofunc.vdot(a, b, module),
        average=lambda value: zerofunc.mean(value, module),
        jacfwd=lambda function: zerofunc.jacfwd(function, module),
        full=lambda tree: zerofunc.unshard(module, tree),
        step=step,
    )


def full_space(
    module: nn.Module, inputs: Sequence[torch.Tensor], direction: Callable[[int], Tensors], step: float
) -> Space:
    """Of a plain module with the inputs of all ranks."""

    def outputs(tree: Tensors) -> list[torch.Tensor]:
        return [torch.func.functional_call(module, tree, (x,)) for x in inputs]

    return Space(
        loss=lambda tree: torch.stack([_score(y) for y in outputs(tree)]).mean(),
        outputs=lambda tree: torch.stack([y.flatten()[:2] for y in outputs(tree)]).mean(0),
        parameters={name: p.detach() for name, p in module.named_parameters() if p.requires_grad},
        direction=direction,
        inner=lambda a, b: torch.stack([(a[name] * b[name]).sum() for name in a]).sum(),
        average=lambda value: value,
        jacfwd=torch.func.jacfwd,
        full=lambda tree: tree,
        step=step,
    )


def _score(y: torch.Tensor) -> torch.Tensor:
    """A smooth function of the output, curved in it."""
    return (y.square() + y.pow(3) / 3).mean()
