"""The one loop: plan, pack, execute, commit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from jorca.config import ModelConfig
from jorca.engine.collector import Collector, InlineCollector
from jorca.engine.executor import Executor
from jorca.engine.output import OutputStage
from jorca.engine.packing import Packer
from jorca.engine.records import RequestRecord, make_record
from jorca.request import JorcaError, Request, RequestOutput, RequestRejected
from jorca.scheduler import Iteration, Scheduler, StepResult

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
          RequestRejected: It can never run; nothing of it is kept.
        """
        self._check_alive()
        stop_ids = check_request(request, self.model)
        now = self._clock()
        self.scheduler.submit(request, now)
        self._records[request.id] = make_record(request, stop_ids=stop_ids, vocab_size=self.model.vocab_size)
        self._output_stage.open(request, stop_ids, now)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once, in flight too; returns its final output, or None if it is not live."""
        event = self.scheduler.abort(request_id)
        if event is None:
            return None
        del self._records[request_id]
        return self._output_stage.outputs([event], self._clock())[0]

    def step(self) -> list[RequestOutput]:
        """Starts every iteration that can start, then waits for the oldest one in flight.

        Returns:
          An output for each request that moved; empty when there is nothing to do or `wake` was called.

        Raises:
          JorcaError: An iteration failed. The KV array is lost with it: the engine stays unusable.
        """
        self._check_alive()
        while (iteration := self.scheduler.plan()) is not None:
            self._start(iteration)
        if self.scheduler.num_in_flight == 0:
            return []
        with self._stopping_on(Exception):  # an interrupted wait can go on with the next step
            returned = self._collector.take()
        return [] if returned is None else self._commit(*returned)

    def wake(self) -> None:
        """Makes a waiting `step` return, from any thread (needs a collector that can be woken)."""
        self._collector.wake()

    def _start(self, iteration: Iteration) -> None:
        with self._stopping_on(BaseException):  # half dispatched, the scheduler would wait for it for ever
            packed = self._packer.pack(iteration, self._records)
            self._collector.put(iteration, self.executor.dispatch(packed))
            self._output_stage.dispatched(iteration, self._clock())

    def _commit(self, iteration: Iteration, result: StepResult) -> list[RequestOutput]:
        now = self._clock()
        result = self._output_stage.read(iteration, result, now)
        events = self.scheduler.commit(iteration, result, now)
        for event in events:
            if event.finish_reason is not None:
                del self._records[event.request_id]
        outputs = self._output_stage.outputs(events, now)
        for observer in self._observers:
            observer(iteration, outputs)
        return outputs

    @contextlib.contextmanager
    def _stopping_on(self, kind: type[BaseException]) -> Iterator[None]:
        """Marks the engine unusable if its body raises; ordinary errors become JorcaError."""
        try:
            yield
        except kind as error:
            self._failure = error
            if isinstance(error, Exception):
                message = f"the engine has stopped: an iteration failed with {error!r}"
                raise JorcaError(message) from error
            raise

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
