"""Handles on the real engine: in any order, inside each other, given up, interrupted."""

import dataclasses
import gc
import logging
import signal
import sys
import threading
import time
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.device import stage_of, tiny_llm
from jorca import JorcaError, ModelConfig, RequestRejected, SamplingParams

TINY = ModelConfig(vocab_size=61, max_positions=32, num_layers=2, num_heads=2, d_model=16)
SIZES = {
    "max_batch_size": 3,
    "max_batch_tokens": 12,
    "max_in_flight": 2,
    "page_size": 4,
    "num_pages": 20,
    "min_bucket": 12,
    "return_logits": False,
    "max_failures": 3,
}
PROMPTS = tuple(tuple((7 * i + j) % 61 for j in range(1 + i % 5)) for i in range(8))
MAX_TOKENS = 6


def greedy(max_tokens=MAX_TOKENS, **more):
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


@pytest.fixture(scope="module", params=["orca", "request-level"])
def llm(request):
    with tiny_llm(TINY, policy=request.param, **SIZES) as llm:
        yield llm
        assert not llm.has_work
        llm.engine.scheduler.check_integrity()
        assert llm.engine.scheduler.num_reserved_pages == 0


@pytest.fixture(scope="module")
def right(llm):
    """What each prompt is answered with, when nobody disturbs."""
    return {p: o.token_ids for p, o in zip(PROMPTS, llm.generate(PROMPTS, greedy()), strict=True)}


@pytest.fixture(autouse=True)
def bounded(llm, monkeypatch):
    """No test may turn the loop more often than all its work can take."""
    turns, advance = {"left": 400}, llm.engine.advance

    def counted():
        turns["left"] -= 1
        assert turns["left"] >= 0, "it hangs"
        advance()

    monkeypatch.setattr(llm.engine, "advance", counted)
    return turns


def drain(llm):
    outputs = []
    while llm.has_work:
        outputs += llm.step()
    return outputs


def test_aborting_what_a_stream_gives_ends_the_stream(llm):
    got = []
    for output in llm.stream([PROMPTS[1], PROMPTS[2]], greedy()):
        got.append(output)
        llm.abort(output.request_id)
    assert {o.request_id for o in got if o.finished} == {o.request_id for o in got}
    assert len({o.request_id for o in got}) == 2
    assert drain(llm) == []


def test_an_abort_in_a_stream_says_so(llm):
    stream = llm.stream(PROMPTS[1], greedy())
    name = next(iter(stream._unfinished))
    final = llm.abort(name)
    (output,) = list(stream)
    assert output.finish_reason == final.finish_reason == "abort"
    assert llm.abort(name) is None


def test_generate_inside_a_stream_takes_nothing_from_it(llm, right):
    stream = llm.stream(PROMPTS[1], greedy())
    first = next(stream)
    (inner,) = llm.generate(PROMPTS[2], greedy())
    assert inner.token_ids == right[PROMPTS[2]]
    rest = list(stream)
    assert sum((o.new_token_ids for o in (first, *rest)), ()) == right[PROMPTS[1]]
    assert (rest or [first])[-1].finished


def test_of_two_streams_each_is_complete_when_one_is_read_to_its_end_first(llm, right):
    one, other = llm.stream(PROMPTS[1:4], greedy()), llm.stream(PROMPTS[4:6], greedy())
    late = list(other)
    early = list(one)
    for outputs, prompts in ((early, PROMPTS[1:4]), (late, PROMPTS[4:6])):
        tokens = {}
        for output in outputs:
            tokens[output.prompt_ids] = tokens.get(output.prompt_ids, ()) + output.new_token_ids
        assert tokens == {p: right[p] for p in prompts}
    assert len(early) <= 3 + 3 * MAX_TOKENS


def test_what_nobody_reads_is_joined_to_one_output_for_each_request(llm, right):
    stream = llm.stream(PROMPTS[1:3], greedy())
    llm.generate(PROMPTS[3:6], greedy())
    drain(llm)
    outputs = list(stream)
    assert [o.prompt_ids for o in outputs] == list(PROMPTS[1:3])
    assert all(o.finished and o.new_token_ids == o.token_ids == right[o.prompt_ids] for o in outputs)


def test_closing_a_stream_before_its_first_item_leaves_nothing(llm):
    stream = llm.stream(PROMPTS, greedy())
    stream.close()
    assert llm.engine.scheduler.num_unfinished == 0
    assert list(stream) == []
    stream.close()
    assert drain(llm) == []


def test_letting_go_of_a_stream_aborts_it(llm):
    stream = llm.stream(PROMPTS, greedy())
    next(stream)
    del stream
    gc.collect()
    assert llm.engine.scheduler.num_unfinished == 0
    assert drain(llm) == []


def test_a_stream_that_is_let_go_of_inside_the_loop_or_in_another_thread_ends_with_the_next_call(llm):
    held = [llm.stream(PROMPTS[:2], greedy())]
    leave = llm.engine.observe(lambda *_: held.clear())
    (output,) = llm.generate(PROMPTS[3], greedy(2))
    leave()
    assert len(output.token_ids) == 2
    held = [llm.stream(PROMPTS[:2], greedy())]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert llm.engine.scheduler.num_unfinished == 2
    llm.step()
    assert llm.engine.scheduler.num_unfinished == 0
    drain(llm)


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        ([[1], [2]], [greedy(), None]),
        ([[1], [2]], [greedy()]),
        ([[1], [2]], 5),
        ([[1], [61]], greedy()),
        ([[1], [2] * 13], greedy()),
        ([[1], object()], greedy()),
        ([[1], [2]], [greedy(), greedy(100)]),
    ],
    ids=["no params", "too few", "a number", "no such id", "too long", "no prompt", "too many"],
)
def test_any_error_leaves_nobody_behind(llm, prompts, params):
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestRejected):
            call(prompts, params)
        assert not llm.has_work


def test_a_refusal_by_the_engine_leaves_nobody_behind_either(llm):
    llm.submit([1, 2], greedy(), request_id="taken")
    names = llm.inputs._ids
    taken = f"request-{next(names) + 2}"
    llm.submit([3], greedy(), request_id=taken)
    with pytest.raises(RequestRejected, match=f"^{taken}: id must be unique among live requests"):
        llm.generate([[1], [2]], greedy())
    assert {o.request_id for o in drain(llm) if o.finished} == {"taken", taken}


def test_step_gives_what_was_submitted_one_by_one_and_only_that(llm, right):
    llm.submit(PROMPTS[1], greedy(), request_id="mine")
    stream = llm.stream(PROMPTS[2], greedy())
    mine, theirs = [], []
    while llm.has_work:
        mine += llm.step()
        if stream._mailbox:
            theirs.append(next(stream))
    assert {o.request_id for o in mine} == {"mine"}
    assert sum((o.new_token_ids for o in mine), ()) == right[PROMPTS[1]]
    assert sum((o.new_token_ids for o in theirs), ()) == right[PROMPTS[2]]
    assert list(stream) == []


def test_an_abort_gives_what_step_has_not_given_yet(llm, right):
    llm.submit(PROMPTS[1], greedy(), request_id="mine")
    llm.generate(PROMPTS[2], greedy(2))
    output = llm.abort("mine")
    if output is not None:  # under request-level it may have ended with the batch
        assert output.new_token_ids == output.token_ids
        assert output.token_ids == right[PROMPTS[1]][: len(output.token_ids)]
        assert drain(llm) == []
    drain(llm)


class Plan:
    """Lets the executor fail or be interrupted at a call that is still to come."""

    def __init__(self, executor):
        self.dispatch, self.collect, self.reset = executor.dispatch, executor.collect, executor.reset
        self.due: dict[str, str] = {}
        self.num_resets = 0
        executor.dispatch, executor.collect = self.at("dispatch"), self.at("collect")
        executor.reset = self.count
        self.restore = lambda: [executor.__dict__.pop(name) for name in ("dispatch", "collect", "reset")]

    def count(self):
        self.num_resets += 1
        self.reset()

    def at(self, call):
        def planned(argument):
            what = self.due.pop(call, None)
            if what == "fail":
                raise OSError("planted")
            if what == "interrupt":
                raise KeyboardInterrupt
            if what == "signal":
                signal.raise_signal(signal.SIGINT)
            return getattr(self, call)(argument)

        return planned


@pytest.fixture
def plan(llm):
    plan = Plan(llm.engine.executor)
    yield plan
    plan.restore()


@pytest.mark.parametrize("what", ["interrupt", "signal"])
@pytest.mark.parametrize("call", ["dispatch", "collect"])
def test_ctrl_c_comes_out_of_generate_and_everybody_else_goes_on(llm, right, plan, call, what):
    mine = llm.stream(PROMPTS[1:3], greedy())
    llm.submit(PROMPTS[3], greedy(), request_id="mine")
    llm.step()
    plan.due[call] = what
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[4:6], greedy())
    unfinished = llm.engine.scheduler.num_unfinished
    assert unfinished <= 3
    tokens = dict.fromkeys(PROMPTS[1:3], ())
    for output in mine:
        tokens[output.prompt_ids] += output.new_token_ids
    assert tokens == {p: right[p] for p in PROMPTS[1:3]}
    rest = drain(llm)
    assert rest[-1].token_ids == right[PROMPTS[3]]
    assert plan.num_resets == (what == "interrupt")
    assert llm.engine._num_failures == 0


def test_real_signals_at_any_moment_lose_nobody(llm, right, monkeypatch):
    """A timer sends one in the middle of each `generate`."""
    fired = []

    def on_alarm(*_):
        fired.append(True)
        signal.raise_signal(signal.SIGINT)

    def is_interrupted(after_s):
        fired.clear()
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            llm.generate(PROMPTS[5:7], greedy())
            while not fired:
                time.sleep(0.001)
        except KeyboardInterrupt:
            return True
        return False  # it came where Python ignores exceptions, in a callback of the garbage collector

    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)
    old = signal.signal(signal.SIGALRM, on_alarm), signal.signal(signal.SIGINT, signal.default_int_handler)
    num_interrupts = 0
    try:
        for turn in range(20):
            prompts = PROMPTS[turn % 4 : turn % 4 + 3]
            stream = llm.stream(prompts, greedy())
            tokens: dict[tuple[int, ...], tuple[int, ...]] = dict.fromkeys(prompts, ())
            num_interrupts += is_interrupted(0.0003 + 0.0007 * turn)
            for output in stream:
                tokens[output.prompt_ids] += output.new_token_ids
            assert tokens == {p: right[p] for p in prompts}
            gc.collect()
            assert drain(llm) == []
            llm.engine.scheduler.check_integrity()
    finally:
        for number, handler in zip((signal.SIGALRM, signal.SIGINT), old, strict=True):
            signal.signal(number, handler)
    assert num_interrupts > 10


def test_a_handler_of_ones_own_is_called_when_the_call_is_over(llm):
    seen = []
    old = signal.signal(signal.SIGINT, lambda *_: seen.append(llm.engine._uninterrupted.depth))
    try:
        leave = llm.engine.observe(lambda *_: signal.raise_signal(signal.SIGINT))
        llm.generate(PROMPTS[1], greedy(1))
        leave()
    finally:
        assert signal.signal(signal.SIGINT, old) is not old
    assert seen
    assert set(seen) == {0}


def test_an_observer_that_raises_harms_nobody(llm, right):
    stream = llm.stream(PROMPTS[1], greedy())

    def observer(*_):
        leave()
        raise ValueError("mine")

    leave = llm.engine.observe(observer)
    with pytest.raises(ValueError, match="mine"):
        next(stream)
    assert sum((o.new_token_ids for o in stream), ()) == right[PROMPTS[1]]


def test_under_request_level_aborts_at_any_moment_fail_no_iteration(llm, right, plan):
    for moment in range(8):
        stream = llm.stream(PROMPTS[1:5], greedy())
        names = sorted(stream._unfinished)
        for turn in range(moment):
            llm.engine.advance()
            if turn % 2:
                llm.abort(names[turn % 4])
        llm.abort(names[moment % 4])
        for output in stream:
            assert output.token_ids == right[output.prompt_ids][: len(output.token_ids)]
            assert (output.finish_reason == "abort") or not output.finished or len(output.token_ids) == 6
        drain(llm)
    assert plan.num_resets == 0


class Handles(RuleBasedStateMachine):
    """Everything that can be done with handles, in any order."""

    llm: Any
    right: Any
    plan: Any
    bounded: Any

    @initialize()
    def begin(self):
        self.handles, self.told, self.ended, self.submitted, self.count = [], {}, set(), {}, 0
        self.plan.due.clear()
        self.resets, self.planted = self.plan.num_resets, 0

    def note(self, output, wanted):
        tokens = self.told.get(output.request_id, ()) + output.new_token_ids
        self.told[output.request_id] = tokens
        whole = self.right[output.prompt_ids]
        assert tokens == output.token_ids == whole[: len(tokens)], "tokens were lost or are somebody else's"
        assert output.request_id in wanted, "an output has gone to another handle"
        assert output.request_id not in self.ended, "an output has come after the last one"
        if output.finish_reason == "length":
            assert len(tokens) == wanted[output.request_id]
        assert output.finish_reason in (None, "length", "abort")
        if output.finished:
            self.ended.add(output.request_id)

    def guarded(self, call):
        """Runs a call that may be interrupted; returns what it gives, None if it was."""
        self.bounded["left"] = 400
        try:
            return call()
        except KeyboardInterrupt:
            return None

    @precondition(lambda self: len(self.handles) < 4)
    @rule(start=st.integers(0, 5), number=st.integers(1, 3), max_tokens=st.integers(1, MAX_TOKENS))
    def open(self, start, number, max_tokens):
        prompts = PROMPTS[start : start + number]
        handle = self.llm.stream(prompts, greedy(max_tokens))
        self.handles.append((handle, dict.fromkeys(handle._unfinished, max_tokens)))

    @rule(prompt=st.sampled_from(PROMPTS), max_tokens=st.integers(1, MAX_TOKENS))
    def submit(self, prompt, max_tokens):
        self.count += 1
        name = self.llm.submit(prompt, greedy(max_tokens), request_id=f"{id(self)}-{self.count}")
        self.submitted[name] = max_tokens

    @rule()
    def step(self):
        for output in self.guarded(self.llm.step) or ():
            self.note(output, self.submitted)

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), count=st.integers(1, 9))
    def read(self, data, count):
        handle, wanted = data.draw(st.sampled_from(self.handles))
        for _ in range(count):
            output = self.guarded(lambda: next(handle, None))
            if output is not None:
                self.note(output, wanted)

    @precondition(lambda self: len(self.handles) > 1)
    @rule(data=st.data(), prompt=st.sampled_from(PROMPTS))
    def nest(self, data, prompt):
        (outer, wanted), (inner, others) = (data.draw(st.sampled_from(self.handles)) for _ in range(2))
        output = self.guarded(lambda: next(outer, None))
        if output is not None:
            self.note(output, wanted)
        for final in self.guarded(lambda: self.llm.generate(prompt, greedy(2))) or ():
            assert final.token_ids == self.right[prompt][:2]
        output = self.guarded(lambda: next(inner, None))
        if output is not None:
            self.note(output, others)

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), dropped=st.booleans())
    def leave(self, data, dropped):
        handle, _ = self.handles.pop(data.draw(st.integers(0, len(self.handles) - 1)))
        if not dropped:
            handle.close()
            assert next(handle, None) is None

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def abort(self, data):
        _, wanted = data.draw(st.sampled_from(self.handles))
        output = self.llm.abort(data.draw(st.sampled_from(sorted(wanted))))
        assert output is None or output.finish_reason == "abort"

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def abort_submitted(self, data):
        output = self.llm.abort(data.draw(st.sampled_from(sorted(self.submitted))))
        if output is not None:
            self.note(output, self.submitted)

    @precondition(lambda self: self.planted < 3)
    @rule(
        call=st.sampled_from(["dispatch", "collect"]), what=st.sampled_from(["fail", "interrupt", "signal"])
    )
    def plant(self, call, what):
        if call not in self.plan.due:
            self.plan.due[call] = what
            self.planted += 1

    def teardown(self):
        self.plan.due = {call: what for call, what in self.plan.due.items() if what != "fail"}
        for handle, wanted in self.handles:
            for _ in range(200):
                output = self.guarded(lambda h=handle: next(h, None))
                if output is not None:
                    self.note(output, wanted)
            assert next(handle, None) is None, "it hangs"
            assert self.ended >= wanted.keys(), "somebody was lost"
        for _ in range(200):
            for output in self.guarded(self.llm.step) or ():
                self.note(output, self.submitted)
            if not self.llm.has_work:
                break
        assert not self.llm.has_work, "it hangs"
        assert self.ended >= self.submitted.keys(), "somebody was lost"
        scheduler = self.llm.engine.scheduler
        scheduler.check_integrity()
        assert scheduler.num_reserved_pages == 0
        assert not self.llm.engine._records, "a record has been left behind"
        assert not self.llm.engine._sinks
        assert not self.llm.engine._output_stage._progress
        assert self.plan.num_resets - self.resets <= self.planted, "an iteration failed that was not planted"


def test_handles_may_be_used_in_any_order(llm, right, plan, bounded, caplog):
    caplog.set_level(logging.ERROR, "jorca")
    machine = type("Machine", (Handles,), {"llm": llm, "right": right, "plan": plan, "bounded": bounded})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def held_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


class TestClose:
    def test_the_memory_of_the_device_is_back_and_any_use_says_why_not(self):
        before = held_bytes()
        llm = tiny_llm(TINY, **SIZES)
        stream = llm.stream(PROMPTS[:3], greedy())
        next(stream)
        llm.submit(PROMPTS[4], greedy(), request_id="mine")
        assert held_bytes() > before
        llm.close()
        assert held_bytes() == before
        assert {o.finish_reason for o in stream if o.finished} == {"abort"}
        for call in (
            lambda: llm.generate([1]),
            lambda: llm.stream([1]),
            lambda: llm.submit([1]),
            lambda: llm.engine.advance(),
        ):
            with pytest.raises(JorcaError, match="the engine was closed; make a new one"):
                call()
        assert llm.abort("mine") is None
        llm.close()

    def test_weights_that_the_caller_has_stay_his(self):
        with tiny_llm(TINY, **SIZES) as llm:
            params = dict(stage_of(llm).params)
        assert not any(x.is_deleted() for x in params.values())

    def test_it_is_closed_when_the_block_is_left_by_an_error(self):
        with pytest.raises(ValueError, match="mine"), tiny_llm(TINY, **SIZES) as llm:
            raise ValueError("mine")
        with pytest.raises(JorcaError, match="was closed"):
            llm.generate([1])


def test_outputs_tell_the_seed_with_which_a_request_goes_on_elsewhere(llm):
    params = SamplingParams(max_tokens=6, temperature=3.0)
    (whole,) = llm.generate(PROMPTS[3], params)
    seeded = dataclasses.replace(params, seed=whole.seed)
    name = llm.submit(PROMPTS[3], seeded, output_ids=whole.token_ids[:2])
    rest = drain(llm)
    assert rest[-1].request_id == name
    assert rest[-1].token_ids == whole.token_ids
    assert sum((o.new_token_ids for o in rest), ()) == whole.token_ids[2:]


def test_no_limit_goes_to_the_end_of_the_context(llm):
    (output,) = llm.generate([5] * 4, SamplingParams(max_tokens=None, temperature=0))
    assert len(output.token_ids) == 32 - 4 + 1
    assert output.finish_reason == "length"
