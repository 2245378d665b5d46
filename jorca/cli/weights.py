"""`jorca convert` and `jorca inspect`: weights in, and what they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from jorca.checkpoint.foreign import Foreign
    from jorca.config import ModelConfig


def _source_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds what says how SRC is to be read."""
    options = [
        click.argument("src", type=click.Path(exists=True, path_type=Path)),
        click.option("--format", help="hf, nanogpt, mingpt or megatron.  [default: what SRC looks like]"),
        click.option("--num-heads", type=int, help="Attention heads, where the files do not say."),
        click.option("--activation", help="gelu_tanh or gelu_erf, if another than the format's."),
        click.option("--norm-epsilon", type=float, help="Of the LayerNorms, if another than the format's."),
        click.option("--vocab-size", type=int, help="Ids that are tokens; rows behind them are padding."),
        click.option("--eos-token-id", type=int, help="The token that ends a text."),
        click.option(
            "--rename",
            multiple=True,
            metavar="PATTERN=REPLACEMENT",
            help="Renames tensors and settings by a regular expression; repeatable, in order.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@_source_options
@click.argument("dst", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Default: as stored.")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, path_type=Path),
    help="tokenizer.json or a folder with a tokenizer, if not what lies beside the weights.",
)
@click.option("--overwrite", is_flag=True, help="Replaces the checkpoint at DST.")
def convert(
    src: Path,
    dst: Path,
    format: str | None,
    dtype: Any,
    tokenizer: Path | None,
    overwrite: bool,
    **options: Any,
) -> None:
    """Converts SRC, a PyTorch GPT of another program, to the folder DST.

    SRC is a folder or a file of Hugging Face's GPT-2, nanoGPT, minGPT or Megatron-LM. PyTorch is not needed,
    and nothing in SRC is run.
    """
    from jorca.checkpoint.load import save_foreign
    from jorca.checkpoint.store import check_destination

    check_destination(dst, overwrite=overwrite)
    foreign = _read(src, format, options)
    _show_foreign(foreign)
    config = save_foreign(
        foreign, dst, dtype=dtype, tokenizer=tokenizer, overwrite=overwrite, show_progress=sys.stderr.isatty()
    )
    click.echo(f"{dst}: {_weights(config)}")


@click.command()
@_source_options
@click.option("--tensors", is_flag=True, help="Lists every weight.")
def inspect(src: Path, format: str | None, tensors: bool, **options: Any) -> None:
    """Says what the checkpoint SRC is: a jorca checkpoint, or one that `jorca convert` reads."""
    from jorca.checkpoint.load import foreign_params
    from jorca.checkpoint.store import TOKENIZER_FILE, is_checkpoint, load_config
    from jorca.model.params import param_table

    if is_checkpoint(src):
        config = load_config(src)
        _show("jorca", config, has_tokenizer=(src / TOKENIZER_FILE).exists())
        if tensors:
            rows = ((name, info.shape, info.dtype) for name, info in param_table(config).items())
            _show_table(("weight", "shape", "dtype"), rows)
        return
    foreign = _read(src, format, options)
    _show_foreign(foreign)
    params = foreign_params(foreign)
    if tensors:
        rows = ((name, foreign.table[name].key, x.shape, x.dtype) for name, x in params.items())
        _show_table(("weight", "tensor", "shape", "dtype"), rows)


def _read(src: Path, format: str | None, options: dict[str, Any]) -> Foreign:
    from jorca.checkpoint.foreign import Overrides
    from jorca.checkpoint.formats import read_foreign

    rename = tuple(_pair(text) for text in options.pop("rename"))
    return read_foreign(src, format=format, overrides=Overrides(rename=rename, **options))


def _pair(text: str) -> tuple[str, str]:
    pattern, equals, replacement = text.rpartition("=")  # a pattern may hold one
    if not equals:
        raise click.UsageError(f"--rename needs PATTERN=REPLACEMENT, got {text!r}")
    return pattern, replacement


def _show_foreign(foreign: Foreign) -> None:
    files = (
        foreign.files if len(foreign.files) <= 4 else (*foreign.files[:3], f"{len(foreign.files) - 3} more")
    )
    names = ", ".join(str(getattr(file, "name", file)) for file in files)
    _show(f"{foreign.format} ({names})", foreign.config, foreign.tokenizer is not None, foreign.notes)


def _show(format: str, config: ModelConfig, has_tokenizer: bool, notes: tuple[str, ...] = ()) -> None:
    padded = config.padded_vocab_size or 0
    padding = f" and {padded - config.vocab_size} rows of padding" if padded > config.vocab_size else ""
    eos = "none" if config.eos_token_id is None else config.eos_token_id
    scores = " * ".join(
        ["1 / sqrt(head width)"] * config.scale_attention
        + ["1 / (layer + 1)"] * config.scale_attention_by_inverse_layer
    )
    rows = [
        ("format", format),
        ("weights", _weights(config)),
        (
            "layers",
            f"{config.num_layers}, width {config.d_model}, {config.num_heads} heads, "
            f"feed-forward width {config.d_ff}, {config.activation}",
        ),
        ("positions", f"{config.max_positions:,}"),
        ("vocabulary", f"{config.vocab_size:,} tokens{padding}; end of text: {eos}"),
        ("head", "the embedding" if config.tie_embeddings else "of its own"),
        ("biases", "yes" if config.use_bias else "no"),
        ("norm epsilon", f"{config.norm_epsilon:g}"),
        ("scores times", scores or "1"),
        ("tokenizer", "yes" if has_tokenizer else "no"),
        *(("note", note) for note in notes),
    ]
    _show_table(("", ""), rows, header=False)


def _show_table(columns: tuple[str, ...], rows: Any, *, header: bool = True) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=header)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    Console(markup=False, highlight=False).print(table)


def _weights(config: ModelConfig) -> str:
    from rich.filesize import decimal

    from jorca.model.params import num_params, param_bytes

    return f"{num_params(config):,}, {config.dtype}, {decimal(param_bytes(config))}"
