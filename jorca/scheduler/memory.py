"""How much of the KV array a request gets, and when. Independent of the policy."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from jorca.request import Request
from jorca.scheduler.limits import SchedulerLimits
from jorca.scheduler.pages import PageAllocator


class Memory(Protocol):
    """Decides which pages a request holds while it is resident."""

    @property
    def name(self) -> str:
        """The name that logs use."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """The keywords that `make_memory` needs beside name and limits to make another one like it."""
        ...

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds."""
        ...

    @property
    def num_reserved_pages(self) -> int:
        """Pages that are held."""
        ...

    def num_pages_for(self, request: Request) -> int:
        """Returns the most pages that `request` can ever hold."""
        ...

    def reserve(self, request: Request) -> tuple[int, ...] | None:
        """Returns the pages `request` starts with, or None, and nothing taken, if they do not suffice."""
        ...

    def release(self, request: Request, pages: tuple[int, ...]) -> None:
        """Takes back all `pages` of `request`."""
        ...

    def check(self, held: Iterable[tuple[Request, tuple[int, ...]]]) -> None:
        """Raises AssertionError unless the accounts agree with `held`, every resident and its pages."""
        ...


class Reservation:
    """The paper's memory: all that a request can ever need, reserved before its first iteration.

    A resident request never waits for memory, so nothing can deadlock.
    """

    name = "reservation"
    options: Mapping[str, Any] = types.MappingProxyType({})

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._allocator = PageAllocator(num_pages)
        self._num_reserved = 0

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody has reserved."""
        return self._allocator.num_free

    @property
    def num_reserved_pages(self) -> int:
        """Pages reserved by resident requests (the paper's n_rsrv, in pages)."""
        return self._num_reserved

    def num_pages_for(self, request: Request) -> int:
        """Returns ceil((prompt + max_tokens - 1) / page_size): the one formula of the accounts."""
        return -(-request.num_positions // self._page_size)

    def reserve(self, request: Request) -> tuple[int, ...] | None:
        """Returns all pages that `request` can ever need, or None if they are not free."""
        pages = self._allocator.allocate(self.num_pages_for(request))
        if pages is not None:
            self._num_reserved += len(pages)
        return pages

    def release(self, request: Request, pages: tuple[int, ...]) -> None:
        """Takes back the reservation of `request`."""
        self._allocator.free(pages)
        self._num_reserved -= self.num_pages_for(request)

    def check(self, held: Iterable[tuple[Request, tuple[int, ...]]]) -> None:
        """Raises AssertionError unless the accounts agree with `held`, every resident and its pages."""
        held = list(held)
        for request, pages in held:
            need = self.num_pages_for(request)
            assert len(pages) == need, f"request {request.id!r} holds {len(pages)} pages and needs {need}"
        self._allocator.check(pages for _, pages in held)
        num_held = sum(len(pages) for _, pages in held)
        assert self._num_reserved == num_held, (
            f"{self._num_reserved} pages are counted as reserved, {num_held} are held"
        )


def make_memory(name: str, limits: SchedulerLimits, **options: Any) -> Memory:
    """Returns a new memory by its name, for so many pages as the limits say.

    Raises:
      ValueError: There is none of that name.
      TypeError: It has no such option.
    """
    if name != Reservation.name:
        raise ValueError(f"memory must be {Reservation.name}, got {name!r}")
    return Reservation(num_pages=limits.num_pages, page_size=limits.page_size, **options)
