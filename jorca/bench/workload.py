"""What a benchmark serves: models, random jobs and their arrivals; and serving them in real time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import jax
import numpy as np

from jorca.bench.curve import Served
from jorca.checkpoint import load_checkpoint
from jorca.config import ConfigError, ModelConfig
from jorca.engine.engine import Engine
from jorca.model.init import init_params
from jorca.model.presets import preset
from jorca.request import Request, SamplingParams

SMALL: Final = ModelConfig(vocab_size=1024, max_positions=128, num_layers=4, num_heads=4, d_model=128)
"""A GPT that two cores serve at some hundred iterations a second, for lengths of `SMALL_LENGTHS`."""
SMALL_LENGTHS: Final = {"input_tokens": (8, 64), "output_tokens": (1, 32)}
"""The paper's lengths, scaled down."""


def load_model(name: str, dtype: str | None) -> tuple[ModelConfig, Mapping[str, jax.Array]]:
    """Returns a model and its weights.

    Args:
      name: "small" or a preset's name, with random weights, or a checkpoint as `LLM` takes it.
      dtype: Of random weights; None leaves what the shape has.

    Raises:
      ConfigError: There is no such model, or `dtype` was given for a checkpoint.
    """
    if Path(name).exists():
        if dtype is not None:
            raise ConfigError(f"dtype must be left out for a checkpoint, which has its own, got {dtype!r}")
        loaded = load_checkpoint(name)
        return loaded.config, loaded.params
    config = SMALL if name == "small" else preset(name)
    config = config if dtype is None else dataclasses.replace(config, dtype=dtype)
    return config, init_params(config)


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
