"""The three batch keys: `train_batch_size = micro-batch x accumulation steps x ranks`."""

from __future__ import annotations

from pydantic import BaseModel

from zerofunc.config.field_types import Positive
from zerofunc.config.reading import ConfigError

__all__ = ["BatchSizes", "resolve_batch"]


class BatchSizes(BaseModel):
    """The batch keys as given; None where one is not."""

    train_batch_size: Positive | None = None
    train_micro_batch_size_per_gpu: Positive | None = None
    gradient_accumulation_steps: Positive | None = None


def resolve_batch(given: BatchSizes, ranks: int) -> dict[str, int]:
    """Return the three keys, the missing ones computed.

    Raises:
        ConfigError: If they contradict each other, or do not determine the missing ones.
    """
    total, micro, steps = (
        given.train_batch_size,
        given.train_micro_batch_size_per_gpu,
        given.gradient_accumulation_steps,
    )
    if micro is None:
        if total is None:
            raise ConfigError(
                "train_batch_size or train_micro_batch_size_per_gpu: expected a number for at least one of them, "
                "found neither"
            )
        steps = steps or 1
        micro = _divide(total, f"accumulation {steps} x ranks {ranks}", steps * ranks)
    elif total is None:
        steps = steps or 1
        total = micro * steps * ranks
    elif steps is None:
        steps = _divide(total, f"micro {micro} x ranks {ranks}", micro * ranks)
    product = micro * steps * ranks
    if total != product:
        raise ConfigError(
            f"train_batch_size: {total} != micro {micro} x accumulation {steps} x ranks {ranks} = {product}"
        )
    return dict(zip(BatchSizes.model_fields, (total, micro, steps), strict=True))


def _divide(total: int, product: str, divisor: int) -> int:
    quotient, rest = divmod(total, divisor)
    if rest:
        raise ConfigError(f"train_batch_size: {total} is not divisible by {product} = {divisor}")
    return quotient
