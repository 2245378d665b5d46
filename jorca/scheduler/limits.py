"""The sizes that bound every decision of the scheduler."""

from __future__ import annotations

import dataclasses

from jorca.config import ConfigError
from jorca.request import Request, RequestRejected


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

    def check(self, request: Request) -> None:
        """Checks a request against what is known without a KV array: the context and the size of a batch.

        Raises:
          RequestRejected: It can never run.
        """
        num_prompt = len(request.prompt_ids)
        if request.num_positions > self.max_positions:
            raise RequestRejected(
                f"{_positions(request)}, but the model's max_positions is {self.max_positions}; "
                + _remedy(request, self.max_positions)
            )
        if num_prompt > self.max_batch_tokens:
            raise RequestRejected(
                f"prompt_ids holds {num_prompt} tokens, but max_batch_tokens is {self.max_batch_tokens}; "
                "shorten the prompt or raise max_batch_tokens"
            )

    def check_pages(self, request: Request, num_pages: int) -> None:
        """Checks a request that may come to hold so many pages against the KV array.

        Raises:
          RequestRejected: It can never run.
        """
        if num_pages > self.num_pages:
            raise RequestRejected(
                f"{_positions(request)} need {num_pages} pages of {self.page_size}, but num_pages is "
                f"{self.num_pages}; {_remedy(request, self.num_pages * self.page_size)}, or raise num_pages"
            )


def _positions(request: Request) -> str:
    num_prompt, max_tokens = len(request.prompt_ids), request.max_tokens
    return f"prompt + max_tokens - 1 = {num_prompt} + {max_tokens} - 1 = {request.num_positions} positions"


def _remedy(request: Request, num_positions: int) -> str:
    """Returns what to do about a request that would need more than `num_positions`."""
    max_tokens = num_positions - len(request.prompt_ids) + 1
    if max_tokens < 1:
        return f"shorten the prompt to at most {num_positions} tokens"
    return f"lower max_tokens to at most {max_tokens} or shorten the prompt"
