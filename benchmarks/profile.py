"""Where the time of an iteration goes on a CPU: milliseconds by part of the compiled step.

Runs one kind of iteration under JAX's profiler, which times every operation of the program, and adds these
up by the names that the model gives to its parts. Prints a JSON line for each kind.

    python benchmarks/profile.py --model gpt2 --dtype bfloat16
"""

from __future__ import annotations

import collections
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click
import jax
import numpy as np

from jorca.bench.machine import machine_facts
from jorca.bench.steps import Steps
from jorca.bench.workload import load_model
from jorca.scheduler import Item

PARTS = {  # the first that matches the name of an operation with the paths of its scopes
    "products of a single row": r"^dot[.\d]* *$",  # XLA drops their scopes
    "attention: walk over the KV array": r"attend/.*while",
    "attention: writing keys and values, the rest": r"attend/",
    "mlp: products": r"mlp/.*dot_general",
    "mlp: GELU, norm, sums": r"mlp/",
    "attention: products": r"attention/.*dot_general",
    "attention: norm, sums": r"attention/",
    "head": r"head/",
}
OTHER = "embedding, sampling, the rest"


def part_of(operation: str) -> str:
    """Returns the part that an operation, its name and its scopes, belongs to."""
    return next((part for part, pattern in PARTS.items() if re.search(pattern, operation)), OTHER)


def scopes_by_operation(program_text: str) -> dict[str, str]:
    """Returns the scopes of every operation by its name; of a fusion, also those of what is fused."""
    inside = {
        name: " ".join(re.findall(r'op_name="([^"]*)"', body))
        for name, body in re.findall(r"^%?(\S+) \(.*?\{\n(.*?)^\}", program_text, re.MULTILINE | re.DOTALL)
    }
    scopes = {}
    for name, rest in re.findall(r"^\s+(?:ROOT )?%?(\S+) = (.*)$", program_text, re.MULTILINE):
        own = re.findall(r'op_name="([^"]*)"', rest)
        called = re.findall(r"(?:calls|to_apply)=%?([^\s,]+)", rest)
        scopes[name] = " ".join(own + [inside.get(computation, "") for computation in called])
    return scopes


def self_times_ns(events: Iterable[tuple[float, float, str]]) -> Iterator[tuple[str, float]]:
    """Yields the name of each event with its duration, less that of the events within it.

    Args:
      events: Start, duration and name of what ran on one thread.
    """
    open_events: list[list] = []  # end, own time, name
    for start, duration, name in sorted(events, key=lambda event: (event[0], -event[1])):
        while open_events and open_events[-1][0] <= start:
            _, own, done = open_events.pop()
            yield done, own
        if open_events:
            open_events[-1][1] -= duration
        open_events.append([start + duration, duration, name])
    for _, own, done in open_events:
        yield done, own


def profile(steps: Steps, items: list[Item], repeats: int) -> dict[str, float]:
    """Returns the milliseconds of each part of an iteration, summed over the threads that ran it."""
    scopes = scopes_by_operation(steps.program_text(items))
    times_ns: dict[str, float] = collections.defaultdict(float)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                steps.run(items)
        (file,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                mine = [(e.start_ns, e.duration_ns, e.name) for e in line.events if e.name in scopes]
                for name, own_ns in self_times_ns(mine):
                    times_ns[part_of(f"{name} {scopes[name]}")] += own_ns
    ordered = sorted(times_ns.items(), key=lambda entry: -entry[1])
    return {part: round(ns / repeats / 1e6, 2) for part, ns in ordered}


def kinds(steps: Steps, vocab_size: int) -> Mapping[str, list[Item]]:
    """Returns iterations: 32 decodes at lengths 32 to 600, one decode at 300, a prompt of 512."""
    rng = np.random.default_rng(0)

    def item(number: int, start: int, num_tokens: int) -> Item:
        return steps.item(number, start, rng.integers(vocab_size, size=num_tokens).tolist(), number * 10)

    lengths = rng.integers(32, 600, 32).tolist()
    return {
        "32 decodes": [item(i, length - 1, 1) for i, length in enumerate(lengths)],
        "1 decode": [item(0, 299, 1)],
        "prompt of 512": [item(0, 0, 512)],
    }


@click.command()
@click.option("--model", default="gpt2", show_default=True, help="A preset's name, or a checkpoint.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]))
@click.option("--repeats", default=10, show_default=True)
def main(model: str, dtype: str | None, repeats: int) -> None:
    """Profiles three kinds of iteration."""
    config, params = load_model(model, dtype)
    print(json.dumps({"model": model, "dtype": config.dtype} | machine_facts()), flush=True)
    sizes = {"max_batch_size": 32, "max_batch_tokens": 512, "num_pages": 320, "page_size": 64}
    steps = Steps(config, params, min_bucket=1, bucket_ratio=32.0, **sizes)
    for kind, items in kinds(steps, config.vocab_size).items():
        steps.run(items)
        times_s = []
        for _ in range(repeats):
            begin_s = time.perf_counter()
            steps.run(items)
            times_s.append(time.perf_counter() - begin_s)
        line = {"iteration": kind, "ms": round(1e3 * statistics.median(times_s), 2)}
        print(json.dumps(line | {"parts_ms": profile(steps, items, repeats)}), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
