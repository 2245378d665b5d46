"""Stand-ins for those who test what they build on jorca: a tiny model, and an executor without one."""

from __future__ import annotations

import functools
import threading
import time
import zlib
from collections.abc import Callable
from typing import Final

from jorca.config import EngineConfig, ModelConfig
from jorca.engine.collector import InlineCollector
from jorca.engine.engine import Engine
from jorca.engine.interfaces import Collector, Executor
from jorca.engine.output import OutputProcessor
from jorca.engine.packing import PackedBatch
from jorca.engine.sizing import derive_sizes
from jorca.frontend.text import Tokenizer
from jorca.scheduler import ItemResult, Iteration, Scheduler, SchedulerLimits, StepResult, policy_of

TINY: Final = ModelConfig(vocab_size=61, max_positions=32, num_layers=2, num_heads=2, d_model=16)
"""A model that compiles in a moment."""


def fake_token(request_id: str, position: int) -> int:
    """Returns what `FakeExecutor` puts at a position of a request: below 61, in every process the same."""
    return zlib.crc32(f"{request_id}@{position}".encode()) % TINY.vocab_size


class FakeExecutor:
    """An executor without a model: tokens come from a function of request and position.

    Args:
      token: (request id, position of the new token) -> token id.
      gated: Whether `collect` waits until `release` has been called for the iteration.

    Attributes:
      dispatched: Iterations in the order in which they came.
      most_in_flight: Most iterations that were ever dispatched and not collected.
    """

    def __init__(self, token: Callable[[str, int], int] = fake_token, *, gated: bool = False):
        self._token = token
        self._gate = threading.Semaphore(0) if gated else None
        self._in_flight: set[int] = set()
        self.dispatched: list[Iteration] = []
        self.most_in_flight = 0

    def dispatch(self, packed: PackedBatch) -> Iteration:
        """Notes the iteration, which is its own ticket."""
        self.dispatched.append(packed.iteration)
        self._in_flight.add(packed.iteration.seq)
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        return packed.iteration

    def release(self, iterations: int = 1) -> None:
        """Lets `collect` return so many more iterations."""
        assert self._gate is not None, "only a gated executor waits"
        self._gate.release(iterations)

    def reset(self) -> None:
        """Forgets what was dispatched and not collected."""
        self._in_flight.clear()

    def close(self) -> None:
        """Does nothing: there is nothing to give back."""

    def collect(self, ticket: Iteration) -> StepResult:
        """Returns a token for every item that needs one."""
        if self._gate is not None:
            self._gate.acquire()
        self._in_flight.discard(ticket.seq)
        items = (
            ItemResult((self._token(item.request_id, item.end),) if item.num_logits else ())
            for item in ticket.items
        )
        return StepResult(ticket.seq, tuple(items))


def fake_engine(
    executor: Executor,
    config: EngineConfig,
    model: ModelConfig = TINY,
    *,
    tokenizer: Tokenizer | None = None,
    make_scheduler: Callable[[SchedulerLimits], Scheduler] | None = None,
    make_collector: Callable[[Executor], Collector] = InlineCollector,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """Returns the real loop, scheduler, packer and output stage around another executor; loads no JAX.

    Args:
      executor: Runs the iterations, for example a `FakeExecutor`.
      config: The engine's options.
      model: Whose sizes count; its weights are never needed.
      tokenizer: None if there is none.
      make_scheduler: As for `jorca.engine.build.build_engine`, like the next two.
      make_collector: How to wait; the default waits in the caller's thread.
      clock: Seconds.
    """
    sizes = derive_sizes(model, config)
    if make_scheduler is None:
        make_scheduler = functools.partial(Scheduler, policy=policy_of(config.scheduler))
    return Engine(
        model=model,
        scheduler=make_scheduler(sizes.limits),
        packer=sizes.packer(),
        executor=executor,
        output_stage=OutputProcessor(tokenizer),
        collector=make_collector(executor),
        max_failures=config.max_failures,
        clock=clock,
    )
