"""Request-level scheduling as slow, obvious Python: the oracle of the policy of that name."""

from __future__ import annotations

import dataclasses

from jorca.request import FinishReason, Request
from jorca.scheduler import Event, ItemResult, RequestLevel, Scheduler, SchedulerLimits
from scheduler.algorithm1 import Algorithm1, CheckedScheduler, Entry


@dataclasses.dataclass
class Place(Entry):
    """A request, and what the client is still to be told of it."""

    held: tuple[int, ...] = ()
    reason: FinishReason | None = None
    error: str | None = None
    told: bool = False


class RequestLevelOracle(Algorithm1):
    """A batch is taken when the engine is idle, and all its places are computed until all have ended."""

    def __init__(self, limits: SchedulerLimits, microbatch_size: int | None, shortest_prompt: bool) -> None:
        super().__init__(limits)
        self.size = min(microbatch_size or limits.max_batch_size, limits.max_batch_tokens)
        self.shortest_prompt = shortest_prompt
        self.batch: list[Place] = []
        self.microbatches: list[list[Place]] = []
        self.num_turns = 0
        self.first_pass = 0

    @property
    def places(self) -> list[Place]:
        return [entry for entry in self.pool if isinstance(entry, Place)]

    @property
    def most_iterations(self) -> int:
        return super().most_iterations * self.limits.max_batch_size  # everybody may be a microbatch

    def submit(self, request: Request) -> None:
        self.pool.append(Place(request, [*request.prompt_ids, *request.output_ids]))

    def take_batch(self) -> None:
        for place in self.places[: self.limits.max_batch_size]:
            if self.num_reserved + self.num_pages(place.request) > self.limits.num_pages:
                break
            place.reserved = True
            self.batch.append(place)
        lengths = [len(place.known) for place in self.batch]
        self.first_pass = (min if self.shortest_prompt else max)(lengths, default=0)
        self.microbatches = [
            self.batch[i : i + self.size] for i in range(0, len(self.batch), self.size)
        ]  # fmt: skip
        self.num_turns = 0

    def select(self) -> list[tuple[str, int, tuple[int, ...], int]]:
        if len(self.in_flight) == self.limits.max_in_flight:
            return []
        if not self.batch:
            self.take_batch()
        if not self.batch or (self.in_flight and all(place.ended for place in self.batch)):
            return []
        microbatch = self.microbatches[self.num_turns % len(self.microbatches)]
        if any(place.running for place in microbatch):
            return []
        self.num_turns += 1
        planned = []
        room = self.limits.max_batch_tokens
        for num_behind, place in zip(reversed(range(len(microbatch))), microbatch, strict=True):
            if place.ended:
                start = max(place.fed - 1, 0)
                tokens, num_logits = [place.known[start]], 0
            else:
                start = place.fed
                tokens = place.known[start : max(self.first_pass, start + 1)][: room - num_behind]
                num_logits = int(start + len(tokens) == len(place.known))
            room -= len(tokens)
            place.fed = start + len(tokens)
            place.running = True
            place.num_iterations += 1
            planned.append((place.request.id, start, tuple(tokens), num_logits))
        self.in_flight.append(list(microbatch))
        return planned

    def commit(self, results: tuple[ItemResult, ...]) -> list[Event]:
        for place, got in zip(self.in_flight.pop(0), results, strict=True):
            assert isinstance(place, Place)
            place.running = False
            if place.ended:
                continue
            place.known += got.token_ids
            place.held += got.token_ids
            place.error = got.error
            place.reason = FinishReason.ERROR if got.error else got.finish
            num_output = len(place.known) - len(place.request.prompt_ids)
            if place.reason is None and num_output == place.request.max_tokens:
                place.reason = FinishReason.LENGTH
            place.ended = place.reason is not None
        if self.in_flight or not all(place.ended for place in self.batch):
            return []
        events = [Event(p.request.id, p.held, p.reason, p.error) for p in self.batch if not p.told]
        self.dissolve()
        return events

    def abort(self, request_id: str) -> Event | None:
        for place in self.places:
            if place.request.id == request_id and not place.told:
                place.told = place.ended = True
                if place not in self.batch:
                    self.pool.remove(place)
                elif not self.in_flight and all(p.told for p in self.batch):
                    self.dissolve()
                return Event(request_id, place.held, FinishReason.ABORT)
        return None

    def dissolve(self) -> None:
        """Ends the batch."""
        self.pool = [place for place in self.pool if place not in self.batch]
        self.batch = []


def checked_request_level(
    limits: SchedulerLimits, microbatch_size: int | None = None, shortest_prompt: bool = False
) -> CheckedScheduler:
    """A scheduler with the policy beside its oracle."""
    policy = RequestLevel(microbatch_size=microbatch_size, shortest_prompt=shortest_prompt)
    oracle = RequestLevelOracle(limits, microbatch_size, shortest_prompt)
    return CheckedScheduler(limits, lambda limits: Scheduler(limits, policy), oracle)
