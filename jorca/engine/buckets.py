"""The ladder of batch shapes: every iteration runs in the smallest one that holds it.

One program is compiled for each bucket, so the number of programs is the length of the ladder.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
from typing import Self

from jorca.config import BucketConfig
from jorca.scheduler import SchedulerLimits


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """One batch shape.

    Attributes:
      num_tokens: Flat rows, T.
      num_rows: Request slots and rows that need logits, R: min(T, max_batch_size), since every request
        in an iteration feeds at least one token. No less than the floor of a deterministic engine.
      max_pages: Entries in a request's page table, M.
      max_running: Rows of the per-request device state.
    """

    num_tokens: int
    num_rows: int
    max_pages: int
    max_running: int


class BucketLadder:
    """Buckets in rising order, up to `max_batch_tokens` exactly.

    `max_batch_size` is always one of them: that is what a full batch of single tokens takes.

    Args:
      limits: What the scheduler may emit.
      config: Smallest bucket and the ratio between neighbours.
      floor: If given, it stands for `config.min_bucket`, and every number of rows, of tokens and of logits,
        is rounded up to a multiple of it (see `jorca.engine.deterministic`). Then all ladders of this
        floor share their smallest bucket, whatever their limits are.
    """

    def __init__(self, limits: SchedulerLimits, config: BucketConfig, *, floor: int | None = None):
        num_rows = limits.max_batch_size
        sizes = ladder_sizes(limits.max_batch_tokens, num_rows, config)
        if floor is not None:
            config = dataclasses.replace(config, min_bucket=floor)
            num_rows = _round_up(num_rows, floor)
            sizes = ladder_sizes(_round_up(limits.max_batch_tokens, floor), num_rows, config)
            sizes = tuple(sorted({_round_up(size, floor) for size in sizes}))
        max_pages = -(-limits.max_positions // limits.page_size)
        self.buckets = tuple(Bucket(n, min(n, num_rows), max_pages, limits.max_running) for n in sizes)

    def only(self, bucket: Bucket) -> Self:
        """Returns a ladder of one of these buckets, in which everything runs that it holds."""
        ladder = copy.copy(self)
        ladder.buckets = (bucket,)
        return ladder

    def bucket_for(self, num_tokens: int) -> Bucket:
        """Returns the smallest bucket that holds so many tokens, at least 1 and at most the largest's."""
        largest = self.buckets[-1].num_tokens
        if not 1 <= num_tokens <= largest:
            raise ValueError(f"num_tokens must be between 1 and {largest}, got {num_tokens}")
        return self.buckets[bisect.bisect_left(self.buckets, num_tokens, key=lambda b: b.num_tokens)]


def ladder_sizes(max_tokens: int, max_batch_size: int, config: BucketConfig) -> tuple[int, ...]:
    """Returns rising bucket sizes in tokens; each is at most `bucket_ratio` times the last, or one more."""
    sizes = {min(max_batch_size, max_tokens), max_tokens}
    size = smallest = min(config.min_bucket or 1, max_tokens)
    while size < max_tokens:
        sizes.add(size)
        size = max(int(size * config.bucket_ratio), size + 1)
    return tuple(sorted(s for s in sizes if s >= smallest))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
