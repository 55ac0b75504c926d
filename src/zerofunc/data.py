"""Loaders: each rank its own part of a dataset in micro-batches, resumable in the middle of an epoch."""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

_logger = logging.getLogger("zerofunc.data")


class RankLoader(StatefulDataLoader):  # type: ignore[misc] # it has no types
    """This rank's micro-batches; every iteration is an epoch of its own, in another order where the sampler shuffles.

    Sampler and dataset are told the number of the epoch by ``set_epoch``, where they have it.

    ``state_dict()`` taken between two batches and given to ``load_state_dict()`` of a loader made alike, on the same
    number of ranks, continues the stream as if it had not been interrupted, with workers too.

    Attributes:
        reshuffles: Whether they are told; otherwise epochs have the same order unless the user tells them.
        epoch: The epoch that is running, or ran last; -1 before the first.
    """

    def __init__(self, dataset: Dataset[Any], batch_size: int, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # a call of torchdata's
            super().__init__(dataset, batch_size, **options)
        self.reshuffles = True
        self.epoch = -1
        self._is_finished = False
        self._resumed: dict[str, Any] | None = None  # a state in the middle of an epoch, until it is iterated

    def __iter__(self) -> Iterator[Any]:
        """One epoch, or the rest of one that is resumed."""
        if self._resumed is None:
            self.epoch += 1
        self._resumed, self._is_finished = None, False
        if self.reshuffles:
            _set_epoch(self.sampler, self.epoch)
            _set_epoch(self.dataset, self.epoch)
        yield from super().__iter__()
        self._is_finished = True

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: to be saved on every rank."""
        if self._resumed is not None:
            return self._resumed
        state = {"epoch": self.epoch, "is_finished": self._is_finished, "loader": {}}
        if self.epoch >= 0 and not self._is_finished:
            state["loader"] = super().state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the next iteration where a stream stood."""
        self.epoch = state_dict["epoch"]
        self._is_finished = state_dict["is_finished"]
        self._resumed = state_dict if state_dict["loader"] else None
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

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.dataset, self.rank, None, self.num_ranks)

    def __len__(self) -> int:
        """Number of samples of this rank, where the stream knows its own."""
        return len(range(self.rank, len(self.dataset), self.num_ranks))  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch begins, if it asks."""
        _set_epoch(self.dataset, epoch)


class _StatefulSlice(_Slice):
    """A slice of a stream that can say where it stands."""

    def __init__(self, dataset: IterableDataset[Any], num_ranks: int, rank: int) -> None:
        super().__init__(dataset, num_ranks, rank)
        self._skipped = self._first_skipped = rank  # samples of other ranks before the next one of this rank
        self._is_ended = self._is_first_ended = False

    def __iter__(self) -> Iterator[Any]:
        """The rest of what was loaded, once, even if it is never read; then the stream from its start."""
        self._skipped, self._first_skipped = self._first_skipped, self.rank
        self._is_ended, self._is_first_ended = self._is_first_ended, False
        return iter(()) if self._is_ended else self._rest()

    def _rest(self) -> Iterator[Any]:
        for sample in self.dataset:
            if self._skipped:
                self._skipped -= 1
            else:
                self._skipped = self.num_ranks - 1
                yield sample
        self._is_ended = True

    def state_dict(self) -> dict[str, Any]:
        """The stream's own state, and which of its samples is this rank's next one."""
        stream = self.dataset.state_dict()  # type: ignore[attr-defined]
        return {"stream": stream, "skipped": self._skipped, "is_ended": self._is_ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there when iterated next. A stream that had ended need not know that itself."""
        self._first_skipped, self._is_first_ended = state["skipped"], state["is_ended"]
        if not self._is_first_ended:
            self.dataset.load_state_dict(state["stream"])  # type: ignore[attr-defined]


def _set_epoch(source: object, epoch: int) -> None:
    if hasattr(source, "set_epoch"):
        source.set_epoch(epoch)


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

    A dataset with a length is shuffled and dealt out by torch's DistributedSampler, which repeats a few samples so that
    every rank has equally many. Of an iterable dataset each rank takes every n-th sample, unless the dataset has an
    attribute ``splits_by_rank`` that is true; ranks may then end unevenly, see :func:`zerofunc.join`. As in PyTorch,
    an iterable dataset splits itself between the processes that load (``torch.utils.data.get_worker_info``).

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
        if size == 0 or (drop_last and sampler is None and math.ceil(size / num_ranks) < batch_size):
            raise ValueError(
                f"training_data has {size} samples; expected at least one micro-batch of {batch_size} on each of "
                f"{num_ranks} ranks"
            )
        if sampler is None:
            sampler = DistributedSampler(dataset, num_ranks, rank, shuffle=shuffle)
    return RankLoader(
        dataset, batch_size, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last, num_workers=num_workers,
        pin_memory=pin_memory,
    )  # fmt: skip


def _sliced(dataset: IterableDataset[Any], num_ranks: int, rank: int) -> IterableDataset[Any]:
    if getattr(dataset, "splits_by_rank", False):
        num_ranks, rank = 1, 0
    elif num_ranks > 1 and rank == 0:
        _logger.warning(
            "%s is iterable: each of %d ranks takes one sample of it in %d. If it gives each rank its own samples "
            "already, set its attribute splits_by_rank to True.",
            type(dataset).__name__, num_ranks, num_ranks,
        )  # fmt: skip
    kind = _StatefulSlice if hasattr(dataset, "state_dict") else _Slice
    return kind(dataset, num_ranks, rank)
