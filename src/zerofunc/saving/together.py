"""What all ranks do together, so that an error of one is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zerofunc.ranks.collectives import Axes
from zerofunc.saving.manifest import CheckpointError


def together(axes: Axes, step: Callable[[], Any], label: str) -> list[Any]:
    """Collective. What each rank's ``step`` gives; an error of any rank is raised on all."""
    result, problem = None, None
    try:
        result = step()
    except (CheckpointError, OSError, TypeError, ValueError) as error:
        problem = error
    found = axes.gather_objects((result, problem), label)
    failed = {rank: error for rank, (_, error) in enumerate(found) if error is not None}
    if failed:
        raise failure_of(failed, label) from problem
    return [one for one, _ in found]


def failure_of(failed: Mapping[int, BaseException], label: str) -> CheckpointError:
    """One error for what has failed on some ranks."""
    texts: dict[str, list[int]] = {}
    for rank, error in failed.items():
        texts.setdefault(str(error) or type(error).__name__, []).append(rank)
    told = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items())
    return CheckpointError(f"{label}: {told}")
