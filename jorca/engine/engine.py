"""The one loop: plan, pack, execute, commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from jorca.config import ModelConfig
from jorca.engine.collector import Collector, InlineCollector
from jorca.engine.executor import Executor
from jorca.engine.output import OutputStage
from jorca.engine.packing import Packer
from jorca.engine.records import RequestRecord, make_record
from jorca.request import JorcaError, Request, RequestOutput, RequestRejected
from jorca.scheduler import Event, Iteration, Scheduler, StepResult

_logger = logging.getLogger(__name__)

Observer = Callable[[Iteration, list[RequestOutput]], None]
"""Called after each commit with the iteration and the outputs that it led to."""


class Engine:
    """Drives a scheduler and an executor, iteration by iteration.

    Not safe for several threads; another thread may only call `wake`. The simulator is this loop with
    an executor and a clock in virtual time.

    Args:
      model: The model's config; requests are checked against it.
      scheduler: Decides what runs.
      packer: Lays iterations out.
      executor: Runs them.
      output_stage: Turns tokens into what the caller reads.
      collector: How to wait for the oldest iteration; None waits in the caller's thread.
      max_failures: Iterations in a row that may fail before the engine stops.
      clock: Seconds, for metrics only.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        scheduler: Scheduler,
        packer: Packer,
        executor: Executor,
        output_stage: OutputStage,
        collector: Collector | None = None,
        max_failures: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.model = model
        self.scheduler = scheduler
        self.executor = executor
        self._packer = packer
        self._output_stage = output_stage
        self._collector = InlineCollector(executor) if collector is None else collector
        self._clock = clock
        self._records: dict[str, RequestRecord] = {}
        self._observers: list[Observer] = []
        self._max_failures = max_failures
        self._num_failures = 0
        self._failure: BaseException | None = None

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or an iteration in flight."""
        return self.scheduler.has_work

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Calls `observer` after each commit from now on; returns a function that ends this."""
        self._observers.append(observer)
        return lambda: self._observers.remove(observer)

    def submit(self, request: Request) -> None:
        """Accepts a request, whose seed is set, for the next iteration that has room.

        Raises:
          RequestRejected: It can never run, or has ended already; nothing of it is kept.
        """
        self._check_alive()
        stop_ids = check_request(request, self.model)
        now = self._clock()
        self.scheduler.submit(request, now)
        try:
            self._output_stage.open(request, stop_ids, now)
        except RequestRejected:
            self.scheduler.abort(request.id)
            raise
        self._records[request.id] = make_record(request, stop_ids=stop_ids, vocab_size=self.model.vocab_size)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once, in flight too; returns its final output, or None if it is not live."""
        event = self.scheduler.abort(request_id)
        if event is None:
            return None
        return self._tell([event], self._clock())[0]

    def step(self) -> list[RequestOutput]:
        """Starts every iteration that can start, then waits for the oldest one in flight.

        Returns:
          An output for each request that moved; empty when none did, `wake` was called, or the policy holds
          outputs back.

        Raises:
          JorcaError: Too many iterations in a row have failed; the engine stays unusable.
        """
        self._check_alive()
        try:
            while (iteration := self.scheduler.plan()) is not None:
                self._start(iteration)
            if self.scheduler.num_in_flight == 0:
                return []
            returned = self._collector.take()
        except Exception as error:
            return self._recover(error)
        return [] if returned is None else self._commit(*returned)

    def wake(self) -> None:
        """Makes a waiting `step` return, from any thread (needs a collector that can be woken)."""
        self._collector.wake()

    def _start(self, iteration: Iteration) -> None:
        try:
            packed = self._packer.pack(iteration, self._records)
            self._collector.put(iteration, self.executor.dispatch(packed))
            self._output_stage.dispatched(iteration, self._clock())
        except KeyboardInterrupt as error:
            self._failure = error  # half dispatched, the scheduler would wait for it for ever
            raise

    def _commit(self, iteration: Iteration, result: StepResult) -> list[RequestOutput]:
        self._num_failures = 0
        now = self._clock()
        result = self._output_stage.read(iteration, result, now)
        events = self.scheduler.commit(iteration, result, now)
        outputs = self._tell(events, now)
        for observer in self._observers:
            observer(iteration, outputs)
        return outputs

    def _recover(self, error: Exception) -> list[RequestOutput]:
        """Begins anew after an iteration has failed: its KV array is lost, but no request is.

        Every request goes on from the tokens that the host has seen, by recomputation.
        """
        self._num_failures += 1
        self._failure = error  # until all is made anew: should that fail too, the engine is lost
        if self._num_failures > self._max_failures:
            failed = f"{self._num_failures} iterations in a row failed, the last with {error!r}"
            raise JorcaError(f"the engine has stopped: {failed}") from error
        _logger.warning("an iteration failed, all requests are recomputed: %r", error)
        self._collector.reset()
        self.executor.reset()
        self._output_stage.restarted()
        self._failure = None
        return self._tell(self.scheduler.restart(), self._clock())

    def _tell(self, events: list[Event], now: float) -> list[RequestOutput]:
        """Turns events into outputs, and forgets the requests that have ended."""
        for event in events:
            if event.finish_reason is not None:
                del self._records[event.request_id]
        return self._output_stage.outputs(events, now)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise JorcaError(
                f"the engine has stopped after {self._failure!r}; make a new one"
            ) from self._failure


def check_request(request: Request, model: ModelConfig) -> frozenset[int]:
    """Checks a request against the vocabulary.

    Returns:
      The tokens that end it: its own stop tokens, and the model's end-of-text unless it is ignored.

    Raises:
      RequestRejected: An id is out of range (JAX would clamp it in silence), or nothing could be chosen.
    """
    params = request.params
    for name, ids in (
        ("prompt_ids", request.prompt_ids),
        ("output_ids", request.output_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", list(dict(params.logit_bias))),
    ):
        if ids and max(ids) >= model.vocab_size:
            raise RequestRejected(
                f"{name} must be below vocab_size {model.vocab_size}, got {max(ids)}; "
                "was it made with another tokenizer?"
            )
    stop_ids = frozenset(params.stop_token_ids)
    if model.eos_token_id is not None and not params.ignore_eos:
        stop_ids |= {model.eos_token_id}
    if params.min_tokens and len(stop_ids) == model.vocab_size:
        raise RequestRejected(
            f"min_tokens must be 0 if every token ends the request, got {params.min_tokens}; "
            "name fewer stop_token_ids"
        )
    return stop_ids
