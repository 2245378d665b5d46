"""The foreign formats, which of them a path is, and what lies there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.foreign import Foreign, Format, Overrides
from jorca.checkpoint.huggingface import HuggingFace
from jorca.checkpoint.megatron import Megatron
from jorca.checkpoint.mingpt import MinGPT
from jorca.checkpoint.nanogpt import NanoGPT
from jorca.checkpoint.pytorch import read_pytorch
from jorca.checkpoint.store import is_checkpoint

FORMATS: Final[tuple[Format, ...]] = (HuggingFace(), NanoGPT(), MinGPT(), Megatron())
FORMAT_NAMES: Final = tuple(format.name for format in FORMATS)

_LOOKED_FOR: Final = """\
  jorca: config.json of its own beside params/
  hf: model.safetensors or pytorch_model.bin, or either's .index.json, beside config.json
  nanogpt: ckpt.pt, or a file that holds model and model_args
  mingpt: model.pt, or a file that holds a bare state dict
  megatron: mp_rank_XX[_YYY]/model_optim_rng.pt"""


def detect(path: str | Path) -> Format:
    """Returns the one format that a file or folder looks like.

    Raises:
      CheckpointError: No format fits, or several do.
    """
    path = Path(path)
    if is_checkpoint(path):
        raise CheckpointError(f"{path}: is a jorca checkpoint, which needs no converting")
    fitting = [format for format in FORMATS if format.recognises(path)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = " and ".join(format.name for format in fitting)
        raise CheckpointError(f"{path}: may be {names}; say which with format, or name the file")
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist")
    if path.is_file():
        read_pytorch(path)  # which says what is wrong with a damaged file
    raise CheckpointError(
        f"{path}: is not a jorca checkpoint, nor anything that `jorca convert` knows. Looked for\n"
        f"{_LOOKED_FOR}\n"
        "format says what it is if files have other names"
    )


def read_foreign(
    path: str | Path, *, format: str | None = None, overrides: Overrides | None = None
) -> Foreign:
    """Describes and maps the checkpoint of another program; converts nothing yet.

    Args:
      path: A file or folder. It must stay as it is while the tensors are in use.
      format: One of `FORMAT_NAMES`; None detects it.
      overrides: What the user knows better than the files.

    Raises:
      CheckpointError: The format is unknown, or the checkpoint is damaged or lacks what the model needs.
    """
    path = Path(path)
    if format is None:
        reader = detect(path)
    elif format in FORMAT_NAMES:
        reader = FORMATS[FORMAT_NAMES.index(format)]
    else:
        raise CheckpointError(f"format must be one of {', '.join(FORMAT_NAMES)}, got {format!r}")
    foreign = reader.read(path, Overrides() if overrides is None else overrides)
    return dataclasses.replace(foreign, notes=(*foreign.notes, *_tokenizer_notes(foreign)))


def _tokenizer_notes(foreign: Foreign) -> Iterator[str]:
    """Says it if tokenizer and model have different vocabularies."""
    if foreign.tokenizer is None:
        return
    num_ids = 1 + max(Tokenizer.from_str(foreign.tokenizer).get_vocab().values(), default=-1)
    vocab_size = foreign.config.vocab_size
    if num_ids < vocab_size:
        yield (
            f"the tokenizer has {num_ids} ids, the model {vocab_size}; if the others are padding, vocab_size "
            f"{num_ids} keeps them from being sampled"
        )
    if num_ids > vocab_size:
        yield f"the tokenizer has {num_ids} ids, the model {vocab_size}; prompts that need others are refused"
