"""The order in which pages are read, and which one will be read next."""

from __future__ import annotations

from zerofunc.pages.page import Page


class ReadOrder:
    """Learns which page followed the last two; one alone would not tell, as a backward runs opposite to its forward.

    A page is foreseen only when it followed twice in a row: a wrong guess would cost a gather and an eviction. What is
    foreseen depends on the sequence of reads alone, which is the same on all ranks.

    Attributes:
        last: The page that was read last.
    """

    def __init__(self) -> None:
        self.last: Page | None = None
        self._before: Page | None = None
        self._successor: dict[tuple[Page | None, Page], tuple[Page, bool]] = {}  # and whether it was so twice

    def next_after(self, page: Page) -> Page | None:
        """Note that ``page`` is read. The page that will be read next, if that is sure."""
        if self.last is not None:
            known = self._successor.get((self._before, self.last))
            self._successor[self._before, self.last] = (page, known is not None and known[0] is page)
        self._before, self.last = self.last, page
        following, is_sure = self._successor.get((self._before, page), (None, False))
        return following if is_sure else None
