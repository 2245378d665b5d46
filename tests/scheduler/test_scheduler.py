"""What the scheduler does in cases small enough to work out by hand."""

import pytest

from jorca.config import ConfigError
from jorca.request import FinishReason, Request, RequestRejected, SamplingParams
from jorca.scheduler import (
    Admission,
    Event,
    Item,
    ItemResult,
    Iteration,
    Orca,
    Pool,
    Release,
    RequestLevel,
    Reservation,
    Scheduler,
    SchedulerLimits,
    StepResult,
    make_policy,
)
from jorca.scheduler.policy import Pick
from scheduler.algorithm1 import CheckedScheduler, make_limits, make_request


def planned(scheduler: Scheduler) -> Iteration:
    iteration = scheduler.plan()
    assert iteration is not None
    return iteration


def names(iteration: Iteration | None) -> str:
    return "".join(item.request_id for item in iteration.items) if iteration else ""


def tokens(iteration: Iteration, *token_ids: int) -> StepResult:
    """One token for each item."""
    given = token_ids or range(len(iteration.items))
    return StepResult(iteration.seq, tuple(ItemResult((t,)) for t in given))


def step(scheduler: Scheduler) -> Iteration:
    """Plans and commits an iteration in which every item gets a token."""
    iteration = planned(scheduler)
    scheduler.commit(iteration, tokens(iteration), now=0.0)
    return iteration


def submit(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.submit(request, now=0.0)


def refusal(scheduler: Scheduler, request: Request) -> str:
    """Returns the message, once it is sure that nothing of the request was kept."""
    before = scheduler.num_waiting, scheduler.num_resident, scheduler.num_free_pages
    with pytest.raises(RequestRejected) as caught:
        scheduler.submit(request, now=0.0)
    assert (scheduler.num_waiting, scheduler.num_resident, scheduler.num_free_pages) == before
    scheduler.check_integrity()
    return str(caught.value)


class TestIterations:
    def test_a_request_feeds_its_prompt_and_then_each_token_but_the_last(self):
        scheduler = Scheduler(make_limits())
        submit(scheduler, make_request("A", num_prompt=3, max_tokens=3))
        first = planned(scheduler)
        pages = first.items[0].pages
        admitted = (Admission("A", 0, (100, 101, 102)),)
        assert first == Iteration(0, (Item("A", 0, 0, 3, (100, 101, 102), pages, 1),), admitted)
        assert scheduler.commit(first, tokens(first, 7), now=0.0) == [Event("A", (7,))]
        second = planned(scheduler)
        assert second == Iteration(1, (Item("A", 0, 3, 1, (7,), pages, 1),))
        assert scheduler.commit(second, tokens(second, 8), now=0.0) == [Event("A", (8,))]
        third = planned(scheduler)
        assert third == Iteration(2, (Item("A", 0, 4, 1, (8,), pages, 1),))
        assert scheduler.take_released() == []
        assert scheduler.commit(third, tokens(third, 9), now=0.0) == [Event("A", (9,), FinishReason.LENGTH)]
        assert scheduler.take_released() == [Release("A", 0, ended=True)]
        assert scheduler.plan() is None
        assert not scheduler.has_work

    def test_one_token_is_one_iteration_and_its_pages_are_free_in_the_next(self):
        scheduler = Scheduler(make_limits(num_pages=1))
        submit(scheduler, make_request("A", max_tokens=1), make_request("B", max_tokens=1))
        assert names(step(scheduler)) == "A"
        assert scheduler.num_free_pages == 1
        assert names(step(scheduler)) == "B"

    def test_an_idle_scheduler_plans_nothing(self):
        scheduler = Scheduler(make_limits())
        assert scheduler.plan() is None
        assert not scheduler.has_work

    def test_initiation_and_increment_share_an_iteration(self):
        scheduler = Scheduler(make_limits())
        submit(scheduler, make_request("A", num_prompt=5))
        step(scheduler)
        submit(scheduler, make_request("B", num_prompt=7))
        assert [(i.request_id, i.start, i.num_tokens) for i in step(scheduler).items] == [
            ("A", 5, 1),
            ("B", 0, 7),
        ]

    def test_a_finished_request_leaves_at_once_and_another_joins_in_the_next_iteration(self):
        scheduler = Scheduler(make_limits(max_batch_size=2))
        submit(scheduler, make_request("A", max_tokens=1), make_request("B", max_tokens=3), make_request("C"))
        assert names(step(scheduler)) == "AB"
        joined = step(scheduler)
        assert names(joined) == "BC"
        assert [item.row for item in joined.items] == [1, 0]  # C has the row that A gave back

    def test_three_stages_follow_the_papers_figure_8a(self):
        """Three workers, max_bs 2: AB, CD, EF go in; then whoever returns goes in again."""
        scheduler = Scheduler(make_limits(max_batch_size=2, max_in_flight=3))
        submit(scheduler, *(make_request(name, max_tokens=3) for name in "ABCDEFGH"))
        in_flight = [planned(scheduler) for _ in range(3)]
        assert [names(i) for i in in_flight] == ["AB", "CD", "EF"]
        assert scheduler.plan() is None
        order = []
        while in_flight:
            oldest = in_flight.pop(0)
            scheduler.commit(oldest, tokens(oldest), now=0.0)
            while (iteration := scheduler.plan()) is not None:
                in_flight.append(iteration)
                order.append(names(iteration))
        assert order == ["AB", "CD", "EF", "AB", "CD", "EF", "GH", "GH", "GH"]

    def test_fewer_requests_than_stages_leave_stages_empty_instead_of_running_twice(self):
        scheduler = Scheduler(make_limits(max_in_flight=3))
        submit(scheduler, make_request("A"))
        first = planned(scheduler)
        assert scheduler.plan() is None
        submit(scheduler, make_request("B"))  # an arrival does not wait for a return
        assert names(scheduler.plan()) == "B"
        assert scheduler.plan() is None
        scheduler.commit(first, tokens(first), now=0.0)
        assert names(scheduler.plan()) == "A"


class TestTheWalkStops:
    def test_where_memory_does_not_suffice_though_a_later_request_would_fit(self):
        scheduler = Scheduler(make_limits(num_pages=4, page_size=4))
        submit(
            scheduler,
            make_request("A", num_prompt=6, max_tokens=3),  # 8 positions, 2 pages
            make_request("B", num_prompt=9, max_tokens=4),  # 12 positions, 3 pages
            make_request("C", num_prompt=1, max_tokens=1),
        )
        assert [names(step(scheduler)) for _ in range(4)] == ["A", "A", "A", "BC"]

    def test_where_tokens_do_not_suffice_though_a_later_request_would_fit(self):
        scheduler = Scheduler(make_limits(max_batch_tokens=10))
        submit(scheduler, make_request("A", 6), make_request("B", 5), make_request("C", 1))
        assert [names(step(scheduler)) for _ in range(2)] == ["A", "ABC"]

    def test_among_residents_too_so_that_nobody_new_passes_one_that_waits_for_tokens(self):
        scheduler = Scheduler(make_limits(max_batch_tokens=2))
        submit(scheduler, *(make_request(name, 1, max_tokens=3) for name in "ABCD"))
        assert [names(step(scheduler)) for _ in range(6)] == ["AB", "AB", "AB", "CD", "CD", "CD"]

    def test_at_the_batch_size(self):
        scheduler = Scheduler(make_limits(max_batch_size=3))
        submit(scheduler, *(make_request(name) for name in "ABCDE"))
        assert names(step(scheduler)) == "ABC"

    def test_but_a_resident_never_waits_for_memory(self):
        checked = CheckedScheduler(make_limits(num_pages=2, page_size=4, max_batch_size=2))
        for i in range(6):
            checked.submit(make_request(str(i), num_prompt=2, max_tokens=3))
        checked.plan()
        assert checked.scheduler.num_free_pages == 0
        assert {e.finish_reason for e in checked.drain()} == {None, FinishReason.LENGTH}


class TestFairness:
    def test_a_decode_gets_a_token_in_every_iteration_while_long_prompts_arrive(self):
        limits = make_limits(max_batch_size=4, max_batch_tokens=2000, num_pages=1000)
        scheduler = Scheduler(limits)
        submit(scheduler, make_request("A", num_prompt=10, max_tokens=40))
        step(scheduler)
        submit(scheduler, *(make_request(f"long-{i}", num_prompt=900, max_tokens=2) for i in range(20)))
        seqs = []
        while scheduler.has_work:
            iteration = step(scheduler)
            if "A" in [item.request_id for item in iteration.items]:
                seqs.append(iteration.seq)
        assert seqs == list(range(1, 40))

    def test_a_short_request_behind_a_full_batch_waits_and_passes_nobody(self):
        scheduler = Scheduler(make_limits(max_batch_size=2))
        submit(scheduler, make_request("A", max_tokens=200), make_request("B", max_tokens=200))
        step(scheduler)
        submit(scheduler, make_request("C", max_tokens=1))
        assert {names(step(scheduler)) for _ in range(199)} == {"AB"}
        assert names(step(scheduler)) == "C"


class TestRefusals:
    def test_what_can_never_fit_is_refused_and_blocks_nobody(self):
        scheduler = Scheduler(make_limits(num_pages=4, page_size=16, max_positions=128))
        message = refusal(scheduler, make_request("A", num_prompt=80, max_tokens=1))
        assert message == (
            "prompt + max_tokens - 1 = 80 + 1 - 1 = 80 positions need 5 pages of 16, but num_pages is 4; "
            "shorten the prompt to at most 64 tokens, or raise num_pages"
        )
        submit(scheduler, make_request("B", num_prompt=4, max_tokens=2))
        step(scheduler)
        step(scheduler)
        assert not scheduler.has_work
        assert scheduler.num_free_pages == 4

    @pytest.mark.parametrize(
        ("num_prompt", "max_tokens", "positions"), [(12, 5, 16), (12, 4, 15), (16, 1, 16), (1, 16, 16)]
    )
    def test_a_request_that_just_fits_the_context_is_served(self, num_prompt, max_tokens, positions):
        scheduler = Scheduler(make_limits(max_positions=16, num_pages=16, page_size=1))
        submit(scheduler, make_request("A", num_prompt, max_tokens))
        iterations = [step(scheduler)]
        assert scheduler.num_reserved_pages == (positions if max_tokens > 1 else 0)
        while scheduler.has_work:
            iterations.append(step(scheduler))
        assert len(iterations) == max_tokens
        assert iterations[-1].items[0].end == positions == len(iterations[0].items[0].pages)
        assert scheduler.num_free_pages == 16

    @pytest.mark.parametrize(
        ("num_prompt", "max_tokens", "remedy"),
        [
            (16, 2, "lower max_tokens to at most 1 or shorten the prompt"),
            (12, 6, "lower max_tokens to at most 5 or shorten the prompt"),
            (17, 1, "shorten the prompt to at most 16 tokens"),
        ],
    )
    def test_a_request_that_just_does_not_fit_the_context_is_refused(self, num_prompt, max_tokens, remedy):
        scheduler = Scheduler(make_limits(max_positions=16, num_pages=16, page_size=1))
        assert refusal(scheduler, make_request("A", num_prompt, max_tokens)) == (
            f"prompt + max_tokens - 1 = {num_prompt} + {max_tokens} - 1 = 17 positions, "
            f"but the model's max_positions is 16; {remedy}"
        )

    def test_a_prompt_longer_than_an_iteration_is_refused(self):
        scheduler = Scheduler(make_limits(max_batch_tokens=8))
        assert refusal(scheduler, make_request("A", num_prompt=9)) == (
            "prompt_ids holds 9 tokens, but max_batch_tokens is 8; "
            "shorten the prompt or raise max_batch_tokens"
        )
        submit(scheduler, make_request("A", num_prompt=8))

    def test_an_id_that_is_live_is_refused_and_the_first_request_goes_on(self):
        scheduler = Scheduler(make_limits())
        submit(scheduler, make_request("r", max_tokens=2))
        assert "'r' is live" in refusal(scheduler, make_request("r"))
        first = planned(scheduler)
        assert "'r' is live" in refusal(scheduler, make_request("r"))
        scheduler.commit(first, tokens(first), now=0.0)
        assert "'r' is live" in refusal(scheduler, make_request("r"))
        step(scheduler)
        submit(scheduler, make_request("r"))  # it has ended: the id is free

    def test_the_id_of_an_aborted_request_is_taken_until_it_has_come_back(self):
        scheduler = Scheduler(make_limits(max_in_flight=2))
        submit(scheduler, make_request("r"))
        iteration = planned(scheduler)
        scheduler.abort("r")
        assert "'r' has ended but still has its row" in refusal(scheduler, make_request("r"))
        scheduler.commit(iteration, tokens(iteration), now=0.0)
        submit(scheduler, make_request("r"))
        assert names(step(scheduler)) == "r"

    @pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
    def test_a_limit_must_be_a_positive_integer(self, value):
        with pytest.raises(ConfigError, match="page_size must be an integer of at least 1"):
            make_limits(page_size=value)

    def test_a_policy_is_found_by_its_name(self):
        assert isinstance(make_policy("orca"), Orca)
        assert isinstance(make_policy("request-level", microbatch_size=2), RequestLevel)
        with pytest.raises(ValueError, match="policy must be one of orca, request-level, got 'fifo'"):
            make_policy("fifo")


class TestEnds:
    def test_an_error_ends_its_request_alone(self):
        scheduler = Scheduler(make_limits())
        submit(scheduler, make_request("A"), make_request("B"))
        iteration = planned(scheduler)
        results = ItemResult(error="logits are not finite"), ItemResult((7,))
        assert scheduler.commit(iteration, StepResult(0, results), now=0.0) == [
            Event("A", (), FinishReason.ERROR, "logits are not finite"),
            Event("B", (7,)),
        ]
        assert scheduler.num_resident == 1
        assert names(step(scheduler)) == "B"

    def test_the_host_ends_a_request_and_has_the_last_word_on_why(self):
        scheduler = Scheduler(make_limits())
        submit(scheduler, make_request("A", max_tokens=5), make_request("B", max_tokens=1))
        iteration = planned(scheduler)
        stop = ItemResult((7,), finish=FinishReason.STOP)
        assert scheduler.commit(iteration, StepResult(0, (stop, stop)), now=0.0) == [
            Event("A", (7,), FinishReason.STOP),
            Event("B", (7,), FinishReason.STOP),
        ]
        assert not scheduler.has_work

    def test_a_result_may_bring_several_tokens_up_to_max_tokens(self):
        scheduler = Scheduler(make_limits())
        submit(scheduler, make_request("A", num_prompt=3, max_tokens=4))
        iteration = planned(scheduler)
        result = StepResult(0, (ItemResult((7, 8, 9, 10)),))
        assert scheduler.commit(iteration, result, now=0.0) == [
            Event("A", (7, 8, 9, 10), FinishReason.LENGTH)
        ]


class TestAborts:
    def test_a_waiting_request_goes_at_once(self):
        scheduler = Scheduler(make_limits(max_batch_size=1))
        submit(scheduler, *(make_request(name) for name in "ABC"))
        step(scheduler)
        assert scheduler.abort("B") == Event("B", (), FinishReason.ABORT)
        assert scheduler.num_waiting == 1
        assert scheduler.abort("B") is None

    def test_a_resident_that_is_not_in_flight_goes_at_once_with_its_pages(self):
        scheduler = Scheduler(make_limits())
        submit(scheduler, make_request("A"))
        step(scheduler)
        assert scheduler.abort("A") == Event("A", (), FinishReason.ABORT)
        assert scheduler.num_free_pages == 64
        assert not scheduler.has_work

    def test_pages_of_a_request_in_flight_come_free_when_its_iteration_is_back(self):
        """Three stages, memory for three: D gets A's pages only once A's iteration was committed."""
        scheduler = Scheduler(make_limits(max_batch_size=1, max_in_flight=4, num_pages=3))
        submit(scheduler, *(make_request(name) for name in "ABCD"))
        first, second, third = (planned(scheduler) for _ in range(3))
        assert scheduler.abort("A") == Event("A", (), FinishReason.ABORT)
        assert scheduler.abort("A") is None
        assert scheduler.plan() is None
        assert (scheduler.num_resident, scheduler.num_unfinished) == (3, 3)
        assert scheduler.commit(first, tokens(first), now=0.0) == []
        fourth = planned(scheduler)
        assert names(fourth) == "D"
        assert fourth.items[0].pages == first.items[0].pages
        for iteration in (second, third, fourth):
            scheduler.commit(iteration, tokens(iteration), now=0.0)
        scheduler.check_integrity()

    def test_of_the_last_request_leaves_work_only_while_it_is_in_flight(self):
        scheduler = Scheduler(make_limits())
        submit(scheduler, make_request("A"))
        iteration = planned(scheduler)
        scheduler.abort("A")
        assert scheduler.has_work
        assert scheduler.num_unfinished == 0
        assert scheduler.plan() is None
        scheduler.commit(iteration, tokens(iteration), now=0.0)
        assert not scheduler.has_work

    def test_an_unknown_id_is_nobody(self):
        assert Scheduler(make_limits()).abort("nobody") is None


class TestResuming:
    def test_output_is_fed_like_a_prompt_and_counts_as_output(self):
        scheduler = Scheduler(make_limits())
        submit(scheduler, make_request("A", num_prompt=2, max_tokens=4, num_output=2))
        first = planned(scheduler)
        (item,) = first.items
        assert (item.start, item.token_ids, item.num_logits) == (0, (100, 101, 500, 501), 1)
        assert scheduler.commit(first, tokens(first, 7), now=0.0) == [Event("A", (7,))]
        second = planned(scheduler)
        assert scheduler.commit(second, tokens(second, 8), now=0.0) == [Event("A", (8,), FinishReason.LENGTH)]

    def test_more_than_an_iteration_holds_is_fed_in_pieces_of_which_the_last_asks_for_logits(self):
        scheduler = Scheduler(make_limits(max_batch_tokens=4, max_batch_size=2))
        resumed = make_request("A", num_prompt=3, max_tokens=9, num_output=7)
        submit(scheduler, resumed, make_request("B", num_prompt=2, max_tokens=1))
        known = resumed.prompt_ids + resumed.output_ids
        for start in (0, 4):
            piece = planned(scheduler)
            (item,) = piece.items  # nothing else fits, and B does not pass
            assert (item.start, item.token_ids, item.num_logits) == (start, known[start : start + 4], 0)
            assert scheduler.commit(piece, StepResult(piece.seq, (ItemResult(),)), now=0.0) == []
        last = planned(scheduler)
        assert [(i.start, i.token_ids, i.num_logits) for i in last.items] == [
            (8, known[8:], 1),
            (0, (100, 101), 1),
        ]
        events = scheduler.commit(last, tokens(last, 7, 8), now=0.0)
        assert events == [Event("A", (7,)), Event("B", (8,), FinishReason.LENGTH)]

    def test_a_run_cut_anywhere_and_resumed_feeds_the_same_positions(self):
        whole = Scheduler(make_limits())
        submit(whole, make_request("A", num_prompt=3, max_tokens=6))
        output: tuple[int, ...] = ()
        for token in range(50, 56):
            resumed = Scheduler(make_limits())
            request = make_request("A", num_prompt=3, max_tokens=6)
            params = SamplingParams(max_tokens=6)
            submit(resumed, Request(id="A", prompt_ids=request.prompt_ids, params=params, output_ids=output))
            (again,) = planned(resumed).items
            iteration = planned(whole)
            (item,) = iteration.items
            assert again.end == item.end
            assert again.token_ids == request.prompt_ids + output
            assert len(again.pages) == len(item.pages)
            whole.commit(iteration, tokens(iteration, token), now=0.0)
            output += (token,)


class TestMisuse:
    """A bad commit is an error in the caller; it is named, and changes nothing."""

    @staticmethod
    def two_in_flight() -> tuple[Scheduler, Iteration, Iteration]:
        scheduler = Scheduler(make_limits(max_batch_size=1, max_batch_tokens=4, max_in_flight=2))
        submit(scheduler, make_request("A", max_tokens=2), make_request("B", 3, max_tokens=9, num_output=5))
        return scheduler, planned(scheduler), planned(scheduler)

    def check_unchanged(self, scheduler: Scheduler, first: Iteration, second: Iteration) -> None:
        scheduler.check_integrity()
        assert scheduler.commit(first, tokens(first, 7), now=0.0) == [Event("A", (7,))]
        assert scheduler.commit(second, StepResult(1, (ItemResult(),)), now=0.0) == []

    def test_iterations_are_committed_in_order(self):
        scheduler, first, second = self.two_in_flight()
        with pytest.raises(AssertionError, match="iteration 1 was committed before 0"):
            scheduler.commit(second, tokens(second), now=0.0)
        self.check_unchanged(scheduler, first, second)

    def test_an_iteration_is_committed_once(self):
        scheduler, first, second = self.two_in_flight()
        self.check_unchanged(scheduler, first, second)
        with pytest.raises(AssertionError, match="iteration 1 was committed with none in flight"):
            scheduler.commit(second, StepResult(1, (ItemResult(),)), now=0.0)

    @pytest.mark.parametrize(
        ("result", "message"),
        [
            (StepResult(1, (ItemResult((7,)),)), "iteration 0 was committed with the result of 1"),
            (StepResult(0, ()), "0 results for 1 items"),
            (StepResult(0, (ItemResult((7, 8, 9)),)), "'A' brings 3 tokens, but only 2 may still come"),
            (StepResult(0, (ItemResult(),)), "'A' asked for a token, but brings none and does not end"),
        ],
    )
    def test_a_result_must_be_one_that_the_iteration_can_have(self, result, message):
        scheduler, first, second = self.two_in_flight()
        with pytest.raises(AssertionError, match=message):
            scheduler.commit(first, result, now=0.0)
        self.check_unchanged(scheduler, first, second)

    def test_a_piece_that_asked_for_no_logits_brings_no_token(self):
        scheduler, first, second = self.two_in_flight()
        scheduler.commit(first, tokens(first, 7), now=0.0)
        with pytest.raises(AssertionError, match="'B' brings 1 tokens, but asked for none"):
            scheduler.commit(second, tokens(second), now=0.0)
        scheduler.check_integrity()

    def test_a_policy_that_leaves_everybody_waiting_is_found_out(self):
        class Idle(Orca):
            name = "idle"

            def select(self, pool: Pool) -> list[Pick]:
                return []

        scheduler = Scheduler(make_limits(), Idle())
        submit(scheduler, make_request("A"))
        with pytest.raises(AssertionError, match="policy idle picked none of 1 requests"):
            scheduler.plan()


class RunAhead(Orca):
    """Feeds residents again while they are in flight: their last token is still on the device."""

    name = "run-ahead"

    def select(self, pool: Pool) -> list[Pick]:
        rows = pool.rows
        while pool.next_waiting is not None and pool.admit() is not None:
            pass
        picks = []
        for row in sorted(rows.requests, key=lambda row: rows.order[row]):
            if rows.live[row] and rows.num_fed[row] < rows.num_total[row] - 1:
                picks.append((row, max(1, int(rows.num_known[row] - rows.num_fed[row]))))
        return picks


class TestRunningAhead:
    """Another policy's iterations, which `commit` must be able to take in."""

    def test_a_token_that_is_still_on_the_device_is_named_by_none(self):
        scheduler = Scheduler(make_limits(max_in_flight=3), RunAhead())
        submit(scheduler, make_request("A", num_prompt=3, max_tokens=4))
        in_flight = [planned(scheduler) for _ in range(3)]
        items = [iteration.items[0] for iteration in in_flight]
        assert [(i.start, i.num_tokens, i.token_ids) for i in items] == [
            (0, 3, (100, 101, 102)),
            (3, 1, None),
            (4, 1, None),
        ]
        events = [scheduler.commit(i, tokens(i, 7), now=0.0) for i in in_flight[:2]]
        fourth = planned(scheduler)
        assert (fourth.items[0].start, fourth.items[0].token_ids) == (5, None)
        events += [scheduler.commit(i, tokens(i, 7), now=0.0) for i in (in_flight[2], fourth)]
        assert [e.finish_reason for (e,) in events] == [None, None, None, FinishReason.LENGTH]
        scheduler.check_integrity()
        assert not scheduler.has_work

    def test_a_request_that_ends_keeps_its_pages_until_all_its_iterations_are_back(self):
        scheduler = Scheduler(make_limits(max_in_flight=3), RunAhead())
        submit(scheduler, make_request("A", num_prompt=3, max_tokens=9))
        in_flight = [planned(scheduler) for _ in range(3)]
        stop = StepResult(0, (ItemResult((7,), finish=FinishReason.STOP),))
        assert scheduler.commit(in_flight[0], stop, now=0.0) == [Event("A", (7,), FinishReason.STOP)]
        for iteration in in_flight[1:]:
            assert scheduler.num_resident == 1
            scheduler.check_integrity()
            assert scheduler.plan() is None
            assert scheduler.commit(iteration, tokens(iteration), now=0.0) == []
        assert scheduler.num_resident == 0
        assert scheduler.num_free_pages == 64


class TestCheckIntegrity:
    """Every planted fault is found."""

    @pytest.fixture
    def scheduler(self) -> Scheduler:
        scheduler = Scheduler(make_limits(max_in_flight=2, max_batch_size=2))
        submit(scheduler, *(make_request(name, 20, 20) for name in "ABCD"))
        step(scheduler)
        scheduler.plan()
        scheduler.check_integrity()
        return scheduler

    @staticmethod
    def found(scheduler: Scheduler, message: str) -> None:
        with pytest.raises(AssertionError, match=message):
            scheduler.check_integrity()

    def test_a_page_that_nobody_has(self, scheduler: Scheduler):
        scheduler.memory._allocator.allocate(1)  # pyright: ignore[reportAttributeAccessIssue]
        self.found(scheduler, r"pages \[6\] have leaked")

    def test_a_page_that_two_have(self, scheduler: Scheduler):
        pages = scheduler._pool.rows.pages
        pages[1] = pages[0]
        self.found(scheduler, r"have leaked|have more than one holder")

    def test_a_page_that_is_held_and_free(self, scheduler: Scheduler):
        scheduler.memory._allocator.free([0])  # pyright: ignore[reportAttributeAccessIssue]
        self.found(scheduler, r"pages \[0\] have more than one holder")

    def test_a_page_too_few(self, scheduler: Scheduler):
        scheduler._pool.rows.pages[0] = scheduler._pool.rows.pages[0][1:]
        self.found(scheduler, "'A' holds 2 pages and needs 3")

    def test_a_reservation_that_is_miscounted(self, scheduler: Scheduler):
        scheduler.memory._num_reserved += 1  # pyright: ignore[reportAttributeAccessIssue]
        self.found(scheduler, "7 pages are counted as reserved, 6 are held")

    @pytest.mark.parametrize(
        ("column", "message"),
        [
            ("num_prompt", "miscounts its prompt"),
            ("num_total", "miscounts the tokens it may come to"),
            ("num_known", "counts 22 tokens"),
            ("num_fed", "has fed"),
            ("num_in_flight", "miscount the iterations in flight"),
        ],
    )
    def test_a_counter_that_is_off(self, scheduler: Scheduler, column: str, message: str):
        getattr(scheduler._pool.rows, column)[0] += 2 if column == "num_fed" else 1
        self.found(scheduler, message)

    def test_a_row_that_was_lost(self, scheduler: Scheduler):
        scheduler._pool.rows._free.pop()
        self.found(scheduler, "a row has leaked")

    def test_a_request_that_ended_and_stayed(self, scheduler: Scheduler):
        rows = scheduler._pool.rows
        rows.end(0)
        rows.num_in_flight[0] = 0
        self.found(scheduler, "'A' in row 0 has ended, is not in flight, and still has its row")

    def test_a_request_that_is_not_live_and_not_ended(self, scheduler: Scheduler):
        scheduler._pool.rows.live[0] = False
        self.found(scheduler, r"rows \{0\} are not live, rows set\(\) have ended")

    def test_a_queue_out_of_order(self, scheduler: Scheduler):
        scheduler._pool._waiting.move_to_end("C")
        self.found(scheduler, "not in order of submission")


def test_nobody_is_admitted_without_a_row_and_no_memory_is_taken():
    memory = Reservation(num_pages=64, page_size=16)
    pool = Pool(make_limits(max_batch_size=1, max_in_flight=2), memory)
    for name in "ABC":
        pool.submit(make_request(name))
    assert [pool.admit(), pool.admit(), pool.admit()] == [0, 1, None]
    assert (memory.num_reserved_pages, pool.num_waiting) == (2, 1)
    pool.check()


def test_limits_hold_one_batch_for_each_iteration_in_flight():
    limits = SchedulerLimits(
        max_batch_size=8,
        max_batch_tokens=64,
        max_in_flight=3,
        num_pages=10,
        page_size=16,
        max_positions=128,
    )
    assert limits.max_running == 24
