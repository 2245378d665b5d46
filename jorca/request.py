"""The nouns that every part of jorca shares: what is asked, how it may end, what is refused.

Nothing here imports JAX. A `Request` is immutable input; the scheduler keeps its progress as
counters (see `jorca.scheduler.rows`), and what the caller gets back is in `jorca.output`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jorca._checks import MAX_INT32, integer, listed, real

MAX_STOP: Final = 16
"""Most stop strings one request may name."""
MAX_STOP_CHARS: Final = 256
"""Longest stop string, in characters."""
MAX_STOP_TOKEN_IDS: Final = 64
"""Most stop token ids one request may name."""
MAX_BANNED: Final = MAX_STOP_TOKEN_IDS + 1
"""Most token ids that `min_tokens` may have to keep away: stop tokens and end-of-text."""
MAX_LOGIT_BIAS: Final = 300
"""Most token ids whose logits one request may bias."""
MAX_LOGPROBS: Final = 20
"""Most alternatives reported beside each chosen token."""
MAX_N: Final = 128
"""Most samples of one prompt."""
MAX_SEED: Final = 2**63 - 1
"""Largest seed."""


class JorcaError(Exception):
    """Base of every error that jorca raises on purpose."""


class RequestRejected(JorcaError, ValueError):
    """A request was refused at submission; nothing of it was kept.

    Raised for what can never run (too long, unknown token ids, an id that is already live). The
    message names the field, its value, the rule and what to do about it.
    """


class FinishReason(enum.StrEnum):
    """Why a request ended. Compares equal to its lower-case string."""

    STOP = "stop"
    """A stop string, a stop token or end-of-text was produced."""
    LENGTH = "length"
    """`max_tokens` tokens were produced."""
    ABORT = "abort"
    """The caller gave it up."""
    ERROR = "error"
    """It failed alone; `RequestOutput.error` says how."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end.

    What changes logits applies in this order: repetition_penalty, frequency_penalty and
    presence_penalty, logit_bias, min_tokens; then temperature, top_k, top_p over what is left
    (renormalised), min_p. A value that is out of range raises ValueError here, where it is made. Numbers
    are held to their ranges as the device sees them: in float32, where what is subnormal counts as 0.

    Attributes:
      max_tokens: Most tokens to generate, at least 1. None goes on to the end of the model's context; that
        becomes a number when the request is submitted.
      temperature: At least 0. Logits are divided by it; 0 is greedy (ties go to the lowest id) and ignores
        top_k, top_p and min_p.
      top_k: Keep the k most probable tokens (ties by lowest id); 0 keeps all.
      top_p: Keep the smallest set of most probable tokens whose probability reaches p, in (0, 1].
      min_p: Keep tokens at least this times as probable as the best one, in [0, 1].
      seed: 0 to 2**63 - 1. The same seed and position give the same draw whoever shares the batch.
        None draws a seed when the request is submitted.
      stop: Up to 16 strings that end the text, each 1 to 256 characters; what is matched is not
        returned. One string is taken as a list of one.
      stop_token_ids: Up to 64 token ids that end the request; the token itself is kept in
        `token_ids` and left out of the text.
      ignore_eos: Whether the model's end-of-text token is a token like any other.
      repetition_penalty: Above 0; for every token of the prompt or the output, positive logits are divided by
        it and negative ones multiplied (Keskar et al., CTRL, 2019). 1 changes nothing.
      presence_penalty: -2 to 2, taken off the logit of every token that the output holds.
      frequency_penalty: -2 to 2, taken off once for each time that the output holds the token.
      logit_bias: Up to 300 token ids with what is added to their logits, -100 to 100.
      min_tokens: Before so many tokens, end-of-text and stop tokens cannot be chosen and stop strings
        are not looked for; at most `max_tokens`.
      logprobs: None for none, or 0 to 20: report the log-probability of each chosen token under the
        model's own distribution (its plain logits), and of so many best tokens.
      prompt_logprobs: The same for the tokens of the prompt but the first, None or 0 to 20. Such a prompt is
        fed in pieces of at most `max_batch_size` tokens.
      n: Samples of the same prompt, 1 to 128. Sample i > 0 draws from a seed derived from `seed` and i.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        if self.max_tokens is not None:
            put("max_tokens", integer("max_tokens", self.max_tokens, 1, MAX_INT32))
        put("temperature", real("temperature", self.temperature, "of at least 0", lambda v: v >= 0))
        put("top_k", integer("top_k", self.top_k, 0, MAX_INT32, " (0 keeps every token)"))
        put("top_p", real("top_p", self.top_p, "above 0 and at most 1", lambda v: 0 < v <= 1))
        put("min_p", real("min_p", self.min_p, "between 0 and 1", lambda v: 0 <= v <= 1))
        if self.seed is not None:
            put("seed", integer("seed", self.seed, 0, MAX_SEED))
        put("stop", _stop_strings(self.stop))
        ids = listed("stop_token_ids", self.stop_token_ids, "token ids")
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}")
        put("stop_token_ids", tuple(integer("stop_token_ids", t, 0, MAX_INT32) for t in ids))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {reprlib.repr(self.ignore_eos)}")
        penalty = self.repetition_penalty
        put("repetition_penalty", real("repetition_penalty", penalty, "above 0", lambda v: v > 0))
        for name in ("presence_penalty", "frequency_penalty"):
            put(name, real(name, getattr(self, name), "between -2 and 2", lambda v: -2 <= v <= 2))
        put("logit_bias", _logit_bias(self.logit_bias))
        hint = f" (max_tokens is {self.max_tokens})"
        put("min_tokens", integer("min_tokens", self.min_tokens, 0, self.max_tokens or MAX_INT32, hint))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(name, integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        put("n", integer("n", self.n, 1, MAX_N))


def _logit_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    """Returns `bias` as pairs of token id and value, each id once, within the stated maxima."""
    pairs = bias.items() if isinstance(bias, Mapping) else listed("logit_bias", bias, "pairs of id and value")
    if len(pairs) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias may hold at most {MAX_LOGIT_BIAS} ids, got {len(pairs)}")
    checked: dict[int, float] = {}
    for pair in pairs:
        token, value = listed("logit_bias", pair, "pairs of id and value")
        token = integer("logit_bias", token, 0, MAX_INT32)
        if token in checked:
            raise ValueError(f"logit_bias must name each id once, got {token} twice")
        checked[token] = real("logit_bias", value, "between -100 and 100", lambda v: -100 <= v <= 100)
    return tuple(checked.items())


def _stop_strings(stop: Any) -> tuple[str, ...]:
    """Returns `stop` as a tuple of non-empty strings within the stated maxima."""
    strings = (stop,) if isinstance(stop, str) else listed("stop", stop, "strings")
    if len(strings) > MAX_STOP:
        raise ValueError(f"stop may hold at most {MAX_STOP} strings, got {len(strings)}")
    for text in strings:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
            raise ValueError(
                f"stop must hold strings of 1 to {MAX_STOP_CHARS} characters, got {reprlib.repr(text)}; "
                "leave stop empty to stop at none"
            )
    return strings


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sequence to generate, as the scheduler and the engine see it.

    Attributes:
      id: Unique among the requests that are alive.
      prompt_ids: The prompt's token ids, at least one, each at least 0. What the vocabulary and the
        context allow is checked where the model is known, at submission.
      params: How to sample. `n` is read by `LLM`, which makes n requests of it.
      output_ids: Output that the request already has, fewer than `max_tokens`. It is fed like a
        prompt but counts as output, for limits, penalties, stops and usage: this is how preemption,
        recovery and resuming work.
      output_logprobs: Those of `output_ids`, one each, if `params.logprobs` asks for any; else empty.
      sample: Which of the prompt's `n` samples this is, 0 to 127.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    output_ids: tuple[int, ...] = ()
    output_logprobs: tuple[TokenLogprobs, ...] = ()
    sample: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise RequestRejected(f"id must be a non-empty string, got {reprlib.repr(self.id)}")
        if not isinstance(self.params, SamplingParams):
            raise RequestRejected(f"params must be a SamplingParams, got {reprlib.repr(self.params)}")
        put = functools.partial(object.__setattr__, self)
        try:
            put("prompt_ids", _token_ids("prompt_ids", self.prompt_ids))
            put("output_ids", _token_ids("output_ids", self.output_ids))
            put("sample", integer("sample", self.sample, 0, MAX_N - 1))
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        if not self.prompt_ids:
            raise RequestRejected("prompt_ids must hold at least one token, got none; give a prompt")
        if len(self.output_ids) >= (self.params.max_tokens or MAX_INT32):
            raise RequestRejected(
                f"output_ids holds {len(self.output_ids)} tokens but max_tokens is {self.params.max_tokens}: "
                "nothing is left to generate; raise max_tokens"
            )
        wanted = 0 if self.params.logprobs is None else len(self.output_ids)
        if len(self.output_logprobs) != wanted:
            raise RequestRejected(
                f"output_logprobs must hold {wanted} entries, one for each token of output_ids if logprobs "
                f"are asked for, got {len(self.output_logprobs)}"
            )

    @property
    def max_tokens(self) -> int:
        """`params.max_tokens`, once it is a number (see `to_end_of`)."""
        assert self.params.max_tokens is not None, "max_tokens becomes a number when a request is submitted"
        return self.params.max_tokens

    @property
    def num_positions(self) -> int:
        """KV positions it can ever occupy: prompt + max_tokens - 1, since the last token is never fed."""
        return len(self.prompt_ids) + self.max_tokens - 1

    def to_end_of(self, max_positions: int) -> Request:
        """Returns the request with `max_tokens`, if that is None, as what so many positions have room for.

        Raises:
          RequestRejected: They have no room for the prompt, or not for `min_tokens`.
        """
        if self.params.max_tokens is not None:
            return self
        room = max_positions - len(self.prompt_ids) + 1
        if room < 1:
            raise RequestRejected(
                f"prompt_ids holds {len(self.prompt_ids)} tokens, but the model's max_positions is "
                f"{max_positions}; shorten the prompt to at most {max_positions} tokens"
            )
        try:
            params = dataclasses.replace(self.params, max_tokens=room)
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        return dataclasses.replace(self, params=params)


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    """Returns `ids` as a tuple of non-negative ints, or raises ValueError."""
    ids = listed(name, ids, "token ids")
    if all(type(t) is int and 0 <= t <= MAX_INT32 for t in ids):
        return ids
    return tuple(integer(f"{name}[{i}]", t, 0, MAX_INT32) for i, t in enumerate(ids))


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one generated position, in nats, under the model's own distribution.

    Attributes:
      logprob: That of the chosen token.
      top: The best tokens as (token id, log-probability), best first; as many as were asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
