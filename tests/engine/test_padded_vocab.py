"""Rows behind the vocabulary: whatever stands in them, nobody sees them and no request can name them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from engine.device import tiny_llm
from jorca.config import ConfigError, ModelConfig
from jorca.engine.llm import LLM
from jorca.request import RequestRejected, SamplingParams
from oracle.numpy_gpt import forward, random_params

VOCAB, PADDED = 37, 48
PLAIN = ModelConfig(vocab_size=VOCAB, max_positions=24, num_layers=1, num_heads=2, d_model=16)
OPTIONS = {"max_batch_size": 8, "page_size": 4, "seed": 0, "min_bucket": 40, "max_batch_tokens": 40}


def padding(kind):
    """Rows that would win every draw: each with its opposite, so that some logits are huge."""
    rows = np.random.default_rng(3).normal(0, 1e4, ((PADDED - VOCAB + 1) // 2, PLAIN.d_model))
    values = {"huge": np.concatenate([rows, -rows]), "nan": rows * np.nan, "infinite": rows * np.inf}[kind]
    return np.resize(values, (PADDED - VOCAB, PLAIN.d_model)).astype(np.float32)


def make(tied, kind):
    """Returns the config, its parameters, and those without the padding."""
    plain = dataclasses.replace(PLAIN, tie_embeddings=tied)
    params = random_params(plain, seed=2)
    padded = {
        name: np.concatenate([x, padding(kind)]) if name in ("embed.tokens", "head.kernel") else x
        for name, x in params.items()
    }
    return dataclasses.replace(plain, padded_vocab_size=PADDED), padded, params


def load(tied=False, kind="huge", **options) -> LLM:
    config, padded, _ = make(tied, kind)
    return tiny_llm(config, {name: jnp.asarray(x) for name, x in padded.items()}, **(OPTIONS | options))


@pytest.fixture(scope="module")
def llm():
    llm = load()
    yield llm
    assert llm.engine.scheduler.num_reserved_pages == 0


def prompts(count):
    return np.random.default_rng(4).integers(0, VOCAB, (count, 5)).tolist()


def test_padding_would_win_if_it_were_seen():
    config, padded, _ = make(tied=False, kind="huge")
    everything = dataclasses.replace(config, vocab_size=PADDED)
    assert all(forward(everything, padded, prompt)[-1].argmax() >= VOCAB for prompt in prompts(8))


@pytest.mark.parametrize("kind", ["huge", "nan", "infinite"])
@pytest.mark.parametrize("tied", [True, False])
def test_greedy_tokens_and_logits_are_those_of_the_model_without_padding(tied, kind):
    llm = load(tied, kind)
    config, _, params = make(tied, kind)
    plain = dataclasses.replace(config, padded_vocab_size=VOCAB)
    for output in llm.generate(prompts(8), SamplingParams(max_tokens=6, temperature=0)):
        assert output.error is None
        assert output.logits.shape == (6, VOCAB)
        right = forward(plain, params, [*output.prompt_ids, *output.token_ids])[
            len(output.prompt_ids) - 1 : -1
        ]
        assert np.abs(output.logits - right).max() < 1e-4 * np.abs(right).max()
        assert output.token_ids == tuple(output.logits.argmax(axis=-1))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 100.0},
        {"temperature": 1e9},  # every token is as likely as any other
        {"top_k": VOCAB},
        {"top_k": PADDED},
        {"top_p": 0.999, "temperature": 100.0},
        {"min_p": 0.01, "temperature": 100.0},
        {"repetition_penalty": 1e6, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logit_bias": dict.fromkeys(range(VOCAB), -100.0)},
        {"min_tokens": 12, "stop_token_ids": range(1, VOCAB)},
    ],
    ids=str,
)
def test_no_draw_ever_gives_a_padded_id(llm, fields):
    params = SamplingParams(**({"max_tokens": 12, "temperature": 1.0} | fields))
    drawn = {
        token
        for output in llm.generate(prompts(40), params)
        for token in output.token_ids
        if not output.error
    }
    assert drawn
    assert max(drawn) < VOCAB
    if params.temperature > 1e6:
        assert drawn == set(range(VOCAB))


def test_probabilities_sum_to_one_without_the_padding(llm):
    params = SamplingParams(max_tokens=3, temperature=1.0, logprobs=20, prompt_logprobs=20)
    for output in llm.generate(prompts(4), params):
        rows = output.logits.astype(np.float64)
        exact = rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
        for row, token, got in zip(exact, output.token_ids, output.logprobs, strict=True):
            assert got.logprob == pytest.approx(row[token], abs=1e-5)
            assert [i for i, _ in got.top] == np.argsort(-row, kind="stable")[:20].tolist()
        assert all(i < VOCAB for got in output.prompt_logprobs[1:] for i, _ in got.top)


@pytest.mark.parametrize("padded_id", [VOCAB, PADDED - 1])
@pytest.mark.parametrize(
    ("field", "request_of"),
    [
        ("prompt_ids", lambda i: ([0, i], {})),
        ("stop_token_ids", lambda i: ([0], {"stop_token_ids": [i]})),
        ("logit_bias", lambda i: ([0], {"logit_bias": {i: 100.0}})),
    ],
)
def test_a_request_cannot_name_a_padded_id(llm, field, request_of, padded_id):
    prompt, fields = request_of(padded_id)
    with pytest.raises(RequestRejected, match=f"{field} must be below vocab_size {VOCAB}, got {padded_id}"):
        llm.generate(prompt, SamplingParams(max_tokens=1, **fields))
    with pytest.raises(RequestRejected, match="output_ids must be below vocab_size"):
        llm.submit([0], SamplingParams(max_tokens=2), output_ids=[padded_id])
    assert not llm.has_work


def test_padding_does_not_count_as_a_token_that_is_left(llm):
    params = SamplingParams(max_tokens=2, min_tokens=1, stop_token_ids=range(VOCAB))
    with pytest.raises(RequestRejected, match="min_tokens must be 0 if every token ends the request"):
        llm.generate([0], params)


def test_weights_that_do_not_fit_are_listed_before_anything_is_compiled():
    config, padded, params = make(tied=False, kind="huge")
    unpadded = {name: jnp.asarray(x) for name, x in params.items()}
    message = (
        rf"^params do not fit the model \(float32\): wrong shape: embed.tokens is \({VOCAB}, 16\), "
        rf"the config needs \({PADDED}, 16\); wrong shape: head.kernel "
    )
    with pytest.raises(ConfigError, match=message):
        LLM.from_params(config, unpadded)
    halves = {name: jnp.asarray(x, "bfloat16") for name, x in padded.items()}
    with pytest.raises(ConfigError, match=r"wrong dtype: embed.tokens is bfloat16; wrong dtype: "):
        LLM.from_params(config, halves)
