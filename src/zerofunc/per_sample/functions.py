"""Per-sample gradients of plain and sharded modules: their norms, projections, inner products, and their clipped sum.

All take ``fn(model, *sample)``, the loss of one sample without batch dimension; ``model`` is called like the module. A
``batch`` is a tensor or any tree of them, all of the same length; a tuple or list is spread over the arguments of
``fn``. Ranks may have different numbers of samples, and none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zerofunc.per_sample.ghost import squared_norm
from zerofunc.per_sample.samples import Chunk, Samples, Tree, samples_of, trainable
from zerofunc.per_sample.seeded import Projector, normal_part
from zerofunc.per_sample.taps import Measure
from zerofunc.space.trees import clip_factor


def per_sample_grad_norms(
    fn: Callable[..., torch.Tensor], module: nn.Module, batch: Any, chunk_size: int | None = None
) -> torch.Tensor:
    """Collective. L2 norm of each sample's gradient over all trainable parameters, [B], of this rank's samples.

    Float64 for modules with float64 parameters, else float32. Not differentiable. Linear layers and embeddings whose
    weight is used once never have a per-sample gradient formed; the others have one parameter's at a time.

    Args:
        fn: From the model and one sample to its loss, a scalar.
        module: A module: plain, sharded at any stage, or an engine.
        batch: This rank's samples.
        chunk_size: The most samples at a time; all by default.

    Raises:
        ValueError: On every rank, if the batch or the module does not allow it, or ``fn`` does not give a scalar.
    """
    samples = samples_of(fn, module, batch, chunk_size)
    return samples.of_all(functools.partial(_squared_norms, samples)).sqrt()


def per_sample_projections(
    fn: Callable[..., torch.Tensor], module: nn.Module, batch: Any, projector: Projector, chunk_size: int | None = None
) -> torch.Tensor:
    """Collective. Random projection of each sample's gradient, [B, projector.dim], of this rank's samples.

    One parameter's per-sample gradients and one block of the projection are held at a time.

    Args:
        fn: From the model and one sample to its loss, a scalar.
        module: A module: plain, sharded at any stage, or an engine.
        batch: This rank's samples.
        projector: The projection, the same on all ranks.
        chunk_size: The most samples at a time; all by default. Each chunk draws the projection anew.

    Raises:
        ValueError: On every rank, as in :func:`per_sample_grad_norms`, or if ``projector`` is none.
    """
    problem = "" if isinstance(projector, Projector) else f"projector is {projector!r}; expected a zerofunc.Projector"
    samples = samples_of(fn, module, batch, chunk_size, problem)
    dtype = samples.accumulator.dtype
    measure = Measure(
        samples.accumulator.new_zeros(projector.dim), lambda name, g: projector.project(name, g.to(dtype))
    )
    return samples.of_all(lambda chunk: samples.measured(chunk, measure))


def per_sample_dots(
    fn: Callable[..., torch.Tensor], module: nn.Module, batch: Any, vector: Tree, chunk_size: int | None = None
) -> torch.Tensor:
    """Collective. Inner product of each sample's gradient with ``vector``, [B], of this rank's samples.

    One forward-mode pass: no gradient is formed.

    Args:
        fn: From the model and one sample to its loss, a scalar.
        module: A module: plain, sharded at any stage, or an engine.
        batch: This rank's samples.
        vector: A sharded tree with the names of ``zerofunc.shards(module)``; of full shape for a plain module.
        chunk_size: The most samples at a time; all by default.

    Raises:
        ValueError: On every rank, as in :func:`per_sample_grad_norms`, or if ``vector`` does not fit the module.
    """
    samples = samples_of(fn, module, batch, chunk_size, _misfit(vector, trainable(module)))

    def dots(chunk: Chunk) -> torch.Tensor:
        with torch.no_grad():
            tangents = torch.func.jvp(lambda tree: samples.losses(tree, chunk), (samples.point,), (dict(vector),))[1]
        return tangents

    return samples.of_all(dots)


def clipped_grad(
    fn: Callable[..., torch.Tensor],
    module: nn.Module,
    batch: Any,
    max_norm: float,
    noise_multiplier: float = 0.0,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
    batch_size: float | None = None,
) -> dict[str, torch.Tensor]:
    """Collective. The gradient of DP-SGD: (sum over samples of all ranks of their clipped gradients + noise) / size.

    A sharded tree for a sharded module, ready to become the ``grad`` of its shards; of full shape for a plain one.
    Norms come from taps; then one backward through the losses, weighted, gives the clipped sum. Both see the same
    dropout. Noise is added once, to the sum over ranks, and depends on the generator's state alone, not on the number
    of ranks or the stage. Abadi et al. 2016, algorithm 1 (https://arxiv.org/abs/1607.00133).

    Args:
        fn: From the model and one sample to its loss, a scalar.
        module: A module: plain, sharded at any stage, or an engine.
        batch: This rank's samples; may be none (Poisson sampling).
        max_norm: The most that one sample's gradient may be long.
        noise_multiplier: Standard deviation of the noise on the sum, over ``max_norm``.
        generator: Draws the noise's seed; in the same state on every rank. PyTorch's default one otherwise.
        chunk_size: The most samples at a time; all by default.
        batch_size: What to divide by: the number of samples on all ranks, or the expected one under Poisson sampling.

    Raises:
        ValueError: On every rank, as in :func:`per_sample_grad_norms`, or if a number is not valid.
    """
    problem = _numbers_problem(max_norm, noise_multiplier, batch_size)
    device = "cpu" if generator is None else generator.device
    seed = int(torch.randint(1 << 62, (), generator=generator, device=device)) if noise_multiplier else 0
    samples = samples_of(fn, module, batch, chunk_size, problem, seed)
    size = batch_size or samples.num_samples
    if not size:
        raise ValueError("clipped_grad: no rank has a sample; give the expected number as batch_size")
    total = {name: torch.zeros_like(part) for name, part in samples.point.items()}
    for index in range(samples.num_chunks):
        chunk, count = samples.chunk(index)
        with torch.random.fork_rng(_devices(samples.accumulator)):  # the gradient repeats the norms' random numbers
            norms = _squared_norms(samples, chunk).sqrt()
        weights = clip_factor(norms, max_norm) * (torch.arange(len(norms), device=norms.device) < count)
        gradients = samples.gradient(chunk, weights)
        torch._foreach_add_(list(total.values()), [gradients[name] for name in total], alpha=samples.num_ranks)
    for name, part in total.items():
        if noise_multiplier:
            part.add_(_noise(samples, name, part), alpha=noise_multiplier * max_norm)
        part.div_(size)
    return total


def _squared_norms(samples: Samples, chunk: Chunk) -> torch.Tensor:
    return samples.measured(chunk, squared_norm(samples.accumulator))


def _noise(samples: Samples, name: str, like: torch.Tensor) -> torch.Tensor:
    """Local. This rank's part of a standard normal tensor."""
    start = 0
    if samples.sharding is not None:
        start = samples.sharding.places[name].range(samples.sharding.rank).start
    return normal_part(samples.seed, name, start, start + like.numel(), like).view(like.shape)


def _devices(like: torch.Tensor) -> list[int]:
    return [like.get_device()] if like.device.type != "cpu" else []


def _misfit(vector: Any, expected: Tree) -> str:
    """How ``vector`` differs from a tree like ``expected``; empty if it fits."""
    if not isinstance(vector, Mapping):
        return f"vector is a {type(vector).__name__}; expected a dict of tensors by parameter name"
    differing = sorted(vector.keys() ^ expected.keys())
    if differing:
        return f"vector and trainable parameters differ in names: {differing[:10]}"
    for name, part in expected.items():
        if vector[name].shape != part.shape or vector[name].dtype != part.dtype or vector[name].device != part.device:
            found = f"{vector[name].dtype} of shape {tuple(vector[name].shape)} on {vector[name].device}"
            return f"vector[{name!r}] is {found}; expected {part.dtype} of shape {tuple(part.shape)} on {part.device}"
    return ""


def _numbers_problem(max_norm: float, noise_multiplier: float, batch_size: float | None) -> str:
    if not 0 < max_norm < math.inf:
        return f"max_norm is {max_norm!r}; expected a positive number"
    if not 0 <= noise_multiplier < math.inf:
        return f"noise_multiplier is {noise_multiplier!r}; expected zero or a positive number"
    if batch_size is not None and not 0 < batch_size < math.inf:
        return f"batch_size is {batch_size!r}; expected a positive number, or None for the number of samples"
    return ""
