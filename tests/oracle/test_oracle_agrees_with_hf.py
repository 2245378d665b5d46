"""Two independent sources of right logits, plain numpy and Hugging Face, say the same."""

import dataclasses

import numpy as np
import pytest

from jorca.config import ModelConfig
from jorca.model.params import param_table
from oracle.golden import GoldenCase, golden_cases
from oracle.numpy_gpt import forward, random_params

CASES = {case.name: case for case in golden_cases()}
BOUND = 1e-5
"""Largest difference, as a share of the largest logit: what float32 sums of this size may lose."""


def difference(case: GoldenCase, config: ModelConfig) -> float:
    """Largest difference between numpy under `config` and the case's logits, as a share of the largest."""
    return max(
        float(np.abs(forward(config, case.params, ids) - logits).max() / np.abs(logits).max())
        for ids, logits in case.sequences
    )


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_numpy_and_hugging_face_agree(case):
    assert difference(case, case.config) < BOUND


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_golden_weights_are_exactly_those_of_the_parameter_table(case):
    table = param_table(case.config)
    assert {name: weight.shape for name, weight in case.params.items()} == {
        name: info.shape for name, info in table.items()
    }
    assert {weight.dtype for weight in case.params.values()} == {np.dtype(np.float32)}


def test_golden_cases_use_the_whole_context_and_vary_every_flag():
    configs = [case.config for case in CASES.values()]
    for case in CASES.values():
        assert max(len(ids) for ids, _ in case.sequences) == case.config.max_positions
    for flag in ("activation", "tie_embeddings", "scale_attention", "scale_attention_by_inverse_layer"):
        assert len({getattr(config, flag) for config in configs}) == 2, flag
    assert len({config.norm_epsilon for config in configs}) == 3
    assert any(config.d_ff != 4 * config.d_model for config in configs)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gpt2", {"activation": "gelu_erf"}),
        ("gpt2", {"norm_epsilon": 1e-6}),
        ("gpt2", {"scale_attention": False}),
        ("gpt2", {"scale_attention_by_inverse_layer": True}),
        ("gpt2", {"use_bias": False}),
        ("large_epsilon", {"norm_epsilon": 1e-5}),
        ("exact_gelu", {"activation": "gelu_tanh"}),
        ("unscaled_scores", {"scale_attention": True}),
        ("scores_by_inverse_layer", {"scale_attention_by_inverse_layer": False}),
        ("untied_head", {"tie_embeddings": True}),
        ("everything", {"activation": "gelu_tanh"}),
        ("everything", {"norm_epsilon": 1e-5}),
        ("everything", {"scale_attention": True}),
        ("everything", {"scale_attention_by_inverse_layer": False}),
        ("everything", {"tie_embeddings": True}),
        ("everything", {"use_bias": False}),
    ],
)
def test_a_flag_turned_the_wrong_way_shows(name, wrong):
    case = CASES[name]
    assert difference(case, dataclasses.replace(case.config, **wrong)) > 10 * BOUND


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_without_biases_is_the_same_as_with_biases_of_zero(tie_embeddings):
    biased = ModelConfig(
        vocab_size=37, max_positions=9, num_layers=2, num_heads=2, d_model=8, tie_embeddings=tie_embeddings
    )
    bare = dataclasses.replace(biased, use_bias=False)
    params = random_params(bare, seed=3)
    zeros = {n: np.zeros(i.shape, np.float32) for n, i in param_table(biased).items() if n.endswith(".bias")}
    ids = np.arange(9) * 4
    np.testing.assert_array_equal(forward(bare, params, ids), forward(biased, params | zeros, ids))


def test_random_params_depend_on_the_seed_and_fill_the_table():
    config = ModelConfig(vocab_size=37, max_positions=9, num_layers=2, num_heads=2, d_model=8, d_ff=12)
    params, again, other = (random_params(config, seed) for seed in (0, 0, 1))
    assert {n: w.shape for n, w in params.items()} == {n: i.shape for n, i in param_table(config).items()}
    for name, weight in params.items():
        np.testing.assert_array_equal(weight, again[name])
        assert (weight != other[name]).all(), name


@pytest.mark.parametrize(
    "wrong",
    [
        {"activation": "gelu_erf"},
        {"norm_epsilon": 1e-6},
        {"scale_attention": False},
        {"scale_attention_by_inverse_layer": True},
        {"use_bias": False},
    ],
    ids=str,
)
def test_random_params_let_every_flag_show(wrong):
    config = ModelConfig(vocab_size=53, max_positions=16, num_layers=3, num_heads=2, d_model=16)
    params = random_params(config, seed=0)
    ids = np.arange(16) * 3
    right, shown = forward(config, params, ids), forward(dataclasses.replace(config, **wrong), params, ids)
    assert np.abs(right - shown).max() > 10 * BOUND * np.abs(right).max()
