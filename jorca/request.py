"""The nouns that every part of jorca shares: what is asked, what is answered, what is refused.

Nothing here imports JAX. A `Request` is immutable input; the scheduler keeps its progress as
counters (see `jorca.scheduler.rows`), and a `RequestOutput` is what the caller gets back.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import numbers
import reprlib
from collections.abc import Sequence
from typing import Any, Final

MAX_STOP: Final = 16
"""Most stop strings one request may name."""
MAX_STOP_CHARS: Final = 256
"""Longest stop string, in characters."""
MAX_STOP_TOKEN_IDS: Final = 64
"""Most stop token ids one request may name."""
MAX_LOGPROBS: Final = 20
"""Most alternatives reported beside each chosen token."""
MAX_N: Final = 128
"""Most samples of one prompt."""
MAX_SEED: Final = 2**63 - 1
"""Largest seed."""
_MAX_INT32: Final = 2**31 - 1


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


def _integer(name: str, value: Any, low: int, high: int, hint: str = "") -> int:
    """Returns `value` as an int, or raises ValueError naming field, value, rule and remedy."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer, got {reprlib.repr(value)}{hint}")
    if not low <= int(value) <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value}{hint}")
    return int(value)


def _real(name: str, value: Any, rule: str, accepts: Any) -> float:
    """Returns `value` as a finite float that `accepts` allows, or raises ValueError with `rule`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number {rule}, got {reprlib.repr(value)}")
    try:
        number = float(value)
    except OverflowError:  # an int that no float can hold
        number = math.inf
    if not math.isfinite(number) or not accepts(number):
        raise ValueError(f"{name} must be a number {rule}, got {reprlib.repr(value)}")
    return number


def _listed(name: str, value: Any, of: str) -> tuple[Any, ...]:
    """Returns what `value` holds, or raises ValueError; text and bytes are not lists of their parts."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return tuple(value)
    except TypeError:
        raise ValueError(f"{name} must be a list of {of}, got {reprlib.repr(value)}") from None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end.

    Filters apply in this order: temperature, top_k, top_p over what is left (renormalised), min_p.
    A value that is out of range raises ValueError here, where it is made.

    Attributes:
      max_tokens: Most tokens to generate, at least 1.
      temperature: At least 0. Logits are divided by it; 0 (in float32) is greedy (ties go to the lowest id)
        and ignores top_k, top_p and min_p.
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
      logprobs: None for none, or 0 to 20: report the log-probability of each chosen token under the
        model's own distribution (temperature 1, nothing filtered), and of so many best tokens.
      n: Samples of the same prompt, 1 to 128. Sample i > 0 draws from a seed derived from `seed` and i.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        put("max_tokens", _integer("max_tokens", self.max_tokens, 1, _MAX_INT32))
        put("temperature", _real("temperature", self.temperature, "of at least 0", lambda v: v >= 0))
        put("top_k", _integer("top_k", self.top_k, 0, _MAX_INT32, " (0 keeps every token)"))
        put("top_p", _real("top_p", self.top_p, "above 0 and at most 1", lambda v: 0 < v <= 1))
        put("min_p", _real("min_p", self.min_p, "between 0 and 1", lambda v: 0 <= v <= 1))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, 0, MAX_SEED))
        put("stop", _stop_strings(self.stop))
        ids = _listed("stop_token_ids", self.stop_token_ids, "token ids")
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}")
        put("stop_token_ids", tuple(_integer("stop_token_ids", t, 0, _MAX_INT32) for t in ids))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {reprlib.repr(self.ignore_eos)}")
        if self.logprobs is not None:
            put("logprobs", _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        put("n", _integer("n", self.n, 1, MAX_N))


def _stop_strings(stop: Any) -> tuple[str, ...]:
    """Returns `stop` as a tuple of non-empty strings within the stated maxima."""
    strings = (stop,) if isinstance(stop, str) else _listed("stop", stop, "strings")
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
        prompt but counts as output, for limits and usage: this is how preemption, recovery and resuming
        work.
      sample: Which of the prompt's `n` samples this is, 0 to 127.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    output_ids: tuple[int, ...] = ()
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
            put("sample", _integer("sample", self.sample, 0, MAX_N - 1))
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        if not self.prompt_ids:
            raise RequestRejected("prompt_ids must hold at least one token, got none; give a prompt")
        if len(self.output_ids) >= self.params.max_tokens:
            raise RequestRejected(
                f"output_ids holds {len(self.output_ids)} tokens but max_tokens is {self.params.max_tokens}: "
                "nothing is left to generate; raise max_tokens"
            )

    @property
    def num_positions(self) -> int:
        """KV positions it can ever occupy: prompt + max_tokens - 1, since the last token is never fed."""
        return len(self.prompt_ids) + self.params.max_tokens - 1


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    """Returns `ids` as a tuple of non-negative ints, or raises ValueError."""
    ids = _listed(name, ids, "token ids")
    if all(type(t) is int and 0 <= t <= _MAX_INT32 for t in ids):
        return ids
    return tuple(_integer(f"{name}[{i}]", t, 0, _MAX_INT32) for i, t in enumerate(ids))


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one generated position, in nats, under the model's own distribution.

    Attributes:
      logprob: That of the chosen token.
      top: The best tokens as (token id, log-probability), best first; as many as were asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """When a request moved, in seconds of the engine's clock, and how many iterations it took.

    Attributes:
      submitted_s: When it was accepted.
      first_scheduled_s: When its first iteration was dispatched; None if it never ran.
      first_token_s: When its first token reached the host; None before that.
      finished_s: When it ended; None while it runs.
      num_iterations: Iterations it has taken part in, those in flight excluded.
      first_iteration: `seq` of its first iteration; None if it never ran.
      last_iteration: `seq` of its latest committed iteration; None before that.
    """

    submitted_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_iterations: int = 0
    first_iteration: int | None = None
    last_iteration: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """What a request has produced so far; final once `finish_reason` is set.

    Attributes:
      request_id: The request's id.
      sample: Which of the prompt's `n` samples this is.
      prompt_ids: The prompt that was fed.
      token_ids: All tokens generated so far, a stop token included.
      text: All text so far, without what a stop string matched; "" when there is no tokenizer.
      finish_reason: "stop", "length", "abort", "error", or None while it runs.
      stop_reason: The stop string or the stop token id that ended it, else None.
      error: What went wrong when `finish_reason` is "error", else None.
      logprobs: One entry per token of `token_ids` when asked for, else None.
      logits: Array [tokens, vocab], float32, with the engine option `return_logits`, else None.
      new_token_ids: The tokens that came with this output (streaming).
      new_text: The text that came with this output (streaming); the joined pieces equal `text`.
      metrics: Times and iteration counts.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    metrics: RequestMetrics
    sample: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    logits: Any = None
    new_token_ids: tuple[int, ...] = ()
    new_text: str = ""

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None
