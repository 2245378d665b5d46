"""The resident requests: their counters as columns, one row for each."""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np

from jorca.request import Request


def num_scored(request: Request) -> int:
    """Returns how many tokens of a request's prompt need logits for their own sake; see `Rows`."""
    return 0 if request.params.prompt_logprobs is None else len(request.prompt_ids) - 1


class Rows:
    """State of the resident requests, who hold memory and a stable row each.

    What the scheduler computes with stands in numpy columns of int64 (bool for `live`), indexed by
    row; a free row is all zeros. Everything else about a row stands in plain lists.

    Attributes:
      live: Whether the row's request is unfinished. One that has ended keeps its row, not live, until its
        last iteration is back and the policy lets it leave.
      order: Its place in the order of submission.
      num_prompt: Tokens of its prompt.
      num_scored: How many of them, from the first on, need logits of their own: all but the last if the
        request wants log-probabilities of its prompt, else none.
      num_total: Most tokens that it can come to: prompt + max_tokens.
      num_known: Tokens that the host has seen: prompt + output.
      num_fed: Tokens fed, those in flight included.
      num_in_flight: Iterations in flight that it is part of.
      ended: The rows in use that are not live.
      requests: Row to request, for the rows in use.
      row_of: Request id to row, for the rows in use.
      known_ids: Per row, the `num_known` tokens.
      pages: Per row, the KV pages in order of position.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.live = np.zeros(num_rows, bool)
        self.order = np.zeros(num_rows, np.int64)
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.num_scored = np.zeros(num_rows, np.int64)
        self.num_total = np.zeros(num_rows, np.int64)
        self.num_known = np.zeros(num_rows, np.int64)
        self.num_fed = np.zeros(num_rows, np.int64)
        self.num_in_flight = np.zeros(num_rows, np.int64)
        self.ended: set[int] = set()
        self.requests: dict[int, Request] = {}
        self.row_of: dict[str, int] = {}
        self.known_ids: list[list[int]] = [[] for _ in range(num_rows)]
        self.pages: list[tuple[int, ...]] = [()] * num_rows
        self._free = list(range(num_rows))  # a heap: the lowest row goes first

    def __len__(self) -> int:
        """Rows in use."""
        return len(self.requests)

    @property
    def full(self) -> bool:
        """Whether every row is in use."""
        return not self._free

    def add(self, request: Request, order: int, pages: tuple[int, ...]) -> int:
        """Gives `request` a row, from which it starts to be fed, and returns it."""
        row = heapq.heappop(self._free)
        self.requests[row] = request
        self.row_of[request.id] = row
        self.known_ids[row] = [*request.prompt_ids, *request.output_ids]
        self.pages[row] = pages
        self.live[row] = True
        self.order[row] = order
        self.num_prompt[row] = len(request.prompt_ids)
        self.num_scored[row] = num_scored(request)
        self.num_total[row] = len(request.prompt_ids) + request.max_tokens
        self.num_known[row] = len(self.known_ids[row])
        return row

    def remove(self, row: int) -> None:
        """Makes `row` free and clears it."""
        del self.row_of[self.requests.pop(row).id]
        self.ended.discard(row)
        self.known_ids[row] = []
        self.pages[row] = ()
        for column in self._columns():
            column[row] = 0
        heapq.heappush(self._free, row)

    def resumed(self, row: int) -> Request:
        """Returns the row's request with all the output that the host knows."""
        request = self.requests[row]
        output_ids = tuple(self.known_ids[row][len(request.prompt_ids) :])
        # What the tokens' log-probabilities were is the output stage's business; it has kept them.
        params = dataclasses.replace(request.params, logprobs=None)
        return dataclasses.replace(request, params=params, output_ids=output_ids, output_logprobs=())

    def idle(self) -> np.ndarray:
        """Returns the rows of live requests that are not in flight, in order of submission."""
        rows = (self.live & (self.num_in_flight == 0)).nonzero()[0]
        return rows[self.order[rows].argsort()]

    def end(self, row: int) -> None:
        """Notes that the request of `row` has ended; the row stays in use."""
        self.live[row] = False
        self.ended.add(row)

    def feedable(self, rows: np.ndarray) -> np.ndarray:
        """Returns how many tokens each row may feed next: up to the end of its scored ones, or all it has."""
        fed, scored = self.num_fed[rows], self.num_scored[rows]
        return np.where(fed < scored, scored, self.num_known[rows]) - fed

    def check(self) -> None:
        """Checks every row against its request.

        Raises:
          AssertionError: A counter, a list or the set of free rows is out of step.
        """
        used = set(self.requests)
        assert sorted([*used, *self._free]) == list(range(self.num_rows)), "a row has leaked or is used twice"
        ended = {row for row in used if not self.live[row]}
        assert ended == self.ended, f"rows {ended} are not live, rows {self.ended} have ended"
        by_id = {request.id: row for row, request in self.requests.items()}
        assert by_id == self.row_of, f"ids map to rows {self.row_of}, requests stand in {by_id}"
        assert len(set(self.order[sorted(used)].tolist())) == len(used), (
            "two requests have one place in order"
        )
        for row, request in self.requests.items():
            self._check_row(row, request)
        for row in self._free:
            clear = not (self.known_ids[row] or self.pages[row] or any(c[row] for c in self._columns()))
            assert clear, f"row {row} is free but not clear"

    def _check_row(self, row: int, request: Request) -> None:
        known, fed, in_flight = (int(c[row]) for c in (self.num_known, self.num_fed, self.num_in_flight))
        where = f"request {request.id!r} in row {row}"
        given = (*request.prompt_ids, *request.output_ids)
        assert tuple(self.known_ids[row][: len(given)]) == given, f"{where} has lost tokens it came with"
        assert known == len(self.known_ids[row]), f"{where} counts {known} tokens, not those it has"
        assert self.num_prompt[row] == len(request.prompt_ids), f"{where} miscounts its prompt"
        total = len(request.prompt_ids) + request.max_tokens
        assert self.num_total[row] == total, f"{where} miscounts the tokens it may come to"
        assert known <= total, f"{where} has {known} tokens of {total}"
        assert in_flight >= 0, f"{where} is in flight {in_flight} times"
        most = known + in_flight if self.live[row] else total
        assert 0 <= fed <= min(most, total - 1), f"{where} has fed {fed} of {known} tokens"

    def _columns(self) -> tuple[np.ndarray, ...]:
        return (
            self.live,
            self.order,
            self.num_prompt,
            self.num_scored,
            self.num_total,
            self.num_known,
            self.num_fed,
            self.num_in_flight,
        )
