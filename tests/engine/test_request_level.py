"""The baseline on the real engine: the same answers as Orca's, only later."""

import random
from pathlib import Path
from typing import Any

import pytest

from engine.device import greedy, tiny_llm
from jorca import LLM, ModelConfig, SamplingParams

ADDER = Path(__file__).parents[2] / "checkpoints" / "adder"
GREEDY = SamplingParams(max_tokens=3, temperature=0)
TINY = ModelConfig(vocab_size=97, max_positions=64, num_layers=2, num_heads=2, d_model=16)
# Everything on the tiny model has these sizes, so that its programs are compiled once.
SIZES = {
    "max_batch_size": 8,
    "max_batch_tokens": 24,
    "max_in_flight": 2,
    "page_size": 4,
    "return_logits": False,
}


def adder(**options):
    ladder: dict[str, Any] = {"min_bucket": 8, "bucket_ratio": 8}
    return LLM(ADDER, policy="request-level", page_size=2, **(ladder | options))


def digits(a, b):
    return [a // 10, a % 10, b // 10, b % 10]


def answers(outputs):
    return [int("".join(map(str, output.token_ids[::-1]))) for output in outputs]


def test_300_sums_are_right():
    draw = random.Random(5)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(300)]
    # One bucket of the largest size: it is compiled once, and the ladder is for other tests.
    llm = adder(max_batch_size=8, microbatch_size=3, max_in_flight=2, min_bucket=48)
    assert answers(llm.generate([digits(*pair) for pair in pairs], GREEDY)) == [a + b for a, b in pairs]
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.num_reserved_pages == 0


@pytest.mark.slow
@pytest.mark.parametrize("shortest_prompt", [False, True])
@pytest.mark.parametrize("max_batch_size", [1, 8, 32])
def test_all_10000_sums_are_right(max_batch_size, shortest_prompt):
    pairs = [(a, b) for a in range(100) for b in range(100)]
    llm = adder(max_batch_size=max_batch_size, shortest_prompt=shortest_prompt)
    assert answers(llm.generate([digits(*pair) for pair in pairs], GREEDY)) == [a + b for a, b in pairs]


@pytest.fixture(scope="module")
def requests():
    """Forty of mixed lengths."""
    draw = random.Random(2)
    return [
        greedy(str(i), [draw.randrange(97) for _ in range(draw.randint(1, 20))], draw.randint(1, 24), seed=i)
        for i in range(40)
    ]


def tokens(llm, requests):
    for request in requests:
        llm.engine.submit(request)
    outputs = {}
    while llm.engine.has_work:
        for output in llm.engine.step():
            assert output.finished, "an output came before its batch had ended"
            assert output.new_token_ids == output.token_ids
            outputs[output.request_id] = output
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.num_reserved_pages == 0
    return {name: (output.token_ids, output.finish_reason) for name, output in outputs.items()}


@pytest.fixture(scope="module")
def under_orca(requests):
    llm = tiny_llm(TINY, **SIZES)
    params = [request.params for request in requests]
    outputs = llm.generate([request.prompt_ids for request in requests], params)
    return {r.id: (o.token_ids, o.finish_reason) for r, o in zip(requests, outputs, strict=True)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shortest_prompt": True},
        {"microbatch_size": 3},
        {"microbatch_size": 2, "shortest_prompt": True},
    ],
    ids=str,
)
def test_tokens_are_those_of_orca(requests, under_orca, options):
    llm = tiny_llm(TINY, policy="request-level", **SIZES, **options)
    assert tokens(llm, requests) == under_orca


@pytest.fixture(scope="module")
def llm():
    llm = tiny_llm(TINY, policy="request-level", **SIZES)
    yield llm
    assert not llm.has_work


def test_outputs_come_together_when_the_batch_has_ended(llm):
    for i, max_tokens in enumerate((1, 5, 3)):
        llm.engine.submit(greedy(str(i), [i + 1], max_tokens))
    steps = []
    while llm.has_work:
        steps.append([(o.request_id, len(o.token_ids)) for o in llm.step()])
    assert steps == [[]] * 4 + [[("0", 1), ("1", 5), ("2", 3)]]


def test_a_stop_and_an_abort_change_nothing_for_the_others(llm):
    alone = {}
    for i in range(3):
        (alone[i],) = llm.generate([[i + 1, 7]], SamplingParams(max_tokens=6, temperature=0))
    stop = alone[0].token_ids[1]
    stopped = SamplingParams(max_tokens=6, temperature=0, stop_token_ids=(stop,))
    llm.submit([1, 7], stopped, request_id="0")
    for i in (1, 2):
        llm.submit([i + 1, 7], SamplingParams(max_tokens=6, temperature=0), request_id=str(i))
    for _ in range(3):
        assert llm.step() == []
    aborted = llm.abort("1")
    assert (aborted.finish_reason, aborted.token_ids) == ("abort", alone[1].token_ids[:3])
    assert aborted.new_token_ids == aborted.token_ids
    outputs = {}
    while llm.has_work:
        outputs |= {o.request_id: o for o in llm.step()}
    assert outputs.keys() == {"0", "2"}
    cut = alone[0].token_ids.index(stop) + 1
    assert (outputs["0"].token_ids, outputs["0"].finish_reason) == (alone[0].token_ids[:cut], "stop")
    assert (outputs["2"].token_ids, outputs["2"].finish_reason) == (alone[2].token_ids, "length")


def test_a_stream_that_is_closed_leaves_nothing_behind(llm):
    params = [SamplingParams(max_tokens=n, temperature=0) for n in (1, 4)]
    stream = llm.stream([[1], [2]], params)
    assert next(stream).finished
    stream.close()
    assert not llm.has_work
