"""The plan of one iteration, what came back from it, and what that means for the requests.

These are the messages between the scheduler and everything that runs iterations. They are
immutable, hold plain Python values only, and survive a round trip through `to_dict`. What is made anew
for every request in every iteration is a named tuple, which costs a third of a frozen dataclass.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jorca.request import FinishReason, TokenLogprobs


class Item(NamedTuple):
    """One request's part in an iteration.

    Attributes:
      request_id: The request.
      row: Its stable slot among the resident requests, 0 <= row < max_running.
      start: Position of its first token here; equals the KV length before the iteration.
      num_tokens: Tokens that it feeds, at least 1.
      token_ids: The tokens, `num_tokens` of them; None when the only token is still on the device
        (it was sampled by an iteration whose result the host has not seen).
      pages: Its KV pages in order; position p lives in pages[p // S], slot p % S.
      num_logits: How many of its last tokens need logits: 1 if it feeds all that the host knows, and so
        brings a token; all of them in a piece of a prompt whose log-probabilities are wanted; else 0.
    """

    request_id: str
    row: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...] | None
    pages: tuple[int, ...]
    num_logits: int

    @property
    def end(self) -> int:
        """The KV length after the iteration."""
        return self.start + self.num_tokens


class Admission(NamedTuple):
    """A request that became resident: its row is its own from this iteration on.

    Attributes:
      request_id: The request.
      row: The row, whose state on the device is that of another request until now.
      token_ids: The tokens that the row's state must come to hold, from position 0 on: those that will be
        fed, and those whose keys and values are there already.
    """

    request_id: str
    row: int
    token_ids: tuple[int, ...]


class Release(NamedTuple):
    """A request that has left its row, or the queue.

    Attributes:
      request_id: The request.
      row: The row, which may be another's from now on; None if it had none.
      ended: Whether the request has ended, too; otherwise it waits again, to be admitted once more.
    """

    request_id: str
    row: int | None
    ended: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Iteration:
    """What runs together: one pass through all layers.

    Attributes:
      seq: Number of the iteration, from 0, without gaps.
      items: At least one, in the order in which they lie in the batch.
      admitted: Who became resident with it; under a policy of microbatches also some who run in one of the
        iterations that follow.
    """

    seq: int
    items: tuple[Item, ...]
    admitted: tuple[Admission, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens in all."""
        return sum(item.num_tokens for item in self.items)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain sequences, dicts, strings and ints, fit for JSON or msgpack."""
        return {
            "seq": self.seq,
            "items": [list(item) for item in self.items],
            "admitted": [list(admission) for admission in self.admitted],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Iteration:
        """Inverse of `to_dict`."""
        admitted = (Admission(name, row, tuple(token_ids)) for name, row, token_ids in data["admitted"])
        return cls(data["seq"], tuple(_item(*fields) for fields in data["items"]), tuple(admitted))


def _item(
    request_id: str, row: int, start: int, num_tokens: int, token_ids: Any, pages: Any, num_logits: int
) -> Item:
    tokens = None if token_ids is None else tuple(token_ids)
    return Item(request_id, row, start, num_tokens, tokens, tuple(pages), num_logits)


@dataclasses.dataclass(frozen=True, slots=True)
class ItemResult:
    """What an iteration gave one item.

    Attributes:
      token_ids: New tokens, 0 to n; empty for a piece of a prompt.
      error: Why this request failed (its own logits were not finite, say); None if it did not.
      finish: The end that the output stage saw (a stop token or a stop string); None otherwise. The
        scheduler itself sees `max_tokens`.
      logprobs: One per token of `token_ids` if asked for. The scheduler does not look at them.
      prompt_logprobs: Those of the prompt's tokens behind each row that fed one, if asked for. Likewise.
      logits: [tokens, vocab] float32 if the engine returns logits. The scheduler does not look.
    """

    token_ids: tuple[int, ...] = ()
    error: str | None = None
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    logits: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What came back from one iteration.

    Attributes:
      seq: The iteration's number.
      items: One per item of the iteration, in its order.
    """

    seq: int
    items: tuple[ItemResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, without logprobs and logits, which steer nothing."""
        return {"seq": self.seq, "items": [[list(i.token_ids), i.error, i.finish] for i in self.items]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepResult:
        """Inverse of `to_dict`."""
        items = (
            ItemResult(tuple(tokens), error, None if finish is None else FinishReason(finish))
            for tokens, error, finish in data["items"]
        )
        return cls(data["seq"], tuple(items))


class Event(NamedTuple):
    """Something that happened to a request, told by `commit` or `abort`.

    Attributes:
      request_id: The request.
      token_ids: Tokens that it gained.
      finish_reason: Set when it has ended; nothing follows.
      error: The message behind `finish_reason` "error".
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
