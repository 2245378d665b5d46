"""What the caller gets back: outputs, which are views of a transcript that only grows.

Nothing here imports JAX. A token costs the same however many came before it: an output says which part of
the transcript is new, and puts the whole together only where somebody asks for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jorca.request import FinishReason, Request, TokenLogprobs


class RequestMetrics(NamedTuple):
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


class Transcript:
    """All that a request has produced, from `Request.output_ids` on. It is added to and never changed.

    Args:
      request: Whose it is, with its seed.
      text: The text of the output that it came with.

    Attributes:
      request: Whose it is.
      token_ids: Its output.
      logprobs: One entry per token if the request asks for them, else None.
      prompt_logprobs: One entry per token of the prompt, likewise; complete with the first new token.
      logits: A row [vocab], float32, for each new token, if the engine returns logits.
      num_pieces: Pieces of text so far, that of the output that the request came with included.
    """

    def __init__(self, request: Request, text: str = ""):
        params = request.params
        self.request = request
        self.token_ids = list(request.output_ids)
        self.logprobs = None if params.logprobs is None else list(request.output_logprobs)
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.logits: list[np.ndarray] = []
        self.num_pieces = 1
        self._pieces = [text]  # of text
        self._num_chars = [len(text)]  # up to the end of each piece

    def add_text(self, text: str) -> None:
        """Adds a piece of text."""
        if text:
            self.num_pieces += 1
            self._pieces.append(text)
            self._num_chars.append(self._num_chars[-1] + len(text))

    def text(self, start: int, end: int) -> str:
        """Returns the text of the pieces from `start` to `end`, that one not included."""
        return "".join(self._pieces[start:end])

    def num_chars(self, end: int) -> int:
        """Returns how many characters come before piece `end`, which is at least 1."""
        return self._num_chars[end - 1]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """What a request has produced up to some moment; final once `finish_reason` is set.

    Attributes:
      transcript: What it is a view of.
      num_tokens: Tokens generated so far.
      num_new_tokens: How many of them came with this output.
      num_pieces: Pieces of text so far.
      num_new_pieces: How many of them came with this output.
      finish_reason: "stop", "length", "abort", "error", or None while it runs.
      stop_reason: The stop string or the stop token id that ended it, else None.
      error: What went wrong when `finish_reason` is "error", else None.
      metrics: Times and iteration counts.
    """

    transcript: Transcript = dataclasses.field(repr=False)
    num_tokens: int
    num_new_tokens: int
    num_pieces: int
    num_new_pieces: int
    metrics: RequestMetrics
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.transcript.request.id

    @property
    def sample(self) -> int:
        """Which of the prompt's `n` samples this is."""
        return self.transcript.request.sample

    @property
    def seed(self) -> int | None:
        """The seed that the request has, given or drawn: with it, it can go on elsewhere."""
        return self.transcript.request.params.seed

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt that was fed."""
        return self.transcript.request.prompt_ids

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens generated so far, a stop token included."""
        return tuple(self.transcript.token_ids[: self.num_tokens])

    @property
    def text(self) -> str:
        """All text so far, without what a stop string matched; "" when there is no tokenizer."""
        return self.transcript.text(0, self.num_pieces)

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """One entry per token of `token_ids` when asked for, else None."""
        logprobs = self.transcript.logprobs
        return None if logprobs is None else tuple(logprobs[: self.num_tokens])

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """One entry per token of the prompt when asked for, else None; complete with the first new token.

        The first entry is None, since nothing predicts that token.
        """
        logprobs = self.transcript.prompt_logprobs
        return None if logprobs is None else tuple(logprobs)

    @property
    def logits(self) -> Any:
        """Array [new tokens of this engine, vocab], float32, with the option `return_logits`, else None."""
        rows = self.transcript.logits[: self.num_tokens - len(self.transcript.request.output_ids)]
        return np.stack(rows) if rows else None

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        """The tokens that came with this output (streaming)."""
        return tuple(self.transcript.token_ids[self.num_tokens - self.num_new_tokens : self.num_tokens])

    @property
    def new_text(self) -> str:
        """The text that came with this output (streaming); the joined pieces equal `text`."""
        return self.transcript.text(self.num_pieces - self.num_new_pieces, self.num_pieces)

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def joined_to(self, earlier: RequestOutput) -> RequestOutput:
        """Returns one output for this and the one before it, in which what either brought is new."""
        return dataclasses.replace(
            self,
            num_new_tokens=self.num_new_tokens + earlier.num_new_tokens,
            num_new_pieces=self.num_new_pieces + earlier.num_new_pieces,
        )


class Mailbox:
    """Outputs that nobody has read yet: one for each request, since what comes later is joined to it."""

    def __init__(self) -> None:
        self._outputs: dict[str, RequestOutput] = {}

    def __len__(self) -> int:
        """Outputs that wait."""
        return len(self._outputs)

    def put(self, output: RequestOutput) -> None:
        """Takes an output in."""
        earlier = self._outputs.get(output.request_id)
        self._outputs[output.request_id] = output if earlier is None else output.joined_to(earlier)

    def take(self, request_id: str | None = None) -> RequestOutput | None:
        """Hands out the output of a request, or the one that has waited longest; None if there is none."""
        return self._outputs.pop(request_id or next(iter(self._outputs), ""), None)

    def take_all(self) -> list[RequestOutput]:
        """Hands out everything, what has waited longest first."""
        outputs, self._outputs = self._outputs, {}
        return list(outputs.values())
