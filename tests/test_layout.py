"""Pages: every element lies in one place, on one rank, in an order that all ranks share."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofunc.pages.layout import ParameterSpec, build_pages

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
        for slot in page.slots:
            found = []
            for rank in range(num_shards):
                start, stop = page.part(slot, rank)
                assert 0 <= start <= stop <= page.shard_numel
                found += [rank * page.shard_numel + place for place in range(start, stop)]
            assert found == list(range(slot.offset, slot.offset + slot.numel))


@each_layout
def test_the_parts_on_a_rank_follow_each_other(specs, num_shards, page_numel):
    for page in build_pages(specs, num_shards, page_numel):
        for rank in range(num_shards):
            parts = [page.part(slot, rank) for slot in page.slots]
            places = [place for start, stop in parts for place in range(start, stop)]
            in_use = min(max(page.numel - rank * page.shard_numel, 0), page.shard_numel)
            assert places == list(range(in_use))


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
