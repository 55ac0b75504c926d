"""Outcomes on disk: what the tests of the zoo found last, from which the table is written."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from zerofunc.verify.run import CANNOT, OK, Outcome
from zoo.catalogue import ALONE, MODELS

FOLDER = Path(__file__).parents[2] / "build" / "zoo"
ORDER = [OK, ALONE, CANNOT]  # everything else is worse


def keep(model, stage, outcomes):
    """Write this rank's outcomes of a model at a stage."""
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{model.replace(':', '.')}-stage{stage}-rank{rank}of{world_size}.json"
    path.write_text(json.dumps([asdict(outcome) for outcome in outcomes]))


def kept():
    """The outcomes of each model that was judged: (cell, stage) to the worst over ranks."""
    outcomes: dict[str, dict[tuple[str, int], Outcome]] = {}
    for model in MODELS:
        found: dict[tuple[str, int], Outcome] = {}
        for path in sorted(FOLDER.glob(f"{model.replace(':', '.')}-*.json")):
            for outcome in (Outcome(**fields) for fields in json.loads(path.read_text())):
                before = found.setdefault((outcome.cell, outcome.stage), outcome)
                found[outcome.cell, outcome.stage] = max(before, outcome, key=_badness)
        if found:
            outcomes[model] = found
    return outcomes


def _badness(outcome):
    return (ORDER + [outcome.status]).index(outcome.status)
