"""The paper's end-to-end protocol (Orca, OSDI 2022, section 6.2 and figure 10) on the real engine.

Requests of random lengths arrive as a Poisson process, in real time. For each offered rate, the median
over requests of (end-to-end latency / generated tokens) stands against the throughput that was reached.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from jorca._plot import check_can_draw
from jorca.bench.curve import Point, draw, summary
from jorca.bench.machine import machine_facts
from jorca.bench.workload import SMALL_LENGTHS, Trace, load_model, serve
from jorca.config import ConfigError, EngineConfig, ModelConfig
from jorca.engine.engine import Engine
from jorca.engine.llm import LLM
from jorca.sharding.hosts import join_hosts

POLICIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "orca": {"policy": "orca"},
    "request-level": {"policy": "request-level"},
    "shortest-prompt": {"policy": "request-level", "shortest_prompt": True},
}
"""What is compared, by name: engine options. The last is the baseline with FasterTransformer's first pass."""
NUM_SOLO: Final = 16
"""Requests that are served one by one, to know the latency of one that is alone."""
LOADS: Final = (0.1, 0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5)
"""Rates that are offered, as multiples of what the engine can do at most."""
MIN_REQUESTS: Final = 24
"""Fewest requests in a measurement that makes a curve."""
TARGET_SOLO: Final = 3.0
"""Throughputs are compared at so many times the normalized latency of a request that is alone."""


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
        most_in, most_out = trace.input_tokens[1], trace.output_tokens[1]
        longest = most_in + most_out - 1
        if longest > model.max_positions:
            raise ConfigError(
                f"input_tokens {most_in} + output_tokens {most_out} - 1 = {longest} positions, "
                f"but the model's max_positions is {model.max_positions}; lower one of the two"
            )
        self._model, self._params, self._trace = model, params, trace
        self._engine_options = dict(engine_options or {})
        self.solo_ms: float | None = None
        """Median normalized latency of requests that were alone, once `climb` has measured it."""

    def start(self, policy: str, max_batch_size: int) -> Engine:
        """Builds an engine and warms it up."""
        options: dict[str, Any] = {**self._engine_options, **POLICIES[policy]}
        llm = LLM.from_params(
            self._model, self._params, show_progress=False, max_batch_size=max_batch_size, **options
        )
        jobs = [job._replace(num_output=min(job.num_output, 4)) for job in self._trace.jobs(max_batch_size)]
        serve(llm.engine, jobs, [0.0] * len(jobs))
        return llm.engine

    def closed(self, policy: str, max_batch_size: int, num_requests: int) -> Iterator[Point]:
        """Yields one point: so many requests, all at once."""
        engine = self.start(policy, max_batch_size)
        yield self._measure(engine, policy, max_batch_size, num_requests, None)

    def climb(
        self, policy: str, max_batch_size: int, rates_rps: Sequence[float], seconds: float
    ) -> Iterator[Point]:
        """Yields what the engine can do at most, from requests that come all at once, then rate after rate.

        Args:
          policy: A key of `POLICIES`.
          max_batch_size: Most requests in an iteration.
          rates_rps: Requests per second; empty takes `LOADS` times what the engine can do at most.
          seconds: How long requests arrive at each rate, or until there were `MIN_REQUESTS`.
        """
        engine = self.start(policy, max_batch_size)
        if self.solo_ms is None:
            alone = [serve(engine, [job], [0.0])[0] for job in self._trace.jobs(NUM_SOLO)]
            self.solo_ms = float(np.median([1e3 * served.normalized_latency_s for served in alone]))
        count = max(MIN_REQUESTS, 8 * max_batch_size)  # enough that filling and draining matter little
        most = self._measure(engine, policy, max_batch_size, count, None)
        yield most
        for rate in rates_rps or [load * most.throughput_rps for load in LOADS]:
            count = max(MIN_REQUESTS, round(rate * seconds))
            yield self._measure(engine, policy, max_batch_size, count, rate)

    def _measure(
        self, engine: Engine, policy: str, max_batch_size: int, num_requests: int, rate_rps: float | None
    ) -> Point:
        """Serves so many requests, which arrive at a rate, or all at once where it is None."""
        jobs, trace = self._trace.jobs(num_requests), self._trace
        arrivals_s = [0.0] * num_requests if rate_rps is None else trace.arrivals_s(num_requests, rate_rps)
        served = serve(engine, jobs, arrivals_s)
        return Point.of(served, policy=policy, max_batch_size=max_batch_size, offered_rps=rate_rps)


def run(
    engines: Sequence[tuple[str, int]],
    *,
    model: str = "small",
    dtype: str | None = None,
    input_tokens: tuple[int, int] | None = None,
    output_tokens: tuple[int, int] | None = None,
    seed: int = 0,
    closed: bool = False,
    num_requests: int | None = None,
    rates: Sequence[float] = (),
    seconds: float | None = None,
    target_ms: float | None = None,
    plot: Path | None = None,
    **engine_options: Any,
) -> None:
    """Measures every engine and prints a JSON line for each point, then one that compares them.

    Args:
      engines: (policy, max_batch_size) of each; the policy is a key of `POLICIES`.
      model: See `load_model`.
      dtype: See `load_model`.
      input_tokens: See `Trace`; None means the paper's lengths, or `SMALL_LENGTHS` for the small model.
      output_tokens: Likewise.
      seed: Of the trace.
      closed: Whether there is a single measurement, in which all requests arrive at once.
      num_requests: How many they are then; None means 32.
      rates: See `Bench.climb`.
      seconds: See `Bench.climb`; None means 3.
      target_ms: Latency at which throughputs are compared, in milliseconds per token; None takes
        `TARGET_SOLO` times that of a request that is alone.
      plot: Where to draw the figure.
      **engine_options: As `LLM` takes them; those that are None are left out. In processes other than 0
        of several, this does not return.

    Raises:
      ConfigError: A value breaks its field's rule, goes without `closed` alone or with it alone, the plot
        cannot be drawn, or there are several engines on several hosts.
    """
    others = {"rates": rates, "seconds": seconds, "target_ms": target_ms, "plot": plot}
    for name, value in (others if closed else {"num_requests": num_requests}).items():
        if value:
            raise ConfigError(
                f"{name} must be left out {'with' if closed else 'without'} closed, got {value}"
            )
    if plot is not None:
        check_can_draw()
    options = {name: value for name, value in engine_options.items() if value is not None}
    hosts = EngineConfig.from_options(**options).hosts
    if hosts.coordinator is not None and len(engines) > 1:
        raise ConfigError(
            f"with a coordinator there must be one engine, got {len(engines)}: "
            "give one policy and one max_batch_size"
        )
    join_hosts(hosts)  # before the weights are made
    config, params = load_model(model, dtype)
    lengths: dict[str, Any] = dict(SMALL_LENGTHS) if model == "small" else {}
    given = {"input_tokens": input_tokens, "output_tokens": output_tokens}
    lengths |= {name: value for name, value in given.items() if value}
    trace = Trace(vocab_size=config.vocab_size, seed=seed, **lengths)
    bench = Bench(config, params, trace, options)
    if closed:
        num_points, measure = 1, functools.partial(bench.closed, num_requests=num_requests or 32)
    else:
        num_points = 1 + len(rates or LOADS)
        measure = functools.partial(bench.climb, rates_rps=rates, seconds=seconds or 3.0)
    _print({"benchmark": "trace", "model": model, "dtype": config.dtype, **dataclasses.asdict(trace)})
    _print(machine_facts())
    points = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(engines) * num_points)
        for policy, size in engines:
            progress.update(task, description=f"{policy}, max_batch_size {size}")
            for point in measure(policy, size):
                points.append(point)
                progress.advance(task)
                _print(dataclasses.asdict(point))
    if bench.solo_ms is None:
        return
    target_ms = TARGET_SOLO * bench.solo_ms if target_ms is None else target_ms
    _print({"solo_ms": bench.solo_ms} | summary(points, target_ms))
    if plot is not None:
        (a, b), (c, d) = trace.input_tokens, trace.output_tokens
        title = f"{model}, {config.dtype}, prompts of {a} to {b}, outputs of {c} to {d}"
        draw(points, target_ms, plot, title)


def _print(record: Mapping[str, Any]) -> None:
    print(json.dumps(_rounded(record)), flush=True)


def _rounded(value: Any) -> Any:
    """Cuts floats to four digits that mean something."""
    if isinstance(value, Mapping):
        return {name: _rounded(v) for name, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
