"""The diagonal of the Fisher matrix, from squared per-sample gradients that are reduced as ordinary gradients are."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.autograd import Function

from zerofunc.curvature.vectors import Tree, not_positive, refuse, scalar, trainable
from zerofunc.module.sharding import Sharding, sharding_of
from zerofunc.per_sample.taps import Tap
from zerofunc.space.transposed import Gather, Mean

Likelihood = Literal["categorical", "gaussian"]


def fisher_diagonal(
    fn: Callable[..., torch.Tensor],
    module: nn.Module,
    samples: Sequence[torch.Tensor],
    *,
    likelihood: Likelihood | None = None,
    num_draws: int = 1,
    seed: int = 0,
    chunk_size: int | None = None,
) -> dict[str, torch.Tensor]:
    """Collective. The diagonal of the Fisher matrix at the module's own shards, this rank's part.

    The mean over the samples of all ranks of the squared gradient of each sample's negative log likelihood. Without
    ``likelihood`` that is the loss at the given targets, and the matrix the *empirical* Fisher. With it, targets are
    drawn from the model's own distribution: an unbiased estimate of the *true* Fisher, with the same targets for the
    same samples in the same order at any world size.

    One parameter's per-sample gradients, of ``chunk_size`` samples, are alive at a time, and one page of their squares.
    Ranks may have different numbers of samples.

    Args:
        fn: ``fn(model, *sample)``: from the model and one sample's tensors (to be vmapped) to the sample's loss, or
            with a likelihood to the model's output for it.
        module: The sharded module.
        samples: Tensors [B, …] of this rank.
        likelihood: ``"categorical"``: outputs are logits over the last dimension, at each of the others.
            ``"gaussian"``: outputs are means of unit variance, so that the loss is half the squared error.
        num_draws: With a likelihood, targets drawn per sample.
        seed: With a likelihood; the same on all ranks, not negative.
        chunk_size: The most samples at once; all by default.

    Raises:
        ValueError: On every rank, if samples or numbers are not valid, or a sample's loss is not a scalar.
    """
    sharding = sharding_of(module)
    lengths = {len(tensor) for tensor in samples}
    refuse(
        sharding,
        "" if likelihood in (None, *_NOISE) else f"likelihood is {likelihood!r}; expected None or one of {[*_NOISE]}",
        not_positive("num_draws", num_draws),
        not_positive("chunk_size", 1 if chunk_size is None else chunk_size),
        "num_draws needs a likelihood to draw from" if num_draws > 1 and likelihood is None else "",
        "" if seed >= 0 else f"seed is {seed}; expected at least 0",
        ""
        if len(lengths) == 1 and min(lengths)
        else f"samples have lengths {sorted(lengths)}; expected one, at least 1",
    )
    sharding.refresh()
    numbers = _numbers_of_samples(sharding, len(samples[0]))
    first, most = sum(numbers[: sharding.axes.rank]), max(numbers)
    shape = fn(sharding.module(), *(tensor[0] for tensor in samples)).shape if likelihood else ()
    total = {name: torch.zeros_like(part) for name, part in trainable(sharding).items()}
    for chunk in torch.arange(len(samples[0])).tensor_split(math.ceil(most / (chunk_size or most))):
        # A rank that has no sample left takes part all the same, with one that does not count.
        indices, factor = (chunk, 1.0) if len(chunk) else (torch.tensor([0]), 0.0)
        inputs = [tensor[indices.to(tensor.device)] for tensor in samples]
        for turn in range(num_draws):
            if likelihood is None:
                squares = _squared_gradients(fn, sharding, inputs, factor)
            else:
                loss = functools.partial(_loss_of_draw, fn, likelihood)
                noise = _noise(likelihood, [(seed, turn, first + i) for i in indices.tolist()], shape)
                squares = _squared_gradients(loss, sharding, [noise, *inputs], factor)
            for name, part in squares.items():
                total[name] += part
    return {name: part.mul_(len(numbers) / sum(numbers) / num_draws) for name, part in total.items()}


_NOISE: dict[str, Callable[..., Any]] = {
    "categorical": np.random.Generator.gumbel,
    "gaussian": np.random.Generator.standard_normal,
}


def _noise(likelihood: Likelihood, seeds: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> torch.Tensor:
    """What decides the draws, one of ``shape`` for each seed: [len(seeds), *shape] float64."""
    return torch.from_numpy(np.stack([_NOISE[likelihood](np.random.default_rng(one), size=shape) for one in seeds]))


def _loss_of_draw(fn: Any, likelihood: Likelihood, model: Any, noise: torch.Tensor, *sample: Any) -> torch.Tensor:
    """The negative log likelihood of a target that ``noise`` draws from the model's own distribution."""
    output = fn(model, *sample)
    drawn = output.detach() + noise.to(output)
    if likelihood == "gaussian":
        return 0.5 * (output - drawn).square().sum()
    # The largest of logits with Gumbel noise is distributed as their softmax.
    return -output.log_softmax(-1).gather(-1, drawn.argmax(-1, keepdim=True)).sum()


class SumOfSquares(Function):
    """From each vmapped sample's gradient to the sum of their squares over samples, which is not vmapped any more."""

    @staticmethod
    def forward(gradient: torch.Tensor, num_samples: int) -> torch.Tensor:  # noqa: D102 - the same for all samples
        return gradient.square() * num_samples

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: D102
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, gradient: torch.Tensor, num_samples: int) -> Any:  # noqa: D102
        return gradient.square().sum(in_dims[0]), None


def _squared_gradients(
    loss: Callable[..., torch.Tensor], sharding: Sharding, samples: Sequence[torch.Tensor], factor: float
) -> dict[str, torch.Tensor]:
    """Collective. The mean over ranks of the sum over samples of squared gradients of ``factor * loss``, sharded.

    Each parameter is tapped where its page is gathered. Its tap takes the samples' gradients, and hands on the sum of
    their squares in place of the gradient, which the transpose of the gather reduces as it reduces any gradient.
    """
    own, module = trainable(sharding), sharding.module()
    assert module is not None
    pages = [page for page in sharding.pages if page.shards[0].requires_grad]
    num_samples = len(samples[0])

    def measure(gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else SumOfSquares.apply(gradient, num_samples)

    def of_one(*sample: torch.Tensor) -> dict[str, torch.Tensor]:
        def tapped_loss(shards: Tree) -> torch.Tensor:
            tapped: dict[str, torch.Tensor] = {}
            for page in pages:
                names = [slot.name for slot in page.layout.slots]
                full = Gather.apply(sharding, page, True, None, *(shards[name] for name in names))
                tapped.update((name, Tap.apply(p, measure, p)[0]) for name, p in zip(names, full, strict=True))

            def model(*args: Any, **kwargs: Any) -> Any:
                return torch.func.functional_call(module, tapped, args, kwargs)

            return factor * scalar(functools.partial(loss, model), *sample)

        value, pullback = torch.func.vjp(tapped_loss, own)  # type: ignore[misc]
        return pullback(torch.ones_like(value), retain_graph=False, create_graph=False)[0]

    return torch.func.vmap(of_one, out_dims=None, randomness="different")(*samples)


def _numbers_of_samples(sharding: Sharding, mine: int) -> list[int]:
    """Collective. The numbers of samples by rank."""
    numbers = torch.zeros(sharding.axes.num_ranks, dtype=torch.float64, device=sharding.pages[0].master.device)
    numbers[sharding.axes.rank] = mine
    averaged = Mean.apply(sharding, numbers, "numbers of samples")
    return [round(number) for number in (averaged * len(numbers)).tolist()]
