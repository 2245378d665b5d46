"""What a request may ask for: every field's edges, every kind of wrong value, and its message."""

import dataclasses
import re
import subprocess
import sys

import numpy as np
import pytest

from jorca.request import FinishReason, JorcaError, Request, RequestRejected, SamplingParams, TokenLogprobs

NAN, INF = float("nan"), float("inf")
HUGE = 10**400
"""An int that no float can hold."""


def request(**changes):
    return Request(**{"id": "a", "prompt_ids": (1, 2, 3)} | changes)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [1, 2**31 - 1]),
        ("temperature", [0, 0.0, 1, 1e-30, 1e30]),
        ("top_k", [0, 1, 2**31 - 1]),
        ("top_p", [1, 1.0, 1e-30, 0.5]),
        ("min_p", [0, 1, 0.0, 1.0, 0.5]),
        ("seed", [None, 0, 2**63 - 1]),
        ("stop", [(), ("a",), ("a" * 256,), ("a",) * 16]),
        ("stop_token_ids", [(), (0,), (2**31 - 1,), tuple(range(64))]),
        ("ignore_eos", [True, False]),
        ("repetition_penalty", [1, 1e-30, 0.5, 1e30]),
        ("presence_penalty", [-2, 0, 2.0]),
        ("frequency_penalty", [-2, 0, 2.0]),
        ("logit_bias", [(), ((0, -100.0),), ((2**31 - 1, 100.0),), tuple((i, 1.0) for i in range(300))]),
        ("min_tokens", [0, 16]),  # 16 is max_tokens here
        ("logprobs", [None, 0, 20]),
        ("prompt_logprobs", [None, 0, 20]),
        ("n", [1, 128]),
    ],
)
def test_a_sampling_field_takes_its_edges(field, values):
    for value in values:
        assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", v) for v in (0, -1, 2**31, 1.0, True, "1", NAN, [1])],
        # In float32 these are 0, or on some devices; and infinite.
        *[(name, v) for name in ("repetition_penalty", "top_p") for v in (1e-46, 1e-40, 1.1e-38)],
        *[(name, v) for name in ("repetition_penalty", "temperature") for v in (3.5e38, 1e39)],
        *[("temperature", v) for v in (-1e-9, -1, NAN, INF, -INF, HUGE, True, "1", None, [1.0], 1j)],
        *[("top_k", v) for v in (-1, 2**31, 1.0, False, "1", None)],
        *[("top_p", v) for v in (0, 0.0, -0.5, 1.0000001, 2, NAN, INF, HUGE, True, "1", None)],
        *[("min_p", v) for v in (-1e-9, 1.0000001, NAN, -INF, HUGE, False, "0", None)],
        *[("seed", v) for v in (-1, 2**63, 1.0, True, "1", NAN)],
        *[("stop", v) for v in ("", [""], ["a", ""], [1], [None], None, 5, b"a", ["a" * 257], ["a"] * 17)],
        *[("stop_token_ids", v) for v in ([-1], [2**31], [1.0], [True], ["1"], "1", b"1", None, 5, [0] * 65)],
        *[("ignore_eos", v) for v in (0, 1, None, "true")],
        *[("repetition_penalty", v) for v in (0, -1, NAN, INF, HUGE, True, "1", None)],
        *[("presence_penalty", v) for v in (-2.1, 2.1, NAN, INF, True, "1", None)],
        *[("frequency_penalty", v) for v in (-2.1, 2.1, NAN, INF, True, "1", None)],
        *[("logit_bias", {k: v}) for k, v in ((-1, 0), (2**31, 0), (1.0, 0), ("1", 0), (True, 0))],
        *[("logit_bias", {1: v}) for v in (100.1, -100.1, NAN, INF, True, "1", None)],
        *[("logit_bias", v) for v in ("12", b"12", None, 5, [1, 2], [(1, 2), (1, 3)])],
        ("logit_bias", dict.fromkeys(range(301), 0)),
        *[("min_tokens", v) for v in (-1, 17, 1.0, True, None)],
        *[("prompt_logprobs", v) for v in (-1, 21, 1.0, True, "1")],
        *[("logprobs", v) for v in (-1, 21, 1.0, True, False, "1")],
        *[("n", v) for v in (0, -1, 129, 1.0, True, None)],
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_a_wrong_sampling_value_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(ValueError, match=rf"^{field} (must|may) .*got "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens must be between 1 and 2147483647, got 0"),
        ("temperature", -0.5, "temperature must be a number of at least 0, got -0.5"),
        ("top_k", -1, "top_k must be between 0 and 2147483647, got -1 (0 keeps every token)"),
        ("top_p", 0.0, "top_p must be a number above 0 and at most 1, got 0.0"),
        ("min_p", 1.5, "min_p must be a number between 0 and 1, got 1.5"),
        ("seed", "x", "seed must be an integer, got 'x'"),
        ("stop", ["a"] * 17, "stop may hold at most 16 strings, got 17"),
        ("stop_token_ids", [3] * 65, "stop_token_ids may hold at most 64 ids, got 65"),
        ("ignore_eos", 1, "ignore_eos must be True or False, got 1"),
        ("min_tokens", 17, "min_tokens must be between 0 and 16, got 17 (max_tokens is 16)"),
        ("logit_bias", {7: 101}, "logit_bias must be a number between -100 and 100, got 101"),
        ("logit_bias", [(7, 1), (7, 2)], "logit_bias must name each id once, got 7 twice"),
        ("logprobs", 21, "logprobs must be between 0 and 20, got 21"),
        ("n", 129, "n must be between 1 and 128, got 129"),
    ],
)
def test_a_message_tells_field_rule_and_value(field, value, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SamplingParams(**{field: value})


def test_an_empty_stop_string_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="1 to 256 characters, got ''; leave stop empty to stop at none"):
        SamplingParams(stop=["\n", ""])


def test_messages_stay_short_when_values_are_long():
    with pytest.raises(ValueError, match="stop") as long_stop:
        SamplingParams(stop=["a" * 1_000_000])
    with pytest.raises(RequestRejected) as text_for_ids:
        request(prompt_ids="a" * 1_000_000)
    assert len(str(long_stop.value)) < 200
    assert len(str(text_for_ids.value)) < 200


def test_one_stop_string_is_a_list_of_one_and_not_of_its_letters():
    assert SamplingParams(stop="end").stop == ("end",)


def test_numpy_numbers_are_taken_and_become_plain_ones():
    params = SamplingParams(
        max_tokens=np.int32(3),  # pyright: ignore[reportArgumentType]
        temperature=np.float32(0.5),  # pyright: ignore[reportArgumentType]
        top_k=np.int64(7),  # pyright: ignore[reportArgumentType]
        seed=np.uint64(2**63 - 1),  # pyright: ignore[reportArgumentType]
        stop_token_ids=np.array([4, 5]),  # pyright: ignore[reportArgumentType]
    )
    assert params == SamplingParams(
        max_tokens=3, temperature=0.5, top_k=7, seed=2**63 - 1, stop_token_ids=(4, 5)
    )
    assert {type(v) for v in (params.max_tokens, params.top_k, params.seed, *params.stop_token_ids)} == {int}
    assert type(params.temperature) is float


def test_lists_are_copied_so_that_later_changes_do_not_reach_the_request():
    stop, stop_token_ids, prompt_ids = ["a"], [1], [5, 6]
    asked = request(prompt_ids=prompt_ids, params=SamplingParams(stop=stop, stop_token_ids=stop_token_ids))
    for given in (stop, stop_token_ids, prompt_ids):
        given.clear()
    assert (asked.prompt_ids, asked.params.stop, asked.params.stop_token_ids) == ((5, 6), ("a",), (1,))


@pytest.mark.parametrize(
    ("thing", "field"),
    [(SamplingParams(), field.name) for field in dataclasses.fields(SamplingParams)]
    + [(request(), field.name) for field in dataclasses.fields(Request)],
)
def test_requests_and_their_params_are_frozen(thing, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(thing, field, getattr(thing, field))


def test_equal_params_are_equal_and_hash_alike_however_they_were_given():
    given, plain = SamplingParams(stop=["a"], temperature=1), SamplingParams(stop="a", temperature=1.0)
    assert given == plain
    assert hash(given) == hash(plain)


@pytest.mark.parametrize("ids", [(0,), [0, 2**31 - 1], range(4), np.arange(4, dtype=np.uint8)], ids=str)
def test_prompt_ids_of_any_sequence_become_plain_ints(ids):
    asked = request(prompt_ids=ids)
    assert asked.prompt_ids == tuple(int(token) for token in ids)
    assert {type(token) for token in asked.prompt_ids} == {int}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("id", "", "id must be a non-empty string, got ''"),
        ("id", 5, "id must be a non-empty string, got 5"),
        ("id", None, "id must be a non-empty string, got None"),
        ("prompt_ids", (), "prompt_ids must hold at least one token, got none; give a prompt"),
        ("prompt_ids", "12", "prompt_ids must be a list of token ids, got '12'"),
        ("prompt_ids", b"12", "prompt_ids must be a list of token ids, got b'12'"),
        ("prompt_ids", 5, "prompt_ids must be a list of token ids, got 5"),
        ("prompt_ids", None, "prompt_ids must be a list of token ids, got None"),
        ("prompt_ids", np.array(5), "prompt_ids must be a list of token ids, got array(5)"),
        ("prompt_ids", [[1, 2]], "prompt_ids[0] must be an integer, got [1, 2]"),
        ("prompt_ids", [1, -1], "prompt_ids[1] must be between 0 and 2147483647, got -1"),
        ("prompt_ids", [1, 2**31], "prompt_ids[1] must be between 0 and 2147483647, got 2147483648"),
        ("prompt_ids", [1, 2, 3.0], "prompt_ids[2] must be an integer, got 3.0"),
        ("prompt_ids", [True], "prompt_ids[0] must be an integer, got True"),
        ("prompt_ids", ["1"], "prompt_ids[0] must be an integer, got '1'"),
        ("output_ids", [-1], "output_ids[0] must be between 0 and 2147483647, got -1"),
        ("output_ids", None, "output_ids must be a list of token ids, got None"),
        ("params", None, "params must be a SamplingParams, got None"),
        ("params", {"n": 1}, "params must be a SamplingParams, got {'n': 1}"),
        ("sample", -1, "sample must be between 0 and 127, got -1"),
        ("sample", 128, "sample must be between 0 and 127, got 128"),
        ("sample", 0.0, "sample must be an integer, got 0.0"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_a_wrong_request_is_rejected_with_field_rule_and_value(field, value, message):
    with pytest.raises(RequestRejected, match=f"^{re.escape(message)}$"):
        request(**{field: value})


def test_a_rejection_can_be_caught_as_jorcas_error_and_as_a_value_error():
    assert issubclass(RequestRejected, JorcaError)
    assert issubclass(RequestRejected, ValueError)


def test_output_that_a_request_brings_must_leave_room_for_at_least_one_token():
    params = SamplingParams(max_tokens=3)
    assert request(params=params, output_ids=(8, 9)).output_ids == (8, 9)
    message = "output_ids holds 3 tokens but max_tokens is 3: nothing is left to generate; raise max_tokens"
    with pytest.raises(RequestRejected, match=f"^{message}$"):
        request(params=params, output_ids=(7, 8, 9))


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "positions"), [(1, 1, 1), (3, 1, 3), (3, 5, 7), (8, 9, 16)]
)
def test_the_last_token_is_never_fed_and_takes_no_position(num_prompt, max_tokens, positions):
    asked = request(prompt_ids=(1,) * num_prompt, params=SamplingParams(max_tokens=max_tokens))
    assert asked.num_positions == positions


def test_output_that_a_request_brings_changes_no_positions():
    params = SamplingParams(max_tokens=5)
    assert request(params=params, output_ids=(8, 9)).num_positions == request(params=params).num_positions


def test_finish_reasons_are_their_lower_case_strings():
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error"]
    assert FinishReason.STOP == "stop"


def test_requests_configs_and_the_scheduler_load_no_jax():
    code = (
        "import sys, jorca.request, jorca.config, jorca.scheduler\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('jax', 'jaxlib', 'flax')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


def test_logit_bias_may_be_a_mapping_and_is_kept_as_pairs():
    assert SamplingParams(logit_bias={5: -1, 3: 0.5}).logit_bias == ((5, -1.0), (3, 0.5))
    params = SamplingParams(logit_bias={5: -1})
    assert dataclasses.replace(params, top_k=3).logit_bias == ((5, -1.0),)


@pytest.mark.parametrize(
    ("logprobs", "given", "fits"),
    [(None, 0, True), (None, 2, False), (0, 2, True), (0, 0, False), (3, 1, False)],
)
def test_output_that_is_brought_along_brings_its_logprobs_if_they_are_wanted(logprobs, given, fits):
    fields = {
        "params": SamplingParams(max_tokens=5, logprobs=logprobs),
        "output_ids": (4, 5),
        "output_logprobs": (TokenLogprobs(-1.0),) * given,
    }
    if fits:
        assert len(request(**fields).output_logprobs) == given
    else:
        with pytest.raises(RequestRejected, match=f"output_logprobs must hold .* got {given}"):
            request(**fields)


def test_a_temperature_that_float32_cannot_tell_from_zero_is_zero():
    assert SamplingParams(temperature=1e-40).temperature == 0
    assert SamplingParams(temperature=1.2e-38).temperature == 1.2e-38
    assert SamplingParams(temperature=0.1).temperature == 0.1  # as given, not as float32 has it


class TestToTheEndOfTheContext:
    def test_no_limit_becomes_what_the_context_has_room_for(self):
        asked = request(prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=None, min_tokens=6))
        resolved = asked.to_end_of(8)
        assert resolved.max_tokens == 6  # the last token needs no position
        assert resolved.num_positions == 8
        assert request(prompt_ids=(1,)).to_end_of(8).max_tokens == 16  # what is set stays

    def test_a_prompt_that_leaves_no_room_is_refused(self):
        params = SamplingParams(max_tokens=None)
        assert request(prompt_ids=(1,) * 8, params=params).to_end_of(8).max_tokens == 1
        with pytest.raises(RequestRejected, match=r"prompt_ids holds 9 tokens, but .* max_positions is 8"):
            request(prompt_ids=(1,) * 9, params=params).to_end_of(8)

    def test_so_is_one_without_room_for_min_tokens_or_for_more_than_it_came_with(self):
        params = SamplingParams(max_tokens=None, min_tokens=3)
        with pytest.raises(
            RequestRejected, match=r"min_tokens must be between 0 and 2, got 3 \(max_tokens is 2"
        ):
            request(prompt_ids=(1,) * 7, params=params).to_end_of(8)
        with pytest.raises(RequestRejected, match="output_ids holds 2 tokens but max_tokens is 2"):
            request(prompt_ids=(1,) * 7, params=SamplingParams(max_tokens=None), output_ids=(1, 2)).to_end_of(
                8
            )
