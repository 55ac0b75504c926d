"""When gradients are reduced, and when a step is due."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Accumulation:
    """Counts the micro-steps between steps.

    Stages 0 and 1 reduce at the boundary; 2 and 3 keep no full gradient, so they reduce at every backward.

    Attributes:
        micro_steps: Micro-steps so far.
        place: Micro-steps since the last update.
        num_steps: Micro-steps per update.
        backwards: Backwards since the last update.
        boundary: What the user says of the next micro-step, or None.
        context: Name of the context that holds reductions back, or empty.
    """

    def __init__(self, stage: int, num_steps: int, is_managed: bool) -> None:
        self.micro_steps = self.place = self.backwards = 0
        self.boundary: bool | None = None
        self.context = ""
        self._stage = stage
        self.num_steps = num_steps
        self._is_managed = is_managed

    @property
    def is_due(self) -> bool:
        """Whether the next micro-step updates the parameters, as far as backwards know."""
        if self.boundary is not None:
            return self.boundary
        return self._is_managed and self.place + 1 >= self.num_steps

    @property
    def is_due_in_step(self) -> bool:
        """Whether the micro-step that is being made updates the parameters."""
        return self.is_due or not self._is_managed

    @property
    def is_reduced(self) -> bool:
        """Whether the next backward ends in a reduction."""
        return (self._stage >= 2 or self.is_due) and not self.context

    def count(self, stepped: bool) -> None:
        """Local. A micro-step was made."""
        self.micro_steps += 1
        self.place, self.backwards = (0, 0) if stepped else (self.place + 1, self.backwards)

    def state(self) -> dict[str, int]:
        """Where it stands."""
        return {name: getattr(self, name) for name in ("micro_steps", "place", "num_steps", "backwards")}

    def misfit(self, state: Mapping[str, int]) -> str:
        """Why this cannot go on where another one stood, or nothing: it was between two of its micro-steps."""
        place, num_steps = state["place"], state["num_steps"]
        if place * self.num_steps % num_steps == 0:
            return ""
        return (
            f"it was saved after micro-step {place} of {num_steps}, which is no whole number of the {self.num_steps} "
            "micro-steps here; set gradient_accumulation_steps to a multiple, or load one saved after a step"
        )

    def restore(self, state: Mapping[str, int]) -> None:
        """Local. Stand where another one stood, so far as its gradients were part of a step."""
        self.micro_steps = state["micro_steps"]
        self.place = state["place"] * self.num_steps // state["num_steps"]
        self.backwards = state["backwards"] * self.num_steps // state["num_steps"]

    def set_boundary(self, is_boundary: bool) -> None:
        """Local. What the user says of all micro-steps from now on."""
        self.need_managed("set_gradient_accumulation_boundary")
        self.boundary = is_boundary

    @contextmanager
    def held_back(self, name: str) -> Iterator[None]:
        """Local. Backwards inside leave their full gradients on this rank."""
        if self.context:
            raise RuntimeError(f"{name}() inside {self.context}()")
        self.context = name
        try:
            yield
        finally:
            self.context = ""

    def need_managed(self, name: str) -> None:
        """Raise RuntimeError if the user counts micro-steps, so that ``name`` has no meaning."""
        if not self._is_managed:
            raise RuntimeError(f"{name}() needs managed_gradient_accumulation, which the config turns off")
