"""Pages: every element lies in one place, on one rank, in an order that all ranks share."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofunc.pages.layout import ParameterSpec, build_pages
from zerofunc.pages.page import Page

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(lambda sizes: torch.Size(sizes))
ENTRIES = st.tuples(SHAPES, st.sampled_from("ab"), st.sampled_from([None, None, "block", "other"]))


@st.composite
def parameters(draw):
    entries = draw(st.lists(ENTRIES, max_size=12))
    return [ParameterSpec(f"p{number}", *entry) for number, entry in enumerate(entries)]


def each_layout(test):
    return settings(deadline=None)(given(parameters(), st.integers(1, 5), st.integers(1, 60))(test))


@each_layout
def test_every_parameter_has_one_slot_of_its_shape(specs, num_shards, page_numel):
    slots = [slot for page in build_pages(specs, num_shards, page_numel) for slot in page.slots]
    assert {slot.name: slot.shape for slot in slots} == {spec.name: spec.shape for spec in specs}
    assert len(slots) == len(specs)


@each_layout
def test_slots_follow_each_other_without_gaps(specs, num_shards, page_numel):
    for page in build_pages(specs, num_shards, page_numel):
        end = 0
        for slot in page.slots:
            assert slot.offset == end
            end += slot.numel
        assert page.numel == end


@each_layout
def test_every_element_lies_on_one_rank(specs, num_shards, page_numel):
    for page in build_pages(specs, num_shards, page_numel):
        for index, slot in enumerate(page.slots):
            in_page, in_parameter = [], []
            for rank in range(num_shards):
                part = page.in_page(index, rank)
                assert rank * page.shard_numel <= part.start <= part.stop <= (rank + 1) * page.shard_numel
                in_page += range(part.start, part.stop)
                part = page.in_parameter(index, rank)
                assert 0 <= part.start <= part.stop <= slot.numel
                in_parameter += range(part.start, part.stop)
            assert in_page == list(range(slot.offset, slot.offset + slot.numel))
            assert in_parameter == list(range(slot.numel))


@each_layout
def test_the_parts_on_a_rank_follow_each_other(specs, num_shards, page_numel):
    for page in build_pages(specs, num_shards, page_numel):
        for rank in range(num_shards):
            parts = [page.in_shard(index, rank) for index in range(len(page.slots))]
            used = [element for part in parts for element in range(part.start, part.stop)]
            in_use = min(max(page.numel - rank * page.shard_numel, 0), page.shard_numel)
            assert used == list(range(in_use))


@each_layout
def test_a_place_cuts_parameters_and_shards_alike(specs, num_shards, page_numel):
    for layout in build_pages(specs, num_shards, page_numel):
        numbers = torch.arange(layout.padded_numel)
        page = Page(layout, numbers.dtype, numbers)
        for place in page.places:
            whole = numbers[place.slot.offset : place.slot.offset + place.slot.numel]
            assert (place.name, place.shape) == (place.slot.name, place.slot.shape)
            for rank, shard in enumerate(numbers.chunk(num_shards) if len(numbers) else ()):
                expected = whole[place.range(rank)]
                assert torch.equal(numbers[layout.in_page(place.index, rank)], expected)
                assert torch.equal(shard[layout.in_shard(place.index, rank)], expected)


@each_layout
def test_padding_is_less_than_one_element_per_rank(specs, num_shards, page_numel):
    for page in build_pages(specs, num_shards, page_numel):
        assert page.num_shards == num_shards
        assert page.padded_numel == page.shard_numel * num_shards
        assert 0 <= page.padded_numel - page.numel < num_shards


@each_layout
def test_keys_and_unsplit_modules_are_never_mixed(specs, num_shards, page_numel):
    known = {spec.name: spec for spec in specs}
    for page in build_pages(specs, num_shards, page_numel):
        assert {known[slot.name].key for slot in page.slots} == {page.key}
        assert len({known[slot.name].unsplit for slot in page.slots}) == 1


@each_layout
def test_an_unsplit_module_has_one_page_per_key(specs, num_shards, page_numel):
    pages = build_pages(specs, num_shards, page_numel)
    where = {slot.name: page.index for page in pages for slot in page.slots}
    for group in {(spec.key, spec.unsplit) for spec in specs if spec.unsplit}:
        assert len({where[spec.name] for spec in specs if (spec.key, spec.unsplit) == group}) == 1


@each_layout
def test_a_page_of_several_parameters_is_within_the_limit(specs, num_shards, page_numel):
    known = {spec.name: spec for spec in specs}
    for page in build_pages(specs, num_shards, page_numel):
        filled = [slot.numel for slot in page.slots if slot.numel]
        if known[page.slots[0].name].unsplit is None and len(filled) > 1:
            assert page.numel <= page_numel


@each_layout
def test_pages_and_slots_are_in_registration_order(specs, num_shards, page_numel):
    order = {spec.name: number for number, spec in enumerate(specs)}
    pages = build_pages(specs, num_shards, page_numel)
    assert [page.index for page in pages] == list(range(len(pages)))
    firsts = [order[page.slots[0].name] for page in pages]
    assert firsts == sorted(firsts)
    for page in pages:
        numbers = [order[slot.name] for slot in page.slots]
        assert numbers == sorted(numbers)


@each_layout
def test_pages_of_one_key_are_filled_before_the_next_is_opened(specs, num_shards, page_numel):
    known = {spec.name: spec for spec in specs}
    pages = [page for page in build_pages(specs, num_shards, page_numel) if not known[page.slots[0].name].unsplit]
    for key in "ab":
        of_key = [page for page in pages if page.key == key]
        for page, following in zip(of_key, of_key[1:], strict=False):
            assert page.numel + following.slots[0].numel > page_numel


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_an_example(num_shards):
    specs = [ParameterSpec(name, torch.Size(shape), "float") for name, shape in
             [("weight", (2, 3)), ("bias", (3,)), ("large", (4, 4)), ("scale", ())]]  # fmt: skip
    pages = build_pages(specs, num_shards, page_numel=10)
    assert [[slot.name for slot in page.slots] for page in pages] == [["weight", "bias"], ["large"], ["scale"]]
    assert [page.numel for page in pages] == [9, 16, 1]
    assert [page.shard_numel for page in pages] == {1: [9, 16, 1], 2: [5, 8, 1], 3: [3, 6, 1]}[num_shards]
