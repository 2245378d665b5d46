"""What a request's parameters become on the device: a record in every buffer, and lists in its row."""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from jorca.request import MAX_BANNED, MAX_LOGIT_BIAS, Request

RECORD: Final = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed_high", np.uint32),
        ("seed_low", np.uint32),
        ("num_prompt", np.int32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("min_position", np.int32),
        ("has_lists", np.int32),
    ]
)
"""The fields that a row of logits needs from the host, four bytes each."""

FIELDS: Final = tuple(RECORD.fields or ())


def _as_ints(*values: float) -> np.ndarray:
    """Returns a record by the bits of its fields, int32 [fields]."""
    return np.array(values, RECORD).reshape(1).view(np.int32)


GREEDY: Final = _as_ints(0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0)
"""The record of rows that sample nothing: greedy, and nothing changed."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowLists:
    """Lists that are written into a row's device state when its request is admitted.

    Attributes:
      bias_ids_k: Token ids whose logits are biased, int32; the rest points past the vocabulary.
      bias_k: What is added to them, float32.
      banned_ids_j: Token ids that `min_tokens` keeps away, int32; the rest points past the vocabulary.
    """

    bias_ids_k: np.ndarray
    bias_k: np.ndarray
    banned_ids_j: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class RequestRecord:
    """What packing needs of a request, made once.

    Attributes:
      sampling: Its record, by bits.
      lists: What goes into its row; None if it has no biases and bans nothing.
      prompt_ids: The prompt.
      wants_logprobs: Whether it wants log-probabilities of its output.
      wants_prompt_logprobs: Whether it wants those of its prompt.
    """

    sampling: np.ndarray
    lists: RowLists | None
    prompt_ids: tuple[int, ...]
    wants_logprobs: bool
    wants_prompt_logprobs: bool


def make_record(request: Request, *, stop_ids: frozenset[int], vocab_size: int) -> RequestRecord:
    """Returns the record of a request.

    Args:
      request: With its seed set.
      stop_ids: The tokens that end it: its own, and end-of-text unless it is ignored.
      vocab_size: Where list entries that are not used point, which is nowhere.
    """
    params, num_prompt = request.params, len(request.prompt_ids)
    assert params.seed is not None, "a request gets its seed when it is submitted"
    bias = dict(params.logit_bias)
    banned = sorted(stop_ids) if params.min_tokens else []
    lists = None
    if bias or banned:
        lists = RowLists(
            _padded(list(bias), MAX_LOGIT_BIAS, vocab_size, np.int32),
            _padded(list(bias.values()), MAX_LOGIT_BIAS, 0, np.float32),
            _padded(banned, MAX_BANNED, vocab_size, np.int32),
        )
    sampling = _as_ints(
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed >> 32,
        params.seed & 0xFFFFFFFF,
        num_prompt,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        num_prompt + params.min_tokens,
        lists is not None,
    )
    return RequestRecord(
        sampling,
        lists,
        request.prompt_ids,
        params.logprobs is not None,
        params.prompt_logprobs is not None,
    )


def _padded(values: list[int] | list[float], length: int, fill: int, dtype: type) -> np.ndarray:
    array = np.full(length, fill, dtype)
    array[: len(values)] = values
    return array
