"""`jorca train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from jorca.training.config import TrainConfig

_HELP: Final = {
    "vocab_size": "Tokens of the byte-level BPE that is trained on the training part.",
    "layers": "Transformer blocks.",
    "heads": "Attention heads; divides the width.",
    "width": "Model width.",
    "context": "Tokens of a window.",
    "batch_size": "Windows in a step.",
    "steps": "Updates in all.",
    "learning_rate": "The highest, after the warm-up.",
    "warmup_steps": "Updates over which the learning rate rises.",
    "weight_decay": "AdamW's, on matrices alone.",
    "clip_norm": "Longest gradient.",
    "dropout": "Share of numbers that are dropped; 0 for none.",
    "seed": "Of weights, batches and dropout.",
    "dtype": "In which the model computes: float32 or bfloat16.",
    "save_dtype": "Of the model that comes out; float16, too.",
    "validation_share": "Share of the text before the test part, on which the best weights are chosen.",
    "test_share": "Share at the text's end that is never read.",
    "eval_every": "Updates between two looks at the validation part.",
    "checkpoint_every": "Updates between two resumable checkpoints.",
    "data_parallel": "Devices over which a batch is split.",
    "tensor": "Devices over which the weights are split.",
}
"""Field of `TrainConfig` -> what its option says."""


def _config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds an option for each field of the config; one that is not given stays None."""
    for field in reversed(dataclasses.fields(TrainConfig)):
        default = "that of --dtype" if field.default is None else field.default
        command = click.option(
            f"--{field.name.replace('_', '-')}",
            type=str if field.default is None else type(field.default),
            help=f"{_HELP[field.name]}  [default: {default}]",
        )(command)
    return command


@click.command()
@click.option("--data", type=click.Path(path_type=Path), required=True, help="The text, in UTF-8.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The run's folder.")
@click.option("--resume", is_flag=True, help="Goes on where OUT was interrupted, with the options it has.")
@click.option(
    "--tokenizer",
    "tokenizer_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A tokenizer.json, instead of training one.",
)
@_config_options
def train(data: Path, out: Path, resume: bool, tokenizer_file: Path | None, **options: Any) -> None:
    """Trains a GPT on a text.

    The text's last part is never read, and the part before it only to choose the best weights. OUT/model is
    the best model so far, for `jorca generate`; OUT/state is where --resume goes on; OUT/loss.png is the loss
    curve.
    """
    from rich.console import Console

    from jorca.training import loop

    given = {name: value for name, value in options.items() if value is not None}
    if resume:
        if tokenizer_file is not None:
            raise click.UsageError("--resume goes on with the run's own tokenizer; leave --tokenizer out")
        loop.resume(data, out, given, console=Console())
        return
    tokenizer = None
    if tokenizer_file is not None:
        import tokenizers

        if "vocab_size" in given:
            raise click.UsageError("--tokenizer has its own vocabulary; leave --vocab-size out")
        tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
        given["vocab_size"] = tokenizer.get_vocab_size()
    loop.train(TrainConfig(**given), data, out, tokenizer=tokenizer, console=Console())
