"""The table's rows over sharded parameters: the mean over ranks, compared with the mean loss in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.func import grad, jacrev, jvp, vjp, vmap

from zerofunc.verify.checks import (
    is_space_gradient,
    is_space_jacobian,
    is_space_member,
    is_space_product,
    is_space_slope,
    is_space_third,
)
from zerofunc.verify.probe import Cell, Pair, Space, Tensors

CELLS: list[Cell] = []


def _over(
    name: str, check: Callable[[Space, list[Any]], Iterator[Pair]]
) -> Callable[[Callable[[Space], list[Any]]], Callable[[Space], list[Any]]]:
    def register(over: Callable[[Space], list[Any]]) -> Callable[[Space], list[Any]]:
        CELLS.append(Cell(f"shards: {name}", "over shards, mean over ranks", check=check, over=over))
        return over

    return register


def _rows(tree: Tensors, count: int) -> list[Tensors]:
    return [{name: value[i] for name, value in tree.items()} for i in range(count)]


def _stacked(s: Space, count: int) -> Tensors:
    directions = [s.direction(i) for i in range(count)]
    return {name: torch.stack([direction[name] for direction in directions]) for name in s.parameters}


@_over("grad", is_space_gradient)
def _(s: Space) -> list[Any]:
    return [grad(s.loss)(s.parameters)]


@_over("vjp", is_space_gradient)
def _(s: Space) -> list[Any]:
    value, pull = vjp(s.loss, s.parameters)
    return [pull(torch.ones_like(value))[0], s.average(value)]


@_over("jvp", is_space_slope)
def _(s: Space) -> list[Any]:
    return [s.average(jvp(s.loss, (s.parameters,), (s.direction(0),))[1])]


@_over("jacrev", is_space_jacobian)
def _(s: Space) -> list[Any]:
    return _rows(jacrev(s.outputs)(s.parameters), 2)


@_over("jacfwd", is_space_jacobian)
def _(s: Space) -> list[Any]:
    return _rows(s.jacfwd(s.outputs)(s.parameters), 2)


@_over("jvp(grad)", is_space_product)
def _(s: Space) -> list[Any]:
    return [jvp(grad(s.loss), (s.parameters,), (s.direction(0),))[1]]


@_over("grad(jvp)", is_space_product)
def _(s: Space) -> list[Any]:
    return [grad(lambda p: jvp(s.loss, (p,), (s.direction(0),))[1])(s.parameters)]


@_over("grad(grad)", is_space_product)
def _(s: Space) -> list[Any]:
    return [grad(lambda p: s.inner(grad(s.loss)(p), s.direction(0)))(s.parameters)]


@_over("grad(jvp(grad)), third order", is_space_third)
def _(s: Space) -> list[Any]:
    v = s.direction(0)
    return [grad(lambda p: s.inner(jvp(grad(s.loss), (p,), (v,))[1], v))(s.parameters)]


@_over("vmap(jvp(grad)) over directions", is_space_product)
def _(s: Space) -> list[Any]:
    return _rows(vmap(lambda v: jvp(grad(s.loss), (s.parameters,), (v,))[1])(_stacked(s, 2)), 2)


@_over("vmap(grad) over an ensemble", is_space_member)
def _(s: Space) -> list[Any]:
    members = {name: s.parameters[name].detach() + 0.1 * change for name, change in _stacked(s, 2).items()}
    return _rows(vmap(grad(s.loss))(members), 2)


def _descended(s: Space, parameters: Tensors) -> Tensors:
    for _ in range(2):
        gradient = grad(s.loss)(parameters)
        parameters = {name: value - 0.1 * gradient[name] for name, value in parameters.items()}
    return parameters


def _is_meta_gradient(s: Space, result: list[Any]) -> Iterator[Pair]:
    yield s.inner(result[0], s.direction(0)), s.along(lambda p: s.loss(_descended(s, p)))


@_over("grad through two SGD steps", _is_meta_gradient)
def _(s: Space) -> list[Any]:
    return [grad(lambda p: s.loss(_descended(s, p)))(s.parameters)]
