"""Every sampling field through the engine, against the plain definitions in numpy."""

import dataclasses

import numpy as np
import pytest

from engine.device import stage_of, tiny_llm
from jorca.config import ModelConfig
from jorca.request import Request, RequestRejected, SamplingParams
from oracle.numpy_gpt import forward, random_params
from oracle.numpy_sampling import adjusted, kept

CONFIG = ModelConfig(
    vocab_size=37,
    max_positions=24,
    num_layers=1,
    num_heads=2,
    d_model=16,
    tie_embeddings=False,
    eos_token_id=36,
)
PARAMS = random_params(CONFIG, 0)
FIELDS = {
    "nothing": {},
    "repetition": {"repetition_penalty": 3.0},
    "reward": {"repetition_penalty": 0.4},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "presents": {"presence_penalty": -2.0, "frequency_penalty": -1.0},
    "bias": {"logit_bias": {3: 5.0, 20: -100.0, 11: 4.0}},
    "everything": {
        "repetition_penalty": 1.7,
        "frequency_penalty": 0.8,
        "presence_penalty": 0.6,
        "logit_bias": {i: 0.3 * i for i in range(0, 36, 5)},
        "min_tokens": 6,
        "stop_token_ids": (1, 7),
    },
}


@pytest.fixture(scope="module")
def llm():
    llm = tiny_llm(CONFIG, max_batch_size=8, page_size=4, seed=0)
    yield llm
    assert llm.engine.scheduler.num_reserved_pages == 0


def request(name, seed=1, temperature=0.0, num_prompt=6, **fields):
    params = {"max_tokens": 12, "temperature": temperature, "seed": seed, "ignore_eos": True} | fields
    prompt = np.random.default_rng(seed).integers(0, 36, num_prompt).tolist()
    return Request(id=name, prompt_ids=tuple(prompt), params=SamplingParams(**params))


def outputs_of(llm, requests):
    for one in requests:
        llm.engine.submit(one)
    outputs = {}
    while llm.engine.has_work:
        outputs |= {output.request_id: output for output in llm.engine.step() if output.finished}
    return outputs


def plain(params):
    """The definition's arguments of a request's params."""
    return {
        "repetition_penalty": params.repetition_penalty,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "logit_bias": dict(params.logit_bias),
        "min_tokens": params.min_tokens,
        "banned_ids": params.stop_token_ids,
    }


def check_greedy(one, output):
    assert len(output.token_ids) > 1
    for i, (row, token) in enumerate(zip(output.logits, output.token_ids, strict=True)):
        right = adjusted(row, one.prompt_ids, output.token_ids[:i], **plain(one.params))
        assert right[token] >= right.max() - 1e-4, (one.id, i)


def test_greedy_tokens_are_the_best_of_the_adjusted_logits_in_a_mixed_crowd(llm):
    requests = [
        request(f"{name}-{seed}", seed=seed, num_prompt=3 + seed, **fields)
        for seed in range(4)
        for name, fields in FIELDS.items()
    ]
    outputs = outputs_of(llm, requests)
    for one in requests:
        check_greedy(one, outputs[one.id])
    # The fields do change what is chosen.
    for name in FIELDS:
        if name != "nothing":
            assert any(
                outputs[f"{name}-{s}"].token_ids != outputs[f"nothing-{s}"].token_ids for s in range(4)
            )


def test_a_crowd_of_mixed_settings_gives_each_what_it_gets_alone(llm):
    requests = [request(name, temperature=t, top_p=0.9, **FIELDS[name]) for t, name in
                zip((0, 0.5, 1, 2, 0, 1, 0.7, 1.5), FIELDS, strict=True)]  # fmt: skip
    crowd = outputs_of(llm, requests)
    for one in requests:
        (alone,) = outputs_of(llm, [one]).values()
        assert alone.token_ids == crowd[one.id].token_ids


def test_sampled_tokens_stay_in_what_the_adjusted_logits_keep(llm):
    requests = [
        request(f"{n}-{s}", seed=s, temperature=1.5, top_k=5, **f)
        for s in range(5)
        for n, f in FIELDS.items()
    ]
    outputs = outputs_of(llm, requests)
    for one in requests:
        output = outputs[one.id]
        for i, (row, token) in enumerate(zip(output.logits, output.token_ids, strict=True)):
            right = adjusted(row, one.prompt_ids, output.token_ids[:i], **plain(one.params))
            assert kept(right, 1.5, top_k=5)[token]


def test_rows_that_served_others_before_leave_nothing_behind(llm):
    first = outputs_of(llm, [request(f"n{i}", seed=i) for i in range(8)])
    outputs_of(llm, [request(f"e{i}", seed=i + 9, **FIELDS["everything"]) for i in range(8)])
    again = outputs_of(llm, [request(f"n{i}", seed=i) for i in range(8)])
    assert {n: o.token_ids for n, o in first.items()} == {n: o.token_ids for n, o in again.items()}
    state = stage_of(llm).state
    assert state is not None
    assert state.tokens_nc.shape == (8, 24)


def test_min_tokens_keeps_end_of_text_stop_tokens_and_stop_strings_away(llm):
    bias = {36: 100.0}
    early = request("early", ignore_eos=False, logit_bias=bias)
    late = request("late", ignore_eos=False, logit_bias=bias, min_tokens=5)
    outputs = outputs_of(llm, [early, late])
    assert outputs["early"].token_ids == (36,)
    assert len(outputs["late"].token_ids) == 6
    assert outputs["late"].token_ids.index(36) == 5
    assert outputs["late"].stop_reason == 36
    with pytest.raises(RequestRejected, match="min_tokens must be 0 if every token ends the request"):
        llm.engine.submit(request("never", stop_token_ids=tuple(range(37)), min_tokens=1))


def test_logprobs_are_those_of_the_plain_logits_whatever_changes_them(llm):
    one = request("a", logprobs=5, temperature=0.8, **FIELDS["everything"])
    (output,) = outputs_of(llm, [one]).values()
    exact = log_softmax(output.logits)
    for row, token, got in zip(exact, output.token_ids, output.logprobs, strict=True):
        assert got.logprob == pytest.approx(row[token], abs=1e-4)
        assert [i for i, _ in got.top] == np.argsort(-row, kind="stable")[:5].tolist()


def log_softmax(logits):
    exact = np.asarray(logits, np.float64)
    exact = exact - exact.max(-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


@pytest.mark.parametrize("num_prompt", [1, 2, 8, 9, 20])
def test_prompt_logprobs_are_those_of_the_whole_prompt_in_one_pass(llm, num_prompt):
    one = request("echo", num_prompt=num_prompt, max_tokens=3, prompt_logprobs=2, seed=5)
    others = [request(f"o{i}", seed=i) for i in range(5)]
    outputs = outputs_of(llm, [*others[:2], one, *others[2:]])
    got = outputs["echo"].prompt_logprobs
    right = log_softmax(forward(CONFIG, PARAMS, one.prompt_ids))
    assert len(got) == num_prompt
    assert got[0] is None
    for i in range(1, num_prompt):
        assert got[i].logprob == pytest.approx(right[i - 1, one.prompt_ids[i]], abs=1e-4)
        assert [t for t, _ in got[i].top] == np.argsort(-right[i - 1], kind="stable")[:2].tolist()
    plain_one = dataclasses.replace(one, params=dataclasses.replace(one.params, prompt_logprobs=None))
    assert outputs["echo"].token_ids == outputs_of(llm, [plain_one])["echo"].token_ids
    assert outputs_of(llm, [plain_one])["echo"].prompt_logprobs is None
    for other in others:
        (alone,) = outputs_of(llm, [other]).values()
        assert alone.token_ids == outputs[other.id].token_ids


@pytest.mark.parametrize(
    "fields", [*FIELDS.values(), {"temperature": 1.2, "top_p": 0.8, "logprobs": 3}], ids=str
)
def test_a_request_that_stopped_in_the_middle_goes_on_as_if_it_had_not(llm, fields):
    one = request("a", **fields)
    (whole,) = outputs_of(llm, [one]).values()
    for cut in (1, 4, len(whole.token_ids) - 1):
        resumed = dataclasses.replace(
            one,
            output_ids=whole.token_ids[:cut],
            output_logprobs=() if whole.logprobs is None else whole.logprobs[:cut],
        )
        (output,) = outputs_of(llm, [resumed]).values()
        assert output.token_ids == whole.token_ids
        assert (output.finish_reason, output.stop_reason) == (whole.finish_reason, whole.stop_reason)
        if whole.logprobs is not None:
            assert [p.logprob for p in output.logprobs] == pytest.approx(
                [p.logprob for p in whole.logprobs], abs=1e-4
            )
