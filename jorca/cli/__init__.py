"""The `jorca` command. JAX is imported inside the commands, so that `jorca --help` answers at once."""

from __future__ import annotations

import logging
from typing import Any

import click

from jorca import __version__
from jorca.cli.bench import bench
from jorca.cli.export import export
from jorca.cli.generate import generate
from jorca.cli.show import demo, doctor
from jorca.cli.train import train
from jorca.cli.weights import convert, inspect
from jorca.cli.worker import worker
from jorca.request import JorcaError


class _Commands(click.Group):
    """Prints jorca's own errors as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except JorcaError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="jorca")
@click.option("-v", "--verbose", count=True, help="Log what the engine does; twice for every iteration.")
def main(verbose: int) -> None:
    """Serves GPT models iteration by iteration, after Orca (OSDI 2022)."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("jorca").setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])


for command in (generate, worker, demo, convert, inspect, export, train, bench, doctor):
    main.add_command(command)
