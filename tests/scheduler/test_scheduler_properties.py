"""Whatever comes, in whatever order, the scheduler does what Algorithm 1 does and loses nothing."""

import random
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jorca.request import FinishReason
from jorca.scheduler import Item, ItemResult, SchedulerLimits
from scheduler.algorithm1 import CheckedScheduler, make_limits, make_request


def outcome(choice: int, item: Item, room: int) -> ItemResult:
    """What comes back for an item: mostly a token, now and then an error, a stop or several tokens."""
    token_ids = tuple(range(1000, 1000 + min(room, 1 + choice % 3 if choice > 80 else 1)))
    token_ids = token_ids if item.num_logits else ()
    if choice < 5:
        return ItemResult(error="logits are not finite")
    if choice < 15:
        return ItemResult(token_ids, finish=FinishReason.STOP)
    return ItemResult(token_ids)


class AnyCalls(RuleBasedStateMachine):
    """Submits, plans, commits and aborts in any order."""

    @initialize(
        max_batch_size=st.integers(1, 4),
        max_batch_tokens=st.integers(1, 24),
        max_in_flight=st.integers(1, 4),
        num_pages=st.integers(1, 12),
        page_size=st.integers(1, 8),
        max_positions=st.integers(1, 32),
    )
    def start(self, **limits: int) -> None:
        self.begin(CheckedScheduler(make_limits(**limits)))

    def begin(self, checked: CheckedScheduler) -> None:
        self.checked = checked
        self.names: list[str] = []

    @rule(num_prompt=st.integers(1, 16), max_tokens=st.integers(1, 10), resumed=st.integers(0, 9))
    def submit(self, num_prompt: int, max_tokens: int, resumed: int) -> None:
        request = make_request(str(len(self.names)), num_prompt, max_tokens, resumed % max_tokens)
        if self.checked.submit(request):
            self.names.append(request.id)

    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        if self.names:
            self.checked.submit(make_request(data.draw(st.sampled_from(self.names)), 1, 1))

    @rule()
    def plan(self) -> None:
        self.checked.plan()

    @precondition(lambda self: self.checked.in_flight)
    @rule(choice=st.integers(0, 99))
    def commit(self, choice: int) -> None:
        self.checked.commit(lambda item, room: outcome((choice + 37 * item.row) % 100, item, room))

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.checked.abort(data.draw(st.sampled_from(self.names)))

    def teardown(self) -> None:
        if hasattr(self, "checked"):
            self.checked.drain()


TestAnyCalls = AnyCalls.TestCase
TestAnyCalls.settings = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=200,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("seed", range(40))
def test_a_long_random_life_follows_algorithm_1_call_by_call(seed: int):
    a_long_random_life(seed, CheckedScheduler)


def a_long_random_life(seed: int, make: Callable[[SchedulerLimits], CheckedScheduler]) -> None:
    """Makes 1200 calls, each of which is checked."""
    draw = random.Random(seed)
    checked = make(
        make_limits(
            max_batch_size=draw.randint(1, 8),
            max_batch_tokens=draw.choice([8, 30, 200]),
            max_in_flight=1 + seed % 4,
            num_pages=draw.randint(4, 40),
            page_size=draw.choice([1, 3, 8]),
            max_positions=draw.choice([16, 64]),
        )
    )
    load = draw.choice([0.1, 0.3])
    names: list[str] = []
    while checked.num_calls < 1200:
        step = draw.random()
        if step < load and checked.scheduler.num_waiting < 30:
            max_tokens = draw.randint(1, 12)
            num_output = draw.choice([0, 0, draw.randrange(max_tokens)])
            request = make_request(str(len(names)), draw.randint(1, 12), max_tokens, num_output)
            names += [request.id] * checked.submit(request)
        elif step < load + 0.05 and names:
            checked.abort(draw.choice(names[-20:]))
        elif step < 0.65 or not checked.in_flight:
            checked.plan()
        else:
            checked.commit(lambda item, room: outcome(draw.randrange(100), item, room))
    checked.drain()
    assert len(names) > 10


def test_every_request_gets_exactly_its_tokens_when_nothing_ends_it_early():
    checked = CheckedScheduler(make_limits(max_in_flight=3, num_pages=10, page_size=4))
    for i in range(50):
        checked.submit(make_request(str(i), 1 + i % 7, 1 + i % 11))
    events = checked.drain()
    for i in range(50):
        mine = [event for event in events if event.request_id == str(i)]
        assert sum(len(event.token_ids) for event in mine) == 1 + i % 11
        assert [event.finish_reason for event in mine] == [None] * (i % 11) + [FinishReason.LENGTH]
