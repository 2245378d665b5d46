"""The sizes that bound every decision of the scheduler."""

from __future__ import annotations

import dataclasses

from jorca.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLimits:
    """Resolved sizes, all plain integers of at least 1.

    Attributes:
      max_batch_size: Most requests in one iteration (the paper's max_bs).
      max_batch_tokens: Most tokens in one iteration; a longer prompt is refused.
      max_in_flight: Most iterations in flight (the paper's n_workers).
      num_pages: Pages of the KV array.
      page_size: Token positions in a page.
      max_positions: Longest sequence that the model can attend over.
    """

    max_batch_size: int
    max_batch_tokens: int
    max_in_flight: int
    num_pages: int
    page_size: int
    max_positions: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{field.name} must be an integer of at least 1, got {value!r}")

    @property
    def max_running(self) -> int:
        """Rows: the most requests that may be resident, one full batch for every iteration in flight."""
        return self.max_batch_size * self.max_in_flight
