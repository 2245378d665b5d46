"""The page allocator: every page has one owner, and runs are preferred."""

import random

import pytest

from jorca.scheduler.memory import Reservation
from jorca.scheduler.pages import PageAllocator
from scheduler.algorithm1 import make_request


def test_pages_come_as_the_lowest_run():
    allocator = PageAllocator(10)
    assert allocator.allocate(3) == (0, 1, 2)
    assert allocator.allocate(2) == (3, 4)
    allocator.free((0, 1, 2))
    assert allocator.allocate(2) == (0, 1)


def test_a_run_that_is_long_enough_goes_before_lower_pages():
    allocator = PageAllocator(10)
    allocator.allocate(5)
    allocator.free((1, 2))
    assert allocator.allocate(3) == (5, 6, 7)
    assert allocator.allocate(2) == (1, 2)


def test_without_a_run_any_pages_are_taken_lowest_first():
    allocator = PageAllocator(8)
    allocator.allocate(8)
    allocator.free((1, 4, 5, 7))
    assert allocator.allocate(3) == (1, 4, 5)
    assert allocator.num_free == 1


def test_too_many_pages_are_refused_and_nothing_is_taken():
    allocator = PageAllocator(4)
    allocator.allocate(1)
    assert allocator.allocate(4) is None
    assert allocator.num_free == 3
    assert allocator.allocate(3) == (1, 2, 3)


@pytest.mark.parametrize("pages", [(2,), (0, 1, 2), (2, 1), (1, 1)])
def test_a_page_is_not_freed_twice(pages: tuple[int, ...]):
    allocator = PageAllocator(4)
    allocator.allocate(2)
    with pytest.raises(AssertionError, match="are free already"):
        allocator.free(pages)


@pytest.mark.parametrize("pages", [(4,), (-1,), (3, 4)])
def test_a_page_that_does_not_exist_is_not_freed(pages: tuple[int, ...]):
    allocator = PageAllocator(4)
    allocator.allocate(4)
    with pytest.raises(AssertionError, match="there are no pages"):
        allocator.free(pages)


@pytest.mark.parametrize("seed", range(10))
def test_any_sequence_of_calls_agrees_with_a_set_of_pages(seed: int):
    """The model: a set, in which the lowest run that is long enough is looked for page by page."""
    draw = random.Random(seed)
    num_pages = draw.randint(1, 30)
    allocator, free, held = PageAllocator(num_pages), set(range(num_pages)), []
    for _ in range(500):
        if held and draw.random() < 0.5:
            pages = held.pop(draw.randrange(len(held)))
            allocator.free(pages)
            free |= set(pages)
        else:
            count = draw.randint(1, 8)
            runs = [range(start, start + count) for start in sorted(free)]
            expected = next((run for run in runs if free.issuperset(run)), sorted(free)[:count])
            pages = allocator.allocate(count)
            assert pages == (tuple(expected) if count <= len(free) else None)
            if pages is not None:
                free -= set(pages)
                held.append(pages)
        assert allocator.num_free == len(free)
        allocator.check(held)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_pages"),
    [(1, 1, 1), (8, 1, 1), (8, 2, 2), (4, 5, 1), (4, 6, 2), (12, 5, 2), (12, 6, 3)],
)
def test_a_reservation_holds_every_token_but_the_last(num_prompt: int, max_tokens: int, num_pages: int):
    memory = Reservation(num_pages=10, page_size=8)
    request = make_request("A", num_prompt, max_tokens)
    assert memory.num_pages_for(request) == num_pages
    pages = memory.reserve(request)
    assert pages == tuple(range(num_pages))
    assert (memory.num_reserved_pages, memory.num_free_pages) == (num_pages, 10 - num_pages)
    memory.release(request, pages or ())
    assert (memory.num_reserved_pages, memory.num_free_pages) == (0, 10)


def test_a_reservation_that_does_not_fit_takes_nothing():
    memory = Reservation(num_pages=2, page_size=8)
    assert memory.reserve(make_request("A", 17, 1)) is None
    assert (memory.num_reserved_pages, memory.num_free_pages) == (0, 2)
    memory.check([])
