"""The paper's engine benchmark (Orca, OSDI 2022, section 6.1 and figure 9): no scheduler, like requests.

A batch of requests, all alike, runs from its prompts to its end, on compiled steps: `SelectiveBatch` feeds
hand-made iterations to the engine's executor, `PaddedBatch` is the baseline.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np

from jorca._plot import check_can_draw
from jorca.bench.batched import BatchRun, PaddedBatch
from jorca.bench.costs import measure_costs
from jorca.bench.machine import machine_facts
from jorca.bench.steps import Steps
from jorca.bench.workload import load_model
from jorca.config import ConfigError, EngineConfig, ModelConfig
from jorca.engine.programs import progress_bar


class SelectiveBatch:
    """Runs a batch of like requests from prompt to end, through selective batching.

    The ladder has the two buckets that the batch takes, and both are full.

    Args:
      config: The model.
      params: Its weights by name.
      batch_size: Requests, B.
      num_input: Tokens of each prompt, at least 2.
      num_output: Tokens that each request generates, at least 2.
      **options: More engine options.

    Raises:
      ConfigError: An option is one that the batch sets: batch, bucket and array sizes.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Mapping[str, jax.Array],
        *,
        batch_size: int,
        num_input: int,
        num_output: int,
        **options: Any,
    ) -> None:
        page_size = EngineConfig.from_options(**options).cache.page_size
        self._pages_each = -(-(num_input + num_output - 1) // page_size)
        self._num_output = num_output
        sizes = {
            "max_batch_size": batch_size,
            "max_batch_tokens": batch_size * num_input,
            "num_pages": batch_size * self._pages_each,
            "min_bucket": batch_size,
            "bucket_ratio": float(num_input),
        }
        if given := sorted(set(sizes) & set(options)):
            raise ConfigError(f"{', '.join(given)} must be left out: a batch of like requests sets them")
        self._steps = Steps(config, params, **options, **sizes)

    def run(self, prompts_bt: np.ndarray, clock: Callable[[], float] = time.perf_counter) -> BatchRun:
        """Runs the batch whose prompts are `prompts_bt`, int32 [B, num_input].

        As in the engine, every iteration's tokens go to the host, which feeds them to the next.
        """
        fed = prompts_bt.tolist()
        begin_s = clock()
        tokens = [self._step(0, fed)]
        first_s = clock()
        for position in range(prompts_bt.shape[1], prompts_bt.shape[1] + self._num_output - 1):
            tokens.append(self._step(position, [[token] for token in tokens[-1]]))
        return BatchRun(np.array(tokens).T, first_s - begin_s, clock() - first_s)

    def _step(self, start: int, fed: list[list[int]]) -> list[int]:
        items = [self._steps.item(i, start, ids, i * self._pages_each) for i, ids in enumerate(fed)]
        return [item.token_ids[0] for item in self._steps.run(items).items]


def compare(
    config: ModelConfig,
    params: Mapping[str, jax.Array],
    *,
    batch_size: int,
    num_input: int,
    num_output: int,
    repeats: int,
    full_context: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Runs one batch both ways, taking turns, so that whatever else the machine does falls on both.

    Args:
      config: The model.
      params: Its weights by name.
      batch_size: Requests.
      num_input: Tokens of each prompt, at least 2.
      num_output: Tokens that each request generates, at least 2.
      repeats: Timed runs of each; one more warms up.
      full_context: Whether the baseline's arrays have `max_positions` slots for each request, as
        FasterTransformer's had in the paper, instead of num_input + num_output.
      **options: Engine options.

    Returns:
      Median total, first and later milliseconds of both, the median of the turns' ratios of totals, and
      the share of requests whose tokens were the same.
    """
    length = num_input + num_output
    if length > config.max_positions:
        raise ConfigError(
            f"input_tokens {num_input} + output_tokens {num_output} = {length}, "
            f"but the model's max_positions is {config.max_positions}; lower one of the two"
        )
    sizes = {"batch_size": batch_size, "num_input": num_input, "num_output": num_output}
    sides = {
        "selective": SelectiveBatch(config, params, **sizes, **options),
        "batched": PaddedBatch(
            config, params, **sizes, max_length=config.max_positions if full_context else length
        ),
    }
    prompts_bt = np.random.default_rng(0).integers(
        config.vocab_size, size=(batch_size, num_input), dtype=np.int32
    )
    runs: dict[str, list[BatchRun]] = {name: [] for name in sides}
    for _ in range(1 + repeats):
        for name, side in sides.items():
            runs[name].append(side.run(prompts_bt))
    totals = {name: [run.first_s + run.rest_s for run in timed[1:]] for name, timed in runs.items()}
    line: dict[str, Any] = dict(sizes)
    for name, timed in runs.items():
        line[f"{name}_ms"] = _median_ms(totals[name])
        line[f"{name}_first_ms"] = _median_ms([run.first_s for run in timed[1:]])
        line[f"{name}_rest_ms"] = _median_ms([run.rest_s for run in timed[1:]])
    ratios = [s / b for s, b in zip(totals["selective"], totals["batched"], strict=True)]
    line["selective_over_batched"] = round(statistics.median(ratios), 3)
    same_b = (runs["selective"][0].tokens_bo == runs["batched"][0].tokens_bo).all(axis=1)
    return line | {"same_tokens": float(same_b.mean()), "repeats": repeats}


def _median_ms(times_s: Sequence[float]) -> float:
    return round(1e3 * statistics.median(times_s), 3)


def run(
    *,
    model: str,
    dtype: str | None = None,
    batch_sizes: Sequence[int],
    input_tokens: Sequence[int],
    output_tokens: int,
    repeats: int,
    full_context: bool = False,
    plot: Path | None = None,
    table: Path | None = None,
    **engine_options: Any,
) -> None:
    """Prints the facts, and a JSON line for every input length and batch size; or writes a table of costs.

    Args:
      model: See `load_model`.
      dtype: See `load_model`.
      batch_sizes: Requests in a batch, for each batch.
      input_tokens: Prompt lengths.
      output_tokens: Tokens that each request generates.
      repeats: See `compare`.
      full_context: See `compare`.
      plot: Where to draw the figure.
      table: Where to write a table of iteration costs, instead of comparing.
      **engine_options: As `LLM` takes them; those that are None are left out.
    """
    if plot is not None and table is not None:
        raise ConfigError("plot and table are different measurements; give one of them")
    if plot is not None:
        check_can_draw()
    config, params = load_model(model, dtype)
    options = {name: value for name, value in engine_options.items() if value is not None}
    facts = {"model": model, "dtype": config.dtype} | machine_facts() | _load()
    click.echo(json.dumps(facts))
    if table is not None:
        show = sys.stderr.isatty()
        measure_costs(config, params, facts, repeats=repeats, show_progress=show, **options).save(table)
        return
    lines = []
    for num_input, batch_size in _tracked(list(itertools.product(input_tokens, batch_sizes))):
        line = compare(
            config,
            params,
            batch_size=batch_size,
            num_input=num_input,
            num_output=output_tokens,
            repeats=repeats,
            full_context=full_context,
            **options,
        )
        lines.append({"benchmark": "iteration", "full_context": full_context} | line)
        click.echo(json.dumps(lines[-1]))
    if plot is not None:
        draw(lines, plot, f"{model}, {config.dtype}: like requests, {output_tokens} tokens generated")


def _load() -> dict[str, float]:
    """Returns how busy the machine was in the last minute, where the system says."""
    return {"load": round(os.getloadavg()[0], 2)} if hasattr(os, "getloadavg") else {}


def _tracked(cases: list[Any]) -> Iterator[Any]:
    """Yields the cases, with a progress bar on a terminal."""
    with progress_bar(sys.stderr.isatty()) as progress:
        yield from progress.track(cases, description="measuring")


def draw(lines: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draws total time against batch size, as figure 9 does, into an image file.

    Args:
      lines: What `compare` returned, a curve for each side and input length.
      path: Its suffix says which format.
      title: Above the figure.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for style, num_input in zip(itertools.cycle(("-", "--", ":")), sorted({x["num_input"] for x in lines})):
        mine = sorted((x["batch_size"], x) for x in lines if x["num_input"] == num_input)
        for side, color, marker in (("selective", "tab:blue", "o"), ("batched", "tab:red", "s")):
            axes.plot(
                [size for size, _ in mine],
                [line[f"{side}_ms"] for _, line in mine],
                style,
                color=color,
                marker=marker,
                label=f"{side}, {num_input} tokens in",
            )
    sizes = sorted({line["batch_size"] for line in lines})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("requests in the batch")
    axes.set_ylabel("total time in ms")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize="medium")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
