"""The one loop: plan, pack, execute, commit."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Iterable

from jorca.config import ModelConfig
from jorca.engine.interfaces import Collector, Executor, OutputStage, Packer, Returned, Sink
from jorca.engine.interrupts import Uninterrupted
from jorca.engine.records import RequestRecord, make_record
from jorca.frontend.inputs import check_request
from jorca.output import Mailbox, RequestOutput
from jorca.request import JorcaError, Request
from jorca.scheduler import Event, Iteration, Scheduler, StepResult

_logger = logging.getLogger(__name__)

Observer = Callable[[Iteration, list[RequestOutput]], None]
"""Called after each commit with the iteration and the outputs that it led to."""


class Engine:
    """Drives a scheduler and an executor, iteration by iteration, and brings outputs to where they belong.

    Not safe for several threads; another thread may only call `wake`. Ctrl-C never interrupts it halfway: it
    comes when the call is over. A simulator is this loop with an executor, a collector and a clock in virtual
    time.

    Args:
      model: The model's config; requests are checked against it.
      scheduler: Decides what runs.
      packer: Lays iterations out.
      executor: Runs them.
      output_stage: Turns tokens into what the caller reads.
      collector: How to wait for the oldest iteration.
      max_failures: Iterations in a row that may fail before the engine stops.
      clock: Seconds, for metrics and for the record; no decision depends on it.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        scheduler: Scheduler,
        packer: Packer,
        executor: Executor,
        output_stage: OutputStage,
        collector: Collector,
        max_failures: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.model = model
        self.scheduler = scheduler
        self.executor = executor
        self._packer = packer
        self._output_stage = output_stage
        self._collector = collector
        self._clock = clock
        # Of each request from its submission until it has ended and has left its row.
        self._records: dict[str, RequestRecord] = {}
        self._sinks: dict[str, Sink] = {}
        self._mailbox = Mailbox()  # of requests without a sink
        self._dropped: collections.deque[tuple[Sink, str]] = collections.deque()
        self._observers: list[Observer] = []
        self._max_failures = max_failures
        self._num_failures = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._uninterrupted = Uninterrupted(collector.wake)
        self._thread = threading.get_ident()

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, an iteration in flight, or an output not yet given by `step`."""
        return self.scheduler.has_work or bool(self._mailbox)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Calls `observer` after each commit from now on; returns a function that ends this."""
        self._observers.append(observer)
        return lambda: self._observers.remove(observer)

    def submit(self, request: Request, sink: Sink | None = None) -> None:
        """Accepts a request for the next iteration that has room.

        Args:
          request: Its seed is set; `max_tokens` may be None.
          sink: Where its outputs go; None has `step` return them.

        Raises:
          RequestRejected: It can never run, or has ended already; nothing of it is kept.
        """
        with self._uninterrupted:
            self._enter()
            request, stop_ids = check_request(request, self.model)
            now = self._clock()
            self.scheduler.submit(request, now)
            try:
                self._output_stage.open(request, stop_ids, now)
            except BaseException:
                self.scheduler.abort(request.id, now)
                self._tell([], now)
                raise
            self._records[request.id] = make_record(
                request, stop_ids=stop_ids, vocab_size=self.model.vocab_size
            )
            if sink is not None:
                self._sinks[request.id] = sink

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once, in flight too.

        Returns:
          Its final output, with all that `step` has not given yet; None if it is not live. If it has a sink,
          that gets the output, too.
        """
        with self._uninterrupted:
            self._enter(alive=False)
            return self._abort(request_id)

    def drop(self, request_ids: Iterable[str], sink: Sink) -> None:
        """Ends those of the requests whose outputs go to `sink`, as nobody will read them.

        May be called by a finalizer, hence from anywhere: where a call of this engine is under way, or in
        another thread than the last call's, the requests end with the next call.
        """
        self._dropped.extend((sink, request_id) for request_id in request_ids)
        if self._uninterrupted.depth == 0 and threading.get_ident() == self._thread:
            with self._uninterrupted:
                self._enter(alive=False)

    def step(self) -> list[RequestOutput]:
        """Gives the outputs of requests without a sink, after one turn of the loop if none are waiting.

        Returns:
          An output for each request that moved; empty when none did, `wake` was called, or the policy holds
          outputs back.

        Raises:
          JorcaError: As `advance`.
        """
        if not self._mailbox:
            self.advance()
        return self._mailbox.take_all()

    def advance(self) -> None:
        """Runs one turn of the loop: starts every iteration that can start, then waits for the oldest one.

        Outputs go to their sinks. An iteration that fails loses nobody: all go on by recomputation.

        Raises:
          JorcaError: Too many iterations in a row have failed, and the engine stays unusable; or it was
            closed.
        """
        with self._uninterrupted:
            self._enter()
            returned = self._turn()
            if returned is not None:
                self._commit(*returned)

    def wake(self) -> None:
        """Makes a waiting `step` return, from any thread (needs a collector that can be woken)."""
        self._collector.wake()

    def close(self) -> None:
        """Aborts all requests, gives back the memory of the devices and lets other processes go."""
        with self._uninterrupted:
            self._enter(alive=False)
            if self._closed:
                return
            self._closed = True
            try:
                for request_id in list(self._records):
                    self._abort(request_id)
            finally:
                self._collector.close()
                self.executor.close()

    def _enter(self, *, alive: bool = True) -> None:
        """Begins a call: ends the requests that were dropped in the meantime."""
        self._thread = threading.get_ident()
        if alive and self._closed:
            raise JorcaError("the engine was closed; make a new one")
        if alive and self._failure is not None:
            raise JorcaError(
                f"the engine has stopped after {self._failure!r}; make a new one"
            ) from self._failure
        while self._dropped:
            sink, request_id = self._dropped.popleft()
            if self._sinks.get(request_id) is sink:
                self._abort(request_id)

    def _turn(self) -> Returned | None:
        """Plans, packs and executes what there is room for; returns the oldest iteration when it is back."""
        try:
            while (iteration := self.scheduler.plan(self._clock())) is not None:  # plan
                packed = self._packer.pack(iteration, self._records)  # pack
                self._collector.put(iteration, self.executor.dispatch(packed))  # execute
                self._output_stage.dispatched(iteration, self._clock())
            return self._collector.take() if self.scheduler.num_in_flight else None
        except BaseException as error:
            self._recover(error)
            if isinstance(error, Exception):
                return None
            raise

    def _commit(self, iteration: Iteration, result: StepResult) -> None:
        self._num_failures = 0
        now = self._clock()
        try:
            result = self._output_stage.read(iteration, result, now)
            outputs = self._tell(self.scheduler.commit(iteration, result, now), now)  # commit
        except BaseException as error:
            self._failure = error  # half committed; this is a fault of ours or of the executor
            raise
        for observer in tuple(self._observers):
            observer(iteration, outputs)

    def _recover(self, error: BaseException) -> None:
        """Begins anew after an iteration has failed: its KV array is lost, but no request is.

        Every request goes on from the tokens that the host has seen, by recomputation.
        """
        self._failure = error  # until all is made anew: should that fail too, the engine is lost
        if isinstance(error, Exception):
            self._num_failures += 1
            if self._num_failures > self._max_failures:
                failed = f"{self._num_failures} iterations in a row failed, the last with {error!r}"
                raise JorcaError(f"the engine has stopped: {failed}") from error
        _logger.warning("an iteration failed, all requests are recomputed: %r", error)
        self._collector.reset()
        self.executor.reset()
        self._output_stage.restarted()
        now = self._clock()
        self._tell(self.scheduler.restart(now), now)
        self._failure = None

    def _abort(self, request_id: str) -> RequestOutput | None:
        now = self._clock()
        event = self.scheduler.abort(request_id, now)
        if event is None:
            return None
        has_sink = request_id in self._sinks
        (output,) = self._tell([event], now)
        return output if has_sink else self._mailbox.take(request_id)

    def _tell(self, events: list[Event], now: float) -> list[RequestOutput]:
        """Turns events into outputs, brings each to its sink, and forgets the requests that are gone."""
        outputs = self._output_stage.outputs(events, now)
        for event, output in zip(events, outputs, strict=True):
            self._sinks.get(event.request_id, self._mailbox).put(output)
        for release in self.scheduler.take_released():
            if release.ended:
                self._records.pop(release.request_id, None)
                self._sinks.pop(release.request_id, None)
                self._output_stage.close(release.request_id)
        return outputs
