"""A byte-level BPE of a text's own (Sennrich et al., 2016; on bytes as in GPT-2, Radford et al., 2019)."""

from __future__ import annotations

from typing import Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jorca.config import ConfigError

_NUM_BYTES: Final = 256


def train_tokenizer(text: str, vocab_size: int) -> tokenizers.Tokenizer:
    """Learns a vocabulary: the 256 bytes, and the merges of neighbours that the text has most.

    Words are split as GPT-2's are, and no token is special. Every text has tokens, since every byte has one.

    Args:
      text: What to learn from: the training part, and nothing that results are measured on.
      vocab_size: Tokens in all, from 256 up to what the text has merges for.

    Raises:
      ConfigError: The text has too few merges for `vocab_size`, or that is too small for the bytes.
    """
    if vocab_size < _NUM_BYTES:
        raise ConfigError(f"vocab_size must be at least {_NUM_BYTES}, one for each byte, got {vocab_size}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    if (most := tokenizer.get_vocab_size()) < vocab_size:
        raise ConfigError(
            f"vocab_size must be at most {most}, for which this text has merges, got {vocab_size}"
        )
    return tokenizer
