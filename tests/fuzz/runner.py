"""Running cases on kept pools of ranks, and what came out."""

import linecache
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from fuzz import printing
from zerofunc_testing.pool import RankError, shared_pool

TIMEOUT_S = 40
# Errors that zerofunc documents, where plain PyTorch goes on.
REFUSALS = ()
# From the best to the worst; the first three are as they should be.
KINDS = ("equal", "raise", "alone", "refused", "different", "error", "hang")
GOOD = KINDS[:4]


@dataclass(frozen=True)
class Outcome:
    """What a case came to: its worst step, on any rank. `alone`: zerofunc has a value where plain PyTorch raises."""

    kind: str
    step: str = ""
    found: str = ""

    @property
    def is_good(self):
        return self.kind in GOOD


def run(case):
    """What the case comes to."""
    pool = shared_pool(case.ranks)
    try:
        by_rank = pool.run(run_text, printing.text(case), timeout_s=TIMEOUT_S)
    except RankError as error:
        is_stuck = "was still running" in next(iter(error.failures.values()))
        return Outcome("hang" if is_stuck else "error", "", str(error))
    if len({tuple(entry[:2] for entry in seen if entry[1] == "error") for seen in by_rank}) > 1:
        pool.close()  # one rank raised alone: the others may wait for it yet
    outcomes = [_outcome(entry) for seen in by_rank for entry in seen]
    return max(outcomes, key=lambda outcome: KINDS.index(outcome.kind), default=Outcome("equal"))


def _outcome(entry):
    step, kind, found = entry
    if kind == "error" and any(text in found for text in REFUSALS):
        kind = "refused"
    return Outcome(kind, step, found)


def run_text(text):
    """On a rank: what each step of the program came to."""
    name = "<case>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "case"}
    dtype = torch.get_default_dtype()
    try:
        with warnings.catch_warnings():
            exec(compile(text, name, "exec"), namespace)
    finally:
        torch.set_default_dtype(dtype)
    return namespace["seen"]
