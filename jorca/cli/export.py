"""`jorca export`: weights out."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def export() -> None:
    """Turns jorca checkpoints into those of other programs."""


@export.command("hf")
@click.argument("src", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
def hf(src: Path, dst: Path) -> None:
    """Writes the jorca checkpoint SRC to the folder DST as a GPT-2 that Hugging Face's transformers loads."""
    from jorca.checkpoint.export import export_hf

    notes = export_hf(src, dst)
    files = sorted(file.name for file in dst.iterdir())
    click.echo(f"{dst}: {', '.join(files)}")
    for note in notes:
        click.echo(note)
