"""From a text to batches: its three parts, its windows, and grain's pipeline over them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import grain
import numpy as np
import tokenizers
from jaxtyping import Int

from jorca.frontend.text import Tokenizer
from jorca.training.errors import TrainingError


@dataclasses.dataclass(frozen=True, slots=True)
class TextParts:
    """A text in three consecutive parts, in UTF-8.

    Attributes:
      train: What the weights and the tokenizer learn from.
      validation: What choices are made on.
      test: What nobody looks at before the end.
    """

    train: bytes
    validation: bytes
    test: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of what training reads, in hex."""
        return hashlib.sha256(self.train + self.validation).hexdigest()


def read_parts(path: str | Path, validation_share: float, test_share: float) -> TextParts:
    """Reads a text and cuts it; a cut inside a character moves to that character's start.

    Args:
      path: A file in UTF-8.
      validation_share: Share of its bytes before the test part, above 0.
      test_share: Share of its bytes at the end, at least 0; together below 1.

    Raises:
      TrainingError: The file cannot be read, is no UTF-8, or is too short to be cut.
    """
    try:
        text = Path(path).read_bytes()
        text.decode("utf-8")
    except OSError as error:
        raise TrainingError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise TrainingError(f"{path}: is not UTF-8 (byte {error.start}); convert it first") from error
    end = _character_start(text, len(text) - math.ceil(test_share * len(text)))
    middle = _character_start(text, end - math.ceil(validation_share * len(text)))
    parts = TextParts(text[:middle], text[middle:end], text[end:])
    if not parts.train or not parts.validation:
        raise TrainingError(f"{path}: {len(text)} bytes are too few for a training and a validation part")
    return parts


def _character_start(text: bytes, at: int) -> int:
    """Returns the start of the UTF-8 character that holds the byte `at`."""
    at = max(at, 0)
    while 0 < at < len(text) and text[at] & 0b1100_0000 == 0b1000_0000:
        at -= 1
    return at


@dataclasses.dataclass(frozen=True, slots=True)
class Corpus:
    """What training reads of a text, as tokens.

    Attributes:
      train_ids: The training part's tokens.
      validation_ids: The validation part's tokens.
      validation_bytes: The validation part's length.
      bytes_per_token: How long a token of the training part is on average.
    """

    train_ids: Int[np.ndarray, " T"]
    validation_ids: Int[np.ndarray, " U"]
    validation_bytes: int
    bytes_per_token: float

    @classmethod
    def encode(cls, parts: TextParts, tokenizer: tokenizers.Tokenizer) -> Self:
        """Returns training and validation part in a tokenizer's tokens.

        Raises:
          RequestRejected: Part of the text has no token.
        """
        train_ids, validation_ids = (
            np.array(Tokenizer(tokenizer).encode(part.decode("utf-8")), np.int32)
            for part in (parts.train, parts.validation)
        )
        bytes_per_token = len(parts.train) / len(train_ids)
        return cls(train_ids, validation_ids, len(parts.validation), bytes_per_token)


class Windows:
    """All runs of `size` consecutive tokens, one starting at each token: a source for grain.

    Args:
      token_ids: The tokens, int32 [T] with T >= size.
      size: Tokens in a window.
    """

    def __init__(self, token_ids: Int[np.ndarray, " T"], size: int):
        self._token_ids = token_ids
        self._size = size

    def __len__(self) -> int:
        """Returns the number of windows, T - size + 1."""
        return len(self._token_ids) - self._size + 1

    def __getitem__(self, index: int) -> Int[np.ndarray, " size"]:
        """Returns the window that starts at token `index`."""
        return self._token_ids[index : index + self._size]


def batches(
    token_ids: Sequence[int] | Int[np.ndarray, " T"], context: int, batch_size: int, seed: int
) -> grain.DatasetIterator:
    """Returns an endless iterator over batches of windows, int32 [batch_size, context + 1].

    Every window comes once in each pass over the text, in an order that follows from seed and pass. The
    position is the iterator's `get_state()`, plain JSON; `set_state` goes on from there.

    Args:
      token_ids: The training part's tokens.
      context: Tokens that are fed; one more is the last target.
      batch_size: Windows in a batch.
      seed: From 0 up to 2**32 - 1.

    Raises:
      TrainingError: The text has no whole window.
    """
    if len(token_ids) <= context:
        raise TrainingError(
            f"the training part has {len(token_ids)} tokens, and a window needs {context + 1}: "
            "take a longer text or a smaller context"
        )
    windows = Windows(np.asarray(token_ids, np.int32), context + 1)
    dataset = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
    in_memory = grain.ReadOptions(num_threads=0)
    return iter(dataset.to_iter_dataset(in_memory).batch(batch_size))
