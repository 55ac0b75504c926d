"""From a case that fails to a shorter one that fails likewise."""

from dataclasses import fields, replace

from fuzz import modules
from fuzz.cases import Case

# What a case is made simpler by, the default where there is one.
SIMPLEST = {field.name: field.default for field in fields(Case)} | {"resident_bytes": 0, "prefetch": False}
PLAIN_BLOCK = {
    "checkpoint": "",
    "hook": "",
    "frozen": "",
    "again": None,
    "tied": None,
    "calls": 1,
    "join": "x = {call}",
}


def shrink(case, fails, most=150):
    """The shortest case found within `most` runs for which `fails` holds."""
    tried = 0
    is_better = True
    while is_better:
        is_better = False
        for candidate in _smaller(case):
            if tried >= most:
                return case
            tried += 1
            if fails(candidate):
                case, is_better = candidate, True
                break
    return case


def _smaller(case):
    """Cases with less in them, those with much less first."""
    yield from (replace(case, steps=case.steps[:n]) for n in range(1, len(case.steps)))
    for name in ("steps", "blocks"):
        items = getattr(case, name)
        if len(items) > 1:
            yield from (replace(case, **{name: items[:i] + items[i + 1 :]}) for i in range(len(items)))
    for name, value in SIMPLEST.items():
        if name not in ("blocks", "steps", "stage", "ranks") and getattr(case, name) != value:
            yield replace(case, **{name: value})
    if case.ranks != 1:
        yield replace(case, ranks=1)
    for i, block in enumerate(case.blocks):
        simpler = [
            replace(block, **{name: value}) for name, value in PLAIN_BLOCK.items() if getattr(block, name) != value
        ]
        simpler += [modules.Block(block.number)] if block.kind != "linear" else []
        yield from (replace(case, blocks=(*case.blocks[:i], b, *case.blocks[i + 1 :])) for b in simpler)
    for i, step in enumerate(case.steps):
        for simpler in step.simpler():
            yield replace(case, steps=(*case.steps[:i], simpler, *case.steps[i + 1 :]))
