"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import platformdirs

compilation_cache_option = click.option(
    "--compilation-cache-dir",
    default=str(Path(platformdirs.user_cache_dir("jorca")) / "xla"),
    show_default=True,
    help="Where compiled programs are kept for the next start.",
)


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of the engine, named as the fields of the configs."""
    options = [
        click.option("--max-batch-size", type=int, help="Most requests in one iteration.  [default: 8]"),
        click.option("--max-batch-tokens", type=int, help="Most tokens in one iteration."),
        click.option("--min-bucket", type=int, help="Smallest compiled batch, in tokens.  [default: 1]"),
        click.option("--page-size", type=int, help="Token positions in a KV page.  [default: 64]"),
        click.option("--num-pages", type=int, help="Pages of the KV array."),
        click.option("--kv-memory-bytes", type=int, help="Bytes of the KV array, instead of --num-pages."),
        click.option("--attention", help="auto, xla, mosaic, triton or reference.  [default: auto]"),
        compilation_cache_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command
