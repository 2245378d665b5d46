"""The baseline: batches run to their end, nobody joins or leaves, outputs come when the batch has ended."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize

from jorca.request import FinishReason, Request, SamplingParams
from jorca.scheduler import (
    Event,
    ItemResult,
    Iteration,
    RecordingScheduler,
    RequestLevel,
    Scheduler,
    StepResult,
    replay,
)
from scheduler.algorithm1 import CheckedScheduler, make_limits, make_request, one_token
from scheduler.request_level import RequestLevelOracle, checked_request_level
from scheduler.test_scheduler_properties import AnyCalls, TestAnyCalls, a_long_random_life


def names(iteration: Iteration | None) -> str:
    return "".join(item.request_id for item in iteration.items) if iteration else ""


def fed(iteration: Iteration | None) -> list[int]:
    assert iteration is not None
    return [item.num_tokens for item in iteration.items]


def step(checked: CheckedScheduler) -> tuple[str, list[Event]]:
    """Plans and commits one iteration; returns who ran and what came of it."""
    return names(checked.plan()), checked.commit()


def batches_of(checked: CheckedScheduler) -> list[list[list[int]]]:
    """Runs until nothing is left, one iteration at a time; returns tokens by item, iteration and batch."""
    batches, current = [], []
    while checked.scheduler.has_work:
        current.append(fed(checked.plan()))
        if checked.commit():
            batches.append(current)
            current = []
    assert not current
    return batches


class TestABatch:
    def test_runs_to_its_end_while_nobody_joins_or_leaves(self):
        checked = checked_request_level(make_limits(max_batch_size=2))
        for name, max_tokens in zip("ABC", (1, 3, 2), strict=True):
            checked.submit(make_request(name, max_tokens=max_tokens))
        runs = [step(checked) for _ in range(5)]
        assert [who for who, _ in runs] == ["AB", "AB", "AB", "C", "C"]
        told = [[(e.request_id, len(e.token_ids), e.finish_reason) for e in events] for _, events in runs]
        length = FinishReason.LENGTH
        assert told == [[], [], [("A", 1, length), ("B", 3, length)], [], [("C", 2, length)]]

    def test_is_taken_at_once_and_does_not_wait_to_be_full(self):
        checked = checked_request_level(make_limits(max_batch_size=4))
        checked.submit(make_request("A", max_tokens=2))
        assert names(checked.plan()) == "A"
        checked.submit(make_request("B"))
        checked.commit()
        assert names(checked.plan()) == "A"

    def test_is_as_large_as_the_memory(self):
        checked = checked_request_level(make_limits(num_pages=4, page_size=4))
        checked.submit(make_request("A", num_prompt=6, max_tokens=3))  # 8 positions, 2 pages
        checked.submit(make_request("B", num_prompt=9, max_tokens=4))  # 12 positions, 3 pages
        checked.submit(make_request("C", num_prompt=1, max_tokens=1))
        assert [step(checked)[0] for _ in range(4)] == ["A", "A", "A", "BC"]

    def test_computes_a_finished_request_again_where_it_stopped(self):
        checked = checked_request_level(make_limits())
        checked.submit(make_request("A", num_prompt=3, max_tokens=1))
        checked.submit(make_request("B", num_prompt=2, max_tokens=3))
        for _ in range(2):
            step(checked)
        last = checked.plan()
        assert last is not None
        ended, running = last.items
        assert (ended.start, ended.token_ids, ended.num_logits) == (2, (102,), 0)
        assert (running.start, running.num_tokens, running.num_logits) == (3, 1, 1)

    @pytest.mark.parametrize("shortest_prompt", [False, True])
    @pytest.mark.parametrize(
        "sizes", [[(3, 4)], [(2, 1), (9, 6)], [(5, 2), (5, 9), (5, 1)], [(1, 3), (7, 8)]]
    )
    def test_takes_as_many_iterations_as_the_paper_says(self, sizes, shortest_prompt):
        """(Longest - shortest prompt under its rule) + longest output, both of one request here."""
        checked = checked_request_level(make_limits(), shortest_prompt=shortest_prompt)
        for i, (num_prompt, max_tokens) in enumerate(sizes):
            checked.submit(make_request(str(i), num_prompt, max_tokens))
        prompts, outputs = zip(*sizes, strict=True)
        (batch,) = batches_of(checked)
        assert len(batch) == (max(prompts) - min(prompts)) * shortest_prompt + max(outputs)
        assert all(len(iteration) == len(sizes) for iteration in batch)
        assert batch[0] == [min(prompts)] * len(sizes) if shortest_prompt else list(prompts)
        assert {n for iteration in batch[1:] for n in iteration} <= {1}

    def test_under_the_shortest_prompt_rule_short_prompts_decode_while_long_ones_are_fed(self):
        checked = checked_request_level(make_limits(), shortest_prompt=True)
        checked.submit(make_request("A", num_prompt=2, max_tokens=2))
        checked.submit(make_request("B", num_prompt=5, max_tokens=1))
        logits = []
        while (iteration := checked.plan()) is not None:
            logits.append([item.num_logits for item in iteration.items])
            checked.commit()
        assert logits == [[1, 0], [1, 0], [0, 0], [0, 1]]

    def test_feeds_prompts_in_pieces_where_an_iteration_does_not_hold_them(self):
        checked = checked_request_level(make_limits(max_batch_tokens=8))
        for i in range(3):
            checked.submit(make_request(str(i), num_prompt=5, max_tokens=3))
        assert batches_of(checked) == [[[5, 2, 1], [1, 3, 4], [1, 1, 1], [1, 1, 1]]]

    def test_scores_every_token_of_a_prompt_once_and_keeps_to_the_rows_of_logits(self):
        scheduler = Scheduler(make_limits(max_batch_size=4), RequestLevel())
        scored = SamplingParams(max_tokens=2, prompt_logprobs=0)
        scheduler.submit(Request(id="A", prompt_ids=tuple(range(9)), params=scored), now=0.0)
        scheduler.submit(make_request("B", num_prompt=5, max_tokens=2), now=0.0)
        items = []
        while (iteration := scheduler.plan()) is not None:
            assert sum(item.num_logits for item in iteration.items) <= 4
            items += [item for item in iteration.items if item.request_id == "A"]
            results = tuple(
                ItemResult((7,) if item.num_logits and item.end >= (9, 5)[item.request_id == "B"] else ())
                for item in iteration.items
            )
            scheduler.commit(iteration, StepResult(iteration.seq, results), now=0.0)
        assert [(i.start, i.num_tokens, i.num_logits) for i in items] == [
            (0, 3, 3), (3, 3, 3), (6, 2, 2), (8, 1, 1), (9, 1, 1),
        ]  # fmt: skip


class TestMicrobatches:
    def test_take_turns_and_fill_the_pipeline(self):
        """As FasterTransformer does (figure 8b): two stages, AB and CD; E waits for the end of all four."""
        checked = checked_request_level(make_limits(max_in_flight=2), microbatch_size=2)
        for name, max_tokens in zip("ABCDE", (1, 1, 3, 2, 1), strict=True):
            checked.submit(make_request(name, max_tokens=max_tokens))
        order = [names(checked.plan()), names(checked.plan())]
        assert checked.plan() is None
        while checked.in_flight:
            checked.commit()
            while iteration := checked.plan():
                order.append(names(iteration))
        assert order == ["AB", "CD", "AB", "CD", "AB", "CD", "AB", "E"]

    def test_a_single_one_leaves_the_other_stages_idle(self):
        checked = checked_request_level(make_limits(max_in_flight=3))
        for name in "ABCD":
            checked.submit(make_request(name))
        assert names(checked.plan()) == "ABCD"
        assert checked.plan() is None

    def test_are_not_larger_than_an_iteration(self):
        checked = checked_request_level(make_limits(max_batch_tokens=2))
        for name in "ABC":
            checked.submit(make_request(name, num_prompt=1, max_tokens=2))
        assert [step(checked)[0] for _ in range(4)] == ["AB", "C", "AB", "C"]


class TestEnds:
    @staticmethod
    def three(**limits: int) -> CheckedScheduler:
        checked = checked_request_level(make_limits(**limits))
        for name, max_tokens in zip("ABC", (1, 3, 5), strict=True):
            checked.submit(make_request(name, max_tokens=max_tokens))
        step(checked)
        step(checked)
        return checked

    def test_an_abort_is_told_at_once_with_the_tokens_so_far_and_keeps_its_place(self):
        checked = self.three()
        event = checked.abort("B")
        assert event is not None
        assert (len(event.token_ids), event.finish_reason) == (2, FinishReason.ABORT)
        assert checked.abort("B") is None
        runs = [step(checked) for _ in range(3)]
        assert [who for who, _ in runs] == ["ABC"] * 3
        assert [e.request_id for e in runs[-1][1]] == ["A", "C"]

    def test_a_finished_request_can_be_aborted_until_its_output_is_released(self):
        checked = self.three()
        event = checked.abort("A")
        assert event is not None
        assert event.finish_reason == FinishReason.ABORT
        assert [e.request_id for e in checked.drain()] == ["B", "C"]

    def test_aborting_all_ends_the_batch_at_once(self):
        checked = self.three()
        checked.submit(make_request("D"))
        for name in "CBA":
            checked.abort(name)
        assert checked.scheduler.num_resident == 0
        assert step(checked)[0] == "D"

    def test_the_outputs_of_those_who_finished_come_with_one_more_iteration_when_the_rest_is_aborted(self):
        checked = self.three()
        checked.abort("B")
        checked.abort("C")
        assert checked.scheduler.has_work
        who, events = step(checked)
        assert who == "ABC"
        assert [(e.request_id, e.finish_reason) for e in events] == [("A", FinishReason.LENGTH)]
        assert not checked.scheduler.has_work

    def test_a_place_aborted_before_it_ran_feeds_its_first_token(self):
        checked = checked_request_level(make_limits(), microbatch_size=1)
        checked.submit(make_request("A", max_tokens=1))
        checked.submit(make_request("B", max_tokens=1))
        checked.submit(make_request("C", max_tokens=2))
        checked.plan()
        checked.abort("B")
        checked.commit()
        iteration = checked.plan()
        assert iteration is not None
        assert (iteration.items[0].request_id, iteration.items[0].token_ids) == ("B", (100,))
        checked.commit()
        assert [e.request_id for e in checked.drain()] == ["A", "C"]

    def test_errors_and_stops_are_released_with_the_batch(self):
        checked = checked_request_level(make_limits())
        for name in "ABC":
            checked.submit(make_request(name, max_tokens=2))
        outcomes = {
            0: ItemResult(error="logits are not finite"),
            1: ItemResult((7,), finish=FinishReason.STOP),
            2: ItemResult((8,)),
        }
        checked.plan()
        assert checked.commit(lambda item, room: outcomes[item.row]) == []
        checked.plan()
        assert checked.commit(lambda item, room: ItemResult((9,)[: item.num_logits])) == [
            Event("A", (), FinishReason.ERROR, "logits are not finite"),
            Event("B", (7,), FinishReason.STOP),
            Event("C", (8, 9), FinishReason.LENGTH),
        ]

    def test_an_id_is_taken_until_its_place_is_free(self):
        checked = self.three()
        scheduler = checked.scheduler
        with pytest.raises(ValueError, match="'A' is live"):  # it has finished, but nobody knows
            scheduler.submit(make_request("A"), now=0.0)
        checked.abort("A")
        with pytest.raises(ValueError, match="'A' has ended but still has its row"):
            scheduler.submit(make_request("A"), now=0.0)
        checked.drain()
        assert checked.submit(make_request("A"))

    def test_a_restart_tells_what_was_held_and_the_rest_is_one_batch_again(self):
        scheduler = self.three().scheduler
        told = [(e.request_id, len(e.token_ids), e.finish_reason) for e in scheduler.restart()]
        assert told == [("A", 1, FinishReason.LENGTH), ("B", 2, None), ("C", 2, None)]
        scheduler.check_integrity()
        events, batches = [], []
        while (iteration := scheduler.plan()) is not None:
            batches.append(names(iteration))
            results = tuple(one_token(item, 1) for item in iteration.items)
            events += scheduler.commit(iteration, StepResult(iteration.seq, results), now=0.0)
        assert batches == ["BC"] * 3
        assert [(e.request_id, len(e.token_ids)) for e in events] == [("B", 1), ("C", 3)]


class AnyRequestLevelCalls(AnyCalls):
    """Submits, plans, commits and aborts in any order."""

    @initialize(
        max_batch_size=st.integers(1, 5),
        max_batch_tokens=st.integers(1, 24),
        max_in_flight=st.integers(1, 4),
        num_pages=st.integers(1, 12),
        page_size=st.integers(1, 8),
        max_positions=st.integers(1, 32),
        microbatch_size=st.none() | st.integers(1, 3),
        shortest_prompt=st.booleans(),
    )
    def start(self, microbatch_size: int | None, shortest_prompt: bool, **limits: int) -> None:
        self.begin(checked_request_level(make_limits(**limits), microbatch_size, shortest_prompt))


TestAnyRequestLevelCalls = AnyRequestLevelCalls.TestCase
TestAnyRequestLevelCalls.settings = TestAnyCalls.settings
del TestAnyCalls


@pytest.mark.parametrize("seed", range(20))
def test_a_long_random_life_follows_the_oracle_call_by_call(seed: int):
    a_long_random_life(
        seed, lambda limits: checked_request_level(limits, (None, 1, 2, 3)[seed % 4], seed % 3 == 0)
    )


def test_every_request_gets_exactly_its_tokens_in_one_event():
    checked = checked_request_level(make_limits(max_in_flight=3, num_pages=10, page_size=4), 2)
    for i in range(50):
        checked.submit(make_request(str(i), 1 + i % 7, 1 + i % 11))
    events = checked.drain()
    assert [(e.request_id, len(e.token_ids), e.finish_reason) for e in events] == [
        (str(i), 1 + i % 11, FinishReason.LENGTH) for i in range(50)
    ]


def test_a_log_brings_its_options_and_gives_the_same_iterations_again():
    lines: list[str] = []
    limits = make_limits(max_in_flight=2)
    checked = CheckedScheduler(
        limits,
        lambda limits: RecordingScheduler(
            limits, RequestLevel(microbatch_size=2, shortest_prompt=True), write=lines.append
        ),
        RequestLevelOracle(limits, 2, True),
    )
    for i in range(10):
        checked.submit(make_request(str(i), 1 + i % 4, 1 + i % 5))
    for i in range(8):
        while checked.plan() is not None:
            pass
        checked.commit(one_token)
        checked.abort(str(i))
    again = replay(lines)
    again.check_integrity()
    assert dict(again.policy.options) == {"microbatch_size": 2, "shortest_prompt": True}
    assert again.num_waiting == checked.scheduler.num_waiting
    with pytest.raises(ValueError, match=r"policy's options is .*, the log was made with"):
        replay(lines, RequestLevel())


def test_held_outputs_without_a_row_are_found_out():
    scheduler = Scheduler(make_limits(), RequestLevel())
    scheduler._held["A"] = Event("A", (1,))
    with pytest.raises(AssertionError, match=r"outputs of \{'A'\} are held back"):
        scheduler.check_integrity()
