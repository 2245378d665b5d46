"""What the scheduler costs per iteration, and that it follows the batch and not the queue.

Times `plan` + `commit` of a full batch of decodes with a short and with a long queue behind it. The two
take turns in one process, so that whatever else the machine does falls on both. Prints one JSON line for
each batch size.

    python benchmarks/scheduler.py
"""

from __future__ import annotations

import json
import statistics
import time

import click

from jorca.request import Request, SamplingParams
from jorca.scheduler import ItemResult, Iteration, Scheduler, SchedulerLimits, StepResult

PROMPT_TOKENS = 200
MAX_TOKENS = 1_000_000
PAGES_PER_REQUEST = 16
PAGE_SIZE = -(-(PROMPT_TOKENS + MAX_TOKENS - 1) // PAGES_PER_REQUEST)


def full_scheduler(batch_size: int, num_waiting: int) -> Scheduler:
    """Returns a scheduler whose batch is full of decoding requests, with `num_waiting` behind it."""
    limits = SchedulerLimits(
        max_batch_size=batch_size,
        max_batch_tokens=batch_size * PROMPT_TOKENS,
        max_in_flight=1,
        num_pages=batch_size * PAGES_PER_REQUEST,
        page_size=PAGE_SIZE,
        max_positions=PROMPT_TOKENS + MAX_TOKENS,
    )
    scheduler = Scheduler(limits)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for i in range(batch_size + num_waiting):
        scheduler.submit(Request(id=f"request-{i}", prompt_ids=(i,) * PROMPT_TOKENS, params=params), 0.0)
    iterate(scheduler)
    assert (scheduler.num_resident, scheduler.num_waiting) == (batch_size, num_waiting)
    return scheduler


def iterate(scheduler: Scheduler) -> float:
    """Runs one iteration; returns the seconds of `plan` and `commit`, without making the result."""
    begin = time.perf_counter()
    iteration = scheduler.plan()
    planned = time.perf_counter()
    assert iteration is not None
    result = made_up_result(iteration)
    resumed = time.perf_counter()
    scheduler.commit(iteration, result, 0.0)
    return planned - begin + time.perf_counter() - resumed


def made_up_result(iteration: Iteration) -> StepResult:
    """Returns one token for every item."""
    return StepResult(iteration.seq, tuple(ItemResult((item.row,)) for item in iteration.items))


@click.command()
@click.option("--batch-sizes", default="8,64,256", show_default=True, help="Comma-separated.")
@click.option("--short-queue", default=100, show_default=True, help="Requests waiting.")
@click.option("--long-queue", default=100_000, show_default=True, help="Requests waiting.")
@click.option("--iterations", default=3000, show_default=True, help="Timed iterations of each.")
def main(batch_sizes: str, short_queue: int, long_queue: int, iterations: int) -> None:
    """Measures plan + commit for each batch size behind a short and a long queue."""
    for batch_size in map(int, batch_sizes.split(",")):
        queues = {"short": short_queue, "long": long_queue}
        schedulers = {name: full_scheduler(batch_size, waiting) for name, waiting in queues.items()}
        seconds: dict[str, list[float]] = {name: [] for name in queues}
        for i in range(iterations + 100):
            for name, scheduler in schedulers.items():
                took_s = iterate(scheduler)
                if i >= 100:  # the first ones warm up
                    seconds[name].append(took_s)
        medians_us = {name: 1e6 * statistics.median(values) for name, values in seconds.items()}
        line = {
            "benchmark": "scheduler",
            "batch_size": batch_size,
            "iterations": iterations,
            "short_queue": short_queue,
            "short_queue_us": round(medians_us["short"], 1),
            "long_queue": long_queue,
            "long_queue_us": round(medians_us["long"], 1),
            "long_queue_p99_us": round(1e6 * statistics.quantiles(seconds["long"], n=100)[98], 1),
            "ratio": round(medians_us["long"] / medians_us["short"], 3),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
