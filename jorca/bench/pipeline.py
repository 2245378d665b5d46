"""Which stage ran which iteration when: the picture of the paper's figure 6, measured."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import jax

from jorca._plot import check_can_draw
from jorca.bench.machine import machine_facts
from jorca.bench.workload import load_model
from jorca.config import ConfigError, EngineConfig
from jorca.engine.build import build_engine
from jorca.engine.engine import Engine
from jorca.engine.executor import LocalExecutor
from jorca.request import Request, SamplingParams
from jorca.scheduler import Iteration


class Span(NamedTuple):
    """One iteration in one stage; times are seconds from the first dispatch."""

    iteration: int
    stage: int
    request_ids: tuple[str, ...]
    start_s: float
    end_s: float


class StageWatch:
    """Sees when each stage has finished each iteration, in a thread for each stage.

    The devices say when something is done, not when it was begun: a stage begins an iteration when the stage
    before has handed it over and when it has done with the last one, whichever is later.

    Args:
      executor: It is watched until `close`.
      clock: Seconds.
    """

    def __init__(self, executor: LocalExecutor, clock: Callable[[], float] = time.perf_counter):
        self._executor = executor
        self._clock = clock
        num_stages = len(executor.stages)
        self._ends_s: list[dict[int, float]] = [{} for _ in range(num_stages)]
        self._dispatched_s: dict[int, float] = {}
        self._batches: dict[int, tuple[str, ...]] = {}
        self._queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(num_stages)]
        self._threads = [threading.Thread(target=self._wait, args=(stage,)) for stage in range(num_stages)]
        for thread in self._threads:
            thread.start()
        executor.watch = self._started

    def _started(self, iteration: Iteration, stage: int, arrays: Any) -> None:
        self._dispatched_s.setdefault(iteration.seq, self._clock())
        self._batches[iteration.seq] = tuple(item.request_id for item in iteration.items)
        self._queues[stage].put((iteration.seq, arrays))

    def _wait(self, stage: int) -> None:
        while (entry := self._queues[stage].get()) is not None:
            seq, arrays = entry
            jax.block_until_ready(arrays)
            self._ends_s[stage][seq] = self._clock()

    def close(self) -> list[Span]:
        """Ends the watch once all that was started is done; returns what was seen, by stage and iteration."""
        self._executor.watch = None
        for waiting in self._queues:
            waiting.put(None)
        for thread in self._threads:
            thread.join()
        return to_spans(self._batches, self._dispatched_s, self._ends_s)


def to_spans(
    batches: Mapping[int, tuple[str, ...]],
    dispatched_s: Mapping[int, float],
    ends_s: Sequence[Mapping[int, float]],
) -> list[Span]:
    """Returns when each stage was at which iteration, by stage and iteration.

    Args:
      batches: The requests of each iteration.
      dispatched_s: When the host started each iteration.
      ends_s: For each stage, when it had done each iteration.
    """
    spans: list[Span] = []
    begin_s = min(dispatched_s.values(), default=0.0)
    for stage in range(len(ends_s)):
        free_s = begin_s
        for seq in sorted(ends_s[stage]):
            came_s = ends_s[stage - 1][seq] if stage else dispatched_s[seq]
            # Watchers run when they get the processor, so a later stage's may be the first to see its end.
            start_s, end_s = max(came_s, free_s), max(ends_s[stage][seq], came_s, free_s)
            spans.append(Span(seq, stage, batches[seq], start_s - begin_s, end_s - begin_s))
            free_s = end_s
    return spans


def busy_shares(spans: Sequence[Span]) -> list[float]:
    """Returns the share of the time, from the first start to the last end, that each stage was at work."""
    seconds = max(s.end_s for s in spans) - min(s.start_s for s in spans)
    stages = sorted({s.stage for s in spans})
    return [sum(s.end_s - s.start_s for s in spans if s.stage == stage) / seconds for stage in stages]


def run(
    *,
    model: str,
    dtype: str | None = None,
    input_tokens: int,
    output_tokens: int,
    num_requests: int | None = None,
    plot: Path | None = None,
    **engine_options: Any,
) -> None:
    """Serves like requests that all come at once; prints a JSON line for each iteration in each stage.

    Args:
      model: See `load_model`.
      dtype: See `load_model`.
      input_tokens: Tokens of each prompt.
      output_tokens: Tokens that each request generates.
      num_requests: How many; None takes a full batch for each stage.
      plot: Where to draw the figure.
      **engine_options: As `LLM` takes them; those that are None are left out.
    """
    if plot is not None:
        check_can_draw()
    config, params = load_model(model, dtype)
    if input_tokens + output_tokens > config.max_positions:
        raise ConfigError(
            f"input_tokens {input_tokens} + output_tokens {output_tokens} must be at most the model's "
            f"max_positions {config.max_positions}; lower one of the two"
        )
    given = {name: value for name, value in engine_options.items() if value is not None}
    options = EngineConfig.from_options(**given)
    if num_requests is None:
        num_requests = options.scheduler.max_batch_size * options.mesh.stages
    click.echo(json.dumps({"model": model, "dtype": config.dtype} | machine_facts()))
    engine = build_engine(config, params, None, options)
    executor = engine.executor
    assert isinstance(executor, LocalExecutor)
    _serve(engine, 1, input_tokens, 2)  # once to warm up
    watch = StageWatch(executor)
    _serve(engine, num_requests, input_tokens, output_tokens)
    spans = watch.close()
    for span in spans:
        click.echo(
            json.dumps(
                {
                    "iteration": span.iteration,
                    "stage": span.stage,
                    "requests": len(span.request_ids),
                    "start_ms": round(1e3 * span.start_s, 3),
                    "end_ms": round(1e3 * span.end_s, 3),
                }
            )
        )
    shares = busy_shares(spans)
    click.echo(json.dumps({"benchmark": "pipeline", "busy_share": [round(share, 3) for share in shares]}))
    if plot is not None:
        draw(spans, plot, f"{model}, {config.dtype}: {len(shares)} stages, {num_requests} requests")


def _serve(engine: Engine, num_requests: int, num_input: int, num_output: int) -> None:
    params = SamplingParams(max_tokens=num_output, temperature=0, ignore_eos=True, seed=0)
    for number in range(num_requests):
        prompt = tuple((number + i) % engine.model.vocab_size for i in range(num_input))
        engine.submit(Request(id=str(number), prompt_ids=prompt, params=params))
    while engine.has_work:
        engine.step()


def draw(spans: Sequence[Span], path: Path, title: str) -> None:
    """Draws a bar for each iteration in each stage, in one color for each batch of requests.

    Args:
      spans: What was seen.
      path: The image file; its ending names the format.
      title: What stands above.
    """
    check_can_draw()
    import matplotlib
    from matplotlib.figure import Figure

    num_stages = len({span.stage for span in spans})
    batches = list(dict.fromkeys(span.request_ids for span in spans))
    colors = matplotlib.colormaps["tab10"]
    figure = Figure(figsize=(9, 1 + 0.6 * num_stages), layout="constrained")
    axes = figure.subplots()
    for span in spans:
        axes.barh(
            span.stage,
            1e3 * (span.end_s - span.start_s),
            left=1e3 * span.start_s,
            color=colors(batches.index(span.request_ids) % 10),
            edgecolor="white",
            linewidth=0.3,
        )
    axes.set(xlabel="ms", ylabel="stage", title=title, yticks=range(num_stages))
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)
