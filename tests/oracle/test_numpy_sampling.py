"""The sampling oracle on rows small enough to work out by hand."""

import numpy as np
import pytest

from oracle.numpy_sampling import kept, probabilities

EIGHTHS = np.log([1 / 8, 1 / 2, 1 / 4, 1 / 8])
"""Token 1 has half, token 2 a quarter, tokens 0 and 3 an eighth each."""


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {0, 1, 2}),  # tokens 0 and 3 tie; the lower id stays
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.4}, {1}),
        ({"top_p": 0.6}, {1, 2}),
        ({"top_p": 0.8}, {0, 1, 2}),  # the tie again
        ({"top_p": 0.9}, {0, 1, 2, 3}),
        ({"top_k": 2, "top_p": 0.6}, {1}),  # of what top_k left, token 1 has two thirds
        ({"top_k": 2, "top_p": 0.7}, {1, 2}),
        ({"min_p": 0.4}, {1, 2}),
        ({"min_p": 0.6}, {1}),
        ({"min_p": 1.0}, {1}),
        ({"min_p": 0.2}, {0, 1, 2, 3}),
        ({"top_k": 3, "min_p": 0.4}, {1, 2}),
        ({"top_p": 0.7, "min_p": 0.2}, {1, 2}),
    ],
    ids=str,
)
def test_filters_keep_what_the_definition_says(filters, expected):
    assert set(np.flatnonzero(kept(EIGHTHS, 1.0, **filters))) == expected


def test_temperature_comes_before_top_p():
    # At temperature 1/2 probabilities are squared: 16/22, 4/22, 1/22 and 1/22.
    assert set(np.flatnonzero(kept(EIGHTHS, 0.5, top_p=0.7))) == {1}
    assert set(np.flatnonzero(kept(EIGHTHS, 1.0, top_p=0.7))) == {1, 2}
    np.testing.assert_allclose(probabilities(EIGHTHS, 0.5), np.array([1, 16, 4, 1]) / 22, rtol=1e-14)


def test_temperature_comes_before_min_p():
    assert set(np.flatnonzero(kept(EIGHTHS, 0.5, min_p=0.3))) == {1}
    assert set(np.flatnonzero(kept(EIGHTHS, 1.0, min_p=0.3))) == {1, 2}


def test_probabilities_are_renormalised_over_what_is_kept():
    np.testing.assert_allclose(probabilities(EIGHTHS, 1.0, top_k=3), [1 / 7, 4 / 7, 2 / 7, 0], rtol=1e-14)


def test_temperature_zero_is_the_lowest_of_the_best_and_ignores_the_filters():
    row = np.array([0.0, 3.0, 3.0, -1.0])
    np.testing.assert_array_equal(probabilities(row, 0.0, top_k=4, top_p=0.9, min_p=0.5), [0, 1, 0, 0])


def test_a_top_p_of_one_keeps_tokens_whose_probability_rounds_to_nothing():
    assert kept(np.array([0.0, -1000.0]), 1.0).all()


def test_a_row_of_equal_logits_is_cut_by_id():
    assert set(np.flatnonzero(kept(np.zeros(10), 1.0, top_p=0.45))) == {0, 1, 2, 3, 4}
    np.testing.assert_allclose(probabilities(np.zeros(10), 1.0), np.full(10, 0.1))
