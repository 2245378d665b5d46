"""Requests, parameters and outputs survive the way through JSON and msgpack."""

import json

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jorca.output import RequestMetrics, RequestOutput, Transcript
from jorca.request import FinishReason, Request, SamplingParams, TokenLogprobs
from jorca.wire import (
    WireError,
    output_from_dict,
    output_to_dict,
    params_from_dict,
    params_to_dict,
    request_from_dict,
    request_to_dict,
)

ids = st.integers(0, 2**31 - 1)
logprobs = st.builds(
    TokenLogprobs,
    st.floats(-100, 0),
    st.lists(st.tuples(ids, st.floats(-100, 0)), max_size=3).map(tuple),
)


@st.composite
def any_params(draw):
    max_tokens = draw(st.none() | st.integers(5, 2**31 - 1))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=draw(st.floats(0, 100)),
        top_k=draw(ids),
        top_p=draw(st.floats(2e-38, 1)),
        min_p=draw(st.floats(0, 1)),
        seed=draw(st.none() | st.integers(0, 2**63 - 1)),
        stop=draw(st.lists(st.text(min_size=1, max_size=9), max_size=3)),
        stop_token_ids=draw(st.lists(ids, max_size=3)),
        ignore_eos=draw(st.booleans()),
        repetition_penalty=draw(st.floats(2e-38, 10)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        logit_bias=draw(st.dictionaries(ids, st.floats(-100, 100), max_size=3)),
        min_tokens=draw(st.integers(0, 5)),
        logprobs=draw(st.none() | st.integers(0, 20)),
        prompt_logprobs=draw(st.none() | st.integers(0, 20)),
        n=draw(st.integers(1, 128)),
    )


@st.composite
def any_request(draw):
    params = draw(any_params())
    output_ids = draw(st.lists(ids, max_size=4))
    wanted = len(output_ids) if params.logprobs is not None else 0
    return Request(
        id=draw(st.text(min_size=1, max_size=9)),
        prompt_ids=tuple(draw(st.lists(ids, min_size=1, max_size=5))),
        params=params,
        output_ids=tuple(output_ids),
        output_logprobs=tuple(draw(st.lists(logprobs, min_size=wanted, max_size=wanted))),
        sample=draw(st.integers(0, 127)),
    )


def sent(data):
    """What comes out of JSON, which must be what comes out of msgpack."""
    through_json = json.loads(json.dumps(data))
    assert msgpack.unpackb(msgpack.packb(data)) == through_json
    return through_json


@settings(deadline=None, derandomize=True, database=None)
@given(any_params())
def test_parameters(params):
    assert params_from_dict(sent(params_to_dict(params))) == params


@settings(deadline=None, derandomize=True, database=None)
@given(any_request())
def test_requests(request):
    assert request_from_dict(sent(request_to_dict(request))) == request


def test_what_has_its_default_is_not_sent():
    assert params_to_dict(SamplingParams()) == {"version": 1}
    assert request_to_dict(Request(id="a", prompt_ids=(1,))) == {"version": 1, "id": "a", "prompt_ids": [1]}


@st.composite
def a_life(draw):
    """A request, the text it came with, and what each of its outputs brings: tokens, text."""
    request = draw(any_request())
    steps = draw(st.lists(st.tuples(st.lists(ids, max_size=3), st.text(max_size=4)), min_size=1, max_size=5))
    return request, draw(st.text(max_size=4)), steps


def live(request, text, steps, draw):
    """Plays a life here; returns its outputs."""
    transcript, outputs = Transcript(request, text), []
    for number, (token_ids, text) in enumerate(steps):
        pieces = transcript.num_pieces
        transcript.token_ids += token_ids
        transcript.add_text(text)
        if transcript.logprobs is not None:
            transcript.logprobs += [draw(logprobs) for _ in token_ids]
        if transcript.prompt_logprobs is not None and number == 0:
            transcript.prompt_logprobs += [draw(logprobs) for _ in request.prompt_ids[1:]]
        last = number == len(steps) - 1
        outputs.append(
            RequestOutput(
                transcript=transcript,
                num_tokens=len(transcript.token_ids),
                num_new_tokens=len(token_ids),
                num_pieces=transcript.num_pieces,
                num_new_pieces=transcript.num_pieces - pieces,
                metrics=RequestMetrics(1.5, 2.0, None, 7.25 if last else None, number, 0, number),
                finish_reason=draw(st.sampled_from(FinishReason)) if last else None,
                stop_reason=draw(st.none() | ids | st.text(max_size=3)) if last else None,
                error=draw(st.none() | st.text(max_size=3)) if last else None,
            )
        )
    return outputs


PROPERTIES = (
    *("request_id", "sample", "seed", "prompt_ids", "token_ids", "text", "logprobs", "prompt_logprobs"),
    *("new_token_ids", "new_text", "finished", "finish_reason", "stop_reason", "error", "metrics"),
)


@settings(deadline=None, derandomize=True, database=None)
@given(a_life(), st.data())
def test_outputs_put_together_elsewhere_are_the_same_as_here(life, data):
    request, text, steps = life
    there = Transcript(request_from_dict(sent(request_to_dict(request))), text)
    whole = text
    for output, (token_ids, new) in zip(live(request, text, steps, data.draw), steps, strict=True):
        whole += new
        message = sent(output_to_dict(output))
        assert message["token_ids"] == token_ids  # what is new, and no more
        assert message["text"] == new
        got = output_from_dict(message, there)
        for name in PROPERTIES:
            assert getattr(got, name) == getattr(output, name), name
        assert (got.text, got.new_text, got.new_token_ids) == (whole, new, tuple(token_ids))


@settings(deadline=None, derandomize=True, database=None)
@given(a_life(), st.data())
def test_joined_outputs_bring_what_each_of_them_brought(life, data):
    request, text, steps = life
    outputs = live(request, text, steps, data.draw)
    joined = outputs[0]
    for output in outputs[1:]:
        joined = output.joined_to(joined)
    assert joined.new_token_ids == sum((tuple(token_ids) for token_ids, _ in steps), ())
    assert joined.new_text == "".join(new for _, new in steps)
    assert joined.finish_reason == outputs[-1].finish_reason
    got = output_from_dict(sent(output_to_dict(joined)), Transcript(request, text))
    assert (got.token_ids, got.text) == (outputs[-1].token_ids, outputs[-1].text)
    assert got.prompt_logprobs == joined.prompt_logprobs


def an_output(brings=(4, 5)):
    transcript = Transcript(Request(id="a", prompt_ids=(1,)))
    transcript.token_ids += brings
    count = len(brings)
    return RequestOutput(
        transcript=transcript,
        num_tokens=count,
        num_new_tokens=count,
        num_pieces=1,
        num_new_pieces=0,
        metrics=RequestMetrics(0.0),
    )


def test_an_output_that_does_not_follow_is_refused_and_changes_nothing():
    message = output_to_dict(an_output())
    transcript = Transcript(Request(id="a", prompt_ids=(1,)))
    output_from_dict(message, transcript)
    for wrong in (message, message | {"position": 3}, message | {"position": 2, "text_position": 1}):
        with pytest.raises(WireError, match="was one lost or given twice"):
            output_from_dict(wrong, transcript)
    with pytest.raises(WireError, match="must follow on its transcript"):
        output_from_dict(message, Transcript(Request(id="b", prompt_ids=(1,))))
    assert transcript.token_ids == [4, 5]


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_another_version_is_refused_by_its_number(version):
    transcript = Transcript(Request(id="a", prompt_ids=(1,)))
    for read, message in (
        (params_from_dict, params_to_dict(SamplingParams(seed=1))),
        (request_from_dict, request_to_dict(Request(id="a", prompt_ids=(1,)))),
        (lambda data: output_from_dict(data, transcript), output_to_dict(an_output())),
    ):
        with pytest.raises(WireError, match=f"version must be 1, got {version!r}"):
            read(message | {"version": version})


def test_a_field_that_is_not_known_is_refused():
    with pytest.raises(TypeError, match="colour"):
        params_from_dict({"version": 1, "colour": "red"})
    with pytest.raises(TypeError, match="colour"):
        request_from_dict({"version": 1, "id": "a", "prompt_ids": [1], "colour": "red"})
