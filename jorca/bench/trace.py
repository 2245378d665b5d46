"""The paper's end-to-end protocol (Orca, OSDI 2022, section 6.2 and figure 10) on the real engine.

Requests of random lengths arrive as a Poisson process, in real time. For each offered rate, the median
over requests of (end-to-end latency / generated tokens) stands against the throughput that was reached.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from jorca.bench.curve import Point, Served, summary
from jorca.config import ConfigError, ModelConfig
from jorca.engine.engine import Engine
from jorca.engine.llm import LLM
from jorca.request import Request, SamplingParams

POLICIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "orca": {"policy": "orca"},
    "request-level": {"policy": "request-level"},
    "shortest-prompt": {"policy": "request-level", "shortest_prompt": True},
}
"""What is compared, by name: engine options. The last is the baseline with FasterTransformer's first pass."""
NUM_SOLO: Final = 16
"""Requests that are served one by one to warm up, and to know the latency of one that is alone."""


class Job(NamedTuple):
    """One request of the trace; it generates exactly `num_output` tokens."""

    prompt_ids: tuple[int, ...]
    num_output: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Where jobs come from. Equal fields give equal jobs.

    Attributes:
      vocab_size: Prompts are drawn uniformly from so many token ids.
      input_tokens: Shortest and longest prompt; lengths are uniform, both ends included.
      output_tokens: Fewest and most generated tokens, likewise.
      seed: At least 0.
    """

    vocab_size: int
    input_tokens: tuple[int, int] = (32, 512)
    output_tokens: tuple[int, int] = (1, 128)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ConfigError(f"{name} must be two numbers, 1 <= low <= high, got {low} and {high}")

    def jobs(self, count: int) -> list[Job]:
        """Draws `count` jobs: all prompt lengths, then all output lengths, then the prompts one by one."""
        rng = np.random.default_rng(self.seed)
        inputs = rng.integers(self.input_tokens[0], self.input_tokens[1] + 1, count)
        outputs = rng.integers(self.output_tokens[0], self.output_tokens[1] + 1, count)
        prompts = [tuple(rng.integers(0, self.vocab_size, n).tolist()) for n in inputs]
        return [Job(prompt, int(n)) for prompt, n in zip(prompts, outputs, strict=True)]

    def arrivals_s(self, count: int, rate_rps: float) -> list[float]:
        """Draws the arrival times of a Poisson process; another rate stretches the same process."""
        gaps = np.random.default_rng([self.seed, 1]).exponential(size=count)
        return (gaps.cumsum() / rate_rps).tolist()


def serve(
    engine: Engine,
    jobs: Sequence[Job],
    arrivals_s: Sequence[float],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> list[Served]:
    """Submits jobs when their time has come and drives the engine until all are done.

    A job that arrives during an iteration is submitted after it, but its latency runs from its arrival.

    Args:
      engine: Has nothing else to do.
      jobs: In order of arrival.
      arrivals_s: Seconds from the start, ascending, one for each job.
      clock: Seconds.
      sleep: Waits for so many seconds.

    Returns:
      Times from the start, in the order of the jobs.
    """
    started_s, num_submitted, finished_s = clock(), 0, dict[str, float]()
    while len(finished_s) < len(jobs):
        now_s = clock() - started_s
        while num_submitted < len(jobs) and arrivals_s[num_submitted] <= now_s:
            engine.submit(_request(num_submitted, jobs[num_submitted]))
            num_submitted += 1
        if not engine.has_work:
            sleep(arrivals_s[num_submitted] - now_s)
            continue
        outputs = engine.step()
        now_s = clock() - started_s
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            if output.finished:
                finished_s[output.request_id] = now_s
    return [Served(arrivals_s[i], finished_s[str(i)], job.num_output) for i, job in enumerate(jobs)]


def _request(number: int, job: Job) -> Request:
    params = SamplingParams(max_tokens=job.num_output, temperature=0, ignore_eos=True, seed=0)
    return Request(id=str(number), prompt_ids=job.prompt_ids, params=params)


class Bench:
    """Serves one trace with one model under several policies and batch sizes.

    Args:
      model: The model.
      params: Its weights.
      trace: The jobs.
      engine_options: For every engine, as `LLM` takes them.

    Raises:
      ConfigError: The longest job does not fit the model.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: Mapping[str, jax.Array],
        trace: Trace,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        longest = trace.input_tokens[1] + trace.output_tokens[1] - 1
        if longest > model.max_positions:
            raise ConfigError(
                f"input_tokens {trace.input_tokens[1]} + output_tokens {trace.output_tokens[1]} - 1 = {longest}, "
                f"but the model's max_positions is {model.max_positions}; lower one of the two"
            )
        self._model, self._params, self._trace = model, params, trace
        self._engine_options = dict(engine_options or {})
        self.solo_ms: float | None = None
        """Median normalized latency of requests that were alone, in the first engine that was started."""

    def start(self, policy: str, max_batch_size: int) -> Engine:
        """Builds an engine and warms it up."""
        options = self._engine_options | POLICIES[policy] | {"max_batch_size": max_batch_size}
        engine = LLM.from_params(self._model, self._params, show_progress=False, **options).engine
        jobs = self._trace.jobs(NUM_SOLO)
        serve(engine, jobs, [0.0] * len(jobs))
        alone = [serve(engine, [job], [0.0])[0].normalized_latency_s for job in jobs]
        self.solo_ms = 1e3 * float(np.median(alone)) if self.solo_ms is None else self.solo_ms
        return engine

    def measure(
        self, engine: Engine, policy: str, max_batch_size: int, num_requests: int, rate_rps: float | None
    ) -> Point:
        """Serves so many requests, which arrive at a rate, or all at once where it is None."""
        jobs, trace = self._trace.jobs(num_requests), self._trace
        arrivals_s = [0.0] * num_requests if rate_rps is None else trace.arrivals_s(num_requests, rate_rps)
        served = serve(engine, jobs, arrivals_s)
        return Point.of(served, policy=policy, max_batch_size=max_batch_size, offered_rps=rate_rps)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ladder:
    """The rates that each policy and batch size is offered.

    Attributes:
      loads: Rates as multiples of what the engine can do at most, which is measured first.
      rates_rps: Rates in requests per second; if there are any, `loads` is not looked at.
      seconds: How long requests arrive at each rate.
      min_requests: Fewest requests at each rate, however long that takes.
    """

    loads: tuple[float, ...] = (0.2, 0.5, 0.75, 1.0, 1.3)
    rates_rps: tuple[float, ...] = ()
    seconds: float = 3.0
    min_requests: int = 24

    def __len__(self) -> int:
        """Measurements of one engine."""
        return 1 + len(self.rates_rps or self.loads)

    def measure(self, bench: Bench, policy: str, max_batch_size: int) -> Iterator[Point]:
        """Yields the points of one engine: all requests at once, then rate after rate."""
        engine = bench.start(policy, max_batch_size)
        count = max(self.min_requests, 3 * max_batch_size)
        most = bench.measure(engine, policy, max_batch_size, count, None)
        yield most
        for rate in self.rates_rps or [load * most.throughput_rps for load in self.loads]:
            count = max(self.min_requests, round(rate * self.seconds))
            yield bench.measure(engine, policy, max_batch_size, count, rate)


def run_ladder(
    bench: Bench,
    ladder: Ladder,
    engines: Sequence[tuple[str, int]],
    on_point: Callable[[Point], object],
    target_ms: float | None = None,
) -> tuple[list[Point], dict[str, Any]]:
    """Measures every engine at every rate.

    Args:
      bench: Model and trace.
      ladder: The rates.
      engines: (policy, max_batch_size) of each.
      on_point: Called with each point when it is there.
      target_ms: Latency at which throughputs are compared; None takes twice that of a request that is alone.

    Returns:
      The points, and their summary.
    """
    points = []
    for policy, max_batch_size in engines:
        for point in ladder.measure(bench, policy, max_batch_size):
            points.append(point)
            on_point(point)
    assert bench.solo_ms is not None
    return points, {"solo_ms": bench.solo_ms} | summary(points, target_ms or 2 * bench.solo_ms)
