import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jorca.config import BucketConfig
from jorca.engine.buckets import BucketLadder, ladder_sizes
from jorca.scheduler import SchedulerLimits


def limits(max_batch_size=8, max_batch_tokens=64, **more):
    sizes = {"max_in_flight": 1, "num_pages": 32, "page_size": 4, "max_positions": 32} | more
    return SchedulerLimits(max_batch_size=max_batch_size, max_batch_tokens=max_batch_tokens, **sizes)


def test_powers_of_two_by_default():
    assert ladder_sizes(64, 8, BucketConfig()) == (1, 2, 4, 8, 16, 32, 64)


def test_top_and_full_batch_are_buckets_even_if_they_are_not_powers_of_two():
    assert ladder_sizes(317, 12, BucketConfig()) == (1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 317)


def test_a_small_top_needs_one_bucket():
    assert ladder_sizes(1, 8, BucketConfig()) == (1,)
    assert ladder_sizes(3, 8, BucketConfig(min_bucket=16)) == (3,)


def test_min_bucket_is_the_smallest():
    assert ladder_sizes(64, 8, BucketConfig(min_bucket=16)) == (16, 32, 64)


def test_the_number_of_programs_is_the_length_of_the_ladder():
    ladder = BucketLadder(limits(max_batch_size=32, max_batch_tokens=2048), BucketConfig())
    assert len(ladder.buckets) == 12  # 2^0 .. 2^11: a sum, no product of token and request sizes


@settings(deadline=None, derandomize=True, database=None)
@given(
    max_tokens=st.integers(1, 700),
    max_batch_size=st.integers(1, 80),
    min_bucket=st.integers(1, 70),
    ratio=st.floats(1.01, 5),
)
def test_every_batch_the_scheduler_can_emit_has_the_smallest_bucket_that_holds_it(
    max_tokens, max_batch_size, min_bucket, ratio
):
    config = BucketConfig(min_bucket=min_bucket, bucket_ratio=ratio)
    ladder = BucketLadder(limits(max_batch_size, max_tokens), config)
    sizes = [bucket.num_tokens for bucket in ladder.buckets]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_tokens
    for low, high in itertools.pairwise(sizes):
        assert high <= max(low * ratio, low + 1)
    for num_tokens in range(1, max_tokens + 1):
        bucket = ladder.bucket_for(num_tokens)
        assert bucket in ladder.buckets
        assert bucket.num_tokens == min(size for size in sizes if size >= num_tokens)
        # Each of at most max_batch_size requests feeds a token or more, and needs a row of logits or none.
        assert bucket.num_rows >= min(num_tokens, max_batch_size)


@pytest.mark.parametrize("num_tokens", [0, -1, 65])
def test_sizes_that_cannot_come_are_refused(num_tokens):
    with pytest.raises(ValueError, match=f"between 1 and 64, got {num_tokens}"):
        BucketLadder(limits(), BucketConfig()).bucket_for(num_tokens)


def test_page_table_holds_a_whole_context():
    (bucket, *_) = BucketLadder(limits(page_size=5, max_positions=32), BucketConfig()).buckets
    assert bucket.max_pages == 7  # ceil(32 / 5)
