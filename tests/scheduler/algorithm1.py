"""Algorithm 1 as slow, obvious Python, and a scheduler that is held against it at every call.

The oracle walks over the whole pool and counts with lists and sets; it shares nothing with the code
under test but the messages.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from jorca.request import FinishReason, Request, RequestRejected, SamplingParams
from jorca.scheduler import Event, Item, ItemResult, Iteration, Scheduler, SchedulerLimits, StepResult

Outcome = Callable[[Item, int], ItemResult]
"""Makes what comes back for an item; the number is how many tokens may still come to its request."""


def make_limits(**changes: int) -> SchedulerLimits:
    sizes = {
        "max_batch_size": 4,
        "max_batch_tokens": 1000,
        "max_in_flight": 1,
        "num_pages": 64,
        "page_size": 16,
        "max_positions": 1024,
    }
    return SchedulerLimits(**{**sizes, **changes})


def make_request(name: str, num_prompt: int = 3, max_tokens: int = 4, num_output: int = 0) -> Request:
    return Request(
        id=name,
        prompt_ids=tuple(range(100, 100 + num_prompt)),
        params=SamplingParams(max_tokens=max_tokens),
        output_ids=tuple(range(500, 500 + num_output)),
    )


def one_token(item: Item, room: int) -> ItemResult:
    """The plain outcome: a token, made of row and position, wherever logits were asked for."""
    return ItemResult((1000 * item.row + item.end,)[: item.num_logits])


@dataclasses.dataclass
class Entry:
    """A request in the oracle's pool."""

    request: Request
    known: list[int]
    fed: int = 0
    reserved: bool = False
    running: bool = False
    ended: bool = False
    num_iterations: int = 0


class Algorithm1:
    """The paper's loop, with `max_batch_tokens` and pages added as the design states them."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.pool: list[Entry] = []  # by arrival
        self.in_flight: list[list[Entry]] = []

    def num_pages(self, request: Request) -> int:
        """Pages touched by every token but the last, which is never fed."""
        tokens = range(len(request.prompt_ids) + request.max_tokens)
        return len({position // self.limits.page_size for position in tokens[:-1]})

    @property
    def num_reserved(self) -> int:
        return sum(self.num_pages(e.request) for e in self.pool if e.reserved)

    @property
    def most_iterations(self) -> int:
        """More iterations than the pool can take."""
        return sum(len(e.known) + e.request.max_tokens for e in self.pool) + len(self.in_flight) + 1

    def accepts(self, request: Request) -> bool:
        fed = len(request.prompt_ids) + request.max_tokens - 1
        return (
            all(e.request.id != request.id for e in self.pool)
            and fed <= self.limits.max_positions
            and len(request.prompt_ids) <= self.limits.max_batch_tokens
            and self.num_pages(request) <= self.limits.num_pages
        )

    def submit(self, request: Request) -> None:
        self.pool.append(Entry(request, [*request.prompt_ids, *request.output_ids]))

    def select(self) -> list[tuple[str, int, tuple[int, ...], int]]:
        """Returns (id, start, tokens, num_logits) of each request that runs now; empty for none."""
        batch: list[Entry] = []
        planned = []
        if len(self.in_flight) == self.limits.max_in_flight:
            return []
        num_tokens = 0
        for entry in self.pool:
            if entry.running or entry.ended:
                continue
            if len(batch) == self.limits.max_batch_size:
                break
            tokens = entry.known[entry.fed :][: self.limits.max_batch_tokens]
            if num_tokens + len(tokens) > self.limits.max_batch_tokens:
                break
            if not entry.reserved:
                if self.num_reserved + self.num_pages(entry.request) > self.limits.num_pages:
                    break
                entry.reserved = True
            batch.append(entry)
            num_tokens += len(tokens)
            complete = entry.fed + len(tokens) == len(entry.known)
            planned.append((entry.request.id, entry.fed, tuple(tokens), int(complete)))
            entry.fed += len(tokens)
        for entry in batch:
            entry.running = True
            entry.num_iterations += 1
        if batch:
            self.in_flight.append(batch)
        return planned

    def commit(self, results: tuple[ItemResult, ...]) -> list[Event]:
        events = []
        for entry, got in zip(self.in_flight.pop(0), results, strict=True):
            entry.running = False
            if entry.ended:
                self.pool.remove(entry)
                continue
            entry.known += got.token_ids
            request = entry.request
            reason = FinishReason.ERROR if got.error else got.finish
            if reason is None and len(entry.known) - len(request.prompt_ids) == request.max_tokens:
                reason = FinishReason.LENGTH
            if reason:
                self.pool.remove(entry)
            if reason or got.token_ids:
                events.append(Event(request.id, got.token_ids, reason, got.error))
        return events

    def abort(self, request_id: str) -> Event | None:
        for entry in self.pool:
            if entry.request.id == request_id and not entry.ended:
                entry.ended = True
                if not entry.running:
                    self.pool.remove(entry)
                return Event(request_id, (), FinishReason.ABORT)
        return None


class CheckedScheduler:
    """Makes every call on a scheduler and on an oracle, and compares all that can be seen."""

    def __init__(
        self,
        limits: SchedulerLimits,
        make: Callable[[SchedulerLimits], Scheduler] = Scheduler,
        oracle: Algorithm1 | None = None,
    ) -> None:
        self.limits = limits
        self.scheduler = make(limits)
        self.oracle = Algorithm1(limits) if oracle is None else oracle
        self.in_flight: list[Iteration] = []
        self.num_calls = 0
        self._places: dict[str, tuple[int, tuple[int, ...]]] = {}  # row and pages of who holds them
        self._admitted: dict[str, int] = {}  # row of who was admitted and not released
        self._page_used: dict[int, int] = {}  # the last iteration that used a page

    def submit(self, request: Request) -> bool:
        """Submits; returns whether the request was accepted."""
        accepted = self.oracle.accepts(request)
        if accepted:
            self.scheduler.submit(request, now=0.0)
            self.oracle.submit(request)
        else:
            with pytest.raises(RequestRejected):
                self.scheduler.submit(request, now=0.0)
        self._check()
        return accepted

    def plan(self) -> Iteration | None:
        expected = self.oracle.select()
        iteration = self.scheduler.plan()
        if iteration is None:
            assert expected == []
        else:
            items = [(i.request_id, i.start, i.token_ids, i.num_logits) for i in iteration.items]
            assert items == expected
            self._check_iteration(iteration)
            self.in_flight.append(iteration)
        self._check()
        return iteration

    def commit(self, outcome: Outcome = one_token) -> list[Event]:
        """Commits the oldest iteration in flight."""
        iteration = self.in_flight.pop(0)
        entries = self.oracle.in_flight[0]
        room = [e.request.max_tokens + len(e.request.prompt_ids) - len(e.known) for e in entries]
        results = tuple(outcome(item, r) for item, r in zip(iteration.items, room, strict=True))
        expected = self.oracle.commit(results)
        events = self.scheduler.commit(iteration, StepResult(iteration.seq, results), now=0.0)
        assert events == expected
        self._check()
        return events

    def abort(self, request_id: str) -> Event | None:
        expected = self.oracle.abort(request_id)
        event = self.scheduler.abort(request_id)
        assert event == expected
        self._check()
        return event

    def drain(self, outcome: Outcome = one_token) -> list[Event]:
        """Runs until nothing is left, and no longer than the work that there is can take."""
        events: list[Event] = []
        for _ in range(self.oracle.most_iterations):
            while self.plan() is not None:
                pass
            if not self.in_flight:
                break
            events += self.commit(outcome)
        assert not self.scheduler.has_work
        assert not self.oracle.pool
        assert self.scheduler.num_free_pages == self.limits.num_pages
        return events

    def _check_iteration(self, iteration: Iteration) -> None:
        limits = self.limits
        assert 1 <= len(iteration.items) <= limits.max_batch_size
        assert iteration.num_tokens <= limits.max_batch_tokens
        assert len(self.in_flight) < limits.max_in_flight
        busy = {item.request_id for other in self.in_flight for item in other.items}
        first_in_flight = self.in_flight[0].seq if self.in_flight else iteration.seq
        known = {entry.request.id: tuple(entry.known) for entry in self.oracle.pool}
        for admission in iteration.admitted:
            assert admission.request_id not in self._admitted, "admitted twice"
            assert admission.token_ids == known[admission.request_id]
            self._admitted[admission.request_id] = admission.row
        for item in iteration.items:
            assert item.request_id not in busy, "in two iterations at once"
            assert 0 <= item.row < limits.max_running
            assert self._admitted[item.request_id] == item.row, "it runs without having been admitted"
            assert item.num_tokens == len(item.token_ids or ()) >= 1
            if item.request_id not in self._places:
                self._places[item.request_id] = item.row, item.pages
                for page in item.pages:
                    assert self._page_used.get(page, -1) < first_in_flight, "a page came free too early"
            assert self._places[item.request_id] == (item.row, item.pages), "row and pages are not stable"
            assert len(item.pages) * limits.page_size >= item.end
            self._page_used |= dict.fromkeys(item.pages, iteration.seq)
        rows = [row for row, _ in self._places.values()]
        assert len(set(rows)) == len(rows), "two requests share a row"
        pages = list(itertools.chain.from_iterable(held for _, held in self._places.values()))
        assert len(set(pages)) == len(pages), "two requests share a page"
        assert set(pages) <= set(range(limits.num_pages))

    def _check(self) -> None:
        self.num_calls += 1
        scheduler, oracle = self.scheduler, self.oracle
        scheduler.check_integrity()
        holders = {e.request.id for e in oracle.pool if e.reserved}
        for release in scheduler.take_released():
            assert self._admitted.pop(release.request_id, None) == release.row, "released, not admitted"
            assert release.ended == (release.request_id not in {e.request.id for e in oracle.pool})
        assert self._admitted.keys() == holders, "who was admitted has not been released, or the reverse"
        self._places = {name: place for name, place in self._places.items() if name in holders}
        assert scheduler.num_in_flight == len(oracle.in_flight)
        assert scheduler.num_reserved_pages == oracle.num_reserved <= self.limits.num_pages
        assert scheduler.num_free_pages == self.limits.num_pages - oracle.num_reserved
        assert scheduler.num_resident == sum(e.reserved for e in oracle.pool)
        assert scheduler.num_waiting == sum(not e.reserved for e in oracle.pool)
        assert scheduler.num_unfinished == sum(not e.ended for e in oracle.pool)
        assert scheduler.has_work == bool(oracle.pool)
        runs = [e.num_iterations for e in oracle.pool if not e.ended]
        assert runs == sorted(runs, reverse=True), "a later arrival has run more iterations"
