"""Loaders: each rank its own part of a dataset in micro-batches, resumable in the middle of an epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

_logger = logging.getLogger("zerofunc.data")


class RankLoader(StatefulDataLoader):  # type: ignore[misc] # it has no types
    """This rank's micro-batches; every iteration is an epoch of its own, in another order where the sampler shuffles.

    ``state_dict()`` taken between two batches and given to ``load_state_dict()`` of a loader made alike, on the same
    number of ranks, continues the stream as if it had not been interrupted, with workers too.

    Attributes:
        epoch: The epoch that is running, or ran last; -1 before the first.
    """

    def __init__(self, dataset: Dataset[Any], batch_size: int, **options: Any) -> None:
        super().__init__(dataset, batch_size, **options)
        self.epoch = -1
        self._is_resumed = False
        self._is_finished = False

    def __iter__(self) -> Iterator[Any]:
        """One epoch, or the rest of one that is resumed."""
        if not self._is_resumed:
            self.epoch += 1
        self._is_resumed = self._is_finished = False
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
        yield from super().__iter__()
        self._is_finished = True

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: to be saved on every rank."""
        state = {"epoch": self.epoch, "is_finished": self._is_finished, "loader": {}}
        if self.epoch >= 0 and not self._is_finished:
            state["loader"] = super().state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the next iteration where a stream stood."""
        self.epoch = state_dict["epoch"]
        self._is_finished = state_dict["is_finished"]
        self._is_resumed = self.epoch >= 0 and not self._is_finished
        super().load_state_dict(state_dict["loader"])


class RepeatingLoader:
    """A loader that begins again when it ends, for ever.

    Attributes:
        loader: The loader that it repeats.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> RepeatingLoader:
        """Itself: it continues where it stands."""
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            ValueError: If the loader is empty.
        """
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self.loader)
            for batch in self._batches:
                return batch
            self._batches = None
        raise ValueError("the loader that RepeatingLoader repeats has no batch")


class _Slice(IterableDataset[Any]):
    """Every n-th sample of a stream, from this rank's first one on."""

    def __init__(self, dataset: IterableDataset[Any], num_ranks: int, rank: int) -> None:
        self.dataset = dataset
        self.num_ranks = num_ranks
        self.rank = rank
        self.skipped = rank  # samples of other ranks before the next one of this rank

    def __iter__(self) -> Iterator[Any]:
        samples, skipped, self.skipped = iter(self.dataset), self.skipped, self.rank
        for index, sample in enumerate(samples):
            if index % self.num_ranks == skipped:
                yield sample


class _StatefulSlice(_Slice):
    """A slice of a stream that can say where it stands."""

    def state_dict(self) -> dict[str, Any]:
        """The stream's own state, taken after a sample of this rank."""
        return {"dataset": self.dataset.state_dict()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after a sample of this rank."""
        self.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
        self.skipped = self.num_ranks - 1


def rank_loader(
    dataset: Dataset[Any],
    batch_size: int,
    num_ranks: int,
    rank: int,
    *,
    sampler: Sampler[Any] | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> RankLoader:
    """The loader of one rank. Local.

    A dataset with a length is shuffled and dealt out by torch's DistributedSampler, which repeats a few samples (or
    leaves some out, with ``drop_last``) so that every rank has equally many. Of an iterable dataset each rank takes
    every n-th sample, unless the dataset has an attribute ``splits_by_rank`` that is true; ranks may then end unevenly,
    see :func:`zerofunc.join`.

    Args:
        dataset: Any dataset. An iterable one with ``state_dict`` and ``load_state_dict`` is resumed by these, others
            by skipping what was read.
        batch_size: Samples per micro-batch.
        num_ranks: Number of data-parallel ranks.
        rank: This process's place among them.
        sampler: Indices for this rank, instead of those.
        shuffle: Whether the order is random, another one in every epoch.
        drop_last: Whether a last, incomplete micro-batch is left out.
        collate_fn: From a list of samples to a batch.
        num_workers: Processes that load.
        pin_memory: Whether batches are in pinned memory, where there is an accelerator.

    Raises:
        ValueError: If the dataset is empty, or has fewer samples than there are ranks while the last ones are dropped.
    """
    if isinstance(dataset, IterableDataset):
        dataset = _sliced(dataset, num_ranks, rank)
    else:
        size = len(dataset)  # type: ignore[arg-type]
        if size == 0 or (drop_last and sampler is None and size // num_ranks < batch_size):
            raise ValueError(
                f"training_data has {size} samples; expected at least one micro-batch of {batch_size} on each of "
                f"{num_ranks} ranks"
            )
        sampler = sampler or DistributedSampler(dataset, num_ranks, rank, shuffle=shuffle, drop_last=drop_last)
    return RankLoader(
        dataset, batch_size, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last, num_workers=num_workers,
        pin_memory=pin_memory,
    )  # fmt: skip


def _sliced(dataset: IterableDataset[Any], num_ranks: int, rank: int) -> IterableDataset[Any]:
    if num_ranks == 1 or getattr(dataset, "splits_by_rank", False):
        return dataset
    if rank == 0:
        _logger.warning(
            "%s is iterable: each of %d ranks takes every %d-th sample of it. If it gives each rank its own samples "
            "already, set its attribute splits_by_rank to True.",
            type(dataset).__name__, num_ranks, num_ranks,
        )  # fmt: skip
    kind = _StatefulSlice if hasattr(dataset, "state_dict") else _Slice
    return kind(dataset, num_ranks, rank)
