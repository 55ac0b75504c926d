"""Which page is foreseen: one that followed the last two, twice in a row."""

from hypothesis import given
from hypothesis import strategies as st

from zerofunc.pages.read_order import ReadOrder


def foreseen(reads):
    order = ReadOrder()
    return [order.next_after(page) for page in reads]


@given(st.lists(st.sampled_from("abc"), max_size=40))
def test_a_page_is_foreseen_when_it_followed_the_last_two_twice_in_a_row(reads):
    pairs = list(zip([None, *reads], reads, strict=False))
    for number, found in enumerate(foreseen(reads)):
        followers = [reads[before + 1] for before in range(number) if pairs[before] == pairs[number]]
        assert found == (followers[-1] if len(followers) > 1 and followers[-1] == followers[-2] else None)


def test_a_forward_and_its_backward_are_told_apart():
    assert foreseen("abccba" * 4)[-6:] == list("bccbaa")
