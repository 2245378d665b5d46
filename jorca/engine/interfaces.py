"""What the loop is put together from: its parts as protocols. Neither they nor the loop import JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from jorca.engine.records import RequestRecord
from jorca.output import RequestOutput
from jorca.request import Request
from jorca.scheduler import Event, Iteration, StepResult

Returned = tuple[Iteration, StepResult]
"""An iteration and what it gave."""


class Packer(Protocol):
    """Turns an iteration into what an executor takes."""

    def pack(self, iteration: Iteration, records: Mapping[str, RequestRecord]) -> Any:
        """Returns the iteration in the executor's form.

        Args:
          iteration: What runs.
          records: The record of each request in it, those that it admits included, by id.
        """
        ...


class Executor(Protocol):
    """Runs iterations in the order in which they are dispatched."""

    def dispatch(self, packed: Any) -> Any:
        """Starts an iteration and returns a ticket for it, without waiting for the device."""
        ...

    def collect(self, ticket: Any) -> StepResult:
        """Waits for the iteration of `ticket` and returns what it gave. Tickets come in order."""
        ...

    def reset(self) -> None:
        """Forgets whatever is in flight and begins with an empty KV array, after an iteration has failed.

        A `collect` of an older ticket, which may go on in another thread, never takes what belongs to a new
        one.
        """
        ...

    def close(self) -> None:
        """Gives back the memory of the devices, and lets other processes go. Nothing is called after it."""
        ...


class Collector(Protocol):
    """Collects dispatched iterations in order."""

    def put(self, iteration: Iteration, ticket: Any) -> None:
        """Hands over an iteration that was dispatched."""
        ...

    def take(self) -> Returned | None:
        """Waits for the oldest iteration; raises what collecting it raised.

        Returns:
          The iteration and its result; or None, with all still in flight, if the loop should look for new
          requests first: `wake` was called, or the collector knows that the time of an arrival has come.
        """
        ...

    def wake(self) -> None:
        """Breaks off the current or the next wait, from any thread: something was submitted or aborted."""
        ...

    def reset(self) -> None:
        """Forgets every iteration that was handed over."""
        ...

    def close(self) -> None:
        """Ends what waits in the background. Nothing is called after it."""
        ...


class OutputStage(Protocol):
    """Turns tokens into what the caller reads, between collect and commit; follows requests to their end."""

    def open(self, request: Request, stop_ids: frozenset[int], now: float) -> None:
        """Begins to follow a request that the scheduler has accepted; `stop_ids` are tokens that end it.

        Raises:
          RequestRejected: The output that it came with has ended already.
        """
        ...

    def dispatched(self, iteration: Iteration, now: float) -> None:
        """Notes that an iteration has been started."""
        ...

    def read(self, iteration: Iteration, result: StepResult, now: float) -> StepResult:
        """Takes in what an iteration gave; returns it with the ends that the scheduler cannot see."""
        ...

    def outputs(self, events: list[Event], now: float) -> list[RequestOutput]:
        """Turns the scheduler's events into outputs, one each."""
        ...

    def restarted(self) -> None:
        """Notes that all requests are fed again from their start."""
        ...

    def close(self, request_id: str) -> None:
        """Forgets a request, which has ended and has no row any more; one that is not known is none."""
        ...


class Sink(Protocol):
    """Where the outputs of some requests go."""

    def put(self, output: RequestOutput) -> None:
        """Takes an output; must neither wait nor call the engine."""
        ...
