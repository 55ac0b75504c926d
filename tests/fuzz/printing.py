"""From a case to its text: a program that stands alone, to be run by torchrun or by `runner`."""

import ast
import json
import re
import textwrap
from dataclasses import replace
from pathlib import Path

from fuzz import modules, steps
from fuzz.cases import OPTIMIZERS

HARNESS = Path(__file__).with_name("harness.py").read_text()
_TREE = ast.parse(HARNESS)
TIMEOUT_S = 12
# The largest difference, relative to a tensor's largest value: sums come in another order, which derivatives amplify.
TOLERANCES = {"float64": 1e-8, "float32": 2e-3}
LOW = 0.1
END = """
try:
    program()
except Stop:
    pass
if __name__ == "__main__":
    print(*(f"rank {RANK}: {' '.join(entry)}" for entry in seen), sep="\\n", flush=True)
"""


def text(case, seed=None):
    """The program."""
    numbered = "" if seed is None else f" Seed {seed}."
    body = textwrap.indent("\n".join(_lines(case)), "    ")
    program = "\n".join([
        *_setting(case), "", "", modules.text(case.blocks), "", *_building(case), "", "", "def program():", body, END,
    ])  # fmt: skip
    title = f'"""torchrun --standalone --nproc-per-node {case.ranks} FILE{numbered}"""'
    return f"{title}\n\n{_harness(program)}\n\n{program}"


def _harness(program):
    """The part of the harness that a program uses."""
    texts = [ast.get_source_segment(HARNESS, node) for node in _TREE.body[1:]]
    needed, size = program, 0
    while size != len(needed):
        size = len(needed)
        for node, source in zip(_TREE.body[1:], texts, strict=True):
            name = getattr(node, "name", "")
            if name and source not in needed and re.search(rf"\b{name}\b", needed):
                needed += source
    kept = [
        f"\n\n{source}\n" if hasattr(node, "name") else source
        for node, source in zip(_TREE.body[1:], texts, strict=True)
        if not hasattr(node, "name") or source in needed
    ]
    return "\n".join(kept)


def _setting(case):
    is_low = any(block.kind == "Low" for block in case.blocks)
    return [f"torch.set_default_dtype(torch.{case.dtype})", f"T = {LOW if is_low else TOLERANCES[case.dtype]}"]


def _building(case):
    lines = ["torch.manual_seed(0)", "plain = elementary(Net(lambda f, *args: f(*args)))", "torch.manual_seed(0)"]
    name, options = OPTIMIZERS[case.optimizer]
    sizes = {
        name: getattr(case, name)
        for name in ("page_bytes", "resident_bytes", "persistence_bytes", "prefetch", "second_order")
    }
    sizes |= {"unsplit": modules.unsplit(case.blocks), "timeout_s": TIMEOUT_S}
    given = ", ".join(f"{key}={value}" for key, value in options.items())
    number = 1 if case.engine else case.num_optimizers
    if case.engine:
        lines += [
            f"config = {_config(case, name, options, sizes)}",
            "engine, optimizer, *_ = zerofunc.initialize(Net(zerofunc.checkpoint), config)",
            "model, module, optimizers = engine, engine.module, [optimizer]",
        ]
    else:
        shown = ", ".join(f"{key}={value!r}" for key, value in sizes.items() if value != DEFAULTS.get(key))
        lines += [
            f"model = module = zerofunc.shard(Net(zerofunc.checkpoint), {case.stage}, {shown})",
            f"optimizers = build(torch.optim.{name}, zerofunc.shards(module), {number}, {given})",
        ]
    return [
        *lines,
        f"plain_optimizers = build(torch.optim.{name}, dict(plain.named_parameters()), {number}, {given})",
        "", "", "def clear():",
        "    engine.zero_grad()" if case.engine else "    for o in optimizers: o.zero_grad()",
        "    for o in plain_optimizers: o.zero_grad()",
    ]  # fmt: skip


DEFAULTS = {"persistence_bytes": 0, "prefetch": True, "second_order": False, "unsplit": []}


def _config(case, name, options, sizes):
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": case.accumulation,
        "optimizer": {"type": name, "params": options},
        "zero_optimization": {"stage": case.stage},
        "zerofunc": {key: value for key, value in sizes.items() if value != DEFAULTS.get(key)},
    }
    if case.clip:
        config["gradient_clipping"] = 0.5
    text = json.dumps(config)
    return text.replace("true", "True").replace("false", "False")


def _lines(case):
    """The program's steps."""
    lines, micro_steps = [], 0
    for number, step in enumerate(case.steps):
        branch = "" if not modules.branches(case.blocks) else str(number) if case.agree else "r"
        around = steps.Surroundings(case.engine, case.accumulation, case.clip, branch)
        if case.engine and isinstance(step, steps.Train):
            micro_steps += 1
            around = replace(around, boundary=micro_steps % case.accumulation == 0)
        lines += step.lines(number, around)
    return lines or ["pass"]
