"""Loaders: every sample once on some rank, another order in every epoch, and a stream that can be resumed anywhere."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import distributed as dist
from torch.utils.data import IterableDataset, SequentialSampler, TensorDataset

import zerofunc
from reference import Net, build, config
from zerofunc.data.loaders import RepeatingLoader, rank_loader


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


def loaders_of(make, size, batch_size, num_ranks, state=None, **options):
    """The loaders of all ranks, in one process, which continue where a run on any number of ranks stood: plain data."""
    loaders = [rank_loader(make(size), batch_size, num_ranks, rank, **options) for rank in range(num_ranks)]
    for loader in loaders if state else []:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loaders


def samples_of(streams, num_steps=None):
    """The samples that all ranks are given in their next steps, in the order of the epoch."""
    steps = itertools.zip_longest(*(itertools.islice(stream, num_steps) for stream in streams), fillvalue=[[]])
    rows = [row for step in steps for row in itertools.zip_longest(*([] if b == [[]] else as_number(b) for b in step))]
    return [sample for row in rows for sample in row if sample is not None]


SOURCES = [numbers, Stream, StatefulStream]


@pytest.mark.parametrize("make", SOURCES)
def test_a_run_continues_on_other_numbers_of_ranks(make):
    whole = loaders_of(make, 25, 1, 1)
    epochs = [samples_of(whole) for _ in range(3)]
    first = loaders_of(make, 25, 3, 2)
    assert samples_of(first) and first[0].state_dict()["loader"] == {}, "the end of an epoch"
    second = loaders_of(make, 25, 2, 1, first[0].state_dict())
    begun = samples_of(map(RepeatingLoader, second), 4)
    third = loaders_of(make, 25, 3, 2, second[0].state_dict())
    begun += samples_of(map(iter, third), 1)
    last = loaders_of(make, 25, 1, 4, third[0].state_dict())
    begun += samples_of(last)
    assert begun[:25] == epochs[1]
    assert begun[25:] == (epochs[1][:1] if make is numbers else []), "11 are left for 4 ranks"
    assert samples_of(last)[:25] == epochs[2]


@given(
    st.sampled_from(SOURCES), st.integers(1, 40), *[st.tuples(st.integers(1, 4), st.integers(1, 4))] * 2,
    st.integers(0, 6), st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_no_sample_is_repeated_or_skipped(make, size, before, after, num_steps, drops_last):
    drops_last = drops_last and make is numbers  # ranks end unevenly on a stream
    assume(
        not drops_last or all(math.ceil(size / num_ranks) >= batch_size for batch_size, num_ranks in (before, after))
    )
    first = loaders_of(make, size, *before, drop_last=drops_last)
    num_steps = min(num_steps, len(rank_loader(numbers(size), *before, 0, drop_last=drops_last)))
    begun = samples_of(map(iter, first), num_steps)
    second = loaders_of(make, size, *after, first[0].state_dict(), drop_last=drops_last)
    begun += samples_of(second)
    order = samples_of(loaders_of(make, size, 1, 1))
    assert begun == list(itertools.islice(itertools.cycle(order), len(begun)))
    assert len(begun) < size + (max(before[1], after[1]) if make is numbers else 1)
    assert len(begun) > size - (math.prod(after) if drops_last else 1)
    fresh = loaders_of(make, size, *after, drop_last=drops_last)
    assert samples_of(fresh) and samples_of(fresh) == samples_of(second), "the second epoch"


@pytest.mark.parametrize("make", SOURCES)
def test_a_run_continues_with_another_number_of_workers(make):
    num_workers = {numbers: 2}.get(make, 1)
    first = loaders_of(make, 20, 2, 2, num_workers=num_workers)
    begun = samples_of(map(iter, first), 2)
    second = loaders_of(make, 20, 3, 1, first[0].state_dict())
    begun += samples_of(map(iter, second), 1)
    third = loaders_of(make, 20, 4, 1, second[0].state_dict(), num_workers=num_workers)
    whole = loaders_of(make, 20, 1, 1)
    assert begun + samples_of(third) == samples_of(whole)
    assert samples_of(third) == samples_of(whole), "the second epoch"


def test_a_stateful_stream_is_not_read_again_by_more_ranks():
    first = loaders_of(StatefulStream, 40, 4, 2)
    samples_of(map(iter, first), 3)
    second = loaders_of(StatefulStream, 40, 4, 3, first[0].state_dict())
    assert samples_of(second) == list(range(24, 40))
    assert max(loader.dataset.dataset.num_read for loader in second) == 40 - 23, "the last was rank 1's"


def test_the_same_ranks_may_change_their_micro_batch():
    for make in SOURCES:
        loader, larger = rank_loader(make(20), 2, 2, 1), rank_loader(make(20), 3, 2, 1)
        begun = as_numbers(itertools.islice(loader, 2))
        larger.load_state_dict(loader.state_dict())
        assert sum(begun + as_numbers(larger), []) == sum(as_numbers(rank_loader(make(20), 2, 2, 1)), [])


def test_an_order_of_the_user_is_kept():
    loaders = [rank_loader(numbers(12), 2, num_ranks, 0) for num_ranks in (2, 1)]
    for loader in loaders:
        loader.reshuffles = False
    loaders[0].sampler.seed = 5
    loaders[0].sampler.set_epoch(7)
    whole = rank_loader(numbers(12), 2, 1, 0)
    whole.reshuffles, whole.sampler.seed = False, 5
    whole.sampler.set_epoch(7)
    next(iter(loaders[0]))
    loaders[1].load_state_dict(loaders[0].state_dict())
    assert flat(loaders[1]) == flat(whole)[4:]
    assert flat(loaders[1]) == flat(whole)


def test_a_loader_returns_to_a_state_while_it_is_repeated():
    loader = rank_loader(numbers(6), 2, 1, 0)
    batches = RepeatingLoader(loader)
    flat(itertools.islice(batches, 1))
    states, expected = [loader.state_dict()], [flat(itertools.islice(batches, 2))]
    states, expected = [*states, loader.state_dict()], [*expected, flat(itertools.islice(batches, 3))]
    for state, samples in zip(states, expected, strict=True):
        loader.load_state_dict(state)
        assert flat(itertools.islice(batches, len(samples) // 2)) == samples


def splitting(size):
    stream = Stream(size)
    stream.splits_by_rank = True
    return stream


@pytest.mark.parametrize(
    "make, options",
    [
        (numbers, {"sampler": SequentialSampler(range(12))}),
        (splitting, {}),
        (Stream, {"num_workers": 2}),
    ],
)
def test_other_ranks_are_refused_where_it_is_unknown_what_is_left(make, options):
    before, alike = (rank_loader(make(12), 2, 2, 0, **options) for _ in range(2))
    other = rank_loader(make(12), 2, 3, 0, **options)
    other.load_state_dict(before.state_dict())
    batches = iter(before)
    next(batches)
    with pytest.raises(ValueError, match="by 2 ranks with . workers each; this loader is for 3 ranks .* resume on as"):
        other.load_state_dict(before.state_dict())
    alike.load_state_dict(before.state_dict())
    rest = as_numbers(batches)
    assert as_numbers(alike) == rest
    other.load_state_dict(before.state_dict())
    assert as_numbers(other) == as_numbers(rank_loader(make(12), 2, 3, 0, **options)), "the end of an epoch"


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
