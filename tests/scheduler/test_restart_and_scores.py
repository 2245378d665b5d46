"""Restarting after the KV array is lost, and prompts whose log-probabilities are wanted."""

import random

import pytest

from jorca.request import Request, SamplingParams
from jorca.scheduler import (
    ItemResult,
    RecordingScheduler,
    RequestLevel,
    Scheduler,
    SchedulerLimits,
    StepResult,
    replay,
)


def limits(**changes):
    sizes = {
        "max_batch_size": 4,
        "max_batch_tokens": 16,
        "max_in_flight": 2,
        "num_pages": 40,
        "page_size": 2,
        "max_positions": 40,
    }
    return SchedulerLimits(**(sizes | changes))


def request(name, num_prompt=3, max_tokens=4, **params):
    return Request(
        id=name, prompt_ids=tuple(range(num_prompt)), params=SamplingParams(max_tokens=max_tokens, **params)
    )


def token(item):
    return 1000 * ord(item.request_id[0]) + item.end


def result(iteration, scored=()):
    """A token for every item that feeds all it has; those that feed a part to be scored are in `scored`."""
    items = (
        ItemResult((token(i),) if i.num_logits and i.request_id not in scored else ())
        for i in iteration.items
    )
    return StepResult(iteration.seq, tuple(items))


class TestRestart:
    @pytest.mark.parametrize("seed", range(30))
    def test_loses_no_request_and_no_token_and_keeps_the_order(self, seed):
        rng = random.Random(seed)
        lines = []
        scheduler = RecordingScheduler(limits(max_in_flight=rng.randint(1, 3)), write=lines.append)
        names = [chr(ord("A") + i) for i in range(12)]
        coming, in_flight, last_seq = list(names), [], -1
        tokens: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
        while coming or scheduler.has_work:
            if coming and rng.random() < 0.5:
                scheduler.submit(request(coming.pop(0), rng.randint(1, 5), 4), 0.0)
            if (iteration := scheduler.plan()) is not None:
                assert iteration.seq == last_seq + 1
                last_seq = iteration.seq
                in_flight.append(iteration)
            if rng.random() < 0.15:
                assert scheduler.restart() == []
                in_flight.clear()
                assert scheduler.num_in_flight == scheduler.num_reserved_pages == 0
            elif in_flight and rng.random() < 0.7:
                done = in_flight.pop(0)
                for event in scheduler.commit(done, result(done), 0.0):
                    tokens[event.request_id] += event.token_ids
            scheduler.check_integrity()
            waiting = list(scheduler._pool._waiting)
            assert waiting == sorted(waiting)
        assert {len(t) for t in tokens.values()} == {4}
        for got in tokens.values():  # consecutive positions: none twice, none left out
            assert list(got) == list(range(got[0], got[0] + 4))
        assert replay(lines).num_unfinished == 0

    def test_what_was_aborted_in_flight_does_not_come_back(self):
        scheduler = Scheduler(limits())
        for name in "ABC":
            scheduler.submit(request(name), 0.0)
        scheduler.plan()
        scheduler.abort("B")
        scheduler.restart()
        iteration = scheduler.plan()
        assert iteration is not None
        assert [item.request_id for item in iteration.items] == ["A", "C"]
        scheduler.submit(request("B"), 0.0)

    def test_under_request_level_what_was_held_back_is_told_and_the_rest_goes_on(self):
        scheduler = Scheduler(limits(max_in_flight=1), RequestLevel())
        scheduler.submit(request("A", max_tokens=1), 0.0)
        scheduler.submit(request("B", max_tokens=3), 0.0)
        iteration = scheduler.plan()
        assert iteration is not None
        assert scheduler.commit(iteration, result(iteration), 0.0) == []
        events = {event.request_id: event for event in scheduler.restart()}
        assert (events["A"].finish_reason, len(events["A"].token_ids)) == ("length", 1)
        assert (events["B"].finish_reason, len(events["B"].token_ids)) == (None, 1)
        tokens = events["B"].token_ids
        while (iteration := scheduler.plan()) is not None:
            for event in scheduler.commit(iteration, result(iteration), 0.0):
                tokens += event.token_ids
        assert len(tokens) == 3
        assert not scheduler.has_work
        scheduler.check_integrity()


class TestScoredPrompts:
    def run(self, scheduler, scored):
        """Runs to the end; returns the iterations and how many rows of logits each had."""
        iterations = []
        while (iteration := scheduler.plan()) is not None:
            iterations.append(iteration)
            whole = [
                i.request_id
                for i in iteration.items
                if i.request_id in scored and i.end < scored[i.request_id]
            ]
            scheduler.commit(iteration, result(iteration, whole), 0.0)
            scheduler.check_integrity()
        return iterations

    def test_all_tokens_but_the_last_get_logits_in_pieces_that_fit_the_rows(self):
        scheduler = Scheduler(limits(max_in_flight=1))
        scheduler.submit(request("A", num_prompt=10, max_tokens=2, prompt_logprobs=0), 0.0)
        items = [i.items[0] for i in self.run(scheduler, {"A": 10})]
        assert [(i.start, i.num_tokens, i.num_logits) for i in items] == [
            (0, 4, 4),
            (4, 4, 4),
            (8, 1, 1),
            (9, 1, 1),
            (10, 1, 1),
        ]

    def test_others_keep_their_row_and_the_walk_stops_where_rows_are_used_up(self):
        scheduler = Scheduler(limits(max_in_flight=1))
        scheduler.submit(request("A", num_prompt=2, max_tokens=6), 0.0)
        scheduler.submit(request("B", num_prompt=8, max_tokens=2, prompt_logprobs=3), 0.0)
        scheduler.submit(request("C", num_prompt=2, max_tokens=2), 0.0)
        iterations = self.run(scheduler, {"B": 8})
        parts = [{i.request_id: (i.num_tokens, i.num_logits) for i in it.items} for it in iterations]
        assert parts[0] == {"A": (2, 1), "B": (3, 3)}
        assert parts[1] == {"A": (1, 1), "B": (3, 3)}
        assert parts[2] == {"A": (1, 1), "B": (1, 1), "C": (2, 1)}
        assert all(sum(n for _, n in part.values()) <= 4 for part in parts)

    def test_a_prompt_of_one_token_has_nothing_to_score(self):
        scheduler = Scheduler(limits(max_in_flight=1))
        scheduler.submit(request("A", num_prompt=1, max_tokens=2, prompt_logprobs=0), 0.0)
        assert [i.items[0].num_tokens for i in self.run(scheduler, {})] == [1, 1]

    def test_rows_never_exceed_the_batch_size_and_first_come_first_served_holds(self):
        rng = random.Random(1)
        scheduler, scored, runs = Scheduler(limits(max_in_flight=1)), {}, {}
        for i in range(20):
            name, num_prompt = chr(ord("A") + i), rng.randint(1, 12)
            wants = rng.random() < 0.5
            scheduler.submit(request(name, num_prompt, 3, prompt_logprobs=0 if wants else None), 0.0)
            runs[name] = 0
            if wants:
                scored[name] = num_prompt
        for iteration in self.run(scheduler, scored):
            assert sum(item.num_logits for item in iteration.items) <= 4
            for item in iteration.items:
                runs[item.request_id] += 1
        assert all(count >= 3 for count in runs.values())
        assert not scheduler.has_work
