"""Which requests run next: the policies."""

from __future__ import annotations

import itertools
import types
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from jorca.config import SchedulerConfig
from jorca.scheduler.pool import Pool
from jorca.scheduler.rows import num_scored

Pick = tuple[int, int]
"""A row and how many tokens its request feeds."""


class Policy(Protocol):
    """Chooses the requests of one iteration, and says when those that have ended leave.

    An object serves one scheduler, since it may remember what it chose. It looks at nothing but the pool
    and that, so the same calls on the scheduler give the same picks.
    """

    @property
    def name(self) -> str:
        """The name that configurations and logs use."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """The keywords that `make_policy` needs beside the name to make another one like it."""
        ...

    @property
    def holds_outputs(self) -> bool:
        """Whether a request's events are held back until it leaves, instead of told at each commit."""
        ...

    def select(self, pool: Pool) -> list[Pick]:
        """Returns what runs now, in the order of the batch, each row once and with at least one token.

        Requests become resident by `pool.admit`; nothing else of the pool may change. A row whose request
        has ended may be picked with one token: it feeds its last one again. An empty list means that
        nothing can run until a commit, a submit or an abort, so it must not be empty when nothing is in
        flight and the pool holds a request.
        """
        ...

    def leaving(self, pool: Pool) -> list[int]:
        """Returns the rows that are free to be used anew; their requests have ended and are not in flight."""
        ...


class Orca:
    """Iteration-level first come first served: `Select` of the paper's Algorithm 1.

    Requests that are not in flight are taken in order of submission, the residents, who are always
    the older ones, before those that wait. A request feeds all that is known of it and not yet fed:
    one token, or its prompt. Fed in pieces are only a prompt whose log-probabilities are wanted, and a
    request that came with output, and so with more tokens than an iteration may hold. The walk stops,
    and skips nobody, where the batch is full or where tokens, rows or memory do not suffice for the
    next request. So an earlier arrival has always run at least as many iterations as a later one.
    """

    name = "orca"
    options: Mapping[str, Any] = types.MappingProxyType({})
    holds_outputs = False

    def select(self, pool: Pool) -> list[Pick]:
        """Returns the first requests that are not in flight, as many as fit."""
        rows, max_tokens = pool.rows, pool.limits.max_batch_tokens
        picks: list[Pick] = []
        # An iteration has as many rows of logits as it may have requests; each takes one of them, and one
        # whose prompt is scored takes a row for every token.
        tokens_left, logits_left = max_tokens, pool.limits.max_batch_size

        idle = rows.idle()[:logits_left]
        feedable = rows.feedable(idle).clip(max=max_tokens)
        scored = rows.num_fed[idle] < rows.num_scored[idle]
        for row, num_tokens, is_scored in zip(idle.tolist(), feedable.tolist(), scored.tolist(), strict=True):
            if is_scored:
                num_tokens = min(num_tokens, tokens_left, logits_left)
            if not 0 < num_tokens <= tokens_left or not logits_left:
                return picks
            picks.append((row, num_tokens))
            tokens_left -= num_tokens
            logits_left -= num_tokens if is_scored else 1

        while logits_left and (request := pool.next_waiting):
            num_tokens = min(len(request.prompt_ids) + len(request.output_ids), max_tokens)
            if is_scored := num_scored(request) > 0:
                num_tokens = min(num_scored(request), tokens_left, logits_left)
            if not 0 < num_tokens <= tokens_left or (row := pool.admit()) is None:
                return picks
            picks.append((row, num_tokens))
            tokens_left -= num_tokens
            logits_left -= num_tokens if is_scored else 1
        return picks

    def leaving(self, pool: Pool) -> list[int]:
        """Returns every row whose request has ended: who finishes leaves at once."""
        return [row for row in pool.rows.ended if not pool.rows.num_in_flight[row]]


class RequestLevel:
    """The baseline that Orca is compared with: a batch of requests is taken when idle and run to its end.

    The first `max_batch_size` waiting requests, or as many as have memory, become the batch. Nobody
    joins it, and nobody leaves: a request that has ended (aborted ones too) keeps its place, where its
    last token is computed again and again and the result dropped. When all have ended and nothing is in
    flight, outputs are released and the next batch is taken. This is how the paper describes
    FasterTransformer behind a scheduler of its time (section 3.1, figure 8b).

    The batch is cut into microbatches, which take turns; each is in flight at most once. In an
    iteration each of its requests feeds at least one token, a prompt as much as it has. Where
    `max_batch_tokens` does not hold all prompts of a microbatch, they are fed in pieces, the oldest
    first, and microbatches are never larger than it.

    Args:
      microbatch_size: Most requests in a microbatch, at least 1; None makes the batch one microbatch.
      shortest_prompt: Whether the first pass covers only as many tokens as the shortest prompt has, and
        the rest of longer prompts is fed one token at a time, as FasterTransformer does. A batch then
        takes (longest - shortest prompt) + longest output iterations if the same request has both.
    """

    name = "request-level"
    holds_outputs = True

    def __init__(self, *, microbatch_size: int | None = None, shortest_prompt: bool = False) -> None:
        self.options = {"microbatch_size": microbatch_size, "shortest_prompt": shortest_prompt}
        self._microbatch_size = microbatch_size
        self._shortest_prompt = shortest_prompt
        self._microbatches: deque[np.ndarray] = deque()  # the rows of each; whose turn it is stands first
        self._first_pass = 0  # tokens

    def select(self, pool: Pool) -> list[Pick]:
        """Returns the microbatch whose turn it is, or nothing if that is still in flight."""
        rows = pool.rows
        if not len(rows):
            self._take_batch(pool)
        elif rows.num_in_flight.any() and not rows.live.any():
            return []  # the batch has ended; what is still on its way comes in
        if not self._microbatches or rows.num_in_flight[self._microbatches[0]].any():
            return []
        microbatch = self._microbatches[0]
        self._microbatches.rotate(-1)
        return self._feed(pool, microbatch)

    def leaving(self, pool: Pool) -> list[int]:
        """Returns the whole batch once all have ended and none is in flight, and nobody before."""
        rows = pool.rows
        return [] if rows.live.any() or rows.num_in_flight.any() else list(rows.requests)

    def _feed(self, pool: Pool, microbatch: np.ndarray) -> list[Pick]:
        """Gives each row a token, and what is left of the iteration's size to the prompts, oldest first."""
        rows, fed = pool.rows, pool.rows.num_fed[microbatch]
        wanted = np.minimum(rows.feedable(microbatch), self._first_pass - fed) - 1
        wanted = np.where(rows.live[microbatch], wanted.clip(min=0), 0)
        scored = fed < rows.num_scored[microbatch]
        tokens_left = pool.limits.max_batch_tokens - len(microbatch)
        logits_left = pool.limits.max_batch_size - len(microbatch)
        picks = []
        for row, extra, is_scored in zip(microbatch.tolist(), wanted.tolist(), scored.tolist(), strict=True):
            extra = min(extra, tokens_left, logits_left if is_scored else extra)
            tokens_left -= extra
            logits_left -= extra if is_scored else 0
            picks.append((row, 1 + extra))
        return picks

    def _take_batch(self, pool: Pool) -> None:
        limits, batch = pool.limits, []
        while len(batch) < limits.max_batch_size and pool.next_waiting and (row := pool.admit()) is not None:
            batch.append(row)
        size = min(self._microbatch_size or limits.max_batch_size, limits.max_batch_tokens)
        self._microbatches = deque(map(np.array, itertools.batched(batch, size)))
        lengths = pool.rows.num_known[batch]
        self._first_pass = int(lengths.min() if self._shortest_prompt else lengths.max()) if batch else 0


def make_policy(name: str, **options: Any) -> Policy:
    """Returns a new policy by the name it has in `SchedulerConfig.policy`.

    Args:
      name: Of the policy.
      **options: Its own options; see its class.

    Raises:
      ValueError: There is none of that name.
      TypeError: It has no such option.
    """
    policies: dict[str, Callable[..., Policy]] = {Orca.name: Orca, RequestLevel.name: RequestLevel}
    if name not in policies:
        raise ValueError(f"policy must be one of {', '.join(policies)}, got {name!r}")
    return policies[name](**options)


def policy_of(config: SchedulerConfig) -> Policy:
    """Returns a new policy as a config asks for it."""
    return make_policy(config.policy, **config.policy_options)
