"""Random programs in which ranks use different parameters of sharded models, drawn as plain data and then run.

Every rank draws the same :class:`Program` from a number, so it knows what all ranks do, and compares with one process.
"""

import contextlib
import dataclasses
import functools
import itertools
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zerofunc
from reference import assert_same, assert_same_gradients, build, data

WIDTH = 5
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
PARTS = ("linear", "gain", "extra")
BLOCK_BYTES = 8 * (2 * WIDTH * WIDTH + 2 * WIDTH)


class Block(nn.Module):
    """Three parts, each of which a rank may leave out."""

    def __init__(self):
        super().__init__()
        self.linear, self.extra = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x, parts):
        if "linear" in parts:
            x = x + torch.tanh(self.linear(x))
        if "gain" in parts:
            x = x * self.gain
        if "extra" in parts:
            x = x - self.extra(x).sin()
        return x


class Chain(nn.Module):
    """Blocks one after the other; some are recomputed in a backward inside the backward."""

    def __init__(self, num_blocks, recomputed, frozen):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.recomputed = recomputed
        for number in frozen:
            self.blocks[number].gain.requires_grad_(False)

    def forward(self, x, uses, middle=None):
        for number, (block, parts) in enumerate(zip(self.blocks, uses, strict=True)):
            if number == len(self.blocks) // 4 * 2 and middle is not None:  # between two pages
                x = middle(x)
            if parts and number in self.recomputed:
                x = checkpoint(block, x, parts, use_reentrant=True)
            elif parts:
                x = block(x, parts)
        return x


@dataclasses.dataclass(frozen=True)
class Model:
    """One sharded model of a program."""

    stage: int
    num_blocks: int
    pages: str  # what shares a page: a "parameter", a "block", a "pair" of blocks or the "model"
    resident_pages: int
    persistent: bool
    prefetch: bool
    pinned: frozenset  # blocks that are gathered around everything
    recomputed: frozenset
    frozen: frozenset
    through_shards: bool  # differentiated by its shards, through functional_call

    def page_of(self, block):
        """Which blocks' uses are one read, on the pages of a block."""
        return {"parameter": block, "block": block, "pair": block // 2, "model": 0}[self.pages]

    def settings(self):
        """How it is sharded."""
        page_bytes = {"parameter": 1, "block": 1, "pair": 2 * BLOCK_BYTES, "model": 1 << 20}[self.pages]
        largest = {"parameter": 8 * WIDTH * WIDTH, "block": BLOCK_BYTES}.get(self.pages, page_bytes)
        return {
            "page_bytes": page_bytes,
            "resident_bytes": self.resident_pages * (largest + 8 * 3),
            "persistence_bytes": 8 * (WIDTH + 3) if self.persistent else 0,
            "prefetch": self.prefetch,
            "unsplit": [f"blocks.{number}" for number in range(self.num_blocks)] if self.pages == "block" else [],
        }

    def make(self):
        """The plain module."""
        return Chain(self.num_blocks, self.recomputed, self.frozen)


@dataclasses.dataclass(frozen=True)
class Program:
    """A training loop. ``uses[step][micro][rank][model][block]`` are the parts that a rank uses there."""

    number: int
    models: tuple
    with_engines: bool
    joined: str  # "apart": a loss for each model; "chain" or "sum": one loss through all of them
    accumulation: int
    axes: tuple | None
    reads_in_backward: bool  # a hook in the middle of the backward runs the first model again
    uses: tuple


def draw(number, world_size):
    """The program of a number. At stage 3 all ranks read the same pages in one order, unless these are pinned."""
    rng = random.Random(number)
    with_engines, joined = rng.random() < 0.5, rng.choice(["apart", "apart", "chain", "sum"])
    models = tuple(_draw_model(rng, with_engines) for _ in range(rng.choice([1, 1, 2, 3])))
    accumulation = rng.choice([1, 1, 2, 3])
    may_be_unreached = with_engines and (joined == "apart" or len(models) == 1)

    def uses_of_ranks():
        drawn = [_draw_uses(rng, model, world_size, with_engines, may_be_unreached) for model in models]
        return tuple(zip(*drawn, strict=True))

    steps = rng.choice([2, 3])
    uses = tuple(tuple(uses_of_ranks() for _ in range(accumulation)) for _ in range(steps))
    axes = rng.choice([None, None, None, (1, world_size), (world_size, 1)])
    reads = rng.random() < 0.2 and not models[0].recomputed and not models[0].through_shards
    return Program(number, models, with_engines, joined, accumulation, axes, reads, uses)


def _draw_model(rng, with_engines):
    stage, num_blocks = rng.choice([0, 1, 2, 3, 3, 3]), rng.randint(1, 6)
    blocks = range(num_blocks)
    pages = rng.choice(["parameter", "block", "block", "pair", "model"])

    def some(chance):
        return frozenset(block for block in blocks if rng.random() < chance)

    pinned = rng.choice([frozenset(), frozenset(), frozenset(blocks), some(0.4)]) if stage == 3 else frozenset()
    through_shards = not with_engines and rng.random() < 0.15
    recomputed = rng.choice([frozenset(), some(0.4)]) if not through_shards else frozenset()
    may_freeze = pages in ("parameter", "block") and not through_shards
    recomputed -= set() if with_engines else {0}  # a backward by hand reaches something outside
    return Model(
        stage, num_blocks, pages, rng.choice([0, 1, 2, 3, 100]), rng.random() < 0.3, rng.random() < 0.7, pinned,
        recomputed=recomputed,
        frozen=rng.choice([frozenset(), frozenset(), some(0.3)]) if may_freeze else frozenset(),
        through_shards=through_shards,
    )  # fmt: skip


def _draw_uses(rng, model, world_size, with_engine, may_be_unreached):
    """For each rank, which parts of each block it uses."""
    is_common = rng.random() < 0.15

    def parts(chance):
        return frozenset(part for part in PARTS if rng.random() < chance)

    common = [parts(0.6) for _ in range(model.num_blocks)]
    ranks = [list(common) if is_common else [parts(0.45) for _ in common] for _ in range(world_size)]
    if model.stage == 3 or model.through_shards:
        free = model.pinned if not model.through_shards else frozenset()
        for rank in ranks:
            _align(rng, model, rank, common, free)
    trained = [set(PARTS) - ({"gain"} if block in model.frozen else set()) for block in range(model.num_blocks)]
    is_outer_reached = with_engine or not model.recomputed
    if (
        not is_outer_reached
        or not may_be_unreached
        and not all(any(map(set.intersection, map(set, rank), trained)) for rank in ranks)
    ):
        for rank in ranks:
            rank[0] |= {"linear"}
    if not with_engine:  # which backwards are inside which is not known then: all ranks run the same ones
        for rank, block in itertools.product(ranks, model.recomputed):
            rank[block] = ranks[0][block] | {"linear"}
    return tuple(tuple(rank) for rank in ranks)


def _align(rng, model, rank, common, free):
    """Make a rank read every page that is not free in its turn, as all ranks do, whichever part of it it uses."""
    if model.pages == "parameter":
        for block in set(range(model.num_blocks)) - free:
            rank[block] = common[block]
        return
    for _, page in itertools.groupby(range(model.num_blocks), model.page_of):
        blocks = list(page)
        if not set(blocks) & free and not any(rank[block] for block in blocks):
            rank[rng.choice(blocks)] = frozenset({rng.choice(PARTS)})


# -- running it -------------------------------------------------------------------------------------------------------


@functools.cache
def _mesh(axes):
    return None if axes is None else init_device_mesh("cpu", axes, mesh_dim_names=("replicate", "shard"))


class Sharded:
    """A model of a program on this rank, and what trains it."""

    def __init__(self, program, model, seed, timeout_s):
        self.program, self.model = program, model
        module, settings = build(model.make, seed), model.settings()
        if program.with_engines:
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": program.accumulation,
                "optimizer": {"type": "SGD", "params": SGD},
                "zero_optimization": {"stage": model.stage},
                "zerofunc": {**settings, "timeout_s": timeout_s},
            }
            self.engine = zerofunc.initialize(module, config, mesh=_mesh(program.axes))[0]
            self.module, self.optimizer = self.engine.module, None
        else:
            self.module = zerofunc.shard(module, model.stage, _mesh(program.axes), timeout_s=timeout_s, **settings)
            self.engine, self.optimizer = None, torch.optim.SGD(zerofunc.shards(self.module).values(), **SGD)

    def __call__(self, *args):
        if self.model.through_shards:
            return zerofunc.functional_call(self.module, zerofunc.shards(self.module), args)
        return (self.engine or self.module)(*args)

    def pinned(self):
        """Around a step: the context in which pinned blocks are gathered."""
        blocks = [self.module.blocks[number] for number in sorted(self.model.pinned)]
        return zerofunc.gathered([p for block in blocks for p in block.parameters()]) if blocks else _nothing()

    def backward(self, loss):
        if self.engine is not None:
            self.engine.backward(loss)
        else:
            (loss / self.program.accumulation).backward()

    def step(self):
        if self.engine is not None:
            self.engine.step()

    def update(self):
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()


def _nothing():
    return contextlib.nullcontext()


def losses(program, models, x, uses, middle):
    """The losses of one rank in one micro-step; the models are sharded or plain."""
    outputs, h = [], x
    for number, (model, used) in enumerate(zip(models, uses, strict=True)):
        out = model(h if program.joined == "chain" else x, used, middle if number == 0 else None)
        outputs.append(out)
        h = torch.tanh(out)
    singles = [(out - 0.3).square().mean() * (1 + number) for number, out in enumerate(outputs)]
    return singles if program.joined == "apart" else [sum(singles)]


def inputs(step, micro, rank):
    """What a rank sees in a micro-step; every block's input has a gradient, so that backwards read every block."""
    return data(10 * step + micro, rank, 4, WIDTH).requires_grad_()


def run_micro_step(program, sharded, step, micro, rank):
    """Losses and backwards of one micro-step on this rank."""
    uses, x, first = program.uses[step][micro][rank], inputs(step, micro, rank), sharded[0]

    def read_again(gradient):
        with torch.no_grad():
            first(x.detach(), [frozenset(PARTS)] * first.model.num_blocks, None)

    def middle(h):
        if program.reads_in_backward and h.requires_grad:
            h = h * 1.0
            h.register_hook(read_again)
        return h

    for model, loss in zip(sharded, losses(program, sharded, x, uses, middle), strict=False):
        model.backward(loss)
    for model in sharded:
        model.step()


def run_reference(program, plain, step, world_size):
    """The gradients of one step in one process, on the data of all ranks."""
    for micro, rank in itertools.product(range(program.accumulation), range(world_size)):
        uses = program.uses[step][micro][rank]
        for loss in losses(program, plain, inputs(step, micro, rank), uses, None):
            (loss / program.accumulation / world_size).backward()
    for model, reference in zip(program.models, plain, strict=True):
        for parameter in reference.parameters():
            if model.through_shards and model.pages != "parameter" and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # of a page that is used, as everywhere in torch.func


def run(program, timeout_s=20.0):
    """Collective. Run the program on this rank and compare with one process after every step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sharded = [Sharded(program, model, seed, timeout_s) for seed, model in enumerate(program.models)]
    plain = [build(model.make, seed) for seed, model in enumerate(program.models)]
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], **SGD) for m in plain]
    for step in range(len(program.uses)):
        with contextlib.ExitStack() as stack:
            for model in sharded:
                stack.enter_context(model.pinned())
            for micro in range(program.accumulation):
                run_micro_step(program, sharded, step, micro, rank)
        run_reference(program, plain, step, world_size)
        for model, reference, optimizer in zip(sharded, plain, optimizers, strict=True):
            if not program.with_engines:
                assert_same_gradients(model.module, reference)
            model.update()
            optimizer.step()
            optimizer.zero_grad()
            assert_same(model.module, reference)
