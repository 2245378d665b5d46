"""The ladder of batch shapes: every iteration runs in the smallest one that holds it.

One program is compiled for each bucket, so the number of programs is the length of the ladder.
"""

from __future__ import annotations

import bisect
import dataclasses

from jorca.config import BucketConfig
from jorca.scheduler import SchedulerLimits


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """One batch shape.

    Attributes:
      num_tokens: Flat rows, T.
      num_rows: Request slots and rows that need logits, R: min(T, max_batch_size), since every request
        in an iteration feeds at least one token.
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
    """

    def __init__(self, limits: SchedulerLimits, config: BucketConfig):
        sizes = ladder_sizes(limits.max_batch_tokens, limits.max_batch_size, config)
        max_pages = -(-limits.max_positions // limits.page_size)
        self._sizes = sizes
        self.buckets = tuple(
            Bucket(size, min(size, limits.max_batch_size), max_pages, limits.max_running) for size in sizes
        )

    def bucket_for(self, num_tokens: int) -> Bucket:
        """Returns the smallest bucket that holds so many tokens, 1 <= num_tokens <= max_batch_tokens."""
        if not 1 <= num_tokens <= self._sizes[-1]:
            raise ValueError(f"num_tokens must be between 1 and {self._sizes[-1]}, got {num_tokens}")
        return self.buckets[bisect.bisect_left(self._sizes, num_tokens)]


def ladder_sizes(max_tokens: int, max_batch_size: int, config: BucketConfig) -> tuple[int, ...]:
    """Returns rising bucket sizes in tokens; each is at most `bucket_ratio` times the last, or one more."""
    sizes = {min(max_batch_size, max_tokens), max_tokens}
    size = min(config.min_bucket, max_tokens)
    while size < max_tokens:
        sizes.add(size)
        size = max(int(size * config.bucket_ratio), size + 1)
    return tuple(sorted(s for s in sizes if s >= min(config.min_bucket, max_tokens)))
