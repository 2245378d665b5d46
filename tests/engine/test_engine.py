"""The loop around a fake executor: several iterations in flight, aborts, waiting, failures."""

import random
import threading

import pytest

from jorca.config import EngineConfig
from jorca.engine.collector import InlineCollector, ThreadCollector
from jorca.request import JorcaError, Request, RequestRejected, SamplingParams
from jorca.testing import TINY, FakeExecutor, fake_engine, fake_token


def request(name, num_prompt=4, max_tokens=5, **params):
    return Request(
        id=name,
        prompt_ids=tuple(range(1, num_prompt + 1)),
        params=SamplingParams(max_tokens=max_tokens, temperature=0, seed=0, **params),
    )


def expected(name, num_prompt=4, max_tokens=5):
    return tuple(fake_token(name, num_prompt + i) for i in range(max_tokens))


def run(engine):
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            if output.finished:
                assert output.request_id not in outputs
                outputs[output.request_id] = output
    return outputs


def engine_of(executor, collector=None, **options):
    config = EngineConfig.from_options(page_size=4, **options)
    make_collector = InlineCollector if collector is None else lambda _: collector
    return fake_engine(executor, config, make_collector=make_collector)


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_iterations_are_kept_in_flight_up_to_the_limit_and_everyone_gets_their_tokens(max_in_flight):
    executor = FakeExecutor()
    engine = engine_of(executor, max_batch_size=2, max_in_flight=max_in_flight)
    names = [f"r{i}" for i in range(9)]
    for name in names:
        engine.submit(request(name))
    outputs = run(engine)
    assert executor.most_in_flight == max_in_flight
    assert {name: output.token_ids for name, output in outputs.items()} == {n: expected(n) for n in names}
    assert {output.finish_reason for output in outputs.values()} == {"length"}
    assert engine.scheduler.num_free_pages == engine.scheduler.limits.num_pages


def test_three_workers_and_batches_of_two_go_in_as_in_the_papers_figure():
    executor = FakeExecutor()
    engine = engine_of(executor, max_batch_size=2, max_in_flight=3)
    for name in "ABCDEF":
        engine.submit(request(name, max_tokens=3))
    run(engine)
    batches = ["".join(item.request_id for item in iteration.items) for iteration in executor.dispatched]
    assert batches == ["AB", "CD", "EF"] * 3


def test_random_arrivals_and_aborts_in_flight_disturb_nobody():
    rng = random.Random(0)
    for _ in range(20):
        engine = engine_of(FakeExecutor(), max_batch_size=3, max_in_flight=3, num_pages=20)
        shapes = {f"r{i}": (rng.randint(1, 9), rng.randint(1, 9)) for i in range(25)}
        coming, aborted, done = list(shapes), {}, {}
        while coming or engine.has_work:
            for _ in range(min(len(coming), rng.randint(0, 4))):
                name = coming.pop()
                engine.submit(request(name, *shapes[name]))
            if rng.random() < 0.3:
                output = engine.abort(rng.choice(list(shapes)))
                if output is not None:
                    assert output.finish_reason == "abort"
                    aborted[output.request_id] = output
            for output in engine.step():
                assert output.request_id not in aborted
                if output.finished:
                    done[output.request_id] = output
            engine.scheduler.check_integrity()
        assert {**done, **aborted}.keys() == shapes.keys()
        assert aborted
        for name, output in done.items():
            assert output.token_ids == expected(name, *shapes[name])
        for name, output in aborted.items():
            assert output.token_ids == expected(name, *shapes[name])[: len(output.token_ids)]
        assert engine.scheduler.num_free_pages == 20


def test_an_abort_answers_at_once_and_a_second_one_finds_nothing():
    engine = engine_of(FakeExecutor())
    engine.submit(request("a"))
    engine.step()
    output = engine.abort("a")
    assert output is not None
    assert output.finish_reason == "abort"
    assert output.token_ids == expected("a")[:1]
    assert engine.abort("a") is None
    assert engine.abort("nobody") is None
    assert engine.step() == []


def test_a_stop_token_ends_a_request_before_its_limit():
    stop = expected("a")[2]
    engine = engine_of(FakeExecutor())
    engine.submit(request("a", stop_token_ids=[stop]))
    (output,) = run(engine).values()
    assert output.token_ids == expected("a")[:3]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_a_request_that_came_with_output_goes_on_from_there():
    executor = FakeExecutor()
    engine = engine_of(executor)
    done = expected("a")[:2]
    params = SamplingParams(max_tokens=5, temperature=0, seed=0)
    engine.submit(Request(id="a", prompt_ids=(1, 2, 3, 4), params=params, output_ids=done))
    (output,) = run(engine).values()
    assert output.token_ids == expected("a")
    first = executor.dispatched[0].items[0]
    assert (first.num_tokens, first.token_ids) == (6, (1, 2, 3, 4, *done))


def test_a_request_whose_output_has_ended_already_is_refused_and_leaves_no_trace():
    engine = engine_of(FakeExecutor())
    params = SamplingParams(max_tokens=9, temperature=0, seed=0, stop_token_ids=[7])
    with pytest.raises(RequestRejected, match="stops at 7 after 2 of 3 tokens"):
        engine.submit(Request(id="a", prompt_ids=(1,), params=params, output_ids=(5, 7, 6)))
    assert not engine.has_work
    engine.submit(request("a"))
    assert run(engine)["a"].token_ids == expected("a")


def test_an_engine_that_cannot_be_made_anew_says_so_from_then_on():
    class Lost(Flaky):
        def reset(self):
            raise OSError("no device to allocate on")

    engine = engine_of(Lost(collects=(0,)))
    engine.submit(request("a"))
    with pytest.raises(OSError, match="no device to allocate on"):
        engine.step()
    with pytest.raises(JorcaError, match=r"has stopped after OSError.*in collect"):
        engine.step()


def test_metrics_count_iterations_and_times_by_the_engines_clock():
    now = iter(range(1000))
    engine = engine_of(FakeExecutor(), max_batch_size=1)
    engine._clock = lambda: float(next(now))
    engine.submit(request("a", max_tokens=2))
    engine.submit(request("b", max_tokens=3))
    outputs = run(engine)
    a, b = outputs["a"].metrics, outputs["b"].metrics
    assert (a.num_iterations, a.first_iteration, a.last_iteration) == (2, 0, 1)
    assert (b.num_iterations, b.first_iteration, b.last_iteration) == (3, 2, 4)
    for m in (a, b):
        assert m.submitted_s < m.first_scheduled_s < m.first_token_s < m.finished_s
    assert a.finished_s < b.first_scheduled_s


def test_observers_see_every_iteration_until_they_leave():
    engine = engine_of(FakeExecutor())
    seen = []
    leave = engine.observe(lambda iteration, outputs: seen.append((iteration.seq, len(outputs))))
    engine.submit(request("a", max_tokens=3))
    engine.step()
    engine.step()
    leave()
    engine.step()
    assert seen == [(0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt_ids": (1, 61)}, "prompt_ids must be below vocab_size 61, got 61"),
        ({"params": SamplingParams(seed=0, stop_token_ids=[99999])}, "stop_token_ids must be .* got 99999"),
        ({"output_ids": (70,)}, "output_ids must be below vocab_size 61, got 70"),
        ({"prompt_ids": tuple(range(40))}, "max_positions is 32"),
    ],
)
def test_what_can_never_run_is_refused_and_leaves_no_trace(bad, message):
    executor = FakeExecutor()
    engine = engine_of(executor)
    fields = {"id": "a", "prompt_ids": (1,), "params": SamplingParams(seed=0)} | bad
    with pytest.raises(RequestRejected, match=message):
        engine.submit(Request(**fields))
    assert not engine.has_work
    assert engine.step() == []
    assert executor.dispatched == []
    engine.submit(request("a"))
    assert run(engine)["a"].token_ids == expected("a")


class Flaky(FakeExecutor):
    """Fails at the given calls of dispatch and of collect, counted from 0."""

    def __init__(self, dispatches=(), collects=()):
        super().__init__()
        self.fails = {"dispatch": set(dispatches), "collect": set(collects)}
        self.calls = {"dispatch": 0, "collect": 0}
        self.resets = 0

    def _maybe_fail(self, call):
        self.calls[call] += 1
        if self.calls[call] - 1 in self.fails[call]:
            raise OSError(f"the device is gone in {call}")

    def dispatch(self, packed):
        self._maybe_fail("dispatch")
        return super().dispatch(packed)

    def collect(self, ticket):
        self._maybe_fail("collect")
        return super().collect(ticket)

    def reset(self):
        super().reset()
        self.resets += 1


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_failing_iterations_lose_no_request_and_change_no_token(max_in_flight, threaded):
    executor = Flaky(dispatches=(4, 11), collects=(2, 7, 20))
    collector = ThreadCollector(executor) if threaded else None
    engine = engine_of(executor, collector, max_batch_size=2, max_in_flight=max_in_flight)
    names = [f"r{i}" for i in range(9)]
    streamed: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
    for name in names:
        engine.submit(request(name))
    while engine.has_work:
        for output in engine.step():
            streamed[output.request_id] += output.new_token_ids
            assert output.token_ids == streamed[output.request_id]
        engine.scheduler.check_integrity()
    assert streamed == {name: expected(name) for name in names}
    # A thread that was left behind may still use up a planted failure.
    assert 2 <= executor.resets <= 5 if threaded else executor.resets == 5
    sequence = [iteration.seq for iteration in executor.dispatched]
    assert sequence == sorted(set(sequence))


def test_an_abort_before_a_failure_stays_one():
    executor = Flaky(collects=(1,))
    engine = engine_of(executor, max_batch_size=2, max_in_flight=2)
    for name in "abcd":
        engine.submit(request(name))
    engine.step()
    assert engine.abort("c") is not None  # in flight
    assert engine.step() == []  # fails
    assert run(engine).keys() == {"a", "b", "d"}


def test_too_many_failures_in_a_row_stop_the_engine_with_an_error_that_says_so():
    engine = engine_of(Flaky(collects=range(100)), max_failures=2)
    engine.submit(request("a"))
    assert engine.step() == []
    assert engine.step() == []
    with pytest.raises(JorcaError, match=r"3 iterations in a row failed, the last with OSError.*is gone"):
        engine.step()
    with pytest.raises(JorcaError, match="has stopped"):
        engine.submit(request("b"))


def test_an_interrupted_wait_is_taken_up_again():
    class Interrupted(FakeExecutor):
        first = True

        def collect(self, ticket):
            if self.first:
                self.first = False
                raise KeyboardInterrupt
            return super().collect(ticket)

    engine = engine_of(Interrupted())
    engine.submit(request("a"))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert run(engine)["a"].token_ids == expected("a")


class TestThreadCollector:
    def test_gives_the_same_results_as_waiting_inline(self):
        executor = FakeExecutor()
        collector = ThreadCollector(executor)
        engine = engine_of(executor, collector, max_batch_size=2, max_in_flight=3)
        for name in "abcdefg":
            engine.submit(request(name))
        outputs = run(engine)
        collector.close()
        assert {n: o.token_ids for n, o in outputs.items()} == {n: expected(n) for n in "abcdefg"}

    def test_a_submit_while_waiting_joins_the_next_iteration_at_once(self):
        executor = FakeExecutor(gated=True)
        collector = ThreadCollector(executor)
        engine = engine_of(executor, collector, max_batch_size=1, max_in_flight=2)
        engine.submit(request("a", max_tokens=1))
        threading.Timer(0.05, engine.wake).start()
        assert engine.step() == []  # nothing has come back: the wait was broken off
        engine.submit(request("b", max_tokens=1))
        threading.Timer(0.05, engine.wake).start()
        assert engine.step() == []
        assert [iteration.items[0].request_id for iteration in executor.dispatched] == ["a", "b"]
        executor.release(2)
        assert run(engine).keys() == {"a", "b"}
        collector.close()

    def test_an_abort_while_waiting_frees_its_pages_when_its_iteration_is_back(self):
        executor = FakeExecutor(gated=True)
        collector = ThreadCollector(executor)
        engine = engine_of(executor, collector, max_batch_size=1, max_in_flight=2)
        engine.submit(request("a"))
        engine.submit(request("b"))
        threading.Timer(0.05, engine.wake).start()
        assert engine.step() == []
        held = engine.scheduler.num_reserved_pages
        assert engine.abort("a") is not None
        assert engine.scheduler.num_reserved_pages == held
        executor.release(100)
        outputs = run(engine)
        assert outputs.keys() == {"b"}
        assert outputs["b"].token_ids == expected("b")
        assert engine.scheduler.num_reserved_pages == 0
        collector.close()


def test_tiny_is_the_model_behind_fake_tokens():
    assert all(0 <= fake_token("x", p) < TINY.vocab_size for p in range(200))
