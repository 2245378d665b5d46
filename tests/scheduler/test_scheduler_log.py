"""A log of the scheduler's calls gives the same iterations again, and does not when it was changed."""

import json
import random
from collections.abc import Callable

import pytest

from jorca.request import FinishReason, Request, RequestRejected, SamplingParams, TokenLogprobs
from jorca.scheduler import (
    ItemResult,
    Iteration,
    Orca,
    RecordingScheduler,
    ReplayError,
    StepResult,
    replay,
)
from jorca.wire import request_from_dict, request_to_dict
from scheduler.algorithm1 import CheckedScheduler, make_limits, make_request, one_token


def a_life(seed: int = 0) -> tuple[list[str], RecordingScheduler]:
    """Returns the log of some hundred calls with everything in it, cut with iterations in flight."""
    draw, lines = random.Random(seed), []
    limits = make_limits(max_in_flight=3, max_batch_tokens=12, num_pages=20, page_size=4)
    checked = CheckedScheduler(limits, lambda limits: RecordingScheduler(limits, write=lines.append))
    outcomes = [one_token] * 8 + [
        lambda item, room: ItemResult(error="logits are not finite"),
        lambda item, room: ItemResult((7,)[: item.num_logits], finish=FinishReason.STOP),
    ]
    for i in range(60):
        checked.submit(make_request(str(i), draw.randint(1, 9), 6, draw.choice([0, 5])))
        while checked.plan() is not None:
            pass
        checked.abort(str(draw.randrange(60)))
        checked.commit(draw.choice(outcomes))
    checked.plan()
    assert checked.in_flight
    scheduler = checked.scheduler
    assert isinstance(scheduler, RecordingScheduler)
    return lines, scheduler


def change(lines: list[str], call: str, edit: Callable[[dict], object]) -> list[str]:
    """Returns `lines` with the last `call` that holds anything edited."""
    entries = [json.loads(line) for line in lines]
    edit([e for e in entries if e["call"] == call and e.get("iteration", True)][-1])
    return [json.dumps(entry) for entry in entries]


@pytest.mark.parametrize("seed", range(5))
def test_a_log_gives_the_same_iterations_and_the_same_end(seed: int):
    lines, recorded = a_life(seed)
    assert all(line.endswith("\n") and json.loads(line) for line in lines)
    again = replay(lines)
    again.check_integrity()
    for name in ("num_waiting", "num_resident", "num_in_flight", "num_free_pages", "num_unfinished"):
        assert getattr(again, name) == getattr(recorded, name)


def test_a_log_can_be_replayed_up_to_any_line():
    lines, _ = a_life()
    for end in range(1, len(lines), 17):
        replay(lines[:end], Orca()).check_integrity()


def test_a_refused_request_is_not_in_the_log():
    lines: list[str] = []
    scheduler = RecordingScheduler(make_limits(max_positions=4), write=lines.append)
    with pytest.raises(RequestRejected):
        scheduler.submit(make_request("A", 9), now=1.5)
    scheduler.submit(make_request("B", 1), now=2.5)
    entries = [json.loads(line) for line in lines]
    assert [entry["call"] for entry in entries] == ["start", "submit"]
    assert (entries[1]["now"], entries[1]["request"]["id"]) == (2.5, "B")


@pytest.mark.parametrize(
    ("call", "edit", "message"),
    [
        ("plan", lambda e: e["iteration"]["items"][0].__setitem__(1, 11), r"row is \d+, the log has 11"),
        ("plan", lambda e: e["iteration"]["items"][0].__setitem__(2, 9), r"item 0: start is \d+, .* 9"),
        ("plan", lambda e: e["iteration"]["items"].pop(), r"has \d+ items, the log has"),
        ("plan", lambda e: e["iteration"].update(seq=999), r"\d+, the log has iteration 999"),
        ("plan", lambda e: e.update(iteration=None), r"plan gave iteration \d+, the log has None"),
        ("plan", lambda e: e.pop("iteration"), "'iteration' is missing"),
        ("commit", lambda e: e["result"].update(seq=999), "iteration 999 is committed, but is not in flight"),
        ("commit", lambda e: e["result"].update(items=[]), "0 results for"),
        ("submit", lambda e: e["request"].update(id="0" * 9, prompt_ids=[]), "prompt_ids"),
        ("submit", lambda e: e["request"].update(colour="red"), "colour"),
        ("abort", lambda e: e.update(call="cancel"), "there is no call 'cancel'"),
        ("plan", lambda e: e["iteration"].update(admitted=[["9", 11, [1]]]), "admissions?.*, the log has"),
        ("commit", lambda e: e.update(released=[["0", 11, True]]), r"commit released .*, the log has .*11"),
        ("plan", lambda e: e.pop("now"), "'now' is missing"),
        ("start", lambda e: e.update(version=1), "a start of version 2, got version 1; record it anew"),
        ("start", lambda e: e["policy"].update(name="fifo"), "policy must be one of orca, request-level"),
        ("start", lambda e: e["policy"].update(options={"colour": "red"}), r"Orca\(\) takes no arguments"),
        ("start", lambda e: e["memory"].update(name="heap"), "memory must be reservation, got 'heap'"),
        ("start", lambda e: e["limits"].update(page_size=0), "page_size must be"),
    ],
)  # fmt: skip
def test_a_changed_log_is_found_out_at_its_line(call, edit, message):
    lines = change(a_life()[0], call, edit)
    with pytest.raises(ReplayError, match=rf"^log line \d+: .*{message}"):
        replay(lines)


def test_a_missing_abort_shows_in_the_iterations_that_follow():
    lines = [line for line in a_life()[0] if '"call":"abort"' not in line]
    with pytest.raises(ReplayError, match=r"^log line \d+: .*(released|iteration \d+)"):
        replay(lines)


def test_another_token_shows_in_the_iteration_that_feeds_it():
    lines: list[str] = []
    checked = CheckedScheduler(make_limits(), lambda limits: RecordingScheduler(limits, write=lines.append))
    checked.submit(make_request("A", num_prompt=2, max_tokens=3))
    checked.drain()
    replay(lines)
    changed = change(lines[:6], "commit", lambda e: e["result"].update(items=[[[31], None, None]]))
    with pytest.raises(ReplayError, match=r"line 6: iteration 1, item 0: token_ids is \(31,\), the log has"):
        replay(changed)


def test_a_log_must_have_whole_lines_and_a_start():
    lines, _ = a_life()
    with pytest.raises(ReplayError, match=f"log line {len(lines)}: "):
        replay([*lines[:-1], lines[-1][:-9]])
    with pytest.raises(ReplayError, match="log line 1: the log must begin with a start"):
        replay(lines[1:])
    with pytest.raises(ReplayError, match="the log is empty"):
        replay([])


def test_a_log_is_replayed_with_the_policy_that_made_it():
    class Other(Orca):
        name = "other"

    with pytest.raises(ReplayError, match="policy's name is 'other', the log was made with 'orca'"):
        replay(a_life()[0], Other())


@pytest.mark.parametrize(
    "request_",
    [
        Request(id="plain", prompt_ids=(1,)),
        Request(
            id="everything",
            prompt_ids=(1, 2, 3),
            output_ids=(4, 5),
            output_logprobs=(TokenLogprobs(-0.5), TokenLogprobs(-2.25, ((7, -0.125), (5, -2.25)))),
            sample=1,
            params=SamplingParams(
                max_tokens=7,
                temperature=0.25,
                top_k=5,
                top_p=0.5,
                min_p=0.125,
                seed=2**63 - 1,
                stop=("é", "\n"),
                stop_token_ids=(9, 8),
                ignore_eos=True,
                repetition_penalty=1.5,
                presence_penalty=-2,
                frequency_penalty=0.5,
                logit_bias={3: -100, 1: 2.5},
                min_tokens=4,
                logprobs=2,
                prompt_logprobs=0,
                n=2,
            ),
        ),
    ],
    ids=lambda request: request.id,
)
def test_a_request_survives_the_way_through_json(request_: Request):
    assert request_from_dict(json.loads(json.dumps(request_to_dict(request_)))) == request_


def test_messages_survive_the_way_through_json():
    scheduler = RecordingScheduler(make_limits(), write=lambda line: None)
    scheduler.submit(make_request("A"), now=0.0)
    iteration = scheduler.plan()
    assert iteration is not None
    item = iteration.items[0]._replace(token_ids=None, num_tokens=1)
    for message in (iteration, Iteration(3, (*iteration.items, item))):
        assert Iteration.from_dict(json.loads(json.dumps(message.to_dict()))) == message
    results = ItemResult((1, 2), finish=FinishReason.STOP), ItemResult(error="bad"), ItemResult()
    result = StepResult(7, results)
    again = StepResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert again == result
    assert again.items[0].finish is FinishReason.STOP
