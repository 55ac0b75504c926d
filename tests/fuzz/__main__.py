"""Runs random cases: `python -m fuzz --seconds 7200 --from-seed 1000 [--write]`.

`--seed 17` runs one, makes it shorter where it fails, and prints it.
"""

import argparse
import sys
import time
from collections import Counter

from fuzz import cases, printing, reliability
from fuzz.runner import KINDS, run
from fuzz.shrink import shrink


def main():
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="one case: its text, shrunk where it fails")
    parser.add_argument("--from-seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=sys.maxsize)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--write", action="store_true", help="the counts into docs/reliability.md")
    given = parser.parse_args()
    return _explain(given.seed) if given.seed is not None else _run(given)


def _run(given):
    """Runs many cases; says of each that is not good what it is."""
    counts, bad, seed = Counter(), [], given.from_seed
    deadline = time.monotonic() + given.seconds
    while seed < given.from_seed + given.cases and time.monotonic() < deadline:
        outcome = run(cases.draw(seed))
        if outcome.kind == "hang":  # a busy machine may be slow once
            outcome = run(cases.draw(seed))
        counts[outcome.kind] += 1
        if not outcome.is_good:
            bad.append(seed)
            print(f"seed {seed}: {outcome.kind}: {outcome.step}: {outcome.found[-1000:]}\n", flush=True)
        seed += 1
    print({kind: counts[kind] for kind in KINDS}, f"seeds {given.from_seed} to {seed - 1}, not good: {bad}")
    if given.write:
        reliability.write(counts, given.from_seed, seed - 1)
    return bool(bad)


def _explain(seed):
    """Prints the text of a case; of one that fails, the text of what is left when all that does not matter is gone."""
    case = cases.draw(seed)
    outcome = run(case)
    if not outcome.is_good:
        case = shrink(case, lambda other: run(other).kind == outcome.kind)
        outcome = run(case)
    print(printing.text(case, seed))
    print(f"# {outcome.kind}: {outcome.step}: {outcome.found}".replace("\n", "\n# "))
    return not outcome.is_good


if __name__ == "__main__":
    sys.exit(main())
