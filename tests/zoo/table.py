"""Writes ``docs/zoo.md`` from what the tests of the zoo found. ``make test-zoo`` runs both."""

import platform
import sys
from collections import Counter
from pathlib import Path

import diffusers
import e3nn
import torch
import transformers

import zerofunc
from zerofunc.verify.cells import CELLS
from zerofunc.verify.run import CANNOT, OK, Setting
from zoo.catalogue import ALONE, MODELS, THOROUGH, UNANNOUNCED, cells_of, failures
from zoo.outcomes import ORDER, kept

LIBRARIES = (zerofunc, torch, transformers, diffusers, e3nn)
SECTIONS = list(dict.fromkeys(cell.section for cell in CELLS if cell.models is None))
SECTION_OF = {cell.name: cell.section for cell in CELLS}
TABLE = Path(__file__).parents[2] / "docs" / "zoo.md"
HEAD = """# The zoo: architectures as they come from their libraries

Tiny and random, in evaluation mode and float64, on 2 ranks with CPU and gloo. Each cell is judged as the first
thing an engine does and after two training steps, and training is checked right afterwards. The engine runs the model
as it comes, LayerNorm, fused attention and all. It is compared with the same model of elementary operations in plain
PyTorch, within {tolerance:g} of each tensor's largest value, and that one with finite differences. Measured by

    make test-zoo

with {versions}.

A number counts the cells that are ok at all of stages {stages}. After a plus: those that are ok on the engine alone,
as plain PyTorch raises or is wrong there with the model as it comes. In brackets: those that plain PyTorch cannot do
with elementary operations either.
"""


def entry(found, section):
    """How many cells of a section are ok, and ok on the engine alone; by stage where stages differ."""
    texts = []
    for stage in sorted({stage for _, stage in found}):
        statuses = [found[cell, at].status for cell, at in found if at == stage and SECTION_OF[cell] == section]
        counts = Counter(statuses)
        text = f"{counts[OK]} + {counts[ALONE]}" if counts[ALONE] else f"{counts[OK]}"
        text += f" ({counts[CANNOT]})" if counts[CANNOT] else ""
        bad = [status for status in statuses if status not in ORDER]
        texts.append(f"{text}, **{len(bad)} not ok**" if bad else text)
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def table(outcomes):
    """Rows of models, columns of sections."""
    lines = [f"| model | {' | '.join(SECTIONS)} |", "|---" * (len(SECTIONS) + 1) + "|"]
    for model, found in outcomes.items():
        lines.append(f"| {short(model)} | {' | '.join(entry(found, section) for section in SECTIONS)} |")
    return lines


def short(model):
    """A model's name."""
    return f"`{model.removeprefix('zoo.').replace(':', '.')}`"


def reasons(outcomes, status):
    """For each reason of a status: which cells of which models."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    for model, found in outcomes.items():
        for outcome in found.values():
            if outcome.status == status:
                text = outcome.detail.split(" by ")[0] if "finite differences" in outcome.detail else outcome.detail
                cells = by_reason.setdefault(text, {}).setdefault(model, [])
                cells += [] if outcome.cell in cells else [outcome.cell]
    for text, models in by_reason.items():
        cells = sorted({cell for cells in models.values() for cell in cells})
        yield f"- {text}\n  - models: {', '.join(map(short, models))}\n  - cells: {', '.join(cells)}"


def main():
    outcomes = kept()
    if not outcomes:
        sys.exit("nothing to write: run make test-zoo first")
    TABLE.write_text(page(outcomes))
    bad = [f"{model}: {outcome}" for model in outcomes for outcome in failures(outcomes[model].values())]
    print(*bad, sep="\n")
    sys.exit(bool(bad))


def page(outcomes):
    """The document."""
    stages = sorted({stage for found in outcomes.values() for _, stage in found})
    head = HEAD.format(
        stages=", ".join(map(str, stages)),
        tolerance=Setting().tolerance,
        versions=", ".join(f"{library.__name__} {library.__version__}" for library in LIBRARIES)
        + f", Python {platform.python_version()}",
    )
    thorough = ", ".join(short(model) for model in outcomes if model in THOROUGH)
    return "\n".join([
        head, *table(outcomes), "",
        "Potentials also train on energies, forces and stresses (`tests/zoo/test_potential.py`).", "",
        "## What is left out", "",
        f"Every cell but `linearize` is judged for {thorough}. The other models are judged on:", "",
        *(f"- {cell}" for cell in cells_of("")), "",
        f"In {', '.join(sorted(UNANNOUNCED))}, nothing announces that a plain forward is differentiated twice: where "
        "plain PyTorch cannot do it, the model runs inside `zerofunc.second_order()`.", "",
        f"Not judged: {', '.join(short(m) for m in MODELS if m not in outcomes) or 'none'}.", "",
        "Not here: training mode (dropout), generation with caches, float16 and bfloat16, accelerators.", "",
        "## What plain PyTorch cannot do, and the engine can", "", *reasons(outcomes, ALONE), "",
        "## What neither can do", "", *(list(reasons(outcomes, CANNOT)) or ["Nothing."]), "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
