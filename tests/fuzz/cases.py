"""A case: a network, where and how it is sharded, and a program; drawn from a seed."""

from dataclasses import dataclass
from random import Random

from fuzz import modules, steps

OPTIMIZERS = {
    "sgd": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "decay": ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
}


@dataclass(frozen=True)
class Case:
    """What one program is made of.

    `num_optimizers` and `prefetch` hold for the torch way; `accumulation` for the engine. `agree` says whether all
    ranks take the same branch.
    """

    blocks: tuple[modules.Block, ...]
    steps: tuple[object, ...]
    ranks: int = 2
    stage: int = 3
    engine: bool = False
    dtype: str = "float64"
    page_bytes: int = 1 << 20
    resident_bytes: int = 1 << 20
    persistence_bytes: int = 0
    prefetch: bool = True
    second_order: bool = False
    optimizer: str = "sgd"
    num_optimizers: int = 1
    accumulation: int = 1
    clip: bool = False
    agree: bool = True


def draw(seed):
    """The case of a seed."""
    random = Random(seed)
    engine = random.random() < 0.35
    dtype = random.choice(("float64",) * 9 + ("float32",))
    return Case(
        blocks=modules.draw_blocks(random),
        steps=tuple(_allowed(steps.draw(random), engine) for _ in range(random.choice((1, 2, 3, 3, 4, 5)))),
        ranks=random.choice((1, 2, 2, 2, 2, 2, 2, 3)),
        stage=random.choice((0, 1, 2, 3, 3, 3)),
        engine=engine,
        dtype=dtype,
        page_bytes=random.choice((1, 4, 16, 64, 64, 160, 160, 500, 1 << 20)),
        resident_bytes=random.choice((0, 0, 0, 200, 400, 800, 1 << 20)),
        persistence_bytes=random.choice((0, 0, 32, 64, 160, 1 << 20)),
        prefetch=random.random() < 0.8,
        second_order=random.random() < 0.2,
        optimizer=random.choice(list(OPTIMIZERS)) if dtype == "float64" else "sgd",
        num_optimizers=random.choice((1, 1, 2)),
        accumulation=random.choice((1, 1, 2, 3)),
        clip=random.random() < 0.2,
        agree=random.random() < 0.5,
    )


def _allowed(step, engine):
    """The step, or where an engine takes no such step a plain one."""
    if engine and isinstance(step, (steps.Clear, steps.Hook)) or engine and step == steps.Copy("optimizer"):
        return steps.Train()
    return step
