"""`jorca bench`: the paper's measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from jorca.cli.options import hosts_options, local_engine_options


@click.group()
def bench() -> None:
    """Measures, after the paper's protocols; prints JSON lines."""


@bench.command("trace")
@click.option("--model", default="small", show_default=True, help="small, a preset's name, or a checkpoint.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of random weights.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(["orca", "request-level", "shortest-prompt"]),
    default=["orca", "request-level", "shortest-prompt"],
    show_default=True,
    help="shortest-prompt is request-level with FasterTransformer's first pass.",
)
@click.option("--max-batch-size", "sizes", type=int, multiple=True, default=[8, 32], show_default=True)
@click.option("--max-batch-tokens", type=int, help="Most tokens in one iteration.")
@click.option(
    "--input-tokens", type=int, nargs=2, help="Shortest, longest prompt.  [default: 32 512; small: 8 64]"
)
@click.option(
    "--output-tokens", type=int, nargs=2, help="Fewest, most generated.  [default: 1 128; small: 1 32]"
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--closed", is_flag=True, help="All requests arrive at once; prints tokens/s for each engine.")
@click.option("--num-requests", type=click.IntRange(1), help="With --closed.  [default: 32]")
@click.option(
    "--rate",
    "rates",
    type=click.FloatRange(0, min_open=True),
    multiple=True,
    help="Requests/s that arrive.  [default: shares of the most that the engine can do]",
)
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), help="Of arrivals at each rate.  [default: 3]"
)
@click.option("--target-ms", type=float, help="Where to compare.  [default: 3 times that of a lone request]")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draws the figure; needs matplotlib."
)
@hosts_options
def bench_trace(policies: tuple[str, ...], sizes: tuple[int, ...], **options: Any) -> None:
    """Measures latency against throughput as the paper's figure 10 does, orca beside request-level.

    With --coordinator, each process runs this same command, for one policy and one batch size.
    """
    from jorca.bench.trace import run

    run([(policy, size) for policy in policies for size in sizes], **options)


@bench.command("iteration")
@click.option("--model", default="gpt2", show_default=True, help="small, a preset's name, or a checkpoint.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of random weights.")
@click.option(
    "--batch-size",
    "batch_sizes",
    type=click.IntRange(1),
    multiple=True,
    default=[1, 2, 4, 8, 16, 32],
    show_default=True,
)
@click.option("--input-tokens", type=click.IntRange(2), multiple=True, default=[32, 128], show_default=True)
@click.option("--output-tokens", type=click.IntRange(2), default=32, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Timed runs of each.")
@click.option("--full-context", is_flag=True, help="The baseline reserves a full context for each request.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draws the figure; needs matplotlib."
)
@click.option(
    "--table", type=click.Path(dir_okay=False, path_type=Path), help="Writes what iterations cost, instead."
)
@local_engine_options
def bench_iteration(**options: Any) -> None:
    """Times batches of like requests without a scheduler, as the paper's figure 9 does.

    Selective batching runs beside one padded batch with batched attention. With --table, iterations of all
    kinds are timed instead, and a table of their costs is written; the engine's options say which can be.
    """
    from jorca.bench.iteration import run

    run(**options)


@bench.command("pipeline")
@click.option("--model", default="small", show_default=True, help="small, a preset's name, or a checkpoint.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of random weights.")
@click.option("--input-tokens", type=click.IntRange(1), default=32, show_default=True)
@click.option("--output-tokens", type=click.IntRange(2), default=32, show_default=True)
@click.option("--num-requests", type=click.IntRange(1), help="[default: a full batch for each stage]")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draws the figure; needs matplotlib."
)
@local_engine_options
def bench_pipeline(**options: Any) -> None:
    """Shows which stage ran which iteration when.

    On a machine without GPUs, JAX_NUM_CPU_DEVICES=4 makes four devices of the processor, which share its
    cores.
    """
    from jorca.bench.pipeline import run

    run(**options)
