"""`jorca demo`: a few dozen sums of different age, served at once by the adder."""

from __future__ import annotations

import random
import time
from pathlib import Path

from rich.console import Console

from jorca.engine.llm import LLM
from jorca.request import RequestOutput, SamplingParams
from jorca.timeline import Timeline


def run_demo(
    path: Path,
    console: Console,
    *,
    num_sums: int = 40,
    seed: int = 0,
    compilation_cache_dir: str | None = None,
) -> bool:
    """Serves random sums that arrive while others run, and draws how they shared iterations.

    Args:
      path: The adder's checkpoint.
      console: Where to print.
      num_sums: How many sums.
      seed: Of the sums and of their arrivals, which come 0 to 4 per iteration.
      compilation_cache_dir: As in `EngineConfig`.

    Returns:
      Whether every sum was right.
    """
    console.print(
        f"[bold]jorca[/bold]: {num_sums} sums, at most 8 in an iteration, from [bold]{path}[/bold]\n"
    )
    # Two buckets, for a full batch of single tokens and for one of prompts, are compiled in a moment.
    llm = LLM(
        path,
        max_batch_size=8,
        page_size=2,
        min_bucket=8,
        bucket_ratio=8,
        compilation_cache_dir=compilation_cache_dir,
    )
    timeline = Timeline()
    llm.engine.observe(timeline)
    rng = random.Random(seed)
    sums = {f"sum-{i}": (rng.randrange(100), rng.randrange(100)) for i in range(num_sums)}
    params = SamplingParams(max_tokens=3, temperature=0)

    coming, done = list(sums.items()), dict[str, RequestOutput]()
    started_s = time.perf_counter()
    while coming or llm.has_work:
        for _ in range(min(rng.randrange(5), len(coming))):
            request_id, (a, b) = coming.pop(0)
            llm.submit(f"{a:02d}{b:02d}", params, request_id=request_id)
            timeline.submitted(request_id)
        for output in llm.step():
            if output.finished:
                done[output.request_id] = output
                console.print(f"  {_verdict(sums[output.request_id], output)}", highlight=False)
    seconds = time.perf_counter() - started_s

    console.print()
    console.print(
        timeline.picture(
            lambda request_id: "{:02d}+{:02d}".format(*sums[request_id]),
            lambda output: str(read_sum(output)),
            console.width,
        )
    )
    right = sum(read_sum(done[i]) == a + b for i, (a, b) in sums.items() if i in done)
    tokens = sum(len(output.token_ids) for output in done.values())
    console.print(
        f"\n[bold]{right} of {num_sums} right[/bold] · {timeline.num_iterations} iterations of "
        f"{timeline.mean_batch_size:.1f} requests · {tokens} tokens at {tokens / seconds:,.0f}/s",
        highlight=False,
    )
    return right == num_sums


def read_sum(output: RequestOutput) -> int:
    """Returns the number that the adder wrote: its digits come units first."""
    return int(output.text[::-1])


def _verdict(numbers: tuple[int, int], output: RequestOutput) -> str:
    a, b = numbers
    got, metrics = read_sum(output), output.metrics
    mark = "[green]✓[/green]" if got == a + b else f"[red]✗ it is {a + b}[/red]"
    return (
        f"{a:2d} + {b:2d} = {got:3d} {mark}  [dim]iterations {metrics.first_iteration} to "
        f"{metrics.last_iteration}[/dim]"
    )
