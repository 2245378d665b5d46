"""Which pages of the KV array are free."""

from __future__ import annotations

import bisect
from collections.abc import Iterable


class PageAllocator:
    """Hands out page numbers: the lowest run that is long enough, else the lowest pages there are.

    Free pages are kept as maximal runs in ascending order. Between two runs lie pages of some
    request, so the cost of a call follows the number of resident requests, not of pages.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._num_free = num_pages
        # Run i is the pages _starts[i] .. _ends[i] - 1. No two runs touch.
        self._starts = [0]
        self._ends = [num_pages]

    @property
    def num_free(self) -> int:
        """Free pages."""
        return self._num_free

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Takes `count` pages, in ascending order; None, and nothing taken, if fewer are free."""
        if count > self._num_free:
            return None
        for i, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= count:
                return self._take(i, count)
        taken: tuple[int, ...] = ()
        while len(taken) < count:
            taken += self._take(0, min(count - len(taken), self._ends[0] - self._starts[0]))
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Takes `pages` back.

        Raises:
          AssertionError: A page is free already, or there is no such page.
        """
        for start, end in _runs(pages):
            self._give_back(start, end)

    def check(self, held: Iterable[tuple[int, ...]]) -> None:
        """Checks that free pages and `held`, the pages of each holder, are all pages, each once.

        Raises:
          AssertionError: A page has leaked or has two holders, or the free runs are not in order.
        """
        ends = [-1, *self._ends]
        for before, start, end in zip(ends, self._starts, self._ends, strict=False):
            assert before < start < end, f"free runs out of order: {self._starts}, {self._ends}"
        free = [p for run in zip(self._starts, self._ends, strict=True) for p in range(*run)]
        assert len(free) == self._num_free, f"{len(free)} pages are free, {self._num_free} are counted"
        owners = [0] * self._num_pages
        for pages in (free, *held):
            for page in pages:
                assert 0 <= page < self._num_pages, f"page {page} is not below {self._num_pages}"
                owners[page] += 1
        leaked = [page for page, count in enumerate(owners) if count == 0]
        assert not leaked, f"pages {leaked} have leaked: neither free nor held"
        shared = [page for page, count in enumerate(owners) if count > 1]
        assert not shared, f"pages {shared} have more than one holder"

    def _take(self, i: int, count: int) -> tuple[int, ...]:
        """Takes the first `count` pages of run i."""
        start = self._starts[i]
        if start + count == self._ends[i]:
            del self._starts[i], self._ends[i]
        else:
            self._starts[i] = start + count
        self._num_free -= count
        return tuple(range(start, start + count))

    def _give_back(self, start: int, end: int) -> None:
        """Makes pages start .. end - 1 free and joins them to the runs that they touch."""
        wanted = f"pages {start}..{end - 1}"
        assert 0 <= start < end <= self._num_pages, f"there are no {wanted} among {self._num_pages}"
        i = bisect.bisect_left(self._starts, start)
        after = self._starts[i] if i < len(self._starts) else self._num_pages + 1
        before = self._ends[i - 1] if i else -1
        assert before <= start < end <= after, f"{wanted} are free already, or some of them"
        self._num_free += end - start
        if before == start and end == after:
            self._ends[i - 1] = self._ends[i]
            del self._starts[i], self._ends[i]
        elif before == start:
            self._ends[i - 1] = end
        elif end == after:
            self._starts[i] = start
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)


def _runs(pages: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Yields `pages` as runs (start, end), the end not included."""
    start = end = -1
    for page in pages:
        if page != end:
            if start != end:
                yield start, end
            start = page
        end = page + 1
    if start != end:
        yield start, end
