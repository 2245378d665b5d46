"""Stand-ins for those who test what they build on jorca: a tiny model, and an executor without one."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from typing import Final

from jorca.config import EngineConfig, ModelConfig
from jorca.engine.buckets import BucketLadder
from jorca.engine.collector import Collector
from jorca.engine.engine import Engine
from jorca.engine.executor import Executor
from jorca.engine.output import OutputStage
from jorca.engine.packing import PackedBatch, Packer
from jorca.engine.sizing import resolve_limits
from jorca.scheduler import ItemResult, Iteration, Scheduler, StepResult, make_policy

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
        self._collected = 0
        self.dispatched: list[Iteration] = []
        self.most_in_flight = 0

    def dispatch(self, packed: PackedBatch) -> Iteration:
        """Notes the iteration, which is its own ticket."""
        self.dispatched.append(packed.iteration)
        self.most_in_flight = max(self.most_in_flight, len(self.dispatched) - self._collected)
        return packed.iteration

    def release(self, iterations: int = 1) -> None:
        """Lets `collect` return so many more iterations."""
        assert self._gate is not None, "only a gated executor waits"
        self._gate.release(iterations)

    def reset(self) -> None:
        """Forgets what was dispatched and not collected."""
        self._collected = len(self.dispatched)

    def collect(self, ticket: Iteration) -> StepResult:
        """Returns a token for every item that needs one."""
        if self._gate is not None:
            self._gate.acquire()
        self._collected += 1
        items = (
            ItemResult((self._token(item.request_id, item.end),) if item.num_logits else ())
            for item in ticket.items
        )
        return StepResult(ticket.seq, tuple(items))


def fake_engine(
    executor: Executor, config: EngineConfig, model: ModelConfig = TINY, collector: Collector | None = None
) -> Engine:
    """Returns the real loop, scheduler, packer and output stage around another executor.

    Args:
      executor: Runs the iterations, for example a `FakeExecutor`.
      config: The engine's options.
      model: Whose sizes count; its weights are never needed.
      collector: How to wait; None waits in the caller's thread.
    """
    limits = resolve_limits(model, config)
    return Engine(
        model=model,
        scheduler=Scheduler(limits, make_policy(config.scheduler.policy, **config.scheduler.policy_options)),
        packer=Packer(BucketLadder(limits, config.buckets), limits.num_pages),
        executor=executor,
        output_stage=OutputStage(None),
        max_failures=config.max_failures,
        collector=collector,
    )
