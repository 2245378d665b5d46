"""What the loop itself costs: plan, pack, commit and outputs, without a model.

Two figures. `step_us` is one turn of the loop for a full batch of decodes; the executor gives made-up tokens
at once. `late_over_early` says how much dearer a token of one stream becomes with its position: the median
cost of its tokens 900 to 1,000 over that of 100 to 200, with ids alone and with text. With `--against`,
another checkout's jorca runs the same in turns with this one, in processes of their own, and `ratio` is the
median of the paired ratios.

    python benchmarks/loop.py
    python benchmarks/loop.py --against ../other
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from jorca.config import EngineConfig
from jorca.engine.engine import Engine
from jorca.request import Request, SamplingParams
from jorca.testing import TINY, FakeExecutor, fake_engine

MODEL = dataclasses.replace(TINY, max_positions=1100)
MAX_TOKENS = 1000


def engine_of(batch_size: int, **more: Any) -> Engine:
    """Returns a fake engine with as many requests as a batch holds, each of `MAX_TOKENS` tokens."""
    config = EngineConfig.from_options(max_batch_size=batch_size, max_batch_tokens=1024, num_pages=20_000)
    engine = fake_engine(FakeExecutor(lambda _, position: position % 61), config, MODEL, **more)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, seed=0)
    for number in range(batch_size):
        engine.submit(Request(id=str(number), prompt_ids=(1, 2, 3), params=params))
    return engine


def step_times_s(batch_size: int, **more: Any) -> list[float]:
    """Returns what each turn of the loop takes; outputs are read as a streaming client would."""
    engine, times_s = engine_of(batch_size, **more), []
    while engine.has_work:
        begin = time.perf_counter()
        for output in engine.step():
            assert output.new_token_ids
            assert len(output.new_text) <= 99
        times_s.append(time.perf_counter() - begin)
    return times_s


def measure(batch_size: int) -> dict[str, float]:
    """Returns both figures, measured here."""
    step_times_s(1)  # warms up
    alone, full = step_times_s(1), step_times_s(batch_size)
    figures = {
        "step_us": 1e6 * statistics.median(full),
        "stream_us": 1e6 * statistics.median(alone),
        "late_over_early": late_over_early(alone),
    }
    if "tokenizer" in inspect.signature(fake_engine).parameters:  # older checkouts have none
        from jorca.checkpoint import open_checkpoint
        from jorca.frontend.text import Tokenizer

        tokenizer = open_checkpoint(Path(__file__).parents[1] / "checkpoints" / "shakespeare").tokenizer
        assert tokenizer is not None
        figures["text_late_over_early"] = late_over_early(step_times_s(1, tokenizer=Tokenizer(tokenizer)))
    return figures


def late_over_early(times_s: list[float]) -> float:
    """Returns how much dearer late tokens are than early ones."""
    return statistics.median(times_s[900:1000]) / statistics.median(times_s[100:200])


def measure_in(checkout: Path, batch_size: int) -> dict[str, float]:
    """Returns the figures of another checkout's jorca, measured in a process of its own."""
    command = [sys.executable, __file__, "--batch-size", str(batch_size), "--once"]
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)


@click.command()
@click.option("--batch-size", default=64, show_default=True, help="Requests in the batch.")
@click.option("--against", type=click.Path(exists=True, path_type=Path), help="Another checkout.")
@click.option("--rounds", default=7, show_default=True, help="With --against: turns of each.")
@click.option("--once", is_flag=True, hidden=True)
def main(batch_size: int, against: Path | None, rounds: int, once: bool) -> None:
    """Measures the loop, here or in turns with another checkout."""
    if once:
        return print(json.dumps(measure(batch_size)))
    facts = {"benchmark": "loop", "batch_size": batch_size}
    if against is None:
        figures = {name: round(value, 3) for name, value in measure(batch_size).items()}
        return print(json.dumps(facts | figures))
    here = Path(__file__).parents[1]
    pairs = [(measure_in(here, batch_size), measure_in(against, batch_size)) for _ in range(rounds)]
    for name in pairs[0][1]:
        line = {
            "figure": name,
            "here": round(statistics.median(ours[name] for ours, _ in pairs), 3),
            "there": round(statistics.median(theirs[name] for _, theirs in pairs), 3),
            "ratio": round(statistics.median(ours[name] / theirs[name] for ours, theirs in pairs), 3),
        }
        print(json.dumps(facts | line), flush=True)
    return None


if __name__ == "__main__":
    main()
