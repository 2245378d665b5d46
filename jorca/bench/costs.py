"""A table of what iterations cost on one machine: measured here, read by whoever predicts times."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import jax
import numpy as np

from jorca.bench.steps import Steps
from jorca.config import ConfigError, ModelConfig
from jorca.engine.programs import progress_bar
from jorca.scheduler import Item, SchedulerLimits

_FORMAT: Final = "jorca iteration costs 1"
_PROMPTS: Final = tuple(2**i for i in range(4, 20))
_PIECES: Final = (32, 128, 512)


class Shape(NamedTuple):
    """What an iteration consists of.

    Attributes:
      num_decodes: Requests that feed one token.
      decode_length: The KV length of each of them after the iteration; 0 if there are none.
      num_prompts: Requests that feed a whole prompt.
      prompt_length: Tokens of each prompt; 0 if there are none.
    """

    num_decodes: int
    decode_length: int
    num_prompts: int
    prompt_length: int

    @property
    def num_tokens(self) -> int:
        """Tokens in all."""
        return self.num_decodes + self.num_prompts * self.prompt_length

    @property
    def lengths(self) -> tuple[int, ...]:
        """The KV length of each request after the iteration."""
        return (self.decode_length,) * self.num_decodes + (self.prompt_length,) * self.num_prompts

    def fits(self, limits: SchedulerLimits) -> bool:
        """Returns whether a scheduler may plan it."""
        return (
            len(self.lengths) <= limits.max_batch_size
            and self.num_tokens <= limits.max_batch_tokens
            and max(self.lengths) <= limits.max_positions
            and sum(-(-length // limits.page_size) for length in self.lengths) <= limits.num_pages
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """One iteration and its time.

    Attributes:
      num_tokens: Tokens that it feeds.
      num_requests: Requests in it.
      kv_length: Sum over its requests of their KV lengths after the iteration.
      num_decodes: How many of the requests feed one token; all others feed prompts of one length.
      bucket: Tokens of the bucket that it runs in, padding included.
      ms: Median milliseconds from packing it to having its tokens.
    """

    num_tokens: int
    num_requests: int
    kv_length: int
    num_decodes: int
    bucket: int
    ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class CostTable:
    """Costs, and what they were measured on.

    Attributes:
      facts: Model, dtype, machine, versions, date and the like.
      costs: The measurements.
    """

    facts: Mapping[str, Any]
    costs: tuple[Cost, ...]

    def save(self, path: Path) -> None:
        """Writes the table as JSON, with a line for each cost."""
        head = json.dumps({"format": _FORMAT, "facts": dict(self.facts)})
        rows = ",\n".join(json.dumps(dataclasses.asdict(cost)) for cost in self.costs)
        path.write_text(f'{head[:-1]}, "costs": [\n{rows}\n]}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what `save` wrote.

        Raises:
          ConfigError: The file is something else.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != _FORMAT:
                raise ValueError(f"format is {data['format']!r}")
            return cls(data["facts"], tuple(Cost(**row) for row in data["costs"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path} is not a table of iteration costs: {error}") from error


def grid(limits: SchedulerLimits) -> list[Shape]:
    """Returns shapes that span what a scheduler may plan: decodes alone, prompts alone, and both together."""
    sizes = [2**i for i in range(limits.max_batch_size.bit_length())]
    if sizes[-1] != limits.max_batch_size:
        sizes.append(limits.max_batch_size)
    lengths = sorted({max(1, limits.max_positions // part) for part in (32, 8, 2, 1)})
    shapes = [Shape(size, length, 0, 0) for size in sizes for length in lengths]
    shapes += [Shape(0, 0, 1, prompt) for prompt in _PROMPTS]
    shapes += [Shape(0, 0, count, piece) for piece in _PIECES for count in (2, 4, 8)]
    shapes += [
        Shape(size - count, length, count, piece)
        for size in (limits.max_batch_size // 2, limits.max_batch_size)
        for length in lengths[1:3]
        for piece in _PIECES
        for count in (1, 2)
        if size > count
    ]
    return [shape for shape in shapes if shape.fits(limits)]


def measure_costs(
    config: ModelConfig,
    params: Mapping[str, jax.Array],
    facts: Mapping[str, Any],
    *,
    repeats: int,
    show_progress: bool = False,
    **options: Any,
) -> CostTable:
    """Measures the grid on an engine's steps, as they are without a scheduler.

    The shapes take turns, so that a slow moment of the machine does not fall on all runs of one.

    Args:
      config: The model.
      params: Its weights by name.
      facts: For the table's head; what the engine's limits are is added.
      repeats: Timed runs of each shape; one more warms up.
      show_progress: Whether to draw a progress bar on standard error.
      **options: Engine options, as `LLM` takes them.
    """
    steps = Steps(config, params, **options)
    shapes = grid(steps.limits)
    batches = [_items(steps, shape, config.vocab_size) for shape in shapes]
    times_s: list[list[float]] = [[] for _ in shapes]
    with progress_bar(show_progress) as progress:
        turns = itertools.product(range(1 + repeats), range(len(shapes)))
        for turn, i in progress.track(
            turns, total=(1 + repeats) * len(shapes), description="measuring iterations"
        ):
            begin_s = time.perf_counter()
            steps.run(batches[i])
            if turn:
                times_s[i].append(time.perf_counter() - begin_s)
    costs = tuple(
        Cost(
            num_tokens=shape.num_tokens,
            num_requests=len(shape.lengths),
            kv_length=sum(shape.lengths),
            num_decodes=shape.num_decodes,
            bucket=steps.ladder.bucket_for(shape.num_tokens).num_tokens,
            ms=round(1e3 * statistics.median(times), 3),
        )
        for shape, times in zip(shapes, times_s, strict=True)
    )
    return CostTable(dict(facts) | {"limits": dataclasses.asdict(steps.limits), "repeats": repeats}, costs)


def _items(steps: Steps, shape: Shape, vocab_size: int) -> list[Item]:
    """Returns the items of a shape, with random tokens and pages of their own."""
    rng, items, first_page = np.random.default_rng(0), [], 0
    for number, length in enumerate(shape.lengths):
        start = length - 1 if number < shape.num_decodes else 0
        tokens = rng.integers(vocab_size, size=length - start).tolist()
        items.append(steps.item(number, start, tokens, first_page))
        first_page = items[-1].pages[-1] + 1
    return items
