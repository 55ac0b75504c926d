"""Writes ``docs/zoo.md``: every model's cells at every stage, measured.

PYTHONPATH=tests python -m zoo.table
"""

import argparse
import platform
import sys
from collections import Counter
from pathlib import Path

import diffusers
import e3nn
import torch
import transformers

import zerofunc
from zerofunc.testing import RankPool
from zerofunc.verify.cells import CELLS
from zerofunc.verify.run import CANNOT, OK, Outcome, Setting
from zoo.catalogue import ALONE, MODELS, THOROUGH, UNANNOUNCED, cells_of, failures, judge_model

LIBRARIES = (zerofunc, torch, transformers, diffusers, e3nn)
SECTIONS = list(dict.fromkeys(cell.section for cell in CELLS if cell.models is None))
SECTION_OF = {cell.name: cell.section for cell in CELLS}
ORDER = [OK, ALONE, CANNOT]
HEAD = """# The zoo: architectures as they come from their libraries

Tiny and random, in evaluation mode and float64, on {nproc} ranks with CPU and gloo. Each cell is judged as the first
thing an engine does and after two training steps, and training is checked right afterwards. The engine runs the model
as it comes, LayerNorm, fused attention and all. It is compared with the same model of elementary operations in plain
PyTorch, within {tolerance:g} of each tensor's largest value, and that one with finite differences. Measured by

    {command}

with {versions}.

A number counts the cells that are ok at all of stages {stages}. After a plus: those that are ok on the engine alone,
as plain PyTorch raises or is wrong there with the model as it comes. In brackets: those that plain PyTorch cannot do
with elementary operations either.
"""


def measured(models, stages, nproc):
    """Yields the outcomes of each model: a dict from (cell, stage) to the worst over ranks."""
    with RankPool(nproc, timeout_s=3600) as pool:
        for model in models:
            found = {}
            for stage in stages:
                per_rank = pool.run(judge_model, model, stage, cells_of(model))
                for outcomes in zip(*per_rank, strict=True):
                    worst = max(outcomes, key=lambda outcome: (ORDER + [outcome.status]).index(outcome.status))
                    found[worst.cell, stage] = worst
            yield model, found


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
    parser = argparse.ArgumentParser(description="Measure the zoo and write the table.")
    parser.add_argument("--models", nargs="*", help="names such as gpt2; all by default")
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "docs" / "zoo.md")
    options = parser.parse_args()
    chosen = [model for model in MODELS if not options.models or model.split(":")[1] in options.models]
    outcomes: dict[str, dict[tuple[str, int], Outcome]] = {}
    for model, found in measured(chosen, options.stages, options.nproc):
        outcomes[model] = found
        print(model, dict(Counter(outcome.status for outcome in found.values())), flush=True)
        options.out.write_text(page(outcomes, options.stages, options.nproc))
    bad = [f"{model}: {outcome}" for model in outcomes for outcome in failures(outcomes[model].values())]
    print(*bad, sep="\n")
    sys.exit(bool(bad))


def page(outcomes, stages, nproc):
    """The document."""
    head = HEAD.format(
        nproc=nproc,
        command=f"PYTHONPATH=tests python -m zoo.table --nproc {nproc} --stages {' '.join(map(str, stages))}",
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
        f"Not reached by this run: {', '.join(short(m) for m in MODELS if m not in outcomes) or 'none'}.", "",
        "Not here: training mode (dropout), generation with caches, float16 and bfloat16, accelerators.", "",
        "## What plain PyTorch cannot do, and the engine can", "", *reasons(outcomes, ALONE), "",
        "## What neither can do", "", *(list(reasons(outcomes, CANNOT)) or ["Nothing."]), "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
