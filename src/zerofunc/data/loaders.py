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

    ``state_dict()`` taken between two batches and given to ``load_state_dict()`` of a loader made alike continues the
    stream as if it had not been interrupted, with workers too. On another number of ranks, or with other micro-batches
    or workers, it continues with the samples of the epoch that no rank has been given yet, in the same order.

    Attributes:
        num_ranks: Number of data-parallel ranks that have such a loader.
        reshuffles: Whether they are told; otherwise epochs have the same order unless the user tells them.
        epoch: The epoch that is running, or ran last; -1 before the first.
    """

    def __init__(self, dataset: Dataset[Any], batch_size: int, num_ranks: int = 1, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # a call of torchdata's
            super().__init__(dataset, batch_size, **options)
        self.num_ranks = num_ranks
        self.reshuffles = True
        self.epoch = -1
        self._is_running = False
        self._start = self._num_given = 0  # samples of the epoch given to all ranks: before this iteration, by now
        self._loaded: dict[str, Any] | None = None  # a state, until it is iterated

    def __iter__(self) -> Iterator[Any]:
        """One epoch, or the rest of one that is resumed; it ends where another state is loaded meanwhile."""
        if self._loaded is None or not self._loaded["loader"]:
            self.epoch += 1
            self._start = self._num_given = 0
        self._loaded, self._is_running = None, True
        if self.reshuffles:
            _set_epoch(self.sampler, self.epoch)
            _set_epoch(self.dataset, self.epoch)
        if self._source is not None:
            self._source.start = self._start
        for batch in super().__iter__():
            self._num_given += self.batch_size * self.num_ranks
            yield batch
            if self._loaded is not None:
                return
        self._is_running = False

    @property
    def _source(self) -> _RankSampler | _Slice | None:
        """What deals out one order to all ranks, if they have together been given the beginning of it."""
        if isinstance(self.sampler, _RankSampler):
            return self.sampler
        is_one_stream = isinstance(self.dataset, _Slice) and self.dataset.num_ranks == self.num_ranks
        return self.dataset if is_one_stream and self.num_workers <= 1 else None

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: to be saved on every rank, and loaded by the same one.

        On another number of ranks all load what rank 0 saved, which is never behind the others. It consists of dicts,
        numbers and None, and of what samplers and datasets with a ``state_dict`` of their own add.
        """
        if self._loaded is not None:
            return self._loaded
        has_order = isinstance(self.sampler, _RankSampler)
        return {
            "num_ranks": self.num_ranks,
            "num_workers": self.num_workers,
            "epoch": self.epoch,
            "start": self._start,
            "num_given": None if self._source is None else self._num_given,
            "order": {name: getattr(self.sampler, name) for name in ("epoch", "seed", "shuffle")} if has_order else {},
            "loader": super().state_dict() if self._is_running else {},
        }

    def check_state_dict(self, state_dict: dict[str, Any]) -> bool:
        """Whether a stream was dealt out as here.

        Raises:
            ValueError: If it stood in the middle of an epoch, on another number of ranks or with another number of
                workers, and it is not known which samples all of them were given.
        """
        inner, num_ranks, num_workers = (state_dict[name] for name in ("loader", "num_ranks", "num_workers"))
        is_alike: bool = (num_ranks, num_workers) == (self.num_ranks, self.num_workers)
        if inner and not is_alike and (state_dict["num_given"] is None or self._source is None):
            raise ValueError(
                f"state_dict was saved in the middle of an epoch by {num_ranks} ranks with {num_workers} workers each; "
                f"this loader is for {self.num_ranks} ranks with {self.num_workers}. With a sampler of your own, an "
                "iterable dataset that splits_by_rank, or one read by several workers, it is not known which samples "
                "are left: resume on as many ranks and workers, or from a state saved at the end of an epoch"
            )
        return is_alike

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the next iteration where a stream stood.

        Raises:
            ValueError: As :meth:`check_state_dict`, with nothing changed.
        """
        inner, is_alike = state_dict["loader"], self.check_state_dict(state_dict)
        self._loaded, self.epoch = state_dict, state_dict["epoch"]
        self._num_given = state_dict["num_given"] or 0
        self._start = state_dict["start"] if is_alike else self._num_given
        if isinstance(self.sampler, _RankSampler):
            vars(self.sampler).update(state_dict["order"])
        if isinstance(self.dataset, _Slice):  # a worker would not bring back that the rest has been read
            resumes_here = not (is_alike or self.num_workers)
            self.dataset.load_state_dict(inner.get("dataset_state", {}) if resumes_here else {})
        super().load_state_dict(inner if is_alike else {})


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
        for _ in range(3):  # an epoch that has ended, perhaps a resumed one with nothing left, a whole one
            if self._batches is None:
                self._batches = iter(self.loader)
            for batch in self._batches:
                return batch
            self._batches = None
        raise ValueError("the loader that RepeatingLoader repeats has no batch")


class _RankSampler(DistributedSampler[Any]):
    """torch's, which can begin an epoch behind the samples that were given out before.

    Attributes:
        start: How many all ranks together were given.
    """

    start = 0

    def __iter__(self) -> Iterator[Any]:
        """Every n-th index of the rest, which is filled up with the first of the epoch so that ranks have as many."""
        whole: DistributedSampler[Any] = DistributedSampler(self.dataset, 1, 0, self.shuffle, self.seed)
        whole.set_epoch(self.epoch)
        order = list(whole)
        rest = order[self.start :]
        rest += itertools.islice(itertools.cycle(order), -len(rest) % self.num_replicas)
        return iter(rest[self.rank :: self.num_replicas])


class _Slice(IterableDataset[Any]):
    """Every n-th sample of a stream, from this rank's first one on.

    Attributes:
        start: How many samples all ranks together were given before.
    """

    start = 0

    def __init__(self, dataset: IterableDataset[Any], num_ranks: int, rank: int) -> None:
        self.dataset = dataset
        self.num_ranks = num_ranks
        self.rank = rank
        self._is_stateful = hasattr(dataset, "state_dict")
        self._loaded: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        """The rest of what was loaded, once, even if it is never read; then the stream from ``start`` on."""
        state, self._loaded = self._loaded, {}
        self._num_read = state.get("num_read", 0)
        self._num_given = state.get("num_given", self.start)
        self._is_ended = state.get("is_ended", False)
        if self._is_ended:  # which the stream need not know itself
            return iter(())
        if state.get("stream") is not None:
            self.dataset.load_state_dict(state["stream"])  # type: ignore[attr-defined]
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        for sample in self.dataset:
            self._num_read += 1
            if self._num_read > self._num_given + self.rank:
                self._num_given += self.num_ranks
                yield sample
        self._is_ended = True

    def __len__(self) -> int:
        """Number of samples of this rank, where the stream knows its own."""
        return len(range(self.rank, len(self.dataset), self.num_ranks))  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch begins, if it asks."""
        _set_epoch(self.dataset, epoch)

    def state_dict(self) -> dict[str, Any]:
        """How many samples all ranks were given, and where the stream stands: at its start if it cannot say that."""
        stream = self.dataset.state_dict() if self._is_stateful else None  # type: ignore[attr-defined]
        num_read = self._num_read if self._is_stateful else 0
        return {"stream": stream, "num_read": num_read, "num_given": self._num_given, "is_ended": self._is_ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there when iterated next, whichever rank's state it is."""
        self._loaded = state


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
            sampler = _RankSampler(dataset, num_ranks, rank, shuffle=shuffle)
    return RankLoader(
        dataset, batch_size, num_ranks, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last,
        num_workers=num_workers, pin_memory=pin_memory,
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
    return _Slice(dataset, num_ranks, rank)
