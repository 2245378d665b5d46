"""The scheduler: a few calls that turn requests into iterations and results into events."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from jorca.request import FinishReason, Request, RequestRejected
from jorca.scheduler.iteration import Admission, Event, Item, ItemResult, Iteration, Release, StepResult
from jorca.scheduler.limits import SchedulerLimits
from jorca.scheduler.memory import Memory, Reservation, make_memory
from jorca.scheduler.policy import Orca, Pick, Policy
from jorca.scheduler.pool import Pool


class _InFlight(NamedTuple):
    """An iteration on its way, with what `commit` needs of its items as arrays."""

    iteration: Iteration
    rows: np.ndarray
    samples: np.ndarray
    """bool: whether the item asked for logits, and so brings tokens."""


class Scheduler:
    """Decides anew before every iteration which requests run and how many tokens each feeds.

    Pure host code: it sees no text, no device and no clock, and the same calls give the same
    iterations. It follows Algorithm 1 of Orca (OSDI 2022); the loop around it hands out what `plan`
    returns without waiting, up to `max_in_flight` iterations, and commits them in that order.

    Args:
      limits: The sizes that bound every decision.
      policy: Who runs next; None means `Orca`. Must be fresh.
      memory: Who gets which pages; None means `Reservation`. Must be fresh and agree with `limits`.
    """

    def __init__(
        self, limits: SchedulerLimits, policy: Policy | None = None, memory: Memory | None = None
    ) -> None:
        self.limits = limits
        self.policy: Policy = Orca() if policy is None else policy
        self.memory: Memory = make_memory(Reservation.name, limits) if memory is None else memory
        self._pool = Pool(limits, self.memory)
        self._in_flight: deque[_InFlight] = deque()
        self._held: dict[str, Event] = {}  # by request id; empty unless the policy holds outputs
        self._next_seq = 0

    @property
    def num_waiting(self) -> int:
        """Requests that have not run yet."""
        return self._pool.num_waiting

    @property
    def num_resident(self) -> int:
        """Requests that hold a row and memory, those that have ended and not yet left included."""
        return len(self._pool.rows)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended, waiting or resident."""
        return self._pool.num_waiting + int(np.count_nonzero(self._pool.rows.live))

    @property
    def num_in_flight(self) -> int:
        """Iterations that were planned and not yet committed."""
        return len(self._in_flight)

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds."""
        return self.memory.num_free_pages

    @property
    def num_reserved_pages(self) -> int:
        """Pages that resident requests hold."""
        return self.memory.num_reserved_pages

    @property
    def has_work(self) -> bool:
        """Whether a request waits or is resident; who is in flight is resident."""
        return self._pool.num_waiting > 0 or len(self._pool.rows) > 0

    def submit(self, request: Request, now: float) -> None:
        """Puts `request` at the end of the queue.

        Args:
          request: What to generate. Output that it came with is fed like a prompt.
          now: Seconds of the caller's clock; for the record, no decision depends on it.

        Raises:
          RequestRejected: It can never run, or its id is taken. Nothing of it is kept.
        """
        self._refuse_duplicate(request)
        self.limits.check(request)
        self.limits.check_pages(request, self.memory.num_pages_for(request))
        self._pool.submit(request)

    def plan(self, now: float = 0.0) -> Iteration | None:
        """Returns the next iteration, and counts its tokens as fed.

        Args:
          now: As for `submit`.

        Returns:
          The iteration, never an empty one; None when nothing can run until a commit, a submit or an
          abort, or when `max_in_flight` iterations are in flight.
        """
        if len(self._in_flight) == self.limits.max_in_flight:
            return None
        picks = self.policy.select(self._pool)
        if not picks:
            num_requests = self.num_waiting + self.num_resident
            assert self._in_flight or not num_requests, (
                f"policy {self.policy.name} picked none of {num_requests} requests with none in flight"
            )
            return None
        return self._launch(picks)

    def commit(self, iteration: Iteration, result: StepResult, now: float) -> list[Event]:
        """Takes in what came back from the oldest iteration in flight.

        Requests that end here leave when the policy lets them, under Orca at once; their rows and pages
        may be in the very next iteration. Results of requests that had ended before are dropped.

        Args:
          iteration: The oldest that `plan` returned and that is not committed.
          result: Its result.
          now: Seconds of the caller's clock; for the record, no decision depends on it.

        Returns:
          One event for each request that gained tokens or ended, in the order of the batch. Under a policy
          that holds outputs: one for each request that leaves, with all its tokens.

        Raises:
          AssertionError: Not the oldest iteration, or a result that cannot be its result. Nothing
            has changed then.
        """
        assert self._in_flight, f"iteration {iteration.seq} was committed with none in flight"
        oldest = self._in_flight[0]
        seq = oldest.iteration.seq
        assert iteration.seq == seq, f"iteration {iteration.seq} was committed before {seq}"
        assert result.seq == seq, f"iteration {seq} was committed with the result of {result.seq}"
        num_items = len(oldest.rows)
        assert len(result.items) == num_items, f"{len(result.items)} results for {num_items} items"
        num_tokens = np.array([len(got.token_ids) for got in result.items])
        self._check_tokens(oldest, result, num_tokens)
        self._in_flight.popleft()
        return self._apply(oldest, result, num_tokens)

    def abort(self, request_id: str, now: float = 0.0) -> Event | None:
        """Ends a request at any moment.

        A request that is in flight keeps its row and pages until its last iteration is committed, or
        longer, as the policy has it.

        Args:
          request_id: The request.
          now: As for `submit`.

        Returns:
          The request's last event, with the tokens that were held back; None if no request has this id
          whose end is still to be told.
        """
        held = self._held.pop(request_id, Event(request_id))
        if not self._pool.withdraw(request_id):
            rows = self._pool.rows
            row = rows.row_of.get(request_id)
            if row is None or not (rows.live[row] or held.finish_reason):
                return None
            rows.end(row)
            if not self._held:  # what is held back for others is told by a commit alone
                self._release()
        return Event(request_id, held.token_ids, FinishReason.ABORT)

    def restart(self, now: float = 0.0) -> list[Event]:
        """Forgets every iteration in flight and sends the residents back to the front of the queue.

        For when the KV array is lost. Each resident that has not ended carries the output the host knows,
        so that it is fed again from its start and goes on from there; the numbers of iterations go on, too.

        Args:
          now: As for `submit`.

        Returns:
          The events that the policy had held back.
        """
        self._in_flight.clear()
        self._pool.requeue_all()
        events = list(self._held.values())
        self._held.clear()
        return events

    def take_released(self) -> list[Release]:
        """Returns who has left a row or the queue since the last call, in order.

        `commit`, `abort` and `restart` release. A request whose release says `ended` is gone: nothing will
        name it any more, and its id may be used anew.
        """
        released, self._pool.released = self._pool.released, []
        return released

    def check_integrity(self) -> None:
        """Checks all accounts of rows, pages and iterations; costs as much as everything that is alive.

        Raises:
          AssertionError: One of them is broken; the message says which.
        """
        self._pool.check()
        self._check_ended()
        seqs = [entry.iteration.seq for entry in self._in_flight]
        expected = list(range(self._next_seq - len(seqs), self._next_seq))
        assert seqs == expected, f"iterations {seqs} are in flight, {expected} should be"
        num_in_flight = np.zeros_like(self._pool.rows.num_in_flight)
        for entry in self._in_flight:
            num_in_flight[entry.rows] += 1
        wrong = np.flatnonzero(num_in_flight != self._pool.rows.num_in_flight).tolist()
        assert not wrong, f"rows {wrong} miscount the iterations in flight they are in"

    def _check_ended(self) -> None:
        rows = self._pool.rows
        lost = self._held.keys() - rows.row_of.keys()
        assert not lost, f"outputs of {lost} are held back, but they have no rows"
        for row in () if self._held else self.policy.leaving(self._pool):
            name = f"request {rows.requests[row].id!r} in row {row}"
            raise AssertionError(f"{name} has ended, is not in flight, and still has its row")

    def _refuse_duplicate(self, request: Request) -> None:
        if request.id not in self._pool:
            return
        row = self._pool.rows.row_of.get(request.id)
        ended = row is not None and not self._pool.rows.live[row] and request.id not in self._held
        state = "has ended but still has its row" if ended else "is live"
        raise RequestRejected(
            f"id must be unique among live requests, and {request.id!r} {state}; "
            "choose another id or wait until it is gone"
        )

    def _launch(self, picks: list[Pick]) -> Iteration:
        """Makes the iteration of `picks` and counts it as in flight."""
        table = self._pool.rows
        row_list, counts = zip(*picks, strict=True)
        rows = np.array(row_list)
        start = table.num_fed[rows]
        if table.ended:  # who has ended feeds its last token again
            start = np.maximum(start - ~table.live[rows], 0)
        end = start + np.array(counts)
        samples = end >= table.num_known[rows]
        num_logits = np.where(end <= table.num_scored[rows], counts, samples)
        if table.ended:  # and nobody needs what comes of it
            samples &= table.live[rows]
            num_logits *= table.live[rows]
        starts = start.tolist()
        items = map(
            Item,
            [table.requests[row].id for row in row_list],
            row_list,
            starts,
            counts,
            [_token_ids(table.known_ids[r], i, n) for r, i, n in zip(row_list, starts, counts, strict=True)],
            [table.pages[row] for row in row_list],
            num_logits.tolist(),
        )
        new, self._pool.admitted = self._pool.admitted, []
        admitted = [Admission(table.requests[row].id, row, tuple(table.known_ids[row])) for row in new]
        iteration = Iteration(self._next_seq, tuple(items), tuple(admitted))
        table.num_fed[rows] = end
        table.num_in_flight[rows] += 1
        self._next_seq += 1
        self._in_flight.append(_InFlight(iteration, rows, samples))
        return iteration

    def _check_tokens(self, oldest: _InFlight, result: StepResult, num_tokens: np.ndarray) -> None:
        """Checks that every live item brings as many tokens as it can bring."""
        table, rows = self._pool.rows, oldest.rows
        room = table.num_total[rows] - table.num_known[rows]
        suspect = table.live[rows] & (((num_tokens > 0) != oldest.samples) | (num_tokens > room))
        for i in np.flatnonzero(suspect).tolist():
            _check_item(oldest.iteration.items[i], result.items[i], int(room[i]), bool(oldest.samples[i]))

    def _apply(self, oldest: _InFlight, result: StepResult, num_tokens: np.ndarray) -> list[Event]:
        """Appends tokens, ends what has ended and frees what nobody needs any more."""
        table, rows = self._pool.rows, oldest.rows
        live = table.live[rows]
        table.num_in_flight[rows] -= 1
        table.num_known[rows] += num_tokens * live
        full = table.num_known[rows] == table.num_total[rows]
        events = []
        for item, got, is_live, is_full in zip(
            oldest.iteration.items, result.items, live.tolist(), full.tolist(), strict=True
        ):
            if not is_live:
                continue
            token_ids, reason = got.token_ids, got.finish
            if got.error is not None:
                reason = FinishReason.ERROR
            elif reason is None and is_full:
                reason = FinishReason.LENGTH
            if reason is not None:
                table.end(item.row)
            if token_ids or reason is not None:
                table.known_ids[item.row] += token_ids
                events.append(Event(item.request_id, token_ids, reason, got.error))
        if self.policy.holds_outputs:
            self._hold(events)
            return self._release()
        self._release()
        return events

    def _hold(self, events: list[Event]) -> None:
        """Keeps `events` back, joined to what is held of their requests already."""
        for event in events:
            token_ids = self._held.get(event.request_id, event._replace(token_ids=())).token_ids
            self._held[event.request_id] = event._replace(token_ids=token_ids + event.token_ids)

    def _release(self) -> list[Event]:
        """Frees the rows that may leave; returns what was held back for their requests."""
        events = []
        for row in self.policy.leaving(self._pool):
            event = self._held.pop(self._pool.rows.requests[row].id, None)
            events += [] if event is None else [event]
            self._pool.release(row)
        return events


def _token_ids(known_ids: list[int], start: int, num_tokens: int) -> tuple[int, ...] | None:
    """Returns `num_tokens` tokens from position `start` on; None if the host does not know them yet."""
    if num_tokens == 1:
        return (known_ids[start],) if start < len(known_ids) else None
    return tuple(known_ids[start : start + num_tokens])


def _check_item(item: Item, got: ItemResult, room: int, samples: bool) -> None:
    """Raises AssertionError unless `item`, of a request that has `room` for more tokens, can bring `got`."""
    name, num_tokens = f"request {item.request_id!r}", len(got.token_ids)
    assert num_tokens <= room, f"{name} brings {num_tokens} tokens, but only {room} may still come"
    assert samples or not num_tokens, f"{name} brings {num_tokens} tokens, but asked for none"
    ends = got.error is not None or got.finish is not None
    assert num_tokens or ends, f"{name} asked for a token, but brings none and does not end"
