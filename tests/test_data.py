"""Loaders: every sample once on some rank, another order in every epoch, and a stream that can be resumed anywhere."""

import itertools
import math

import pytest
import torch
from torch import distributed as dist
from torch.utils.data import IterableDataset, TensorDataset

import zerofunc
from reference import Net, build, config
from zerofunc.data import RepeatingLoader, rank_loader


def numbers(size):
    return TensorDataset(torch.arange(size))


def flat(batches):
    return [int(sample) for (batch,) in batches for sample in batch]


class Stream(IterableDataset):
    """Numbers in order."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class StatefulStream(Stream):
    """Numbers in order, from the epoch's on, which says where it stands and counts what it reads."""

    position = num_read = epoch = 0

    def set_epoch(self, epoch):
        self.epoch = 100 * epoch

    def __len__(self):
        return self.size

    def __iter__(self):
        start, self.position = self.position, 0
        for number in range(start, self.size):
            self.position, self.num_read = number + 1, self.num_read + 1
            yield self.epoch + number
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_share_the_samples_of_an_epoch(num_ranks, drop_last):
    loaders = [rank_loader(numbers(13), 2, num_ranks, rank, drop_last=drop_last) for rank in range(num_ranks)]
    for _ in range(2):
        per_rank = [flat(loader) for loader in loaders]
        assert len({len(samples) for samples in per_rank}) == 1
        together = [sample for samples in per_rank for sample in samples]
        if drop_last:
            assert len(set(together)) == len(together) == math.ceil(13 / num_ranks) // 2 * 2 * num_ranks
        else:
            assert set(together) == set(range(13))
    assert [len(loader) for loader in loaders] == [len(list(loader)) for loader in loaders]


def test_epochs_differ_in_order_and_repeat_in_another_run():
    first, second = (rank_loader(numbers(20), 4, 2, 1) for _ in range(2))
    epochs = [flat(first) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [flat(second) for _ in range(3)] == epochs


DATASETS = {"numbers": lambda: numbers(23), "stream": lambda: Stream(23), "stateful stream": lambda: StatefulStream(23)}


def as_number(batch):
    return batch[0].tolist() if isinstance(batch, list) else batch.tolist()


def as_numbers(batches):
    return [as_number(batch) for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", DATASETS)
def test_a_stream_is_resumed_where_it_stood(name, num_workers):
    def loader():
        return rank_loader(DATASETS[name](), 3, 3, 1, num_workers=num_workers)

    def stream(source):
        while True:
            yield from map(as_number, source)

    size, stops = (12, (0, 1, 3, 4, 7)) if num_workers == 0 else (8, (1, 5))
    whole = list(itertools.islice(stream(loader()), size))
    for stop in stops:
        before, after = loader(), loader()
        begun = list(itertools.islice(stream(before), stop))
        after.load_state_dict(before.state_dict())
        assert begun + list(itertools.islice(stream(after), size - stop)) == whole, stop


def test_a_state_may_be_taken_before_the_rest_is_read():
    before, between, after = (rank_loader(numbers(20), 2, 2, 1) for _ in range(3))
    flat(before)
    batches = iter(before)
    next(batches)
    between.load_state_dict(before.state_dict())
    after.load_state_dict(between.state_dict())
    assert flat(batches) == flat(between) == flat(after)


def test_a_stateful_stream_is_not_read_again():
    before, after = (rank_loader(StatefulStream(40), 2, 2, 0) for _ in range(2))
    batches = iter(before)
    read = [next(batches).tolist() for _ in range(5)]
    after.load_state_dict(before.state_dict())
    assert read + as_numbers(after) == as_numbers(rank_loader(StatefulStream(40), 2, 2, 0))
    assert after.dataset.dataset.num_read <= 40 - 18
    assert sum(as_numbers(after), []) == list(range(100, 140, 2)), "the second epoch"


def test_an_iterable_dataset_is_dealt_out_unless_it_does_so_itself(caplog):
    per_rank = [as_numbers(rank_loader(Stream(7), 2, 3, rank)) for rank in range(3)]
    assert per_rank == [[[0, 3], [6]], [[1, 4]], [[2, 5]]]
    assert "each of 3 ranks takes one sample of it in 3" in caplog.messages[0]
    own = Stream(4)
    own.splits_by_rank = True
    assert as_numbers(rank_loader(own, 2, 3, 1)) == [[0, 1], [2, 3]]
    assert len(caplog.messages) == 1
    loaders = [rank_loader(StatefulStream(7), 2, 3, rank) for rank in range(3)]
    assert [len(loader) for loader in loaders] == [len(list(loader)) for loader in loaders] == [2, 1, 1]


def test_a_dataset_too_small_is_refused():
    with pytest.raises(ValueError, match="training_data has 0 samples; expected at least one micro-batch of 2"):
        rank_loader(numbers(0), 2, 1, 0)
    with pytest.raises(ValueError, match="has 4 samples; expected at least one micro-batch of 3 on each of 2 ranks"):
        rank_loader(numbers(4), 3, 2, 0, drop_last=True)


def test_a_loader_is_repeated():
    loader = RepeatingLoader(rank_loader(numbers(6), 2, 1, 0))
    samples = flat(itertools.islice(loader, 9))
    assert [sorted(samples[start : start + 6]) for start in (0, 6, 12)] == [list(range(6))] * 3
    assert samples[:6] != samples[6:12]
    with pytest.raises(ValueError, match="has no batch"):
        next(RepeatingLoader([]))


@pytest.mark.world_size(1, 2)
def test_training_data_is_loaded_for_the_engine():
    engine, _, loader, _ = zerofunc.initialize(build(Net), config(2), training_data=numbers(16))
    assert engine.training_dataloader is loader
    assert loader.batch_size == engine.train_micro_batch_size_per_gpu() == 4
    mine = torch.tensor(flat(loader))
    assert len(mine) == 16 // dist.get_world_size()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert sorted(torch.cat(everyone).tolist()) == list(range(16))
    ordered = engine.deepspeed_io(numbers(16), batch_size=2, route="eval", pin_memory=False)
    assert flat(ordered) == list(range(dist.get_rank(), 16, dist.get_world_size()))
