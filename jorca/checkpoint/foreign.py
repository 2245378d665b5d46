"""What every reader of a foreign format gives: the checkpoint described and mapped, nothing converted yet."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jorca.checkpoint.convert import Table
from jorca.checkpoint.errors import CheckpointError
from jorca.config import Activation, ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Overrides:
    """What the user knows better than the files. None leaves a field to the format.

    Attributes:
      num_heads: Attention heads.
      activation: The feed-forward part's.
      norm_epsilon: Added to the variance in every LayerNorm.
      vocab_size: Ids that are tokens; rows of the embedding behind them are padding.
      eos_token_id: The end-of-text token.
      rename: Pairs of a regular expression and its replacement, applied in order by `re.sub` to the names of
        tensors and to the keys of recorded settings, before anything looks at them.
    """

    num_heads: int | None = None
    activation: Activation | None = None
    norm_epsilon: float | None = None
    vocab_size: int | None = None
    eos_token_id: int | None = None
    rename: Sequence[tuple[str, str]] = ()

    def renamed(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the mapping under its new names.

        Raises:
          CheckpointError: Two names become one, or a pattern is no regular expression.
        """
        result: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for key, value in mapping.items():
            name = key
            for pattern, replacement in self.rename:
                try:
                    name = re.sub(pattern, replacement, name)
                except re.error as error:
                    raise CheckpointError(
                        f"rename: {pattern!r} to {replacement!r} is no regular expression with its "
                        f"replacement ({error})"
                    ) from error
            if name in result:
                raise CheckpointError(f"rename makes {name!r} of both {origin[name]!r} and {key!r}")
            result[name], origin[name] = value, key
        return result


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """A checkpoint of another program.

    Attributes:
      format: The name of its format.
      files: What was read.
      config: The model; its dtype is that of the tensors if they have one in common, else "float32".
      tensors: The tensors by their names there, free of prefixes: memory-mapped where the format allows.
      table: Where every parameter of `config` comes from.
      ignored: Names in `tensors` that carry no weights.
      tokenizer: The text of a `tokenizer.json`, or None if no tokenizer lies there.
      notes: What a user should know: what was assumed, left out or overridden; a line each.
    """

    format: str
    files: tuple[Path, ...]
    config: ModelConfig
    tensors: Mapping[str, Any]
    table: Table
    ignored: frozenset[str] = frozenset()
    tokenizer: str | None = None
    notes: tuple[str, ...] = ()


class Format(Protocol):
    """One foreign format."""

    name: str

    def recognises(self, path: Path) -> bool:
        """Returns whether the file or folder looks like this format, by cheap signs; raises nothing."""
        ...

    def read(self, path: Path, overrides: Overrides) -> Foreign:
        """Reads all but the weights' bytes.

        Raises:
          CheckpointError: It is not of this format, is damaged, or lacks what the model needs.
        """
        ...
