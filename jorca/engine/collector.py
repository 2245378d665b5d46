"""Waiting for the oldest iteration: in the caller's thread, or in one that the loop can be woken from."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
from queue import SimpleQueue as _Queue
from typing import Any

from jorca.engine.interfaces import Executor, Returned
from jorca.scheduler import Iteration


class InlineCollector:
    """Collects in the caller's thread. For whoever drives the loop alone; nothing needs waking."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self._tickets: collections.deque[tuple[Iteration, Any]] = collections.deque()

    def put(self, iteration: Iteration, ticket: Any) -> None:
        """Hands over an iteration that was dispatched."""
        self._tickets.append((iteration, ticket))

    def take(self) -> Returned | None:
        """Waits for the oldest iteration."""
        iteration, ticket = self._tickets[0]
        result = self._executor.collect(ticket)
        self._tickets.popleft()  # only now: an interrupted wait can be taken up again
        return iteration, result

    def wake(self) -> None:
        """Does nothing: nobody else waits."""

    def close(self) -> None:
        """Does nothing: nothing waits in the background."""

    def reset(self) -> None:
        """Forgets every iteration that was handed over."""
        self._tickets.clear()


class ThreadCollector:
    """Collects in a thread of its own, so that a wait ends with whatever happens first.

    The thread is a daemon: should a device never answer, it can be left behind.
    """

    def __init__(self, executor: Executor):
        self._executor = executor
        self._start()

    def put(self, iteration: Iteration, ticket: Any) -> None:
        """Hands over an iteration that was dispatched."""
        self._tickets.put((iteration, ticket))

    def take(self) -> Returned | None:
        """Waits for the oldest iteration, or for `wake`; raises what collecting raised."""
        returned = self._returned.get()
        if isinstance(returned, BaseException):
            raise returned
        return returned

    def wake(self) -> None:
        """Breaks off the current or the next wait, from any thread."""
        self._returned.put(None)

    def fail(self, error: Exception) -> None:
        """Makes the current or the next wait raise `error`, from any thread: nothing more will come."""
        self._returned.put(error)

    def close(self) -> None:
        """Lets the thread end, at the latest when it has collected what it waits for."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._tickets.get_nowait()
        self._tickets.put(None)

    def reset(self) -> None:
        """Forgets every iteration that was handed over; leaves the thread behind and starts another."""
        self.close()
        self._start()

    def _start(self) -> None:
        # What a thread that was left behind still takes or gives lies in the queues of its own time.
        self._tickets: _Queue[tuple[Iteration, Any] | None] = _Queue()
        self._returned: _Queue[Returned | BaseException | None] = _Queue()
        threading.Thread(
            target=_collect_all,
            args=(self._executor, self._tickets, self._returned),
            name="jorca-collector",
            daemon=True,
        ).start()


def _collect_all(executor: Executor, tickets: _Queue[Any], returned: _Queue[Any]) -> None:
    """Collects until the queue ends or a collection fails; what comes after a failure has no meaning."""
    while (entry := tickets.get()) is not None:
        iteration, ticket = entry
        try:
            returned.put((iteration, executor.collect(ticket)))
        except BaseException as error:  # or the loop would wait for ever
            returned.put(error)
            return
