"""Names of parameters that an optimizer only numbers: those that fit in one way."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerofunc.saving.foreign.found import Lazy

Shape = tuple[int, ...]


def names_by_value(flat: torch.Tensor, parameters: Sequence[tuple[str, Lazy]]) -> list[str] | None:
    """Of the masters in ``flat``, one after the other: the parameters that are these, rounded; None if none are."""
    found, start = [], 0
    for name, one in parameters:
        value = one.read().reshape(-1)
        if value.numel() and torch.equal(flat[start : start + value.numel()].to(value.dtype), value):
            found.append(name)
            start += value.numel()
    return found if start == flat.numel() else None


def names_by_shape(
    groups: Sequence[Sequence[Shape | None]], parameters: Sequence[tuple[str, Shape]]
) -> list[list[str]] | None:
    """Of groups that have their parameters in the module's order: their names. None if several ways fit, or none.

    Args:
        groups: The shape of each member; None where it is not known.
        parameters: Names and shapes in the module's order. Some may be in no group (frozen ones).
    """
    start = (0,) * len(groups)
    end = tuple(map(len, groups))
    ways: dict[tuple[int, ...], tuple[int, list[int | None]]] = {start: (1, [])}
    left = len(parameters) - sum(end)
    for number, (_, shape) in enumerate(parameters):
        following: dict[tuple[int, ...], tuple[int, list[int | None]]] = {}
        for place, (count, chosen) in ways.items():
            steps: list[int | None] = [
                g for g, at in enumerate(place) if at < end[g] and groups[g][at] in (shape, None)
            ]
            if number + 1 - sum(place) <= left:
                steps.append(None)
            for step in steps:
                to = tuple(at + (g == step) for g, at in enumerate(place))
                more, kept = following.get(to, (0, [*chosen, step]))
                following[to] = (more + count, kept)
        ways = following
    count, chosen = ways.get(end, (0, []))
    if count != 1:
        return None
    named: list[list[str]] = [[] for _ in groups]
    for (name, _), step in zip(parameters, chosen, strict=True):
        if step is not None:
            named[step].append(name)
    return named
