"""Which requests run next: the policies."""

from __future__ import annotations

from typing import Protocol

from jorca.scheduler.pool import Pool

Pick = tuple[int, int]
"""A row and how many tokens its request feeds."""


class Policy(Protocol):
    """Chooses the requests of one iteration."""

    @property
    def name(self) -> str:
        """The name that configurations and logs use."""
        ...

    def select(self, pool: Pool) -> list[Pick]:
        """Returns what runs now, in the order of the batch, each row once and with at least one token.

        The same calls on the scheduler give the same picks: nothing but the pool is looked at. Requests
        become resident by `pool.admit`; nothing else of the pool may change. An empty list means that
        nothing can run until a commit, a submit or an abort, so it must not be empty when nothing is in
        flight and the pool holds a request.
        """
        ...


class Orca:
    """Iteration-level first come first served: `Select` of the paper's Algorithm 1.

    Requests that are not in flight are taken in order of submission, the residents, who are always
    the older ones, before those that wait. A request feeds all that is known of it and not yet fed:
    one token, or its prompt. Only a request that came with output, and so with more tokens than an
    iteration may hold, is fed in pieces. The walk stops, and skips nobody, where the batch is full or
    where tokens, rows or memory do not suffice for the next request. So an earlier arrival has
    always run at least as many iterations as a later one.
    """

    name = "orca"

    def select(self, pool: Pool) -> list[Pick]:
        """Returns the first requests that are not in flight, as many as fit."""
        max_picks, max_tokens = pool.limits.max_batch_size, pool.limits.max_batch_tokens
        picks: list[Pick] = []
        tokens_left = max_tokens

        idle = pool.rows.idle()[:max_picks]
        unfed = pool.rows.num_known[idle] - pool.rows.num_fed[idle]
        for row, num_tokens in zip(idle.tolist(), unfed.clip(max=max_tokens).tolist(), strict=True):
            if num_tokens > tokens_left:
                return picks
            picks.append((row, num_tokens))
            tokens_left -= num_tokens

        while len(picks) < max_picks and (request := pool.next_waiting):
            num_tokens = min(len(request.prompt_ids) + len(request.output_ids), max_tokens)
            if num_tokens > tokens_left or (row := pool.admit()) is None:
                return picks
            picks.append((row, num_tokens))
            tokens_left -= num_tokens
        return picks


def make_policy(name: str) -> Policy:
    """Returns a new policy by the name it has in `SchedulerConfig.policy`.

    Raises:
      ValueError: There is none of that name.
    """
    policies = {Orca.name: Orca}
    if name not in policies:
        raise ValueError(f"policy must be one of {', '.join(policies)}, got {name!r}")
    return policies[name]()
