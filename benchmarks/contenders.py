"""The ways to train one GPT that are compared: the same initialisation, optimizer, clipping and data for each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, SEQUENCE, VOCABULARY, WIDTH
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import zerofunc

MICRO_BATCH = 2
CLIP_NORM = 1.0
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
STAGES = {f"stage{stage}": stage for stage in range(4)}
NAMES = ("single", "ddp", "fsdp2", *STAGES)
MIB = 1 << 20


@dataclass(frozen=True)
class Paging:
    """Sizes of zerofunc's pages and of what stays gathered, in MiB; None leaves them to the engine."""

    page_mib: float | None = None
    resident_mib: float | None = None

    def config(self) -> dict[str, int]:
        """The section ``zerofunc`` of the configuration."""
        sizes = {"page_bytes": self.page_mib, "resident_bytes": self.resident_mib}
        return {key: round(mib * MIB) for key, mib in sizes.items() if mib is not None}


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        module: What a user calls.
        update: Collective, except for ``single``. Backward of a loss, clipping, optimizer step, gradients forgotten.
    """

    name: str
    module: nn.Module
    update: Callable[[Tensor], None]

    def usage(self) -> zerofunc.Usage | None:
        """zerofunc's own account on this rank."""
        return self.module.usage() if isinstance(self.module, zerofunc.Engine) else None


@dataclass(frozen=True)
class Batch:
    """One rank's micro-batch: tokens and the next ones, and floats of an embedding's shape with a direction."""

    tokens: Tensor
    targets: Tensor
    embeds: Tensor
    direction: Tensor


def make_batches(num_batches: int) -> list[Batch]:
    """Batches of this rank, other ones on each rank."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return [_make_batch(generator) for _ in range(num_batches)]


def _make_batch(generator: torch.Generator) -> Batch:
    text = torch.randint(VOCABULARY, (MICRO_BATCH, SEQUENCE + 1), generator=generator)
    embeds = 0.02 * torch.randn(MICRO_BATCH, SEQUENCE, WIDTH, generator=generator)
    direction = torch.randn(embeds.shape, generator=generator)
    return Batch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), embeds, direction)


# -- the contenders ---------------------------------------------------------------------------------------------------


def build(name: str, paging: Paging) -> Contender:
    """Collective. A contender with a fresh model, equal for all contenders and ranks."""
    torch.manual_seed(0)
    model = GPT()
    if name in STAGES:
        return _zerofunc(name, model, paging)
    return {"single": _single, "ddp": _ddp, "fsdp2": _fsdp2}[name](name, model)


def num_parameters() -> int:
    """The number of the model's parameters, which it does not build."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT().parameters())


def _single(name: str, model: GPT) -> Contender:
    return Contender(name, model, _plain_update(model))


def _ddp(name: str, model: GPT) -> Contender:
    module = DistributedDataParallel(model)
    return Contender(name, module, _plain_update(module))


def _fsdp2(name: str, model: GPT) -> Contender:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Contender(name, model, _plain_update(model))


def _plain_update(module: nn.Module) -> Callable[[Tensor], None]:
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, **ADAMW)

    def update(loss: Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update


def _zerofunc(name: str, model: GPT, paging: Paging) -> Contender:
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_clipping": CLIP_NORM,
        "zero_optimization": {"stage": STAGES[name]},
        "zerofunc": paging.config(),
    }
    engine, *_ = zerofunc.initialize(model, config, optimizer=functools.partial(torch.optim.AdamW, **ADAMW))

    def update(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return Contender(name, engine, update)


# -- what they do -----------------------------------------------------------------------------------------------------


def train(contender: Contender, batch: Batch) -> float:
    """Collective, except for ``single``, as all below. One optimizer step; the loss before it."""
    loss = contender.module(batch.tokens, batch.targets)
    contender.update(loss)
    return loss.item()


def input_gradient(contender: Contender, batch: Batch) -> Tensor:
    """``torch.func.grad`` of the loss with respect to the embeddings."""
    return torch.func.grad(_loss_of_embeds(contender, batch))(batch.embeds)


def train_on_jvp(contender: Contender, batch: Batch) -> None:
    """One optimizer step on a loss that contains a forward-mode derivative."""
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has neither forward mode nor a second derivative
        primals, tangents = (batch.embeds,), (batch.direction,)
        loss, slope = torch.func.jvp(_loss_of_embeds(contender, batch), primals, tangents)
        contender.update(loss + slope.square())


def train_on_gradient(contender: Contender, batch: Batch) -> None:
    """One optimizer step on a loss that contains its own gradient, of ``autograd.grad(create_graph=True)``."""
    with sdpa_kernel(SDPBackend.MATH):
        embeds = batch.embeds.detach().requires_grad_()
        loss = _loss_of_embeds(contender, batch)(embeds)
        (gradient,) = torch.autograd.grad(loss, embeds, create_graph=True)
        contender.update(loss + gradient.square().sum())


def _loss_of_embeds(contender: Contender, batch: Batch) -> Callable[[Tensor], Tensor]:
    return lambda embeds: contender.module(None, batch.targets, inputs_embeds=embeds)


WORKS: dict[str, Callable[[Contender, Batch], object]] = {
    "training": train,
    "func.grad": input_gradient,
    "training on a jvp": train_on_jvp,
    "training on a gradient": train_on_gradient,
}
