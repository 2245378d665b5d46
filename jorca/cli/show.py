"""`jorca demo` and `jorca doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from jorca.cli.options import given, mesh_options


@click.command()
@click.option(
    "--texts",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("checkpoints/shakespeare"),
    show_default=True,
    help="A checkpoint that writes text.",
)
@click.option(
    "--sums",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("checkpoints/adder"),
    show_default=True,
    help="The adder.",
)
@click.option("--num-sums", type=click.IntRange(1), default=40, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the sums.")
@mesh_options
@click.pass_context
def demo(ctx: click.Context, texts: Path, sums: Path, num_sums: int, seed: int, **options: Any) -> None:
    """Streams several texts side by side, serves a few dozen sums, and draws how they shared iterations.

    --tensor must divide the heads of both models: the two that come with jorca have 4 and 3.
    """
    from rich.console import Console

    from jorca.demo import answer_sums, stream_texts

    console = Console()
    stream_texts(texts, console, **given(options))
    if not answer_sums(sums, console, num_sums=num_sums, seed=seed, **given(options)):
        ctx.exit(1)


@click.command()
@click.pass_context
def doctor(ctx: click.Context) -> None:
    """Prints versions and devices, says which attention runs and why, and checks it against the reference."""
    from rich.console import Console

    from jorca.doctor import run_doctor

    if not run_doctor(Console()):
        ctx.exit(1)
