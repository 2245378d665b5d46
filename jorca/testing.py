"""For those who test what they build on jorca: a tiny model, an executor without one, runs compared."""

from __future__ import annotations

import functools
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from jorca.config import EngineConfig, ModelConfig
from jorca.engine.collector import InlineCollector
from jorca.engine.engine import Engine
from jorca.engine.interfaces import Collector, Executor
from jorca.engine.output import OutputProcessor
from jorca.engine.packing import PackedBatch
from jorca.engine.sizing import derive_sizes
from jorca.frontend.text import Tokenizer
from jorca.output import RequestOutput
from jorca.scheduler import ItemResult, Iteration, Scheduler, SchedulerLimits, StepResult, policy_of

TINY: Final = ModelConfig(vocab_size=61, max_positions=32, num_layers=2, num_heads=2, d_model=16)
"""A model that compiles in a moment."""

LOGITS_BOUND: Final[Mapping[str, float]] = MappingProxyType(
    {"float32": 2.0**-14, "bfloat16": 2.0**-4, "float16": 2.0**-6}
)
"""How far a logit may lie apart in two runs, by the model's dtype, as a share of the largest of its row.

`benchmarks/buckets.py` measures the same tokens in buckets of 1 to 512 rows, over several models; each bound
is at least four times the worst difference, rounded up to a power of two. What was measured stands in
docs/design.md ("Across buckets").
"""


def assert_same_up_to_rounding(
    expected: Sequence[RequestOutput], got: Sequence[RequestOutput], dtype: str
) -> None:
    """Holds two runs of the same greedy requests to what rounding may change from one bucket to another.

    While a request's tokens are the same, so are its logits, up to `LOGITS_BOUND` times the largest of their
    row. Where tokens first differ, both must lie within twice that of the row's best logit; what comes after
    has another past and is not compared. Requests whose tokens never differ end at the same place, for the
    same reason.

    Greedy means that the best logit wins: temperature 0, and no penalties, biases or banned tokens.

    Args:
      expected: Final outputs with logits, of an engine with `return_logits=True`.
      got: Final outputs in the same order. Where they have logits, these are compared.
      dtype: What the model computes in.

    Raises:
      AssertionError: The runs differ; the message names the request and the position, counted from the first
        token generated.
    """
    if len(expected) != len(got):
        raise AssertionError(f"expected {len(expected)} outputs, got {len(got)}")
    for right, output in zip(expected, got, strict=True):
        problem = _difference(right, output, LOGITS_BOUND[dtype])
        if problem is not None:
            raise AssertionError(f"request {right.request_id!r}: {problem}")


def _difference(right: RequestOutput, output: RequestOutput, bound: float) -> str | None:
    """Returns what two outputs differ in beyond the bound, or None."""
    rows_tv, its_rows_tv = right.logits, output.logits
    if right.token_ids and (rows_tv is None or len(rows_tv) != len(right.token_ids)):
        return "expected a row of logits for each of its tokens; set return_logits=True"
    if its_rows_tv is not None and len(its_rows_tv) != len(output.token_ids):
        return f"got {len(its_rows_tv)} rows of logits for {len(output.token_ids)} tokens"
    for position, (token, its_token) in enumerate(zip(right.token_ids, output.token_ids, strict=False)):
        row_v = np.asarray(rows_tv[position])
        allowed = bound * np.abs(row_v).max()
        if its_rows_tv is not None:
            apart = np.abs(its_rows_tv[position] - row_v).max()
            if not apart <= allowed:  # NaN is beyond any bound
                return f"position {position}: logits differ by {apart:.3g}, more than {allowed:.3g}"
        if token != its_token:
            gap = row_v.max() - min(row_v[token], row_v[its_token])
            if not gap <= 2 * allowed:
                return (
                    f"position {position}: expected token {token}, got {its_token}; "
                    f"the gap to the best logit is {gap:.3g}, more than {2 * allowed:.3g}"
                )
            return None
    if len(right.token_ids) != len(output.token_ids):
        return (
            f"expected {len(right.token_ids)} tokens, got {len(output.token_ids)}, the same as far as they go"
        )
    if right.finish_reason != output.finish_reason:
        return f"expected the end {right.finish_reason!r}, got {output.finish_reason!r}"
    return None


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
