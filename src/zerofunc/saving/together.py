"""What all ranks do together, so that an error of one is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from zerofunc.saving.manifest import CheckpointError


class Meeting(Protocol):
    """Where ranks exchange what they have: axes, or a background exchange."""

    def gather_objects(self, value: Any, label: str) -> list[Any]:
        """Collective. What each rank gives."""


def together(ranks: Meeting, step: Callable[[], Any], label: str) -> list[Any]:
    """Collective. What each rank's ``step`` gives; an error of any rank is raised on all."""
    result, problem = None, None
    try:
        result = step()
    except Exception as error:  # of any kind: the others would wait
        problem = error
    found = ranks.gather_objects((result, problem and _sendable(problem)), label)
    failed = {rank: text for rank, (_, text) in enumerate(found) if text is not None}
    if failed:
        raise _failure_of(failed, label) from problem
    return [one for one, _ in found]


def _sendable(error: Exception) -> str:
    return str(error) or type(error).__name__


def _failure_of(failed: Mapping[int, str], label: str) -> CheckpointError:
    """One error for what has failed on some ranks."""
    texts: dict[str, list[int]] = {}
    for rank, text in failed.items():
        texts.setdefault(text, []).append(rank)
    told = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items())
    return CheckpointError(f"{label}: {told}")
