"""The pool of unfinished requests: waiting, or resident in a row with memory."""

from __future__ import annotations

from collections import OrderedDict

from jorca.request import Request
from jorca.scheduler.iteration import Release
from jorca.scheduler.limits import SchedulerLimits
from jorca.scheduler.memory import Memory
from jorca.scheduler.rows import Rows


class Pool:
    """Every request that has not ended, in order of submission. What a policy chooses from.

    Attributes:
      limits: The sizes that bound an iteration.
      rows: The resident requests. A policy reads the columns and changes none.
      admitted: The rows that have been given since the last iteration was made.
      released: Who has left since somebody last took these away.
    """

    def __init__(self, limits: SchedulerLimits, memory: Memory) -> None:
        self.limits = limits
        self.rows = Rows(limits.max_running)
        self.admitted: list[int] = []
        self.released: list[Release] = []
        self._memory = memory
        # Request id to (place in the order of submission, request). An OrderedDict, because finding the
        # first key of a dict walks over all that were deleted before it.
        self._waiting: OrderedDict[str, tuple[int, Request]] = OrderedDict()
        self._num_submitted = 0

    def __contains__(self, request_id: str) -> bool:
        """Whether the id waits or has a row."""
        return request_id in self._waiting or request_id in self.rows.row_of

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting)

    @property
    def next_waiting(self) -> Request | None:
        """The waiting request that was submitted first; None if none waits."""
        return next(iter(self._waiting.values()))[1] if self._waiting else None

    def submit(self, request: Request) -> None:
        """Puts `request` at the end of the queue."""
        self._waiting[request.id] = (self._num_submitted, request)
        self._num_submitted += 1

    def admit(self) -> int | None:
        """Makes `next_waiting` resident and returns its row; None if no row or too little memory is free."""
        order, request = next(iter(self._waiting.values()))
        pages = None if self.rows.full else self._memory.reserve(request)
        if pages is None:
            return None
        del self._waiting[request.id]
        row = self.rows.add(request, order, pages)
        self.admitted.append(row)
        return row

    def withdraw(self, request_id: str) -> bool:
        """Takes a waiting request out of the queue; returns whether it was there."""
        if self._waiting.pop(request_id, None) is None:
            return False
        self.released.append(Release(request_id, None, ended=True))
        return True

    def release(self, row: int) -> None:
        """Frees a row, with its memory; its request has ended, or waits again."""
        request = self.rows.requests[row]
        self.released.append(Release(request.id, row, ended=not self.rows.live[row]))
        if row in self.admitted:
            self.admitted.remove(row)
        self._memory.release(request, self.rows.pages[row])
        self.rows.remove(row)

    def requeue_all(self) -> None:
        """Takes every row from its request; those that have not ended wait again, in their old order."""
        rows = self.rows
        for row in sorted(rows.requests, key=lambda row: -rows.order[row]):
            if rows.live[row]:
                request, order = rows.resumed(row), int(rows.order[row])
                self._waiting[request.id] = (order, request)
                self._waiting.move_to_end(request.id, last=False)
            self.release(row)

    def check(self) -> None:
        """Checks rows, memory and queue.

        Raises:
          AssertionError: They disagree.
        """
        self.rows.check()
        self._memory.check((request, self.rows.pages[row]) for row, request in self.rows.requests.items())
        orders = [order for order, _ in self._waiting.values()]
        assert orders == sorted(set(orders)), "the queue is not in order of submission"
        for request_id, (_, request) in self._waiting.items():
            assert request_id == request.id, f"request {request.id!r} waits as {request_id!r}"
            assert request_id not in self.rows.row_of, f"request {request_id!r} waits and has a row"
