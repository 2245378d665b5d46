"""`assert_same_up_to_rounding`: hand-made outputs at the bound and beyond it, and real runs."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from engine.device import stage_of, tiny_llm
from jorca import SamplingParams
from jorca.testing import LOGITS_BOUND, TINY, assert_same_up_to_rounding

BOUND = LOGITS_BOUND["float32"]
DTYPES = pytest.mark.parametrize("dtype", LOGITS_BOUND)


@dataclasses.dataclass
class Output:
    """What the comparison looks at."""

    token_ids: tuple[int, ...]
    logits: Any
    request_id: str = "anna"
    finish_reason: str | None = "length"


def output(rows, **changes) -> Any:
    """A request that takes the best token of every row."""
    logits = np.array(rows, np.float32)
    return Output(**{"token_ids": tuple(logits.argmax(-1).tolist()), "logits": logits, **changes})


# Largest numbers of 8 and 1: what is allowed is exact in float32.
ROWS = [[0, 8, 1, 2], [-8, 0, 1, 2], [0, 0.5, -1, 0.25]]


def check(rows, its_rows=ROWS, dtype="float32", **changes):
    assert_same_up_to_rounding([output(rows)], [output(its_rows, **changes)], dtype)


def moved(position, token, by):
    """The rows with one number moved."""
    rows = np.array(ROWS, np.float32)
    rows[position, token] += by
    return rows


@DTYPES
def test_the_same_is_the_same(dtype):
    check(ROWS, dtype=dtype)
    assert_same_up_to_rounding([], [], dtype)


@DTYPES
@pytest.mark.parametrize(("position", "largest"), [(0, 8), (1, 8), (2, 1)])
@pytest.mark.parametrize("sign", [1, -1])
def test_logits_may_differ_by_the_bound_times_the_largest_of_their_row(dtype, position, largest, sign):
    allowed = sign * LOGITS_BOUND[dtype] * largest
    check(ROWS, moved(position, 1, allowed), dtype)
    with pytest.raises(AssertionError, match=f"request 'anna': position {position}: logits differ by"):
        check(ROWS, moved(position, 1, 1.01 * allowed), dtype)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_is_no_rounding(bad):
    with pytest.raises(AssertionError, match="position 1: logits differ"):
        check(ROWS, moved(1, 2, bad), token_ids=(1, 3, 1))


@DTYPES
@pytest.mark.parametrize("with_logits", [True, False])
def test_tokens_may_part_within_twice_the_bound_and_nothing_is_compared_behind(dtype, with_logits):
    allowed = 8 * LOGITS_BOUND[dtype]
    rows, its = np.array(ROWS, np.float32), np.array(ROWS, np.float32)
    rows[1] = [-8, 0, 2 - 2 * allowed, 2]
    its[1] = [-8, 0, 2 - allowed, 2 - allowed]
    its[2] = [9, 0, 0, 0]
    changes: dict[str, Any] = {} if with_logits else {"logits": None}
    tokens = tuple(its.argmax(-1).tolist())
    assert tokens[1:] == (2, 0)
    check(rows, its, dtype, token_ids=tokens, finish_reason="stop", **changes)
    shorter = {"token_ids": tokens[:2], "logits": its[:2] if with_logits else None}
    check(rows, its, dtype, **shorter)


@DTYPES
@pytest.mark.parametrize("with_logits", [True, False])
def test_tokens_that_part_at_a_clear_gap_are_named(dtype, with_logits):
    changes: dict[str, Any] = {} if with_logits else {"logits": None}
    allowed = 8 * LOGITS_BOUND[dtype]
    rows = np.array(ROWS, np.float32)
    rows[1] = [-8, 0, 2 - 2.1 * allowed, 2]
    message = (
        "request 'anna': position 1: expected token 3, got 2; the gap to the best logit is .*, more than "
    )
    with pytest.raises(AssertionError, match=message):
        check(rows, rows, dtype, token_ids=(1, 2, 1), **changes)


def test_a_token_far_from_the_best_is_wrong_even_where_two_others_tie():
    rows = [[8, 8, 0]]
    check(rows, rows, token_ids=(1,))
    with pytest.raises(AssertionError, match="expected token 0, got 2; the gap to the best logit is 8"):
        check(rows, rows, token_ids=(2,))


def test_logits_are_compared_where_tokens_part_too():
    rows, its = [[8, 8, 0]], [[8, 8, 8 * BOUND * 2]]
    with pytest.raises(AssertionError, match="position 0: logits differ"):
        check(rows, its, token_ids=(1,))


@pytest.mark.parametrize("with_logits", [True, False])
def test_without_a_difference_lengths_must_agree(with_logits):
    short = output(ROWS[:2], **({} if with_logits else {"logits": None}))
    with pytest.raises(AssertionError, match="request 'anna': expected 3 tokens, got 2"):
        assert_same_up_to_rounding([output(ROWS)], [short], "float32")
    with pytest.raises(AssertionError, match="request 'anna': expected 2 tokens, got 3"):
        assert_same_up_to_rounding([output(ROWS[:2])], [output(ROWS)], "float32")


def test_without_a_difference_the_ends_must_agree():
    with pytest.raises(AssertionError, match="request 'anna': expected the end 'length', got 'stop'"):
        check(ROWS, finish_reason="stop")


def test_the_request_that_differs_is_named():
    names = "anna", "bert", "carl"
    right = [output(ROWS, request_id=name) for name in names]
    got = [output(ROWS), output(ROWS, token_ids=(1, 3, 0)), output(ROWS)]
    with pytest.raises(AssertionError, match="request 'bert': position 2: expected token 1, got 0"):
        assert_same_up_to_rounding(right, got, "float32")
    with pytest.raises(AssertionError, match="expected 3 outputs, got 2"):
        assert_same_up_to_rounding(right, got[:2], "float32")


def test_logits_that_are_missing_are_asked_for():
    for logits in (None, np.zeros((2, 4), np.float32)):
        with pytest.raises(AssertionError, match="request 'anna': expected a row of logits"):
            assert_same_up_to_rounding([output(ROWS, logits=logits)], [output(ROWS)], "float32")
    with pytest.raises(AssertionError, match="request 'anna': got 2 rows of logits for 3 tokens"):
        assert_same_up_to_rounding(
            [output(ROWS)], [output(ROWS, logits=np.zeros((2, 4), np.float32))], "float32"
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_runs_alone_and_together_are_the_same_up_to_rounding(dtype):
    # Wide enough for sums in another order: one row has fewer than 4,096 numbers, and 16 have more.
    config = dataclasses.replace(TINY, d_model=512, dtype=dtype)
    sizes = {"min_bucket": 1, "bucket_ratio": 16.0, "max_batch_size": 16, "max_batch_tokens": 16}
    llm = tiny_llm(config, **sizes)
    assert [bucket.num_tokens for bucket in stage_of(llm).programs] == [1, 16]
    prompts = [[5], [3, 1, 4, 1, 5, 9, 2], [60, 2, 8]]
    greedy = SamplingParams(max_tokens=12, temperature=0)
    expected = [llm.generate(prompt, greedy)[0] for prompt in prompts]  # single tokens run in one row
    got = llm.generate(prompts, greedy)
    assert not all(np.array_equal(a.logits, b.logits) for a, b in zip(expected, got, strict=True))
    assert_same_up_to_rounding(expected, got, dtype)
    louder: Any = [Output(o.token_ids, 1.2 * o.logits, finish_reason=o.finish_reason) for o in got]
    with pytest.raises(AssertionError, match="position 0: logits differ"):
        assert_same_up_to_rounding(expected, louder, dtype)
