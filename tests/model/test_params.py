"""Whether weights fit the parameter table, and what is missing of a padded vocabulary."""

import dataclasses

import numpy as np
import pytest

from jorca.config import DTYPE_BYTES, ModelConfig
from jorca.model.params import mismatches, num_params, pad_widths, param_bytes, param_table

CONFIG = ModelConfig(
    vocab_size=7, padded_vocab_size=10, max_positions=5, num_layers=1, num_heads=2, d_model=6, dtype="float16"
)


def arrays(config: ModelConfig = CONFIG, **changes):
    made = {name: np.zeros(info.shape, info.dtype) for name, info in param_table(config).items()}
    return {name: x for name, x in (made | changes).items() if x is not None}


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_weights_have_the_dtype_of_the_model_and_as_many_bytes(dtype):
    config = dataclasses.replace(CONFIG, dtype=dtype)
    assert {info.dtype for info in param_table(config).values()} == {dtype}
    assert param_bytes(config) == num_params(config) * DTYPE_BYTES[dtype]
    assert param_bytes(config) == sum(x.nbytes for x in arrays(config).values())


def test_weights_that_fit_have_no_problems():
    assert mismatches(CONFIG, arrays()) == []


def test_every_problem_is_listed():
    wrong = {
        "final_norm.bias": None,
        "head.kernel": np.zeros((10, 6), np.float16),
        "embed.positions": np.zeros((4, 6), np.float16),
        "layers.0.mlp.up.bias": np.zeros(24, np.float32),
        "layers.0.mlp.down.bias": np.zeros((), np.float16),
    }
    problems = [
        "missing: final_norm.bias",
        "not part of this model: head.kernel",
        "wrong shape: embed.positions is (4, 6), the config needs (5, 6)",
        "wrong dtype: layers.0.mlp.up.bias is float32",
        "wrong shape: layers.0.mlp.down.bias is (), the config needs (6,)",
    ]
    assert mismatches(CONFIG, arrays(**wrong)) == problems
    assert mismatches(CONFIG, arrays(**wrong), any_dtype=True) == [p for p in problems if "dtype" not in p]


@pytest.mark.parametrize(("rows", "fits"), [(6, False), (7, True), (9, True), (10, True), (11, False)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_may_lack_rows_of_padding_and_no_others(rows, fits, tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    for name in ("embed.tokens",) if tied else ("embed.tokens", "head.kernel"):
        found = arrays(config, **{name: np.zeros((rows, 6), np.float16)})
        assert (mismatches(config, found, may_lack_padding=True) == []) == fits
        assert (mismatches(config, found) == []) == (rows == 10)
    short = arrays(config, **{"embed.positions": np.zeros((4, 6), np.float16)})
    assert len(mismatches(config, short, may_lack_padding=True)) == 1


def test_padding_is_zeros_behind_the_rows_that_are_there():
    x = np.ones((7, 6))
    padded = np.pad(x, pad_widths(x.shape, 10))
    np.testing.assert_array_equal(padded, np.concatenate([x, np.zeros((3, 6))]))
    assert np.pad(np.ones(7), pad_widths((7,), 10)).tolist() == [1] * 7 + [0] * 3
