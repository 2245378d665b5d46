"""`jorca demo`: texts that stream side by side, then a few dozen sums of different age, served at once."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, Final

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from jorca.engine.llm import LLM
from jorca.output import RequestOutput
from jorca.request import SamplingParams
from jorca.timeline import Timeline

PROMPTS: Final = {
    "ROMEO:\n": 24,
    "JULIET:\nO": 36,
    "GREMIO:\nNow": 30,
    "Nurse:\n": 16,
    "MENENIUS:\nWhat": 24,
    "Good night": 26,
}
"""What the text model goes on from, and by how many tokens at most."""

_READABLE_PACE_S: Final = 0.04
"""Least time of an iteration on a terminal: at full speed, nobody could read along."""


def stream_texts(path: Path, console: Console, **options: Any) -> None:
    """Streams a text from each of `PROMPTS`, a new one every other iteration, at most four at once.

    Args:
      path: A checkpoint with a tokenizer.
      console: Where to print. A terminal sees the texts grow, anything else what they came to.
      **options: More engine options: stages, tensor, compilation_cache_dir.
    """
    console.print(
        f"[bold]jorca[/bold]: {len(PROMPTS)} texts, at most 4 in an iteration, from [bold]{path}[/bold]"
    )
    llm = LLM(
        path,
        max_batch_size=4,
        max_batch_tokens=64,
        min_bucket=4,
        bucket_ratio=4,
        seed=0,
        **options,
    )
    timeline = Timeline()
    llm.engine.observe(timeline)
    texts: dict[str, Text] = {}
    coming = list(enumerate(PROMPTS.items()))
    num_tokens, working_s = 0, 0.0
    with Live(_side_by_side(texts), console=console, refresh_per_second=25) as live:
        while coming or llm.has_work:
            if coming and timeline.num_iterations >= 2 * coming[0][0]:
                number, (prompt, max_tokens) = coming.pop(0)
                params = SamplingParams(max_tokens=max_tokens, temperature=0.7, top_p=0.95, seed=number)
                request_id = llm.submit(prompt, params, request_id=str(number))
                timeline.submitted(request_id)
                texts[request_id] = Text(prompt, "bold")
            started_s = time.perf_counter()
            outputs = llm.step()
            working_s += time.perf_counter() - started_s
            for output in outputs:
                num_tokens += len(output.new_token_ids)
                texts[output.request_id].append(output.new_text, "not bold")
            live.update(_side_by_side(texts))
            if console.is_terminal:
                time.sleep(max(0.0, _READABLE_PACE_S - (time.perf_counter() - started_s)))
    console.print()
    console.print(
        timeline.picture(
            lambda request_id: list(PROMPTS)[int(request_id)].partition("\n")[0],
            lambda output: f"{len(output.token_ids)} tokens",
            console.width,
        )
    )
    pace = f" (slowed to {1 / _READABLE_PACE_S:.0f} iterations/s, to be read)" if console.is_terminal else ""
    console.print(
        f"\n[bold]{timeline.num_iterations} iterations[/bold] of {timeline.mean_batch_size:.1f} texts · "
        f"{num_tokens} tokens at {num_tokens / working_s:,.0f}/s{pace}\n",
        highlight=False,
    )


def _side_by_side(texts: dict[str, Text]) -> Columns:
    """Draws the texts as boxes beside each other, as many in a row as fit."""
    return Columns([Panel(text, width=38, height=9, padding=(0, 1)) for text in texts.values()])


def answer_sums(
    path: Path,
    console: Console,
    *,
    num_sums: int = 40,
    seed: int = 0,
    **options: Any,
) -> bool:
    """Serves random sums that arrive while others run, and draws how they shared iterations.

    Args:
      path: The adder's checkpoint.
      console: Where to print.
      num_sums: How many sums.
      seed: Of the sums and of their arrivals, which come 0 to 4 per iteration.
      **options: More engine options: stages, tensor, compilation_cache_dir.

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
        **options,
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
