"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import platformdirs

from jorca.config import ATTENTIONS

compilation_cache_option = click.option(
    "--compilation-cache-dir",
    default=str(Path(platformdirs.user_cache_dir("jorca")) / "xla"),
    show_default=True,
    help="Where compiled programs are kept for the next start.",
)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that were given; the configs know the defaults of the others."""
    return {name: value for name, value in options.items() if value is not None}


_MESH = (
    click.option("--stages", type=int, help="Pipeline stages.  [default: 1]"),
    click.option("--tensor", type=int, help="Devices that share each layer of a stage.  [default: 1]"),
)
_HOSTS = (
    click.option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Where the processes of several hosts meet; auto under Slurm, Kubernetes, Open MPI.",
    ),
    click.option("--num-processes", type=int, help="Processes in all.  [default: JAX finds out]"),
    click.option("--process-id", type=int, help="Which one this is, from 0.  [default: JAX finds out]"),
    click.option(
        "--control",
        metavar="HOST:PORT",
        help="Where process 0 takes control messages.  [default: the port behind --coordinator]",
    ),
    click.option("--secret-file", help="A file of random bytes that all processes have the same of."),
    click.option("--heartbeat-s", type=float, help="Seconds between signs of life.  [default: 5]"),
    click.option("--start-timeout-s", type=float, help="Seconds to wait for each other.  [default: 300]"),
    click.option(
        "--iteration-timeout-s", type=float, help="Seconds before an iteration hangs.  [default: 300]"
    ),
)
_ENGINE = (
    click.option("--max-batch-size", type=int, help="Most requests in one iteration.  [default: 8]"),
    click.option("--max-batch-tokens", type=int, help="Most tokens in one iteration."),
    click.option("--min-bucket", type=int, help="Smallest compiled batch, in tokens.  [default: 1]"),
    click.option("--page-size", type=int, help="Token positions in a KV page.  [default: 64]"),
    click.option("--num-pages", type=int, help="Pages of the KV array."),
    click.option("--kv-memory-bytes", type=int, help="Bytes of the KV array, instead of --num-pages."),
    click.option("--attention", help=f"auto, {', '.join(ATTENTIONS)}.  [default: auto]"),
)

Command = Callable[..., None]


def mesh_options(command: Command) -> Command:
    """Adds the options of a mesh in one process, named as the fields of the configs."""
    return _with(command, *_MESH, compilation_cache_option)


def hosts_options(command: Command) -> Command:
    """Adds the options of a mesh in one process or several."""
    return _with(command, *_MESH, *_HOSTS, compilation_cache_option)


def local_engine_options(command: Command) -> Command:
    """Adds the options of an engine in one process."""
    return _with(command, *_ENGINE, *_MESH, compilation_cache_option)


def engine_options(command: Command) -> Command:
    """Adds all options of an engine."""
    return _with(command, *_ENGINE, *_MESH, *_HOSTS, compilation_cache_option)


def _with(command: Command, *options: Callable[[Command], Command]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
