"""How well a checkpoint predicts one part of a text, as the checkpoint computes; prints a JSON line.

python benchmarks/nats_per_byte.py checkpoints/shakespeare --data input.txt --part test
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from jorca.checkpoint.store import load_config, load_params
from jorca.frontend.text import Tokenizer
from jorca.training.data import read_parts
from jorca.training.evaluate import nats_per_byte


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), required=True, help="The text, in UTF-8.")
@click.option("--part", type=click.Choice(["train", "validation", "test"]), required=True)
@click.option("--validation-share", default=0.1, show_default=True, help="As in training.")
@click.option("--test-share", default=0.1, show_default=True, help="As in training.")
@click.option("--stride", type=int, help="Tokens by which the window moves.  [default: half a context]")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Default: as stored.")
def main(
    checkpoint: Path,
    data: Path,
    part: str,
    validation_share: float,
    test_share: float,
    stride: int | None,
    dtype: str | None,
) -> None:
    """Prints -log p of a part of a text, in nats per byte, by a sliding window."""
    config = load_config(checkpoint)
    config = dataclasses.replace(config, dtype=dtype or config.dtype)
    params = load_params(checkpoint, config)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    if tokenizer is None:
        raise click.UsageError(f"{checkpoint} has no tokenizer.json")
    text: bytes = getattr(read_parts(data, validation_share, test_share), part)
    token_ids = tokenizer.encode(text.decode("utf-8"))
    stride = config.max_positions // 2 if stride is None else stride
    with Progress(console=Console(stderr=True)) as bars:
        bar = bars.add_task(part, total=len(token_ids) - 1)
        nats = nats_per_byte(
            config, params, token_ids, len(text), stride=stride, advance=lambda n: bars.advance(bar, n)
        )
    line = {
        "checkpoint": str(checkpoint),
        "part": part,
        "bytes": len(text),
        "tokens": len(token_ids),
        "context": config.max_positions,
        "stride": stride,
        "dtype": config.dtype,
        "nats_per_byte": round(nats, 4),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
