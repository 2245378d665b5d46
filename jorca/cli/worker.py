"""`jorca worker`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from jorca.cli.options import engine_options, given


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@engine_options
def worker(checkpoint: Path, **options: Any) -> None:
    """Works for process 0, which runs another command with the same CHECKPOINT and the same options.

    Any command that runs a model does that in processes other than 0; this one has nothing else to do. It
    exits with 0 when process 0 is done, with 70 if it fails itself, and with 75 if another process is lost:
    then all of them exit, and are to be started again.
    """
    from jorca.config import ConfigError, EngineConfig
    from jorca.engine.llm import LLM

    hosts = EngineConfig.from_options(**given(options)).hosts
    if hosts.coordinator is None or hosts.process_id == 0:
        raise ConfigError(
            "a worker needs --coordinator, and a --process-id other than 0 unless JAX finds it, "
            f"got {hosts.coordinator} and {hosts.process_id}"
        )
    LLM(checkpoint, **given(options))
    raise ConfigError(
        "this is process 0, which cannot be a worker; start the command here that needs workers"
    )
