"""What the loop is put together from can be replaced, and no part can harm what is not its own."""

import dataclasses
import queue
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.device import device_params
from jorca.bench.steps import Steps
from jorca.config import EngineConfig, ModelConfig
from jorca.engine import build
from jorca.engine.build import build_engine
from jorca.engine.collector import ThreadCollector
from jorca.engine.distributed import DistributedExecutor, _Session
from jorca.engine.sizing import derive_sizes
from jorca.frontend.text import Tokenizer
from jorca.request import JorcaError, Request, SamplingParams
from jorca.scheduler import ItemResult, Scheduler, StepResult
from jorca.sharding.messages import Message, ProcessLost
from jorca.testing import TINY, FakeExecutor, fake_engine, fake_token

ADDER = Path(__file__).parents[2] / "checkpoints" / "adder"


def request(name, max_tokens=3, **params):
    params = SamplingParams(max_tokens=max_tokens, temperature=0, seed=0, **params)
    return Request(id=name, prompt_ids=(1, 2), params=params)


def drain(engine):
    outputs = []
    for _ in range(100):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
    raise AssertionError("it hangs")


class VirtualTime:
    """A collector and a clock in which every iteration takes a second, and nothing else any time."""

    def __init__(self, executor, arrivals_s):
        self.executor, self.arrivals_s = executor, list(arrivals_s)
        self.now_s, self.started = 0.0, []

    def put(self, iteration, ticket):
        self.started.append((self.now_s + 1.0, iteration, ticket))

    def take(self):
        ends_s, iteration, ticket = self.started[0]
        if self.arrivals_s and self.arrivals_s[0] < ends_s:
            self.now_s = self.arrivals_s[0]
            return None
        self.now_s = ends_s
        del self.started[0]
        return iteration, self.executor.collect(ticket)

    def wake(self):
        pass

    def reset(self):
        self.started.clear()

    def close(self):
        pass


def test_a_collector_in_virtual_time_returns_early_for_an_arrival():
    executor = FakeExecutor()
    times = VirtualTime(executor, [0.0, 0.25])
    config = EngineConfig.from_options(page_size=4, max_batch_size=1, max_in_flight=2)
    engine = fake_engine(executor, config, make_collector=lambda _: times, clock=lambda: times.now_s)
    outputs = []
    while times.arrivals_s or engine.has_work:
        while times.arrivals_s and times.arrivals_s[0] <= times.now_s:
            engine.submit(request(f"at {times.arrivals_s.pop(0)}"))
        outputs += engine.step()
    first, second = (
        next(o for o in outputs if o.finished and o.request_id == n) for n in ("at 0.0", "at 0.25")
    )
    assert (first.metrics.first_scheduled_s, first.metrics.finished_s) == (0.0, 3.0)
    # It started while the first was in flight, the moment that it came.
    assert (second.metrics.submitted_s, second.metrics.first_scheduled_s) == (0.25, 0.25)
    assert second.token_ids == tuple(fake_token("at 0.25", 2 + i) for i in range(3))


def test_an_engine_is_built_with_ones_own_scheduler_collector_and_clock():
    made = {}

    class Own(Scheduler):
        def plan(self, now=0.0):
            made.setdefault("planned", now)
            return super().plan(now)

    def make_scheduler(limits):
        made["limits"] = limits
        return Own(limits)

    def make_collector(executor):
        made["collector"] = ThreadCollector(executor)
        return made["collector"]

    config = EngineConfig.from_options(page_size=4, min_bucket=8, max_batch_tokens=8)
    engine = build_engine(
        TINY,
        device_params(TINY),
        None,
        config,
        make_scheduler=make_scheduler,
        make_collector=make_collector,
        clock=lambda: 7.5,
    )
    engine.submit(request("a"))
    outputs = drain(engine)
    engine.close()
    assert isinstance(engine.scheduler, Own)
    assert made["limits"] == engine.scheduler.limits
    assert made["planned"] == 7.5
    assert outputs[-1].metrics.submitted_s == outputs[-1].metrics.finished_s == 7.5


def test_benchmarks_have_the_engines_own_sizes(monkeypatch):
    free_bytes = 40_000
    monkeypatch.setattr(build, "_free_bytes", lambda _: free_bytes)
    options = {"page_size": 4, "min_bucket": 8, "max_batch_tokens": 8, "max_batch_size": 8}
    params = device_params(TINY)
    steps = Steps(TINY, params, **options)
    engine = build_engine(TINY, params, None, EngineConfig.from_options(**options))
    assert steps.limits == engine.scheduler.limits
    assert steps.limits == derive_sizes(TINY, EngineConfig.from_options(**options), free_bytes).limits
    assert steps.limits.num_pages < derive_sizes(TINY, EngineConfig.from_options(**options)).limits.num_pages


def test_benchmarks_run_deterministic_engines():
    model = ModelConfig(vocab_size=64, max_positions=16, num_layers=1, num_heads=1, d_model=64)
    steps = Steps(model, device_params(model), page_size=4, max_batch_size=2, deterministic=True)
    (item,) = steps.run([steps.item(0, 0, [1, 2], 0)]).items
    assert len(item.token_ids) == 1


class Talk(Tokenizer):
    """A tokenizer that cannot say one of its tokens."""

    def token_bytes(self, token_id):
        if token_id == 3:
            raise RuntimeError("planted")
        return b"x"


def test_a_text_that_fails_is_the_fault_of_one_request_alone():
    tokens = {"a": (5, 3, 6), "b": (7, 8, 9)}
    executor = FakeExecutor(lambda name, position: tokens[name][position - 2])
    engine = fake_engine(
        executor, EngineConfig(), tokenizer=Talk(Tokenizer.from_file(ADDER / "tokenizer.json")._tokenizer)
    )
    for name in tokens:
        engine.submit(request(name))
    last = {o.request_id: o for o in drain(engine)}
    assert (last["a"].finish_reason, last["a"].token_ids) == ("error", (5,))
    assert "planted" in last["a"].error
    assert (last["b"].finish_reason, last["b"].text) == ("length", "xxx")


def test_results_that_cannot_be_stop_the_engine_with_their_cause():
    class Wrong(FakeExecutor):
        def collect(self, ticket):
            return StepResult(ticket.seq, (ItemResult(()),))

    engine = fake_engine(Wrong(), EngineConfig())
    engine.submit(request("a"))
    with pytest.raises(AssertionError, match="asked for a token, but brings none"):
        engine.step()
    with pytest.raises(JorcaError, match=r"has stopped after AssertionError.*asked for a token"):
        engine.step()
    engine.close()


@dataclasses.dataclass
class Packed:
    iteration: object


class FakeMaster:
    """A master whose workers answer when the test has them answer."""

    def __init__(self):
        self.loss, self.inbox, self.progress = None, queue.SimpleQueue(), []

    def receive(self, kind, inbox):
        message = inbox.get()
        if isinstance(message, ProcessLost):
            raise message
        assert message.kind == kind
        return message

    def forget(self):
        old, self.inbox = self.inbox, queue.SimpleQueue()
        old.put(ProcessLost("nobody waits for this message any more"))

    def send(self, kind, body=None):
        pass

    def wait_for_verdict(self):
        return self.loss

    def note_progress(self, seq):
        self.progress.append(seq)

    def close(self):
        self.loss = self.loss


class FakeLocal:
    """Runs nothing; waiting for an iteration ends when the test opens its gate."""

    def __init__(self):
        self.gates = {}

    def fetch(self, ticket):
        self.gates[ticket].wait()
        return {}

    def reset(self):
        pass

    def close(self):
        pass


def test_after_a_reset_an_old_collector_takes_nothing_of_a_new_iteration(monkeypatch):
    """The old thread is still waiting for its device when the reset comes, and goes on after it."""
    from jorca.engine import distributed

    master, local = FakeMaster(), FakeLocal()
    parts: Any = local, master
    executor = DistributedExecutor(*parts, has_outputs=False, timeout_s=1000)
    monkeypatch.setattr(distributed, "read_outputs", lambda packed, outputs: outputs)
    monkeypatch.setattr(distributed, "outputs_from_plain", lambda outputs: outputs)
    monkeypatch.setattr(distributed.RunningDigest, "add_tokens", lambda *_: b"")

    class Ticket:
        def __init__(self, seq):
            self.packed = self
            self.iteration = self
            self.seq = seq
            local.gates[self] = threading.Event()

    def collect_in_thread(ticket):
        got = queue.SimpleQueue()

        def run():
            try:
                got.put(executor.collect(ticket))
            except Exception as error:
                got.put(error)

        threading.Thread(target=run, daemon=True).start()
        return got

    old: Any = Ticket(0)
    from_old = collect_in_thread((executor._session, old))
    while executor._session.oldest is None:
        pass
    executor.reset()
    new: Any = Ticket(1)
    from_new = collect_in_thread((executor._session, new))
    master.inbox.put(Message(1, "outputs", {"seq": 1, "outputs": "those of 1"}))
    local.gates[old].set()  # the old one goes first for whatever there is
    assert isinstance(from_old.get(timeout=20), ProcessLost)
    assert executor._session.oldest is not None, "the old one has ended the watch over the new one"
    local.gates[new].set()
    assert from_new.get(timeout=20) == "those of 1"
    with pytest.raises(JorcaError, match="iteration 0 was given up"):
        executor.collect((_Session(master.inbox), old))
    executor.close()
